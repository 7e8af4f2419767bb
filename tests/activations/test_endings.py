"""With a device that is behind the host, or lost, training ends with an error and does not hang."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.activations import config
from lightning_ssd.activations.in_flight import InFlight
from lightning_ssd.device import CPUCopyEngine, Mark
from lightning_ssd.futures import Future
from lightning_ssd.storage import BackendFile, PosixBackend
from tests.support.offloader import change_policy, open_offloader, wait_for_writes

pytestmark = pytest.mark.timeout(60)


class LateCopies(CPUCopyEngine):
    """A device behind the host: d2h copies are made on a thread, once `drain` is called."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._reached = threading.Event()
        self._queued: list[Future[None]] = []

    def on_d2h(self, mark: Mark) -> "Future[None]":
        done: Future[None] = Future()
        if self._reached.is_set():
            done.set_result(None)
        else:
            self._queued.append(done)
        return done

    def drain(self) -> None:
        """The device executes its queued copies while the caller waits."""
        self._reached.set()
        ran: Future[None] = Future()

        def catch_up() -> None:
            for done in self._queued:
                done.set_result(None)
            self._queued.clear()
            ran.set_result(None)

        threading.Thread(target=catch_up).start()
        ran.result()


def test_closing_before_the_device_has_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an exception in forward: d2h copies that are still queued do not write to a closed store."""
    monkeypatch.setattr(config, "make_copy_engine", LateCopies)
    with open_offloader(tmp_path) as offloader:
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = torch.ones(64, 64, requires_grad=True).exp().exp().sum()
        assert offloader.stats().stored > 0
        assert loss.requires_grad
    assert list(tmp_path.iterdir()) == []


class LostDevice(CPUCopyEngine):
    """h2d copies fail on the I/O threads, where no user code can catch the error."""

    def h2d(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is lost")
        return super().h2d(src, dst, after, awaited=awaited)


def test_an_error_on_an_io_thread_reaches_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "make_copy_engine", LostDevice)
    with open_offloader(tmp_path) as offloader:
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = torch.ones(64, 64, requires_grad=True).sin().sin().sum()
        wait_for_writes(offloader)  # backward needs a storage that an I/O thread reads
        with pytest.raises(RuntimeError, match="the device is lost"):
            loss.backward()


class GatedDeviceFile(BackendFile):
    def __init__(self, inner: BackendFile, gate: threading.Event) -> None:
        self._inner, self._gate = inner, gate

    def write(self, buffer: Tensor, offset: int) -> int:
        self._gate.wait()
        return self._inner.write(buffer, offset)

    def read(self, buffer: Tensor, offset: int) -> int:
        return self._inner.read(buffer, offset)

    def close(self) -> None:
        self._inner.close()


class GatedDeviceBackend(PosixBackend):
    """Transfers device memory, as GPUDirect Storage does; writes wait for the gate."""

    device_buffers = True

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def open(self, path: Path) -> Any:
        return GatedDeviceFile(super().open(path), self.gate)


def test_bytes_that_the_direct_path_still_stores_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued writes of storages that backward needs, or that are freed, are cancelled without an error."""
    backend = GatedDeviceBackend()
    with open_offloader(tmp_path, backend=backend) as offloader:
        change_policy(offloader, window_bytes=2**30)
        # As on a GPU, where a copy is done later than it is issued, copies stay in flight.
        monkeypatch.setattr(InFlight, "evict_copied", lambda self: None)
        for _ in range(3):
            backend.gate.clear()
            offloader.begin_micro_batch()
            x = torch.randn(64, 64, requires_grad=True)
            with offloader.hooks():
                y = x
                for _ in range(12):
                    y = y.sin()
            threading.Timer(0.05, backend.gate.set).start()  # the drive serves requests again while backward runs
            y.sum().backward()
            assert x.grad is not None and x.grad.isfinite().all()
            offloader.end_backward()
        assert offloader.stats().forwarded > 0
