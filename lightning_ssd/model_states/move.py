"""Moving model states between two steps: to other tiers, or to flat parameters of other parameter groups.

Grouping, layouts, tiers, stores and the assembly are those of `build`. The filling of stores differs in its contract.
Building allocates all stores first, so that missing memory is an error before the first step, and then fills them from
parameters on the CPU or on meta, one unit at a time, without optimizer states. A move has to keep training possible: it
allocates and fills one unit at a time, with its optimizer states, keeps the old values until the new ones are stored,
and leaves the remaining units where they are when memory runs out.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_ssd.device import usable_memory
from lightning_ssd.model_states.budget import MemoryPlan, plan_memory
from lightning_ssd.model_states.buffers import StateStaging
from lightning_ssd.model_states.build import assemble, check_flats_apart
from lightning_ssd.model_states.config import Setup
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.grouping import STAGED_FLAT_ELEMENTS, FlatSpec, flat_groups, make_flat_params, make_spec
from lightning_ssd.model_states.layout import StagedState
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.offloaded import OffloadedModel
from lightning_ssd.model_states.optimizers import FlatOptimizer, WholeOptimizer
from lightning_ssd.model_states.residency import MASTERED_DTYPES, UnitTiers, needs_master, off_device, planned_residents
from lightning_ssd.model_states.state_storage import make_buffer, make_staging, make_store
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.model_states.units import find_units
from lightning_ssd.model_states.user_optimizers import Groups, groups_of
from lightning_ssd.storage import StorageFullError
from lightning_ssd.types import OffloadTierName

log = logging.getLogger(__name__)


def move_model_states(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    offloadable: set[nn.Parameter],
    device: torch.device,
    setup: Setup,
    *,
    plan_tiers: UnitTiers,
) -> ModelStates:
    """Moves model states to the tiers of a plan, between two steps.

    Values do not change. Units for which memory runs out keep their tiers.

    Args:
        states: present model states, without a journal; closed afterwards, unless an error is raised before anything
            is moved.
        module: as in `make_model_states`.
        optimizers: as in `make_model_states`.
        offloadable: parameters on the device that may be offloaded.
        device: as in `make_model_states`.
        setup: as in `make_model_states`.
        plan_tiers: tiers of each unit.

    Returns:
        The moved model states.

    Raises:
        ValueError: `plan_tiers` does not match the model, or host memory is too small for it.
        StorageError: scratch space can't be allocated, or failed.
        OutOfMemoryError: the device's memory is too small.
    """
    units = find_units(module, setup.config.units)
    groups, twice = groups_of(optimizers)
    groups |= {parameter: groups[master] for parameter, master in states.masters.items()}
    model, movable = states.offloaded, states.parameters
    movable |= {
        parameter
        for parameter in offloadable
        if parameter not in twice and (parameter in groups or not parameter.requires_grad)
    }
    host_alone = setup.storage.tier == "host"
    resident = planned_residents(
        plan_tiers, units, movable, defer_to_user_hooks=setup.defer_to_user_hooks, host_alone=host_alone
    )
    target: list[list[_TieredSpec]] = []
    for unit, (_, flat_params) in zip(units, model.units, strict=True):
        offloaded = {parameter for _, parameter in unit.parameters if parameter in movable} - resident
        specs: list[FlatSpec] = []
        if offloaded and flat_params:
            specs = [FlatSpec(model.stores[flat].layout, model.flat_optimizers.get(flat)) for flat in flat_params]
        elif offloaded:
            of_unit = make_flat_params(module, [unit], offloaded, groups, device, setup.autocast, STAGED_FLAT_ELEMENTS)[
                0
            ][1]
            specs = [_make_spec(flat, groups, setup, states) for flat in of_unit]
        target.append(
            [_TieredSpec(item.layout, item.flat_optimizer, *off_device(plan_tiers[unit.name])) for item in specs]
        )
    return _remake(states, module, optimizers, groups, movable, target, device, setup)


def regroup_model_states(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    setup: Setup,
) -> ModelStates:
    """Regroups flat parameters to match the optimizers' parameter groups as they are now, between two steps.

    Parameters that were added to a group (they were frozen, or in no optimizer) get optimizer states; parameters that
    were removed from a group lose them. Tiers do not change. Gradients that no step has used are kept.

    Args:
        states: present model states, without a journal; closed afterwards, unless an error is raised before anything
            is changed.
        module: as in `make_model_states`.
        optimizers: as in `make_model_states`.
        device: as in `make_model_states`.
        setup: as in `make_model_states`.

    Returns:
        The regrouped model states.

    Raises:
        ValueError: two optimizers step the same offloaded parameter, or host memory is too small.
        StorageError: scratch space can't be allocated, or failed.
    """
    model = states.offloaded
    groups, twice = groups_of(optimizers)
    groups |= {parameter: groups[master] for parameter, master in states.masters.items() if master in groups}
    offloaded = {item.parameter: item.name for flat in model.stores for item in flat.param_views}
    if shared := [name for parameter, name in offloaded.items() if parameter in twice]:
        raise ValueError(f"two optimizers step {shared[0]}, which is offloaded. Keep one, or set `states='gpu'`.")
    target: list[list[_TieredSpec]] = []
    for unit, (_, flat_params) in zip(find_units(module, setup.config.units), model.units, strict=True):
        now = [_present_spec(model.stores[flat], model.flat_optimizers.get(flat)) for flat in flat_params]
        if all(_stepped_alike(model, flat, groups) for flat in flat_params):
            target.append(now)
        else:
            own = {item.parameter for flat in flat_params for item in flat.param_views}
            with _as_built(flat_params):
                made = make_flat_params(module, [unit], own, groups, device, setup.autocast, STAGED_FLAT_ELEMENTS)[0][1]
            tier = now[0].weights
            specs = [_make_spec(flat, groups, setup, states) for flat in made]
            target.append([_TieredSpec(item.layout, item.flat_optimizer, tier, tier) for item in specs])
    gradients: dict[nn.Parameter, Tensor] = {}
    unstepped = [
        item.parameter for flat in model.stores if flat not in model.flat_optimizers for item in flat.param_views
    ]
    if states.accumulating or any(parameter.grad is not None for parameter in unstepped):
        with states.full_grads():
            gradients = {p: p.grad.float().cpu() for p in offloaded if p.grad is not None and p in groups}
            gradients = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
    resident = {parameter for parameter in module.parameters() if parameter in states.masters}
    of_masters = {parameter: parameter.grad for parameter in resident}
    remade = _remake(states, module, optimizers, groups, resident | set(offloaded), target, device, setup)
    if gradients:
        with remade.full_grads():
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
    for parameter in resident & remade.masters.keys():
        parameter.grad = of_masters[parameter]
    return remade


@dataclass(frozen=True)
class _TieredSpec(FlatSpec):
    """A flat parameter and its tiers.

    Attributes:
        weights: tier of its compute weights.
        opt_state: tier of its master weights and optimizer states.
    """

    weights: OffloadTierName
    opt_state: OffloadTierName


def _present_spec(store: StateStore, flat_optimizer: FlatOptimizer | None) -> _TieredSpec:
    return _TieredSpec(store.layout, flat_optimizer, *store.tiers)


@contextlib.contextmanager
def _as_built(flat_params: Sequence[FlatParameter]) -> Iterator[None]:
    """Makes the parameters have the dtypes with which the model was built, without values, within the context."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in flat_params:
                for item in flat.param_views:
                    item.parameter.data = torch.zeros((), dtype=item.dtype).expand(item.parameter.shape)
        yield
    finally:
        for flat in flat_params:
            flat.attach()


