"""Optimizer states on SSDs that several ranks load together: one of them writes, and all read the same files."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_ssd.futures import Future, finished, then
from lightning_ssd.model_states.stores.versioned_buffers import VersionedBuffers
from lightning_ssd.ranks import RankMessages, Topic
from lightning_ssd.storage import Blob, BlobStore


class SharedChanges:
    """Changes of one flat parameter's optimizer states by a checkpoint that is loaded.

    All ranks make the same changes in the same order: each reads the values, and computes the bytes that the owner
    writes. The owner writes when no rank reads the bytes before any more, and passes on their hashes, without which no
    rank can check what it reads.

    Threads: as `StateStore`. Futures of messages complete on the thread `ranks`; their callbacks submit writes, adopt
    hashes and post messages, and wait for nothing.

    Ownership: bytes on SSDs belong to the owner from the last `T.CHANGE` of a change until its `T.CHANGED`, as they do
    from the last `T.GRADIENT` of a step until its `T.STEP`. In between, `VersionedBuffers` has all ranks' reads wait.

    Args:
        messages: messages of this rank.
        number: number of the flat parameter, in messages.
        owner: rank that writes.
        store: shared files of all ranks.
    """

    def __init__(self, messages: RankMessages, number: int, owner: int, store: BlobStore) -> None:
        self._messages = messages
        self._number = number
        self._owner = owner
        self._store = store
        self._turn = 0

    def write(self, buffers: VersionedBuffers, memory: Tensor) -> "Future[None]":
        """Stores changed values, as `VersionedBuffers.write` does with `uncommitted=False` where there is one rank.

        Returns:
            A future that is done when this rank does not use `memory` any more.
        """
        messages, number = self._messages, self._number
        self._turn += 1
        turn, blobs = self._turn, buffers.committed_blobs()
        if messages.rank != self._owner:
            messages.post(Topic.CHANGE, number, turn, b"", [self._owner])
            changed = messages.collect(Topic.CHANGED, number, turn, [self._owner])
            buffers.expect(then(changed, lambda contents: self._adopt(blobs, contents)))
            return finished(None)

        read = messages.collect(Topic.CHANGE, number, turn, messages.others)
        written = then(read, lambda _: buffers.write(memory, uncommitted=False))
        buffers.expect(written)
        messages.post_after(written, Topic.CHANGED, number, turn, lambda: self._store.hashes_of(blobs), messages.others)
        return written

    def _adopt(self, blobs: Sequence[Blob], contents: Mapping[int, bytes]) -> "Future[None]":
        self._store.adopt_hashes(blobs, contents[self._owner])
        return finished(None)
