"""One saved storage: the location of its bytes, and the handles through which autograd may still unpack them.

Autograd holds `SavedHandle` objects, a handle holds its `SavedStorage` (the "record"), and the record holds the bytes
or their location. Nothing else references a record, so its lifetime is autograd's: when the last node that saved the
storage is freed, the record is freed with its memory in the tier, whether the graph was run, retained, never run, or
dropped by an exception.

Ownership of a storage's bytes, by which backward reads the same values as in plain autograd, even if tensors share the
storage:

1. From its first save on, a record holds the storage itself, as plain autograd does. While user code can still reach
   the storage through another tensor, view, `.data`, NumPy array or storage object, it may change the bytes, with or
   without a version counter, and backward reads the change, as in plain autograd. So a storage has one record per
   micro-batch, which is found without a comparison of versions.
2. When the record is the storage's only owner (`is_shared` is False), the bytes can't change any more, and no other
   tensor over them can be saved: only then are they offloaded. The copy has the storage's last content.
3. After the copy the record drops the storage, and the tier's copy is the only owner until a load restores the bytes,
   in a new storage that nothing else shares.

A saved tensor whose version counter moved raises PyTorch's error in backward (`check_version`), as without hooks.
"""

import functools
import sys
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.tier import Load, StoredCopy
from lightning_ssd.activations.weights import SavedWeight
from lightning_ssd.device import Mark
from lightning_ssd.storage_tags import SAVED
from lightning_ssd.types import OffloadTierName

Original = Callable[[], Tensor | None]
"""A weak reference to the tensor that was saved."""

InlineSaved = tuple[Tensor, int, Original | None] | SavedWeight
"""A saved tensor that is kept on the device, its version, and the tensor that autograd has saved (`None`: the same
one); or a reference to a weight that may be evicted."""


class State(Enum):
    """Location of a record's bytes."""

    RESIDENT = auto()
    """On the device, until the record is freed."""
    OFFLOADING = auto()
    """On the device, and being copied to a tier."""
    OFFLOADED = auto()
    """In a tier only."""
    PREFETCHING = auto()
    """In a tier, and being copied to the device."""
    RESTORED = auto()
    """On the device again, until every view is unpacked."""


class PendingFree(NamedTuple):
    """The stored copy of a freed record, and its load if no thread has waited for it; both are still to be freed."""

    copy: StoredCopy
    load: Load | None


_counting = threading.RLock()
"""Guards the counters of all `RefCountedBytes`.

Handles are freed on any thread, also by a garbage collection inside a section that this lock guards: sections are a few
lines long, and correct if a handle is freed between any two lines.
"""


class RefCountedBytes:
    """Bytes of which `SavedHandle` objects are views. They are released once every view is unpacked.

    Attributes:
        data: the bytes, one-dimensional `uint8`; None while they are not on the device.
        num_pending: number of views that were not unpacked since the bytes were last restored.
        num_restores: number of times that the bytes were restored.
    """

    __slots__ = ("__weakref__", "data", "num_pending", "num_restores", "views")

    nbytes: int

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.views = 0
        self.num_pending = 0
        self.num_restores = 0

    def restored(self) -> None:
        """Called before `data` is set again: a view that is freed in between must not release the new bytes."""
        with _counting:
            self.num_restores += 1
            self.num_pending = self.views

    def add_view(self) -> None:
        """Adds a view."""
        with _counting:
            self.views += 1
            self.num_pending += 1

    def drop_view(self, last_restore: int) -> None:
        """Removes a view, which was last unpacked when the bytes had been restored `last_restore` times."""
        with _counting:
            self.views -= 1
            if last_restore != self.num_restores:
                self.num_pending -= 1
                if self.num_pending <= 0:
                    self.release()

    def consumed(self) -> None:
        """Counts a view as unpacked since the bytes were restored, and releases them after the last one."""
        with _counting:
            self.num_pending -= 1
            if self.num_pending <= 0:
                self.release()

    @abstractmethod
    def release(self) -> None:
        """Drops the bytes, which no view needs for now."""


class UnpackOrder(Protocol):
    """The part of a record's `MicroBatch` that backward uses; see there."""

    def touch(self, record: "SavedStorage", /) -> None: ...
    def to_prefetch(self, window_bytes: int, window_depth: int | None) -> Iterator["SavedStorage"]: ...


