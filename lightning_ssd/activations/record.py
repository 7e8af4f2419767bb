"""One saved storage: where its bytes are, and who may still ask for them.

autograd holds `SavedView`s, a view holds its `Record`, and a record holds the bytes or the place where they are.
Nothing else keeps a record alive, so its lifetime is autograd's: when the last node that saved the storage is freed,
the record dies and its place is given back, whatever became of the graph (run, retained, never run, dropped by an
exception).
"""

import weakref
from abc import abstractmethod
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_ssd.activations.tier import Load, StoredCopy, TierName

if TYPE_CHECKING:
    from lightning_ssd.activations.micro_batch import MicroBatch


class State(Enum):
    """Where a record's bytes are."""

    KEPT = auto()
    """On the device, until the record dies."""
    LEAVING = auto()
    """On the device and on their way out."""
    AWAY = auto()
    """In a tier."""
    COMING = auto()
    """On their way back."""
    BACK = auto()
    """On the device again, until every view has been asked for."""


class Leftover(NamedTuple):
    """What a dead record leaves to be given back: its stored copy, and a load that nobody waited for."""

    copy: StoredCopy
    load: Load | None


class Viewed:
    """Bytes that `SavedView`s show, and that are let go once every view has been asked for.

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

    def came_back(self) -> None:
        """`data` is there again."""
        self.times_back += 1
        self.unseen = self.views

    def seen(self) -> None:
        """One more view was handed out, or died, since the bytes came back; after the last one they are let go."""
        self.unseen -= 1
        if self.unseen <= 0:
            self.let_go()

    @abstractmethod
    def let_go(self) -> None:
        """Nobody wants the bytes for now."""


class Record(Viewed):
    """The bytes of one storage that autograd saved.

    Args:
        data: all bytes of the storage, one-dimensional `uint8`.
        version: of the tensor that was saved; a storage that was changed since is saved again, as another record.
        batch: the micro-batch that it belongs to.
        index: its position in the micro-batch's order of saving.
        leftovers: takes what is to be given back when the record dies. Records die wherever Python frees them, inside
            a garbage collection too, so dying takes no lock and calls nobody.
    """

    __slots__ = ("_leftovers", "batch", "copy", "index", "load", "nbytes", "state", "tier", "version")

    def __init__(
        self, data: Tensor, version: int, batch: "MicroBatch", index: int, leftovers: "deque[Leftover]"
    ) -> None:
        super().__init__()
        self.data = data
        self.version = version
        self.nbytes = data.numel()
        self.batch = batch
        self.index = index
        self.state = State.KEPT
        self.tier: TierName | None = None
        self.copy: StoredCopy | None = None
        self.load: Load | None = None
        self._leftovers = leftovers

    def __del__(self) -> None:
        if self.copy is not None:
            self._leftovers.append(Leftover(self.copy, self.load))

    def leave(self, copy: StoredCopy, tier: TierName) -> None:
        """A tier has begun to store the bytes; the device's stay until `gone`."""
        self.copy, self.tier, self.state = copy, tier, State.LEAVING

    def gone(self) -> None:
        """The device's bytes are no longer read by the copy: drop them."""
        if self.state is State.LEAVING:
            self.data, self.state = None, State.AWAY

    def stay(self) -> None:
        """The bytes were wanted before they were gone: keep them, and take the store back."""
        assert self.copy is not None and self.data is not None
        self._leftovers.append(Leftover(self.copy, None))
        self.copy, self.tier, self.state = None, None, State.KEPT

    def come(self, *, urgent: bool) -> None:
        """Starts to bring the bytes back."""
        assert self.copy is not None
        self.load = self.copy.load(urgent=urgent)
        self.state = State.COMING

    def arrive(self) -> None:
        """Orders the compute stream after the load."""
        assert self.load is not None
        self.load.wait()
        self.data, self.load, self.state = self.load.data, None, State.BACK
        self.came_back()

    def let_go(self) -> None:
        if self.state is State.BACK:
            self.data, self.state = None, State.AWAY


class SavedView:
    """What autograd keeps in place of a saved tensor: a storage's record, and the view of it that the tensor was.

    Its probe is an empty tensor that shares the saved tensor's version counter: it tells in-place changes after the
    storage itself is gone from the device.
    """

    __slots__ = ("_last_shown", "_probe", "_version", "dtype", "offset", "record", "size", "stride")

    def __init__(self, tensor: Tensor, record: Viewed, empty: Tensor) -> None:
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self._version = tensor._version
        self._probe = tensor.detach()
        self._probe.data = empty
        self._last_shown = 0
        record.views += 1
        record.unseen += 1

    def __del__(self) -> None:
        record = self.record
        record.views -= 1
        if self._last_shown != record.times_back:
            record.seen()

    def check_version(self) -> None:
        """Raises PyTorch's error for a saved tensor that was changed in place; under hooks PyTorch does not check.

        Raises:
            RuntimeError: the tensor was changed after it was saved.
        """
        check_version(self._probe, self._version, self.dtype, self.size)

    def show(self) -> Tensor:
        """Returns the saved tensor; the record's bytes are on the device."""
        record = self.record
        assert record.data is not None
        tensor = torch.empty(0, dtype=self.dtype, device=record.data.device).set_(
            record.data.untyped_storage(), self.offset, self.size, self.stride
        )
        if self._last_shown != record.times_back:
            self._last_shown = record.times_back
            record.seen()
        return tensor


def check_version(tensor: Tensor, expected: int, dtype: torch.dtype, size: torch.Size) -> None:
    """Raises PyTorch's error where `tensor` is no longer at version `expected`.

    Raises:
        RuntimeError: the tensor was changed after it was saved.
    """
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {list(size)}] is at version {tensor._version}; expected version {expected} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
            "with torch.autograd.set_detect_anomaly(True)."
        )


def find_record(storage: torch.UntypedStorage) -> Record | None:
    """Returns the live record of `storage`, if it has one."""
    reference: weakref.ref[Record] | None = getattr(storage, _RECORD, None)
    return None if reference is None else reference()


def attach_record(storage: torch.UntypedStorage, record: Record) -> None:
    """Makes `record` what `find_record` returns for `storage`.

    The reference lives on the storage's Python object, which lives as long as the storage: an identity that all views
    share, and that a later storage at the same address does not inherit.
    """
    setattr(storage, _RECORD, weakref.ref(record))


_RECORD = "_lightning_ssd_record"
