"""The note on an OutOfMemoryError: the uses of the memory, and arguments that reduce them."""

import re
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import ActivationOffloader, OffloadConfig
from lightning_ssd.device import allocator_memory, available_memory, process_gpu_memory
from lightning_ssd.model_states import ModelStates, TensorLocation
from lightning_ssd.remedies import CHUNKED_LOSS
from lightning_ssd.sizes import format_bytes
from lightning_ssd.uncopied import Uncopied

FRAGMENTED = 0.1
"""Reserved and unallocated share of the allowed memory, from which on the note advises on fragmentation."""

LOSSES = ("log_softmax", "nll_loss", "cross_entropy")
"""Parts of names of operators, and of lines of code, that compute a loss of logits."""


def explain_out_of_memory(
    error: BaseException,
    module: nn.Module,
    locations: Sequence[TensorLocation],
    offloader: ActivationOffloader,
    model_states: ModelStates | None,
    config: OffloadConfig,
    *,
    planned: bool,
) -> str:
    """Returns a text that names where memory ran out, missing and allowed bytes, used bytes by class, and remedies.

    Args:
        model_states: offloaded model states; `None`: all are on the device.
        config: the user's arguments for activations.
        planned: whether a `SwapPlanner` chooses the offloaded activations.
    """
    device = offloader.device
    states = Counter({"weights": 0, "gradients": 0, "optimizer states": 0})
    for row in locations:
        if row.tier == "gpu":
            states[f"{row.kind}s"] += row.nbytes
    if model_states is not None:
        states["buffers for offloaded weights"] = model_states.nbytes.device
    activations = offloader.resident_bytes()
    uses = {**states, "saved activations that were not offloaded": activations}
    used = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in uses.items())
    total = sum(states.values())
    helps = [_help_for_activations(config, planned)]
    helps.insert(1 if activations > total else 0, _help_for_states(total, model_states))
    checkpointing = "gradient checkpointing of the model"
    if activations:
        checkpointing += f", which drops most of the {format_bytes(activations)} of saved activations"
    helps += [checkpointing, _help_by_samples(error, device, total)]
    failure = _describe_failure(error, module)
    code = [failure, *(frame.line or "" for frame in traceback.extract_tb(error.__traceback__))]
    if any(name in text for name in LOSSES for text in code):
        helps.insert(0, CHUNKED_LOSS)
    allowed, fragmented = _describe_device(device, error)
    if fragmented:
        helps.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments of reserved memory")
    return (
        f"lightning_ssd: memory ran out{failure}; {allowed} "
        f"Known uses: {used}; the rest is temporary tensors, and tensors of no known class. "
        f"What would help: {'; '.join(helps)}."
    )


