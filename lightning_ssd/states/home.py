"""Where a flat lives between its uses: its compute weights, master weights and optimizer states, off the device."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark, all_of, ended, finished
from lightning_ssd.states.buffers import HostBuffer, SSDBuffer, StateBuffer, StateStaging
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.loaded import Loaded, exact_value
from lightning_ssd.states.split import join, split
from lightning_ssd.storage import Blob, PinnedBuffer

log = logging.getLogger(__name__)

WHOLE_DTYPES = (torch.float32, torch.float64)
"""Dtypes of weights that are their own master weights. Those of fp64 are evaluated only."""


@dataclass
class Opened:
    """A flat's values on the host, for one optimizer step or to be read. One-dimensional, `flat.numel` elements each.

    Attributes:
        weights: compute weights, in the flat's dtype; undefined where `master` is another tensor.
        master: fp32 master weights; `weights` itself where those are fp32, None where they are split.
        low: of split master weights, what is not in `weights`, int16.
        states: fp32 optimizer states by name, zero before the first step.
        buffer: staging memory that it all lies in.
        other: the other slot, where a step puts new values; None: it puts them here.
    """

    weights: Tensor
    master: Tensor | None
    low: Tensor | None
    states: dict[str, Tensor]
    buffer: PinnedBuffer | None = None
    other: "Opened | None" = None

    @property
    def out(self) -> "Opened":
        """Where a step puts new values. (No attribute: a cycle would keep the memory until a garbage collection.)"""
        return self if self.other is None else self.other

    def copy(self, other: "Opened") -> None:
        """Takes the values of another of the same layout."""
        self.weights.copy_(other.weights)
        if self.master is not None and other.master is not None and self.master is not self.weights:
            self.master.copy_(other.master)
        if self.low is not None and other.low is not None:
            self.low.copy_(other.low)
        for name, values in self.states.items():
            values.copy_(other.states[name])

    def masters(self) -> Tensor:
        """Returns the fp32 master weights: a copy where they are split."""
        if self.master is not None:
            return self.master
        assert self.low is not None
        return join(self.weights, self.low)

    def take(self, masters: Tensor) -> None:
        """Takes over master weights, which may be those of `masters`, and rounds them to the compute weights."""
        if self.low is not None:
            split(masters, self.weights, self.low)
            return
        assert self.master is not None
        if masters is not self.master:
            self.master.copy_(masters)
        self.round()

    def round(self) -> None:
        """Makes the compute weights anew from whole master weights beside them."""
        if self.master is not None and self.weights is not self.master:
            self.weights.copy_(self.master)


@dataclass(frozen=True)
class Layout:
    """How a flat's values lie in memory: the compute weights in one place, all others side by side in another.

    Attributes:
        flat: whose.
        split: whether its master weights are split; only those of bf16 weights can be.
        state_names: of the optimizer's states that have an element for each weight.
        steps: whether it is stepped, and has gradients.
        slots: 2 if a step can be taken back, else 1.
    """

    flat: FlatParameter
    split: bool
    state_names: Sequence[str]
    steps: bool
    slots: int

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient as it lands."""
        return self.flat.nbytes if self.steps else 0

    @property
    def whole_master(self) -> bool:
        """Whether there are fp32 master weights beside the compute weights."""
        return self.flat.dtype not in WHOLE_DTYPES and not self.split

    @property
    def rest_bytes(self) -> int:
        """Bytes of all but the compute weights."""
        master = 4 if self.whole_master else 2 if self.split else 0
        return self.flat.numel * (master + 4 * len(self.state_names))

    def opened(self, weights: Tensor, rest: Tensor | None, buffer: PinnedBuffer | None = None) -> Opened:
        """Returns the values that lie in `weights` and `rest`, bytes."""
        compute = weights[: self.flat.nbytes].view(self.flat.dtype)
        start = 0

        def row(dtype: torch.dtype) -> Tensor:
            nonlocal start
            assert rest is not None
            end = start + self.flat.numel * dtype.itemsize
            values, start = rest[start:end].view(dtype), end
            return values

        states = {name: row(torch.float32) for name in self.state_names}
        master = row(torch.float32) if self.whole_master else None if self.split else compute
        low = row(torch.int16) if self.split else None
        return Opened(compute, master, low, states, buffer)


