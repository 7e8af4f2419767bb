"""Parts of one training in copies of the Trainer or the module, which user code may make at any hook."""

from collections.abc import Callable
from typing import Any


class Uncopied:
    """Base class of objects that own threads, files or buffers of one training, or work on its tensors.

    In a copy (`copy.deepcopy`, pickle) of an object that refers to one there is None in its place: the copy does not
    continue the training.
    """

    def __reduce__(self) -> Any:
        return _none, ()


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


def _none() -> None:
    return None
