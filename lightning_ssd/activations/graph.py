"""What the operations of one forward make of what, and which of it autograd saves."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_ssd.activations.clock import make_clock
from lightning_ssd.activations.forward import ForwardMode, Part, Visit, in_backward
from lightning_ssd.activations.weights import fetch_of, is_weight

HEAD_START = 10**8
"""Cycles of a GPU, some 50 ms."""


@dataclass
class Buffer:
    """A storage that came up in a forward and is no weight.

    Attributes:
        nbytes: its bytes.
        maker: index of the operation that made it; None: it was there before.
        position: of the tensor that shows it among what its maker returned.
        visit: that was under way when autograd saved it; None: it did not.
        changed: written to after it was made.
    """

    nbytes: int
    maker: int | None = None
    position: int = 0
    visit: Visit | None = None
    changed: bool = False


@dataclass
class Operation:
    """One operation.

    Attributes:
        func: as dispatched.
        part: that it belongs to.
        visit: that was under way.
        where: name of the module that was running, relative to its unit.
        inputs: numbers of the buffers that it reads.
        flops: of it.
        repeatable: run again on the same buffers, it returns the same.
        seconds: on the device.
    """

    func: Any
    part: Part
    visit: Visit
    where: str
    inputs: tuple[int, ...]
    flops: float
    repeatable: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A buffer that autograd saves.

    Attributes:
        visit: that was under way when it was saved first.
        name: unique in the visit.
        buffer: its number.
        nbytes: its bytes.
        chain: indices of the operations that make it from weights and from other buffers that are saved, in order.
        scratch: most bytes that are needed on the way, beside the buffer.
        again: whether they can be run again, in the backward of this visit.
        inbound: it was there before the visit began.
    """

    visit: Visit
    name: str
    buffer: int
    nbytes: int
    chain: tuple[int, ...]
    scratch: int
    again: bool
    inbound: bool


@dataclass
class ForwardGraph:
    """The operations and buffers of one forward, both in the order in which they came up."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    backward_seconds: dict[Visit, float] = field(default_factory=dict)
    """Of each visit, on the device."""
    forward_bytes: dict[Visit, int] = field(default_factory=dict)
    """Of each visit, the most that was there at one time, beside weights and what autograd saves."""
    backward_bytes: dict[Visit, int] = field(default_factory=dict)
    """The same of its backward, beside what is there after it: gradients of weights."""

    def visits(self) -> list[Visit]:
        """Returns all visits, in the order in which they began."""
        return list(dict.fromkeys(operation.visit for operation in self.operations))

    def saved(self, min_bytes: int) -> list[Saved]:
        """Returns the buffers that autograd saves.

        Args:
            min_bytes: smaller buffers stay on the device, whatever becomes of the others.
        """
        taken: dict[tuple[Visit, str], int] = {}
        made_by: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            if buffer.maker is not None and buffer.visit is None:
                made_by.setdefault(buffer.maker, []).append(number)
        found = []
        for number, buffer in enumerate(self.buffers):
            if buffer.visit is None:
                continue
            maker = None if buffer.maker is None else self.operations[buffer.maker]
            inbound = maker is None or maker.visit != buffer.visit
            chain = None if inbound else self._chain(number, buffer.visit, min_bytes)
            name = "input" if maker is None else _name(maker, buffer)
            count = taken[buffer.visit, name] = taken.get((buffer.visit, name), 0) + 1
            found.append(
                Saved(
                    buffer.visit,
                    name if count == 1 else f"{name}#{count}",
                    number,
                    buffer.nbytes,
                    tuple(sorted(chain)) if chain is not None else (),
                    self._scratch(number, chain, made_by) if chain is not None else 0,
                    chain is not None,
                    inbound,
                )
            )
        return found

    def _scratch(self, number: int, chain: set[int], made_by: Mapping[int, Sequence[int]]) -> int:
        """Returns the most bytes on the device while a buffer is made by `chain`, beside itself.

        Args:
            number: of the buffer.
            chain: operations.
            made_by: of each operation, what it makes that is not saved.
        """
        made = {other for index in chain for other in made_by.get(index, ())}
        most = 0
        for index in chain:
            operation = self.operations[index]
            live = sum(self.buffers[read].nbytes for read in operation.inputs if read in made)
            if index != self.buffers[number].maker:  # the buffer itself is not there yet
                live += sum(self.buffers[other].nbytes for other in made_by.get(index, ()))
                live -= self.buffers[number].nbytes
            most = max(most, live)
        return most

    def _chain(self, number: int, visit: Visit, min_bytes: int) -> set[int] | None:
        """Returns what has to be run to make a buffer again in the backward of `visit`; None: it can't be."""
        chain: set[int] = set()
        wanted = [number]
        while wanted:
            buffer = self.buffers[wanted.pop()]
            if buffer.maker is None or buffer.maker in chain:
                continue
            maker = self.operations[buffer.maker]
            if buffer.changed or not maker.repeatable or maker.visit != visit:
                return None
            if any(self.buffers[read].changed for read in maker.inputs):
                return None
            chain.add(buffer.maker)
            # What is saved, or small, is there.
            wanted += [
                read
                for read in maker.inputs
                if self.buffers[read].visit is None and self.buffers[read].nbytes >= min_bytes
            ]
        return chain


