"""Bytes on SSDs and in pinned host memory. Knows no module, no autograd and no Lightning.

Other folders use `BlobStore` for the SSDs, `PinnedPool` for host memory, and the errors.
"""

from lightning_ssd.storage.backend import Backend, BackendFile
from lightning_ssd.storage.blob import Blob, FileRange, Piece
from lightning_ssd.storage.checksums import Hashes
from lightning_ssd.storage.choice import choose_backend
from lightning_ssd.storage.detached import DetachedBlobs
from lightning_ssd.storage.errors import ChecksumError, StorageError, StorageFullError, from_os_error
from lightning_ssd.storage.kvikio_backend import KvikioBackend, why_no_gds
from lightning_ssd.storage.manifest import read_manifest
from lightning_ssd.storage.pool import PinnedBuffer, PinnedPool
from lightning_ssd.storage.posix_backend import PosixBackend
from lightning_ssd.storage.priority_queue import PriorityQueue
from lightning_ssd.storage.private import NotPrivateError, PrivateDirectory
from lightning_ssd.storage.scratch import ScratchDirectory, striped_free_bytes
from lightning_ssd.storage.slab import Slab, commit, page_lock
from lightning_ssd.storage.slots import PAGE, SlotAllocator, align_up
from lightning_ssd.storage.smart import DriveWear, read_wear, read_wears
from lightning_ssd.storage.store import BlobStore, IOStats, StoreManifest
from lightning_ssd.storage.timed_transfers import Calibration
from lightning_ssd.storage.urgency import Urgency
