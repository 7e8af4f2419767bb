"""Models that were built on `meta`: values for a unit at a time, so that the whole is nowhere at once.

As FSDP does it: a module's own `reset_parameters` gives values to its parameters, and `_init_weights` of the Hugging
Face model around it, where there is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ssd.model_states.loaded import Loaded
from lightning_ssd.model_states.units import Unit, find_units


@dataclass(frozen=True)
class MetaTensors:
    """What has a shape and no values yet.

    Attributes:
        parameters: stand-ins on the CPU, of the right shape and without memory.
        buffers: modules and names of buffers; they hold what stands for no value.
    """

    parameters: set[nn.Parameter]
    buffers: set[tuple[nn.Module, str]]


def meta_to_placeholder(module: nn.Module) -> MetaTensors:
    """Turns parameters and buffers of `module` on `meta` into stand-ins on the CPU, which optimizers take."""
    parameters: set[nn.Parameter] = set()
    for parameter in list(module.parameters()):
        if parameter.is_meta:
            stand_in = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
            # The object stays: others, such as an optimizer, may have it already.
            torch.utils.swap_tensors(parameter, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
            parameters.add(parameter)
    buffers: set[tuple[nn.Module, str]] = set()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.full_like(buffer, _no_value(buffer), device="cpu")
                buffers.add((owner, name))
    return MetaTensors(parameters, buffers)


def born_together(root: nn.Module, units: Sequence[Unit]) -> list[list[int]]:
    """Divides units, by their indices, into groups in whose order they get values.

    A module gives values to all its own parameters at once, and those may be in several units: one tied, one not.
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
    root: nn.Module, units: Sequence[Unit], unborn: MetaTensors, device: torch.device, loaded: Loaded
) -> None:
    """Gives values to what is unborn in `units`.

    Where `loaded` has values for all of it, the parameters refer to these and nothing is copied; else the parameters
    are on `device` then, which draws random numbers fast.

    Args:
        root: the model.
        units: a group of its units, as `born_together` says.
        unborn: of the model; what is born is taken out.
        device: has room for the units.
        loaded: values of a checkpoint, which go before those of an initialization.

    Raises:
        ValueError: nobody gives values to a parameter; it names the remedy.
    """
    mine = {parameter: name for unit in units for name, parameter in unit.parameters if parameter in unborn.parameters}
    unborn.parameters.difference_update(mine)
    buffers = {owner for owner, _ in unborn.buffers}
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
            # A parent that has none itself may set those below, if all of them are here.
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
    """Gives values to whatever of `root` is on `meta`: those of `loaded`, where it has them.

    Raises:
        ValueError: as `materialize`.
    """
    unborn = meta_to_placeholder(root)
    if unborn.parameters or unborn.buffers:
        units = find_units(root)
        for group in born_together(root, units):
            born = [parameter for index in group for _, parameter in units[index].parameters]
            born = [parameter for parameter in born if parameter in unborn.parameters]
            materialize(root, [units[index] for index in group], unborn, device, loaded)
            for parameter in born:
                parameter.data = parameter.data.to(device, copy=parameter in loaded)
        materialize_buffers(root, unborn)


def materialize_buffers(root: nn.Module, unborn: MetaTensors) -> None:
    """Gives values to buffers of modules without parameters of their own; others have them by now.

    Raises:
        ValueError: one has none.
    """
    for module in dict.fromkeys(owner for owner, name in unborn.buffers if _has_no_value(owner, name)):
        if not list(module.parameters(recurse=False)):
            _give_values(root, module, set(), {})
    for owner, name in unborn.buffers:
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
    for model in _hugging_face_models(root, module):
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


def _hugging_face_models(root: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """Yields the Hugging Face models that `module` is in."""
    for model in root.modules():
        if hasattr(model, "_init_weights") and any(module is child for child in model.modules()):
            yield model


def _no_value(buffer: Tensor) -> float | int | bool:
    if buffer.is_floating_point():
        return float("nan")
    return False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max
