"""From a model and its optimizers to `ModelStates`: which parameters leave the device, in which flats and dtypes."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_ssd.activations.config import LEAST_BUDGET, OffloadConfig, check_choice, check_flag
from lightning_ssd.device import CopyEngine, available_memory, device_memory, make_copy_engine, usable_memory
from lightning_ssd.sizes import SizeArgument, format_bytes, parse_bytes, show_argument
from lightning_ssd.states.budget import MemoryPlan, choose_places
from lightning_ssd.states.buffers import HostBuffer, SSDBuffer, StateBuffer, StateStaging
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.gradient import GradientPool
from lightning_ssd.states.home import WHOLE_DTYPES, Home, Layout
from lightning_ssd.states.journal import CommitRecord, Journal, has_commit_record, read_commit_record, remove_record
from lightning_ssd.states.loaded import Loaded, exact_value
from lightning_ssd.states.masters import MasteredParameter, MasterWeights
from lightning_ssd.states.materialize import MetaTensors, born_together, materialize, materialize_buffers
from lightning_ssd.states.model_states import ModelStates, OffloadedModel, StateBytes
from lightning_ssd.states.optimizers import ElementwiseOptimizer, FlatOptimizer, make_flat_optimizer
from lightning_ssd.states.settings import Settings
from lightning_ssd.states.shared_memory import check_apart
from lightning_ssd.states.terms import StepTerms
from lightning_ssd.states.units import Unit, find_units
from lightning_ssd.storage import Blob, BlobStore, Kept, PrivateDirectory, StorageFullError
from lightning_ssd.types import Clip, OffloadTierName, Overlap, Tier

log = logging.getLogger(__name__)

FLAT_ELEMENTS = 2**26
"""Elements from which on a unit has another flat, so that a step begins before all of a unit's gradient is there."""

SHARE = 0.6
"""Of the device's memory, what states may take to stay there unasked: the rest is for activations."""

STAGED_FLAT_ELEMENTS = 2**24
"""The same where flats may be on SSDs: several are in staging memory at once."""

Groups = dict[nn.Parameter, tuple[Optimizer, int]]
"""Of parameters, their optimizer and the index of their group."""


GPU_MEMORY = SizeArgument("gpu_memory", ("auto",), share_of="the GPU's memory", least=LEAST_BUDGET)


def gpu_bytes(gpu_memory: int | str, device: torch.device) -> int:
    """Returns the bytes of a `gpu_memory` other than "auto"; a percentage is of `device`, of a CPU's free memory."""
    size = GPU_MEMORY.parse(gpu_memory)
    assert not isinstance(size, str)
    if isinstance(size, int):
        return size
    return int(size * (device_memory(device) if device.type == "cuda" else available_memory()))


def bytes_on_device(module: nn.Module, *, fitting: bool) -> int:
    """Returns the bytes that weights take, and with `fitting` gradients, Adam's two states and autocast's copies."""
    return sum(
        parameter.numel() * (parameter.element_size() * (4 if fitting and parameter.requires_grad else 1) + 2)
        for parameter in module.parameters()
        if not isinstance(parameter, UninitializedParameter)
    )


def check_units(units: object) -> None:
    """Raises an error that names `units`, unless it is None, or names classes of modules."""
    legal = "Give class names of modules, such as ['GPT2Block'], or None."
    if units is None:
        return
    if isinstance(units, str | bytes) or not isinstance(units, Sequence):
        raise TypeError(f"{show_argument('units', units)} is no list of class names. {legal}")
    if not units or not all(isinstance(name, str) and name for name in units):
        raise ValueError(f"{show_argument('units', units)} names no classes. {legal}")


