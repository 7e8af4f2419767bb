"""Prefetches weights to the device before their use, in recorded order and within a byte budget, and evicts them.

A *use* of a unit is its forward, or a saved weight that backward unpacks. The uses of the last micro-batch predict
those of this one: from the present use on, as many units as fit into the budget are kept or prefetched, and the others
are evicted (Fuyou's GPU-memory-aware prefetch). Wrong predictions cost time and do not change results.

Threads: the training thread, which has called `fit`, and, in backward, autograd's thread of the device. Both may call
at once, since the training thread runs operations on the CPU that have saved weights: every public method acquires the
lock. Its holder waits only for steps, reads and copies, whose threads never acquire it. `check_caller` refuses all
other threads: with a lock, too, the training thread would evict or step weights between two of their operators.

Ownership: the device memory of a resident flat parameter belongs to the copy from the host until its mark is reached,
which the compute stream waits for before a use; then to the running operations, which `users`, `recomputed_by` and
`_nodes` record; and to `evict` after that.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from lightning_ssd import forks
from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import in_backward
from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.futures import Future
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.storage import Urgency
from lightning_ssd.waits import wait_for


class ParamPrefetcher:
    """Prefetches and evicts the flat parameters of units.

    Args:
        budget: bytes of device memory for compute weights; units in use are resident even if they exceed it.
        unstage: unstages values that are staged for user code; called before those of a flat parameter are.
        pull: copies user code's writes to memory that it shares with a flat parameter; called before its use.

    Attributes:
        wait_seconds: seconds for which the host has waited, in uses, until copies of weights were issued: for steps of
            the CPU, for reads, and for the copies before.
    """

    def __init__(
        self,
        units: Sequence[Sequence[FlatParameter]],
        stores: Mapping[FlatParameter, StateStore],
        copies: CopyEngine,
        budget: int,
        unstage: Callable[[FlatParameter], None],
        pull: Callable[[FlatParameter], None],
    ) -> None:
        self._units = units
        self._unit_of = {flat: index for index, flat_params in enumerate(units) for flat in flat_params}
        self._nbytes = [sum(flat.nbytes for flat in flat_params) for flat_params in units]
        self._total = sum(self._nbytes)
        self._stores = stores
        self._copies = copies
        self._budget = budget
        self._unstage = unstage
        self._pull = pull
        self.wait_seconds = 0.0
        self._process = forks.process
        self._thread = threading.get_ident()
        self._loads: dict[FlatParameter, _Load] = {}
        """Loads of the resident flat parameters."""
        self._forwards = [0] * len(units)
        """Forwards of each unit in this micro-batch; recomputation in backward is not counted."""
        self._outside: set[int] = set()
        """Units whose weights operators outside of their forwards have used before backward: a gradient arrives."""
        self._unsure: set[int] = set()
        """Units whose weights such operators have used in backward, or unrecorded by autograd, maybe in a reentrant
        checkpoint, in this micro-batch: a gradient may arrive."""
        self._recomputing: dict[int, int] = {}
        """The unit that has `recomputed_by` set for each thread in backward."""
        self._unrecorded: set[int] = set()
        """Units with a forward that autograd did not record, as that of a reentrant checkpoint."""
        self._nodes: dict[int, _RunningNode] = {}
        """The autograd node that each thread in backward runs."""
        self._retired: set[FlatParameter] = set()
        forward = list(range(len(units)))
        self._expected: dict[str, list[int]] = {"train": forward + forward[::-1], "evaluate": forward}
        self._kind = "evaluate"
        self._uses: list[int] = []
        self._cursor = 0
        self._lock = threading.RLock()
        """Guards the fields above, and `users` and `recomputed_by` of flat parameters. Reentrant: `unstage` and `pull`
        may call back."""

    def begin(self, kind: str) -> None:
        """Begins a micro-batch; `kind` is "train" or "evaluate"."""
        with self._lock:
            if self._uses:
                self._expected[self._kind] = self._uses
            self._kind = kind
            self._forwards = [0] * len(self._units)
            for units in (self._outside, self._unsure, self._unrecorded):
                units.clear()
            self._nodes.clear()
            for thread in list(self._recomputing):
                self._end_recomputation(thread)
            self._uses = []
            self._cursor = 0

    def pre_forward(self, unit: int) -> None:
        """Begins a forward of `unit`. On return, the compute stream is ordered after the prefetch of its weights.

        Raises:
            RuntimeError: another thread or process than that of `fit` calls.
        """
        self.check_caller()
        with self._lock:
            for flat in self._units[unit]:
                flat.users += 1
                flat.thread = threading.get_ident()
            try:
                for flat in self._units[unit]:
                    self._pull(flat)
                self._forwards[unit] += not in_backward()
                if not torch.is_grad_enabled():
                    self._unrecorded.add(unit)
                self._use(unit)
            except BaseException:
                self.post_forward(unit)
                raise

    def post_forward(self, unit: int) -> None:
        """Ends a forward of `unit`, also after an error."""
        with self._lock:
            for flat in self._units[unit]:
                flat.users -= 1

    @contextlib.contextmanager
    def resident(self, flat_params: Iterable[FlatParameter], *, record: bool) -> Iterator[None]:
        """Keeps flat parameters of any units resident while an operator outside of their forwards runs.

        Args:
            record: whether autograd records the use; then the next micro-batch prefetches them.

        Raises:
            RuntimeError: the step of one of them has begun, or another thread or process than that of `fit` calls.
        """
        self.check_caller()
        held: list[FlatParameter] = []
        try:
            with self._lock:
                for flat in flat_params:
                    flat.users += 1
                    flat.thread = threading.get_ident()
                    held.append(flat)
                for flat in held:
                    self.check(flat)
                    self._pull(flat)
                for unit in dict.fromkeys(self._unit_of[flat] for flat in held):
                    if not record:
                        self._unsure.add(unit)
                        self._make_resident(unit)
                    elif in_backward():
                        self._unsure.add(unit)
                        self._use(unit)
                        self._begin_recomputation(unit)
                    else:
                        self._outside.add(unit)
                        self._use(unit)
            yield
        finally:
            with self._lock:
                for flat in held:
                    flat.users -= 1

    def used_outside(self, flat: FlatParameter) -> bool:
        """Returns whether operators outside of forwards have used weights of the unit of `flat` before backward."""
        return self._unit_of[flat] in self._outside

    def has_one_gradient(self, flat: FlatParameter) -> bool:
        """Returns whether autograd accumulates one gradient of each weight of `flat`, as far as is known in backward.

        A unit has had one forward then, no reentrant checkpoint has used its weights elsewhere, or may do so, and its
        forward is not that of a reentrant checkpoint if its weights are used outside of it, too, as in a penalty of
        all weights.
        """
        unit = self._unit_of[flat]
        unsure = unit in self._unsure or (unit in self._unrecorded and self.used_outside(flat))
        return self._forwards[unit] == 1 and not unsure

    def unshard(self, flat: FlatParameter) -> None:
        """Makes `flat` resident for a saved weight that backward unpacks, or an operator on one of its parameters.

        Raises:
            RuntimeError: the step of `flat` has begun, or another thread or process than that of `fit` calls.
        """
        self.check_caller()
        with self._lock:
            self.check(flat)
            if not flat.mixed:  # else backward needs the values that were cast for the forward
                self._pull(flat)
            unit = self._unit_of[flat]
            node = internals.autograd_node()
            if node is not None:
                number, thread = internals.sequence_of(node), threading.get_ident()
                running = self._nodes.get(thread)
                if running is None or running.number != number:
                    running = self._nodes[thread] = _RunningNode(number, set())
                running.units.add(unit)
            self._use(unit)

    def check(self, flat: FlatParameter) -> None:
        """Raises RuntimeError if the step of `flat` has begun: its weights are not those of the forward.

        That is so from the step's begin in a backward to the end of the optimizer's step, or to the end of training if
        an error has ended the backward.
        """
        if flat in self._retired:
            raise RuntimeError(
                f"the weights or optimizer states of {flat.name} are used after their gradient was complete and their "
                "step had begun, in the same backward: by a hook, after an error (as in `on_exception`), or where no "
                "gradient flows (detached). Set `overlap='none'`, or, if it is set, override `on_after_backward`: "
                "steps begin with `optimizer.step` then."
            )

    def check_caller(self) -> None:
        """Raises RuntimeError if another thread than that of `fit` calls, or a fork of the training process.

        On a GPU, autograd calls hooks on a thread of its own, for which the training thread waits.
        """
        if threading.get_ident() != self._thread and (self._copies.device.type == "cpu" or not in_backward()):
            raise RuntimeError(
                f"the thread {threading.current_thread().name!r} uses a model whose weights are offloaded, and another "
                "thread has called `fit`: it fetches, steps and frees the weights meanwhile. Call modules, `backward` "
                "and optimizers in a loop on that thread, and have it read or write weights. Give other threads a "
                "`.clone()` of weights, or a `copy.deepcopy` of the model, or set `states='gpu'`."
            )
        if self._process != forks.process:
            raise RuntimeError(
                "a forked process, such as a worker of a DataLoader, uses a model whose weights are offloaded: its "
                "memory and threads are those of the training process. Give it a `copy.deepcopy` of the model, or set "
                "`num_workers=0`."
            )

    def retire_for_step(self, flat: FlatParameter) -> None:
        """Evicts `flat`, whose step begins, and excludes it from prefetching until `reset`."""
        with self._lock:
            self._retired.add(flat)
            self.evict(flat)

    def reset(self) -> None:
        """Ends a step: retired flat parameters may be prefetched again, each once its step is done."""
        with self._lock:
            self._retired.clear()

    def prefetch(self) -> None:
        """Starts to prefetch the units that are used next."""
        with self._lock:
            self._prefetch(self._lookahead())

    def evict(self, flat: FlatParameter) -> None:
        """Evicts `flat`. A later prefetch copies the values that are stored then."""
        with self._lock:
            load = self._loads.pop(flat, None)
            flat.recomputed_by = 0
            if load is not None:
                try:
                    load.wait()
                finally:
                    flat.evict()

    def evict_all(self) -> None:
        """Evicts all flat parameters, none of which may be in use."""
        with self._lock:
            for flat in list(self._loads):
                self.evict(flat)

    def wait(self, flat: FlatParameter) -> None:
        """Orders the compute stream after the prefetch of `flat`, if it is resident."""
        with self._lock:
            if (load := self._loads.get(flat)) is not None:
                load.wait()

    def _make_resident(self, unit: int) -> None:
        """Makes `unit` resident, and evicts units that are not expected soon."""
        if any([flat not in self._loads for flat in self._units[unit]]):
            self._evict_all_but(self._lookahead())
            self._load(unit)
        self._wait_for_unit(unit)

    def _begin_recomputation(self, unit: int) -> None:
        """Has later kernels of this thread on the weights of `unit` run directly, as in its forward.

        Most are of the same recomputation: `torch.utils.checkpoint` of a function calls no hooks of the module again.
        """
        thread = threading.get_ident()
        self._recomputing[thread] = unit
        for flat in self._units[unit]:
            if flat in self._loads and not flat.recomputed_by:  # else another thread's operators may run
                flat.recomputed_by = thread

    def _end_recomputation(self, thread: int) -> None:
        for flat in self._units[self._recomputing.pop(thread)]:
            if flat.recomputed_by == thread:
                flat.recomputed_by = 0

    def _use(self, unit: int) -> None:
        if self._recomputing.get(thread := threading.get_ident(), unit) != unit:
            self._end_recomputation(thread)
        if not self._uses or self._uses[-1] != unit:
            self._uses.append(unit)
            expected = self._expected[self._kind]
            if unit in expected[self._cursor :]:
                self._cursor = expected.index(unit, self._cursor) + 1
            if not self._all_placed():
                expected = self._lookahead()
                self._evict_all_but(expected)
                self._load(unit)
                self._prefetch(expected)
        else:
            self._load(unit)
        self._wait_for_unit(unit)

    def _all_placed(self) -> bool:
        """Returns whether there is room for all flat parameters, and all are resident or retired: none has to move."""
        return self._total <= self._budget and len(self._loads) + len(self._retired) == len(self._unit_of)

    def _wait_for_unit(self, unit: int) -> None:
        for flat in self._units[unit]:
            load = self._loads.get(flat)
            if load is not None and not load.waited:  # seldom: each saved weight that backward unpacks asks for it
                begun = perf_counter()
                load.wait()
                self.wait_seconds += perf_counter() - begun

    def _lookahead(self) -> list[int]:
        """Returns the last used unit and the next ones that fit into the budget, in the order of their use."""
        expected = self._expected[self._kind]
        units = dict.fromkeys(self._uses[-1:])
        nbytes = sum(self._nbytes[unit] for unit in units)
        for unit in expected[self._cursor :] + expected[: self._cursor]:
            if unit in units:
                continue
            nbytes += self._nbytes[unit]
            if nbytes > self._budget:
                break
            units[unit] = None
        return list(units)

    def _prefetch(self, expected: Sequence[int]) -> None:
        """Prefetches the units that the device has memory for; the others are loaded when they are used."""
        with contextlib.suppress(torch.OutOfMemoryError):
            for unit in expected:
                self._prefetch_unit(unit)

    def _load(self, unit: int) -> None:
        """Begins to load a unit that is used now, in place of prefetched ones if the device has no memory for both."""
        try:
            self._prefetch_unit(unit)
        except torch.OutOfMemoryError:
            self._evict_all_but([unit])
            self._prefetch_unit(unit)

    def _prefetch_unit(self, unit: int) -> None:
        for flat in self._units[unit]:
            if flat not in self._loads and flat not in self._retired:  # seldom: most uses find all units resident
                self._prefetch_flat(flat)

    @uninterrupted  # which takes longer than all else that a use of a resident unit does
    def _prefetch_flat(self, flat: FlatParameter) -> None:
        self._unstage(flat)
        target = flat.allocate()
        # The memory belongs to the compute stream until it has passed the mark recorded here.
        urgency = Urgency()
        store = self._stores[flat]
        after = self._copies.mark(awaited=store.reads_to_device)
        arrived = store.prefetch_to(target, after, urgency)
        self._loads[flat] = _Load(flat.name, arrived, urgency, self._copies)

    def _evict_all_but(self, expected: Iterable[int]) -> None:
        """Evicts the units that are neither in use nor `expected` soon."""
        kept = set(expected).union(*(running.units for running in self._nodes.values()))
        for flat, load in list(self._loads.items()):
            # A load that is not issued yet would write to memory of its next owner.
            in_use = flat.users or flat.recomputed_by
            if self._unit_of[flat] not in kept and not in_use and load.issued:
                self.evict(flat)


class _RunningNode(NamedTuple):
    """An autograd node whose backward uses weights.

    Attributes:
        units: units whose weights the node has unpacked; it may not have launched its kernels yet.
    """

    number: int
    units: set[int]


class _Load:
    """The copy of a flat parameter from the host to the device.

    Attributes:
        waited: whether the compute stream is ordered after it.
    """

    def __init__(self, name: str, issued: "Future[Mark]", urgency: Urgency, copies: CopyEngine) -> None:
        self._name = name
        self._issued = issued
        self._urgency = urgency
        self._copies = copies
        self.waited = False

    @property
    def issued(self) -> bool:
        return self._issued.done()

    def wait(self) -> None:
        """Orders the compute stream after the copy. Blocks the host until the copy is issued."""
        if self.waited:
            return
        if not self._issued.done():
            self._urgency.begin_wait()
        self._copies.wait(wait_for(self._issued, f"the weights of {self._name}"))
        self.waited = True
