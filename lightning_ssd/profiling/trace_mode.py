"""Records one forward and backward: the graph of operations, the saved tensors, and the seconds of each operation."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    ActivationOffloader,
    Buffer,
    CheckpointedCall,
    EmptyCaches,
    ForwardGraph,
    Operation,
    SavedStorage,
    Segment,
    UnitCall,
    UnitDispatchMode,
    UnitProof,
    around_call,
    calls_are_compiled,
    calls_operators,
    changes_statistics,
    in_backward,
    is_random,
    is_weight,
    offloaded_weights,
    other_random_states,
    outer_autocast,
    rerun_arguments,
    storage_of,
    tensors_of,
    wraps,
    written,
)
from lightning_ssd.device import make_clock
from lightning_ssd.profiling.lifetimes import LifetimeRecorder
from lightning_ssd.profiling.recorded_checkpoint import Dropped, RecordedCheckpoint
from lightning_ssd.storage_tags import BUFFER
from lightning_ssd.uncopied import ModuleHook, takes_hooks

HEAD_START_SECONDS = 0.5
"""Work that is queued on a GPU before timed operations: it lowers the GPU's clock to the rate that it can sustain."""

REFILL_SECONDS = 0.05
"""Work that is queued when the host has waited for the GPU: the queue is empty then, and the clock is low already."""

MAX_REFILLS = 32
"""Most refills of the queue in a forward, and in a backward."""

MATRIX_SIZE = 4096
"""Rows and columns of the matrices whose products are that work."""


class _CompiledCall(NamedTuple):
    """A running call of a compiled unit.

    Attributes:
        given: tensors among its arguments.
        read: their storages, each with True if it is a weight's.
        inputs: numbers of the buffers among them.
        versions: versions of these tensors, and of the unit's parameters and buffers.
        begun: point of the device's clock.
    """

    given: Sequence[Tensor]
    read: Mapping[torch.UntypedStorage, bool]
    inputs: tuple[int, ...]
    versions: Sequence[int]
    num_buffers: int
    begun: Any


