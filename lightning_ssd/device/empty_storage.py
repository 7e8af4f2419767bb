"""Storages whose memory is freed while tensors refer to them, and which torch refuses to read.

Some functions of torch read a tensor's memory in C++ and call no hook of Python, such as `torch.tensor(p)`. Without
memory they end the process. Torch that is built with CUDA can raise an error at each access to a storage, for CUDA
graphs. Torch that is built without CUDA has no such function, and older versions can't undo it: they refuse nothing.
"""

import torch

from lightning_ssd import torch_internals as internals


def refuse_access(storage: torch.UntypedStorage, owner: str) -> None:
    """Makes reads and writes of a storage without memory raise RuntimeError, if torch can.

    Args:
        owner: names the offloaded tensors in the message.
    """
    internals.refuse_storage_access(
        storage,
        f"the memory of {owner} is used, which is offloaded, by a function that torch has no hook for. Use "
        "`.detach()` or `.clone()` of the tensor, or call the function inside `with "
        "trainer.strategy.whole_weights():`.",
    )


def allow_access(storage: torch.UntypedStorage) -> None:
    """Allows reads and writes again, before memory is allocated."""
    internals.allow_storage_access(storage)
