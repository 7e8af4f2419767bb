"""Weights on the device around their use: fetched ahead in recorded order, within a byte budget, and released.

A *use* is a unit whose forward begins, or whose saved weights backward wants. The uses of the last micro-batch tell
what comes next: from the present use on, as many units as the budget holds are kept or fetched, and the rest is
released (Fuyou's GPU-memory-aware prefetch). Wrong predictions cost time, never numbers.

Threads: the training thread and, in backward, autograd's thread of the device. Both may come at once, since operations
on the CPU that saved weights are run by the training thread meanwhile: every public method takes the lock. A thread
that holds it waits for steps, reads and copies only, whose threads never take it.

Ownership: the memory of a resident flat belongs to the copy in until its mark is reached, which the compute stream is
ordered after before a use; from `users` or `_nodes` on to the running operation; and to `release` after that.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.spans import wait_for
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.home import Home


class ParamPrefetcher:
    """Fetches and releases the flats of units.

    Args:
        units: of each unit, its flats.
        homes: where each flat lives.
        copies: copies of the device.
        budget: bytes of the device that compute weights may take; the units in use at one time stay, whatever it is.
        unstage: takes back what is staged on the host for other code; called before weights are fetched.
        pull: takes over what user code has written to memory that it shares with a flat; called before its use.
    """

    def __init__(
        self,
        units: Sequence[Sequence[FlatParameter]],
        homes: Mapping[FlatParameter, Home],
        copies: CopyEngine,
        budget: int,
        unstage: Callable[[], None],
        pull: Callable[[FlatParameter], None],
    ) -> None:
        self._units = units
        self._unit_of = {flat: index for index, flats in enumerate(units) for flat in flats}
        self._nbytes = [sum(flat.nbytes for flat in flats) for flats in units]
        self._homes = homes
        self._copies = copies
        self._budget = budget
        self._unstage = unstage
        self._pull = pull
        self._loads: dict[FlatParameter, _Load] = {}
        """Of every flat that is resident."""
        self._entered = [0] * len(units)
        """How often each unit's forward has begun in this micro-batch, backward's own recomputation not counted."""
        self._nodes: dict[int, _RunningNode] = {}
        """Of each thread in backward, the autograd node that it runs."""
        self._retired: set[FlatParameter] = set()
        forward = list(range(len(units)))
        self._expected: dict[str, list[int]] = {"train": forward + forward[::-1], "evaluate": forward}
        self._kind = "evaluate"
        self.in_micro_batch = False
        """Whether a forward has begun whose backward has not ended."""
        self._uses: list[int] = []
        self._cursor = 0
        self._lock = threading.RLock()
        """Guards all of the above and `users` of the flats. A fetch may call back for what is staged on the host."""

    def begin(self, kind: str) -> None:
        """A micro-batch begins: `kind` is "train" or "evaluate"."""
        with self._lock:
            if self._uses:
                self._expected[self._kind] = self._uses
            self._kind = kind
            self.in_micro_batch = kind == "train"
            self._entered = [0] * len(self._units)
            self._nodes.clear()
            self._uses = []
            self._cursor = 0

    def enter(self, unit: int) -> None:
        """The forward of `unit` begins; returns when the compute stream is ordered after its weights' arrival."""
        with self._lock:
            for flat in self._units[unit]:
                flat.users += 1
                self._pull(flat)
            self._entered[unit] += torch._C._current_graph_task_id() == -1
            self._use(unit)

    def exit(self, unit: int) -> None:
        """The forward of `unit` has ended, or failed."""
        with self._lock:
            for flat in self._units[unit]:
                flat.users -= 1

    @contextlib.contextmanager
    def hold(self, flats: Iterable[FlatParameter], *, record: bool) -> Iterator[None]:
        """Keeps the weights of `flats`, of any units, on the device while an operator outside of their forwards runs.

        Args:
            flats: whose weights; fetched if they are not resident.
            record: whether the use belongs to the micro-batch, whose order of uses is expected of the next one, too.

        Raises:
            RuntimeError: their step has begun.
        """
        held: list[FlatParameter] = []
        try:
            with self._lock:
                for flat in flats:
                    flat.users += 1
                    held.append(flat)
                for flat in held:
                    self.check(flat)
                    self._pull(flat)
                for unit in dict.fromkeys(self._unit_of[flat] for flat in held):
                    if record:
                        self._use(unit)
                    else:
                        self._hold_resident(unit)
            yield
        finally:
            with self._lock:
                for flat in held:
                    flat.users -= 1

    def entered_once(self, flat: FlatParameter) -> bool:
        """Whether the forward of the flat's unit has begun once in this micro-batch."""
        return self._entered[self._unit_of[flat]] == 1

    def want(self, flat: FlatParameter) -> None:
        """Backward is given a saved weight of `flat`, or something is computed with a weight of it, at once.

        Raises:
            RuntimeError: the weights were stepped already.
        """
        with self._lock:
            self.check(flat)
            if not flat.mixed:  # else plain training's backward has the values that the forward has cast
                self._pull(flat)
            unit = self._unit_of[flat]
            node = torch._C._current_autograd_node()
            if node is not None:
                number, thread = node._sequence_nr(), threading.get_ident()
                running = self._nodes.get(thread)
                if running is None or running.number != number:
                    running = self._nodes[thread] = _RunningNode(number, set())
                running.units.add(unit)
            self._use(unit)

    def check(self, flat: FlatParameter) -> None:
        """Raises RuntimeError if the step of `flat` has begun: its weights are of the past."""
        if flat in self._retired:
            raise RuntimeError(
                f"the weights of {flat.name} are used after their gradient was complete and their step had begun, in "
                "the same backward: by a hook, or where no gradient flows (detached). Set `overlap='none'`."
            )

    def retire(self, flat: FlatParameter) -> None:
        """The step of `flat` begins: what is on the device is of the past, and is not fetched before `renew`."""
        with self._lock:
            self._retired.add(flat)
            self.release(flat)

    def renew(self) -> None:
        """The step is made, or on its way: weights are fetched again, each once its step is done."""
        with self._lock:
            self._retired.clear()

    def prefetch(self) -> None:
        """Begins to fetch what comes next."""
        with self._lock:
            self._fill(self._window())

    def release(self, flat: FlatParameter) -> None:
        """Takes the device's memory away; another fetch brings what the home has by then."""
        with self._lock:
            load = self._loads.pop(flat, None)
            if load is not None:
                try:
                    load.wait()
                finally:
                    flat.release()

    def release_all(self) -> None:
        """Releases everything; nothing is in use."""
        with self._lock:
            for flat in list(self._loads):
                self.release(flat)

    def wait(self, flat: FlatParameter) -> None:
        """Orders the compute stream after the arrival of `flat`, if it is resident."""
        with self._lock:
            if flat in self._loads:
                self._loads[flat].wait()

    def _hold_resident(self, unit: int) -> None:
        """Makes `unit` resident; units that are not expected soon are evicted for it."""
        if any(flat not in self._loads for flat in self._units[unit]):
            expected = self._window()
            for flat in [flat for flat in self._loads if self._may_leave(flat, expected)]:
                self.release(flat)
            self._fetch(unit)
        for flat in self._units[unit]:
            self.wait(flat)

    def _use(self, unit: int) -> None:
        if not self._uses or self._uses[-1] != unit:
            self._uses.append(unit)
            expected = self._expected[self._kind]
            if unit in expected[self._cursor :]:
                self._cursor = expected.index(unit, self._cursor) + 1
            wanted = self._window()
            for flat in [flat for flat in self._loads if self._may_leave(flat, wanted)]:
                self.release(flat)
            self._fill(wanted)  # the unit itself is the first
        else:
            self._fetch(unit)
        for flat in self._units[unit]:
            self.wait(flat)

    def _window(self) -> list[int]:
        """Returns the units of the last use and of those to come that the budget holds, soonest first."""
        expected = self._expected[self._kind]
        units = dict.fromkeys(self._uses[-1:])
        taken = sum(self._nbytes[unit] for unit in units)
        for unit in expected[self._cursor :] + expected[: self._cursor]:
            if unit in units:
                continue
            taken += self._nbytes[unit]
            if taken > self._budget:
                break
            units[unit] = None
        return list(units)

    def _fill(self, wanted: Sequence[int]) -> None:
        for unit in wanted:
            self._fetch(unit)

    def _fetch(self, unit: int) -> None:
        for flat in self._units[unit]:
            if flat not in self._loads and flat not in self._retired:
                self._unstage()
                target = flat.allocate()
                # The memory is the compute stream's: nothing is copied in before that is done with its last owner.
                arrived = self._homes[flat].copy_in(target, self._copies.mark())
                self._loads[flat] = _Load(arrived, self._copies)

    def _may_leave(self, flat: FlatParameter, wanted: Sequence[int]) -> bool:
        unit = self._unit_of[flat]
        in_use = flat.users or any(unit in running.units for running in self._nodes.values())
        # A load that is under way would write memory that is somebody else's: it stays until it has arrived.
        return not in_use and unit not in wanted and self._loads[flat].settled


class _RunningNode(NamedTuple):
    """An autograd node in whose backward weights were used.

    Attributes:
        number: its sequence number.
        units: units whose weights it has been given: it may still have to launch its kernels.
    """

    number: int
    units: set[int]


class _Load:
    """Weights on their way in."""

    def __init__(self, issued: "Future[Mark]", copies: CopyEngine) -> None:
        self._issued = issued
        self._copies = copies
        self._waited = False

    @property
    def settled(self) -> bool:
        return self._issued.done()

    def wait(self) -> None:
        """Orders the compute stream after the arrival; the host waits until the copy was issued."""
        mark = wait_for(self._issued, "weights")
        if not self._waited:
            self._waited = True
            self._copies.wait(mark)
