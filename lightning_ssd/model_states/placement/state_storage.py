"""Storage of model states: the scratch space that flat parameters on SSDs share, and the store of each of them."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.device import CopyEngine
from lightning_ssd.model_states.journal import (
    CommitRecord,
    RunFingerprint,
    check_paths,
    has_commit_record,
    read_commit_record,
    remove_record,
)
from lightning_ssd.model_states.placement.budget import MemoryPlan
from lightning_ssd.model_states.placement.rank_states import RankStates
from lightning_ssd.model_states.stores import (
    HostBuffer,
    Layout,
    SSDBuffer,
    StateBuffer,
    StateStaging,
    StateStore,
    VersionedBuffers,
)
from lightning_ssd.sizes import parse_bytes
from lightning_ssd.storage import Blob, BlobStore, PrivateDirectory, Slab, StoreManifest
from lightning_ssd.types import OffloadTierName

log = logging.getLogger(__name__)


class KilledRun:
    """The record of a killed run, read when the blob store has locked its directories against other processes.

    Threads: the training thread.

    Args:
        start_over: whether the record is removed unread.

    Attributes:
        record: the record; None: there is none, or it was not read yet.
    """

    def __init__(self, layouts: Sequence[Layout], settings: RunFingerprint, *, start_over: bool, size: int) -> None:
        self._start_over = start_over
        self._size = size
        self._layouts = layouts
        self._settings = settings
        self.record: CommitRecord | None = None

    def __call__(self, directories: Sequence[PrivateDirectory]) -> StoreManifest | None:
        """Returns the files that the store adopts; None: it begins with new ones."""
        if self._start_over:
            if any(has_commit_record(directory) for directory in directories):
                log.warning("starting from the given checkpoint, and not from the record of a killed run")
            for directory in directories:
                remove_record(directory)
            return None
        check_paths(directories)
        self.read(directories[0], 0)
        return None if self.record is None else self.record.kept

    def read(self, directory: PrivateDirectory, rank: int) -> None:
        """Reads the record in the directory of the first path, for one of the ranks."""
        self.record = read_commit_record(directory, self._layouts, self._settings, rank, self._size)


def make_staging(
    memory_plan: MemoryPlan,
    storage: OffloadConfig,
    default_path: str | Path,
    device: torch.device,
    *,
    killed: KilledRun | None,
    layouts: Sequence[Layout] = (),
    ranks: RankStates | None = None,
) -> StateStaging | None:
    """Returns the scratch space, memory and threads of flat parameters on SSDs; None if there are none.

    Several ranks share the files, which rank 0 makes and removes.

    Args:
        default_path: directory of scratch files if the user has named none.
        killed: a run whose files are adopted. With it, scratch space is made in any case, for the journal.
        layouts: layouts of the flat parameters; needed for several ranks.
        ranks: what several ranks share; None: there is one rank.

    Raises:
        StorageError: host memory or scratch space can't be allocated.
        RankError: another rank has failed, such as for lack of space.
    """
    if memory_plan.ssd == 0 and killed is None:
        return None
    paths, messages = storage.paths(default_path), None if ranks is None else ranks.ranks.messages
    capacity = None if storage.ssd_capacity is None else parse_bytes(storage.ssd_capacity, "ssd_capacity")
    open_store = partial(BlobStore, paths, device=device, backend=storage.backend, checksum=storage.checksum)
    blobs: Sequence[Blob] = ()
    with contextlib.ExitStack() as undo:
        if messages is not None and messages.rank > 0:
            nothing: StoreManifest | None = None
            files = messages.exchange(nothing)[0]
            assert files is not None
            store, blobs = open_store(join=files), files.blobs
            undo.callback(store.close, remove=False)
            if killed is not None:
                killed.read(store.directory, messages.rank)
        else:
            processes = 1 if messages is None else messages.size
            store = open_store(
                capacity=None if capacity is None else capacity * processes,
                keep=killed is not None,
                find_manifest=killed,
            )
            record = None if killed is None else killed.record
            undo.callback(store.close, remove=record is None)
            if record is not None:
                blobs = record.kept.blobs
            else:
                store.reserve(memory_plan.ssd)
                if ranks is not None:
                    blobs = list(_allocate(store, layouts, memory_plan, ranks, len(paths)))
            if messages is not None:
                messages.exchange(store.share(blobs))
        pin = device.type == "cuda"
        staging = StateStaging.make(store, memory_plan.param_staging, memory_plan.staging, pin=pin, adopted=blobs)
        undo.pop_all()
    return staging


def _allocate(
    store: BlobStore, layouts: Sequence[Layout], memory_plan: MemoryPlan, ranks: RankStates, num_paths: int
) -> Iterator[Blob]:
    """Allocates the blobs that `make_store` uses, in its order.

    If there are as many paths as ranks, each owner has paths of its own, as far as these have room.
    """
    for layout, *tiers in zip(layouts, memory_plan.weights, memory_plan.opt_state, strict=True):
        owner, size = ranks.owners[layout.flat], ranks.ranks.size
        own = range(owner, num_paths, size) if num_paths >= size else ()
        for tier, nbytes in zip(tiers, (layout.flat.nbytes, layout.opt_state_bytes), strict=True):
            for _ in range(layout.versions if tier == "ssd" and nbytes else 0):
                yield store.allocate(nbytes, own)


def make_store(
    layout: Layout,
    tiers: tuple[OffloadTierName, OffloadTierName],
    staging: StateStaging | None,
    copies: CopyEngine,
    undo: contextlib.ExitStack,
    *,
    ranks: RankStates | None = None,
) -> StateStore:
    """Returns an empty store of a flat parameter.

    Args:
        tiers: tier of the compute weights, and of the other values.
        undo: frees the buffers.
        ranks: allocates host memory that all ranks share; None: there is one rank.

    Raises:
        StorageError: host memory or scratch space can't be allocated.
    """
    of_weights, of_opt_state = tiers
    pin = copies.device.type == "cuda"
    make = partial(make_buffer, staging=staging, undo=undo, versions=layout.versions)
    share = None if ranks is None else partial(ranks.allocate, layout.flat)
    weights = make(layout.flat.nbytes, of_weights, share=share and partial(share, pin=pin))
    assert weights is not None
    opt_state = make(layout.opt_state_bytes, of_opt_state, share=share and partial(share, pin=False))
    return StateStore(layout, VersionedBuffers(layout, weights, opt_state), copies, staging)


def make_buffer(
    nbytes: int,
    tier: OffloadTierName,
    staging: StateStaging | None,
    undo: contextlib.ExitStack,
    *,
    versions: int,
    share: "Callable[[int], Slab] | None" = None,
) -> StateBuffer | None:
    """Returns a buffer of `nbytes` bytes, which `undo` frees; None for no bytes. Arguments as in `make_store`.

    `share` allocates bytes of host memory that all ranks share.
    """
    if not nbytes:
        return None
    buffer: StateBuffer
    if tier == "host":
        memory = None if share is None else [share(nbytes) for _ in range(versions)]
        buffer = HostBuffer(nbytes, versions=versions, memory=memory)
    else:
        assert staging is not None
        buffer = SSDBuffer(nbytes, staging, versions=versions)
    undo.callback(buffer.free)
    return buffer
