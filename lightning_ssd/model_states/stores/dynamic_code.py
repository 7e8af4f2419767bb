"""8-bit optimizer states: blocks of 256 elements with an fp32 scale each, in the dynamic code of bitsandbytes.

A value is a number of the code times the scale of its block. The numbers are between -1 (first moments) or 0 (second
moments) and 1. A scale is the value of largest magnitude, with its sign, because the code has 1 and not -1.

The magnitudes from 1e-7 to 1 are seven decades, each with twice as many numbers as the one below, evenly spaced: a
number is the centre of an interval, and stands for all values in it. So a decade's numbers are a linear function of
their positions, and the position of a value is the integer part of the inverse function. Of all decades' functions, the
value's own has the least result. They take multiplications instead of tables, so that vectors of values are encoded.

- A value's number is at most half an interval away, and a second moment other than 0 never has the number 0, as a step
  divides by its root. Values that were decoded are encoded to the same values.
- A block whose values are below 2^-126 is 0.
- A block with a NaN or an infinity is NaN: 256 weights become NaN, and the loss shows it.

Blocks count from the first element of each parameter. adam.c has the same functions.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Elements of a block."""

_CHUNK = 2**20
"""Elements that are encoded or decoded at a time."""

_DECADES = 7
_MARGIN = 1 + 2.0**-20
"""Factor of values, by which the largest one of a block has the position of 1 though its quotient was rounded."""


def _counts(signed: bool) -> list[int]:
    """Returns how many numbers each decade has. It is the position of the first one, too."""
    return [2 ** (decade if signed else decade + 1) for decade in range(_DECADES)]


def _zero(signed: bool) -> int:
    """Returns the position of 0. The position of 1 is the next one after the last decade."""
    return 0 if signed else 1


@functools.cache
def _lines(*, signed: bool) -> Tensor:
    """Returns two lines for each decade, fp32: slope and offset of numbers by position, and of positions by magnitude.

    The position of a second moment is less by that of 0, which makes it the code.
    """
    rows = []
    for decade, count in enumerate(_counts(signed)):
        top = 10.0 ** (decade - _DECADES + 1)
        slope = 0.9 * top / count
        rows.append((slope, top * (0.45 / count - 0.8), _MARGIN / slope, count * 8 / 9 - _zero(signed)))
    return torch.tensor(rows, dtype=torch.float32, device="cpu").T.contiguous()


def _on_line(values: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Returns slope * values + offset, rounded to fp32 once: where the line is the value's own, fp64 is exact."""
    return (values.double() * slope.double() + offset.double()).float()


@functools.cache
def code_numbers(*, signed: bool) -> Tensor:
    """Returns the 256 numbers of the code in ascending order, fp32, by their 8-bit codes."""
    slopes, offsets, _, _ = _lines(signed=signed)
    ends = [torch.tensor([value], dtype=torch.float32, device="cpu") for value in (0.0, 1.0)]
    decades = []
    for decade, count in enumerate(_counts(signed)):
        positions = torch.arange(count, 2 * count, dtype=torch.float32, device="cpu")
        decades.append(_on_line(positions, slopes[decade], offsets[decade]))
    magnitudes = torch.cat([ends[0], *decades, ends[1]])
    return torch.cat([-magnitudes[1:-1].flip(0), magnitudes]) if signed else magnitudes


@functools.cache
def code_table(*, signed: bool) -> Tensor:
    """Returns `DynamicCode` of adam.c, fp32.

    It has slope and offset of the number at a position by the lower four bits of the position's exponent as an fp32
    number, slope and offset of the position of a magnitude by decade, `code_numbers`, and slopes and offsets of two
    decades by the lower four bits of half the exponent of a magnitude, which belongs to one of them. Positions of
    first moments are multiplied by 4, so that 0, which is in no decade, has an exponent of its own.
    """
    slopes, offsets, rises, starts = _lines(signed=signed)
    factor = 4 if signed else 1
    by_position = torch.zeros(2, 16, dtype=torch.float32, device="cpu")
    for decade, count in enumerate(_counts(signed)):
        exponent = 126 + (factor * count).bit_length()
        by_position[0, exponent % 16], by_position[1, exponent % 16] = slopes[decade] / factor, offsets[decade]
    by_position[1, (exponent + 1) % 16] = 1.0
    by_decade = torch.zeros(2, 8, dtype=torch.float32, device="cpu")
    by_decade[0, :_DECADES], by_decade[1, :_DECADES] = rises, starts
    by_magnitude = torch.zeros(2, 2, 16, dtype=torch.float32, device="cpu")
    for half in range(51, 64):  # magnitudes from 2^-25, below the least decade, to 2
        for other, magnitude in enumerate((2.0 ** (2 * half - 127), 2.0 ** (2 * half - 125))):
            decade = min(max(math.floor(math.log10(magnitude)) + _DECADES, 0), _DECADES - 1)
            by_magnitude[0, other, half % 16], by_magnitude[1, other, half % 16] = rises[decade], starts[decade]
    tables = by_position, by_decade, code_numbers(signed=signed), by_magnitude
    return torch.cat([table.flatten() for table in tables])


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Returns the fp32 values of codes, which begin with a block, and of their scales; without memory on `meta`."""
    values = torch.empty_like(codes, dtype=torch.float32)
    if codes.is_meta:
        return values
    numbers, whole = code_numbers(signed=signed), len(codes) // BLOCK
    for part, blocks in _chunks(whole * BLOCK):
        torch.index_select(numbers, 0, codes[part].int(), out=values[part])
        values[part].view(-1, BLOCK).mul_(scales[blocks, None])
    rest = codes[whole * BLOCK :].int()  # of the last block, which may be shorter
    values[whole * BLOCK :] = numbers[rest] * scales[whole : whole + 1]
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
    magnitudes = relative.abs() if signed else relative
    _, _, rises, starts = _lines(signed=signed)
    lines = [_on_line(magnitudes, rise, start) for rise, start in zip(rises, starts, strict=True)]
    positions = functools.reduce(torch.minimum, lines).int()
    if signed:
        found = (127 + torch.where(relative < 0, -positions, positions)).clamp(min=0)
    else:
        found = torch.where(relative > 0, positions.clamp(min=1), 0)
    codes.copy_(found.view(-1)[: len(values)])
