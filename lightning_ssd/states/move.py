"""Model states change amid a training, one unit after the other: their places, or which optimizer steps them."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_ssd.device import CopyEngine
from lightning_ssd.states.budget import MemoryPlan, choose_places
from lightning_ssd.states.buffers import StateBuffer, StateStaging
from lightning_ssd.states.build import (
    STAGED_FLAT_ELEMENTS,
    Groups,
    Setup,
    check_given,
    groups_of,
    host_budget,
    make_flats,
    make_layout,
    make_place,
    make_scratch,
    mastered,
    of_residents,
    off_device,
)
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.home import Home, Layout, Opened
from lightning_ssd.states.masters import MasterWeights
from lightning_ssd.states.model_states import ModelStates, OffloadedModel, StateBytes
from lightning_ssd.states.optimizers import FlatOptimizer, WholeOptimizer, make_flat_optimizer
from lightning_ssd.states.shared_memory import check_apart
from lightning_ssd.states.units import find_units
from lightning_ssd.storage import StorageFullError
from lightning_ssd.types import OffloadTierName, Tier

log = logging.getLogger(__name__)


def move_model_states(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    leaving: set[nn.Parameter],
    device: torch.device,
    setup: Setup,
    *,
    given: Mapping[str, tuple[Tier, Tier]],
) -> ModelStates:
    """Returns model states that are where `given` says, made of `states`, between two steps.

    Numbers stay what they are. Where memory runs out on the way, units are left where they were.

    Args:
        states: not recorded; closed afterwards, unless an error came before anything was moved.
        module: as in `make_model_states`, as all that follows.
        optimizers: the same.
        leaving: parameters that may leave the device, of those that are whole there.
        device: the same.
        setup: the same.
        given: of each unit, by name, where its weights are to be and where all others.

    Raises:
        ValueError: `given` is not for this model, or host memory is too small for it.
        StorageError: scratch space can't be had, or failed.
        OutOfMemoryError: of the device.
    """
    config, storage = setup.config, setup.storage
    units = find_units(module, config.units)
    groups, twice = groups_of(optimizers)
    groups |= {parameter: groups[master] for parameter, master in states.masters.items()}
    movable = {item.parameter for flat in states.homes for item in flat.slices}
    movable |= {
        parameter
        for parameter in leaving
        if parameter not in twice and (parameter in groups or not parameter.requires_grad)
    }
    check_given(given, units, movable, host_alone=storage.tier == "host")
    chosen = [unit for unit in units if given.get(unit.name, ("gpu", "gpu"))[0] == "gpu"]
    resident = of_residents(chosen, movable, hold=setup.hold)
    wanted: list[list[_Wanted]] = []
    for unit, (_, flats) in zip(units, states.units, strict=True):
        off = {parameter for _, parameter in unit.parameters if parameter in movable} - resident
        parts_of_unit: list[tuple[Layout, FlatOptimizer | None]] = []
        if off and flats:
            parts_of_unit = [(states.homes[flat].layout, states.rules.get(flat)) for flat in flats]
        elif off:
            of_unit = make_flats(module, [unit], off, groups, device, setup.autocast, STAGED_FLAT_ELEMENTS)[0][1]
            parts_of_unit = [_lay_out(flat, groups, setup, states) for flat in of_unit]
        wanted.append([_Wanted(layout, rule, *off_device(given[unit.name])) for layout, rule in parts_of_unit])
    return _remake(states, module, optimizers, groups, movable, wanted, device, setup)


def regroup_model_states(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    setup: Setup,
) -> ModelStates:
    """Returns model states whose flats follow the optimizers' parameter groups as they are now, made of `states`.

    Parameters that were frozen, or in no optimizer, and were added to a group get optimizer states, and those that were
    taken from a group lose them. Flats stay in the tiers where they are; gradients that wait for their step are kept.

    Args:
        states: not recorded; closed afterwards, unless an error came before anything was changed.
        module: as in `make_model_states`, as all that follows.
        optimizers: the same.
        device: the same.
        setup: the same.

    Raises:
        ValueError: two optimizers step the same offloaded parameter, or host memory is too small.
        StorageError: scratch space can't be had, or failed.
    """
    groups, twice = groups_of(optimizers)
    groups |= {parameter: groups[master] for parameter, master in states.masters.items() if master in groups}
    offloaded = {item.parameter: item.name for flat in states.homes for item in flat.slices}
    if shared := [name for parameter, name in offloaded.items() if parameter in twice]:
        raise ValueError(f"two optimizers step {shared[0]}, which is offloaded. Keep one, or set `states='gpu'`.")
    wanted: list[list[_Wanted]] = []
    for unit, (_, flats) in zip(find_units(module, setup.config.units), states.units, strict=True):
        homes = [states.homes[flat] for flat in flats]
        now = [_Wanted(home.layout, states.rules.get(home.flat), *_where(home)) for home in homes]
        if all(_stepped_alike(states, flat, groups) for flat in flats):
            wanted.append(now)
        else:
            own = {item.parameter for flat in flats for item in flat.slices}
            with _as_built(flats):
                made = make_flats(module, [unit], own, groups, device, setup.autocast, STAGED_FLAT_ELEMENTS)[0][1]
            tier = now[0].weights
            wanted.append([_Wanted(*_lay_out(flat, groups, setup, states), tier, tier) for flat in made])
    gradients: dict[nn.Parameter, Tensor] = {}
    unstepped = [item.parameter for flat in states.homes if flat not in states.rules for item in flat.slices]
    if states.accumulating or any(parameter.grad is not None for parameter in unstepped):
        with states.full_grads():
            gradients = {p: p.grad.float().cpu() for p in offloaded if p.grad is not None and p in groups}
            gradients = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
    resident = {parameter for parameter in module.parameters() if parameter in states.masters}
    of_masters = {parameter: parameter.grad for parameter in resident}
    remade = _remake(states, module, optimizers, groups, resident | set(offloaded), wanted, device, setup)
    if gradients:
        with remade.full_grads():
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
    for parameter in resident & remade.masters.keys():
        parameter.grad = of_masters[parameter]
    return remade


@contextlib.contextmanager
def _as_built(flats: Sequence[FlatParameter]) -> Iterator[None]:
    """While it lasts, the parameters of flats have the dtypes that the model was built with, and no values."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in flats:
                for item in flat.slices:
                    item.parameter.data = torch.zeros((), dtype=item.dtype).expand(item.parameter.shape)
        yield
    finally:
        for flat in flats:
            flat.attach()


