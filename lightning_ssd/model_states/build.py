"""Builds `ModelStates` from a model and its optimizers.

Building chooses resident units, groups parameters, allocates tiers, makes and fills stores, and assembles the result.
`move` does the same between two steps of a training, with the functions of `residency`, `grouping`, `state_storage` and
`assemble`; its values are in the tiers already, not in a model in host memory or on `meta`.
"""

import contextlib
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.device import CopyEngine, Worker, make_copy_engine, trim_heap
from lightning_ssd.model_states.gradients import GradientPool
from lightning_ssd.model_states.journal import CommitRecord, Journal
from lightning_ssd.model_states.model_states import ModelStates, StateBytes
from lightning_ssd.model_states.optimizers import Groups, check_steps_not_compiled, do_together, groups_of
from lightning_ssd.model_states.placement import (
    FLAT_ELEMENTS,
    STAGED_FLAT_ELEMENTS,
    FlatSpec,
    KilledRun,
    MemoryPlan,
    PlanTiers,
    RankStates,
    Setup,
    compute_dtypes,
    describe_training,
    flat_groups,
    flats_of,
    make_flat_params,
    make_spec,
    make_staging,
    make_store,
    needs_master,
    off_device,
    plan_memory,
    planned_residents,
    residents_within,
    share_peer_memory,
)
from lightning_ssd.model_states.stores import Layout, SpareMemory, StateStaging, StateStore, commit_memory
from lightning_ssd.model_states.units import (
    FlatParameter,
    Loaded,
    MetaTensors,
    Unit,
    check_apart,
    exact_value,
    find_units,
    init_groups,
    materialize,
    materialize_buffers,
)
from lightning_ssd.model_states.weights import MasterWeights, OffloadedModel
from lightning_ssd.ranks import PeerMemory, Ranks
from lightning_ssd.storage import Hashes, StorageFullError
from lightning_ssd.types import OffloadTierName

log = logging.getLogger(__name__)