class Recorder(ForwardMode):
    """Records a forward, and how long its operations take, and those of the backward that follows.

    Operations are timed one by one: what the device waits for between them does not count.

    Args:
        units: as in `ForwardMode`.
        device: that it runs on.

    Attributes:
        graph: of the forward that ran last, complete after `finish`.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]], device: torch.device) -> None:
        super().__init__(units)
        self.graph = ForwardGraph()
        self._device = device
        self._clock = make_clock(device)
        self._spans: list[tuple[Any, Any]] = []
        self._backward = _BackwardMode(self)
        self._backward_spans: list[tuple[Visit, Any, Any]] = []
        self._backward_of: Visit | None = None
        """The visit whose backward runs; None: forward runs."""
        self._memory = _Memory()
        self._part = Part("start", 0, 0)
        self._where: list[str] = []
        for modules in units:
            for unit in modules:
                for name, module in unit.named_modules():
                    if module is not unit:
                        self._handles += self._follow(name, module)

    def __enter__(self) -> Any:
        self.graph = ForwardGraph()
        self._spans.clear()
        self._backward_spans.clear()
        self._memory = _Memory()
        self._backward_of = None
        self._where.clear()
        self._get_ahead()
        return super().__enter__()

    def saved(self, storage: torch.UntypedStorage, record: object) -> None:
        """Autograd has saved `storage`, for the first time in this forward."""
        buffer = self.graph.buffers[self._number(storage)]
        if buffer.visit is None:
            buffer.visit = self.visit
            self._memory.leave_out(storage)

    def finish(self) -> None:
        """Takes down how long the operations took; the device has passed them."""
        for operation, (start, end) in zip(self.graph.operations, self._spans, strict=True):
            operation.seconds = self._clock.elapsed(start, end) or 0.0
        for visit, start, end in self._backward_spans:
            seconds = self._clock.elapsed(start, end) or 0.0
            self.graph.backward_seconds[visit] = self.graph.backward_seconds.get(visit, 0.0) + seconds
        self._spans.clear()
        self._backward_spans.clear()
        self.graph.forward_bytes, self.graph.backward_bytes = self._memory.peaks()

    def begin_backward(self) -> None:
        """The forward is over; from here on operations belong to its backward."""
        self._backward_of = self.visit
        self._get_ahead()
        self._backward.__enter__()  # type: ignore[no-untyped-call]

    def end_backward(self) -> None:
        """The backward is over."""
        self._backward.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._memory.close()

    def _get_ahead(self) -> None:
        """Has a GPU wait, so that the host is ahead of it: else short operations are timed with their launches."""
        if self._device.type == "cuda":
            torch.cuda._sleep(HEAD_START)

    def left(self, visit: Visit, output: object) -> None:
        def begins(_: object) -> None:
            self._backward_of = visit

        for value in tensors_of(output):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begins)

    def time_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation of the backward."""
        start = self._clock.now()
        result = func(*args, **kwargs)
        visit = self._backward_of
        assert visit is not None
        self._backward_spans.append((visit, start, self._clock.now()))
        self._memory.at(visit, backward=True)
        read = {storage._cdata for storage in _read((args, kwargs))}
        for storage in _read(result):
            if storage._cdata not in read:
                self._memory.take(storage)
        return result

    def begin_part(self, part: Part) -> None:
        self._part = part

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        read = _read((args, kwargs))
        inputs = tuple(dict.fromkeys(self._number(storage) for storage, weight in read.items() if not weight))
        seen = {storage._cdata for storage in read}
        self._memory.at(self.visit, backward=False)
        index = len(self.graph.operations)
        for storage in _written(func, args, kwargs):
            if (number := self._known(storage)) is not None:
                self.graph.buffers[number].changed = True
        start = self._clock.now()
        result = func(*args, **kwargs)
        self._spans.append((start, self._clock.now()))
        for position, value in enumerate(tensors_of(result)):
            if value.layout is not torch.strided or value.is_quantized:
                continue
            storage = value.untyped_storage()
            if storage._cdata not in seen and self._known(storage) is None:
                self.graph.buffers.append(Buffer(storage.nbytes(), index, position))
                setattr(storage, _NUMBER, (self.graph, len(self.graph.buffers) - 1))
                self._memory.take(storage)
        flops = _flops(func, args, kwargs, result)
        where = self._where[-1] if self._where else ""
        self.graph.operations.append(
            Operation(func, self._part, self.visit, where, inputs, flops, _repeatable(func, args, kwargs, result))
        )
        return result

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._known(storage)
        if number is None:
            self.graph.buffers.append(Buffer(storage.nbytes()))
            number = len(self.graph.buffers) - 1
            setattr(storage, _NUMBER, (self.graph, number))
        return number

    def _known(self, storage: torch.UntypedStorage) -> int | None:
        graph, number = getattr(storage, _NUMBER, (None, None))
        return number if graph is self.graph else None

    def _follow(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        def before(module: nn.Module, args: object) -> None:
            if self._entered and not in_backward():
                self._where.append(name)

        def after(module: nn.Module, args: object, output: object) -> None:
            if self._entered and not in_backward() and self._where:
                self._where.pop()

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after, always_call=True)


