"""One saved storage: the location of its bytes, and the handles through which autograd may still ask for them.

autograd holds `SavedHandle`s, a handle holds its `SavedStorage`, and that ("record") holds the bytes or their location.
Nothing else keeps a record alive, so its lifetime is autograd's: when the last node that saved the storage is freed,
the record dies and its place is given back, whatever became of the graph (run, retained, never run, dropped by an
exception).

Ownership of a storage's bytes, which makes a record exact whatever shares the storage:

1. From its first save on, a record holds the storage itself, as plain autograd does. While user code can still reach
   the storage through any other tensor, view, `.data`, NumPy array or storage object, its bytes may change under any
   version counter or under none, and backward sees the change, as it does in plain autograd. So a storage has one
   record per micro-batch, and no save compares versions to find it.
2. When the record is the storage's only owner (`is_shared` is False), nothing can change the bytes any more, and no
   tensor can be saved that shows them: only then are they copied out. The copy is the storage's last content.
3. After the copy the record drops the storage, and the tier's copy is the only owner until a load brings it back, into
   a new storage that nothing else shares.

A saved tensor whose version counter moved raises PyTorch's error in backward (`check_version`), as without hooks.
"""

import functools
import sys
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_ssd.activations.tier import Load, StoredCopy
from lightning_ssd.activations.weights import SavedWeight
from lightning_ssd.device import Mark
from lightning_ssd.device.storage_tags import SAVED
from lightning_ssd.types import OffloadTierName

if TYPE_CHECKING:
    from lightning_ssd.activations.micro_batch import MicroBatch


Original = Callable[[], Tensor | None]
"""A weak reference to the tensor that was saved."""

Kept = tuple[Tensor, int, Original | None] | SavedWeight
"""A saved tensor that stays where it is, its version, and the tensor that autograd was given (`None`: the same); or a
reference to a weight that may be evicted."""


class State(Enum):
    """Where a record's bytes are."""

    RESIDENT = auto()
    """On the device, until the record dies."""
    OFFLOADING = auto()
    """On the device and on their way out."""
    OFFLOADED = auto()
    """In a tier."""
    PREFETCHING = auto()
    """On their way back."""
    RESTORED = auto()
    """On the device again, until every view has been asked for."""


class PendingFree(NamedTuple):
    """What a dead record leaves to be given back: its stored copy, and a load that nobody waited for."""

    copy: StoredCopy
    load: Load | None


_counting = threading.RLock()
"""Guards the counters of all `RefCountedBytes`.

A handle dies on any thread, also in a garbage collection inside a section that this lock guards: sections are a few
lines long, and right if a handle dies between any two of them.
"""


class RefCountedBytes:
    """Bytes that `SavedHandle`s show, and that are let go once every view has been asked for.

    Attributes:
        data: the bytes, one-dimensional `uint8`; None while they are not on the device.
        views: how many there are.
        unseen: how many have not been asked for since the bytes came back.
        times_back: how often they came back.
    """

    __slots__ = ("__weakref__", "data", "times_back", "unseen", "views")

    nbytes: int

    def __init__(self) -> None:
        self.data: Tensor | None = None
        self.views = 0
        self.unseen = 0
        self.times_back = 0

    def restored(self) -> None:
        """`data` is about to be set again. Called before, so that views that die meanwhile let nothing go."""
        with _counting:
            self.times_back += 1
            self.unseen = self.views

    def add_view(self) -> None:
        """One more view shows the bytes."""
        with _counting:
            self.views += 1
            self.unseen += 1

    def drop_view(self, last_shown: int) -> None:
        """A view has died, which was handed out last when the bytes had come back `last_shown` times."""
        with _counting:
            self.views -= 1
            if last_shown != self.times_back:
                self.unseen -= 1
                if self.unseen <= 0:
                    self.release()

    def consumed(self) -> None:
        """One more view was handed out, or died, since the bytes came back; after the last one they are let go."""
        with _counting:
            self.unseen -= 1
            if self.unseen <= 0:
                self.release()

    @abstractmethod
    def release(self) -> None:
        """Nobody wants the bytes for now."""