class SavedStorage(RefCountedBytes):
    """The bytes of one storage that autograd saved.

    Args:
        data: all bytes of the storage, one-dimensional `uint8`. Records of one storage share this tensor.
        batch: micro-batch of the record.
        index: position in the micro-batch's order of saving.
        pending_frees: queue to which the finaliser appends the stored copy. Finalisers run wherever Python frees
            objects, also inside a garbage collection, so this one takes no lock and calls no other code.
    """

    __slots__ = ("_pending_frees", "_storage", "batch", "copy", "index", "load", "nbytes", "state", "tier")

    def __init__(self, data: Tensor, batch: UnpackOrder, index: int, pending_frees: "deque[PendingFree]") -> None:
        super().__init__()
        self.data = data
        self._storage = internals.storage_key(data.untyped_storage())
        """The storage's C++ object, which `data` keeps alive while the record is `RESIDENT`."""
        self.nbytes = data.numel()
        self.batch = batch
        self.index = index
        self.state = State.RESIDENT
        self.tier: OffloadTierName | None = None
        self.copy: StoredCopy | None = None
        self.load: Load | None = None
        self._pending_frees = pending_frees

    def __del__(self) -> None:
        if self.copy is not None:
            self._pending_frees.append(PendingFree(self.copy, self.load))

    def is_shared(self) -> bool:
        """Returns whether anything but the storage's records references it. The record must be `RESIDENT`."""
        assert self.data is not None
        use_count, references = _counts_of_one_owner()
        if internals.storage_use_count(self._storage) > use_count:
            return True
        # References of user code to the Python storage object are not in the use count.
        return sys.getrefcount(self.data.untyped_storage()) > references

    def offload(self, copy: StoredCopy, tier: OffloadTierName) -> None:
        """Called when a tier has begun to store the bytes. The device's bytes are held until `evict`."""
        self.copy, self.tier, self.state = copy, tier, State.OFFLOADING

    def evict(self) -> None:
        """Drops the device's bytes, which the copy no longer reads."""
        if self.state is State.OFFLOADING:
            self.data, self.state = None, State.OFFLOADED

    def cancel_offload(self) -> None:
        """Keeps the device's bytes, which backward needs before they are evicted, and frees the tier's copy."""
        assert self.copy is not None and self.data is not None
        self._pending_frees.append(PendingFree(self.copy, None))
        self.copy, self.tier, self.state = None, None, State.RESIDENT

    def prefetch(self, *, urgent: bool) -> None:
        """Starts to load the bytes to the device."""
        assert self.copy is not None
        self.load = self.copy.load(urgent=urgent)
        self.state = State.PREFETCHING

    def wait(self) -> Mark:
        """Orders the compute stream after the load, and returns the mark that the stream waits for."""
        load = self.load
        assert load is not None
        arrived = load.wait()
        self.restored()
        self.data, self.load, self.state = load.data, None, State.RESTORED
        return arrived

    def release(self) -> None:
        if self.state is State.RESTORED:
            self.data, self.state = None, State.OFFLOADED


class SavedHandle:
    """Autograd's reference to a saved tensor: the storage's record, and the tensor's view of the storage.

    Its probe is an empty tensor that shares the saved tensor's version counter, which counts in-place changes even
    after the storage is evicted.
    """

    __slots__ = ("_last_restore", "_original", "_probe", "_version", "dtype", "offset", "record", "size", "stride")

    def __init__(self, tensor: Tensor, record: RefCountedBytes, empty: Tensor) -> None:
        record.add_view()  # `__del__` drops it, also if the rest of the construction fails
        self.record = record
        self._last_restore = 0
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self._version = internals.version_of(tensor)
        probe = tensor.detach()
        probe.data = empty
        self._probe = probe
        self._original: Original | None = weakref.ref(tensor)

    def __del__(self) -> None:
        self.record.drop_view(self._last_restore)

    def check_version(self) -> None:
        """Checks that the saved tensor was not changed in place, which PyTorch does not check under hooks.

        Raises:
            RuntimeError: the tensor was changed after it was saved (PyTorch's own message).
        """
        if internals.version_of(self._probe) != self._version:
            raise modified_in_place(self._probe, self._version, self.dtype, self.size)

    def materialize(self) -> Tensor:
        """Returns the saved tensor. The record's bytes must be on the device.

        Raises:
            RuntimeError: user code has made the storage smaller since it was saved.
        """
        record, data = self.record, self.record.data
        assert data is not None
        storage = data.untyped_storage()
        if storage.nbytes() < record.nbytes:  # `set_` would allocate new memory
            raise RuntimeError(
                f"the storage of a saved tensor of {self.dtype} {list(self.size)} was resized to {storage.nbytes()} "
                f"bytes between forward and backward; it had {record.nbytes} when it was saved. Don't resize storages "
                "that backward needs, or restore them before `backward`."
            )
        # It shares the version counter, too, so that a backward that changes it in place is noticed by other readers.
        tensor = self._probe.detach()
        tensor.data = _empty(self.dtype, data.device).data.set_(storage, self.offset, self.size, self.stride)
        if self._last_restore != record.num_restores:
            self._last_restore = record.num_restores
            record.consumed()
        return tensor if self._original is None else as_plain_autograd_keeps(tensor, self._original)