@dataclass(frozen=True)
class StatesConfig:
    """What the user wants of the model states. `SSDOffloadStrategy` documents the fields.

    Raises:
        ValueError: a field is out of range; the message names it and says what it may be.
    """

    states: Literal["auto", "gpu", "host", "ssd"]
    gpu_memory: int | str
    units: Sequence[str] | None
    overlap: Overlap
    state_format: Literal["fp32", "split"]
    clip: Clip
    recover: bool

    def __post_init__(self) -> None:
        check_choice("states", self.states, ("auto", "gpu", "host", "ssd"))
        check_choice("overlap", self.overlap, ("optimized", "naive", "none"))
        check_choice("clip", self.clip, ("auto", "deferred", "speculative"))
        check_choice("state_format", self.state_format, ("fp32", "split"))
        check_flag("recover", self.recover)
        check_units(self.units)
        GPU_MEMORY.parse(self.gpu_memory)
        if self.recover and self.states in ("gpu", "host"):
            raise ValueError(
                f"`recover=True` takes up what a killed run has on SSDs, and `states={self.states!r}` puts nothing "
                "there. Set `states='ssd'`, or `recover=False`."
            )

    def room(self, device: torch.device) -> float | None:
        """Returns the bytes of `device` that states may take to stay there with "auto"; None: there is no limit."""
        if self.gpu_memory != "auto":
            return gpu_bytes(self.gpu_memory, device)
        return SHARE * device_memory(device) if device.type == "cuda" else None  # a CPU's memory is the host's

    def leave(self, module: nn.Module, device: torch.device, *, fitting: bool) -> bool:
        """Whether anything leaves `device`: with "auto", if not all has room there.

        Args:
            module: the model.
            device: where it computes.
            fitting: whether it is trained.
        """
        if self.states != "auto":
            return self.states != "gpu"
        if self.recover and fitting:
            return True
        budget = self.room(device)
        if budget is None:
            return False
        need = bytes_on_device(module, fitting=fitting)
        if need <= budget:
            return False
        log.info("weights, gradients and states would take %s of the device: they leave it", format_bytes(need))
        return True

    def budget(self, device: torch.device) -> int:
        """Returns the bytes of `device` that weights, and what stays there with them, may take."""
        if self.gpu_memory != "auto":
            return gpu_bytes(self.gpu_memory, device)
        if device.type == "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory // 10)
        return 2**30


@dataclass(frozen=True)
class Setup:
    """What model states depend on that stays as it is throughout a training.

    Attributes:
        config: what the user wants.
        storage: budgets and paths.
        default_path: directory for scratch files where the user named none.
        autocast: the dtype that matrix products compute in, if it is not that of the weights.
        clip_norm: whether gradients are clipped by their norm.
        clip_value: as in `StepTerms`.
        hold: as in `StepTerms`.
        settings: of the training, if it is recorded.
        start_over: whether training starts from a checkpoint, and not from what a killed run has recorded.
        whole: as in `StepTerms`.
    """

    config: StatesConfig
    storage: OffloadConfig
    default_path: str | Path
    autocast: torch.dtype | None
    clip_norm: bool
    clip_value: float | None
    hold: bool
    settings: Settings = field(default_factory=Settings.none)
    start_over: bool = False
    whole: Sequence[Optimizer] = ()

    @property
    def loss_scaled(self) -> bool:
        """As in `StepTerms`."""
        return self.autocast == torch.float16

    @property
    def needs_norm(self) -> bool:
        """As in `StepTerms`."""
        return self.clip_norm or self.loss_scaled

    @property
    def shared(self) -> bool:
        """Whether gradients may share memory: where steps wait for all of them, each needs some of its own."""
        return not self.needs_norm and not self.hold and self.config.overlap == "optimized"

    @property
    def terms(self) -> StepTerms:
        """How steps are made."""
        return StepTerms(
            overlap=self.config.overlap,
            needs_norm=self.needs_norm,
            clip_value=self.clip_value,
            loss_scaled=self.loss_scaled,
            clip=self.config.clip,
            hold=self.hold,
            whole=self.whole,
        )

    def landing(self, places: MemoryPlan, device: torch.device, undo: contextlib.ExitStack) -> GradientPool | None:
        """Returns the memory that gradients share, if they do; `undo` closes it."""
        if not (self.shared and places.ssd and places.landing):
            return None
        landing = GradientPool(places.landing, pin=device.type == "cuda")
        undo.callback(landing.close)
        return landing


def offloaded_parameters(module: nn.Module, min_bytes: int, *, fitting: bool) -> set[nn.Parameter]:
    """Returns the parameters that do not stay on the device: dense ones that are large enough.

    Args:
        module: the model.
        min_bytes: smaller fp32 and fp64 parameters stay. (Of bf16 weights none do: only elsewhere have they fp32
            masters.)
        fitting: whether the model is trained: fp64 parameters stay then, because steps are made in fp32.
    """
    whole = (torch.float32,) if fitting else WHOLE_DTYPES
    stays: set[nn.Parameter] = set()
    for owner in module.modules():
        if getattr(owner, "sparse", False):  # an embedding's: its gradient is no dense tensor
            stays.update(owner.parameters(recurse=False))
    return {
        parameter
        for parameter in module.parameters()
        if parameter not in stays
        and type(parameter) in (nn.Parameter, MasteredParameter)
        and parameter.layout is torch.strided
        and (
            (parameter.dtype in whole and parameter.nbytes >= max(1, min_bytes))
            or (parameter.dtype == torch.bfloat16 and parameter.numel() > 0)
        )
    }


