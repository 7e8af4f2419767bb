"""Parts of one training in copies of the Trainer or the module, which user code may make at any hook."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Uncopied:
    """Base class of objects that own threads, files or buffers of one training, or work on its tensors.

    A copy (`copy.deepcopy`, pickle) of an object that refers to one has None in its place: the copy does not continue
    the training.
    """

    def __reduce__(self) -> Any:
        return _none, ()


class _Unscriptable:
    """A hook on a module, which makes `torch.jit.script` of the module raise an error with the reason."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "`torch.jit.script` compiles the hooks of a module, and this module trains under offloading, or is a copy "
            "of one that does. Script a new module that has loaded the `state_dict()`."
        )


class ModuleHook(_Unscriptable):
    """A hook on a module. In copies of the module (`copy.deepcopy`, pickle) it is replaced by a hook without effect.

    Args:
        function: called with the hook's arguments.
        in_reruns: whether it also runs around a forward that activation checkpointing of a unit runs again.
    """

    def __init__(self, function: Callable[..., Any], *, in_reruns: bool = False) -> None:
        self._function = function
        self.in_reruns = in_reruns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> "NoHook":
        return NoHook()

    def __reduce__(self) -> "tuple[type[NoHook], tuple[()]]":
        return NoHook, ()


class NoHook(_Unscriptable):
    """A hook that does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def is_users_hook(hook: object) -> bool:
    """Returns whether a hook of a module is not one of this package."""
    return not isinstance(hook, _Unscriptable)


def takes_hooks(module: nn.Module) -> bool:
    """Returns whether hooks can be registered on `module`: modules of TorchScript refuse them."""
    return not isinstance(module, torch.jit.ScriptModule)


def _none() -> None:
    return None
