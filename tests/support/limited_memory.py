"""A CPU whose tensors have a limited memory: trainings run out of it as they do on a GPU."""

import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.activations.graph import tensors_of
from tests.support.meter import Meter

_COUNTED = "_counted_by_limited_memory"


SCALAR = 8
"""Bytes of the largest tensors that are not counted: Lightning makes some between forward and backward."""


class LimitedMemory(TorchDispatchMode, Meter):
    """Counts the bytes of the storages that operations make in a training within the context, until they are freed.

    An allocation of a micro-batch beyond the limit raises torch.OutOfMemoryError. Tensors that exist before are not
    counted.

    The training needs the callback `counting`.

    Args:
        most: the limit, in bytes.
        fails_at: allocations that find no room in any case: number of the micro-batch, and of its allocation.
    """

    supports_higher_order_operators = True

    def __init__(self, most: float = math.inf, fails_at: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        Meter.__init__(self, most, 0)
        self._fails_at = set(fails_at)
        self.highest_ever = 0
        self.counting = _Counting()
        self.failures = 0
        """Allocations that found no room."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {value.untyped_storage()._cdata for value in _strided((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for value in _strided(result):
            storage = value.untyped_storage()
            if (
                self.counting.begun
                and storage._cdata not in read
                and storage.resizable()
                and not hasattr(storage, _COUNTED)
            ):
                self._allocate(func, storage)
        return result

    def _allocate(self, func: Any, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        if nbytes <= SCALAR:
            return
        self.counting.allocations += 1
        position = self.counting.micro_batches, self.counting.allocations
        fails = position in self._fails_at or self.level + nbytes > self.most
        if fails and self.counting.in_micro_batch:
            self._fails_at.discard(position)
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory in {func}. Tried to allocate {nbytes} bytes.")
        self.level += nbytes
        self.highest, self.highest_ever = max(self.highest, self.level), max(self.highest_ever, self.level)
        setattr(storage, _COUNTED, _Allocation(self, nbytes))

    def reset_peak(self) -> None:
        self.highest = self.level


class _Counting(pl.Callback):
    """Counts from the begin of a training, because tiers are measured with large copies before."""

    def __init__(self) -> None:
        self.begun = self.in_micro_batch = False
        self.micro_batches = 0
        self.allocations = 0
        """Allocations since the present micro-batch began."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.micro_batches += 1
        self.allocations = 0
        self.in_micro_batch = True

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.in_micro_batch = False


class _Allocation:
    """An attribute of a storage, which is freed with it."""

    def __init__(self, memory: LimitedMemory, nbytes: int) -> None:
        self._memory, self._nbytes = memory, nbytes

    def __del__(self) -> None:
        self._memory.level -= self._nbytes


def _strided(tree: Any) -> list[torch.Tensor]:
    return [value for value in tensors_of(tree) if value.layout is torch.strided]