def make_model_states(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    leaving: set[nn.Parameter],
    unborn: MetaTensors,
    device: torch.device,
    setup: Setup,
    *,
    given: Mapping[str, tuple[Tier, Tier]] | None = None,
    loaded: Loaded | None = None,
) -> ModelStates:
    """Takes the parameters `leaving` out of the device, with their gradients and optimizer states.

    Nothing is left behind when it can't: the parameters are whole on the CPU then.

    Args:
        module: the model; the parameters to leave are whole, anywhere, or unborn.
        optimizers: the model's, none of which has stepped; none: the model is evaluated only.
        leaving: parameters to take, as `offloaded_parameters` finds them. Those that want a gradient and are in no
            optimizer, or are in two, are moved to the device and stay.
        unborn: parameters and buffers that have no values yet; they get them here.
        device: where the model computes.
        setup: of the training.
        given: of each unit, by name, where its weights are and where all others, if a plan says so.
        loaded: checkpoint values of parameters that could not hold them.

    Raises:
        ValueError: `recover=True` can't record an optimizer; or `units` is wrong, or a budget too small.
        StorageError: host memory or scratch space can't be had.
    """
    config, storage, default_path, autocast = setup.config, setup.storage, setup.default_path, setup.autocast
    loaded = loaded or {}
    groups, stay = groups_of(optimizers)
    if optimizers:
        stay |= {parameter for parameter in leaving if parameter.requires_grad and parameter not in groups}
    leaving = leaving - stay
    units = find_units(module, config.units)
    stream_bytes = config.budget(device)
    resident: set[nn.Parameter] = set()
    recover = config.recover and bool(optimizers)
    if given is not None:
        check_given(given, units, leaving, host_alone=storage.tier == "host")
        chosen = [unit for unit in units if given.get(unit.name, ("gpu", "gpu"))[0] == "gpu"]
        resident = of_residents(chosen, leaving, hold=setup.hold)
        stay |= resident
        leaving -= resident
    elif config.states == "auto" and config.gpu_memory != "auto" and not recover:
        resident, taken = _residents(units, leaving, groups, stream_bytes, autocast, hold=setup.hold)
        stay |= resident
        leaving -= resident
        stream_bytes -= taken
    with contextlib.ExitStack() as undo:
        copies = make_copy_engine(device)
        undo.callback(copies.close)
        most = FLAT_ELEMENTS if config.states == "host" else STAGED_FLAT_ELEMENTS
        of_units = make_flats(module, units, leaving, groups, device, autocast, most)
        flats = [flat for _, flats in of_units for flat in flats]
        check_apart(((item.name, item.parameter) for flat in flats for item in flat.slices), device)
        of_flats = {flat: groups[first] for flat in flats if (first := flat.slices[0].parameter) in groups}
        rules = {flat: make_flat_optimizer(optimizer, flat, setup.whole) for flat, (optimizer, _) in of_flats.items()}
        two_slots = recover or (setup.needs_norm and config.clip != "deferred")
        layouts = [
            make_layout(flat, rules.get(flat), of_flats.get(flat), config, two_slots=two_slots) for flat in flats
        ]
        # Host memory alone, if that was asked for.
        kind = "host" if config.states == "auto" and storage.tier == "host" else config.states
        kind = "ssd" if recover else kind
        assert kind != "gpu"
        killed = _Taken(layouts, setup.settings, start_over=setup.start_over) if recover else None
        budget = host_budget(config, storage)
        tiers = None
        if given is not None:
            tiers = [off_device(given[unit.name]) for unit, (_, own) in zip(units, of_units, strict=True) for _ in own]
        try:
            places = choose_places(layouts, kind, budget, shared=setup.shared, given=tiers)
            scratch = make_scratch(places, storage, default_path, device, taken=killed)
        except (ValueError, StorageFullError):
            if recover or config.clip == "speculative" or all(layout.slots == 1 for layout in layouts):
                raise
            layouts = [replace(layout, slots=1) for layout in layouts]
            places = choose_places(layouts, kind, budget, shared=setup.shared, given=tiers)
            scratch = make_scratch(places, storage, default_path, device, taken=None)
        recovered = None if killed is None else killed.record
        if scratch is not None:
            undo.callback(scratch.close, remove=recovered is None)
        homes = _make_homes(layouts, places, scratch, copies, recovered, undo)
        slots = {} if recovered is None else dict(zip(flats, recovered.slots, strict=True))
        for together in born_together(module, units):
            materialize(module, [units[index] for index in together], unborn, device, loaded)
            for index in together:
                for _, parameter in units[index].parameters:
                    if parameter not in leaving:
                        parameter.data = parameter.data.to(device, copy=parameter in loaded)
                for flat in of_units[index][1]:
                    if flat in slots:
                        homes[flat].take_over(slots[flat])
                    else:
                        homes[flat].fill(loaded)
        materialize_buffers(module, unborn)
        if recovered is not None:
            for rule, kept in zip(rules.values(), recovered.rules, strict=True):
                rule.take_over(kept)
        # Of parameters that stayed for another reason the user's optimizer steps what the model has.
        in_fp32 = {parameter: exact_value(parameter, loaded) for parameter in mastered(resident, groups)}
        values = {p: value.to(p.device, torch.float32, copy=True) for p, value in in_fp32.items() if value is not None}
        masters = MasterWeights(list(in_fp32), optimizers, values)
        undo.callback(masters.close)
        journal: Journal | None = None
        if recover and scratch is not None:
            journal = Journal(homes, rules, scratch.store, setup.settings)
            undo.callback(journal.close)
        states = ModelStates(
            module,
            OffloadedModel(of_units, homes, rules, of_flats, copies, scratch),
            masters,
            setup.landing(places, device, undo),
            setup.terms,
            StateBytes(stream_bytes, places.host, places.ssd),
            journal=journal,
            recovered=recovered,
        )
        undo.pop_all()
    return states


