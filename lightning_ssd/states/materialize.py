"""Models that were built on `meta`: values for a unit at a time, so that the whole is nowhere at once.

As FSDP does it: a module's own `reset_parameters` gives values to its parameters, and `_init_weights` of the Hugging
Face model around it, where there is one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ssd.states.units import Unit, find_units


@dataclass(frozen=True)
class Unborn:
    """What has a shape and no values yet.

    Attributes:
        parameters: stand-ins on the CPU, of the right shape and without memory.
        buffers: modules and names of buffers; they are on the CPU, and hold `_NO_VALUE`.
    """

    parameters: set[nn.Parameter]
    buffers: set[tuple[nn.Module, str]]


def take_off_meta(module: nn.Module) -> Unborn:
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
    return Unborn(parameters, buffers)


def materialize(root: nn.Module, unit: Unit, unborn: Unborn, device: torch.device) -> None:
    """Gives values to what is unborn in `unit`; the parameters are on `device` then, which draws random numbers fast.

    Args:
        root: the model.
        unit: one of its units.
        unborn: of the model; what is born is taken out.
        device: has room for the unit.

    Raises:
        ValueError: nobody gives values to a parameter or buffer; it names the remedy.
    """
    mine = {parameter: name for name, parameter in unit.parameters if parameter in unborn.parameters}
    for parameter in mine:
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    unborn.parameters.difference_update(mine)
    for owner in unit.modules:
        for module in reversed(list(owner.modules())):  # children before their parents
            own = list(module.parameters(recurse=False))
            below = list(module.parameters())
            if mine.keys().isdisjoint(below) or not unborn.parameters.isdisjoint(own):
                continue
            whole = unborn.parameters.isdisjoint(below)
            for model in _hugging_face_models(root, module):
                if own or whole:
                    model._init_weights(module)  # type: ignore[operator]
                break
            else:
                if not mine.keys().isdisjoint(own):
                    _reset(module, next(mine[parameter] for parameter in own if parameter in mine))


def materialize_on(root: nn.Module, device: torch.device) -> None:
    """Gives values to whatever of `root` is on `meta`.

    Raises:
        ValueError: as `materialize`.
    """
    unborn = take_off_meta(root)
    if unborn.parameters or unborn.buffers:
        for unit in find_units(root):
            materialize(root, unit, unborn, device)
        check_buffers(unborn)


def check_buffers(unborn: Unborn) -> None:
    """Checks that every buffer got a value.

    Raises:
        ValueError: one got none.
    """
    for owner, name in unborn.buffers:
        buffer = owner._buffers[name]
        assert buffer is not None
        no_value = _no_value(buffer)
        if buffer.numel() and bool((buffer.isnan() if no_value != no_value else buffer == no_value).all()):
            raise ValueError(
                f"buffer {name!r} of {type(owner).__name__} was built on `meta`, and nothing gave it values. Set it in "
                "`reset_parameters`, or build the model without `meta`."
            )


def _reset(module: nn.Module, name: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"parameter {name!r} was built on `meta`, and {type(module).__name__} has no `reset_parameters` that gives "
            "it values. Write one, or build the model without `meta`."
        )
    with torch.no_grad():
        reset()


def _hugging_face_models(root: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """Yields the Hugging Face models that `module` is in."""
    for model in root.modules():
        if hasattr(model, "_init_weights") and any(module is child for child in model.modules()):
            yield model


def _no_value(buffer: Tensor) -> float | int | bool:
    if buffer.is_floating_point():
        return float("nan")
    return False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max
