"""Moving model states between two steps: to other tiers, or to flat parameters of other parameter groups.

Grouping, layouts, tiers, stores and the assembly are those of `build`. The filling of stores differs in its contract.
Building allocates all stores first, so that missing memory is an error before the first step, and then fills them from
parameters on the CPU or on meta, one unit at a time, without optimizer states. A move has to keep training possible: it
allocates and fills one part of a unit at a time, with its optimizer states, keeps the old values until the new ones are
stored, and leaves the remaining parts where they are when memory runs out.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import usable_memory
from lightning_ssd.model_states.access import end_aliases
from lightning_ssd.model_states.build import assemble, check_flats_apart
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.optimizers import Groups, groups_of
from lightning_ssd.model_states.placement import (
    STAGED_FLAT_ELEMENTS,
    FlatSpec,
    MemoryPlan,
    PlanTiers,
    Setup,
    TieredSpec,
    UnitMover,
    UnitTiers,
    flats_of,
    make_flat_params,
    make_spec,
    make_staging,
    needs_master,
    off_device,
    plan_memory,
    planned_residents,
    present_spec,
)
from lightning_ssd.model_states.units import FlatParameter, Unit, UnitPart
from lightning_ssd.model_states.weights import OffloadedModel
from lightning_ssd.types import TIERS, Tier


def move_model_states(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    offloadable: set[nn.Parameter],
    device: torch.device,
    setup: Setup,
    *,
    plan_tiers: PlanTiers,
) -> ModelStates:
    """Moves model states to the tiers of a plan, between two steps.

    Values do not change. Parts of units for which memory runs out keep their tiers.

    Args:
        states: present model states, without a journal; closed afterwards, unless an error is raised before anything
            is moved.
        offloadable: parameters on the device that may be offloaded.
        plan_tiers: tiers of each unit and of its parts.
        module, optimizers, device, setup: as in `make_model_states`.

    Returns:
        The moved model states.

    Raises:
        ValueError: `plan_tiers` does not match the model, or host memory is too small for it.
        StorageError: scratch space can't be allocated, or failed.
        OutOfMemoryError: the device's memory is too small.
    """
    groups, twice = groups_of(optimizers)
    groups |= {parameter: groups[master] for parameter, master in states.masters.items()}
    model, movable = states.offloaded, states.parameters
    units = [unit for unit, _ in model.units]
    movable |= {
        parameter
        for parameter in offloadable
        if parameter not in twice and (parameter in groups or not parameter.requires_grad)
    }
    host_alone = setup.storage.tier == "host"
    resident = planned_residents(
        plan_tiers,
        units,
        setup.parts_of,
        movable,
        defer_to_user_hooks=setup.defer_to_user_hooks,
        host_alone=host_alone,
    )
    parts = _parts(units, setup)
    target: list[list[TieredSpec]] = []
    for index, part in parts:
        offloaded = {parameter for _, parameter in part.parameters if parameter in movable} - resident
        now = flats_of(part, model.units[index][1])
        specs: list[FlatSpec] = []
        if offloaded and now:
            specs = [FlatSpec(model.stores[flat].layout, model.flat_optimizers.get(flat)) for flat in now]
        elif offloaded:
            unit = units[index]
            made = make_flat_params(module, [unit], offloaded, groups, device, setup, STAGED_FLAT_ELEMENTS)[0][1]
            specs = [_make_spec(flat, groups, setup, states) for flat in made]
        name = units[index].name
        target.append(
            [TieredSpec(item.layout, item.flat_optimizer, *off_device(plan_tiers[name].of(part))) for item in specs]
        )
    return _remake(states, module, optimizers, groups, movable, parts, target, device, setup)


def present_tiers(states: ModelStates, setup: Setup) -> PlanTiers:
    """Returns the tiers of all parts of units, as `move_model_states` takes them.

    A part with flat parameters on SSDs is on SSDs.
    """
    model = states.offloaded
    tiers: dict[str, UnitTiers] = {}
    for unit, flat_params in model.units:
        of_parts: dict[str, tuple[Tier, Tier]] = {}
        for part in setup.parts_of(unit):
            own = [model.stores[flat].buffers.tiers for flat in flats_of(part, flat_params)]
            if not own:
                of_parts[part.name] = ("gpu", "gpu")
            else:
                weights, opt_state = zip(*own, strict=True)
                of_parts[part.name] = (max(weights, key=TIERS.index), max(opt_state, key=TIERS.index))
        tiers[unit.name] = UnitTiers(("gpu", "gpu"), of_parts)
    return tiers


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
        module, optimizers, device, setup: as in `make_model_states`.

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
    units = [unit for unit, _ in model.units]
    parts = _parts(units, setup)
    target: list[list[TieredSpec]] = []
    for index, part in parts:
        flat_params = flats_of(part, model.units[index][1])
        now = [present_spec(model.stores[flat], model.flat_optimizers.get(flat)) for flat in flat_params]
        if all(_stepped_alike(model, flat, groups) for flat in flat_params):
            target.append(now)
        else:
            own = {item.parameter for flat in flat_params for item in flat.param_views}
            with _as_built(flat_params):
                made = make_flat_params(module, [units[index]], own, groups, device, setup, STAGED_FLAT_ELEMENTS)[0][1]
            tier = now[0].weights
            specs = [_make_spec(flat, groups, setup, states) for flat in made]
            target.append([TieredSpec(item.layout, item.flat_optimizer, tier, tier) for item in specs])
    gradients: dict[nn.Parameter, Tensor] = {}
    unstepped = [
        item.parameter for flat in model.stores if flat not in model.flat_optimizers for item in flat.param_views
    ]
    if states.gradients.pending or any(parameter.grad is not None for parameter in unstepped):
        with states.full_grads():
            gradients = {p: p.grad.float().cpu() for p in offloaded if p.grad is not None and p in groups}
            gradients = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
    resident = {parameter for parameter in module.parameters() if parameter in states.masters}
    of_masters = {parameter: parameter.grad for parameter in resident}
    remade = _remake(states, module, optimizers, groups, resident | set(offloaded), parts, target, device, setup)
    if gradients:
        with remade.full_grads():
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
    for parameter in resident & remade.masters.keys():
        parameter.grad = of_masters[parameter]
    return remade


def _parts(units: Sequence[Unit], setup: Setup) -> list[tuple[int, UnitPart]]:
    """Returns the index of the unit and the part, for all parts that may be on tiers of their own."""
    return [(index, part) for index, unit in enumerate(units) for part in setup.parts_of(unit)]


@contextlib.contextmanager
def _as_built(flat_params: Sequence[FlatParameter]) -> Iterator[None]:
    """Makes the parameters have the dtypes with which the model was built, without values, within the context."""
    try:
        with internals.without_torch_function():
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


def _resident_gradients(
    target: Sequence[Sequence[TieredSpec]], offloaded: set[nn.Parameter], *, keep: bool
) -> dict[nn.Parameter, Tensor | None]:
    """Returns gradients that the last steps have used, of parameters on the device that are offloaded now.

    Unless user code may use them (`keep`), they are None, as those of offloaded steps.
    """
    parameters = [view.parameter for of_part in target for item in of_part for view in item.flat.param_views]
    gradients = {one: one.grad for one in parameters if one not in offloaded and one.grad is not None}
    return {one: grad.detach().to("cpu", torch.float32) if keep else None for one, grad in gradients.items()}


def _plan_memory(target: Sequence[Sequence[TieredSpec]], budget: int | None, setup: Setup) -> MemoryPlan:
    every = [item for of_part in target for item in of_part]
    tiers = [(item.weights, item.opt_state) for item in every]
    return plan_memory(
        [item.layout for item in every],
        "auto",
        budget,
        shared=setup.shares_gradients,
        summed=setup.sums_gradients,
        tiers=tiers,
        later_versions=setup.later_versions,
    )


def _remake(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    groups: Groups,
    movable: set[nn.Parameter],
    parts: Sequence[tuple[int, UnitPart]],
    target: Sequence[Sequence[TieredSpec]],
    device: torch.device,
    setup: Setup,
) -> ModelStates:
    """Ends `states`, moves their values to the target flat parameters of each part, and assembles the result."""
    budget = setup.host_budget()
    # The move frees the host memory of the present states.
    available = (usable_memory() if budget is None else budget) + states.nbytes.host
    if budget is not None and setup.storage.host_memory == "auto":
        budget = available
    memory_plan = _plan_memory(target, budget, setup)
    memory_plan.log()
    check_flats_apart((item.flat for of_part in target for item in of_part), device, known=states.parameters)
    states.drain()
    used = states.gradients.used() | _resident_gradients(target, states.parameters, keep=setup.defer_to_user_hooks)
    before, staging = states.parameters, states.staging
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
        mover = UnitMover(model, parts, masters, staging, groups, device, undo)
        if staging is not None and memory_plan.staging > staging.states.pool.budget:
            mover.resize_staging(memory_plan.staging)
        mover.regroup(target)
        mover.relocate(target)
        memory_plan = _plan_memory(mover.flat_params, None, setup)
        moved = mover.finish(memory_plan)
        states = assemble(
            module,
            optimizers,
            moved,
            needs_master(movable - moved.parameters, groups_of(optimizers)[0]),
            mover.masters,
            memory_plan,
            setup,
            undo,
            device_bytes=setup.config.budget(device),
            # Files never shrink.
            spare=setup.spare_memory(memory_plan, available if budget is None else budget),
            ssd_bytes=0 if moved.staging is None else max(memory_plan.ssd, moved.staging.store.size),
        )
        undo.pop_all()
    for parameter in before - states.parameters:
        end_aliases(parameter)
    states.gradients.restore_used(used)
    return states
