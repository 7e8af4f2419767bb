"""The mean of several ranks' gradients, by the kernel in rank_mean.c, or by torch's operators without a compiler.

Torch's operators take several passes over each chunk, and all threads of an operator meet at its end. Where threads of
several processes share the cores, each of these meetings waits until the last thread has a core. The kernel takes one
pass, with one meeting for each flat parameter.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_ssd.device import available_cores, kernel_threads, load_c_library

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients in the order of their numbers in rank_mean.c."""
CHUNK = 2**20
"""Elements that torch sums at a time: their sum stays in the cache between the ranks' gradients."""
LEAST_PAST_CACHES = 2**20
"""Least number of elements whose mean is written past the caches, which it would not fit into."""


class _Source(ctypes.Structure):
    _fields_ = [("values", ctypes.c_void_p), ("kind", ctypes.c_int64)]


@functools.cache
def mean_library() -> ctypes.CDLL | None:
    """Returns the function of rank_mean.c, or None if it can't be compiled; the log gives the reason."""
    library = load_c_library(Path(__file__).with_name("rank_mean.c"), "gradients of several ranks are summed by torch")
    if library is not None:
        numbers, address = ctypes.c_int64, ctypes.c_void_p
        library.rank_mean.argtypes = (numbers, address, numbers, address, ctypes.c_float, ctypes.c_int, ctypes.c_int)
        library.rank_mean.restype = None
    return library


def write_mean(total: Tensor, sources: Sequence[Tensor], share: float) -> None:
    """Writes the sum of `sources`, each multiplied by `share`, in their order and in fp32.

    Args:
        total: fp32, one dimension, on the CPU; it may be one of the sources.
        sources: contiguous tensors with as many elements, on the CPU, in fp32, bf16 or fp16.
        share: the reciprocal of the number of ranks. DDP multiplies by it before it sums, too.
    """
    library = mean_library()
    if library is None:
        write_mean_by_torch(total, sources, share)
        return
    addresses = [source.data_ptr() for source in sources]
    table = (_Source * len(sources))(*[_Source(source.data_ptr(), KINDS.index(source.dtype)) for source in sources])
    past_caches = total.numel() >= LEAST_PAST_CACHES and total.data_ptr() not in addresses
    threads = kernel_threads(available_cores(), torch.get_num_threads())
    library.rank_mean(total.numel(), total.data_ptr(), len(sources), table, share, past_caches, threads)


def write_mean_by_torch(total: Tensor, sources: Sequence[Tensor], share: float) -> None:
    """Writes the same bits as `write_mean`, by operators of torch."""
    for low in range(0, total.numel(), CHUNK):
        chunk = slice(low, min(low + CHUNK, total.numel()))
        mean = sources[0][chunk].float() * share
        for source in sources[1:]:
            mean.add_(source[chunk], alpha=share)
        total[chunk] = mean
