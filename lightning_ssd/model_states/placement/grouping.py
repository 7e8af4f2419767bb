"""Grouping of parameters into flat parameters, with their dtypes, layouts and optimizers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.optimizers import (
    AdamOptimizer,
    ElementwiseOptimizer,
    FlatOptimizer,
    Groups,
    Options,
    is_adam,
    make_flat_optimizer,
)
from lightning_ssd.model_states.placement.states_config import Setup, StatesConfig
from lightning_ssd.model_states.stores import BLOCK, Layout
from lightning_ssd.model_states.units import ALIGNMENT, FlatParameter, Unit, UnitPart, compiled_regions

FLAT_ELEMENTS = 2**26
"""Elements above which a unit has several flat parameters, so that a step begins before its whole gradient arrived."""

STAGED_FLAT_ELEMENTS = 2**24
"""`FLAT_ELEMENTS` for flat parameters that may be on SSDs, smaller because staging memory holds several at once."""


def make_flat_params(
    module: nn.Module,
    units: Sequence[Unit],
    offloaded: set[nn.Parameter],
    groups: Groups,
    device: torch.device,
    setup: Setup,
    max_elements: int,
) -> list[tuple[Unit, list[FlatParameter]]]:
    """Returns the units with their flat parameters, those of one part after those of the other.

    Args:
        units: units of the model, whose parameters user code may have removed from it.
        groups: parameter groups; a flat parameter belongs to one.
        max_elements: most elements of a flat parameter, unless one parameter has more.
    """
    dtypes = compute_dtypes(module, setup.autocast)
    alignment = BLOCK if setup.config.moments == "8bit" else ALIGNMENT
    of_units: list[tuple[Unit, list[FlatParameter]]] = []
    for unit in units:
        flat_params: list[FlatParameter] = []
        parts = setup.parts_of(unit)
        for part in parts:
            members: dict[tuple[torch.dtype, int, int, bool], list[tuple[str, nn.Parameter]]] = {}
            for name, parameter in part.parameters:
                if parameter in offloaded:
                    optimizer, number = groups.get(parameter, (None, 0))
                    # Frozen parameters are separate: backward may need them while a step of the others runs.
                    dtype = dtypes.get(parameter, parameter.dtype)
                    kind = dtype, id(optimizer), number, parameter.requires_grad
                    members.setdefault(kind, []).append((name, parameter))
            name = unit.name if len(parts) == 1 else f"{unit.name} ({part.name})"
            divided = (
                (kind[0], of_flat) for kind, chosen in members.items() for of_flat in _divide(chosen, max_elements)
            )
            for index, (dtype, of_flat) in enumerate(divided):
                numbered = name if not index else f"{name} (flat parameter {index + 1})"
                flat_params.append(FlatParameter(numbered, of_flat, dtype, device, alignment))
        of_units.append((unit, flat_params))
    return of_units


def flats_of(part: UnitPart, flat_params: Iterable[FlatParameter]) -> list[FlatParameter]:
    """Returns the flat parameters of a unit that belong to one of its parts."""
    own = {parameter for _, parameter in part.parameters}
    return [flat for flat in flat_params if flat.param_views[0].parameter in own]


def flat_groups(flat_params: Iterable[FlatParameter], groups: Groups) -> dict[FlatParameter, tuple[Optimizer, int]]:
    """Returns the optimizer and group index of the flat parameters that are stepped."""
    return {flat: groups[first] for flat in flat_params if (first := flat.param_views[0].parameter) in groups}


@dataclass(frozen=True)
class FlatSpec:
    """A flat parameter, how its values lie in memory, and how it is stepped.

    Attributes:
        flat_optimizer: its optimizer; None: it is not stepped.
    """

    layout: Layout
    flat_optimizer: FlatOptimizer | None

    @property
    def flat(self) -> FlatParameter:
        """The flat parameter."""
        return self.layout.flat


def make_spec(flat: FlatParameter, groups: Groups, setup: Setup, *, two_versions: bool) -> FlatSpec:
    """Returns the layout and the optimizer of a new flat parameter.

    Args:
        two_versions: whether to store two versions, so that steps can be rolled back, if its optimizer supports it.

    Raises:
        ValueError: `recover=True` can't record its optimizer, or `state_format` does not support it.
    """
    group = groups.get(flat.param_views[0].parameter)
    flat_optimizer = None if group is None else make_flat_optimizer(group[0], flat, setup.whole)
    names: Sequence[str] = ()
    if flat_optimizer is not None and group is not None:
        options = group[0].param_groups[group[1]]
        if setup.config.moments != "fp32":
            _check_moments(setup.config, isinstance(flat_optimizer, AdamOptimizer), options, type(group[0]).__name__)
        names = flat_optimizer.state_names(options)
    split = setup.config.state_format != "fp32" and flat.dtype == torch.bfloat16
    elementwise = isinstance(flat_optimizer, ElementwiseOptimizer)
    if setup.config.recover and flat_optimizer is not None and not elementwise:
        assert group is not None
        raise ValueError(
            f"`recover=True` needs optimizer states that are on SSDs, and those of {type(group[0]).__name__} are in "
            "memory. Take AdamW, Adam or SGD, or set `recover=False`."
        )
    versions = 2 if two_versions and elementwise else 1
    layout = Layout(flat, split, names, flat_optimizer is not None, versions, setup.config.moments)
    return FlatSpec(layout, flat_optimizer)


def check_state_format(config: StatesConfig, optimizers: Iterable[Optimizer]) -> None:
    """Raises ValueError if `state_format` does not support an optimizer, whether its states are offloaded or not.

    Otherwise, an error would depend on the memory of the GPU.
    """
    if config.moments == "fp32":
        return
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            _check_moments(config, is_adam(optimizer), options, type(optimizer).__name__)


def _check_moments(config: StatesConfig, adam: bool, options: Options, name: str) -> None:
    """Raises ValueError if the states of an optimizer with these options can't be in fewer bytes than fp32."""
    if not adam:
        raise ValueError(
            f"`state_format={config.state_format!r}` is for states of Adam and AdamW, and parameters have the "
            f"optimizer {name}. Take one of these, or `state_format='split'`."
        )
    if (reason := AdamOptimizer.refuse_rounded_moments(options)) is not None:
        raise ValueError(f"{name}: {reason}")


