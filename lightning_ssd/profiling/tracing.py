"""Traces a training step on tensors without memory: bytes and FLOPs are exact, times are calculated.

The user's own `training_step` runs forward and backward once under torch's `FakeTensorMode`, in which tensors have
shapes and no values, and is recorded by the `TraceMode` that also profiles real trainings.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import ForwardGraph, is_weight, tensors_of, written
from lightning_ssd.model_states import Unit
from lightning_ssd.planning import HardwareProfile
from lightning_ssd.profiling.lifetimes import LifetimeRecorder
from lightning_ssd.profiling.trace_mode import OptimizerTrace, TraceMode, count_flops, returns_view

MAX_FLOATS, MAX_CREATED = 2**12, 2**24
"""Most elements of a tensor whose real values are computed: of floats, and of the result of a factory function."""


class TracingError(ValueError):
    """The control flow of `training_step` depends on values, or an operator's output shape can't be inferred."""


@contextlib.contextmanager
def fake_tensors() -> Iterator["internals.fake_tensor.FakeTensorMode"]:
    """Yields a mode under which modules are built and run without memory. Scalars (`loss.item()`) are unknown there."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    with internals.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True) as mode:
        internals.FakeTensor.__deepcopy__ = _copy  # type: ignore[method-assign]  # torch's own copies the bytes, of which there are none
        # `Module.to` swaps such tensors. Torch refuses to swap tensors with weak references, which the mode holds.
        utils: Any = torch.utils
        weakref, utils.weakref = utils.weakref, SimpleNamespace(getweakrefs=lambda tensor: [])
        try:
            yield mode
        finally:
            utils.weakref = weakref
            del internals.FakeTensor.__deepcopy__


def _copy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    return memo[id(tensor)]


def trace(
    units: Sequence[Unit],
    module: nn.Module,
    run: Callable[[Any], Tensor],
    batch: Any,
    mode: "internals.fake_tensor.FakeTensorMode",
    hardware: HardwareProfile,
    min_bytes: int,
    lifetimes: LifetimeRecorder | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    casts: Collection[Tensor] = (),
) -> ForwardGraph:
    """Returns the graph of one forward and backward.

    Args:
        module: model that was built under `mode`.
        run: computes the loss of a batch, in the precision of the training.
        batch: any tree of tensors, real ones or fake ones of `mode`.
        mode: active result of `fake_tensors`.
        hardware: rates of the machine. An operation is assumed to take the time of its FLOPs or of its bytes, whichever
            is longer.
        min_bytes: saved tensors with a smaller storage are kept on the device.
        lifetimes: recorder of all tensors' lifetimes in forward, backward and optimizer step; None: no step is made.
        optimizers: optimizers whose steps are recorded. They step twice, first to allocate their states.
        casts: parameters whose casts by autocast count as weights, not as transient memory.

    Raises:
        TracingError: the forward can't be traced without values; the message names the operator.
    """
    recorder = _Tracer([unit.modules for unit in units], hardware, lifetimes, casts)

    def pack(tensor: Tensor) -> "Tensor | _SavedHandle":
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage.nbytes() < min_bytes or is_weight(tensor, storage):
            return tensor
        saved = recorder.saved_storages.get(internals.storage_key(storage))
        if saved is None:
            saved = recorder.saved_storages[internals.storage_key(storage)] = _SavedStorage()
            recorder.on_saved(storage, saved)  # type: ignore[arg-type]  # it needs the identity alone
        return _SavedHandle(tensor, saved)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _SavedHandle):
            recorder.on_unpacked(packed.saved)  # type: ignore[arg-type]
            return packed.tensor
        return packed  # type: ignore[no-any-return]

    with contextlib.ExitStack() as stack:
        stack.callback(recorder.close)
        for weight in (*module.parameters(), *module.buffers()):
            _mark_weight(weight)

        def without_memory(value: Tensor) -> Tensor:
            if isinstance(value, internals.FakeTensor):
                return value
            fake = mode.from_tensor(value)
            recorder.give_value(fake, value.clone())
            return fake

        if lifetimes is not None:
            lifetimes.register_model(units, module, ())
        with internals.fake_tensor.unset_fake_temporarily():
            batch = internals.tree_map_only(Tensor, without_memory, batch)
        with _explained(recorder):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), recorder:
                loss = run(batch)
            recorder.begin_backward()
            try:
                loss.backward()
            finally:
                recorder.end_backward()
        recorder.finish()
        del loss, batch
        if lifetimes is not None:
            lifetimes.register_model(units, None, optimizers)
            for optimizer in optimizers:
                optimizer.step()
            lifetimes.register_model(units, None, optimizers)
            with _explained(recorder), OptimizerTrace(recorder, lifetimes):
                for optimizer in optimizers:
                    optimizer.step()
            lifetimes.close()
    return recorder.graph


