"""Module hooks of one training, which copies of the modules do not have."""

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook on a module. In copies of the module (`copy.deepcopy`, pickle) it is replaced by a hook without effect.

    Args:
        function: called with the hook's arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_no_hook, ()


def no_hook(*args: Any, **kwargs: Any) -> None:
    """A hook that does nothing."""


def _make_no_hook() -> Callable[..., None]:
    return no_hook
