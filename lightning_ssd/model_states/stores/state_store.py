"""The store of a flat parameter: its compute weights, master weights and optimizer states, off the device.

`StateStore` orders all uses of these values: prefetch, step, write-back, user code and moves wait for each other's
futures here. `layout` has the arrays, `buffers` the memory of each tier, and `versioned_buffers` that of each version.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark, h2d_and_release
from lightning_ssd.futures import Future, all_of, finished, then
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.stores.buffers import HostBuffer, SSDBuffer, StateBuffer, StateStaging
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.stores.versioned_buffers import VersionedBuffers
from lightning_ssd.model_states.units import Loaded, ParamView, exact_value, same_bits
from lightning_ssd.storage import Hashes, PinnedBuffer, Slab, Urgency
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


def commit_memory(stores: Iterable["StateStore"], *, pin: bool) -> None:
    """Commits the host memory of values, which no thread uses meanwhile. They do not change.

    Args:
        pin: page-lock compute weights, which are copied to the device.

    Raises:
        StorageError: they can't be page-locked.
    """
    buffers = [store.buffers for store in stores]
    HostBuffer.commit([one.weights for one in buffers], pin=pin)
    HostBuffer.commit([one.opt_state for one in buffers], pin=False)


class StateStore:
    """Stores the values of one flat parameter in host memory or on SSDs, in one version or two.

    Duty: prefetches the compute weights to the device, stages all values for a step or for user code, writes them back,
    and commits or reverts a step.

    Threads: `prefetch_to` and `stage` may be called on any thread; their futures complete on the `h2d-done`, reader
    and I/O threads, or on the one that completes the announced step. `commit` runs on the thread that completes a step,
    second versions are added and dropped on that of the step's job (see `OptimizerStep`). With several ranks, `checkin`
    runs on the worker's thread, as an announced step. All others run on the training thread, or on autograd's while
    that waits. No lock: the futures below determine the owner of the values.

    Ownership: staged values belong to the caller of `stage` until `unstage`, one at a time. A step that is announced
    owns them until its future is done: every later `prefetch_to` waits for it. Staging memory belongs to the reads,
    then to the copy to the device or to the caller, then to the writes until all have ended. Where the store
    of SSDs takes device buffers, prefetched weights are read to the device without staging memory.

    Deadlocks: a holder of staging memory waits for drives, issued copies and the thread of optimizer steps only, never
    for staging memory or for a thread that may wait for it. So each holder ends, and each request is served at the
    latest when all have ended, since no request is larger than the pool. In detail:

    - All memory that a caller needs is allocated at once, by the reader thread, or by the training thread in a move.
    - Steps stage when the steps before have ended (`ready` of `OptimizerStep`). Their jobs wait for gradients whose
      copies were issued before. A job itself stages values in host memory only, unless all steps are `serial`.
    - The training thread holds staging memory within one method only, which waits for drives (`assign`, `checkin`).
      Values that it holds from one call of user code to the next (`StagedFlats`) are staged `apart`. Each flat
      parameter's read is queued behind the writes of the ones before, which bounds that memory.

    Weights in host memory may be overwritten while the device computes: a step begins when the last gradient has
    arrived, which the compute stream produced after its last read of the weights, and that after their prefetch.

    Args:
        buffers: the memory of the values; owned.
        staging: memory and threads for values on SSDs; None if there are none.

    Attributes:
        steps: steps that were committed.
        fetch: brings the values to host memory if a step has left them elsewhere; the future is done when they are
            there. No step runs meanwhile. `DeviceStates` explains it.
    """

    def __init__(
        self,
        layout: Layout,
        buffers: VersionedBuffers,
        copies: CopyEngine,
        staging: StateStaging | None,
    ) -> None:
        self.flat = layout.flat
        self.layout = layout
        self.buffers = buffers
        self.staging = staging
        self.steps = 0
        self.fetch: Callable[[], Future[None]] = lambda: finished(None)
        self._copies = copies
        self._stepped: Future[Any] = finished(None)
        self._weights_stepped: Future[Any] = finished(None)

    # ---- weights, prefetched to the device ----

    def announce_step(self, weights: "Future[Any]", stepped: "Future[Any]") -> None:
        """Announces a step that stages, changes and unstages the values.

        Args:
            weights: done when the compute weights have their new values.
            stepped: done when the step is committed or skipped.
        """
        self._weights_stepped, self._stepped = weights, stepped

    @property
    def reads_to_device(self) -> bool:
        """Whether `prefetch_to` reads from SSDs to device memory (GPUDirect Storage), without staging memory."""
        return self.buffers.weights.tier == "ssd" and self.staging is not None and self.staging.store.device_buffers

    def prefetch_to(self, target: Tensor, after: Mark, urgency: Urgency | None = None) -> "Future[Mark]":
        """Copies the compute weights to device bytes `target`, after the announced step and once `after` is reached.

        The future is done when the copy was issued; the target belongs to the copy until the mark is reached. Once a
        thread waits for it, by `urgency`, reads from SSDs and the writes that they wait for are served before those
        that no thread waits for. With `reads_to_device`, the target belongs to the reads until the future is done, and
        the thread `h2d-done` waits for `after`, because the drives' transfers are not ordered by streams.
        """
        weights = self.buffers.weights

        def begin(_: object) -> "Future[Mark]":  # on the thread that completes the step, or the caller's
            if weights.staging_bytes == 0:
                return finished(self._copies.h2d(weights.stage(None, read=True)[0], target, after))
            assert self.staging is not None
            if self.reads_to_device:
                ready = all_of([self._copies.on_h2d(after), weights.write_done(urgency=urgency)])
                return then(ready, read_to_device)
            read = self.staging.params.read(
                weights.staging_bytes,
                lambda memory: weights.stage(memory, read=True, urgency=urgency)[1],
                [weights.write_done(urgency=urgency)],
                urgency=urgency,
            )
            return then(read, copy)

        def read_to_device(_: object) -> "Future[Mark]":  # on `h2d-done`, an I/O thread, or the thread of `begin`
            assert isinstance(weights, SSDBuffer)
            return then(weights.read_to_device(target, urgency), lambda _: finished(None))

        def copy(memory: PinnedBuffer) -> "Future[Mark]":  # on an I/O thread
            return finished(h2d_and_release(self._copies, memory, target, after))

        return then(self._weights_stepped, begin)

    # ---- values on the host ----

    def stage(self, *, step: bool = False, priority: int = -1, apart: bool = False) -> "Future[StagedState]":
        """Stages the values on the host.

        Args:
            step: new values are written to the uncommitted version, if it is allocated, until `commit`; else values are
                changed in place.
            priority: of requests that wait for staging memory, the lowest goes first.
            apart: whether values on SSDs are read to memory of their own, because the caller holds them for any time.
        """
        if self.buffers.in_memory:
            if step:
                return self.buffers.stage_in_place(step=True)
            return then(self.fetch(), lambda _: self.buffers.stage_in_place(step=False))
        values: StagedState | None = None

        def fill(memory: Tensor) -> "Future[None]":  # on the state-reader thread, or that of `read_apart`
            nonlocal values
            values, read = self.buffers.read(memory, step=step)
            return read

        def hand_over(memory: PinnedBuffer) -> "Future[StagedState]":  # on an I/O thread
            assert values is not None
            values.buffer = memory
            return finished(values)

        def read_apart(_: object) -> "Future[StagedState]":  # on the caller's thread, or one that ends a write
            memory = Slab(self.buffers.staging_bytes, pin=False).tensor  # freed with its last view or transfer
            return then(fill(memory), filled)

        def filled(_: None) -> "Future[StagedState]":  # on an I/O thread, or that of `read_apart`
            assert values is not None
            return finished(values)

        if apart:
            return then(self.buffers.writes_ended(), read_apart)
        assert self.staging is not None
        ended = self.buffers.writes_ended()
        read = self.staging.states.read(self.buffers.staging_bytes, fill, [ended], priority=priority)
        return then(read, hand_over)

    def _staged_now(self) -> StagedState:
        """Returns the values, for an access within one method on the training thread."""
        return wait_for(self.stage(), f"the values of {self.flat.name}")

    @uninterrupted  # a write that was begun in part would lose the values
    def unstage(self, staged: StagedState, *, changed: bool, step: bool = False) -> None:
        """Ends the use of staged values, and writes them back if they were changed; `step` as in `stage`."""
        if not changed or staged.memory is None:
            self._release(staged)
            return
        written = self.buffers.write(staged.memory, uncommitted=step)
        written.add_done_callback(lambda _: self._release(staged))

    def commit(self) -> None:
        """Commits the step that was unstaged last."""
        self.steps += 1
        self.buffers.commit()

    def revert(self) -> None:
        """Rolls the last commit back: it is `VersionedBuffers.revertible`, and no step was staged since."""
        self.steps -= 1
        self.buffers.revert()

    def written(self, _: object = None) -> "Future[None]":
        """Returns a future that is done when the committed values are stored."""
        return self.buffers.written()

    def hashes(self) -> Hashes:
        """Returns the hashes of the committed values on SSDs, which are stored, for `adopt_hashes` of other ranks."""
        return {} if self.staging is None else self.staging.store.hashes_of(self.buffers.committed_blobs())

    def adopt_hashes(self, hashes: Hashes) -> None:
        """Adopts the hashes of the committed values on SSDs, which another rank has written."""
        if self.staging is not None:
            self.staging.store.adopt_hashes(hashes)

    @property
    def stepped(self) -> "Future[Any]":
        """Done when the announced step is committed or skipped."""
        return self._stepped

    def drain(self) -> None:
        """Returns when the announced step is made and its result is stored.

        Raises:
            StorageError: it could not be written.
        """
        wait_for(self._stepped, f"the step of {self.flat.name}")
        wait_for(self.written(), f"the writes of {self.flat.name}")

    # ---- master weights for user code ----

    def checkout(self) -> Tensor:
        """Returns the fp32 master weights, `flat.numel` elements, to be changed until `checkin`."""
        staged = self._staged_now()
        masters = staged.masters()
        # Those in host memory are returned themselves, unless other ranks would see changes of them; staging memory
        # can't be held for long.
        if staged.buffer is not None or any(buffer.shared for buffer in self.buffers.host):
            masters = masters.clone()
            self.unstage(staged, changed=False)
        return masters

    def checkin(self, masters: Tensor, *, apart: bool = False, staged: StagedState | None = None) -> None:
        """Stores the master weights that `checkout` has returned; `apart` as in `stage`.

        `staged`: values that were staged, and are stored with them; None: they are staged here.
        """
        if staged is None:
            staged = wait_for(self.stage(apart=apart), f"the values of {self.flat.name}")
        staged.set_masters(masters)
        self.unstage(staged, changed=True)

    def is_unchanged(self, masters: Tensor) -> bool:
        """Whether the master weights that `checkout` has returned are still the stored ones."""
        staged = self._staged_now()
        same = same_bits(staged.masters(), masters)
        self.unstage(staged, changed=False)
        return same

    # ---- initial values, moves, and the end ----

    def fill(self, loaded: Loaded) -> None:
        """Stores the values of the parameters, frees the parameters' memory, and makes them views of the flat.

        Args:
            loaded: checkpoint values; they are the master weights of parameters that have them rounded.
        """
        parameters = [item.parameter for item in self.flat.param_views]
        exact = [exact_value(parameter, loaded) for parameter in parameters]
        self.assign([p.data if value is None else value for p, value in zip(parameters, exact, strict=True)])
        self.flat.adopt()

    def assign(self, weights: Sequence[Tensor], change: Callable[[StagedState], None] | None = None) -> None:
        """Stores the weights of all parameters, in order, as master weights.

        Args:
            change: called with the staged values, to change other ones.
        """
        staged = self._staged_now()
        masters = staged.master if staged.master is not None else torch.zeros(self.flat.numel, dtype=torch.float32)
        try:
            for item, whole in zip(self.flat.param_views, weights, strict=True):
                item.of(masters).copy_(whole)
            staged.set_masters(masters)
            if change is not None:
                change(staged)
        except BaseException:
            self.unstage(staged, changed=False)
            raise
        self.unstage(staged, changed=True)

    def adopt(self, version: int) -> None:
        """Resumes with the stored values of a version, and makes the parameters views of the flat."""
        self.buffers.adopt(version)
        self.flat.adopt()

    def restore_to_cpu(
        self, private: Callable[[Tensor], Tensor | None] | None = None, failed: Exception | None = None
    ) -> Exception | None:
        """Makes the parameters whole on the CPU, in their own dtype, if they are views of the flat.

        Args:
            private: maps values that no rank writes any more, in place of copies; see `RankMemory.private`.
            failed: the error of the last step, whose values another rank may have written without this one's knowledge.

        Returns:
            The error that their values could not be read for, so that they are NaN; None if they were read.
        """
        if not self.flat.attached:
            return None
        self.flat.attached = False
        same_dtype = all([item.dtype == self.flat.dtype for item in self.flat.param_views])
        exact = same_dtype and self.buffers.in_memory and not self.layout.split  # which rounds otherwise
        try:
            # Compute weights are in host memory, also if a device that has the other values is lost.
            staged = self.buffers.stage_in_place(step=False).result() if exact else self._staged_now()
        except Exception as error:
            cause = failed or error
            log.error("the weights of %s are lost, and are NaN now: %s", self.flat.name, cause)
            for item in self.flat.param_views:
                item.parameter.data = torch.full(item.parameter.shape, float("nan"), dtype=item.dtype)
            return cause
        masters = staged.weights if exact else staged.masters()
        for index, item in enumerate(self.flat.param_views):
            memory = self.flat.memory(index)
            if memory is not None and (memory.device.type, memory.dtype) == ("cpu", item.dtype):
                item.parameter.data = memory.copy_(item.of(masters))
            else:
                mapped = None if private is None else self._map(staged, item, private)
                item.parameter.data = item.of(masters).to(item.dtype, copy=True) if mapped is None else mapped
        self.flat.shared.clear()
        self.unstage(staged, changed=False)
        return None

    @staticmethod
    def _map(staged: StagedState, item: ParamView, private: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """Maps a parameter's values if they are stored in its dtype, in host memory; else returns None."""
        if staged.memory is not None or staged.master is None or not item.numel:
            return None
        stored = [values for values in (staged.weights, staged.master) if values.dtype == item.dtype]
        return private(item.of(stored[0])) if stored else None

    def move(self, weights: StateBuffer | None, opt_state: StateBuffer | None) -> None:
        """Moves values to other buffers, which are owned from then on, and frees the old ones.

        No values may be staged, and no step may run. After an error, the values are in the old buffers.

        Args:
            weights: new buffer of the compute weights; None: they are not moved.
            opt_state: new buffer of all other values; None: they are not moved.
        """
        pairs = zip(self.buffers, (weights, opt_state), strict=False)
        nbytes = max(max(old.staging_bytes, new.staging_bytes) for old, new in pairs if new is not None)
        with contextlib.ExitStack() as stack:
            memory = None
            if nbytes:
                assert self.staging is not None
                staging = self.staging.states.pool.acquire(nbytes)
                stack.callback(staging.release)
                memory = staging.tensor
            self.buffers.replace(weights, opt_state, memory)

    @staticmethod
    def _release(staged: StagedState) -> None:
        if staged.buffer is not None:
            staged.buffer.release()
