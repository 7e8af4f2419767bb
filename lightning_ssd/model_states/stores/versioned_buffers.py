"""The buffers of one flat parameter and their versions: one that is committed, and one that a step writes."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from lightning_ssd.futures import Future, all_of, ended, finished
from lightning_ssd.model_states.stores.buffers import HostBuffer, SpareMemory, SSDBuffer, StateBuffer
from lightning_ssd.model_states.stores.layout import Layout, StagedState, StoredArray
from lightning_ssd.storage import Blob, FileRange, StorageError
from lightning_ssd.types import OffloadTierName
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


class VersionedBuffers:
    """Buffer of the compute weights and that of all other values, whose versions are allocated and committed together.

    If a part of the values is on SSDs, both versions exist all the time: drives fail, and a step of which one write has
    failed is rolled back. If all values are in host memory, the second version exists only where steps need it, from
    `add_second` to `drop_second`; a step without it is made in place, and can't be rolled back.

    Threads and ownership: those of `StateStore`.

    Args:
        weights: buffer of the compute weights; owned.
        opt_state: buffer of all others; owned. None: there are none.

    Attributes:
        staging_bytes: bytes of staging memory that the values need.
        revertible: whether the last commit can be rolled back.
        spare: budget of host memory for the second version; None: unlimited.

    Raises:
        StorageError: there is no memory for a second version that must exist.
    """

    def __init__(self, layout: Layout, weights: StateBuffer, opt_state: StateBuffer | None) -> None:
        self.revertible = False
        self.spare: SpareMemory | None = None
        self._layout = layout
        self._in_place: dict[bool, Future[StagedState]] = {}
        """Results of `stage_in_place`, by `step`, while the same memory has the same version."""
        self._buffers: tuple[StateBuffer, ...] = (weights,) if opt_state is None else (weights, opt_state)
        self._require_seconds(self._buffers)
        self.staging_bytes = sum(buffer.staging_bytes for buffer in self._buffers)

    def __iter__(self) -> Iterator[StateBuffer]:
        """Yields the buffer of the compute weights, and that of all other values if there are any."""
        return iter(self._buffers)

    @property
    def weights(self) -> StateBuffer:
        """Buffer of the compute weights."""
        return self._buffers[0]

    @property
    def opt_state(self) -> StateBuffer | None:
        """Buffer of all values but the compute weights; None if there are no others."""
        return self._buffers[1] if len(self._buffers) > 1 else None

    @property
    def tiers(self) -> tuple[OffloadTierName, OffloadTierName]:
        """Tier of the compute weights, and of all other values (that of the compute weights if there are no others)."""
        return self._buffers[0].tier, self._buffers[-1].tier

    @property
    def host(self) -> list[HostBuffer]:
        """The buffers in host memory."""
        return [buffer for buffer in self._buffers if isinstance(buffer, HostBuffer)]

    @property
    def in_memory(self) -> bool:
        """Whether all values are in host memory."""
        return self.staging_bytes == 0

    def locate(self, array: StoredArray, index: int) -> tuple[OffloadTierName, tuple[FileRange, ...]]:
        """Returns the tier of the committed elements of parameter `index` in an array, and their ranges of files."""
        item, buffer = self._layout.flat.param_views[index], self._buffers[array.buffer]
        return buffer.tier, buffer.file_ranges(*array.range_of(item))

    def blobs(self) -> list[Blob]:
        """Returns the blobs of the buffers on SSDs, each buffer's versions in order."""
        return [blob for buffer in self._buffers if isinstance(buffer, SSDBuffer) for blob in buffer.blobs]

    def committed_blobs(self) -> list[Blob]:
        """Returns the blobs of the committed version."""
        return [buffer.blobs[buffer.version] for buffer in self._buffers if isinstance(buffer, SSDBuffer)]

    # ---- versions ----

    @property
    def version(self) -> int:
        """Number of the committed version."""
        return self._buffers[0].version

    def adopt(self, version: int) -> None:
        """Makes the stored values of a version, by its number, the committed ones."""
        self._in_place.clear()
        for buffer in self._buffers:
            buffer.adopt(version)

    def commit(self) -> None:
        """Commits the version that was written last."""
        self.revertible = self.has_second
        self._flip()

    def revert(self) -> None:
        """Rolls the last commit back: it is `revertible`, and no step was staged since."""
        self.revertible = False
        self._flip()

    def _flip(self) -> None:
        self._in_place.clear()
        for buffer in self._buffers:
            buffer.flip()

    @property
    def has_second(self) -> bool:
        """Whether the second version is allocated."""
        return self._buffers[0].has_second and self._buffers[-1].has_second

    def add_second(self) -> bool:
        """Allocates the second version of values in host memory, unless it is allocated; no step is staged.

        Returns:
            Whether there is one now.
        """
        if self._layout.versions == 1:
            return False
        if self.has_second:
            return True
        nbytes = sum(buffer.nbytes for buffer in self.host)
        if self.spare is not None and not self.spare.reserve(nbytes):
            return False
        self._in_place.clear()
        try:
            for buffer in self.host:
                buffer.add_second()
        except StorageError as error:  # the step is made without it
            log.warning(
                "%s has no second version of its values, and its steps wait for the norm: %s",
                self._layout.flat.name,
                error,
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

    def _drop_second(self) -> None:
        self._in_place.clear()
        for buffer in self.host:
            buffer.drop_second()

    def _require_seconds(self, buffers: Sequence[StateBuffer]) -> None:
        """Allocates second versions in host memory beside those on SSDs."""
        if self._layout.versions == 2 and any([buffer.staging_bytes for buffer in buffers]):
            for buffer in buffers:
                if isinstance(buffer, HostBuffer):
                    buffer.add_second()

    # ---- staged values ----

    def stage_in_place(self, *, step: bool) -> "Future[StagedState]":
        """Returns the values where they are stored, all in host memory; `step` as in `StateStore.stage`."""
        if step not in self._in_place:
            staged = self._in_host_memory(uncommitted=False)
            if step and any([buffer.has_second for buffer in self._buffers]):
                staged.uncommitted = self._in_host_memory(uncommitted=True)
            self._in_place[step] = finished(staged)
        return self._in_place[step]

    def _in_host_memory(self, *, uncommitted: bool) -> StagedState:
        arrays: dict[str, Tensor] = {}
        for index, buffer in enumerate(self.host):
            arrays |= buffer.views(partial(self._layout.arrays_in, index), uncommitted=uncommitted)
        return self._layout.state_of(arrays)

    def read(self, memory: Tensor, *, step: bool) -> "tuple[StagedState, Future[None]]":
        """Reads values on SSDs to `memory`, of `staging_bytes` bytes; `step` as in `StateStore.stage`.

        Returns:
            The values, and a future that is done when they are read.
        """
        start = 0
        parts: list[Tensor] = []
        reads: list[Future[None]] = []
        for buffer in self._buffers:
            own = memory[start : start + buffer.staging_bytes]
            start += buffer.staging_bytes
            # Compute weights are not read where they are rounded from whole master weights.
            is_read = buffer is not self.weights or not self._layout.whole_master
            part, done = buffer.stage(own, read=is_read)
            parts.append(part)
            reads.append(done)
        staged = self._layout.views(*parts)
        if step:
            others = [buffer.uncommitted(part) for buffer, part in zip(self._buffers, parts, strict=True)]
            if any([other is not part for other, part in zip(others, parts, strict=True)]):
                staged.uncommitted = self._layout.views(*others)
        staged.memory = memory
        return staged, all_of(reads)

    def write(self, memory: Tensor, *, uncommitted: bool) -> "Future[None]":
        """Writes the values on SSDs that `read` has read to `memory`, which belongs to the writes until they end."""
        start = 0
        writes: list[Future[None]] = []
        for buffer in self._buffers:
            if buffer.staging_bytes:
                writes.append(buffer.write(memory[start : start + buffer.nbytes], uncommitted=uncommitted))
                start += buffer.staging_bytes
        return all_of(writes)

    def written(self) -> "Future[None]":
        """Returns a future that is done when the committed values are stored."""
        return finished(None) if self.in_memory else all_of(buffer.write_done() for buffer in self._buffers)

    def writes_ended(self) -> "Future[None]":
        """Returns a future that is done when the committed values are stored, and the other version is not written."""
        committed = [buffer.write_done() for buffer in self._buffers]
        # A step that was not committed may still be written to the version that the next one overwrites.
        return all_of(committed + [ended(buffer.write_done(uncommitted=True)) for buffer in self._buffers])

    # ---- other memory, and the end ----

    def replace(self, weights: StateBuffer | None, opt_state: StateBuffer | None, memory: Tensor | None) -> None:
        """Copies values to other buffers, which are owned from then on, and frees the old ones.

        After an error, the values are in the old buffers.

        Args:
            weights: new buffer of the compute weights; None: they stay.
            opt_state: new buffer of all other values; None: they stay.
            memory: staging memory for the largest buffer on SSDs, old or new; None: none is on SSDs.
        """
        self.drop_second()
        given = zip(self._buffers, (weights, opt_state), strict=False)
        buffers = [old if new is None else new for old, new in given]
        try:
            self._require_seconds(buffers)
            for old, new in zip(self._buffers, buffers, strict=True):
                if old is not new:
                    self._copy(old, new, memory)
        except BaseException:
            if self.in_memory:
                self._drop_second()
            raise
        self.revertible = False
        before, self._buffers = self._buffers, tuple(buffers)
        self.staging_bytes = sum(buffer.staging_bytes for buffer in buffers)
        self._in_place.clear()
        for old, new in zip(before, buffers, strict=True):
            if old is not new:
                old.free()

    def _copy(self, old: StateBuffer, new: StateBuffer, memory: Tensor | None) -> None:
        name = self._layout.flat.name
        wait_for(old.write_done(), f"the writes of {name}")
        values, read = old.stage(memory if old.staging_bytes else None, read=True)
        wait_for(read, f"the values of {name}")
        target, _ = new.stage(memory if new.staging_bytes else None, read=False)
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)
        wait_for(new.write(target, uncommitted=False), f"the writes of {name}")

    def free(self) -> None:
        """Frees the buffers."""
        self._in_place.clear()
        for buffer in self._buffers:
            buffer.free()

    def free_host_memory(self) -> None:
        """Frees the buffers in host memory; those on SSDs go away with the scratch files."""
        self._in_place.clear()
        for buffer in self.host:
            buffer.free()
