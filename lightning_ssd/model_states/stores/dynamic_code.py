"""8-bit optimizer states: blocks of 256 elements with an fp32 scale each, in the dynamic code of bitsandbytes.

A value is a number of the code times the scale of its block. The numbers of the code are between -1 (first moments) or
0 (second moments) and 1, the denser the nearer to 0. A scale is the value of largest magnitude, with its sign, because
the code has 1 and not -1. So values that were decoded are encoded to the same values.

- Values are rounded to the nearest number of the code, ties towards 0; but a second moment other than 0 never to 0, as
  a step divides by its root.
- A block whose values are below 2^-126 is 0.
- A block with a NaN or an infinity is NaN: 256 weights become NaN, and the loss shows it.

Blocks count from the first element of each parameter. adam.c has the same functions.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a block."""

_CHUNK = 2**20
"""Elements that are encoded or decoded at a time."""

_BUCKET_BITS = 16
"""Bits of an fp32 number below those that number its bucket in `nearest_table`."""
FIRST_BUCKET = (127 - 25) << 7
"""The upper bits of 2^-25, below which every number is rounded to 0."""
_LAST_BUCKET = 127 << 7
"""The upper bits of 1."""


@functools.cache
def code_magnitudes(*, signed: bool) -> Tensor:
    """Returns the numbers of the code from 0 to 1, fp32: 129 of the signed code, 256 of the unsigned one."""
    numbers = [torch.zeros(1, dtype=torch.float64, device="cpu")]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        bounds = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64, device="cpu")
        numbers.append(10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2)
    return torch.cat([*numbers, torch.ones(1, dtype=torch.float64, device="cpu")]).float()


@functools.cache
def code_numbers(*, signed: bool) -> Tensor:
    """Returns the 256 numbers of the code in ascending order, fp32, by their 8-bit codes."""
    magnitudes = code_magnitudes(signed=signed)
    return torch.cat([-magnitudes[1:-1].flip(0), magnitudes]) if signed else magnitudes


@functools.cache
def _thresholds(*, signed: bool) -> Tensor:
    """Returns the midpoints of neighbours in `code_magnitudes`: a number above one of them is rounded up."""
    magnitudes = code_magnitudes(signed=signed).double()
    return ((magnitudes[:-1] + magnitudes[1:]) / 2).float()


@functools.cache
def nearest_table(*, signed: bool) -> Tensor:
    """Returns, for each bucket of fp32 numbers of equal upper 16 bits from 2^-25 to 1, the rounding of its numbers.

    An entry has the index of the magnitude to which the least number of the bucket is rounded (`code_magnitudes`) in
    its upper 16 bits, and in its lower ones the largest lower bits that are rounded to the same magnitude.
    """
    thresholds = _thresholds(signed=signed)
    buckets = torch.arange(FIRST_BUCKET, _LAST_BUCKET + 1, dtype=torch.int32, device="cpu")
    low, high = ((buckets << _BUCKET_BITS) + offset for offset in (0, 0xFFFF))
    first, last = (torch.bucketize(bits.view(torch.float32), thresholds) for bits in (low, high))
    last[-1] = first[-1]  # of this bucket, 1 is the only number
    assert int((last - first).max()) == 1
    crossed = thresholds[first.clamp(max=len(thresholds) - 1)].view(torch.int32) & 0xFFFF
    return (first << _BUCKET_BITS | torch.where(last > first, crossed, 0xFFFF)).to(torch.int32)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Returns the fp32 values of codes, which begin with a block, and of their scales; without memory on `meta`."""
    values = torch.empty_like(codes, dtype=torch.float32)
    if codes.is_meta:
        return values
    for part, blocks in _chunks(len(codes)):
        numbers = code_numbers(signed=signed)[codes[part].int()]
        values[part] = numbers * scales[blocks].repeat_interleave(BLOCK)[: len(numbers)]
    return values


def encode(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Encodes fp32 values, which begin with a block, to `codes` and `scales`."""
    for part, blocks in _chunks(len(values)):
        _encode_chunk(values[part], codes[part], scales[blocks], signed=signed)


def _chunks(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yields the elements and blocks of chunks, whose temporary tensors need little memory."""
    for start in range(0, numel, _CHUNK):
        end = min(start + _CHUNK, numel)
        yield slice(start, end), slice(start // BLOCK, -(-end // BLOCK))


def _encode_chunk(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    blocks = torch.zeros(len(scales) * BLOCK, dtype=torch.float32, device="cpu")
    blocks[: len(values)] = values
    blocks = blocks.view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    scale = torch.where(blocks.amax(1) == largest, largest, -largest) if signed else largest
    finite = largest.isfinite()
    scales.copy_(torch.where(finite, torch.where(largest < 2.0**-126, 0.0, scale), torch.nan))
    coded = (finite & (largest >= 2.0**-126))[:, None]
    relative = torch.where(coded, blocks * (1 / scale)[:, None], 0.0)
    magnitudes = torch.bucketize(relative.abs(), _thresholds(signed=signed))
    if signed:
        found = torch.where(relative < 0, 127 - magnitudes.clamp(max=127), 127 + magnitudes)
    else:
        found = torch.where(relative > 0, magnitudes.clamp(min=1), 0)
    codes.copy_(found.view(-1)[: len(values)])
