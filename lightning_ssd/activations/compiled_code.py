"""State of `torch.compile` in this process, without an import of it by trainings that do not compile."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.torch_internals import compile_seconds, count_compiled

__all__ = ["GuardHook", "check_no_cuda_graphs", "compile_seconds", "count_compiled", "records_cuda_graphs"]


class GuardHook:
    """Calls a function whenever Dynamo has checked the guards of compiled code, until `close`, if torch can.

    Dynamo has one hook for the process, which serves all open objects and the hook of other code that it replaces. It
    is called on the thread that calls compiled code.

    Args:
        action: the function.
    """

    _open: "ClassVar[list[GuardHook]]" = []
    _replaced: ClassVar[Callable[[bool], bool] | None] = None
    """The hook of other code."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        if not self._open:
            GuardHook._replaced = internals.set_guard_hook(_on_guards)
        self._open.append(self)

    def close(self) -> None:
        """Ends the calls, which cost the host a call of Python for each check of guards."""
        if self not in self._open:
            return
        self._open.remove(self)
        if not self._open:
            present = internals.set_guard_hook(GuardHook._replaced)
            if present is not _on_guards:  # other code has replaced ours since
                internals.set_guard_hook(present)


def _on_guards(found: bool) -> bool:
    """Calls the functions of all open objects, and returns the answer of the hook that this one has replaced."""
    for hook in tuple(GuardHook._open):
        hook._action()
    return found if GuardHook._replaced is None else GuardHook._replaced(found)


def records_cuda_graphs(device: torch.device) -> bool:
    """Returns whether Inductor records CUDA graphs on `device`, as with `mode="reduce-overhead"`.

    Called on the training thread, which runs the compiled forwards.
    """
    if device.type != "cuda":
        return False
    return internals.has_cuda_graphs(torch.cuda.current_device() if device.index is None else device.index)


def check_no_cuda_graphs(module: nn.Module, device: torch.device) -> None:
    """Refuses modules that are compiled with CUDA graphs, in a training whose weights are offloaded.

    A recorded graph reads weights at the addresses that they had when it was recorded. Offloaded weights have another
    address after each prefetch. Functions that `training_step` compiles itself are not found.

    Args:
        module: the model.
        device: the training device. Only on a GPU are graphs recorded.

    Raises:
        ValueError: a part of `module` is compiled with CUDA graphs, as with `mode="reduce-overhead"`.
    """
    if device.type != "cuda":
        return
    for name, part in module.named_modules():
        if _uses_cuda_graphs(part):
            raise ValueError(
                f"{name or type(module).__name__} is compiled with CUDA graphs (`mode='reduce-overhead'`), which need "
                "weights at fixed addresses, and addresses of offloaded weights change. Compile without that mode, or "
                "set `states='gpu'`."
            )


def _uses_cuda_graphs(part: nn.Module) -> bool:
    """Returns whether calls or methods of `part` are compiled with CUDA graphs."""
    return any(config.get("triton.cudagraphs") for config in _configs(part))


def _configs(part: nn.Module) -> list[dict[str, Any]]:
    """Returns Inductor's settings for the calls and methods of `part`, as far as they are compiled by it."""
    functions = [value for value in vars(part).values() if isinstance(value, FunctionType)]
    readers = [vars(part).get("get_compiler_config"), *(vars(one).get("get_compiler_config") for one in functions)]
    configs = [reader() for reader in readers if reader is not None]
    return [one for one in configs if isinstance(one, dict)]
