"""Restores the model after training to the state of plain Lightning: whole parameters, states in the user's optimizers.

`trainer.save_checkpoint` after `fit`, `optimizer.state_dict()` and a second `fit` with the same optimizer use them.
States in host memory become ordinary tensors. States on SSDs are kept there, in unlinked files, and read on access; the
files are freed with the optimizer. States in memory that several ranks share are read on access, too, and weights there
are mapped by each rank, which would have a copy otherwise. That memory is freed with the last model and optimizer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd.model_states.checkpoints.lazy import LazyTensor
from lightning_ssd.model_states.journal import describe
from lightning_ssd.model_states.optimizers import FlatOptimizer, WholeOptimizer, parameters_of
from lightning_ssd.model_states.stores import (
    SCALES,
    WEIGHT,
    HostBuffer,
    SSDBuffer,
    StagedState,
    StateStaging,
    StateStore,
)
from lightning_ssd.model_states.units import FlatParameter, ParamView
from lightning_ssd.model_states.weights import OffloadedModel
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.storage import DetachedBlobs
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


class ModelRestorer:
    """Restores the parameters, and moves the states of offloaded parameters to the user's optimizers.

    Threads: the training thread; states on SSDs are read on the thread that accesses them.

    Ownership: states on SSDs belong to the lazy tensors, which share the detached files. Values in memory that ranks
    share are not written any more: a rank restores its model when the last step of each flat parameter has ended.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._stores = offloaded.stores
        self._failed: dict[FlatParameter, Exception] = {}
        """Errors of flat parameters whose last step failed."""
        self._blobs: DetachedBlobs | None = None
        """Files of states on SSDs; set by `close_scratch`, before any state is read."""
        self._on_ssd = False

    def restore_parameters(
        self,
        shutdown: Shutdown,
        ahead: Sequence[str],
        *,
        hand_over: bool,
        private: Mapping[FlatParameter, Callable[[Tensor], Tensor | None]],
    ) -> None:
        """Makes the parameters whole on the CPU, with the weights of the last completed step.

        Args:
            shutdown: a note is added to its failure if the weights are not those of one step.
            ahead: names of flat parameters that are one step ahead of the others.
            hand_over: whether optimizer states are handed over, too: one flat parameter after the other, since host
                memory may not have room for all of them twice.
            private: maps values of flat parameters that several ranks share, none of which writes them any more.
        """
        lost: list[str] = []
        for flat, store in self._stores.items():
            try:
                store.drain()
            except Exception as error:  # the last step failed; the weights are those before it
                self._failed[flat] = error
            if (unread := store.restore_to_cpu(private.get(flat), self._failed.get(flat))) is not None:
                shutdown.add(unread)
                lost.append(flat.name)
            if hand_over:
                self._hand_over(flat, kept=False)
            store.buffers.free_host_memory()
        if hand_over:
            self._sort_states()
        notes = [f"these weights could not be read, and are NaN now: {describe(lost)}"] if lost else []
        if ahead:
            notes.append(f"the weights are not those of one step: one ahead of the others are {describe(ahead)}")
        if shutdown.failure is not None:
            for note in notes:
                log.error("%s", note)
                shutdown.failure.add_note(f"After that, {note}.")

    def hand_over(self, *, kept: bool) -> None:
        """Moves all states to `optimizer.state`, or states that raise an error when they are read.

        Args:
            kept: whether the states are kept on SSDs for the next run.
        """
        for flat in self._stores:
            self._hand_over(flat, kept=kept)
        self._sort_states()

    def _sort_states(self) -> None:
        """Gives each `optimizer.state` the order of the parameter groups, in which state dicts list the states.

        States of parameters on the device were in it before those of offloaded parameters. Keys that are no parameters
        are last.
        """
        for optimizer in self._offloaded.optimizers:
            positions: dict[Any, int] = {item: position for position, item in enumerate(parameters_of(optimizer))}
            for key in sorted(optimizer.state, key=lambda key: positions.get(key, len(positions))):
                optimizer.state[key] = optimizer.state.pop(key)

    def _hand_over(self, flat: FlatParameter, *, kept: bool) -> None:
        """Moves the states of one flat parameter, which is not staged or stepped."""
        flat_optimizer, store = self._offloaded.flat_optimizers.get(flat), self._stores[flat]
        if flat_optimizer is None or isinstance(flat_optimizer, WholeOptimizer):
            return
        optimizer = self._offloaded.groups[flat][0]
        if (failed := self._failed.get(flat)) is not None:
            self._refuse(store, optimizer, f"a step of it failed ({failed}). Save before that happens.")
        elif kept:
            self._refuse(store, optimizer, "they are kept for the next run, which resumes from them")
        else:
            try:
                wait_for(store.fetch(), f"the optimizer states of {flat.name}")
                self._put(store, flat_optimizer, optimizer)
            except Exception as error:  # such as too little memory: other flat parameters are handed over all the same
                self._refuse(store, optimizer, str(error))

    def close_scratch(self, staging: StateStaging, *, kept: bool) -> None:
        """Closes the scratch space of the flat parameters; with `kept`, its files are kept for the next run."""
        if self._on_ssd and not kept:
            self._blobs = staging.detach()
        else:
            staging.close(remove=not kept)

    def _put(self, store: StateStore, flat_optimizer: FlatOptimizer, optimizer: Optimizer) -> None:
        opt_state, layout = store.buffers.opt_state, store.layout
        weights = torch.empty(store.flat.nbytes, dtype=torch.uint8, device="meta")
        shapes = layout.views(weights, torch.empty(layout.opt_state_bytes, dtype=torch.uint8, device="meta"))
        in_memory: StagedState | None = None
        if isinstance(opt_state, HostBuffer):
            values, _ = opt_state.stage(None, read=True)
            in_memory = layout.views(weights, values)
        copied = None if in_memory is None or self._stays(store) else in_memory
        for index, item in enumerate(store.flat.param_views):
            state = flat_optimizer.state_of(index, shapes if copied is None else copied)
            if state:
                optimizer.state[item.parameter] = {
                    name: self._lasting(name, value, store, in_memory, item) for name, value in state.items()
                }

    @staticmethod
    def _stays(store: StateStore) -> bool:
        """Returns whether states in host memory stay there until they are read: they are shared by ranks, or rounded.

        Rounded ones would take several times their bytes in fp32, and time to decode, though few programs read them.
        """
        opt_state = store.buffers.opt_state
        return isinstance(opt_state, HostBuffer) and (opt_state.shared or store.layout.moments != "fp32")

    @staticmethod
    def _refuse(store: StateStore, optimizer: Optimizer, why: str) -> None:
        """Sets states in `optimizer.state` that raise an error when they are read."""

        def read() -> Tensor:
            raise RuntimeError(f"the optimizer states of {store.flat.name} are not available: {why}")

        for item in store.flat.param_views:
            like = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="meta")
            optimizer.state[item.parameter] = {"unavailable": LazyTensor.make(like, read)}

    def _lasting(self, name: str, value: Any, store: StateStore, in_memory: StagedState | None, item: ParamView) -> Any:
        """Returns a copy of a parameter's state, or a lazy tensor of one that stays where it is (`value` is on `meta`).

        The lazy tensor keeps `in_memory`, the flat parameter's states in host memory; None: they are on SSDs.
        """
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta:
            return value.clone()
        if in_memory is not None:
            return LazyTensor.make(value, lambda: in_memory.state(name, item).clone())
        opt_state = store.buffers.opt_state
        assert isinstance(opt_state, SSDBuffer)
        self._on_ssd = True
        blob = opt_state.blobs[opt_state.version]
        layout = store.layout

        def read() -> Tensor:
            assert self._blobs is not None
            stored = {
                array.key: self._blobs.read(blob, *array.range_of(item)).view(array.dtype)
                for array in layout.arrays
                if array.key in (name, name + SCALES)
            }
            return item.unflatten(layout.state_of({WEIGHT: torch.empty(0), **stored}).decode(name))

        return LazyTensor.make(value, read)