class _SavedStorage:
    """Stands for a storage that autograd saves, by its identity."""


@dataclass(frozen=True)
class _SavedHandle:
    """A saved tensor, and its storage."""

    tensor: Tensor
    saved: _SavedStorage


class _Tracer(TraceMode):
    """Records a forward and backward on tensors without memory, with calculated times."""

    compiled_is_one = False  # its time is calculated from its operators

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        hardware: HardwareProfile,
        lifetimes: LifetimeRecorder | None,
        casts: Collection[Tensor],
    ) -> None:
        super().__init__(units, torch.device("cpu"), lifetimes)
        self._hardware = hardware
        self._cast_parameters = casts
        self.saved_storages: dict[int, _SavedStorage] = {}
        self.last_operator: Any = None
        self._values = WeakTensorKeyDictionary()
        """Real values of tensors that depend only on integers of the batch: user code may read such values."""

    def give_value(self, tensor: Tensor, value: Tensor) -> None:
        """Sets the real values of a tensor of integers or of few floats, from which other values are computed."""
        if value.numel() <= MAX_FLOATS or not (value.is_floating_point() or value.is_complex()):
            self._values[tensor] = value

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self.last_operator = func
        known = self._compute(func, args, kwargs)
        if internals.schema_of(func).name == "aten::_local_scalar_dense" and known is not None:
            return known
        result = super().operation(func, args, kwargs)
        if isinstance(result, Tensor) and isinstance(known, Tensor):
            self.give_value(result, known)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the real result of an operation if all its inputs have known values, else None."""
        given = tensors_of((args, kwargs))
        computable = all(value in self._values for value in given)
        if internals.schema_of(func).is_mutable and not computable:
            for value in given:  # its views may be known, too: all known values are dropped
                if value in self._values:
                    self._values.clear()
                    break
            return None
        if not computable or func.namespace != "aten" or "empty" in internals.schema_of(func).name:
            return None
        if not given and prod(args[0] if args and isinstance(args[0], list | tuple) else ()) > MAX_CREATED:
            return None
        with internals.fake_tensor.unset_fake_temporarily(), internals.without_dispatch():
            args, kwargs = internals.tree_map_only(Tensor, lambda value: self._values[value], (args, kwargs))
            return func(*args, **kwargs)

    def run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if func.namespace == "prim" else super().run_backward(func, args, kwargs)

    def run_timed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any] | None]:
        result, span = super().run_timed(func, args, kwargs)
        if span is None:
            return result, None
        flops = count_flops(func, args, kwargs, result) * (0.5 if _is_causal(func, args, kwargs) else 1.0)
        rate = self._hardware.gpu_flops
        if "attention" in func.name():
            rate = min(rate, self._hardware.gpu_attention_flops or rate)
        moved = moved_bytes(func, args, kwargs, result)
        if internals.schema_of(func).name == "aten::_to_copy" and args[0] in self._cast_parameters:
            _mark_weight(result)
            self._number(result.untyped_storage())  # known storages are not recorded as allocated
        return result, (0.0, max(flops / rate, moved / self._hardware.gpu_memory_bandwidth))


def _mark_weight(tensor: Tensor) -> None:
    """Marks a tensor's storage as that of a weight."""
    is_weight(nn.Parameter(tensor.detach(), requires_grad=False), tensor.untyped_storage())


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the bytes that an operation reads and writes: each input and each output once, none of a view."""
    if returns_view(func):
        return 0
    inputs = {id(value): value.nbytes for value in tensors_of((args, kwargs))}
    outputs = {id(value): value.nbytes for value in (*tensors_of(result), *written(func, args, kwargs))}
    return sum(inputs.values()) + sum(outputs.values())


@contextlib.contextmanager
def _explained(recorder: _Tracer) -> Iterator[None]:
    """Raises errors of tracing as a TracingError that names the operator and the remedy."""
    remedy = (
        "Train a few steps with `callbacks=[lightning_ssd.ModelProfiler(FILE)]` instead, and give its profile: "
        "`--profile FILE`."
    )
    try:
        yield
    except TracingError:
        raise
    except (
        internals.fake_tensor.DataDependentOutputException,
        internals.fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
        RuntimeError,
        TypeError,
        internals.fake_tensor.UnsupportedFakeTensorException,
        internals.fake_tensor.UnsupportedOperatorException,
    ) as error:
        reason = "".join(str(error).strip().splitlines()[:1]).rstrip(".")
        raise TracingError(
            f"`training_step` can't be traced without values, at the operator {recorder.last_operator}: {reason}. "
            f"{remedy}"
        ) from error


def _is_causal(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Returns True if an attention is causal, which needs half of the products that torch's formula counts."""
    names = [argument.name for argument in internals.schema_of(func).arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))