class NamedOperators(Uncopied, internals.TorchDispatchMode):
    """Adds the operator that raises an error to the error's traceback, which `_describe_failure` reads.

    Autograd calls the operators of a backward from C++, so that a traceback does not contain them otherwise. The mode
    has no effect on results. Code must not be compiled inside it.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _describe_failure(error: BaseException, module: nn.Module) -> str:
    """Returns the place at which an OutOfMemoryError was raised, for the end of a clause.

    It consists of the innermost part of `module` whose code ran, and the operator with the shapes of its arguments, or
    the innermost line of code if the traceback has no operator. Operators that backward calls are known inside
    `NamedOperators` only.
    """
    names = {id(part): name for name, part in module.named_modules() if name}
    part = operator = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        ran = frame.f_locals.get("self")
        if isinstance(ran, nn.Module) and id(ran) in names:
            part = f" in the module `{names[id(ran)]}` ({type(ran).__name__})"
        for called in (frame.f_locals.get("func"), ran):
            if isinstance(called, internals.OperatorBase):
                operator = f" in the operator `{called}`{_describe_tensors(frame.f_locals.get('args'))}"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if not operator and last and last[0].line:
        operator = f" at `{last[0].line}` ({Path(last[0].filename).name}:{last[0].lineno})"
        if "run_backward(" in last[0].line:
            operator = " in backward"
    return ",".join(filter(None, (part, operator)))


def _describe_tensors(args: object) -> str:
    """Returns the dtypes and shapes of the tensors among `args`, for a sentence, or nothing."""
    tensors = [value for value in internals.tree_leaves(args) if isinstance(value, Tensor)]
    with internals.without_torch_function():
        return " of " + ", ".join(f"{str(one.dtype)[6:]}{list(one.shape)}" for one in tensors) if tensors else ""


def _describe_device(device: torch.device, error: BaseException) -> tuple[str, bool]:
    """Returns a clause about the device's memory, and whether much of it is fragments."""
    memory = allocator_memory(device)
    if memory is None:
        return f"{format_bytes(available_memory())} of RAM are free.", False
    allowed, allocated, reserved = process_gpu_memory(device), memory.allocated(), memory.reserved()
    text = (
        f"{_describe_missing(str(error), allowed, allocated)}this process may use {format_bytes(allowed)} of the GPU; "
        f"{format_bytes(allocated)} are allocated, {format_bytes(memory.peak())} at the peak, and "
        f"{format_bytes(reserved)} reserved."
    )
    return text, reserved - allocated > FRAGMENTED * allowed


def _needed_bytes(message: str, allocated: int) -> int | None:
    """Returns the bytes that would be allocated if the failed allocation had not failed; None: they are not known.

    `allocated` bytes are allocated now, which count where torch's message does not have those of the failure.
    """
    tried = re.search(r"Tried to allocate ([\d.]+) (\w+)", message)
    if tried is None:
        return None
    used = re.search(r"([\d.]+) (\w+) is allocated by PyTorch", message)
    return _bytes_of(tried) + (allocated if used is None else _bytes_of(used))


def _help_by_samples(error: BaseException, device: torch.device, states: int) -> str:
    """Returns the remedy of a smaller batch, with the samples that would fit by the bytes that the failed ones needed.

    `states` bytes of model states are on the device, which the number of samples does not change.
    """
    memory, samples = allocator_memory(device), _num_samples(error)
    needed = None if memory is None else _needed_bytes(str(error), memory.allocated())
    if needed is None or samples is None or needed <= states:
        return "a smaller batch"
    fitting = int(samples * (process_gpu_memory(device) - states) / (needed - states))
    if not 0 < fitting < samples:
        return "a smaller batch"
    return f"a smaller batch: of {samples} samples, at most about {fitting} fit"


def _num_samples(error: BaseException) -> int | None:
    """Returns the length of the first dimension of the batch in Lightning's loop; None: it is not known."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        tensors = [one for one in internals.tree_leaves(frame.f_locals.get("batch")) if isinstance(one, Tensor)]
        if tensors and tensors[0].dim():
            return len(tensors[0])
    return None


def _describe_missing(message: str, allowed: int, allocated: int) -> str:
    """Returns a clause with the bytes that the failed allocation needed beyond the allowed ones."""
    tried, needed = re.search(r"Tried to allocate ([\d.]+) (\w+)", message), _needed_bytes(message, allocated)
    if tried is None or needed is None:
        return ""
    missing = needed - allowed
    if missing > 0:
        return f"{format_bytes(missing)} are missing; "
    free = re.search(r"of which ([\d.]+) (\w+) is free", message)
    unused = re.search(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated", message)
    if free is not None and _bytes_of(free) + (0 if unused is None else _bytes_of(unused)) < _bytes_of(tried):
        return f"other processes have left {format_bytes(_bytes_of(free))} of the GPU; "
    return "enough memory is free, but in smaller fragments; "


def _bytes_of(amount: re.Match[str]) -> int:
    """Returns the bytes of a number and its unit in a message of torch's allocator."""
    return int(float(amount[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB").index(amount[2]))


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
