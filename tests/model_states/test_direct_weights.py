"""Compute weights that are read from SSDs to device memory, by a backend that takes device buffers."""

import contextlib
import re
from collections.abc import Iterator
from errno import EIO
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.device import CopyEngine, CPUCopyEngine, Mark
from lightning_ssd.futures import Future
from lightning_ssd.model_states import build
from lightning_ssd.model_states.placement.state_storage import make_store
from lightning_ssd.model_states.stores.buffers import StateStaging
from lightning_ssd.model_states.stores.layout import Layout
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.storage import Backend, BlobStore, StorageError, Urgency
from tests.support.compare import assert_same
from tests.support.direct import DirectBackend
from tests.support.faults import FailingAtBackend, GatedBackend
from tests.support.late_device import LateCopies
from tests.support.models import Model
from tests.support.state_stores import CPU, STATES
from tests.support.states import offloading, train

pytestmark = pytest.mark.timeout(60)
ELEMENTS = 2560
"""Of the flat parameter: two pieces of a page, and a shorter one."""


class HeldCopies(CPUCopyEngine):
    """The compute stream uses the target of h2d copies until `free` is done."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.free: Future[None] = Future()

    def on_h2d(self, mark: Mark) -> "Future[None]":
        return self.free


@contextlib.contextmanager
def opened(path: Path, backend: Backend, copies: CopyEngine, *, checksum: bool = False) -> Iterator[StateStore]:
    """Yields a store on an SSD whose weights are `arange`, in pieces of one page; the drive has one thread."""
    flat = FlatParameter("flat", [("weight", nn.Parameter(torch.zeros(ELEMENTS)))], torch.float32, CPU)
    layout = Layout(flat, False, STATES, steps=True, versions=2)
    blobs = BlobStore([path], device=CPU, backend=backend, checksum=checksum, piece_bytes=4096, threads=1)
    with (
        contextlib.closing(StateStaging.make(blobs, 2**16, 2**17, pin=False)) as scratch,
        contextlib.ExitStack() as undo,
    ):
        store = make_store(layout, ("ssd", "ssd"), scratch, copies, undo)
        store.assign([torch.arange(ELEMENTS, dtype=torch.float32)])
        store.drain()
        yield store


def fetched(store: StateStore) -> Tensor:
    target = torch.zeros(store.flat.nbytes, dtype=torch.uint8)
    store.prefetch_to(target, None).result(timeout=60)
    return target.view(torch.float32)


@pytest.mark.parametrize("checksum", [False, True])
def test_weights_are_read_to_the_target_itself_unless_they_have_checksums(tmp_path: Path, checksum: bool) -> None:
    backend = DirectBackend()
    with opened(tmp_path, backend, CPUCopyEngine(CPU), checksum=checksum) as store:
        weights = fetched(store)
        assert torch.equal(weights, torch.arange(ELEMENTS, dtype=torch.float32))
        assert (weights.data_ptr() in backend.addresses["read"]) is not checksum


def test_weights_are_not_read_before_their_target_is_free(tmp_path: Path) -> None:
    """The drive has served a later request while the compute stream still uses the target."""
    copies = HeldCopies()
    with opened(tmp_path, DirectBackend(), copies) as store:
        target = torch.full((store.flat.nbytes,), 7, dtype=torch.uint8)
        issued = store.prefetch_to(target, None)
        store.unstage(store.stage().result(timeout=60), changed=False)
        assert not issued.done() and (target == 7).all()
        copies.free.set_result(None)
        issued.result(timeout=60)
        assert torch.equal(target.view(torch.float32), torch.arange(ELEMENTS, dtype=torch.float32))


def test_weights_are_not_read_before_they_are_written(tmp_path: Path) -> None:
    """The reads are urgent: the drive would serve them before the writes that are queued."""
    backend = GatedBackend()
    backend.device_buffers = True
    with opened(tmp_path, backend, CPUCopyEngine(CPU)) as store:
        values = store.stage().result(timeout=60)
        values.set_masters(torch.ones(ELEMENTS))
        backend.hold()
        store.unstage(values, changed=True)
        backend.wait_for_arrival()
        target = torch.zeros(store.flat.nbytes, dtype=torch.uint8)
        issued = store.prefetch_to(target, None, Urgency(urgent=True))
        backend.release()
        issued.result(timeout=60)
        assert (target.view(torch.float32) == 1).all()
        operations = [operation for operation, _ in backend.served]
        assert "read" not in operations[:3] and operations.count("read") == 3


@pytest.mark.parametrize(("at", "number"), [(0, EIO), (1, None), (2, EIO)])
def test_a_failed_read_is_the_error_of_the_staged_path(tmp_path: Path, at: int, number: int | None) -> None:
    """One of three pieces fails, by an error of the drive or a short read; the next prefetch has the weights."""
    remedies = []
    for direct in (False, True):
        backend = FailingAtBackend(at, "read", armed=False, number=number)
        backend.device_buffers = direct
        with opened(tmp_path, backend, CPUCopyEngine(CPU)) as store:
            backend.arm()
            with pytest.raises(StorageError) as error:
                fetched(store)
            remedies.append(re.sub(r"/\S+|\d+", "", str(error.value)))  # without path, offset and bytes
            assert backend.failed == 1
            assert torch.equal(fetched(store), torch.arange(ELEMENTS, dtype=torch.float32))
    assert remedies[0] == remedies[1]


@pytest.mark.parametrize("clip", [None, "speculative"])
def test_numbers_are_plain_lightnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str | None) -> None:
    """Bit for bit, on a device that is behind the host."""
    how = {"gradient_clip_val": 0.5 if clip else None, "max_epochs": 1}
    expected = train(tmp_path, "auto", Model(), **how)
    monkeypatch.setattr(build, "make_copy_engine", LateCopies)
    backend = DirectBackend()
    strategy = offloading("ssd", gpu_memory="1B", clip=clip or "auto", backend=backend, checksum=False)
    assert_same(train(tmp_path, strategy, Model(), **how), expected)
    assert backend.addresses["read"]
