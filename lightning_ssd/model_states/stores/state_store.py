"""The store of a flat parameter: its compute weights, master weights and optimizer states, off the device.

`StateStore` orders all uses of these values: prefetch, step, write-back, user code and moves wait for each other's
futures here. `layout` has the arrays, and `buffers` the memory of each tier.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark, all_of, ended, failed, finished, h2d_and_release, then
from lightning_ssd.model_states.stores.buffers import HostBuffer, SpareMemory, SSDBuffer, StateBuffer, StateStaging
from lightning_ssd.model_states.stores.layout import Layout, StagedState, StoredArray
from lightning_ssd.model_states.units import Loaded, exact_value
from lightning_ssd.storage import Blob, FileRange, PinnedBuffer, Slab, StorageError, Urgency
from lightning_ssd.types import OffloadTierName
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


class StateStore:
    """Stores the values of one flat parameter in host memory or on SSDs, in one version or two.

    If a part of the values is on SSDs, both versions exist all the time: drives fail, and a step of which one write has
    failed is rolled back. If all values are in host memory, the second version exists only where steps need it, from
    `add_second` to `drop_second`; a step without it is made in place, and can't be rolled back.

    Duty: prefetches the compute weights to the device, stages all values for a step or for user code, writes them back,
    and commits or reverts a step.

    Threads: `prefetch_to` and `stage` may be called on any thread; their futures complete on the `h2d-done`, reader
    and I/O threads, or on the one that completes the announced step. `commit` runs on the thread that completes a step,
    `add_second` and `drop_second` on that of the step's job (see `OptimizerStep`), `stage_on_device` on the one that
    completes the scale. The `DeviceStepper` uses `buffers`, `steps_in_place` and `lose` on its thread. All others run
    on the training thread, or on autograd's while that waits. No lock: the futures below determine the owner of the
    values.

    Ownership: staged values belong to the caller of `stage` until `unstage`, one at a time. A step that is announced
    owns them until its future is done: every later `prefetch_to` waits for it. Staging memory belongs to the reads,
    then to the copy to the device or to the caller, then to the writes until all have ended. Where the store
    of SSDs takes device buffers, prefetched weights are read to the device without staging memory, and so are values of
    a step on the device, which are written from there (`stage_on_device`).

    Deadlocks: a holder of staging memory waits for drives, issued copies and the threads of optimizer steps only, never
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
        layout: layout of the values.
        weights: buffer of the compute weights; owned.
        opt_state: buffer of all others; owned. None: there are none.
        copies: copies of the device.
        staging: memory and threads for values on SSDs; None if there are none.

    Attributes:
        steps: steps that were committed.
        revertible: whether the last commit can be rolled back.
        spare: budget of host memory for the second version; None: unlimited.

    Raises:
        StorageError: there is no memory for a second version that must exist.
    """

    def __init__(
        self,
        layout: Layout,
        weights: StateBuffer,
        opt_state: StateBuffer | None,
        copies: CopyEngine,
        staging: StateStaging | None,
    ) -> None:
        self.flat = layout.flat
        self.layout = layout
        self.staging = staging
        self.steps = 0
        self.revertible = False
        self.spare: SpareMemory | None = None
        self._buffers: tuple[StateBuffer, ...] = (weights,) if opt_state is None else (weights, opt_state)
        self._copies = copies
        self._require_seconds(self._buffers)
        self._staging_bytes = sum(buffer.staging_bytes for buffer in self._buffers)
        self._lost: BaseException | None = None
        self._in_place: dict[bool, Future[StagedState]] = {}
        """Results of `stage` for values in host memory, by `step`, while the same memory has the same version."""
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
        return self._buffers[0].tier == "ssd" and self.staging is not None and self.staging.store.device_buffers

    def prefetch_to(self, target: Tensor, after: Mark, urgency: Urgency | None = None) -> "Future[Mark]":
        """Copies the compute weights to device bytes `target`, after the announced step and once `after` is reached.

        The future is done when the copy was issued; the target belongs to the copy until the mark is reached. Once a
        thread waits for it, by `urgency`, reads from SSDs and the writes that they wait for are served before those
        that no thread waits for. With `reads_to_device`, the target belongs to the reads until the future is done, and
        the thread `h2d-done` waits for `after`, because the drives' transfers are not ordered by streams.
        """
        weights = self._buffers[0]

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
        if self._lost is not None:
            return failed(self._lost)
        if self._staging_bytes == 0:
            if step not in self._in_place:
                self._in_place[step] = finished(self._stage_in_place(step=step))
            return self._in_place[step]
        values: StagedState | None = None

        def fill(memory: Tensor) -> "Future[None]":  # on the state-reader thread, or that of `read_apart`
            nonlocal values
            start = 0
            parts: list[Tensor] = []
            reads: list[Future[None]] = []
            for buffer in self._buffers:
                own = memory[start : start + buffer.staging_bytes]
                start += buffer.staging_bytes
                # Compute weights are not read where they are rounded from whole master weights.
                is_read = buffer is not self._buffers[0] or not self.layout.whole_master
                part, done = buffer.stage(own, read=is_read)
                parts.append(part)
                reads.append(done)
            values = self._views(parts, step=step)
            values.memory = memory
            return all_of(reads)

        def hand_over(memory: PinnedBuffer) -> "Future[StagedState]":  # on an I/O thread
            assert values is not None
            values.buffer = memory
            return finished(values)

        def read_apart(_: object) -> "Future[StagedState]":  # on the caller's thread, or one that ends a write
            memory = Slab(self._staging_bytes, pin=False).tensor  # freed with its last view or transfer
            return then(fill(memory), filled)

        def filled(_: None) -> "Future[StagedState]":  # on an I/O thread, or that of `read_apart`
            assert values is not None
            return finished(values)

        if apart:
            return then(self._writes_ended(), read_apart)
        assert self.staging is not None
        read = self.staging.states.read(self._staging_bytes, fill, [self._writes_ended()], priority=priority)
        return then(read, hand_over)

    def _staged_now(self) -> StagedState:
        """Returns the values, for an access within one method on the training thread."""
        return wait_for(self.stage(), f"the values of {self.flat.name}")

    @property
    def steps_directly(self) -> bool:
        """Whether steps on the device transfer values on SSDs without staging memory (GPUDirect Storage)."""
        direct = self.staging is not None and self.staging.store.device_buffers
        return direct and not self.in_memory and self.layout.paged

    def stage_on_device(self) -> "Future[None]":
        """Returns a future that is done when a step on the device may transfer the values, with `steps_directly`.

        In place of `stage`: the values stay where they are stored, and the step owns them until it is committed or has
        failed. Its transfers (`make_transfers`) write the uncommitted version, as in `stage`.
        """
        if self._lost is not None:
            return failed(self._lost)
        return self._writes_ended()

    def _writes_ended(self) -> "Future[None]":
        """Returns a future that is done when the committed values are stored, and the other version is not written."""
        committed = [buffer.write_done() for buffer in self._buffers]
        # A step that was not committed may still be written to the version that the next one overwrites.
        return all_of(committed + [ended(buffer.write_done(uncommitted=True)) for buffer in self._buffers])

    def unstage(self, staged: StagedState, *, changed: bool, step: bool = False) -> None:
        """Ends the use of staged values, and writes them back if they were changed; `step` as in `stage`."""
        if not changed or staged.memory is None:
            self._release(staged)
            return
        start = 0
        writes: list[Future[None]] = []
        for buffer in self._buffers:
            if buffer.staging_bytes:
                writes.append(buffer.write(staged.memory[start : start + buffer.nbytes], uncommitted=step))
                start += buffer.staging_bytes
        all_of(writes).add_done_callback(lambda _: self._release(staged))

    def commit(self) -> None:
        """Commits the step that was unstaged last."""
        self.steps += 1
        self.revertible = self.has_second
        self._flip()

    def revert(self) -> None:
        """Rolls the last commit back: it is `revertible`, and no step was staged since."""
        self.steps -= 1
        self.revertible = False
        self._flip()

    @property
    def has_second(self) -> bool:
        """Whether the second version is allocated."""
        return all(buffer.has_second for buffer in self._buffers)

    @property
    def in_memory(self) -> bool:
        """Whether all values are in host memory."""
        return self._staging_bytes == 0

    @property
    def steps_in_place(self) -> bool:
        """Whether a step on the device overwrites committed values, and not a second version or staging memory."""
        written = self._buffers if self.steps_directly else self._host_buffers()
        return any(not buffer.has_second for buffer in written)

    def add_second(self) -> bool:
        """Allocates the second version of values in host memory, unless it is allocated; no step is staged.

        Returns:
            Whether there is one now.
        """
        if self.layout.versions == 1:
            return False
        if self.has_second:
            return True
        buffers = self._host_buffers()
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self.spare is not None and not self.spare.reserve(nbytes):
            return False
        self._in_place.clear()
        try:
            for buffer in buffers:
                buffer.add_second()
        except StorageError as error:  # the step is made without it
            log.warning(
                "%s has no second version of its values, and its steps wait for the norm: %s", self.flat.name, error
            )
            self._drop_second()
            if self.spare is not None:
                self.spare.release(nbytes)
            return False
        return True

    def drop_second(self) -> None:
        """Frees the second version, unless a part of the values is on SSDs; no step is staged, and none reverted."""
        if not self.in_memory or not self.has_second:
            return
        self._drop_second()
        self.revertible = False
        if self.spare is not None:
            self.spare.release(sum(buffer.nbytes for buffer in self._buffers))

    @property
    def lost(self) -> bool:
        """Whether the values are lost."""
        return self._lost is not None

    def lose(self, error: BaseException) -> None:
        """Declares the values lost: a step in place has failed midway. They can't be staged any more."""
        self._lost = error

    def pin(self) -> None:
        """Page-locks the values in host memory, for copies to the device and from it.

        Of values on SSDs, it page-locks the staging memory, which all flat parameters share, unless `steps_directly`.

        Raises:
            StorageError: they can't be page-locked.
        """
        for buffer in self._host_buffers():
            buffer.pin()
        if not self.in_memory and not self.steps_directly:
            assert self.staging is not None
            self.staging.states.pool.pin()

    def written(self, _: object = None) -> "Future[None]":
        """Returns a future that is done when the committed values are stored."""
        if self._staging_bytes == 0:
            return finished(None)
        return all_of(buffer.write_done() for buffer in self._buffers)

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
        # Those in host memory are returned themselves; staging memory can't be held for long.
        if staged.buffer is not None:
            masters = masters.clone()
            self.unstage(staged, changed=False)
        return masters

    def checkin(self, masters: Tensor) -> None:
        """Stores the master weights that `checkout` has returned."""
        staged = self._staged_now()
        staged.set_masters(masters)
        self.unstage(staged, changed=True)

    def is_unchanged(self, masters: Tensor) -> bool:
        """Whether the master weights that `checkout` has returned are still the stored ones."""
        staged = self._staged_now()
        same = torch.equal(staged.masters(), masters)
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
            weights: the weights.
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
        for buffer in self._buffers:
            buffer.version = version
        self._in_place.clear()
        self.flat.adopt()

    def restore_to_cpu(self) -> Exception | None:
        """Makes the parameters whole on the CPU, in their own dtype, if they are views of the flat.

        Returns:
            The error that their values could not be read for, so that they are NaN; None if they were read.
        """
        if not self.flat.attached:
            return None
        self.flat.attached = False
        try:
            staged = self._staged_now()
        except Exception as error:
            log.error("the weights of %s are lost, and are NaN now: %s", self.flat.name, error)
            for item in self.flat.param_views:
                item.parameter.data = torch.full(item.parameter.shape, float("nan"), dtype=item.dtype)
            return error
        masters = staged.masters()
        for index, item in enumerate(self.flat.param_views):
            memory = self.flat.memory(index)
            if memory is not None and (memory.device.type, memory.dtype) == ("cpu", item.dtype):
                item.parameter.data = memory.copy_(item.of(masters))
            else:
                item.parameter.data = item.of(masters).to(item.dtype, copy=True)
        self.flat.shared.clear()
        self.unstage(staged, changed=False)
        return None

    def move(self, weights: StateBuffer | None, opt_state: StateBuffer | None) -> None:
        """Moves values to other buffers, which are owned from then on, and frees the old ones.

        No values may be staged, and no step may run. After an error, the values are in the old buffers.

        Args:
            weights: new buffer of the compute weights; None: they are not moved.
            opt_state: new buffer of all other values; None: they are not moved.
        """
        self.drop_second()
        given = zip(self._buffers, (weights, opt_state), strict=False)
        buffers = [old if new is None else new for old, new in given]
        try:
            self._require_seconds(buffers)
            for old, new in zip(self._buffers, buffers, strict=True):
                if old is not new:
                    self._copy(old, new)
        except BaseException:
            if self.in_memory:
                self._drop_second()
            raise
        self.revertible = False
        before, self._buffers = self._buffers, tuple(buffers)
        self._staging_bytes = sum(buffer.staging_bytes for buffer in buffers)
        self._in_place.clear()
        for old, new in zip(before, buffers, strict=True):
            if old is not new:
                old.free()

    def free(self) -> None:
        """Frees the buffers."""
        self._in_place.clear()
        for buffer in self._buffers:
            buffer.free()

    def free_host_memory(self) -> None:
        """Frees the buffers in host memory; those on SSDs go away with the scratch files."""
        self._in_place.clear()
        for buffer in self._host_buffers():
            buffer.free()

    # ---- the buffers ----

    @property
    def tiers(self) -> tuple[OffloadTierName, OffloadTierName]:
        """Tier of the compute weights, and of all other values (that of the compute weights if there are no others)."""
        return self._buffers[0].tier, self._buffers[-1].tier

    @property
    def buffers(self) -> Sequence[StateBuffer]:
        """Buffer of the compute weights, and that of all other values if there are any."""
        return self._buffers

    @property
    def version(self) -> int:
        """Number of the committed version."""
        return self._buffers[0].version

    @property
    def opt_state(self) -> StateBuffer | None:
        """Buffer of all values but the compute weights; None if there are no others."""
        return self._buffers[1] if len(self._buffers) > 1 else None

    def locate(self, array: StoredArray, index: int) -> tuple[OffloadTierName, tuple[FileRange, ...]]:
        """Returns the tier of the committed elements of parameter `index` in an array, and their ranges of files."""
        item, buffer = self.flat.param_views[index], self._buffers[array.buffer]
        return buffer.tier, buffer.file_ranges(*array.range_of(item))

    def blobs(self) -> list[Blob]:
        """Returns the blobs of the buffers on SSDs, each buffer's versions in order."""
        return [blob for buffer in self._buffers if isinstance(buffer, SSDBuffer) for blob in buffer.blobs]

    def _host_buffers(self) -> list[HostBuffer]:
        return [buffer for buffer in self._buffers if isinstance(buffer, HostBuffer)]

    def _require_seconds(self, buffers: Sequence[StateBuffer]) -> None:
        """Allocates second versions in host memory beside those on SSDs."""
        if self.layout.versions == 2 and any(buffer.staging_bytes for buffer in buffers):
            for buffer in buffers:
                if isinstance(buffer, HostBuffer):
                    buffer.add_second()

    def _drop_second(self) -> None:
        self._in_place.clear()
        for buffer in self._host_buffers():
            buffer.drop_second()

    def _copy(self, old: StateBuffer, new: StateBuffer) -> None:
        staging_bytes = max(old.staging_bytes, new.staging_bytes)
        memory = None
        if staging_bytes:
            assert self.staging is not None
            memory = self.staging.states.pool.acquire(staging_bytes)
        try:
            tensor = None if memory is None else memory.tensor
            wait_for(old.write_done(), f"the writes of {self.flat.name}")
            values, read = old.stage(tensor if old.staging_bytes else None, read=True)
            wait_for(read, f"the values of {self.flat.name}")
            target, _ = new.stage(tensor if new.staging_bytes else None, read=False)
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)
            wait_for(new.write(target, uncommitted=False), f"the writes of {self.flat.name}")
        finally:
            if memory is not None:
                memory.release()

    def _flip(self) -> None:
        self._in_place.clear()
        for buffer in self._buffers:
            buffer.flip()

    def _stage_in_place(self, *, step: bool) -> StagedState:
        """Returns the values where they are stored, in host memory."""
        staged = self._in_host_memory(uncommitted=False)
        if step and any(buffer.has_second for buffer in self._buffers):
            staged.uncommitted = self._in_host_memory(uncommitted=True)
        return staged

    def _in_host_memory(self, *, uncommitted: bool) -> StagedState:
        arrays: dict[str, Tensor] = {}
        for index, buffer in enumerate(self._host_buffers()):
            arrays |= buffer.views(partial(self.layout.arrays_in, index), uncommitted=uncommitted)
        return self.layout.state_of(arrays)

    def _views(self, parts: list[Tensor], *, step: bool) -> StagedState:
        staged = self.layout.views(*parts)
        if step:
            others = [buffer.uncommitted(part) for buffer, part in zip(self._buffers, parts, strict=True)]
            if any(other is not part for other, part in zip(others, parts, strict=True)):
                staged.uncommitted = self.layout.views(*others)
        return staged

    @staticmethod
    def _release(staged: StagedState) -> None:
        if staged.buffer is not None:
            staged.buffer.release()