def mastered(resident: set[nn.Parameter], groups: Groups) -> list[nn.Parameter]:
    """Returns which of the parameters that stay on the device have fp32 masters there."""
    return [parameter for parameter in resident if parameter in groups and parameter.dtype == torch.bfloat16]


def groups_of(optimizers: Sequence[Optimizer]) -> tuple[Groups, set[nn.Parameter]]:
    """Returns the group of every parameter, and the parameters that two optimizers step."""
    groups: Groups = {}
    twice: set[nn.Parameter] = set()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if groups.setdefault(parameter, (optimizer, number))[0] is not optimizer:
                    twice.add(parameter)
    return groups, twice


def _residents(
    units: Sequence[Unit],
    leaving: set[nn.Parameter],
    groups: Groups,
    budget: int,
    autocast: torch.dtype | None,
    *,
    hold: bool,
) -> tuple[set[nn.Parameter], int]:
    """Returns the parameters that the device has room for, beside the weights that pass, and what they take, in bytes.

    Whole units, the first of the forward first: their step comes last and is wanted first, so that no time would hide
    it on the CPU.
    """

    def of(unit: Unit) -> list[nn.Parameter]:
        return [parameter for _, parameter in unit.parameters if parameter in leaving]

    def compute(parameter: nn.Parameter) -> int:
        return parameter.element_size() if autocast is None else autocast.itemsize

    def need(parameter: nn.Parameter) -> int:
        """Bytes of an element: fp32 master, gradient and two states, and a copy in 16 bits."""
        if parameter in groups:
            return 16 + (2 if autocast is not None or parameter.dtype != torch.float32 else 0)
        return parameter.element_size() + (0 if autocast is None else 2)

    sizes = sorted((sum(compute(p) * p.numel() for p in of(unit)) for unit in units), reverse=True)
    taken, most = 0, budget - sum(sizes[:3])  # one computes, one comes, one goes
    chosen: set[nn.Parameter] = set()
    for unit in units:
        needed = sum(need(parameter) * parameter.numel() for parameter in of(unit))
        if hold and not of_residents([unit], leaving, hold=True):
            continue
        if taken + needed > most:
            break
        taken += needed
        chosen.update(of(unit))
    return chosen, taken


def of_residents(units: Sequence[Unit], leaving: set[nn.Parameter], *, hold: bool) -> set[nn.Parameter]:
    """Returns what of whole units may stay on the device."""
    chosen: set[nn.Parameter] = set()
    for unit in units:
        own = {parameter for _, parameter in unit.parameters if parameter in leaving}
        if not hold or all(parameter.dtype == torch.float32 for parameter in own):
            chosen |= own  # else hooks would find fp32 gradients where plain training has 16-bit ones
    return chosen


