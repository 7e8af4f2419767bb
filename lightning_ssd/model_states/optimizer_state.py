"""`Optimizer.state` while the states of some parameters are offloaded."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer


def guard_state(optimizer: Optimizer, offloaded: Container[nn.Parameter]) -> Callable[[], None]:
    """Makes lookups of the states of offloaded parameters in `optimizer.state` raise an error.

    Returns:
        A function that restores `optimizer.state`.
    """

    def guard(optimizer: Optimizer) -> None:
        optimizer.state = OffloadedOptimizerState(optimizer, offloaded)

    guard(optimizer)
    handle = optimizer.register_load_state_dict_post_hook(guard)  # loading assigns another `state`

    def restore() -> None:
        handle.remove()
        optimizer.state = defaultdict(dict, optimizer.state)

    return restore


def check_state(optimizer: Optimizer) -> None:
    """Raises RuntimeError if other code has assigned `Optimizer.state`."""
    if not isinstance(optimizer.state, OffloadedOptimizerState):
        raise RuntimeError(
            f"`state` of {type(optimizer).__name__} was assigned during training, and the states of some of its "
            "parameters are offloaded. Change them with `load_state_dict`, or set `states='gpu'`."
        )


class OffloadedOptimizerState(defaultdict[Any, Any]):
    """The type of `Optimizer.state`, except that a lookup of an offloaded parameter raises an error.

    Args:
        optimizer: the user's optimizer.
        offloaded: parameters whose states are offloaded.

    Raises:
        RuntimeError: on a lookup or an assignment.
    """

    def __init__(self, optimizer: Optimizer, offloaded: Container[nn.Parameter]) -> None:
        super().__init__(dict, optimizer.state)
        self._offloaded = offloaded
        self._class = type(optimizer).__name__

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, _items(self)

    def _check(self, key: Any) -> None:
        if key in self._offloaded:
            raise RuntimeError(
                f"the {self._class} state of this parameter is offloaded, and `optimizer.state` does not have it. Read "
                "it in `optimizer.state_dict()`, change it with `load_state_dict`, or set `states='gpu'`."
            )


def _items(state: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return iter(list(state.items()))
