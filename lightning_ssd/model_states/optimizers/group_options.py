"""Options of parameter groups that steps of offloaded parameters use: copies, made before the optimizer's own code.

Schedulers change tensors and lists in place, while steps run; so do optimizers that count or cache in a list.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd.model_states.optimizers.optimizers import Options
from lightning_ssd.model_states.units import FlatParameter


class GroupOptions:
    """The options of the running optimizer step: those of the groups when a flat parameter's step is submitted.

    Steps that are submitted after the optimizer's own code has begun use the options from before it.

    Threads: as `StepScheduler`, which owns this object.

    Args:
        groups: optimizer and index of the parameter group of each flat parameter that is stepped.
    """

    def __init__(self, groups: Mapping[FlatParameter, tuple[Optimizer, int]]) -> None:
        self._groups = groups
        self._noted: tuple[Optimizer, list[Options]] | None = None
        """The optimizer whose own code has begun to step, and the options of its groups then; None: none has begun."""
        self._submitted: dict[FlatParameter, Options] = {}
        """Options that submitted steps were given; those steps have copies of their own."""

    def submit(self, flat: FlatParameter) -> Options:
        """Returns the options for a step of `flat` that is submitted now, which owns them."""
        optimizer, number = self._groups[flat]
        present: Sequence[Options] = optimizer.param_groups
        if self._noted is not None and self._noted[0] is optimizer:
            present = self._noted[1]
        options = _copy_options(present[number])
        self._submitted[flat] = _copy_options(options)
        return options

    def note(self, optimizer: Optimizer) -> None:
        """Notes the options of the parameter groups, for the steps that are submitted after the optimizer's own code.

        Called before that code, which may change them: it may count its steps in the groups.

        Raises:
            RuntimeError: an option was changed since the step of a flat parameter was submitted with it.
        """
        options = [_copy_options(group) for group in optimizer.param_groups]
        self._noted = optimizer, options
        for flat, used in self._submitted.items():
            number = self._groups[flat][1]
            for name, value in options[number].items():
                # Most values are the same objects, whose comparison costs no Python call here.
                if used.get(name, used) is not value and (name not in used or not _equal(used[name], value)):
                    raise RuntimeError(
                        f"`{name}` of parameter group {number} of {type(optimizer).__name__} was changed during "
                        f"backward, after the optimizer step of {flat.name} had begun. Change it before backward, or "
                        "set `overlap='none'`."
                    )

    def forget(self) -> None:
        """Forgets what `note` has noted: a closure runs, and the optimizer's own code goes on after it."""
        self._noted = None

    def end(self) -> None:
        """Ends the optimizer step."""
        self._noted = None
        self._submitted.clear()


_IMMUTABLE = frozenset([bool, float, int, str, type(None)])
"""Types of most options, which are not copied, and neither are tuples of them."""


def _copy_options(group: Mapping[str, Any]) -> Options:
    """Returns copies of the options of a parameter group."""
    return {
        name: value
        if type(value) in _IMMUTABLE
        or name == "param_names"
        or (type(value) is tuple and _IMMUTABLE.issuperset(map(type, value)))
        else _copy(value)
        for name, value in group.items()
        if name != "params"
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return {key: _copy(one) for key, one in value.items()} if type(value) is dict else value


def _equal(value: Any, other: Any) -> bool:
    """Returns whether an option that `_copy` has copied is equal to another one."""
    if value is other:
        return True
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        same_kind = (value.shape, value.dtype) == (other.shape, other.dtype)
        return same_kind and bool(((value == other) | (value.isnan() & other.isnan())).all())
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_equal(one, other[key]) for key, one in value.items())
    return bool(value == other) or bool(value != value and other != other)  # NaN
