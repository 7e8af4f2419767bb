"""State of `torch.compile` in this process, without an import of it by trainings that do not compile."""

import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

__all__ = ["check_no_cuda_graphs", "compile_seconds", "records_cuda_graphs"]


def compile_seconds() -> float:
    """Returns the seconds that `torch.compile` has taken in this process since the last `torch.compiler.reset`."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))


def records_cuda_graphs(device: torch.device) -> bool:
    """Returns whether Inductor records CUDA graphs on `device`, as with `mode="reduce-overhead"`.

    Called on the training thread, which runs the compiled forwards.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return trees.get_manager(index, create_if_none_exists=False) is not None


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
    functions = [value for value in vars(part).values() if isinstance(value, FunctionType)]
    readers = [vars(part).get("get_compiler_config"), *(vars(one).get("get_compiler_config") for one in functions)]
    settings = [reader() for reader in readers if reader is not None]
    return any(isinstance(one, dict) and one.get("triton.cudagraphs") for one in settings)