def check_given(
    given: Mapping[str, tuple[Tier, Tier]], units: Sequence[Unit], leaving: set[nn.Parameter], *, host_alone: bool
) -> None:
    """Raises ValueError unless a plan is one for these units; `host_alone`: nothing may be on SSDs."""
    names = [unit.name for unit in units if unit.parameters]
    for name, tiers in given.items():
        if tiers.count("gpu") == 1:
            raise ValueError(
                f"the plan has weights of the unit `{name}` on `{tiers[0]}` and its states on `{tiers[1]}`. A unit is "
                "on the GPU with both of them, or with neither: change one of the two."
            )
        if host_alone and "ssd" in tiers:
            raise ValueError(f"the plan has the unit `{name}` on SSDs, and `tier='host'` rules that out. Change one.")
        if name not in names:
            raise ValueError(f"the plan places the unit `{name}`, which the model does not have. Plan again for it.")
    for unit in units:
        if unit.name not in given and any(parameter in leaving for _, parameter in unit.parameters):
            raise ValueError(f"the plan does not place the unit `{unit.name}`. Plan again for this model.")


def off_device(tiers: tuple[Tier, Tier]) -> tuple[OffloadTierName, OffloadTierName]:
    """Returns where flats are whose unit is in `tiers`: what could not stay on the device is in host memory."""
    weights, rest = tiers
    return ("host" if weights == "gpu" else weights), ("host" if rest == "gpu" else rest)


def make_flats(
    module: nn.Module,
    units: Sequence[Unit],
    leaving: set[nn.Parameter],
    groups: Groups,
    device: torch.device,
    autocast: torch.dtype | None,
    most: int,
) -> list[tuple[Sequence[nn.Module], list[FlatParameter]]]:
    """Returns, of each unit, its modules and flats, of `most` elements unless a parameter has more."""
    dtypes = _compute_dtypes(module, autocast)
    of_units: list[tuple[Sequence[nn.Module], list[FlatParameter]]] = []
    for unit in units:
        members: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            if parameter in leaving:
                optimizer, number = groups.get(parameter, (None, 0))
                # Frozen ones apart: a step of the others may begin while backward still needs their weights.
                kind = dtypes[parameter], id(optimizer), number, parameter.requires_grad
                members.setdefault(kind, []).append((name, parameter))
        flats: list[FlatParameter] = []
        for chosen in members.values():
            for part in _parts(chosen, most):
                name = unit.name if not flats else f"{unit.name} (part {len(flats) + 1})"
                flats.append(FlatParameter(name, part, dtypes[part[0][1]], device))
        of_units.append((unit.modules, flats))
    return of_units


