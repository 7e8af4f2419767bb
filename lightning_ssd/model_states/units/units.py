"""Units: the modules whose parameters are prefetched, evicted and stepped together, usually one transformer block."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from lightning_ssd.model_states.units.compiled_modules import is_region

PART_ELEMENTS = 2**23
"""Least number of elements of a part of a unit: 16 MiB of 16-bit weights, so that transfers stay large."""

SMALL_SHARE = 8
"""`PART_ELEMENTS` / elements of a parameter above which it is in the unit's first part. Such small parameters (norms,
biases, adapters) are transferred together."""


@dataclass(frozen=True, eq=False)
class UnitPart:
    """Parameters of a unit that are placed together: the least that a plan, or a limit of memory, keeps on a tier.

    Attributes:
        name: name of its first large parameter, without the name of the unit; unique in the unit.
        parameters: qualified names and parameters.
    """

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are needed at the same time.

    Attributes:
        name: qualified name of its first module (or the class of the root), unique.
        modules: modules whose forward needs the parameters.
        parameters: qualified names and parameters; each parameter of a model is in one unit.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @cached_property
    def parts(self) -> tuple[UnitPart, ...]:
        """The parts of the unit, one or more, in the order of its parameters. Small units have one."""
        large: list[list[tuple[str, nn.Parameter]]] = [[]]
        for name, parameter in self.parameters:
            if SMALL_SHARE * parameter.numel() >= PART_ELEMENTS:
                if _numel(large[-1]) >= PART_ELEMENTS:
                    large.append([])
                large[-1].append((name, parameter))
        if len(large) > 1 and _numel(large[-1]) < PART_ELEMENTS:
            last = large.pop()
            large[-1] += last
        if len(large) == 1:
            return (UnitPart(self._name_in_unit(self.parameters[0][0]), self.parameters),)
        elsewhere = {name for part in large[1:] for name, _ in part}
        first = tuple(item for item in self.parameters if item[0] not in elsewhere)
        names = [self._name_in_unit(part[0][0]) for part in large]
        return tuple(map(UnitPart, names, (first, *map(tuple, large[1:]))))

    def _name_in_unit(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")


def find_units(module: nn.Module, by: Sequence[str] | Callable[[nn.Module], bool] | None = None) -> list[Unit]:
    """Divides the parameters of `module` into units, in the order of their registration.

    Every block is a unit, and so is every module outside of blocks that owns parameters itself. Parameters that the
    same several modules share are in a unit of their own, with all these modules.

    Args:
        module: any module; its parameters may be on `meta`.
        by: class names of the blocks, or a function that returns whether a module is a block. `None`: the classes that
            Hugging Face models name in `_no_split_modules`, else the children of a `ModuleList` or `Sequential` of
            which at least two have the same class. Of nested blocks, the outermost one is the unit.

    Raises:
        ValueError: `by` is a string, or names a class that is not in the model; or a parameter has no shape yet.
    """
    is_block = _block_rule(module, by)
    names: dict[nn.Module, str] = {}
    owners: dict[nn.Parameter, dict[nn.Module, None]] = {}  # sets that keep their order
    for name, owner, parameters in _owners(module, "", is_block):
        names.setdefault(owner, name)
        for parameter in parameters:
            owners.setdefault(parameter, {})[owner] = None
    groups: dict[tuple[nn.Module, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward (a dry run) before `Trainer.fit`.")
        groups.setdefault(tuple(owners[parameter]), []).append((name, parameter))
    units: list[Unit] = []
    counts: Counter[str] = Counter()
    for modules, members in groups.items():
        name = names[modules[0]] or type(module).__name__
        counts[name] += 1
        units.append(Unit(name if counts[name] == 1 else f"{name}#{counts[name]}", modules, tuple(members)))
    return units


def _numel(parameters: Sequence[tuple[str, nn.Parameter]]) -> int:
    return sum(parameter.numel() for _, parameter in parameters)


def find_blocks(module: nn.Module, by: Sequence[str] | None) -> list[nn.Module]:
    """Returns the outermost blocks of `module` as in `find_units`, without those inside of compiled modules."""
    is_block = _block_rule(module, by)

    def search(part: nn.Module) -> Iterator[nn.Module]:
        if is_region(part):
            return
        if is_block(part):
            yield part
            return
        for child in part.children():
            yield from search(child)

    return list(dict.fromkeys(search(module)))


_Owner = tuple[str, nn.Module, list[nn.Parameter]]

# Modules that use their children's parameters without calling the children.
_WHOLE = (nn.MultiheadAttention,)


def _owners(module: nn.Module, name: str, is_block: Callable[[nn.Module], bool]) -> Iterator[_Owner]:
    """Yields name, module and parameters of the modules on which hooks are registered."""
    if (
        is_block(module)
        or isinstance(module, _WHOLE)
        or parametrize.is_parametrized(module)
        or is_region(module)  # hooks can't run inside of compiled code
    ):
        yield name, module, list(module.parameters())
        return
    own = list(module.parameters(recurse=False))
    children = []
    for child_name, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):  # they have no forward: their parent uses them
            own += child.parameters()
        else:
            children.append((child_name, child))
    if own:
        yield name, module, own
    for child_name, child in children:
        yield from _owners(child, f"{name}.{child_name}" if name else child_name, is_block)


def _block_rule(
    module: nn.Module, by: Sequence[str] | Callable[[nn.Module], bool] | None
) -> Callable[[nn.Module], bool]:
    if isinstance(by, str):
        raise ValueError(f"`units={by!r}` must be a list of class names, such as [{by!r}], or a function.")
    if callable(by):
        return by
    if by is not None:
        check_unit_classes(module, by)
        chosen = set(by)
    else:
        chosen = {name for child in module.modules() for name in getattr(child, "_no_split_modules", None) or ()}
        chosen &= _class_names(module)
    if chosen:
        return lambda child: type(child).__name__ in chosen
    repeated = {
        child
        for container in module.modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for child in _repeated(container)
    }
    return lambda child: child in repeated


def check_unit_classes(module: nn.Module, names: Sequence[str]) -> None:
    """Raises a ValueError if a class name of the argument `units` is not that of a module in `module`."""
    classes = _class_names(module)
    if missing := sorted(set(names) - classes):
        raise ValueError(
            f"`units` names {', '.join(missing)}, which the model does not contain. Give names without modules, of its "
            f"classes: {', '.join(sorted(classes))}."
        )


def _class_names(module: nn.Module) -> set[str]:
    return {type(child).__name__ for child in module.modules()}


def _repeated(container: nn.Module) -> list[nn.Module]:
    """Returns the children with parameters, if at least two of them have the same class."""
    children = [child for child in container.children() if any(True for _ in child.parameters())]
    count = Counter(type(child) for child in children)
    return children if any(number > 1 for number in count.values()) else []
