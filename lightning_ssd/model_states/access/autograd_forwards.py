"""Code of the forwards of autograd functions, by which a stack of calls shows a running autograd function.

What calls the forwards, `Function.apply`, has no frame on the stack since torch 2.14: it is a function in C.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, cast

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction


def autograd_forwards() -> Mapping[int, CodeType]:
    """Returns the code of the forward of each `torch.autograd.Function`, by identity.

    Code is hashed by its contents, which takes longer than a whole search of the stack by identity.
    """
    # Each definition of a function, also of one that inherits from another, adds a direct subclass, in their order.
    return _forwards(cast(object, BackwardCFunction.__subclasses__()[-1]))


@functools.lru_cache(maxsize=1)
def _forwards(newest: object) -> Mapping[int, CodeType]:
    """Returns the code of the forwards of all functions.

    The cache keeps the class of the newest function alive, so that no later one has its identity.
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
    code: CodeType | None = getattr(called, "__code__", None)
    return code
