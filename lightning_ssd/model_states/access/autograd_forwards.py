"""The running forward of an `autograd.Function` of user code, which a stack of calls shows by the code of the forward.

What calls the forward, `Function.apply`, has no frame on the stack since torch 2.14: it is a function in C.
"""

import functools
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

_FRAMES = 32
"""Python calls between an autograd function and an operator that it runs, at most."""


def is_given_to_forward(value: Tensor, frame: FrameType | None) -> bool:
    """Returns whether the call of `frame` is made by the forward of an autograd function that was given `value`."""
    # Each definition of a function, also of one that inherits from another, adds a direct subclass, in their order.
    forwards = _forwards(cast(object, BackwardCFunction.__subclasses__()[-1]))
    for _ in range(_FRAMES):
        if frame is None:
            break
        if id(frame.f_code) in forwards and _has_argument(frame, value):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1)
def _forwards(newest: object) -> Container[int]:
    """Returns the identity of the code of the forward of each function.

    Code is hashed by its contents, which takes longer than a whole search of the stack by identity. The cache keeps
    the class of the newest function alive, so that no later one has its identity, and the code, for the same reason.
    """
    codes = (_code_of(function.forward) for function in _subclasses(Function))
    return {id(code): code for code in codes if code is not None}


def _subclasses(base: type[Function]) -> Iterator[type[Function]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """Returns the code of the first frame of a call of `function`, or None if it is no code of Python."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(called, "__code__", None)


def _has_argument(frame: FrameType, value: Tensor) -> bool:
    """Returns whether a call was given `value`. All locals count, because a call may have renamed its arguments."""
    for given in frame.f_locals.values():
        if given is value or (isinstance(given, tuple) and any([one is value for one in given])):
            return True
    return False