def _divide(parameters: Iterable[tuple[str, nn.Parameter]], most: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yields the parameters of each flat parameter, of at most `most` elements unless one parameter has more."""
    of_flat: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for name, parameter in parameters:
        if of_flat and numel + parameter.numel() > most:
            yield of_flat
            of_flat, numel = [], 0
        of_flat.append((name, parameter))
        numel += parameter.numel()
    yield of_flat


def _multiplies(module: nn.Module) -> bool:
    """Returns whether autocast casts the parameters of `module`, which are factors of its product."""
    return isinstance(module, (nn.Linear, internals.Convolution)) or type(module).__name__ == "Conv1D"


def compute_dtypes(module: nn.Module, autocast: torch.dtype | None) -> dict[nn.Parameter, torch.dtype]:
    """Returns the compute dtype of each parameter: autocast's, where autocast would cast the parameter anyway.

    Autocast casts a weight once a forward and keeps the copy until backward. A weight of that dtype needs no copy, and
    the product has the same numbers. (The gradients of a weight that one forward uses several times are summed in that
    dtype, and in fp32 by Lightning, which disables autocast's cache.)

    Weights of compiled modules are fp32, and the compiled code casts them: it calls no `__torch_function__` that would
    give it fp32 weights where it uses them otherwise than in one product under autocast, and it is not compiled yet.
    """
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    compiled = {part for region in compiled_regions(module) for part in region.modules()}
    for owner in module.modules():
        casts = _multiplies(owner) and owner not in compiled
        for parameter in owner.parameters(recurse=False):
            dtype = autocast if autocast is not None and casts and parameter.dtype == torch.float32 else parameter.dtype
            dtypes[parameter] = dtype if dtypes.get(parameter, dtype) == dtype else parameter.dtype
    return dtypes
