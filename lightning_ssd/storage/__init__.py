"""Bytes on SSDs and in pinned host memory. Knows no module, no autograd and no Lightning.

Other rooms use `BlobStore` for the SSDs, `PinnedPool` for host memory, and the errors.
"""

from lightning_ssd.storage.backend import Backend, BackendFile
from lightning_ssd.storage.blob import Blob, Piece
from lightning_ssd.storage.choice import choose_backend
from lightning_ssd.storage.detached import DetachedBlobs
from lightning_ssd.storage.errors import ChecksumError, StorageError, StorageFullError
from lightning_ssd.storage.kvikio_backend import KvikioBackend
from lightning_ssd.storage.manifest import Manifest, read_manifest
from lightning_ssd.storage.pool import PinnedBuffer, PinnedPool
from lightning_ssd.storage.posix_backend import PosixBackend
from lightning_ssd.storage.priority_queue import PriorityQueue
from lightning_ssd.storage.private import NotPrivateError, PrivateDirectory
from lightning_ssd.storage.scratch import ScratchDirectory, kept_directory
from lightning_ssd.storage.slots import SlotAllocator
from lightning_ssd.storage.store import BlobStore, IOStats, StoreManifest
from lightning_ssd.storage.volume import Volume

__all__ = [
    "Backend",
    "BackendFile",
    "Blob",
    "BlobStore",
    "ChecksumError",
    "DetachedBlobs",
    "IOStats",
    "StoreManifest",
    "KvikioBackend",
    "Manifest",
    "NotPrivateError",
    "Piece",
    "PinnedBuffer",
    "PinnedPool",
    "PosixBackend",
    "PriorityQueue",
    "PrivateDirectory",
    "ScratchDirectory",
    "SlotAllocator",
    "StorageError",
    "StorageFullError",
    "Volume",
    "choose_backend",
    "kept_directory",
    "read_manifest",
]