def make_model_states(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    offloaded: set[nn.Parameter],
    uninitialized: MetaTensors,
    device: torch.device,
    setup: Setup,
    *,
    plan_tiers: PlanTiers | None = None,
    loaded: Loaded | None = None,
    connected: Ranks | None = None,
) -> ModelStates:
    """Offloads parameters with their gradients and optimizer states.

    After an error, the parameters are whole on the CPU, and everything else is freed.

    Args:
        module: the model. The parameters to offload are whole, on any device, or placeholders of `uninitialized`.
        optimizers: optimizers of the model, none of which has stepped; empty if the model is only evaluated.
        offloaded: parameters to offload, as `offloaded_parameters` returns them. Parameters that require a gradient and
            are in no optimizer, or in two, are moved to the device and kept there.
        uninitialized: parameters and buffers that were built on `meta`; they are initialized here.
        device: device of the model's computation.
        setup: settings of the training.
        plan_tiers: tiers of each unit and of its parts, if a plan has them.
        loaded: checkpoint values of parameters that could not hold them.
        connected: memory and messages of several ranks, whose model states are shared. None: there is one rank.

    Raises:
        ValueError: `recover=True` can't record an optimizer; the step of one is compiled; or `units` is wrong, or a
            budget too small.
        RankError: ranks train differently, or one has failed.
        StorageError: host memory or scratch space can't be allocated.
    """
    loaded = loaded or {}
    units = find_units(module, setup.config.units)
    groups, twice = groups_of(optimizers)
    offloaded = offloaded - twice
    if optimizers:
        offloaded -= {parameter for parameter in offloaded if parameter.requires_grad and parameter not in groups}
    recover = setup.config.recover and bool(optimizers)
    dtypes = compute_dtypes(module, setup.autocast)
    resident, prefetch_bytes = _choose_residents(
        units, offloaded, groups, dtypes, device, setup, plan_tiers, recover=recover
    )
    offloaded -= resident
    check_steps_not_compiled(optimizers, offloaded)
    with contextlib.ExitStack() as undo:
        copies = make_copy_engine(device)
        undo.callback(copies.close)
        # Ranks allocate shared memory at the start, where "auto" does not know yet whether speculation is worth it.
        speculates = setup.config.clip == "speculative" or (connected is None and setup.config.clip == "auto")
        two_versions = recover or (setup.needs_norm and speculates)

        def group(max_elements: int) -> tuple[list[tuple[Unit, list[FlatParameter]]], list[FlatSpec]]:
            of_units = make_flat_params(module, units, offloaded, groups, device, setup, max_elements)
            flat_params = [flat for _, of_unit in of_units for flat in of_unit]
            return of_units, [make_spec(flat, groups, setup, two_versions=two_versions) for flat in flat_params]

        in_memory = setup.config.states == "host" or connected is not None
        of_units, specs = group(FLAT_ELEMENTS if in_memory else STAGED_FLAT_ELEMENTS)
        check_flats_apart((item.flat for item in specs), device)
        if setup.config.state_format == "split" and not any(item.flat.dtype == torch.bfloat16 for item in specs):
            log.warning(
                "`state_format='split'` has no effect: no offloaded weight is in bf16. Train with precision="
                "'bf16-true' or 'bf16-mixed', or leave it out"
            )
        ranks: RankStates | None = None
        budget = setup.host_budget()
        tiers = None if plan_tiers is None else _tiers_of_flats(plan_tiers, of_units, setup)
        if connected is not None:
            connected.check_agreement(describe_training(module, optimizers, [item.flat for item in specs], setup))
            if budget is not None:  # of the free memory, which each rank has measured
                budget = min(connected.exchange(budget))
            layouts = [item.layout for item in specs]
            peers = share_peer_memory(connected, layouts, copies) if setup.sums_on_device else None
            log.info(
                "gradients are averaged %s", "in host memory" if peers is None else "on the devices of their owners"
            )
            # Tiers of several ranks do not change, so that flat parameters are small only if some are on SSDs.
            needed = _plan(layouts, tiers, None, setup, peers, recover=recover)
            if needed.ssd or (budget is not None and needed.host > budget):
                of_units, specs = group(STAGED_FLAT_ELEMENTS)
                tiers = None if plan_tiers is None else _tiers_of_flats(plan_tiers, of_units, setup)
            ranks = RankStates(connected, [item.layout for item in specs], pin=device.type == "cuda", peers=peers)
            undo.callback(ranks.close_peers)
        space = _reserve(specs, tiers, budget, device, setup, ranks, recover=recover)
        recovered = space.recovered
        if space.staging is not None:
            undo.callback(space.staging.close, remove=recovered is None)
        stores = _make_stores(space, copies, undo, ranks)
        versions = {} if recovered is None else dict(zip(stores, recovered.versions, strict=True))
        if ranks is not None and ranks.ranks.rank > 0:
            if recovered is None:
                versions = dict.fromkeys(stores, 0)  # rank 0 writes them
            for flat, version in versions.items():
                if uninitialized.parameters.isdisjoint(item.parameter for item in flat.param_views):
                    stores[flat].adopt(version)
        pin = device.type == "cuda"
        commit = partial(commit_memory, stores.values(), pin=pin) if ranks is None else ranks.commit
        # A model in host memory first gives its memory to the stores: the host need not have room for both. Otherwise
        # pages are committed on several cores before values are written to them: copies from the device use one core.
        waiting = [item.parameter for flat in stores if not flat.attached for item in flat.param_views]
        gives = any([one.device.type == "cpu" and one not in uninitialized.parameters for one in waiting])
        if not gives:
            commit()
        if ranks is not None:
            ranks.ranks.exchange("committed")  # owners commit pages on their NUMA nodes before rank 0 writes to them
            if not gives:
                ranks.begin_fill()
        _fill(module, units, of_units, stores, uninitialized, loaded, device, versions)
        if gives:
            trim_heap()
            commit()
        if ranks is not None:
            _share_values(ranks, stores, space.staging)
            ranks.pin()
            ranks.ranks.broadcast(_resident_tensors(module, stores))
        flat_optimizers = {item.flat: item.flat_optimizer for item in space.specs if item.flat_optimizer is not None}
        if recovered is not None:
            for flat_optimizer, kept in zip(flat_optimizers.values(), recovered.flat_optimizers, strict=True):
                flat_optimizer.set_extra_state(kept)
        journal: Journal | None = None
        if recover and space.staging is not None:
            messages = None if ranks is None else ranks.ranks.messages
            journal = Journal(stores, flat_optimizers, space.staging.store, setup.settings, messages)
            undo.callback(journal.close)
        # Parameters that are resident for other reasons have no masters: the user's optimizer steps them as they are.
        exact = {parameter: exact_value(parameter, loaded) for parameter in needs_master(resident, groups)}
        states = assemble(
            module,
            optimizers,
            OffloadedModel(of_units, stores, flat_optimizers, flat_groups(stores, groups), copies, space.staging),
            list(exact),
            {p: value.to(p.device, torch.float32, copy=True) for p, value in exact.items() if value is not None},
            space.memory_plan,
            setup,
            undo,
            device_bytes=prefetch_bytes,
            ssd_bytes=space.memory_plan.ssd,
            spare=space.spare,
            ranks=ranks,
            journal=journal,
            recovered=recovered,
        )
        undo.pop_all()
    return states