class TraceMode(UnitDispatchMode):
    """Records the graph of a forward, and the seconds of its operations and of those of the following backward.

    Operations are timed one by one: waits of the device between them do not count. A compiled unit is one operation,
    and each of its nodes in backward: the modes are removed meanwhile. Autograd saves tensors at the end of the one and
    unpacks them at the begin of the other, and neither is timed: the host may wait for transfers in them.

    Units may be checkpointed meanwhile. The record is the same (`RecordedCheckpoint`).

    Args:
        units: as in `UnitDispatchMode`.
        lifetimes: recorder of all tensors' lifetimes, to which every operation is passed, too.
        offloader: its hooks are removed in calls of `checkpointed`; `None`: there are none.
        checkpointed: modules of units whose calls are checkpointed, if their arguments and the proofs allow it.
        timed: whether seconds are needed, so that work is queued before the operations.

    Attributes:
        graph: graph of the last forward, complete after `finish`.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        device: torch.device,
        lifetimes: LifetimeRecorder | None = None,
        offloader: ActivationOffloader | None = None,
        checkpointed: Mapping[nn.Module, UnitProof] | None = None,
        *,
        timed: bool = True,
    ) -> None:
        super().__init__(units)
        self.graph = ForwardGraph()
        self._offloader = offloader
        self._checkpointed = checkpointed or {}
        self._running: tuple[UnitCall, RecordedCheckpoint] | None = None
        """The running checkpointed call."""
        self._timed = timed
        self._lifetimes = lifetimes
        self._device = device
        self._clock = make_clock(device)
        self._spans: list[tuple[Any, Any] | None] = []
        self._last_end: Any = None
        """End of the last work that was queued on the device, on its clock."""
        self._refills_left = 0
        self.backward_mode: internals.TorchDispatchMode = _BackwardMode(self)
        """Mode of the following backward."""
        self._backward_spans: list[tuple[UnitCall, Any, Any]] = []
        self._backward_of: UnitCall | None = None
        """The unit call whose backward runs; None: forward runs."""
        self._numbers: weakref.WeakKeyDictionary[SavedStorage | Dropped, int] = weakref.WeakKeyDictionary()
        """Number of the buffer of each saved storage."""
        self._segment = Segment("start", 0, 0)
        self._caches = EmptyCaches()
        self._random_states: dict[UnitCall, tuple[object, ...]] = {}
        """States of the generators that torch does not restore, at the begin of each call that may be run again."""
        self._readers: weakref.WeakKeyDictionary[torch.UntypedStorage, set[UnitCall]] = weakref.WeakKeyDictionary()
        """Calls that have read each storage of a parameter or buffer, of which none may be changed in place later."""
        self._casts: list[tuple[UnitCall, int, int]] = []
        """Casts of weights by autocast: the call that has made them, their number, and their bytes. Autograd alone
        keeps them alive, if it has saved them."""
        self._module_names: list[str] = []
        self._call: _CompiledCall | None = None
        """The running compiled operation of the forward."""
        self._call_ended: Any = None
        """Point of the device's clock at which autograd began to save tensors of it; `None`: it has saved none."""
        self._node_begun: Any = None
        """Point at which autograd last unpacked a tensor for the running compiled node of backward, or at which the
        node began; `None`: none runs."""
        self._compiled_nodes: set[Node] = set()
        """Nodes of compiled operations in the autograd graph of the forward."""
        self._in_rerun = False
        """Whether a compiled unit that the user checkpoints runs again, for which the mode of backward was removed."""
        innermost = _innermost_units(units)
        for modules in units:
            for unit in modules:
                if calls_are_compiled(unit):  # Dynamo would trace hooks inside
                    self._removals.append(around_call(unit, self._begin_rerun, self._end_rerun))
                    continue
                for name, module in unit.named_modules():
                    if module is not unit and takes_hooks(module):
                        self._removals += self._track_module(name, module, innermost[module])

    def __enter__(self) -> Any:
        self.graph = ForwardGraph()
        self._spans.clear()
        self._backward_spans.clear()
        self._numbers.clear()
        self._backward_of = None
        self._caches.clear()
        self._random_states.clear()
        self._readers.clear()
        self._casts.clear()
        self._module_names.clear()
        self._compiled_nodes.clear()
        if self._timed:
            self._queue_work(HEAD_START_SECONDS)
            self._refills_left = MAX_REFILLS
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._running is not None:  # an error that is no `Exception`, after which torch calls no hook
            self._running[1].end(interrupted=True)
            self._running = None
        super().__exit__(*error)

    def on_saved(self, storage: torch.UntypedStorage, record: SavedStorage | Dropped) -> None:
        """Called when autograd saves a tensor of `storage`, before it is offloaded."""
        if self._running is not None and isinstance(record, SavedStorage):
            return  # an argument of a checkpointed call, which its own operators may save
        if self._call is not None and self._call_ended is None:
            self._call_ended = self._clock.now()
        number = self._numbers[record] = self._number(storage)
        buffer = self.graph.buffers[number]
        if buffer.unit_call is None:
            buffer.unit_call = self._compiled or self.unit_call
            buffer.outlives_call = self._segment.begun_by == "exit"
            self.graph.transients.mark_saved(buffer.unit_call, number)

    def on_unpacked(self, record: SavedStorage | Dropped) -> None:
        """Called when backward unpacks a tensor of `record`, once the compute stream is ordered after its load."""
        if self._node_begun is not None:
            self._node_begun = self._clock.now()
        elif isinstance(record, SavedStorage) and internals.innermost_dispatch_mode() is not self.backward_mode:
            return  # an argument of a checkpointed call that is run again
        number = self._numbers.get(record)
        if isinstance(record, Dropped):
            self._last_end = self._clock.now()  # of operators that have run again
        if number is not None and (unit_call := self.graph.buffers[number].unit_call) is not None:
            self.graph.transients.first_use(unit_call, number)

    def outlive(self, storage: torch.UntypedStorage, dropped: Dropped) -> None:
        """Counts a storage that is freed early as alive until backward has used the tensor that was dropped."""
        if (number := self._known(storage)) is not None:
            self.graph.transients.outlive(number, dropped)

    def finish(self) -> None:
        """Records the seconds of the operations in the graph. The device must have executed all of them."""
        for operation, span in zip(self.graph.operations, self._spans, strict=True):
            if span is not None:
                operation.seconds = self._seconds(*span)
        of_backward = self.graph.backward_seconds
        for unit_call, start, end in self._backward_spans:
            of_backward[unit_call] = of_backward.get(unit_call, 0.0) + self._seconds(start, end)
        self._spans.clear()
        self._backward_spans.clear()
        self._compiled_nodes.clear()

    def _seconds(self, start: Any, end: Any) -> float:
        return max(0.0, self._clock.elapsed(start, end) or 0.0)

    def may_run_again(self, unit_call: UnitCall, buffers: Iterable[Tensor]) -> bool:
        """Returns whether a call, which alone is recorded, may be checkpointed whatever its forward runs after it.

        Then it reads only its arguments and parameters, whose changes in place are errors: others may be changed or
        replaced before it runs again.
        """
        if unit_call not in self.graph.checkpoint_bytes():
            return False
        known = set(self.graph.arguments[unit_call])
        for operation in self.graph.operations:
            if operation.func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor`, which has just made its input
                known.update(operation.inputs)
            elif any(self.graph.buffers[one].maker is None and one not in known for one in operation.inputs):
                return False
        read = {storage_of(one) for one in buffers if one.layout is torch.strided and internals.has_storage(one)}
        return read.isdisjoint(self._readers)

    def begin_backward(self) -> None:
        """Begins to record operations as the backward's."""
        self._backward_of = self.unit_call
        for unit_call, number, nbytes in self._casts:
            if self.graph.transients.is_alive(number):
                self.graph.cast_bytes[unit_call] = self.graph.cast_bytes.get(unit_call, 0) + nbytes
        if self._lifetimes is not None:
            self._lifetimes.phase = "backward"
        self._queue_work(HEAD_START_SECONDS)
        self._refills_left = MAX_REFILLS
        self.backward_mode.__enter__()

    def end_backward(self) -> None:
        """Ends the recording of the backward."""
        self.backward_mode.__exit__(None, None, None)
        self.graph.transients.close()

    def _refill_queue(self) -> None:
        """Called before an operation: queues work if the GPU's queue is empty, as after an `item()`."""
        if (
            self._device.type == "cuda"
            and self._refills_left
            and self._clock.elapsed(self._last_end, self._last_end) is not None
        ):
            self._refills_left -= 1
            self._queue_work(REFILL_SECONDS)

    def _queue_work(self, seconds: float) -> None:
        """Queues work of some seconds on a GPU, so that the host launches ahead and launch times are not measured.

        The work consists of matrix products, not of a wait: an idle GPU would begin at a higher clock rate than it can
        sustain in training.
        """
        if self._device.type != "cuda":
            return
        with torch.no_grad(), internals.without_autocast():
            values = torch.arange(MATRIX_SIZE, dtype=torch.float32, device=self._device).sin().half()
            matrix = torch.outer(values, values)
            result = torch.empty_like(matrix)
            torch.mm(matrix, matrix, out=result)
            start = self._clock.now()
            torch.mm(matrix, matrix, out=result)
            end = self._clock.now()
            torch.cuda.synchronize(self._device)
            product_seconds = self._clock.elapsed(start, end)
            for _ in range(int(seconds / product_seconds) if product_seconds else 0):
                torch.mm(matrix, matrix, out=result)
        self._last_end = self._clock.now()

    def run_timed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any] | None]:
        """Runs an operation. Returns its result, and its begin and end (None for a view, which takes no time)."""
        if returns_view(func):
            return func(*args, **kwargs), None
        self._refill_queue()
        start = self._clock.now()
        result = func(*args, **kwargs)
        self._last_end = self._clock.now()
        return result, (start, self._last_end)

    def unit_called(
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        arguments = rerun_arguments(unit_call, module, args, kwargs, self._caches)
        if arguments is not None:
            read = _read(arguments.tensors)
            self.graph.arguments[unit_call] = frozenset(self._number(one) for one, weight in read.items() if not weight)
            self.graph.proofs[unit_call] = UnitProof(module)
            self._random_states[unit_call] = other_random_states()
            proof = self._checkpointed.get(module)
            state = None if proof is None else proof.state()
            if state is not None and self._running is None:
                assert self._offloader is not None
                if self._offloader.pause("all"):  # unless user code has entered hooks or modes around it
                    call = CheckpointedCall(module, arguments, state)
                    recorded = RecordedCheckpoint(call, self._offloader, self, self)
                    self._running = unit_call, recorded
                    recorded.begin()

    def compiled_called(
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        given = tensors_of((tuple(args), dict(kwargs)))
        read = _read(given)
        inputs = tuple(self._number(storage) for storage, weight in read.items() if not weight)
        versions = _versions(module, given)
        for weight in (*module.parameters(), *module.buffers()):
            if weight.layout is torch.strided:
                self._readers.setdefault(storage_of(weight), set()).update(self._open)
        self.graph.transients.enter(unit_call, backward=False)
        self._refill_queue()
        self._call_ended = None
        self._call = _CompiledCall(given, read, inputs, versions, len(self.graph.buffers), self._clock.now())

    def compiled_returned(self, unit_call: UnitCall, module: nn.Module, output: object) -> None:
        call = self._call
        assert call is not None
        self._last_end = self._clock.now()
        index = len(self.graph.operations)
        for position, buffer in enumerate(self.graph.buffers[call.num_buffers :]):  # saved meanwhile
            buffer.maker, buffer.position = index, position
        for position, value in enumerate(tensors_of(output)):
            if value.layout is torch.strided and not value.is_quantized:
                storage = value.untyped_storage()
                if storage not in call.read and self._known(storage) is None:
                    number = self._add(storage, Buffer(storage.nbytes(), index, -1 - position))
                    self.graph.transients.alloc(storage, number)
        if self._num_graphs != 1 or _versions(module, call.given) != call.versions:
            self._must_run_once([unit_call])  # Python has run code in between, or a tensor was changed in place
        ended = self._last_end if self._call_ended is None or self._num_graphs != 1 else self._call_ended
        self._spans.append((call.begun, ended))
        self.graph.operations.append(
            Operation(None, self._segment, unit_call, "", call.inputs, 0.0, deterministic=False)
        )
        self._follow_backward(unit_call, call.given, output)

    def compiled_ended(self) -> None:
        self._call = None

    def _begin_rerun(self, args: object, kwargs: object) -> None:
        if in_backward() and internals.innermost_dispatch_mode() is self.backward_mode:
            self._in_rerun = True
            internals.pop_dispatch_mode()

    def _end_rerun(self, output: object) -> None:
        if self._in_rerun:
            self._in_rerun = False
            internals.push_dispatch_mode(self.backward_mode)

    def _follow_backward(self, unit_call: UnitCall, given: Sequence[Tensor], output: object) -> None:
        """Has the compiled nodes of a call run without the mode of backward, each as one operation."""
        seen = {one.grad_fn for one in given} | self._compiled_nodes | {None}
        left = [one.grad_fn for one in tensors_of(output)]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [following for following, _ in node.next_functions]
                if node.name().startswith("CompiledFunction"):
                    self._compiled_nodes.add(node)
                    self._follow_node(unit_call, node)

    def _follow_node(self, unit_call: UnitCall, node: Node) -> None:
        def begin(_: object) -> None:
            self._backward_of = unit_call
            if internals.innermost_dispatch_mode() is self.backward_mode:
                self.graph.transients.enter(unit_call, backward=True)
                internals.pop_dispatch_mode()
                self._refill_queue()
                self._node_begun = self._clock.now()

        def end(results: object, _: object) -> None:
            if self._node_begun is not None:
                self._last_end = self._clock.now()
                self._backward_spans.append((unit_call, self._node_begun, self._last_end))
                self._node_begun = None
                internals.push_dispatch_mode(self.backward_mode)
                for storage in _read(results):
                    self._alloc(storage)

        node.register_prehook(begin)
        node.register_hook(end)

    def unit_returned(self, unit_call: UnitCall, output: object) -> None:
        def begins(_: object) -> None:
            self._backward_of = unit_call

        results: dict[int, int] = {}
        for position, value in enumerate(tensors_of(output)):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begins)
            if value.layout is torch.strided and internals.has_storage(value):
                number = self._known(storage_of(value))
                if number is not None:
                    results[position] = number
        self.graph.results[unit_call] = results
        before = self._random_states.pop(unit_call, None)
        if before is not None and before != other_random_states():
            self._must_run_once([unit_call])  # another run would draw other numbers
        proof = self.graph.proofs.get(unit_call)
        if proof is not None and not proof.holds():
            self._must_run_once([unit_call])  # it changes itself, so that no later call is known to be the same
        for storage in _read(list(self._caches.tensors())):
            if (number := self._known(storage)) is not None:
                self.graph.buffers[number].outlives_call = True
        if self._running is not None and self._running[0] == unit_call:
            self._running[1].end()
            self._running = None

    def run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation of the backward."""
        result, span = self.run_timed(func, args, kwargs)
        unit_call = self._backward_of
        assert unit_call is not None
        if span is not None:
            self._backward_spans.append((unit_call, *span))
            if self._lifetimes is not None:
                self._lifetimes.ran(func, (args, kwargs), result, span)
        self.graph.transients.enter(unit_call, backward=True)
        read = {internals.storage_key(storage) for storage in _read((args, kwargs))}
        for storage in _read(result):
            if internals.storage_key(storage) not in read:
                self._alloc(storage)
        return result

    def begin_segment(self, segment: Segment) -> None:
        self._segment = segment

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        read = _read((args, kwargs))
        inputs = tuple(dict.fromkeys(self._number(storage) for storage, weight in read.items() if not weight))
        seen = {internals.storage_key(storage) for storage in read}
        self.graph.transients.enter(self.unit_call, backward=False)
        index = len(self.graph.operations)
        if kwargs.get("generator") is not None:  # of the user: another run would draw other numbers
            self._must_run_once(self._open)
        for storage, weight in read.items():
            if weight:
                self._readers.setdefault(storage, set()).update(self._open)
        for storage in _written(func, args, kwargs):
            if (number := self._known(storage)) is not None:
                buffer = self.graph.buffers[number]
                buffer.mutated, buffer.last_change = True, index
            self._must_run_once(self._readers.get(storage, ()))
        result, span = self.run_timed(func, args, kwargs)
        self._spans.append(span)
        if span is not None and self._lifetimes is not None:
            self._lifetimes.ran(func, (args, kwargs), result, span)
        for position, value in enumerate(tensors_of(result)):
            if value.layout is not torch.strided or value.is_quantized:
                continue
            storage = value.untyped_storage()
            if internals.storage_key(storage) not in seen and self._known(storage) is None:
                number = self._add(storage, Buffer(storage.nbytes(), index, position))
                self.graph.transients.alloc(storage, number)
                # With its cache, which Lightning disables, autocast keeps casts alive until its context ends.
                is_cast = internals.schema_of(func).name == "aten::_to_copy" and all(read.values())
                if is_cast and not torch.is_autocast_cache_enabled():
                    self._casts.append((self.unit_call, number, storage.nbytes()))
        flops = count_flops(func, args, kwargs, result)
        where = self._module_names[-1] if self._module_names else ""
        self.graph.operations.append(
            Operation(
                func,
                self._segment,
                self.unit_call,
                where,
                inputs,
                flops,
                _is_deterministic(func, args, kwargs, result, self._device),
            )
        )
        return result

    def _must_run_once(self, unit_calls: Iterable[UnitCall]) -> None:
        """Excludes calls from checkpointing: their forward can't be run again."""
        for unit_call in unit_calls:
            self.graph.arguments.pop(unit_call, None)

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Returns the number of a storage's buffer in the graph; one that is not known gets a buffer."""
        number = self._known(storage)
        return self._add(storage, Buffer(storage.nbytes())) if number is None else number

    def _alloc(self, storage: torch.UntypedStorage) -> None:
        """Records the allocation of a storage in backward, unless it is known."""
        if self._known(storage) is None:
            self.graph.transients.alloc(storage, self._add(storage, Buffer(storage.nbytes())))

    def _add(self, storage: torch.UntypedStorage, buffer: Buffer) -> int:
        number = len(self.graph.buffers)
        self.graph.buffers.append(buffer)
        setattr(storage, BUFFER, (self.graph, number))
        return number

    def _known(self, storage: torch.UntypedStorage) -> int | None:
        """Returns the number of a storage's buffer in the graph; None: it has none."""
        graph, number = getattr(storage, BUFFER, (None, None))
        return number if graph is self.graph else None

    def _track_module(self, name: str, module: nn.Module, unit: int) -> Iterator[Callable[[], None]]:
        def before(module: nn.Module, args: object) -> None:
            if in_backward():
                self.graph.rerun.add(unit)
            elif self._entered:
                self._module_names.append(name)

        def after(module: nn.Module, args: object, output: object) -> None:
            if self._entered and not in_backward() and self._module_names:
                self._module_names.pop()

        yield module.register_forward_pre_hook(ModuleHook(before)).remove
        yield module.register_forward_hook(ModuleHook(after), always_call=True).remove


class OptimizerTrace(internals.TorchDispatchMode):
    """Records the operations of an optimizer step that runs inside it, which `trace` times."""

    def __init__(self, trace: TraceMode, lifetimes: LifetimeRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._lifetimes = lifetimes

    def __enter__(self) -> Any:
        self._lifetimes.phase = "optimizer"
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        if func.namespace in ("prim", "profiler"):
            return func(*args, **(kwargs or {}))
        result, span = self._trace.run_timed(func, args, kwargs or {})
        if span is not None:
            self._lifetimes.ran(func, (args, kwargs), result, span)
        return result


class _BackwardMode(internals.TorchDispatchMode):
    """Intercepts every operation of a backward. Autograd's threads inherit it from the thread that calls backward."""

    supports_higher_order_operators = True

    def __init__(self, recorder: TraceMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        if not isinstance(func, internals.OpOverload):
            return func(*args, **(kwargs or {}))
        with outer_autocast() if calls_operators(func) else contextlib.nullcontext():
            return self._recorder.run_backward(func, args, kwargs or {})


@functools.cache
def returns_view(func: Any) -> bool:
    """Returns True if an operation only returns views. Composite ones, not decomposed in inference mode, may copy."""
    composite = internals.has_kernel_for(func.name(), "CompositeImplicitAutograd")
    return func.is_view and not composite


def count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the FLOPs of an operation by torch's formulas, 0 if torch has no formula for it."""
    name = internals.schema_of(func).name
    with contextlib.suppress(Exception):  # shapes that torch's formula does not support
        if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            return float(sdpa_flop_count(*(value.shape for value in args[:3])))
        if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            return float(sdpa_backward_flop_count(*(value.shape for value in args[:4])))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            return float(count(*args, **kwargs, out_val=result))
    return 0.0


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
    return [storage_of(value) for value in written(func, args, kwargs) if value.layout is torch.strided]


def _read(tree: Any) -> dict[torch.UntypedStorage, bool]:
    """Returns the storages of the tensors in `tree`, each with True if it is a weight's."""
    found: dict[torch.UntypedStorage, bool] = {}
    for value in tensors_of(tree):
        if value.layout is torch.strided and not value.is_quantized:
            storage = storage_of(value)
            found[storage] = offloaded_weights(storage) is not None or is_weight(value, storage)
    return found


def _innermost_units(units: Sequence[Sequence[nn.Module]]) -> dict[nn.Module, int]:
    """Returns the index of the smallest unit that has each module: units may be inside of others."""
    members = [{module for one in unit for module in one.modules()} for unit in units]
    largest_first = sorted(range(len(units)), key=lambda index: -len(members[index]))
    return {module: index for index in largest_first for module in members[index]}


def _versions(module: nn.Module, given: Sequence[Tensor]) -> list[int]:
    """Returns the versions of the tensors that a call is given, and of the module's parameters and buffers.

    Tensors made in inference mode have none, and a call with one of them is never checkpointed.
    """
    with internals.without_torch_function():  # offloaded weights would answer for their versions
        tensors = (*given, *module.parameters(), *module.buffers())
        return [internals.version_of(one) for one in tensors if not one.is_inference()]


def _is_deterministic(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, device: torch.device) -> bool:
    """Returns True if an operation may be executed again. `PlanMode` compares the results of a second execution.

    The generator of the training device is set back for the second execution.
    """
    name = internals.schema_of(func).name
    if internals.schema_of(func).is_mutable or func.namespace not in ("aten", "prims"):
        return False
    if changes_statistics(name) or "empty" in name:  # uninitialized memory has other values each time
        return False
    given = tensors_of((args, kwargs))
    if any(value.is_nested for value in (*given, *tensors_of(result))):
        return False
    # Without an input tensor, the result has the default dtype, which may be another one in backward.
    if not given or any(value.is_inference() for value in (*given, *tensors_of(result))):
        return False
    # A generator of the user, or of another device, would have to be reset to its state in the forward.
    elsewhere = any(value.device != device for value in (*given, *tensors_of(result)))
    return not (is_random(func) and (elsewhere or kwargs.get("generator") is not None))
