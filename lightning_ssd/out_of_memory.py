"""The note on an OutOfMemoryError: the uses of the memory, and arguments that reduce them."""

import traceback
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ssd.activations import ActivationOffloader, OffloadConfig, storage_of
from lightning_ssd.device import allocator_memory, available_memory, process_gpu_memory
from lightning_ssd.model_states import ModelStates
from lightning_ssd.sizes import format_bytes

FRAGMENTED = 0.1
"""Share of the allowed memory that is reserved and not allocated, from which the note advises on fragmentation."""


def explain_out_of_memory(
    error: BaseException,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    offloader: ActivationOffloader,
    model_states: ModelStates | None,
    config: OffloadConfig,
    *,
    planned: bool,
) -> str:
    """Returns a text that names the module that ran, allowed bytes, used bytes by class of tensors, and remedies.

    Args:
        error: the OutOfMemoryError.
        module: the model.
        optimizers: optimizers of the model.
        offloader: activation offloader of the training.
        model_states: offloaded model states; `None`: all are on the device.
        config: the user's arguments for activations.
        planned: whether a `SwapPlanner` chooses the offloaded activations.
    """
    device = offloader.device
    # Reading attributes of an offloaded parameter could prefetch it.
    offloaded = set() if model_states is None else model_states.parameters
    with torch._C.DisableTorchFunctionSubclass():
        resident = [parameter for parameter in module.parameters() if parameter not in offloaded]
        states = {
            "weights": _bytes_on(device, resident),
            "gradients": _bytes_on(device, [parameter.grad for parameter in resident]),
            "optimizer states": _bytes_on(device, tree_leaves([dict(one.state) for one in optimizers])),
        }
    if model_states is not None:
        states["buffers for offloaded weights"] = model_states.weight_room_bytes
    activations = offloader.resident_bytes()
    uses = states | {"saved activations that were not offloaded": activations}
    used = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in uses.items())
    total = sum(states.values())
    helps = [_help_for_activations(config, planned)]
    helps.insert(1 if activations > total else 0, _help_for_states(total, model_states))
    helps += ["gradient checkpointing of the model", "a smaller batch"]
    allowed, fragmented = _describe_device(device)
    if fragmented:
        helps.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments of reserved memory")
    return (
        f"lightning_ssd: {_describe_module(module, error)}{allowed} "
        f"Known uses: {used}; the rest is temporary tensors, and tensors of no known class. "
        f"What would help: {'; '.join(helps)}."
    )


def _describe_module(module: nn.Module, error: BaseException) -> str:
    """Returns a sentence with the innermost module whose code ran; "" if there is none, as in most of backward."""
    names = {id(child): name for name, child in module.named_modules() if name}
    text = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ran = frame.f_locals.get("self")
        if isinstance(ran, nn.Module) and id(ran) in names:
            text = f"memory ran out in the module `{names[id(ran)]}` ({type(ran).__name__}); "
    return text


def _describe_device(device: torch.device) -> tuple[str, bool]:
    """Returns a sentence about the device's memory, and whether much of it is fragments."""
    memory = allocator_memory(device)
    if memory is None:
        return f"{format_bytes(available_memory())} of RAM are free.", False
    allowed, allocated, reserved = process_gpu_memory(device), memory.allocated(), memory.reserved()
    text = (
        f"this process may use {format_bytes(allowed)} of the GPU; {format_bytes(allocated)} are allocated, "
        f"{format_bytes(memory.peak())} at the peak, and {format_bytes(reserved)} reserved."
    )
    return text, reserved - allocated > FRAGMENTED * allowed


def _help_for_activations(config: OffloadConfig, planned: bool) -> str:
    if planned:
        return "`SwapPlanner(gpu_memory=...)` with fewer bytes, which offloads or recomputes more activations"
    planner = "`callbacks=[SwapPlanner(gpu_memory=...)]`, which plans activations within a budget"
    if config.amount() == "none":
        return f"`offload='auto'`, which offloads activations; {planner}"
    if config.amount() == 1.0:
        return planner
    return f"`offload=1.0`, which offloads all activations; {planner} (with `offload='auto'`)"


def _help_for_states(nbytes: int, model_states: ModelStates | None) -> str:
    if model_states is None:
        return f"`states='host'` or `states='ssd'`, which offload {format_bytes(nbytes)} of weights and their states"
    return "fewer bytes as `gpu_memory` of the strategy, so that fewer weights are on the GPU at once"


def _bytes_on(device: torch.device, values: Iterable[object]) -> int:
    """Returns the bytes of the storages on `device` of the tensors among `values`."""
    storages = {
        storage_of(value)._cdata: storage_of(value).nbytes()
        for value in values
        if isinstance(value, Tensor) and value.layout is torch.strided and value.device == device
    }
    return sum(storages.values())