def _share_values(ranks: RankStates, stores: Mapping[FlatParameter, StateStore], staging: StateStaging | None) -> None:
    """Returns when rank 0 has written the values of all stores, and they are those of the first host on all hosts.

    From now on, owners write them, and all ranks read.
    """
    hashes: Hashes = {}
    if ranks.ranks.rank == 0:
        if ranks.ranks.hosts is not None:
            ranks.ranks.broadcast([slab.tensor for slab in ranks.values], ranks.ranks.hosts)
        for store in stores.values():
            store.drain()
            hashes |= store.hashes()
    hashes = ranks.ranks.messages.exchange(hashes)[0]
    if staging is not None:
        staging.store.adopt_hashes(hashes)


def _resident_tensors(module: nn.Module, stores: Mapping[FlatParameter, StateStore]) -> Iterator[Tensor]:
    """Yields the parameters and buffers that are not offloaded, in the same order on all ranks."""
    offloaded = {item.parameter for flat in stores for item in flat.param_views}
    yield from (parameter.data for parameter in module.parameters() if parameter not in offloaded)
    yield from module.buffers()


def assemble(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    offloaded: OffloadedModel,
    mastered: Sequence[nn.Parameter],
    masters: Mapping[nn.Parameter, Tensor],
    memory_plan: MemoryPlan,
    setup: Setup,
    undo: contextlib.ExitStack,
    *,
    device_bytes: int,
    ssd_bytes: int,
    spare: SpareMemory,
    ranks: RankStates | None = None,
    journal: Journal | None = None,
    recovered: CommitRecord | None = None,
) -> ModelStates:
    """Returns model states of an offloaded model: the last step of building and of moving them.

    Args:
        module: the model.
        optimizers: optimizers of the model.
        offloaded: flat parameters of the model, whose stores are filled.
        mastered: parameters on the device that have master weights there.
        masters: existing master weights; the others are made from the parameters.
        memory_plan: tiers of the flat parameters.
        setup: settings of the training.
        undo: receives callbacks that free the objects made here.
        device_bytes: budget of device memory for prefetched weights, bytes.
        ssd_bytes: allocated scratch space, bytes.
        spare: host memory for second versions that `memory_plan` does not count.
        ranks: as in `ModelStates`.
        journal: as in `ModelStates`.
        recovered: as in `ModelStates`.
    """
    weights = MasterWeights(mastered, optimizers, masters)
    undo.callback(weights.close)
    pool: GradientPool | None = None
    if setup.shares_gradients and memory_plan.ssd and memory_plan.gradients:
        pool = GradientPool(memory_plan.gradients, pin=offloaded.copies.device.type == "cuda")
        undo.callback(pool.close)
    if setup.later_versions:
        for store in offloaded.stores.values():
            store.buffers.spare = spare
    worker = Worker("cpu-optimizer", do_together)
    undo.callback(worker.close)
    nbytes = StateBytes(device_bytes, memory_plan.host, spare, ssd_bytes)
    return ModelStates(
        module,
        offloaded,
        weights,
        pool,
        worker,
        setup,
        nbytes,
        ranks=ranks,
        journal=journal,
        recovered=recovered,
        undo=undo,
    )


def check_flats_apart(
    flat_params: Iterable[FlatParameter], device: torch.device, *, known: Container[nn.Parameter] = ()
) -> None:
    """Raises an error if parameters of flat parameters share memory. Parameters in `known` are not checked again."""
    items = (item for flat in flat_params for item in flat.param_views if item.parameter not in known)
    check_apart(((item.name, item.parameter) for item in items), device)


def _choose_residents(
    units: Sequence[Unit],
    offloaded: set[nn.Parameter],
    groups: Groups,
    dtypes: Mapping[nn.Parameter, torch.dtype],
    device: torch.device,
    setup: Setup,
    plan_tiers: PlanTiers | None,
    *,
    recover: bool,
) -> tuple[set[nn.Parameter], int]:
    """Returns the parameters of whole parts that are kept on the device, and its bytes for prefetched weights."""
    config = setup.config
    budget = config.budget(device)
    if plan_tiers is not None:
        host_alone = setup.storage.tier == "host"
        return planned_residents(
            plan_tiers,
            units,
            setup.parts_of,
            offloaded,
            defer_to_user_hooks=setup.defer_to_user_hooks,
            host_alone=host_alone,
        ), budget
    if config.states == "auto" and config.gpu_memory != "auto" and not recover:
        resident, used = residents_within(
            units, offloaded, groups, budget, dtypes, defer_to_user_hooks=setup.defer_to_user_hooks
        )
        return resident, budget - used
    return set(), budget


def _tiers_of_flats(
    plan_tiers: PlanTiers, of_units: Sequence[tuple[Unit, Sequence[FlatParameter]]], setup: Setup
) -> list[tuple[OffloadTierName, OffloadTierName]]:
    """Returns the tiers of each flat parameter under a plan, in order."""
    return [
        off_device(plan_tiers[unit.name].of(part))
        for unit, flat_params in of_units
        for part in setup.parts_of(unit)
        for _ in flats_of(part, flat_params)
    ]


