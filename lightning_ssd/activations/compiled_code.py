"""State of `torch.compile` in this process, without an import of it by trainings that do not compile."""

import sys
from typing import Any

import torch

__all__ = ["compile_seconds", "records_cuda_graphs"]


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
