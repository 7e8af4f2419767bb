"""`Optimizer.state` while the states of some parameters are offloaded."""

from collections import defaultdict
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer


def guard_state(
    optimizer: Optimizer,
    offloaded: Collection[nn.Parameter],
    has_state: Callable[[nn.Parameter], bool],
    copy_state: Callable[[nn.Parameter], dict[str, Any]],
) -> Callable[[], None]:
    """Makes uses of the states of offloaded parameters in `optimizer.state` raise an error.

    Args:
        offloaded: its parameters whose states are offloaded.
        has_state: returns whether one of them has a state by now.
        copy_state: returns a copy of its state.

    Returns:
        A function that restores `optimizer.state`, and raises RuntimeError if other code has assigned it.
    """

    def guard(optimizer: Optimizer) -> None:
        optimizer.state = OffloadedOptimizerState(optimizer, offloaded, has_state, copy_state)

    guard(optimizer)
    handle = optimizer.register_load_state_dict_post_hook(guard)  # loading assigns another `state`

    def restore() -> None:
        handle.remove()
        try:
            check_state(optimizer)
        finally:
            optimizer.state = defaultdict(dict, resident_states(optimizer))

    return restore


def resident_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the states in `Optimizer.state` without those of offloaded parameters, which are elsewhere."""
    return dict(dict.items(optimizer.state))


def check_state(optimizer: Optimizer) -> None:
    """Raises RuntimeError if other code has assigned `Optimizer.state`."""
    if not isinstance(optimizer.state, OffloadedOptimizerState):
        raise RuntimeError(
            f"`state` of {type(optimizer).__name__} was assigned during training, and the states of some of its "
            f"parameters are offloaded. {_CHANGE}"
        )


class OffloadedOptimizerState(defaultdict[Any, Any]):
    """The type of `Optimizer.state`, except that a use of the state of an offloaded parameter raises an error.

    Its keys are those of plain training. The values of offloaded parameters are objects whose use raises the error.

    Raises:
        RuntimeError: on a lookup, an assignment, a removal, or a use of a value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        offloaded: Collection[nn.Parameter],
        has_state: Callable[[nn.Parameter], bool],
        copy_state: Callable[[nn.Parameter], dict[str, Any]],
    ) -> None:
        super().__init__(dict, resident_states(optimizer))
        self._offloaded = offloaded
        self._has_state = has_state
        self._copy_state = copy_state
        self._class = type(optimizer).__name__

    def __missing__(self, key: Any) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, _Unavailable):  # code that maps the tensors in all values assigns the same object
            self._check(key)
            super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (key in self._offloaded and self._has_state(key))

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        yield from self._present()

    def __len__(self) -> int:
        return super().__len__() + len(self._present())

    def keys(self) -> KeysView[Any]:  # type: ignore[override]
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return dict(self.items()).values()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        unavailable = _Unavailable(self._class)
        return {**dict(super().items()), **dict.fromkeys(self._present(), unavailable)}.items()

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        if self._present():
            _refuse(self._class)
        return super().popitem()

    def update(self, *args: Any, **kwargs: Any) -> None:
        MutableMapping.update(self, *args, **kwargs)  # by `__setitem__`

    def clear(self) -> None:
        if self._present():
            _refuse(self._class)
        super().clear()

    def __reduce__(self) -> Any:
        copies = {parameter: self._copy_state(parameter) for parameter in self._present()}
        return defaultdict, (dict,), None, None, iter({**dict(super().items()), **copies}.items())

    def _present(self) -> list[nn.Parameter]:
        """Returns the offloaded parameters that have a state by now."""
        return [parameter for parameter in self._offloaded if self._has_state(parameter)]

    def _check(self, key: Any) -> None:
        if key in self._offloaded:
            _refuse(self._class)


class _Unavailable:
    """A state in `Optimizer.state` that is offloaded: each use raises an error."""

    def __init__(self, name: str) -> None:
        self._optimizer = name

    def _use(self, *_: Any) -> NoReturn:
        _refuse(self._optimizer)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _use
    get = items = keys = values = pop = update = setdefault = clear = _use


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"the {name} state of this parameter is offloaded, and `optimizer.state` does not have it. Read it in "
        f"`optimizer.state_dict()`. {_CHANGE}"
    )


_CHANGE = (
    "Change states with `optimizer.load_state_dict`, reset all of them with `optimizer.load_state_dict({'state': {}, "
    "'param_groups': optimizer.state_dict()['param_groups']})`, or set `states='gpu'`."
)
