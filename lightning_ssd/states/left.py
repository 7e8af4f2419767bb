"""Optimizer states after training: with the user's optimizer again, as plain Lightning leaves them.

`trainer.save_checkpoint` after `fit`, `optimizer.state_dict()` and a second `fit` with the same optimizer find them. In
host memory they are ordinary tensors; on SSDs they stay where they are, in files without a name, and are read when
they are looked at. They go away with the optimizer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd.states.buffers import HostBuffer, SSDBuffer
from lightning_ssd.states.home import Home
from lightning_ssd.states.lazy import LazyTensor
from lightning_ssd.states.optimizers import FlatOptimizer
from lightning_ssd.storage import DetachedBlobs


class LeftStates:
    """Gives optimizers the states of parameters that had left the device.

    Attributes:
        blobs: where those on SSDs are read from; set when the scratch files are closed, before anybody reads.
        on_ssd: whether there are any.
    """

    def __init__(self) -> None:
        self.blobs: DetachedBlobs | None = None
        self.on_ssd = False

    def give(self, home: Home, rule: FlatOptimizer, optimizer: Optimizer) -> None:
        """Puts the states of a flat's parameters in `optimizer.state`. Nothing is open, and no step under way."""
        rest = home.rest
        if isinstance(rest, HostBuffer):
            values, _ = rest.open(None, read=True)
        else:  # of the right shapes and offsets, which is all that is needed of them
            values = torch.empty(home.layout.rest_bytes, dtype=torch.uint8, device="meta")
        opened = home.layout.opened(torch.empty(home.flat.nbytes, dtype=torch.uint8, device="meta"), values)
        for index, item in enumerate(home.flat.slices):
            state = rule.state_of(index, opened)
            if state:
                optimizer.state[item.parameter] = {name: self._kept(value, rest) for name, value in state.items()}

    @staticmethod
    def refuse(home: Home, optimizer: Optimizer, why: str) -> None:
        """Puts states there that raise an error when they are looked at."""

        def read() -> Tensor:
            raise RuntimeError(f"the optimizer states of {home.flat.name} are not available: {why}")

        for item in home.flat.slices:
            optimizer.state[item.parameter] = {"unavailable": LazyTensor.make(item.parameter.shape, item.dtype, read)}

    def _kept(self, value: Any, rest: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta:
            return value.clone()
        assert isinstance(rest, SSDBuffer)
        self.on_ssd = True
        blob, nbytes = rest.blobs[rest.slot], value.numel() * value.element_size()
        start = int(value.storage_offset()) * value.element_size()

        def read() -> Tensor:
            assert self.blobs is not None
            return self.blobs.read(blob, start, nbytes).view(value.dtype).view(value.shape)

        return LazyTensor.make(value.shape, value.dtype, read)
