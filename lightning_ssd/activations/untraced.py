"""Keeps Dynamo out of the hooks that autograd calls."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lightning_ssd import torch_internals as internals

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a method that Dynamo must neither compile nor trace.

    Autograd calls hooks wherever user code runs, also between the frames of a function that Dynamo compiles or has
    skipped, and hooks are no part of the user's program. `torch.compiler.disable` has the same effect, but looks up the
    state of exports and stances in each call, which takes the host as long as packing a small tensor.
    """

    def run(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        callback = internals.set_eval_frame(None)
        try:
            return hook(*arguments, **keywords)
        finally:
            internals.set_eval_frame(callback)

    return functools.update_wrapper(internals.skipped_by_dynamo(run), hook)