def forget_original(saved: "InlineSaved | SavedHandle") -> "InlineSaved | SavedHandle":
    """Returns `saved` without the reference to its original: later assignments to its `.data` have no effect then."""
    if isinstance(saved, SavedHandle):
        saved._original = None
        return saved
    return saved if isinstance(saved, SavedWeight) else (*saved[:2], None)


def as_plain_autograd_keeps(saved: Tensor, original: Original) -> Tensor:
    """Returns `saved`, or the original tensor if its storage was replaced since by an assignment to its `.data`.

    Plain autograd saves an operation's input tensors themselves, so that backward reads a replaced storage, but keeps
    the old storages of its outputs. An assignment to `.data` does not increment the version counter. It is detected
    here as long as the tensor is alive. (A node must not keep its output alive: the two would own each other.)

    Args:
        original: weak reference to the tensor that was saved.
    """
    tensor = original()
    if tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return saved
    if tensor.is_nested:  # `is_set_to` has no kernel for it
        return saved
    internals.fix_weakref(tensor)  # its Python object may be owned by C++ alone
    if tensor.is_set_to(saved) or tensor.grad_fn is internals.autograd_node():
        return saved
    return tensor.detach()


def check_version(
    tensor: Tensor, expected: int, dtype: torch.dtype, size: torch.Size, remedy: Callable[[], str] = str
) -> None:
    """Checks that `tensor`, which was saved with `dtype` and `size`, is at version `expected`.

    Args:
        expected: version of the tensor when it was saved.
        remedy: returns the end of the error's message.

    Raises:
        RuntimeError: the tensor was changed after it was saved (PyTorch's own message, and `remedy`).
    """
    if internals.version_of(tensor) != expected:
        raise RuntimeError(f"{modified_in_place(tensor, expected, dtype, size)}{remedy()}")


def modified_in_place(tensor: Tensor, expected: int, dtype: torch.dtype, size: torch.Size) -> RuntimeError:
    """Returns PyTorch's error for a saved tensor of `dtype` and `size` that was changed after it was saved.

    Args:
        tensor: a tensor with the saved tensor's version counter.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {internals.version_of(tensor)}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )


def find_saved_storage(storage: torch.UntypedStorage) -> SavedStorage | None:
    """Returns the live record of `storage`, if it has one."""
    reference: weakref.ref[SavedStorage] | None = getattr(storage, SAVED, None)
    return None if reference is None else reference()


def attach_saved_storage(storage: torch.UntypedStorage, record: SavedStorage | None) -> None:
    """Makes `find_saved_storage` return `record` for `storage`.

    The reference is an attribute of the storage's Python object, which is alive as long as the storage. All views share
    this object, and a later storage at the same address has another one.
    """
    setattr(storage, SAVED, None if record is None else weakref.ref(record))


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a new tensor of all bytes of `storage`, one-dimensional `uint8`."""
    return _empty(torch.uint8, storage.device).data.set_(storage)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a cached empty tensor, whose `.data` is a new tensor in a third of the time of `torch.empty`."""
    with torch.inference_mode(False), internals.without_dispatch():  # it is used outside of the active modes, too
        return torch.empty(0, dtype=dtype, device=device)


@functools.cache
def _counts_of_one_owner() -> tuple[int, int]:
    """Returns the use count and the reference count of a storage with one owner, which depend on torch's version."""
    # The first call may be within modes of user code, which could keep the tensor or replace it.
    with torch.inference_mode(False), internals.without_any_torch_function(), internals.without_dispatch():
        owner = torch.empty(1, dtype=torch.uint8, device="cpu")
    attach_saved_storage(owner.untyped_storage(), None)
    count = internals.storage_use_count(internals.storage_key(owner.untyped_storage()))
    return count, sys.getrefcount(owner.untyped_storage())
