"""8-bit optimizer states: blocks of 256 elements with an fp32 scale each, in the dynamic code of bitsandbytes.

A value is a number of the code times the scale of its block. The numbers are between -1 (first moments) or 0 (second
moments) and 1. A scale is the value of largest magnitude, with its sign, because the code has 1 and not -1.

The magnitudes from 1e-7 to 1 are seven decades, each with twice as many intervals as the one below, evenly spaced: a
number is the centre of an interval, and stands for all values in it. Both directions take few instructions for a vector
of values, and no division:

- The numbers are rounded to the upper 24 bits of fp32, which are looked up as three bytes.
- The position of a number is computed from the key of a value's magnitude relative to the scale: the lower five bits of
  its exponent, and 11 of its mantissa. In keys of one exponent and one decade, it is a linear function.

- A value's number is at most 0.57 of an interval away, where the nearest one would be at most 0.5 away, and a second
  moment other than 0 never has the number 0, as a step divides by its root. Values that were decoded are encoded to the
  same values.
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

_LEAST = 2.0**-25
"""Magnitude that those below it have instead, relative to the scale: all of them have the same position."""

_EXPONENTS = range(6, 32)
"""Lower five bits of the exponents of fp32 numbers from `_LEAST` to 1."""

_MANTISSA = 11
"""Bits of the mantissa in a key."""

_LINES = 32
"""Lines by exponent; as many again are for the keys from the end of a decade on."""


def _count(decade: int, signed: bool) -> int:
    """Returns how many numbers a decade has. It is the position of the first one, too, less that of 0."""
    return 1 << decade if signed else 2 << decade


def _zero(signed: bool) -> int:
    """Returns the position of 0. The position of 1 is the next one after the last decade."""
    return 0 if signed else 1


def _fraction(signed: bool) -> int:
    """Returns how many bits a position has behind the point, where it is computed."""
    return 5 if signed else 4


@functools.cache
def code_numbers(*, signed: bool) -> Tensor:
    """Returns the 256 numbers of the code in ascending order, fp32, by their 8-bit codes."""
    magnitudes = []
    for decade in range(_DECADES):
        count, top = _count(decade, signed), 10.0 ** (decade - _DECADES + 1)
        magnitudes += [top * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
    exact = torch.tensor([*magnitudes, 1.0], dtype=torch.float32, device="cpu").view(torch.int32)
    rounded = (exact + 0x80 & ~0xFF).view(torch.float32)
    zero = torch.zeros(1, dtype=torch.float32, device="cpu")
    return torch.cat([-rounded[:-1].flip(0), zero, rounded] if signed else [zero, rounded])


def _magnitude(key: int) -> float:
    """Returns the middle of the magnitudes that have a key."""
    exponent, mantissa = key >> _MANTISSA, key & 2**_MANTISSA - 1
    return math.ldexp(1 + (mantissa + 0.5) / 2**_MANTISSA, exponent - _EXPONENTS[-1])


def _decade(key: int) -> int:
    """Returns the decade of a key; -1: below all decades, and `_DECADES`: that of 1.

    The last key below 1 counts as 1, because the quotient of the largest value and itself is rounded.
    """
    if key >= (_EXPONENTS[-1] << _MANTISSA) - 1:
        return _DECADES
    return max(math.floor(math.log10(_magnitude(key))) + _DECADES, -1)


def _position(key: int, signed: bool) -> float:
    """Returns the position of the middle of a key's magnitudes."""
    decade = _decade(key)
    if decade < 0:  # 0, or the least second moment
        return 0.0 if signed else 1.0
    count = _count(decade, signed)
    share = (_magnitude(key) * 10.0 ** (_DECADES - 1 - decade) - 0.1) / 0.9 if decade < _DECADES else 0.0
    return count * (1 + share) - _zero(signed)


@functools.cache
def _lines(*, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the first key of each exponent that is in a higher decade, slopes and starts of all lines; int32.

    The position of a key is the upper half of its 32-bit product with the slope, and the start, modulo 2^16.
    """
    ends, slopes, starts = [2**16 - 1] * _LINES, [0] * 2 * _LINES, [0] * 2 * _LINES
    fraction = _fraction(signed)
    for exponent in _EXPONENTS:
        keys = range(exponent << _MANTISSA, exponent + 1 << _MANTISSA)
        end = next((key for key in keys if _decade(key) != _decade(keys[0])), keys.stop)
        parts = [(exponent, keys[: end - keys[0]])]
        if end < keys.stop:
            ends[exponent] = end
            parts.append((exponent + _LINES, keys[end - keys[0] :]))
        for line, part in parts:
            first, middle, last = part[0], part[len(part) // 2], part[-1]
            rise = _position(last, signed) - _position(first, signed)
            slopes[line] = round(rise / max(1, last - first) * 2 ** (fraction + 16))
            # Both the product and the position are rounded down, so that intervals end where those of the numbers do.
            starts[line] = round(_position(middle, signed) * 2**fraction - middle * slopes[line] / 2**16)
            # Rounding leads to no position of another decade.
            found = [(key * slopes[line] >> 16) + starts[line] for key in (first, last)]
            lowest, highest = (math.floor(_position(key, signed) * 2**fraction) for key in (first, last))
            if _decade(part.stop) != _decade(first):
                starts[line] -= max(0, found[1] - highest)
            elif _decade(first - 1) != _decade(first):
                starts[line] += max(0, lowest - found[0])
            starts[line] %= 2**16
    made = [torch.tensor(values, dtype=torch.int32, device="cpu") for values in (ends, slopes, starts)]
    return made[0], made[1], made[2]


@functools.cache
def code_table(*, signed: bool) -> Tensor:
    """Returns `DynamicCode` of adam.c, bytes: `code_numbers`, their upper three bytes, and `_lines`."""
    numbers = code_numbers(signed=signed)
    looked_up = numbers.view(torch.uint8).view(-1, 4)[:, 1:].T.contiguous()
    lines = torch.cat(_lines(signed=signed)).to(torch.uint16)
    return torch.cat([table.flatten().view(torch.uint8) for table in (numbers, looked_up, lines)])


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
    scale = torch.where(blocks.amin(1) == -largest, -largest, largest) if signed else largest
    finite = largest.isfinite()
    scales.copy_(torch.where(finite, torch.where(largest < 2.0**-126, 0.0, scale), torch.nan))
    coded = (finite & (largest >= 2.0**-126))[:, None]
    relative = torch.where(coded, blocks * (1 / scale)[:, None], 0.0)
    keys = relative.abs().clamp(min=_LEAST).view(torch.int32) >> 23 - _MANTISSA & 0xFFFF
    ends, slopes, starts = _lines(signed=signed)
    exponents = keys >> _MANTISSA
    lines = exponents + _LINES * (keys >= ends[exponents])
    positions = ((keys.long() * slopes[lines] >> 16) + starts[lines] & 0xFFFF) >> _fraction(signed)
    if signed:  # there is no code for -1, of which a value that is not the largest may have the position
        found = (127 + torch.where(relative < 0, -positions, positions)).clamp(min=0)
    else:
        found = torch.where(relative > 0, positions, 0)
    codes.copy_(found.view(-1)[: len(values)])
