"""Optimizer states after training: in the user's optimizers again, as plain Lightning leaves them.

`trainer.save_checkpoint` after `fit`, `optimizer.state_dict()` and a second `fit` with the same optimizer find them.
States in host memory become ordinary tensors. States on SSDs stay there, in files without a name, and are read on
access; the files go away with the optimizer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd.model_states.buffers import HostBuffer, SSDBuffer, StateStaging
from lightning_ssd.model_states.lazy import LazyTensor
from lightning_ssd.model_states.optimizers import FlatOptimizer, WholeOptimizer
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.storage import DetachedBlobs


class LeftStates:
    """Hands the states of offloaded parameters to the user's optimizers.

    Threads: the training thread; states on SSDs are read on the thread that accesses them.

    Ownership: states on SSDs belong to the lazy tensors, which share the detached files.
    """

    def __init__(self) -> None:
        self._blobs: DetachedBlobs | None = None
        """Files of states on SSDs; set by `close_scratch`, before any state is read."""
        self._on_ssd = False

    def hand_over(
        self, store: StateStore, rule: FlatOptimizer, optimizer: Optimizer, failed: Exception | None, *, kept: bool
    ) -> None:
        """Puts the states of a flat parameter in `optimizer.state`, or states that raise an error when they are read.

        Args:
            store: where they are stored. Nothing is staged, and no step under way.
            rule: how the flat parameter is stepped.
            optimizer: the user's.
            failed: error of the last step.
            kept: whether the states stay on SSDs for the next run.
        """
        if isinstance(rule, WholeOptimizer):
            return
        if failed is not None:
            self._refuse(store, optimizer, f"a step of it failed ({failed}). Save before that happens.")
        elif kept:
            self._refuse(store, optimizer, "they are kept for the next run, which goes on from them by itself")
        else:
            try:
                self._put(store, rule, optimizer)
            except Exception as error:  # such as too little memory: other flat parameters are handed over all the same
                self._refuse(store, optimizer, str(error))

    def close_scratch(self, scratch: StateStaging, *, kept: bool) -> None:
        """Closes the scratch space.

        Args:
            scratch: of the flat parameters.
            kept: whether its files stay for the next run.
        """
        if self._on_ssd and not kept:
            self._blobs = scratch.detach()
        else:
            scratch.close(remove=not kept)

    def _put(self, store: StateStore, rule: FlatOptimizer, optimizer: Optimizer) -> None:
        opt_state = store.opt_state
        if isinstance(opt_state, HostBuffer):
            values, _ = opt_state.stage(None, read=True)
        else:  # shapes and offsets are all that is needed of states on SSDs
            values = torch.empty(store.layout.opt_state_bytes, dtype=torch.uint8, device="meta")
        staged = store.layout.views(torch.empty(store.flat.nbytes, dtype=torch.uint8, device="meta"), values)
        for index, item in enumerate(store.flat.slices):
            state = rule.state_of(index, staged)
            if state:
                optimizer.state[item.parameter] = {
                    name: self._lasting(value, opt_state) for name, value in state.items()
                }

    @staticmethod
    def _refuse(store: StateStore, optimizer: Optimizer, why: str) -> None:
        """Puts states in `optimizer.state` that raise an error when they are read."""

        def read() -> Tensor:
            raise RuntimeError(f"the optimizer states of {store.flat.name} are not available: {why}")

        for item in store.flat.slices:
            optimizer.state[item.parameter] = {"unavailable": LazyTensor.make(item.parameter.shape, item.dtype, read)}

    def _lasting(self, value: Any, opt_state: object) -> Any:
        """Returns a copy of a state in memory, or a lazy tensor of one on SSDs."""
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta:
            return value.clone()
        assert isinstance(opt_state, SSDBuffer)
        self._on_ssd = True
        blob, nbytes = opt_state.blobs[opt_state.version], value.numel() * value.element_size()
        start = int(value.storage_offset()) * value.element_size()

        def read() -> Tensor:
            assert self._blobs is not None
            return self._blobs.read(blob, start, nbytes).view(value.dtype).view(value.shape)

        return LazyTensor.make(value.shape, value.dtype, read)
