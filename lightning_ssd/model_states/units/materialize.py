"""Initializes models that were built on `meta`, a unit at a time, so that no memory needs room for the whole model.

As with FSDP, a module's parameters are initialized by its own `reset_parameters`, or by `_init_weights` of the Hugging
Face model that contains it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ssd.model_states.units.loaded import Loaded
from lightning_ssd.model_states.units.units import Unit, find_units


@dataclass(frozen=True)
class MetaTensors:
    """Parameters and buffers that are not initialized yet.

    Attributes:
        parameters: placeholders on the CPU, of the right shape and without memory.
        buffers: modules and names of buffers, which are filled with a value that means "not initialized".
    """

    parameters: set[nn.Parameter]
    buffers: set[tuple[nn.Module, str]]


def meta_to_placeholder(module: nn.Module) -> MetaTensors:
    """Replaces parameters and buffers of `module` on `meta` by placeholders on the CPU, which optimizers accept."""
    parameters: set[nn.Parameter] = set()
    for parameter in list(module.parameters()):
        if parameter.is_meta:
            stand_in = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
            # The object is kept: other objects, such as an optimizer, may reference it already.
            torch.utils.swap_tensors(parameter, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
            parameters.add(parameter)
    buffers: set[tuple[nn.Module, str]] = set()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.full_like(buffer, _no_value(buffer), device="cpu")
                buffers.add((owner, name))
    return MetaTensors(parameters, buffers)


def init_groups(root: nn.Module, units: Sequence[Unit]) -> list[list[int]]:
    """Groups the indices of units that must be initialized together, in the order of initialization.

    A module initializes all its own parameters at once, and these may be in several units if one of them is tied.
    """
    unit_of = {parameter: index for index, unit in enumerate(units) for _, parameter in unit.parameters}
    group_of = {index: {index} for index in range(len(units))}
    for module in root.modules():
        joined: set[int] = set()
        for parameter in module.parameters(recurse=False):
            joined |= group_of[unit_of[parameter]]
        for index in joined:
            group_of[index] = joined
    return [sorted(group) for group in {min(group): group for group in group_of.values()}.values()]


def materialize(
    root: nn.Module, units: Sequence[Unit], uninitialized: MetaTensors, device: torch.device, loaded: Loaded
) -> None:
    """Initializes the parameters and buffers of `units` that are not initialized yet.

    If `loaded` has values for all of these parameters, they share the loaded memory, and nothing is copied. Otherwise
    they are initialized on `device`, which draws random numbers fast, and are there afterwards.

    Args:
        units: a group of units that `init_groups` has returned.
        uninitialized: uninitialized tensors of the model; parameters of `units` are removed from it.
        device: device with room for the units.
        loaded: checkpoint values, which have priority over an initialization.

    Raises:
        ValueError: no module initializes a parameter; the message names the remedy.
    """
    mine = {
        parameter: name
        for unit in units
        for name, parameter in unit.parameters
        if parameter in uninitialized.parameters
    }
    uninitialized.parameters.difference_update(mine)
    buffers = {owner for owner, _ in uninitialized.buffers}
    if all(parameter in loaded for parameter in mine) and not any(
        module in buffers for unit in units for owner in unit.modules for module in owner.modules()
    ):
        for parameter in mine:
            parameter.data = loaded[parameter].to(parameter.dtype)
        return
    for parameter in mine:
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    seen: set[nn.Module] = set()
    for owner in (module for unit in units for module in unit.modules):
        for module in reversed(list(owner.modules())):  # children before their parents
            own, below = set(module.parameters(recurse=False)), set(module.parameters())
            # A parent without parameters of its own may initialize its children's, if all of them are in `units`.
            if module in seen or mine.keys().isdisjoint(own or below) or not (own or below) <= mine.keys():
                continue
            seen.add(module)
            _give_values(root, module, own, mine)
    given = {parameter for module in seen for parameter in module.parameters(recurse=False)}
    for parameter, name in mine.items():
        if parameter not in given:
            raise ValueError(
                f"parameter {name!r} was built on `meta` in a module of which other parameters were not. Build all of "
                "it there, or none."
            )
        if parameter in loaded:
            parameter.data.copy_(loaded[parameter])


def materialize_on(root: nn.Module, device: torch.device, loaded: Loaded) -> None:
    """Initializes all parameters and buffers of `root` on `meta`, with values of `loaded` where it has them.

    Raises:
        ValueError: as in `materialize`.
    """
    uninitialized = meta_to_placeholder(root)
    if uninitialized.parameters or uninitialized.buffers:
        units = find_units(root)
        for group in init_groups(root, units):
            members = [units[index] for index in group]
            made = [p for unit in members for _, p in unit.parameters if p in uninitialized.parameters]
            materialize(root, members, uninitialized, device, loaded)
            for parameter in made:
                parameter.data = parameter.data.to(device, copy=parameter in loaded)
        materialize_buffers(root, uninitialized)


def materialize_buffers(root: nn.Module, uninitialized: MetaTensors) -> None:
    """Initializes buffers of modules without parameters of their own; `materialize` has initialized the others.

    Raises:
        ValueError: no module initializes a buffer.
    """
    for module in dict.fromkeys(owner for owner, name in uninitialized.buffers if _has_no_value(owner, name)):
        if not list(module.parameters(recurse=False)):
            _give_values(root, module, set(), {})
    for owner, name in uninitialized.buffers:
        if _has_no_value(owner, name):
            raise ValueError(
                f"buffer {name!r} of {type(owner).__name__} was built on `meta`, and nothing gave it values. Set it in "
                "`reset_parameters`, or build the model without `meta`."
            )


def _has_no_value(owner: nn.Module, name: str) -> bool:
    buffer = owner._buffers[name]
    if buffer is None or not buffer.numel():
        return False
    return bool((buffer.isnan() if buffer.is_floating_point() else buffer == _no_value(buffer)).all())


def _give_values(root: nn.Module, module: nn.Module, own: set[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    model = _hugging_face_model(root, module)
    if model is not None:
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[operator]
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        with torch.no_grad():
            reset()
    elif own:
        name = next(names[parameter] for parameter in own)
        raise ValueError(
            f"parameter {name!r} was built on `meta`, and {type(module).__name__} has no `reset_parameters` that gives "
            "it values. Write one, or build the model without `meta`."
        )


def _hugging_face_model(root: nn.Module, module: nn.Module) -> nn.Module | None:
    """Returns the outermost Hugging Face model that contains `module`, or None."""
    for model in root.modules():
        if hasattr(model, "_init_weights") and any(module is child for child in model.modules()):
            return model
    return None


def _no_value(buffer: Tensor) -> float | int | bool:
    if buffer.is_floating_point():
        return float("nan")
    return False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max