class SavedStorage(RefCountedBytes):
    """The bytes of one storage that autograd saved.

    Args:
        data: all bytes of the storage, one-dimensional `uint8`. Records of one storage share this tensor.
        batch: the micro-batch that it belongs to.
        index: its position in the micro-batch's order of saving.
        leftovers: takes what is to be given back when the record dies. Records die wherever Python frees them, inside
            a garbage collection too, so dying takes no lock and calls nobody.
    """

    __slots__ = ("_pending_frees", "_storage", "batch", "copy", "index", "load", "nbytes", "state", "tier")

    def __init__(self, data: Tensor, batch: "MicroBatch", index: int, pending_frees: "deque[PendingFree]") -> None:
        super().__init__()
        self.data = data
        self._storage: int = data.untyped_storage()._cdata
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
        """Whether anything but the records of the storage can still reach it (the record is `RESIDENT`)."""
        assert self.data is not None
        if torch._C._storage_Use_Count(self._storage) > _USE_COUNT_OF_ONE_OWNER:
            return True
        # A storage object that user code holds counts there only.
        return sys.getrefcount(self.data.untyped_storage()) > _REFERENCES_OF_ONE_OWNER

    def offload(self, copy: StoredCopy, tier: OffloadTierName) -> None:
        """A tier has begun to store the bytes; the device's stay until `evict`."""
        self.copy, self.tier, self.state = copy, tier, State.OFFLOADING

    def evict(self) -> None:
        """The device's bytes are no longer read by the copy: drop them."""
        if self.state is State.OFFLOADING:
            self.data, self.state = None, State.OFFLOADED

    def cancel_offload(self) -> None:
        """The bytes were wanted before they were gone: keep them, and take the store back."""
        assert self.copy is not None and self.data is not None
        self._pending_frees.append(PendingFree(self.copy, None))
        self.copy, self.tier, self.state = None, None, State.RESIDENT

    def prefetch(self, *, urgent: bool) -> None:
        """Starts to bring the bytes back."""
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
    """What autograd keeps in place of a saved tensor: a storage's record, and the view of it that the tensor was.

    Its probe is an empty tensor that shares the saved tensor's version counter: it tells in-place changes after the
    storage itself is gone from the device.
    """

    __slots__ = ("_last_shown", "_original", "_probe", "_version", "dtype", "offset", "record", "size", "stride")

    def __init__(self, tensor: Tensor, record: RefCountedBytes, empty: Tensor) -> None:
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self._version = tensor._version
        probe = tensor.detach()
        probe.data = empty
        self._probe = probe
        self._original: Original | None = weakref.ref(tensor)
        self._last_shown = 0
        record.add_view()

    def __del__(self) -> None:
        self.record.drop_view(self._last_shown)

    def check_version(self) -> None:
        """Raises PyTorch's error for a saved tensor that was changed in place; under hooks PyTorch does not check.

        Raises:
            RuntimeError: the tensor was changed after it was saved.
        """
        if self._probe._version != self._version:
            raise modified_in_place(self._probe, self._version, self.dtype, self.size)

    def show(self) -> Tensor:
        """Returns the saved tensor; the record's bytes are on the device.

        Raises:
            RuntimeError: user code has resized the storage to less than it had when it was saved.
        """
        record, data = self.record, self.record.data
        assert data is not None
        storage = data.untyped_storage()
        if storage.nbytes() < record.nbytes:  # `set_` would give it new memory
            raise RuntimeError(
                f"the storage of a saved tensor of {self.dtype} {list(self.size)} was resized to {storage.nbytes()} "
                f"bytes between forward and backward; it had {record.nbytes} when it was saved. Don't resize storages "
                "that backward needs, or restore them before `backward`."
            )
        tensor = _empty(self.dtype, data.device).data.set_(storage, self.offset, self.size, self.stride)
        if self._last_shown != record.times_back:
            self._last_shown = record.times_back
            record.consumed()
        return tensor if self._original is None else as_plain_autograd_keeps(tensor, self._original)


def forget_original(saved: "Kept | SavedHandle") -> "Kept | SavedHandle":
    """Returns `saved`, which is the tensor as it was saved from here on, also if its `.data` is assigned to."""
    if isinstance(saved, SavedHandle):
        saved._original = None
        return saved
    return saved if isinstance(saved, SavedWeight) else (*saved[:2], None)


def as_plain_autograd_keeps(saved: Tensor, original: Original) -> Tensor:
    """Returns `saved`, or the tensor that was saved where assigning to its `.data` has replaced its storage since.

    Plain autograd keeps an operation's inputs themselves, so that backward sees a replaced storage, and of its outputs
    what they were. An assignment to `.data` moves no version counter. It is seen here as long as the tensor is alive,
    which an output's node must not ensure: the two would own each other.

    Args:
        saved: the tensor as it was saved.
        original: the tensor that was saved.
    """
    tensor = original()
    if tensor is None or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return saved
    tensor._fix_weakref()  # type: ignore[attr-defined]  # its Python object may be owned by C++ alone
    if tensor.is_set_to(saved) or tensor.grad_fn is torch._C._current_autograd_node():
        return saved
    return tensor.detach()


def check_version(tensor: Tensor, expected: int, dtype: torch.dtype, size: torch.Size) -> None:
    """Raises PyTorch's error where `tensor` is no longer at version `expected`.

    Raises:
        RuntimeError: the tensor was changed after it was saved.
    """
    if tensor._version != expected:
        raise modified_in_place(tensor, expected, dtype, size)


def modified_in_place(tensor: Tensor, expected: int, dtype: torch.dtype, size: torch.Size) -> RuntimeError:
    """Returns PyTorch's error for a saved tensor of `dtype` and `size` that was changed after it was saved.

    Args:
        tensor: shares the saved tensor's version counter.
        expected: the version that was saved.
        dtype: of the saved tensor.
        size: of the saved tensor.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {tensor._version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )


def find_saved_storage(storage: torch.UntypedStorage) -> SavedStorage | None:
    """Returns the live record of `storage`, if it has one."""
    reference: weakref.ref[SavedStorage] | None = getattr(storage, SAVED, None)
    return None if reference is None else reference()


def attach_saved_storage(storage: torch.UntypedStorage, record: SavedStorage | None) -> None:
    """Makes `record` what `find_saved_storage` returns for `storage`.

    The reference lives on the storage's Python object, which lives as long as the storage: an identity that all views
    share, and that a later storage at the same address does not inherit.
    """
    setattr(storage, SAVED, None if record is None else weakref.ref(record))


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a new tensor of all bytes of `storage`, one-dimensional `uint8`."""
    return _empty(torch.uint8, storage.device).data.set_(storage)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an empty tensor; `data` of it is a new one each time, which takes a third of the time of `empty`."""
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():  # it outlives the modes that are active now
        return torch.empty(0, dtype=dtype, device=device)


def _counts_of_one_owner() -> tuple[int, int]:
    """Returns the use count and the references of a storage that one tensor holds: versions of torch differ."""
    owner = torch.empty(1, dtype=torch.uint8, device="cpu")
    attach_saved_storage(owner.untyped_storage(), None)
    count: int = torch._C._storage_Use_Count(owner.untyped_storage()._cdata)
    return count, sys.getrefcount(owner.untyped_storage())


_USE_COUNT_OF_ONE_OWNER, _REFERENCES_OF_ONE_OWNER = _counts_of_one_owner()
