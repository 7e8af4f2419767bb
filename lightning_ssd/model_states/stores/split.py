"""Split master weights: an fp32 number as its bf16 rounding, the compute weight, and 16 more bits.

The split is exact, and needs 4 bytes for a weight and its master instead of 6. Numbers are rounded to the nearest, and
exact ties away from zero. (Autocast rounds ties to even: the interval that rounds to an even number then has 2^16 + 1
numbers, one more than 16 bits can distinguish. One number in 2^17 is a tie.)
"""

import torch
from torch import Tensor


def split(master: Tensor, weights: Tensor, low: Tensor) -> None:
    """Splits fp32 `master` into bf16 `weights` and int16 `low`, all of one shape.

    Every NaN becomes the canonical one: the upper half of some NaNs is infinity, and rounding others overflows.
    """
    bits = master.view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    weights.view(torch.int16).copy_((bits + 0x8000) >> 16)
    low.copy_(bits)  # the lower 16 bits


def join(weights: Tensor, low: Tensor) -> Tensor:
    """Returns the fp32 master weights from the results of `split`."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def write_changed(target: Tensor, values: Tensor) -> None:
    """Writes `values`, on the CPU, to master weights `target`, except elements of `target` that round to the value."""
    if values.dtype.itemsize >= target.dtype.itemsize:
        target.copy_(values)
    else:
        same = target.to(values.dtype) == values
        target.copy_(torch.where(same, target, values.float()))