def _stepped_alike(model: OffloadedModel, flat: FlatParameter, groups: Groups) -> bool:
    """Returns whether all parameters of a flat parameter still have the optimizer and group for which it was made."""
    return all(groups.get(item.parameter) == model.groups.get(flat) for item in flat.param_views)


def _make_spec(flat: FlatParameter, groups: Groups, setup: Setup, states: ModelStates) -> FlatSpec:
    """Returns the layout of a new flat parameter, with two versions if others have two."""
    two_versions = any(store.layout.versions == 2 for store in states.stores.values())
    return make_spec(flat, groups, setup, two_versions=two_versions)


def _plan_memory(target: Sequence[Sequence[_TieredSpec]], budget: int | None, setup: Setup) -> MemoryPlan:
    every = [item for of_unit in target for item in of_unit]
    tiers = [(item.weights, item.opt_state) for item in every]
    return plan_memory(
        [item.layout for item in every],
        "auto",
        budget,
        shared=setup.shares_gradients,
        tiers=tiers,
        lazy_seconds=setup.lazy_seconds,
    )


def _remake(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    groups: Groups,
    movable: set[nn.Parameter],
    target: Sequence[Sequence[_TieredSpec]],
    device: torch.device,
    setup: Setup,
) -> ModelStates:
    """Ends `states`, moves their values to the target flat parameters of each unit, and assembles the result."""
    budget = setup.host_budget()
    available = (usable_memory() if budget is None else budget) + states.host_bytes  # which can be used again
    if budget is not None and setup.storage.host_memory == "auto":
        budget = available
    memory_plan = _plan_memory(target, budget, setup)
    check_flats_apart((item.flat for of_unit in target for item in of_unit), device, known=states.parameters)
    states.drain()
    staging = states.staging
    with contextlib.ExitStack() as undo:
        if staging is None:
            staging = make_staging(memory_plan, setup.storage, setup.default_path, device, killed=None)
            if staging is not None:
                undo.callback(staging.close)
        elif memory_plan.ssd:
            staging.store.reserve(memory_plan.ssd)
        model, masters = states.dissolve()
        undo.pop_all()
    with contextlib.ExitStack() as undo:
        move = _Move(model, masters, staging, groups, device, undo)
        if staging is not None and memory_plan.staging > staging.states.pool.budget:
            move.resize_staging(memory_plan.staging)
        move.regroup(target)
        move.relocate(target)
        memory_plan = _plan_memory(move.flat_params, None, setup)
        moved = move.finish(memory_plan)
        states = assemble(
            module,
            optimizers,
            moved,
            needs_master(movable - moved.parameters, groups_of(optimizers)[0]),
            move.masters,
            memory_plan,
            setup,
            undo,
            device_bytes=setup.config.budget(device),
            # Files never shrink.
            spare=setup.spare_memory(memory_plan, available if budget is None else budget),
            ssd_bytes=0 if moved.staging is None else max(memory_plan.ssd, moved.staging.store.size),
        )
        undo.pop_all()
    return states


