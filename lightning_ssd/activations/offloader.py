"""Offloads saved tensors of one device in forward, and returns them to backward.

With `torch.autograd.graph.saved_tensors_hooks` (SSDTrain III-B) autograd keeps a `SavedHandle` in place of each tensor.
Bytes never change, so results of training are the same bit for bit.

Call by call, for a storage that is offloaded and loaded:

1. `pack`, on the training thread: `decide` chooses the treatment, and `_new_record` makes the storage's record, which
   holds the storage. Autograd owns the returned handle, and handles own the record.
2. `_offload_waiting`, in the same or a later call of `pack`: no copy begins while user code references the storage,
   because its bytes may change until then. `_offload` issues the copy. From then on `InFlight` owns the bytes on the
   device, and the tier's `StoredCopy` those in host memory or on SSDs.
3. `InFlight.evict_copied`, in a later `pack`: when the copy should be done, or the window is full, the compute stream
   waits for the copy's mark, and the bytes on the device are freed.
4. `unpack`, on autograd's thread: `_prefetch` begins loads in the order of the last backward, within the window. A load
   owns its memory on the device.
5. `_restore` in `unpack` uses bytes that were not evicted yet, or waits until the load is issued and orders the compute
   stream after it. The record owns the bytes again.
6. `SavedHandle.materialize`: the returned tensor owns the bytes, too. Once each handle is unpacked, the
   record drops them.
7. `SavedStorage.__del__`, on the thread that frees the last handle: the stored copy is queued in `_pending_frees`.
8. `_collect`, in a later `pack` or `unpack`, or in `end_backward`: frees the stored copy when its load is issued.

Threads: `pack` runs on the training thread, `unpack` on autograd's thread for the device, while the training thread
waits inside `backward`. A CPU operation that saved tensors of the device is unpacked on the training thread meanwhile,
and a backward that recomputes packs on autograd's thread. One lock guards the records; its holder waits for transfers
only. I/O and completion threads belong to the tiers: they touch no record and never acquire the lock.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd import forks
from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.decide import PLAIN, ChoicesOfCall, Decision, Rules, Tiers, decide, is_unwrapped
from lightning_ssd.activations.dropped_tensors import counts_if_dropped, is_dropped
from lightning_ssd.activations.in_flight import IN, OUT, InFlight
from lightning_ssd.activations.micro_batch import MicroBatch, Pattern
from lightning_ssd.activations.pipeline import PipelineOrder, StagePass
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.recompute import Recomputed
from lightning_ssd.activations.record import (
    InlineSaved,
    PendingFree,
    RefCountedBytes,
    SavedHandle,
    SavedStorage,
    State,
    UnpackOrder,
    as_plain_autograd_keeps,
    attach_saved_storage,
    bytes_of,
    find_saved_storage,
    modified_in_place,
)
from lightning_ssd.activations.tier import OffloadTier, StoredCopy, TierTrimmer
from lightning_ssd.activations.unit_dispatch_mode import in_backward
from lightning_ssd.activations.untraced import untraced
from lightning_ssd.activations.weights import OffloadedWeights, weights_of
from lightning_ssd.activations.wrappers import SavedWrapper
from lightning_ssd.device import CopyEngine, make_clock
from lightning_ssd.sizes import format_bytes
from lightning_ssd.spans import WAIT, span
from lightning_ssd.storage import IOStats
from lightning_ssd.storage_tags import OFFLOADED_WEIGHTS
from lightning_ssd.types import Choice, OffloadTierName, Saving
from lightning_ssd.uncopied import Uncopied

_WITHOUT_HOOKS = (
    "Tensors are offloaded by saved-tensor hooks. To train without them, set `offload='none'` and `states='gpu'` of "
    "the strategy, or remove `ActivationOffload`; or compute this gradient by `torch.autograd.grad`."
)
"""Note on errors of functions that refuse saved-tensor hooks."""


_NO_CONTEXT = contextlib.nullcontext()


class BudgetError(RuntimeError):
    """The tiers have no room for the bytes that `offload` asks for."""


@dataclasses.dataclass
class OffloadStats:
    """Totals since the start, in bytes and seconds.

    Attributes:
        micro_batches: micro-batches begun.
        seconds: duration of forwards and backwards, on the device's clock.
        saved: bytes of saved storages of at least `min_bytes`, without those that a plan keeps.
        stored: bytes of `saved` that a tier began to store.
        forwarded: stored bytes that backward needed while they were still on the device.
        loaded: bytes that were loaded from a tier.
        recomputed: bytes that were dropped for recomputation.
        store_stall: seconds that the compute stream waited in forward, for staging memory or the window.
        load_stall: seconds that the compute stream waited in backward, for loads.
    """

    micro_batches: int = 0
    seconds: float = 0.0
    saved: int = 0
    stored: int = 0
    forwarded: int = 0
    loaded: int = 0
    recomputed: int = 0
    store_stall: float = 0.0
    load_stall: float = 0.0


class ActivationOffloader(Uncopied):
    """Offloads the saved tensors of one device.

    Args:
        tiers: the tiers that the policy's placement chooses from; the offloader owns and closes them, and `copies`.
        policy: the initial rules; `run` replaces them.
        min_bytes: bytes of the smallest storage that may be offloaded.
    """

    #: Number of waiting storages, the newest ones, that are checked with each record. With every 16th, all are checked.
    NUM_CHECKED = 16
    #: Number of kept storages without a record between two checks of the waiting ones.
    CHECK_EVERY = 4

    def __init__(
        self, copies: CopyEngine, tiers: Mapping[OffloadTierName, OffloadTier], policy: OffloadPolicy, *, min_bytes: int
    ) -> None:
        self.device = copies.device
        self.tiers = dict(tiers)
        self.copies = copies
        self.offload_seconds = 0.0
        """Host seconds spent in offloading saved storages, and in waits for room for them."""
        self.num_packed = 0
        """Calls of the pack hooks."""
        self.policy = policy
        """The rules in force, which `run` replaces."""
        self.min_bytes = max(1, min_bytes)  # an empty storage has nothing to move
        self._rules = Rules(self.device, self.min_bytes, forks.process, tuple(self.tiers), policy.placement)
        self._clock = make_clock(self.device)
        self._empty = torch.empty(0, device=self.device)
        self._last_pattern: Pattern | None = None
        self._batch: MicroBatch | None = None
        self._pipeline = PipelineOrder()
        """Micro-batches of a pipeline schedule within `_batch`; none without a pipeline."""
        self._profiled: deque[MicroBatch] = deque()
        self._waiting: list[tuple[weakref.ref[SavedStorage], Tiers]] = []
        """Storages to be offloaded, and the tiers to try, in the order of saving; user code may still change them."""
        self._num_kept = 0
        """Number of storages that were kept while others were waiting or in flight."""
        self._in_flight = InFlight(copies, policy)
        self._pending_frees: deque[PendingFree] = deque()
        self._stats = OffloadStats()
        self._trimmer = TierTrimmer(list(tiers.values()))
        self._closed = False
        self._around: tuple[object, object] = (None, None)
        """The innermost hooks and mode since `pause`."""
        self._paused_saving: Saving = "nothing"
        """The hooks that `pause` has left."""
        self._forwards = 0
        """Number of running forwards: 0 in backward, unless backward is called in a forward."""
        self._lock = threading.RLock()
        self._counts_if_dropped = counts_if_dropped()  # no forward runs yet
        self.run(policy)

    # ---- rules, and the begin and end of a micro-batch ----

    def run(self, policy: OffloadPolicy) -> None:
        """Applies `policy` to the forwards that begin from now on, and to the backwards of all graphs.

        Called on the training thread, while neither a forward nor a backward runs.
        """
        self.policy = self._in_flight.policy = policy
        rules = self._rules
        rules.placement = policy.placement
        rules.planned, rules.records_all = policy.mode is not None, policy.on_saved is not None
        rules.keeps_all = not (self.tiers or policy.mode or policy.on_saved or policy.on_unpacked)
        if self._batch is not None:  # a micro-batch begins before callbacks of its batch change the policy
            self._batch.set_window(policy.window_bytes)

    def begin_micro_batch(self) -> None:
        """Begins a micro-batch: the following saved tensors belong to a new record of their order."""
        self.end_backward()
        if self._batch is not None and self._batch.in_backward:
            self._last_pattern = self._batch.pattern()
            self._profiled.append(self._batch)
        self._read_profiles()
        last = self._last_pattern
        placement, window_bytes = self.policy.placement, self.policy.window_bytes
        window = 0 if placement.expects_early else window_bytes
        placement.begin(last.offloadable_bytes(window) if last else 0)
        if self._batch is not None:
            self._stats.saved += self._batch.saved_bytes + self._batch.kept_bytes
        self._batch = MicroBatch(last, self._clock, placement.revision, window_bytes)
        self._in_flight.begin_micro_batch(self._batch)
        self._pipeline.begin_step()
        self._stats.micro_batches += 1
        self._trimmer.begin_micro_batch()
        self._rules.batch, self._rules.batch_number = self._batch, self._stats.micro_batches

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Offloads tensors that autograd saves within the context.

        They belong to the micro-batch that has begun. If `begin_micro_batch` is not called, as in Lightning's Tuner,
        which runs without callbacks, a micro-batch begins after every backward.
        """
        if not self.policy.hooks_enabled:
            yield
            return
        if self._batch is None or self._batch.ended:
            self.begin_micro_batch()
        self._forwards += 1
        try:
            with saved_tensors_hooks(self.pack, self.unpack), self.policy.mode or contextlib.nullcontext():
                yield
            self._make_all_progress()  # the forward's local variables are freed, so storages may be unshared now
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # of a function that refuses them, such as `torch.func.grad`
                error.add_note(_WITHOUT_HOOKS)
            raise
        finally:
            self._forwards -= 1

    def end_backward(self) -> None:
        """Called when the micro-batch's backward, or its step, has ended. Storages in flight are evicted."""
        if self._batch is not None:
            self._in_flight.evict_all()
            if self._batch.in_backward and not self._batch.ended:
                self.policy.placement.end()
            self._batch.end()
            self._collect()

    # ---- micro-batches of a pipeline schedule within the present one ----

    @contextlib.contextmanager
    def stage_pass(self, now: StagePass) -> Iterator[None]:
        """Offloads a forward of a schedule as a micro-batch of its own, or prefetches for a backward of one.

        In a forward, if the backward of another micro-batch followed it in the last step, the first saved tensors of
        that one are prefetched. In a backward, storages of other micro-batches that are in flight are evicted; if
        another backward follows, its first saved tensors are prefetched once those of this one are. Saved tensors
        belong to a micro-batch until the next forward begins, so that those of its loss do.

        Entered on the training thread. Does nothing outside of `hooks`, and if the forward is planned or recorded as a
        whole.
        """
        policy = self.policy
        if not self._forwards or not policy.hooks_enabled or policy.mode is not None or self._rules.keeps_all:
            yield
            return
        with self._lock:
            assert self._batch is not None
            batch, following = self._pipeline.begin(now, self._batch, policy.window_bytes)
            if now.backward:
                self._in_flight.evict_others(batch)
                batch.begin_backward(following)
                self._prefetch(batch)
            else:
                self._rules.batch = batch
                if following is not None:
                    following.expect_backward()
                    self._prefetch(following)
        yield
        if now.backward:
            with self._lock:
                self._pipeline.end_backward(now)
                self._collect()
        else:
            batch.end_forward()
            self._make_all_progress()  # the forward's local variables are freed

    def free_discarded(self) -> None:
        """Waits for the running loads of tensors without a backward, and frees their memory."""
        with self._lock:
            self._collect(wait=True)

    # ---- changes within a forward ----

    def pause(self, saving: Saving) -> bool:
        """Removes the mode, and hooks, from a running forward until `resume`, if no others were entered inside.

        Called on the training thread between two operations.

        Args:
            saving: the hooks that remain. "nothing": none, so that autograd saves tensors as in plain training;
                "weights": those that save references to offloaded weights, and keep all other tensors; "all": all.
                The hooks of a checkpointed call are entered inside of them, which save its arguments alone then.

        Returns:
            Whether they were removed.
        """
        if _innermost() != ((self.pack, self.unpack), self.policy.mode):
            return False
        with internals.without_dispatch():
            self._make_all_progress()  # before they are removed: they remain if it fails
        internals.pop_dispatch_mode()
        if saving != "all":
            saved_tensors_hooks(self.pack, self.unpack).__exit__()
        self._paused_saving = saving
        if saving == "weights":
            saved_tensors_hooks(self.pack_weight, self.unpack).__enter__()
        self._around = _innermost()
        return True

    def can_resume(self) -> bool:
        """Returns whether all hooks and modes that were entered since `pause` have been left."""
        return self._around == _innermost()

    def resume(self) -> None:
        """Applies the hooks and the mode again that `pause` has removed."""
        if self._paused_saving == "weights":
            saved_tensors_hooks(self.pack_weight, self.unpack).__exit__()
        if self._paused_saving != "all":
            saved_tensors_hooks(self.pack, self.unpack).__enter__()
        assert self.policy.mode is not None
        internals.push_dispatch_mode(self.policy.mode)
        with internals.without_dispatch():
            self._make_all_progress()

    def choose(self, choices: Sequence[Choice] | None, inputs: Sequence[Tensor] = ()) -> None:
        """Sets a plan's choices for the running call of a compiled unit, whose operators no mode sees.

        Args:
            choices: choices for the storages that the call makes and saves, in the order of saving; `None`: it has
                ended.
            inputs: its tensor arguments.
        """
        strided = (one.untyped_storage() for one in inputs if one.layout is torch.strided)
        self._rules.of_call = None if choices is None else ChoicesOfCall(choices, strided)

    def limit_window(self, limit: Callable[[int, Callable[[int], int]], int] | None = None) -> None:
        """Reduces the window of the present micro-batch to the available memory. Nothing was saved yet.

        Args:
            limit: returns that window, as `PlacementPolicy.use_window` does; `None`: the placement's method.
        """
        pattern = self.last_pattern

        def early_bytes(window_bytes: int) -> int:
            return 0 if pattern is None else pattern.offloadable_bytes(0) - pattern.offloadable_bytes(window_bytes)

        window = (limit or self.policy.placement.use_window)(self.policy.window_bytes, early_bytes)
        if window != self.policy.window_bytes:
            self.run(dataclasses.replace(self.policy, window_bytes=window))

    # ---- measurements, and the end ----

    def stats(self) -> OffloadStats:
        """Returns the totals. Stalls of the last steps are added once the device has executed these steps."""
        self._read_profiles()
        running = 0 if self._batch is None else self._batch.saved_bytes + self._batch.kept_bytes
        return dataclasses.replace(self._stats, saved=self._stats.saved + running)

    def io_stats(self) -> IOStats | None:
        """Returns the statistics of the SSD tier's I/O engine, or `None` without that tier."""
        ssd = self.tiers.get("ssd")
        return None if ssd is None else ssd.io_stats()

    def peak_pinned_bytes(self) -> int:
        """Returns the peak of pinned memory in use, in bytes."""
        return sum(tier.peak_pinned_bytes() for tier in self.tiers.values())

    def resident_bytes(self) -> int:
        """Returns the bytes of the present micro-batch's saved storages on the device.

        Storages that a plan keeps are not counted.
        """
        if self._batch is None or self._batch.ended:
            return 0
        return sum(batch.resident_bytes() for batch in (self._batch, *self._pipeline.batches()))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that all tiers have allocated, in use or not."""
        return sum(tier.host_bytes for tier in self.tiers.values())

    @property
    def last_pattern(self) -> Pattern | None:
        """Pattern of the last finished micro-batch: saved storages, and the order in which backward unpacked them."""
        if self._batch is not None and self._batch.ended:
            return self._batch.pattern()
        return self._last_pattern

    def close(self) -> None:
        """Frees memory, files and threads. Backward of graphs that are still alive raises an error afterwards."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.queue.clear()
        with contextlib.ExitStack() as stack:  # each is closed even if closing another one fails
            stack.callback(self.copies.close)
            for tier in self.tiers.values():
                stack.callback(tier.close)
        self._pending_frees.clear()

    # ---- a saved tensor in forward ----

    @untraced
    def pack(self, tensor: Tensor) -> "InlineSaved | SavedHandle | SavedWrapper":
        """Returns the object that autograd saves in place of `tensor`: the pack hook."""
        self.num_packed += 1
        # Operators of the hook are no part of the forward: modes and classes of the user neither see nor change them.
        if type(tensor) in PLAIN:
            if not (internals.count_dispatch_modes() or internals.count_function_modes()):
                decision = decide(tensor, self._rules)
                if decision is None and not (self._waiting or self._in_flight.queue):
                    return _keep(tensor)
                return self._pack(tensor, decision)
            if not internals.is_traced():
                with internals.without_any_torch_function(), internals.without_dispatch():
                    return self._pack(tensor, decide(tensor, self._rules))
        if isinstance(tensor, internals.FakeTensor) or internals.is_traced():
            return _keep(tensor)  # the trace follows tensors through all operators, and backward is a part of it
        if (weights := weights_of(tensor)) is not None:
            with internals.without_dispatch():
                return weights.save(tensor)  # its class answers for its dtype, unless a caller has disabled functions
        # Without dispatch, a detached wrapper would be a tensor of no bytes.
        with (
            internals.without_any_torch_function(),
            internals.without_dispatch_modes() if internals.count_dispatch_modes() else _NO_CONTEXT,
        ):
            if is_unwrapped(tensor, self._rules):
                return SavedWrapper(tensor, self.pack)
            return self._pack(tensor, decide(tensor, self._rules))

    @untraced
    def pack_weight(self, tensor: Tensor) -> InlineSaved:
        """Returns a reference to an offloaded weight, or keeps `tensor`: the pack hook of a paused forward."""
        self.num_packed += 1
        if type(tensor) in PLAIN and tensor.layout is torch.strided and not internals.count_function_modes():
            weights: OffloadedWeights | None = getattr(tensor.untyped_storage(), OFFLOADED_WEIGHTS, None)
        else:
            weights = weights_of(tensor)
        # Modes of the user do not see the hook's operators.
        if internals.count_dispatch_modes() and not (isinstance(tensor, internals.FakeTensor) or internals.is_traced()):
            with internals.without_any_torch_function(), internals.without_dispatch_modes():
                return _keep(tensor) if weights is None else weights.save(tensor)
        return _keep(tensor) if weights is None else weights.save(tensor)

    def _pack(self, tensor: Tensor, decision: Decision) -> "InlineSaved | SavedHandle":
        if decision is None:
            self._make_progress()
            return _keep(tensor)
        if isinstance(decision, tuple):
            storage = tensor.untyped_storage()
            dropped = is_dropped(tensor, storage, self._counts_if_dropped)
            with self._lock:
                return SavedHandle(tensor, self._new_record(storage, decision, dropped=dropped), self._empty)
        if isinstance(decision, RefCountedBytes):
            if isinstance(decision, SavedStorage) and self.policy.on_saved is not None:
                self.policy.on_saved(tensor.untyped_storage(), decision)
            if isinstance(decision, Recomputed) and not decision.views:
                self._stats.recomputed += decision.nbytes
            with self._lock:
                return SavedHandle(tensor, decision, self._empty)
        return decision.save(tensor)

    def _make_all_progress(self) -> None:
        """Offloads and evicts all waiting storages that can be."""
        with self._lock:
            self._offload_waiting(len(self._waiting))
            self._in_flight.evict_copied()

    def _make_progress(self) -> None:
        """Offloads and evicts waiting storages while the forward saves kept ones."""
        if in_backward() or not (self._waiting or self._in_flight.queue):
            return
        if self._rules.process != forks.process:  # a process that was forked in the forward lacks the threads
            return
        self._num_kept += 1
        with self._lock:
            if self.policy.placement.memory_is_scarce or self._num_kept % self.CHECK_EVERY == 0:
                self._offload_waiting(self.NUM_CHECKED)
            self._in_flight.evict_copied()

    def _new_record(self, storage: torch.UntypedStorage, tiers: Tiers, *, dropped: bool) -> SavedStorage:
        """Returns the record of a storage that is saved for the first time in this micro-batch.

        `tiers` are tried in their order; none: the storage is kept. `dropped`: it counts as unshared (`is_dropped`).
        """
        batch = self._rules.batch
        assert batch is not None
        begun = perf_counter()
        if self._pending_frees:
            self._collect()
        before = find_saved_storage(storage)  # of an earlier micro-batch: records of one storage share its bytes
        if before is not None and before.state is State.RESIDENT and before.nbytes == storage.nbytes():
            data = before.data
        else:
            data = bytes_of(storage)
        assert data is not None
        record = SavedStorage(data, batch, len(batch.sizes), self._pending_frees)
        attach_saved_storage(storage, record)
        batch.add(record)
        if self.policy.on_saved is not None:
            self.policy.on_saved(storage, record)
        if tiers:
            self._waiting.append((weakref.ref(record), tiers))
        count = self.NUM_CHECKED if record.index % self.NUM_CHECKED else len(self._waiting)
        self._offload_waiting(count, record if dropped else None)
        self._in_flight.evict_copied()
        self.offload_seconds += perf_counter() - begun
        return record

    def _offload_waiting(self, count: int, dropped: SavedStorage | None = None) -> None:
        """Offloads those of the newest `count` waiting storages that only their records reference, and `dropped`."""
        newest = self._waiting[-count:]
        del self._waiting[-count:]
        for reference, tiers in newest:
            record = reference()
            if record is None or record.state is not State.RESIDENT:
                continue
            if (record is not dropped and record.is_shared()) or not self._has_room_in_flight(record):
                self._waiting.append((reference, tiers))
            else:
                self._offload(record, tiers)

    def _has_room_in_flight(self, record: SavedStorage) -> bool:
        """Returns whether `record` may be offloaded now; a placement that may not wait offloads it later."""
        return (
            self._in_flight.has_room(record.nbytes)
            or self.policy.placement.may_wait
            or self.copies.memory_is_short(record.nbytes)
        )

    def _offload(self, record: SavedStorage, tiers: Sequence[OffloadTierName]) -> None:
        data, nbytes = record.data, record.nbytes
        assert data is not None and self._batch is not None
        if data.untyped_storage().nbytes() < nbytes:
            return  # user code has made the storage smaller
        may_wait = self.policy.placement.may_wait or self.copies.memory_is_short(nbytes)
        for name in tiers:
            copy = self._store(name, data, may_wait)
            if copy is not None:
                break
        else:
            if self.policy.placement.must_fit:
                raise BudgetError(
                    f"no room for a saved tensor of {format_bytes(nbytes)}: "
                    + ", ".join(f"{name} tier: {self.tiers[name].describe()}" for name in tiers)
                    + ". Raise `host_memory` or `ssd_capacity`, lower `offload`, or set `offload='auto'`, which keeps "
                    "tensors without room on the device."
                )
            return
        record.offload(copy, name)
        self._stats.stored += nbytes
        self._in_flight.add(record, data, copy)

    def _store(self, tier: OffloadTierName, data: Tensor, may_wait: bool) -> StoredCopy | None:
        copy = self.tiers[tier].store(data, may_wait=False)
        if copy is None and may_wait:
            assert self._batch is not None
            stall = self._batch.stalls[tier][OUT]
            start = stall.now()
            with span(WAIT + "room to offload"):
                copy = self.tiers[tier].store(data, may_wait=True)
            stall.add(start)
        return copy

    # ---- a saved tensor in backward ----

    @untraced
    def unpack(self, saved: "InlineSaved | SavedHandle | SavedWrapper") -> Tensor:
        """Returns the saved tensor: the unpack hook. The compute stream is ordered after its load."""
        if isinstance(saved, SavedWrapper):
            return saved.rebuild(self.unpack)
        if self.policy.on_saved is None:
            return self._unpack(saved)
        with internals.without_dispatch():  # operators of the hook are no part of the backward
            return self._unpack(saved)

    def _unpack(self, saved: "InlineSaved | SavedHandle") -> Tensor:
        if not isinstance(saved, SavedHandle):
            if isinstance(saved, tuple):
                tensor, version, original = saved
                if original is not None:
                    tensor = as_plain_autograd_keeps(tensor, original)
                if internals.version_of(tensor) != version:
                    raise modified_in_place(tensor, version, tensor.dtype, tensor.size())
            else:
                _check_process(self._rules)
                with self._lock:
                    tensor = saved.load()
            # Backward first unpacks kept tensors, during which offloaded ones are prefetched. (Not for a backward
            # inside of a forward, which unpacks few tensors.)
            if not self._forwards and self._batch is not None and not self._batch.in_backward and in_backward():
                with self._lock:
                    self._batch.begin_backward()
                    self._prefetch(self._batch)
            return tensor
        if self._closed:
            raise RuntimeError(
                "backward was called on a graph whose training has ended, and its saved tensors with it. "
                "Call backward inside the training step, or don't keep the loss after `Trainer.fit`."
            )
        _check_process(self._rules)
        saved.check_version()
        with self._lock:
            if isinstance(saved.record, Recomputed):
                saved.record.recompute()
            else:
                assert isinstance(saved.record, SavedStorage)
                self._restore(saved.record)
                if (on_unpacked := self.policy.on_unpacked) is not None:
                    on_unpacked(saved.record)
            if not internals.count_function_modes():
                return saved.materialize()
            with internals.without_any_torch_function():
                return saved.materialize()

    def _restore(self, record: SavedStorage) -> None:
        record.batch.touch(record)
        if self._pending_frees:
            self._collect()
        if record.state is State.OFFLOADING:
            record.cancel_offload()
            self._stats.forwarded += record.nbytes
        elif record.state is State.OFFLOADED:
            record.prefetch(urgent=True)
        self._prefetch(record.batch)
        if record.state is State.PREFETCHING:
            assert record.tier is not None and self._batch is not None
            stall = self._batch.stalls[record.tier][IN]
            start = stall.now()
            stall.add(start, record.wait())
            self._stats.loaded += record.nbytes
            # The record has left the window. The next call may be for the next compiled region, and all its storages.
            self._prefetch(record.batch)

    def _prefetch(self, batch: UnpackOrder) -> None:
        for record in batch.to_prefetch(self.policy.window_bytes, self.policy.window_depth):
            try:
                record.prefetch(urgent=False)
            except torch.OutOfMemoryError:  # backward may free memory until it needs the bytes
                return

    # ---- freed records, and ended micro-batches ----

    def _collect(self, *, wait: bool = False) -> None:
        """Frees the copies of freed records; those whose loads are not issued yet later, or, with `wait`, now. Running
        loads write to device memory, and end before.
        """
        for _ in range(len(self._pending_frees)):
            pending = self._pending_frees.popleft()
            if pending.load is not None:
                if not (wait or pending.load.issued):
                    self._pending_frees.append(pending)
                    continue
                with contextlib.suppress(Exception):  # an error of a load whose bytes are not needed
                    pending.load.wait()
            pending.copy.free()

    def _read_profiles(self) -> None:
        """Adds the statistics of micro-batches that the device has executed, and passes them to the placement."""
        while self._profiled and (profile := self._profiled[0].profile()) is not None:
            self._profiled.popleft()
            self._stats.seconds += profile.forward_seconds + profile.backward_seconds
            self._in_flight.observe(profile)
            self._stats.store_stall += sum(stalls[OUT] for stalls in profile.stall_seconds.values())
            self._stats.load_stall += sum(stalls[IN] for stalls in profile.stall_seconds.values())
            self.policy.placement.observe(profile)


def _check_process(rules: Rules) -> None:
    if rules.process != forks.process:
        raise RuntimeError(
            "a forked process calls backward on a graph of the training process, whose saved tensors and weights "
            "are offloaded by threads of that process. Compute the loss in the forked process, too."
        )


def _innermost() -> tuple[object, object]:
    """Returns the innermost saved-tensor hooks, pack and unpack, or None, and the innermost mode."""
    return internals.innermost_saved_hooks(False), internals.innermost_dispatch_mode()


def _keep(tensor: Tensor) -> "InlineSaved":
    if tensor.is_leaf:
        return tensor, internals.version_of(tensor), None
    # Detached, because a node that saves its own output would own itself otherwise, and never be freed.
    return tensor.detach(), internals.version_of(tensor), weakref.ref(tensor)
