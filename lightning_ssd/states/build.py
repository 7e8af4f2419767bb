"""From a model and its optimizers to `ModelStates`: which parameters leave the device, in which flats and dtypes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.activations.config import check_choice
from lightning_ssd.activations.copies import make_copies
from lightning_ssd.sizes import parse_bytes
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.home import HostHome
from lightning_ssd.states.model_states import ModelStates, Overlap
from lightning_ssd.states.optimizers import check_optimizer, rule_for
from lightning_ssd.states.units import Unit, find_units


@dataclass(frozen=True)
class StatesConfig:
    """What the user wants of the model states.

    Attributes:
        states: "gpu": they stay on the device; "host": they leave it.
        gpu_memory: bytes of the device that fetched weights may take, or "auto".
        units: as in `find_units`.
        overlap: as in `ModelStates`.

    Raises:
        ValueError: an attribute is none of those.
    """

    states: Literal["gpu", "host"]
    gpu_memory: int | str
    units: Sequence[str] | None
    overlap: Overlap

    def __post_init__(self) -> None:
        check_choice("states", self.states, ("gpu", "host"))
        check_choice("overlap", self.overlap, ("optimized", "none"))
        if self.gpu_memory != "auto":
            parse_bytes(self.gpu_memory, "gpu_memory")

    def budget(self, device: torch.device) -> int:
        """Returns the bytes of `device` that fetched weights may take."""
        if self.gpu_memory != "auto":
            return parse_bytes(self.gpu_memory, "gpu_memory")
        if device.type == "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory // 10)
        return 2**30


def leaving_parameters(module: nn.Module, min_bytes: int) -> set[nn.Parameter]:
    """Returns the parameters that do not stay on the device: dense fp32 ones that are large enough.

    Args:
        module: the model.
        min_bytes: smaller parameters stay.
    """
    stays: set[nn.Parameter] = set()
    for owner in module.modules():
        if getattr(owner, "sparse", False):  # an embedding's: its gradient is no dense tensor
            stays.update(owner.parameters(recurse=False))
    return {
        parameter
        for parameter in module.parameters()
        if parameter not in stays
        and type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.dtype == torch.float32
        and parameter.numel() * 4 >= max(1, min_bytes)
    }


def make_model_states(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    leaving: set[nn.Parameter],
    device: torch.device,
    *,
    config: StatesConfig,
    autocast: torch.dtype | None,
    clips: bool,
    hold: bool,
) -> ModelStates:
    """Takes the parameters `leaving` out of the device, with their gradients and optimizer states.

    Args:
        module: the model; the parameters to leave are whole, anywhere.
        optimizers: the model's; none of them has stepped.
        leaving: parameters to take, as `leaving_parameters` finds them. Those that want a gradient and are in no
            optimizer, or are in two, are moved to the device and stay.
        device: where the model computes.
        config: what the user wants.
        autocast: the dtype that matrix products compute in, if it is not that of the weights.
        clips: as in `ModelStates`.
        hold: as in `ModelStates`.

    Raises:
        ValueError: an optimizer can't step on the host; or `units` is wrong.
    """
    groups: dict[nn.Parameter, tuple[Optimizer, int]] = {}
    stay: set[nn.Parameter] = set()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if groups.setdefault(parameter, (optimizer, number))[0] is not optimizer:
                    stay.add(parameter)  # stepped by two
    stay |= {parameter for parameter in leaving if parameter.requires_grad and parameter not in groups}
    for parameter in leaving & stay:
        parameter.data = parameter.data.to(device)
    leaving = leaving - stay
    for optimizer in {id(groups[p][0]): groups[p][0] for p in leaving if p in groups}.values():
        check_optimizer(optimizer)
    dtypes = _compute_dtypes(module, autocast)
    units = find_units(module, config.units)
    copies = make_copies(device)  # its threads stay unless it is closed: nothing that checks arguments comes after
    flats: dict[Flat, list[nn.Parameter]] = {}
    of_units: list[tuple[Sequence[nn.Module], list[Flat]]] = []
    for unit in units:
        members: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            if parameter in leaving:
                optimizer_of, number = groups.get(parameter, (None, 0))
                members.setdefault((dtypes[parameter], id(optimizer_of), number), []).append((name, parameter))
        of_units.append((unit.modules, []))
        for index, chosen in enumerate(members.values()):
            flat = Flat(_name(unit, index), chosen, dtypes[chosen[0][1]], device)
            flats[flat] = [parameter for _, parameter in chosen]
            of_units[-1][1].append(flat)
    homes, rules, of_flats = {}, {}, {}
    for flat, parameters in flats.items():
        names: tuple[str, ...] = ()
        if parameters[0] in groups:
            optimizer, number = of_flats[flat] = groups[parameters[0]]
            rule = rules[flat] = rule_for(optimizer, flat)
            names = rule.state_names(optimizer.param_groups[number])
        home = homes[flat] = HostHome(flat, names, copies)
        values = home.open().result()
        for item in flat.slices:
            item.of(values.master).copy_(item.parameter.data)
        values.round()
        home.close(values, changed=True)
        flat.attach()  # frees the parameter's own memory: the model is never in RAM twice
    return ModelStates(
        module,
        of_units,
        homes,
        rules,
        of_flats,
        copies,
        budget=config.budget(device),
        overlap=config.overlap,
        clips=clips,
        hold=hold,
    )


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
            dtype = autocast if autocast is not None and casts else torch.float32
            dtypes[parameter] = dtype if dtypes.get(parameter, dtype) == dtype else torch.float32
    return dtypes


def _name(unit: Unit, index: int) -> str:
    return unit.name if index == 0 else f"{unit.name} (part {index + 1})"