class _Move:
    """Flat parameters while they are moved.

    Duty: moves one unit after the other between the device, host memory and SSDs, and tracks the tier of each.

    Threads: the training thread; I/O and copies complete on their own threads and are waited for.

    Ownership: stores, scratch space and the copy engine belong to the move until `finish`, and on an error to `undo`,
    which makes the parameters whole on the CPU. The values of a unit stay valid in the old tier until all of them are
    in the new one.

    Args:
        model: the flat parameters before the move.
        masters: master weights of resident 16-bit parameters.
        staging: scratch space of flat parameters on SSDs; owned.
        groups: parameter groups.
        device: device that the model computes on.
        undo: restores the parameters, and frees everything.

    Attributes:
        flat_params: for each unit, its flat parameters and their tiers at present.
        masters: master weights of 16-bit parameters on the device at present.
    """

    def __init__(
        self,
        model: OffloadedModel,
        masters: Mapping[nn.Parameter, Tensor],
        staging: StateStaging | None,
        groups: Groups,
        device: torch.device,
        undo: contextlib.ExitStack,
    ) -> None:
        self.masters = dict(masters)
        self._model = model
        self._stores = dict(model.stores)
        self._owners = {flat: optimizer for flat, (optimizer, _) in model.groups.items()}
        """Optimizer of each flat parameter, which holds its states while it is on the device."""
        self.flat_params = [
            [_present_spec(self._stores[flat], model.flat_optimizers.get(flat)) for flat in flat_params]
            for _, flat_params in model.units
        ]
        self._staging = staging
        for store in self._stores.values():
            store.staging = staging
        self._groups = groups
        self._device = device
        self._pin = device.type == "cuda"
        undo.callback(self._restore)

    def resize_staging(self, staging: int, param_staging: int = 0) -> None:
        """Replaces the staging memory and the memory of prefetched weights by other sizes (bytes). None is in use."""
        if self._staging is not None:
            self._staging.resize(param_staging, staging, pin=self._pin)

    def regroup(self, target: Sequence[Sequence[_TieredSpec]]) -> None:
        """Regroups the parameters of units into other flat parameters, through host memory."""
        device, self._device = self._device, torch.device("cpu")
        for number, of_unit in enumerate(target):
            now = [item.flat for item in self.flat_params[number]]
            if now and of_unit and now != [item.flat for item in of_unit]:
                self._to_device(number, [])
                self._from_device(number, of_unit)
        self._device = device

    def relocate(self, target: Sequence[Sequence[_TieredSpec]]) -> None:
        """Moves all units, those first that free memory. If memory runs out, the remaining units keep their tiers."""
        to_ssd, to_host = partial(self._to_tier, tier="ssd"), partial(self._to_tier, tier="host")
        try:
            for move in (to_ssd, self._from_device, self._to_device, to_host):
                for number, of_unit in enumerate(target):
                    move(number, of_unit)
        except (torch.OutOfMemoryError, MemoryError, StorageFullError) as error:
            log.warning("not all model states could be moved, which does not affect results: %s", error)

    def finish(self, memory_plan: MemoryPlan) -> OffloadedModel:
        """Returns the moved flat parameters.

        Args:
            memory_plan: tiers and memory of the flat parameters.
        """
        self.resize_staging(memory_plan.staging, memory_plan.param_staging)
        if self._staging is not None and not memory_plan.ssd:
            self._staging.close()
            self._staging = None
            for store in self._stores.values():
                store.staging = None
        every = [item for of_unit in self.flat_params for item in of_unit]
        return OffloadedModel(
            [
                (modules, [item.flat for item in of_unit])
                for (modules, _), of_unit in zip(self._model.units, self.flat_params, strict=True)
            ],
            {item.flat: self._stores[item.flat] for item in every},
            {item.flat: item.flat_optimizer for item in every if item.flat_optimizer is not None},
            flat_groups((item.flat for item in every), self._groups),
            self._model.copies,
            self._staging,
        )

    def _to_tier(self, number: int, target: Sequence[_TieredSpec], tier: OffloadTierName) -> None:
        """Moves to `tier` the values of a unit whose target it is."""
        if not target or not self.flat_params[number]:
            return
        for index, (now, then) in enumerate(zip(self.flat_params[number], target, strict=True)):
            layout, store = now.layout, self._stores[now.flat]
            with contextlib.ExitStack() as undo:
                make = partial(make_buffer, tier=tier, staging=self._staging, undo=undo, versions=layout.versions)
                weights = opt_state = None
                if then.weights == tier != now.weights:
                    weights = make(layout.flat.nbytes, pin=self._pin)
                if then.opt_state == tier != now.opt_state:
                    opt_state = make(layout.opt_state_bytes, pin=False)
                if weights is not None or opt_state is not None:
                    store.move(weights, opt_state)
                undo.pop_all()
            self.flat_params[number][index] = _present_spec(store, now.flat_optimizer)

    def _from_device(self, number: int, target: Sequence[_TieredSpec]) -> None:
        """Offloads a unit that is on the device, if it has a target there."""
        if self.flat_params[number] or not target:
            return
        stores: dict[FlatParameter, StateStore] = {}
        with contextlib.ExitStack() as undo:
            for item in target:
                tiers = (item.weights, item.opt_state)
                stores[item.flat] = make_store(item.layout, tiers, self._staging, self._model.copies, undo)
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

    def _to_device(self, number: int, target: Sequence[_TieredSpec]) -> None:
        """Moves a unit to the device, with its optimizer states."""
        if not self.flat_params[number] or target:
            return
        for item in self.flat_params[number]:
            _check_moves(item.flat)
        loaded = [self._copy_to_device(item) for item in self.flat_params[number]]  # all of it, or nothing
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
            self._stores.pop(flat).free()
        self.flat_params[number] = []

    def _copy_to_device(
        self, item: _TieredSpec
    ) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor], dict[nn.Parameter, dict[str, Any]]]:
        """Returns copies of a flat parameter's weights, master weights and optimizer states on the device."""
        weights: dict[nn.Parameter, Tensor] = {}
        masters: dict[nn.Parameter, Tensor] = {}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        store = self._stores[item.flat]
        staged = store.stage().result()
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
            for store in self._stores.values():
                stack.callback(store.free)
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
    copied: dict[str, Any] = tree_map_only(Tensor, lambda value: value.to(device, copy=True), dict(state))
    return copied