def _stepped_alike(states: ModelStates, flat: FlatParameter, groups: Groups) -> bool:
    """Whether the optimizer and group of all parameters of a flat are still those that the flat was made for."""
    return all(groups.get(item.parameter) == states.groups.get(flat) for item in flat.slices)


def _remake(
    states: ModelStates,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    groups: Groups,
    movable: set[nn.Parameter],
    wanted: "list[list[_Wanted]]",
    device: torch.device,
    setup: Setup,
) -> ModelStates:
    """Returns model states with the flats `wanted` of each unit, made of `states`, whose threads and hooks end."""
    config, storage = setup.config, setup.storage
    budget = host_budget(config, storage)
    if budget is not None and storage.host_memory == "auto":
        budget += states.host_bytes  # which are there to be used
    places = _places(wanted, budget, shared=setup.shared)
    flats = [item.layout.flat for of_unit in wanted for item in of_unit]
    offloaded = {item.parameter for flat in states.homes for item in flat.slices}  # their flats keep them apart
    items = (item for flat in flats for item in flat.slices if item.parameter not in offloaded)
    check_apart(((item.name, item.parameter) for item in items), device)
    states.drain()
    scratch = states.scratch
    with contextlib.ExitStack() as undo:
        if scratch is None:
            scratch = make_scratch(places, storage, setup.default_path, device, taken=None)
            if scratch is not None:
                undo.callback(scratch.close)
        elif places.ssd:
            scratch.store.reserve(places.ssd)
        parts, on_device = states.dissolve()
        undo.pop_all()
    with contextlib.ExitStack() as undo:
        move = _Move(parts, on_device, scratch, groups, device, undo)
        if scratch is not None and places.staging > scratch.staging.budget:
            move.take_memory(places.staging)
        move.regroup(wanted)
        move.make(wanted)
        wanted = move.flats
        places = _places(wanted, None, shared=setup.shared)
        scratch = move.end(places)
        groups, _ = groups_of(optimizers)
        in_flats = {item.parameter for flat in move.homes for item in flat.slices}
        masters = MasterWeights(mastered(movable - in_flats, groups), optimizers, move.masters)
        undo.callback(masters.close)
        flats = [item.layout.flat for of_unit in wanted for item in of_unit]
        moved = ModelStates(
            module,
            OffloadedModel(
                [
                    (modules, [item.layout.flat for item in of_unit])
                    for (modules, _), of_unit in zip(parts.units, wanted, strict=True)
                ],
                {flat: move.homes[flat] for flat in flats},
                {item.layout.flat: item.rule for of_unit in wanted for item in of_unit if item.rule is not None},
                {flat: groups[first] for flat in flats if (first := flat.slices[0].parameter) in groups},
                parts.copies,
                scratch,
            ),
            masters,
            setup.landing(places, device, undo),
            setup.terms,
            # Files never shrink.
            StateBytes(
                config.budget(device), places.host, 0 if scratch is None else max(places.ssd, scratch.store.size)
            ),
        )
        undo.pop_all()
    return moved