@dataclass(frozen=True)
class _Space:
    """Flat parameters, their tiers, and the scratch space for them.

    Attributes:
        specs: the flat parameters.
        memory_plan: tiers of the flat parameters.
        staging: scratch space of the flat parameters on SSDs.
        spare: host memory for second versions that `memory_plan` does not count.
        recovered: record of the killed run whose files the scratch space has adopted.
    """

    specs: Sequence[FlatSpec]
    memory_plan: MemoryPlan
    spare: SpareMemory
    staging: StateStaging | None
    recovered: CommitRecord | None


def _reserve(
    specs: Sequence[FlatSpec],
    tiers: Sequence[tuple[OffloadTierName, OffloadTierName]] | None,
    budget: int | None,
    device: torch.device,
    setup: Setup,
    ranks: RankStates | None,
    *,
    recover: bool,
) -> _Space:
    """Chooses tiers within the budgets, and makes the scratch space.

    If there is no room for two versions of the values, and two are not required, one version is stored.
    """
    killed = None
    if recover:
        layouts = [item.layout for item in specs]
        killed = KilledRun(layouts, setup.settings, start_over=setup.start_over, size=setup.world_size)

    def attempt(specs: Sequence[FlatSpec]) -> _Space:
        layouts = [item.layout for item in specs]
        memory_plan = _plan(layouts, tiers, budget, setup, None if ranks is None else ranks.peers, recover=recover)
        memory_plan.log()
        spare = setup.spare_memory(memory_plan, budget)
        staging = make_staging(
            memory_plan, setup.storage, setup.default_path, device, killed=killed, layouts=layouts, ranks=ranks
        )
        return _Space(specs, memory_plan, spare, staging, None if killed is None else killed.record)

    try:
        return attempt(specs)
    except (ValueError, StorageFullError):
        if recover or setup.config.clip == "speculative" or all(item.layout.versions == 1 for item in specs):
            raise
    return attempt([replace(item, layout=replace(item.layout, versions=1)) for item in specs])


def _plan(
    layouts: Sequence[Layout],
    tiers: Sequence[tuple[OffloadTierName, OffloadTierName]] | None,
    budget: int | None,
    setup: Setup,
    peers: PeerMemory | None,
    *,
    recover: bool,
) -> MemoryPlan:
    return plan_memory(
        layouts,
        "ssd" if recover else setup.kind,
        budget,
        shared=setup.shares_gradients,
        summed=setup.sums_gradients,
        tiers=tiers,
        later_versions=setup.later_versions,
        ranks=setup.world_size // setup.num_nodes,
        means=setup.num_nodes > 1 or peers is not None,
        copies=peers is None,
        weights_in_memory=setup.world_size > 1 and not recover,
    )


def _make_stores(
    space: _Space, copies: CopyEngine, undo: contextlib.ExitStack, ranks: RankStates | None
) -> dict[FlatParameter, StateStore]:
    """Returns the empty stores; `undo` restores parameters from stores that were filled, and frees all stores."""
    stores: dict[FlatParameter, StateStore] = {}
    for item, of_weights, of_opt_state in zip(
        space.specs, space.memory_plan.weights, space.memory_plan.opt_state, strict=True
    ):
        tiers = of_weights, of_opt_state
        store = make_store(item.layout, tiers, space.staging, copies, undo, ranks=ranks)
        stores[item.flat] = store
        undo.callback(store.restore_to_cpu)
    return stores


def _fill(
    module: nn.Module,
    units: Sequence[Unit],
    of_units: Sequence[tuple[Unit, Sequence[FlatParameter]]],
    stores: Mapping[FlatParameter, StateStore],
    uninitialized: MetaTensors,
    loaded: Loaded,
    device: torch.device,
    versions: Mapping[FlatParameter, int],
) -> None:
    """Initializes all parameters: those of flat parameters in their stores, the others on the device.

    Units are initialized one after the other (units that share modules together), so that host memory need not have
    room for the whole model. Stores of flat parameters in `versions` have values already, of these versions.
    """
    offloaded = {item.parameter for flat in stores for item in flat.param_views}
    for together in init_groups(module, units):
        materialize(module, [units[index] for index in together], uninitialized, device, loaded)
        for index in together:
            for _, parameter in units[index].parameters:
                if parameter not in offloaded:
                    parameter.data = parameter.data.to(device, copy=parameter in loaded)
            for flat in of_units[index][1]:
                if flat in versions:
                    if not flat.attached:
                        stores[flat].adopt(versions[flat])
                else:
                    stores[flat].fill(loaded)
    materialize_buffers(module, uninitialized)