class Home:
    """Keeps one flat. Who has it open may read and write it until `close`; one at a time.

    A step that was announced by `reserve` comes before every `copy_in` that follows the call.

    Why weights in host memory may be overwritten while the device computes: a step begins when the last gradient has
    landed, which the compute stream produced after its last read of the weights on the device, and that came after
    their copy-in.

    Who owns staging memory until when: the reads, then the copy-in or whoever opened the flat, then the writes until
    all of them have ended. All that an opened flat needs is taken at once, so that nobody holds a part and waits.

    Args:
        layout: how the flat's values lie.
        weights: keeps the compute weights.
        rest: keeps all others; None where there are none.
        copies: copies of the device.
        scratch: memory and threads for what is on SSDs; None where nothing is.
    """

    def __init__(
        self,
        layout: Layout,
        weights: StateBuffer,
        rest: StateBuffer | None,
        copies: CopyEngine,
        scratch: StateStaging | None,
    ) -> None:
        self.flat = layout.flat
        self.layout = layout
        self._places: tuple[StateBuffer, ...] = (weights,) if rest is None else (weights, rest)
        self._copies = copies
        self.scratch = scratch
        """Memory and threads for what is on SSDs."""
        self._staging_bytes = sum(place.staging_bytes for place in self._places)
        self._stepped: Future[Any] = finished(None)
        self.steps = 0
        """Steps that count."""

    def reserve(self, stepped: "Future[Any]") -> None:
        """The flat will be opened, changed and closed before `stepped` is done."""
        self._stepped = stepped

    def copy_in(self, target: Tensor, after: Mark) -> "Future[Mark]":
        """Fills device bytes `target` with the compute weights once `after` is reached.

        The future is done when the copy was issued; the target is the copy's until the mark is reached.
        """
        issued: Future[Mark] = Future()
        weights = self._places[0]

        def fetch() -> None:
            assert self.scratch is not None
            buffer = self.scratch.window.acquire(weights.staging_bytes)
            values, read = weights.open(buffer.tensor, read=True)
            read.add_done_callback(lambda read: arrived(read, values, buffer))

        def arrived(read: "Future[None]", values: Tensor, buffer: PinnedBuffer) -> None:
            try:
                read.result()
                mark = self._copies.h2d(values, target, after, awaited=True)
            except BaseException as error:
                buffer.release()
                issued.set_exception(error)
            else:
                self._copies.on_h2d(mark).add_done_callback(lambda _: buffer.release())
                issued.set_result(mark)

        def go(stepped: "Future[Any]") -> None:
            try:
                stepped.result()
                if weights.staging_bytes == 0:
                    issued.set_result(self._copies.h2d(weights.open(None, read=True)[0], target, after))
                    return
                assert self.scratch is not None
                fetched = self.scratch.fetcher.submit(fetch, [weights.settled()])
            except BaseException as error:
                issued.set_exception(error)
            else:
                fetched.add_done_callback(lambda fetched: _pass_on(fetched, issued))

        self._stepped.add_done_callback(go)
        return issued

    def open(self, *, step: bool = False, priority: int = -1) -> "Future[Opened]":
        """Brings the values to the host.

        Args:
            step: new values go to the other slot, if there is one, and count from `commit` on; else they are changed
                in place.
            priority: of those that wait for staging memory, the lowest goes first.
        """
        if self._staging_bytes == 0:
            return finished(self._lay_out([place.open(None, read=True)[0] for place in self._places], None, step=step))
        opened: Future[Opened] = Future()

        def take() -> None:
            assert self.scratch is not None
            buffer = self.scratch.staging.acquire(self._staging_bytes)
            start = 0
            parts: list[Tensor] = []
            reads: list[Future[None]] = []
            for place in self._places:
                memory = buffer.tensor[start : start + place.staging_bytes]
                start += place.staging_bytes
                # The compute weights are made anew from whole masters.
                read = place is not self._places[0] or not self.layout.whole_master
                part, done = place.open(memory, read=read)
                parts.append(part)
                reads.append(done)
            values = self._lay_out(parts, buffer, step=step)
            all_of(reads).add_done_callback(lambda read: hand_over(values, read))

        def hand_over(values: Opened, read: "Future[None]") -> None:
            if (error := read.exception()) is not None:
                self._release(values)
                opened.set_exception(error)
            else:
                opened.set_result(values)

        assert self.scratch is not None
        needed = [place.settled() for place in self._places]
        # A step that did not count may still be on its way to the slot that this one goes to.
        needed += [ended(place.settled(other=True)) for place in self._places]
        taken = self.scratch.opener.submit(take, needed, priority=priority)
        taken.add_done_callback(lambda taken: _pass_on(taken, opened))
        return opened

    def close(self, opened: Opened, *, changed: bool, step: bool = False) -> None:
        """Takes the values back; `step` as when they were opened."""
        if not changed or opened.buffer is None:
            self._release(opened)
            return
        start = 0
        writes: list[Future[None]] = []
        for place in self._places:
            if place.staging_bytes:
                writes.append(place.write(opened.buffer.tensor[start : start + place.nbytes], other=step))
                start += place.staging_bytes
        all_of(writes).add_done_callback(lambda _: self._release(opened))

    def commit(self) -> None:
        """The step that was closed last counts."""
        self.steps += 1
        for place in self._places:
            place.turn()

    def revert(self) -> None:
        """Takes the last `commit` back: there are two slots, and no step was opened since."""
        self.steps -= 1
        for place in self._places:
            place.turn()

    @property
    def on_ssd(self) -> tuple[bool, bool]:
        """Whether the compute weights are on SSDs, and whether all others are."""
        weights, rest = self._places[0], self._places[-1]
        return isinstance(weights, SSDBuffer), isinstance(rest, SSDBuffer)

    @property
    def slot(self) -> int:
        """Which slot counts."""
        return self._places[0].slot

    def blobs(self) -> list[Blob]:
        """Returns the blobs of the places on SSDs, each place's slots in order."""
        return [blob for place in self._places if isinstance(place, SSDBuffer) for blob in place.blobs]

    def take_over(self, slot: int) -> None:
        """Has the values that are in `slot` already; points the parameters, whose own memory is freed, to the flat."""
        for place in self._places:
            place.slot = slot
        self.flat.adopt()

    def drain(self) -> None:
        """Returns when the step that was announced is made and its result is where it belongs.

        Raises:
            StorageError: it could not be written.
        """
        self._stepped.result()
        self.written().result()

    def written(self, _: object = None) -> "Future[None]":
        """Returns a future that is done when the values that count are where they belong."""
        return all_of(place.settled() for place in self._places)

    def borrow(self) -> Tensor:
        """Returns the fp32 master weights, `flat.numel` of them, to be changed until `restore`."""
        values = self.open().result()
        masters = values.masters()
        # In host memory they are lent as they are; what is opened from an SSD can't be held for long.
        if values.buffer is not None:
            masters = masters.clone()
            self.close(values, changed=False)
        return masters

    def restore(self, masters: Tensor) -> None:
        """Takes what was borrowed back."""
        values = self.open().result()
        values.take(masters)
        self.close(values, changed=True)

    def holds(self, masters: Tensor) -> bool:
        """Whether what was borrowed is still what is here; if so, that is the end of it."""
        values = self.open().result()
        same = torch.equal(values.masters(), masters)
        self.close(values, changed=False)
        return same

    def fill(self, loaded: Loaded) -> None:
        """Takes the parameters' values over, whose own memory is freed, and points them to the flat.

        Args:
            loaded: checkpoint values, which are the master weights of parameters that hold them rounded.
        """
        parameters = [item.parameter for item in self.flat.slices]
        exact = [exact_value(parameter, loaded) for parameter in parameters]
        self.store([p.data if value is None else value for p, value in zip(parameters, exact, strict=True)])
        self.flat.adopt()

    def store(self, weights: Sequence[Tensor], then: Callable[[Opened], None] | None = None) -> None:
        """Takes over the values of all parameters, in order; `then` is called with the flat's, to change them."""
        values = self.open().result()
        masters = values.master if values.master is not None else torch.zeros(self.flat.numel, dtype=torch.float32)
        try:
            for item, whole in zip(self.flat.slices, weights, strict=True):
                item.of(masters).copy_(whole)
            values.take(masters)
            if then is not None:
                then(values)
        except BaseException:
            self.close(values, changed=False)
            raise
        self.close(values, changed=True)

    def give_back(self) -> Exception | None:
        """Makes the parameters whole again, on the CPU and in their own dtype, if they point to the flat.

        Returns:
            Why they could not be read, and are NaN; None if they were.
        """
        if not self.flat.attached:
            return None
        self.flat.attached = False
        try:
            values = self.open().result()
        except Exception as error:
            log.error("the weights of %s are lost, and are NaN now: %s", self.flat.name, error)
            for item in self.flat.slices:
                item.parameter.data = torch.full(item.parameter.shape, float("nan"), dtype=item.dtype)
            return error
        masters = values.masters()
        for index, item in enumerate(self.flat.slices):
            memory = self.flat.memory(index)
            if memory is not None and memory.device.type == "cpu":
                item.parameter.data = memory.copy_(item.of(masters))
            else:
                item.parameter.data = item.of(masters).to(item.dtype, copy=True)
        self.flat.shared.clear()
        self.close(values, changed=False)
        return None

    def move(self, weights: StateBuffer | None, rest: StateBuffer | None) -> None:
        """Takes values to other places, which it owns from then on, and gives those before back.

        Nothing is open, and no step under way. If that fails, all is as it was.

        Args:
            weights: for the compute weights; None: they stay where they are.
            rest: the same of all others.
        """
        places = list(self._places)
        for index, place in enumerate((weights, rest)):
            if place is not None:
                self._copy_to(places[index], place)
                places[index] = place
        before, self._places = self._places, tuple(places)
        self._staging_bytes = sum(place.staging_bytes for place in places)
        for old, new in zip(before, places, strict=True):
            if old is not new:
                old.free()

    def _copy_to(self, old: StateBuffer, new: StateBuffer) -> None:
        staged = max(old.staging_bytes, new.staging_bytes)
        buffer = None
        if staged:
            assert self.scratch is not None
            buffer = self.scratch.staging.acquire(staged)
        try:
            memory = None if buffer is None else buffer.tensor
            values, there = old.open(memory if old.staging_bytes else None, read=True)
            there.result()
            target, _ = new.open(memory if new.staging_bytes else None, read=False)
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)
            new.write(target, other=False).result()
        finally:
            if buffer is not None:
                buffer.release()

    def free(self) -> None:
        """Gives its places back."""
        for place in self._places:
            place.free()

    def free_host_memory(self) -> None:
        """Gives back its places in host memory; those on SSDs go away with the scratch files."""
        for place in self._places:
            if isinstance(place, HostBuffer):
                place.free()

    @property
    def rest(self) -> StateBuffer | None:
        """Keeps all but the compute weights; None where there is no more."""
        return self._places[1] if len(self._places) > 1 else None

    def _lay_out(self, parts: list[Tensor], buffer: PinnedBuffer | None, *, step: bool) -> Opened:
        rest = parts[1] if len(parts) > 1 else None
        opened = self.layout.opened(parts[0], rest, buffer)
        if step:
            others = [place.other(part) for place, part in zip(self._places, parts, strict=True)]
            if any(other is not part for other, part in zip(others, parts, strict=True)):
                opened.other = self.layout.opened(others[0], others[1] if rest is not None else None)
        return opened

    @staticmethod
    def _release(opened: Opened) -> None:
        if opened.buffer is not None:
            opened.buffer.release()


def _pass_on(done: "Future[None]", result: "Future[Any]") -> None:
    """Gives `result` the error of what was to make it, if there is one."""
    if (error := done.exception()) is not None and not result.done():
        result.set_exception(error)