@dataclass(frozen=True)
class _Wanted:
    """A flat, and where it is to be."""

    layout: Layout
    rule: FlatOptimizer | None
    weights: OffloadTierName
    rest: OffloadTierName


def _lay_out(
    flat: FlatParameter, groups: Groups, setup: Setup, states: ModelStates
) -> tuple[Layout, FlatOptimizer | None]:
    """Returns how the values of a new flat lie in memory, and how it is stepped."""
    group = groups.get(flat.slices[0].parameter)
    rule = None if group is None else make_flat_optimizer(group[0], flat, setup.whole)
    two_slots = any(home.layout.slots == 2 for home in states.homes.values())
    return make_layout(flat, rule, group, setup.config, two_slots=two_slots), rule


def _places(wanted: Sequence[Sequence[_Wanted]], budget: int | None, *, shared: bool) -> MemoryPlan:
    every = [item for of_unit in wanted for item in of_unit]
    tiers = [(item.weights, item.rest) for item in every]
    return choose_places([item.layout for item in every], "auto", budget, shared=shared, given=tiers)


class _Move:
    """The flats while they move.

    Args:
        parts: what there was.
        masters: master weights of 16-bit parameters that stay on the device.
        scratch: for flats on SSDs; owned.
        groups: of parameters, their optimizer and the index of their group.
        device: where the model computes.
        undo: makes the parameters whole on the CPU, and gives everything back.

    Attributes:
        homes: of the flats, as they are now.
        flats: of each unit, its flats, and where they are now.
        masters: of parameters that stay on the device in 16 bits, their master weights.
    """

    def __init__(
        self,
        parts: OffloadedModel,
        masters: Mapping[nn.Parameter, Tensor],
        scratch: StateStaging | None,
        groups: Groups,
        device: torch.device,
        undo: contextlib.ExitStack,
    ) -> None:
        self.homes = dict(parts.homes)
        self.masters = dict(masters)
        self._owners = {flat: optimizer for flat, (optimizer, _) in parts.groups.items()}
        """Of each flat that was stepped before, the optimizer that keeps its states on the device."""
        self.flats = [
            [_Wanted(self.homes[flat].layout, parts.rules.get(flat), *_where(self.homes[flat])) for flat in flats]
            for _, flats in parts.units
        ]
        self._scratch = scratch
        for home in self.homes.values():
            home.scratch = scratch
        self._copies: CopyEngine = parts.copies
        self._groups = groups
        self._device = device
        self._pin = device.type == "cuda"
        undo.callback(self._give_up)

    def take_memory(self, staging: int, window: int = 0) -> None:
        """Has flats from SSDs pass through memory of so many bytes."""
        if self._scratch is not None:
            self._scratch = self._scratch.with_memory(window, staging, pin=self._pin)
        for home in self.homes.values():
            home.scratch = self._scratch

    def make(self, wanted: Sequence[Sequence[_Wanted]]) -> None:
        """Moves everything, first what makes room; it ends where memory does."""
        to_ssd, to_host = partial(self._relocate, to="ssd"), partial(self._relocate, to="host")
        moves = (to_ssd, self._leave_device, self._come_to_device, to_host)
        try:
            for move in moves:
                for number, of_unit in enumerate(wanted):
                    move(number, of_unit)
        except (torch.OutOfMemoryError, MemoryError, StorageFullError) as error:
            log.warning("not all model states could be moved, which changes no numbers: %s", error)

    def regroup(self, wanted: Sequence[Sequence[_Wanted]]) -> None:
        """Divides the parameters of units among other flats, through host memory."""
        device, self._device = self._device, torch.device("cpu")
        for number, of_unit in enumerate(wanted):
            now = [item.layout.flat for item in self.flats[number]]
            if now and of_unit and now != [item.layout.flat for item in of_unit]:
                self._come_to_device(number, [])
                self._leave_device(number, of_unit)
        self._device = device

    def end(self, places: MemoryPlan) -> StateStaging | None:
        """Returns the scratch space of flats that are where they belong, if any is on SSDs."""
        self.take_memory(places.staging, places.window)
        if self._scratch is not None and not places.ssd:
            self._scratch.close()
            self._scratch = None
            self.take_memory(0)
        return self._scratch

    def _relocate(self, number: int, wanted: Sequence[_Wanted], to: OffloadTierName) -> None:
        """Moves what is to be in the tier `to` and is in the other one."""
        if not wanted or not self.flats[number]:
            return
        for index, (now, then) in enumerate(zip(self.flats[number], wanted, strict=True)):
            layout = now.layout
            with contextlib.ExitStack() as undo:
                weights = rest = None
                if then.weights == to != now.weights:
                    weights = self._place(layout, layout.flat.nbytes, to, undo, of_weights=True)
                if then.rest == to != now.rest:
                    rest = self._place(layout, layout.rest_bytes, to, undo, of_weights=False)
                if weights is not None or rest is not None:
                    self.homes[layout.flat].move(weights, rest)
                undo.pop_all()
            weights_now, rest_now = _where(self.homes[layout.flat])
            self.flats[number][index] = replace(now, weights=weights_now, rest=rest_now)

    def _leave_device(self, number: int, wanted: Sequence[_Wanted]) -> None:
        """Takes a unit that is on the device to where it is to be."""
        if self.flats[number] or not wanted:
            return
        homes: dict[FlatParameter, Home] = {}
        with contextlib.ExitStack() as undo:
            for item in wanted:
                layout = item.layout
                weights = self._place(layout, layout.flat.nbytes, item.weights, undo, of_weights=True)
                assert weights is not None
                rest = self._place(layout, layout.rest_bytes, item.rest, undo, of_weights=False)
                homes[layout.flat] = Home(layout, weights, rest, self._copies, self._scratch)
            for item in wanted:
                self._fill(homes[item.layout.flat], item.rule)
            undo.pop_all()
        rules = {item.layout.flat: item.rule for item in wanted}
        # What is on the device goes when all of it is where it is to be.
        for flat in homes:
            for slice_ in flat.slices:
                parameter = slice_.parameter
                parameter.grad = None
                self.masters.pop(parameter, None)
                if parameter in self._groups and not isinstance(rules[flat], WholeOptimizer):
                    self._groups[parameter][0].state.pop(parameter, None)
            flat.adopt()
        self.homes |= homes
        self.flats[number] = list(wanted)

    def _fill(self, home: Home, rule: FlatOptimizer | None) -> None:
        """Puts what the device has of a flat into its home, which is empty; returns when it is there."""
        parameters = [slice_.parameter for slice_ in home.flat.slices]

        def load_states(values: Opened) -> None:
            for index, parameter in enumerate(parameters):
                if rule is not None and not isinstance(rule, WholeOptimizer):
                    kept = self._groups[parameter][0].state.get(parameter, {})
                    rule.load_state(index, _to(kept, torch.device("cpu")), values)

        home.store([self.masters.get(parameter, parameter.data) for parameter in parameters], load_states)
        home.drain()

    def _come_to_device(self, number: int, wanted: Sequence[_Wanted]) -> None:
        """Takes a unit that is to be on the device there, with its optimizer states."""
        if not self.flats[number] or wanted:
            return
        for item in self.flats[number]:
            flat = item.layout.flat
            for index, shared in flat.shared.items():
                if shared.foreign:
                    raise RuntimeError(
                        f"{flat.slices[index].name} shares memory with other code than "
                        "torch's, and can't be moved to the device, or to another parameter group, meanwhile. Set its "
                        "`.data` to a `.clone()`."
                    )
        found = [self._bring(item) for item in self.flats[number]]  # all of it, or nothing
        for item, (weights, masters, states) in zip(self.flats[number], found, strict=True):
            flat = item.layout.flat
            for index, (parameter, values) in enumerate(weights.items()):
                memory = flat.memory(index)
                parameter.data = values if memory is None else memory
            for parameter, kept in states.items():
                self._owners[flat].state[parameter] = kept
            self.masters |= masters
            flat.attached = False
            self.homes.pop(flat).free()
        self.flats[number] = []

    def _bring(
        self, item: _Wanted
    ) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor], dict[nn.Parameter, dict[str, Any]]]:
        """Returns, on the device, the weights of a flat, master weights, and optimizer states."""
        weights: dict[nn.Parameter, Tensor] = {}
        masters: dict[nn.Parameter, Tensor] = {}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        home = self.homes[item.layout.flat]
        opened = home.open().result()
        try:
            whole = opened.masters()
            for index, slice_ in enumerate(home.flat.slices):
                parameter, values = slice_.parameter, slice_.of(whole)
                weights[parameter] = values.to(self._device, slice_.dtype, copy=True)
                if slice_.dtype == torch.bfloat16 and parameter in self._groups:
                    masters[parameter] = values.to(self._device, copy=True)
                if item.rule is not None and (kept := item.rule.state_of(index, opened)):
                    optimizer, group = self._groups.get(parameter, (None, 0))
                    options = {} if optimizer is None else optimizer.param_groups[group]
                    states[parameter] = self._on_device(kept, options)
        finally:
            home.close(opened, changed=False)
        return weights, masters, states

    def _on_device(self, kept: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an optimizer's state of a parameter where torch's optimizers have it."""
        counts_here = not (group.get("capturable") or group.get("fused"))
        on_host = {"step": kept["step"]} if counts_here and "step" in kept else {}
        there = {name: value for name, value in kept.items() if name not in on_host}
        return {**_to(there, self._device), **on_host}

    def _place(
        self, layout: Layout, nbytes: int, where: OffloadTierName, undo: contextlib.ExitStack, *, of_weights: bool
    ) -> StateBuffer | None:
        """Makes a place, if there is anything for it, which `undo` gives back."""
        if not nbytes:
            return None
        pin = self._pin and of_weights
        place = make_place(nbytes, where, self._scratch, None, slots=layout.slots, pin=pin)
        undo.callback(place.free)
        return place

    def _give_up(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._scratch is not None:
                stack.callback(self._scratch.close)
            stack.callback(self._copies.close)
            for home in self.homes.values():
                stack.callback(home.free)
                stack.callback(home.give_back)


def _to(kept: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns an optimizer's state of a parameter, copied to a device."""
    copied: dict[str, Any] = tree_map_only(Tensor, lambda value: value.to(device, copy=True), dict(kept))
    return copied


def _where(home: Home) -> tuple[OffloadTierName, OffloadTierName]:
    weights, rest = home.on_ssd
    return "ssd" if weights else "host", "ssd" if rest else "host"