class _Memory:
    """What storages take while they live, which their Python objects do as long as they.

    Storages may die on any thread; each event is one `append`.
    """

    def __init__(self) -> None:
        self._events: list[tuple[tuple[Visit, bool], int, int]] = []
        self._now = (Visit(0, 0), False)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._left_out: set[int] = set()
        self._count = 0

    def at(self, visit: Visit, *, backward: bool) -> None:
        """What happens from here on belongs to this visit."""
        self._now = (visit, backward)

    def take(self, storage: torch.UntypedStorage) -> None:
        """A storage was made, unless it is known."""
        if (known := getattr(storage, _TAKEN, None)) is not None and known[0] is self:
            return
        self._count += 1
        number, nbytes = self._count, storage.nbytes()
        setattr(storage, _TAKEN, (self, number))
        self._events.append((self._now, number, nbytes))
        self._alive[number] = weakref.ref(storage, lambda _: self._gone(number, nbytes))

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """A storage does not count: it is saved."""
        known = getattr(storage, _TAKEN, None)
        if known is not None and known[0] is self:
            self._left_out.add(known[1])

    def close(self) -> None:
        """Nothing counts any more; what is alive now was there to stay, and did not count."""
        self._left_out |= set(self._alive)
        self._alive.clear()

    def peaks(self) -> tuple[dict[Visit, int], dict[Visit, int]]:
        """Returns, of each visit, the most bytes in its forward and in its backward."""
        most: dict[tuple[Visit, bool], int] = {}
        now = 0
        for at, number, nbytes in self._events:
            if number not in self._left_out:
                now += nbytes
                most[at] = max(most.get(at, 0), now)
        forward = {visit: nbytes for (visit, backward), nbytes in most.items() if not backward}
        return forward, {visit: nbytes for (visit, backward), nbytes in most.items() if backward}

    def _gone(self, number: int, nbytes: int) -> None:
        if self._alive.pop(number, None) is not None:
            self._events.append((self._now, number, -nbytes))


class _BackwardMode(TorchDispatchMode):
    """Is told of every operation of a backward. Autograd's threads take it over from the one that calls it."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        return self._recorder.time_backward(func, args, kwargs or {})


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in `tree`, in order."""
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    changed = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_of(changed)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0
    with contextlib.suppress(Exception):  # shapes that torch's formula does not know
        return float(count(*args, **kwargs, out_val=result))
    return 0.0


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in written(func, args, kwargs) if value.layout is torch.strided]


def _read(tree: Any) -> dict[torch.UntypedStorage, bool]:
    """Returns the storages that `tree` shows, and of each whether it is a weight."""
    found: dict[torch.UntypedStorage, bool] = {}
    for value in tensors_of(tree):
        if value.layout is torch.strided and not value.is_quantized:
            storage = value.untyped_storage()
            found[storage] = fetch_of(storage) is not None or is_weight(value, storage)
    return found


def _repeatable(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether an operation may be run again. Whether it then returns the same is tried out (`director`)."""
    name = func._schema.name
    if func._schema.is_mutable or func.namespace not in ("aten", "prims"):
        return False
    # Statistics that it updates, which no schema tells; memory that nobody has written yet.
    if "batch_norm" in name or "moving_avg" in name or "empty" in name:
        return False
    given = tensors_of((args, kwargs))
    # Without a tensor to go by, a result has the default dtype, which is another one in backward.
    if not given or any(value.is_inference() for value in (*given, *tensors_of(result))):
        return False
    # A generator of the user's own would have to be set back.
    return not (is_random(func) and kwargs.get("generator") is not None)


def _name(maker: Operation, buffer: Buffer) -> str:
    name = maker.func._schema.name.partition("::")[2]
    where = f"{maker.where}:{name}" if maker.where else name
    return f"{where}.{buffer.position}" if buffer.position else where


_NUMBER = "_lightning_ssd_buffer"
_TAKEN = "_lightning_ssd_taken"
