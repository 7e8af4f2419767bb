"""Split master weights: an fp32 number as its bf16 rounding, which computes, and the 16 bits that are left.

Nothing is lost, and nothing is kept twice: 4 bytes for a weight and its master where others take 6. The rounding is to
nearest, and exact ties go away from zero. (autocast's go to even: the interval that rounds to an even number then holds
2^16 + 1 numbers, one more than 16 bits can tell apart. One number in 2^17 is a tie.)
"""

import torch
from torch import Tensor


def split(master: Tensor, weights: Tensor, low: Tensor) -> None:
    """Splits fp32 `master` into bf16 `weights` and int16 `low`, all of one shape.

    Every NaN becomes the common one: the upper half of some is infinite, and of some the rounding overflows.
    """
    bits = master.view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    weights.view(torch.int16).copy_((bits + 0x8000) >> 16)
    low.copy_(bits)  # the lower 16 bits of them


def join(weights: Tensor, low: Tensor) -> Tensor:
    """Returns what `split` was given."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def write_changed(target: Tensor, values: Tensor) -> None:
    """Writes `values`, on the CPU, to the master weights `target`, whose elements stay where they round to the same."""
    if values.dtype.itemsize >= target.dtype.itemsize:
        target.copy_(values)
    else:
        same = target.to(values.dtype) == values
        target.copy_(torch.where(same, target, values.float()))
