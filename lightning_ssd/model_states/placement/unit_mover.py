"""Moves the values of one part of a unit after the other between the device, host memory and SSDs, for `move`."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.access import end_aliases
from lightning_ssd.model_states.optimizers import FlatOptimizer, Groups, WholeOptimizer
from lightning_ssd.model_states.placement.budget import MemoryPlan
from lightning_ssd.model_states.placement.grouping import FlatSpec, flat_groups, flats_of
from lightning_ssd.model_states.placement.residency import MASTERED_DTYPES
from lightning_ssd.model_states.placement.state_storage import make_buffer, make_store
from lightning_ssd.model_states.stores import HostBuffer, StagedState, StateStaging, StateStore, commit_memory
from lightning_ssd.model_states.units import FlatParameter, UnitPart
from lightning_ssd.model_states.weights import OffloadedModel
from lightning_ssd.storage import StorageFullError
from lightning_ssd.types import OffloadTierName
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TieredSpec(FlatSpec):
    """A flat parameter and its tiers.

    Attributes:
        opt_state: tier of its master weights and optimizer states.
    """

    weights: OffloadTierName
    opt_state: OffloadTierName


def present_spec(store: StateStore, flat_optimizer: FlatOptimizer | None) -> TieredSpec:
    return TieredSpec(store.layout, flat_optimizer, *store.buffers.tiers)


class UnitMover:
    """Moves one part of a unit after the other between the device, host memory and SSDs, and tracks its tier.

    Threads: the training thread; I/O and copies complete on their own threads and are waited for.

    Ownership: stores, scratch space and the copy engine belong to the mover until `finish`, and on an error to `undo`,
    which makes the parameters whole on the CPU. The values of a part stay valid in the old tier until all of them are
    in the new one.

    Args:
        model: the flat parameters before the move.
        parts: the parts of all units that may be moved, each with the index of its unit.
        masters: master weights of resident 16-bit parameters.
        staging: scratch space of flat parameters on SSDs; owned.
        undo: restores the parameters, and frees everything.

    Attributes:
        flat_params: for each part, its flat parameters and their tiers at present.
        masters: master weights of 16-bit parameters on the device at present.
    """

    def __init__(
        self,
        model: OffloadedModel,
        parts: Sequence[tuple[int, UnitPart]],
        masters: Mapping[nn.Parameter, Tensor],
        staging: StateStaging | None,
        groups: Groups,
        device: torch.device,
        undo: contextlib.ExitStack,
    ) -> None:
        self.masters = dict(masters)
        self._model = model
        self._units = [index for index, _ in parts]
        self._stores = dict(model.stores)
        self._owners = {flat: optimizer for flat, (optimizer, _) in model.groups.items()}
        """Optimizer of each flat parameter, which holds its states while it is on the device."""
        self.flat_params = [
            [
                present_spec(self._stores[flat], model.flat_optimizers.get(flat))
                for flat in flats_of(part, model.units[index][1])
            ]
            for index, part in parts
        ]
        self._staging = staging
        for store in self._stores.values():
            store.staging = staging
        self._groups = groups
        self._device = device
        self._pin = device.type == "cuda"
        undo.callback(self._restore)

    def resize_staging(self, staging: int, param_staging: int = 0) -> None:
        """Replaces the staging memory and the memory of prefetched weights, which are not in use; sizes in bytes."""
        if self._staging is not None:
            self._staging.resize(param_staging, staging, pin=self._pin)

    def regroup(self, target: Sequence[Sequence[TieredSpec]]) -> None:
        """Regroups the parameters of parts into other flat parameters, through host memory."""
        device, self._device = self._device, torch.device("cpu")
        for number, of_part in enumerate(target):
            now = [item.flat for item in self.flat_params[number]]
            if now and of_part and now != [item.flat for item in of_part]:
                self._to_device(number, [])
                self._from_device(number, of_part)
        self._device = device

    def relocate(self, target: Sequence[Sequence[TieredSpec]]) -> None:
        """Moves all parts, beginning with those that free memory. If memory runs out, the rest keep their tiers."""
        to_ssd, to_host = partial(self._to_tier, tier="ssd"), partial(self._to_tier, tier="host")
        try:
            for move in (to_ssd, self._from_device, self._to_device, to_host):
                for number, of_part in enumerate(target):
                    move(number, of_part)
        except (torch.OutOfMemoryError, MemoryError, StorageFullError) as error:
            log.warning("not all model states could be moved, which does not affect results: %s", error)

    def finish(self, memory_plan: MemoryPlan) -> OffloadedModel:
        """Returns the moved flat parameters."""
        self.resize_staging(memory_plan.staging, memory_plan.param_staging)
        if self._staging is not None and not memory_plan.ssd:
            self._staging.close()
            self._staging = None
            for store in self._stores.values():
                store.staging = None
        every = [item for of_part in self.flat_params for item in of_part]
        of_units: list[list[FlatParameter]] = [[] for _ in self._model.units]
        for index, of_part in zip(self._units, self.flat_params, strict=True):
            of_units[index] += [item.flat for item in of_part]
        return OffloadedModel(
            [(unit, flat_params) for (unit, _), flat_params in zip(self._model.units, of_units, strict=True)],
            {item.flat: self._stores[item.flat] for item in every},
            {item.flat: item.flat_optimizer for item in every if item.flat_optimizer is not None},
            flat_groups((item.flat for item in every), self._groups),
            self._model.copies,
            self._staging,
        )

    def _to_tier(self, number: int, target: Sequence[TieredSpec], tier: OffloadTierName) -> None:
        """Moves those values of a part to `tier` whose target tier it is."""
        if not target or not self.flat_params[number]:
            return
        for index, (now, then) in enumerate(zip(self.flat_params[number], target, strict=True)):
            layout, store = now.layout, self._stores[now.flat]
            with contextlib.ExitStack() as undo:
                make = partial(make_buffer, tier=tier, staging=self._staging, undo=undo, versions=layout.versions)
                weights = opt_state = None
                if then.weights == tier != now.weights:
                    weights = make(layout.flat.nbytes)
                if then.opt_state == tier != now.opt_state:
                    opt_state = make(layout.opt_state_bytes)
                if weights is not None or opt_state is not None:
                    HostBuffer.commit([weights], pin=self._pin)
                    HostBuffer.commit([opt_state], pin=False)
                    store.move(weights, opt_state)
                undo.pop_all()
            self.flat_params[number][index] = present_spec(store, now.flat_optimizer)

    def _from_device(self, number: int, target: Sequence[TieredSpec]) -> None:
        """Offloads a part that is on the device, if it has target flat parameters."""
        if self.flat_params[number] or not target:
            return
        stores: dict[FlatParameter, StateStore] = {}
        with contextlib.ExitStack() as undo:
            for item in target:
                tiers = (item.weights, item.opt_state)
                stores[item.flat] = make_store(item.layout, tiers, self._staging, self._model.copies, undo)
            commit_memory(stores.values(), pin=self._pin)
            for item in target:
                self._fill(stores[item.flat], item.flat_optimizer)
            undo.pop_all()
        for item in target:
            for view in item.flat.param_views:
                parameter = view.parameter
                parameter.grad = None
                self.masters.pop(parameter, None)
                if parameter in self._groups and not isinstance(item.flat_optimizer, WholeOptimizer):
                    self._groups[parameter][0].state.pop(parameter, None)
            item.flat.adopt()
        self._stores |= stores
        self.flat_params[number] = list(target)

    def _fill(self, store: StateStore, flat_optimizer: FlatOptimizer | None) -> None:
        """Copies a flat parameter's values from the device to its empty store, and waits for it."""
        parameters = [view.parameter for view in store.flat.param_views]

        def load_states(values: StagedState) -> None:
            for index, parameter in enumerate(parameters):
                if flat_optimizer is not None and not isinstance(flat_optimizer, WholeOptimizer):
                    state = self._groups[parameter][0].state.get(parameter, {})
                    flat_optimizer.load_state(index, _copy_state(state, torch.device("cpu")), values)

        store.assign([self.masters.get(parameter, parameter.data) for parameter in parameters], load_states)
        store.drain()

    def _to_device(self, number: int, target: Sequence[TieredSpec]) -> None:
        """Moves a part to the device, with its optimizer states."""
        if not self.flat_params[number] or target:
            return
        for item in self.flat_params[number]:
            _check_moves(item.flat)
        loaded = [self._copy_to_device(item) for item in self.flat_params[number]]  # all are copied before one is moved
        for item, (weights, masters, states) in zip(self.flat_params[number], loaded, strict=True):
            flat = item.flat
            for index, (parameter, values) in enumerate(weights.items()):
                memory = flat.memory(index)
                if memory is not None and (memory.device, memory.dtype) == (values.device, values.dtype):
                    values = memory
                parameter.data = values
            for parameter, state in states.items():
                self._owners[flat].state[parameter] = state
            self.masters |= masters
            flat.attached = False
            self._stores.pop(flat).buffers.free()
        self.flat_params[number] = []

    def _copy_to_device(
        self, item: TieredSpec
    ) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor], dict[nn.Parameter, dict[str, Any]]]:
        """Returns copies of a flat parameter's weights, master weights and optimizer states on the device."""
        weights: dict[nn.Parameter, Tensor] = {}
        masters: dict[nn.Parameter, Tensor] = {}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        store = self._stores[item.flat]
        staged = wait_for(store.stage(), f"the values of {item.flat.name}")
        try:
            whole = staged.masters()
            for index, view in enumerate(store.flat.param_views):
                parameter, values = view.parameter, view.of(whole)
                weights[parameter] = values.to(self._device, view.dtype, copy=True)
                if view.dtype in MASTERED_DTYPES and parameter in self._groups:
                    masters[parameter] = values.to(self._device, copy=True)
                if item.flat_optimizer is not None and (state := item.flat_optimizer.state_of(index, staged)):
                    optimizer, group = self._groups.get(parameter, (None, 0))
                    options = {} if optimizer is None else optimizer.param_groups[group]
                    states[parameter] = self._state_on_device(state, options)
        finally:
            store.unstage(staged, changed=False)
        return weights, masters, states

    def _state_on_device(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a parameter's optimizer state, on the devices that torch's optimizers use for it."""
        counts_on_host = not (options.get("capturable") or options.get("fused"))
        on_host = {"step": state["step"]} if counts_on_host and "step" in state else {}
        there = {name: value for name, value in state.items() if name not in on_host}
        return {**_copy_state(there, self._device), **on_host}

    def _restore(self) -> None:
        """Makes the parameters whole on the CPU, and frees everything."""
        with contextlib.ExitStack() as stack:
            if self._staging is not None:
                stack.callback(self._staging.close)
            stack.callback(self._model.copies.close)
            for parameter in self._model.parameters:
                stack.callback(end_aliases, parameter)
            for store in self._stores.values():
                stack.callback(store.buffers.free)
                stack.callback(store.restore_to_cpu)


def _check_moves(flat: FlatParameter) -> None:
    for index, shared in flat.shared.items():
        if shared.foreign:
            raise RuntimeError(
                f"{flat.param_views[index].name} shares memory with other code than torch's, and can't be moved to the "
                "device, or to another parameter group, meanwhile. Set its `.data` to a `.clone()`."
            )


def _copy_state(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns a parameter's optimizer state, copied to a device."""
    copied: dict[str, Any] = internals.tree_map_only(Tensor, lambda value: value.to(device, copy=True), dict(state))
    return copied