def _parts(parameters: Iterable[tuple[str, nn.Parameter]], most: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    part: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for name, parameter in parameters:
        if part and numel + parameter.numel() > most:
            yield part
            part, numel = [], 0
        part.append((name, parameter))
        numel += parameter.numel()
    yield part


def host_budget(config: StatesConfig, storage: OffloadConfig) -> int | None:
    """Returns the bytes of host memory for model states; None: as many as needed."""
    if storage.host_memory != "auto":
        return parse_bytes(storage.host_memory, "host_memory")
    return usable_memory() if config.states == "auto" else None


def make_scratch(
    places: MemoryPlan,
    storage: OffloadConfig,
    default_path: str | Path,
    device: torch.device,
    *,
    taken: "_Taken | None",
) -> StateStaging | None:
    """Makes what the flats on SSDs share, if there are any; `taken`: and takes over what a killed run has there.

    With `taken` there is a place for the journal also where no flat is.
    """
    if places.ssd == 0 and taken is None:
        return None
    with contextlib.ExitStack() as undo:
        store = BlobStore(
            storage.paths(default_path),
            device=device,
            backend=storage.backend,
            capacity=None if storage.ssd_capacity is None else parse_bytes(storage.ssd_capacity, "ssd_capacity"),
            checksum=storage.checksum,
            keep=taken is not None,
            kept=taken,
        )
        anew = taken is None or taken.record is None
        undo.callback(store.close, remove=anew)
        if anew:
            store.reserve(places.ssd)
        scratch = StateStaging.make(store, places.window, places.staging, pin=device.type == "cuda")
        undo.pop_all()
    return scratch


class _Taken:
    """Reads the record of a killed run when the store asks for it, which is once nobody else can.

    Args:
        layouts: of this run's flats.
        settings: of this run.
        start_over: whether the record is left unread, and goes away.

    Attributes:
        record: what there was.
    """

    def __init__(self, layouts: Sequence[Layout], settings: Settings, *, start_over: bool) -> None:
        self._start_over = start_over
        self._layouts = layouts
        self._settings = settings
        self.record: CommitRecord | None = None

    def __call__(self, directories: Sequence[PrivateDirectory]) -> Kept | None:
        if self._start_over:
            if any(has_commit_record(directory) for directory in directories):
                log.warning("starting from the given checkpoint, and not from where a run was killed")
            for directory in directories:
                remove_record(directory)
            return None
        self.record = read_commit_record(directories, self._layouts, self._settings)
        return None if self.record is None else self.record.kept


def make_layout(
    flat: FlatParameter,
    rule: FlatOptimizer | None,
    group: tuple[Optimizer, int] | None,
    config: StatesConfig,
    *,
    two_slots: bool,
) -> Layout:
    names = () if rule is None or group is None else rule.state_names(group[0].param_groups[group[1]])
    split = config.state_format == "split" and flat.dtype == torch.bfloat16
    if config.recover and rule is not None and not isinstance(rule, ElementwiseOptimizer):
        assert group is not None
        raise ValueError(
            f"`recover=True` needs optimizer states that are on SSDs, and those of {type(group[0]).__name__} are in "
            "memory. Take AdamW, Adam or SGD, or set `recover=False`."
        )
    revertible = two_slots and isinstance(rule, ElementwiseOptimizer)
    return Layout(flat, split, names, rule is not None, slots=2 if revertible else 1)


def _make_homes(
    layouts: Sequence[Layout],
    places: MemoryPlan,
    scratch: StateStaging | None,
    copies: CopyEngine,
    recovered: CommitRecord | None,
    undo: contextlib.ExitStack,
) -> dict[FlatParameter, Home]:
    """Makes the flats' homes, which are empty; `undo` gives their places back, and parameters that have moved in.

    With `recovered`, they have that run's blobs.
    """
    blobs = None if recovered is None else iter(recovered.kept.blobs)
    homes: dict[FlatParameter, Home] = {}
    pin = copies.device.type == "cuda"
    for layout, of_weights, of_rest in zip(layouts, places.weights, places.rest, strict=True):
        weights = make_place(layout.flat.nbytes, of_weights, scratch, blobs, slots=layout.slots, pin=pin)
        undo.callback(weights.free)
        rest: StateBuffer | None = None
        if layout.rest_bytes:
            rest = make_place(layout.rest_bytes, of_rest, scratch, blobs, slots=layout.slots, pin=False)
            undo.callback(rest.free)
        home = homes[layout.flat] = Home(layout, weights, rest, copies, scratch)
        undo.callback(home.give_back)
    return homes


def make_place(
    nbytes: int,
    where: Literal["host", "ssd"],
    scratch: StateStaging | None,
    blobs: Iterator[Blob] | None,
    *,
    slots: int,
    pin: bool,
) -> StateBuffer:
    if where == "host":
        return HostBuffer(nbytes, slots=slots, pin=pin)
    assert scratch is not None
    taken = None if blobs is None else list(islice(blobs, slots))
    return SSDBuffer(nbytes, scratch.store, slots=slots, blobs=taken)


def _compute_dtypes(module: nn.Module, autocast: torch.dtype | None) -> dict[nn.Parameter, torch.dtype]:
    """Returns what each parameter computes in: autocast's dtype where it would be cast to that anyway.

    Autocast casts a weight once a forward and keeps the copy until backward. A weight that has the dtype already needs
    no copy, and the product has the same numbers. (A weight that one forward uses several times has its gradients
    summed in that dtype, where Lightning, which turns autocast's cache off, sums them in fp32.)
    """
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for owner in module.modules():
        casts = isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)) or type(owner).__name__ == "Conv1D"
        for parameter in owner.parameters(recurse=False):
            dtype = autocast if autocast is not None and casts and parameter.dtype == torch.float32 else parameter.dtype
            dtypes[parameter] = dtype if dtypes.get(parameter, dtype) == dtype else parameter.dtype
    return dtypes
