"""The mean of several ranks' gradients, by adam.c, or by torch's operators without a compiler.

Torch's operators take several passes over each chunk, and all threads of an operator meet at its end. Where threads of
several processes share the cores, each of these meetings waits until the last thread has a core. The kernel takes one
pass, with one meeting for each flat parameter. Adam's takes none: it computes the mean as it steps.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import available_cores, kernel_threads
from lightning_ssd.model_states.optimizers.adam_c import KernelSource, adam_library

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients in the order of their numbers in adam.c."""
CHUNK = 2**20
"""Elements that torch sums at a time: their sum stays in the cache between the ranks' gradients."""
LEAST_PAST_CACHES = 2**20
"""Least number of elements whose mean is written past the caches, which it would not fit into."""
LEAST_OWN_NORM = 2**15
"""Least number of elements whose norm adam.c computes. From here on, torch's own depends on its number of threads."""
_MEAN_ITEM = 2**16
"""Elements whose squares adam.c sums: `MEAN_ITEM`."""


@dataclass(frozen=True)
class RankMean:
    """The mean of several ranks' gradients, which is computed where it is read, and has no memory of its own.

    It is the sum of `sources`, each multiplied by `share`, in their order and in fp32.

    Attributes:
        sources: contiguous tensors of one dimension and length, on the CPU, in fp32, bf16 or fp16.
        share: the reciprocal of the number of ranks. DDP multiplies by it before it sums, too.
    """

    sources: Sequence[Tensor]
    share: float

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.sources[0].numel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements that are read."""
        return torch.float32

    def __getitem__(self, elements: slice) -> Tensor:
        """Returns the mean of some elements, a new tensor."""
        part = self._part(elements)
        mean = torch.empty(part.numel, dtype=torch.float32)
        part.write(mean)
        return mean

    def table(self) -> "ctypes.Array[KernelSource]":
        """Returns the argument `sources` of adam.c, valid while the sources are."""
        return (KernelSource * len(self.sources))(
            *[KernelSource(source.data_ptr(), KINDS.index(source.dtype)) for source in self.sources]
        )

    def write(self, total: Tensor) -> None:
        """Writes the mean to `total`, as many elements in fp32, one dimension, on the CPU; it may be one of the
        sources.
        """
        library = adam_library()
        if library is None:
            self.write_by_torch(total)
            return
        overwritten = total.data_ptr() in [source.data_ptr() for source in self.sources]
        past_caches = total.numel() >= LEAST_PAST_CACHES and not overwritten
        sources = len(self.sources), self.table(), self.share
        library.rank_mean(total.numel(), total.data_ptr(), *sources, past_caches, _threads())

    def write_by_torch(self, total: Tensor) -> None:
        """Writes the same bits as `write`, by operators of torch."""
        for chunk in self._chunks():
            mean = self.sources[0][chunk].float() * self.share
            for source in self.sources[1:]:
                mean.add_(source[chunk], alpha=self.share)
            total[chunk] = mean

    def norm(self, elements: slice) -> Tensor:
        """Returns the norm of some elements, one number in fp32: torch's bits if they are few."""
        part, library = self._part(elements), adam_library()
        if library is None or part.numel < LEAST_OWN_NORM:
            norms = [internals.foreach_norm([part[chunk]])[0] for chunk in part._chunks()]
            return internals.foreach_norm([torch.stack(norms)])[0] if len(norms) > 1 else norms[0]
        squares = torch.empty(math.ceil(part.numel / _MEAN_ITEM), dtype=torch.float64)
        sources = len(part.sources), part.table(), part.share
        library.rank_mean_squares(part.numel, squares.data_ptr(), *sources, _threads())
        return squares.sum().sqrt().float()

    def is_finite(self, elements: slice) -> bool:
        """Returns whether some elements are finite."""
        part = self._part(elements)
        return all(bool(part[chunk].isfinite().all()) for chunk in part._chunks())

    def _part(self, elements: slice) -> "RankMean":
        return RankMean([source[elements] for source in self.sources], self.share)

    def _chunks(self) -> Iterator[slice]:
        for low in range(0, self.numel, CHUNK):
            yield slice(low, min(low + CHUNK, self.numel))


def _threads() -> int:
    return kernel_threads(available_cores(), torch.get_num_threads())
