"""Keeps Dynamo out of the hooks that autograd calls."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a method that Dynamo must neither compile nor trace.

    Autograd calls hooks wherever user code runs, also between the frames of a function that Dynamo compiles or has
    skipped, and hooks are no part of the user's program. `torch.compiler.disable` has the same effect, but looks up the
    state of exports and stances in each call, which takes the host as long as packing a small tensor.
    """

    def run(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        callback = set_eval_frame(None)
        try:
            return hook(*arguments, **keywords)
        finally:
            set_eval_frame(callback)

    return functools.update_wrapper(skipped(run), hook)


def skipped(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that Dynamo must neither compile nor trace. Functions that it calls may be compiled."""
    skip_code(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls from compiled code
    return function
