"""The staged transfer releases its memory exactly once, at whatever step it fails."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine, StagedReader, h2d_and_release
from lightning_ssd.futures import CancelledError, Future, finished
from lightning_ssd.storage import PinnedBuffer, PinnedPool, Urgency

PAGE = 4096


class LostDevice(CPUCopyEngine):
    def h2d(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        raise RuntimeError("the device is lost")


@pytest.fixture
def reader() -> Any:
    pool = PinnedPool(PAGE, pin=False)
    reader = StagedReader(pool, "test")
    yield reader
    reader.close()
    pool.close()


def fill_with_threes(memory: Tensor) -> "Future[None]":
    memory.fill_(3)
    return finished(None)


def test_bytes_reach_the_device_and_the_memory_is_released(reader: StagedReader) -> None:
    target = torch.zeros(100, dtype=torch.uint8)
    memory = reader.read(100, fill_with_threes).result(60)
    assert reader.pool.used_bytes == PAGE
    h2d_and_release(CPUCopyEngine(torch.device("cpu")), memory, target, None)
    assert reader.pool.used_bytes == 0
    assert (target == 3).all()


@pytest.mark.parametrize("fault", ["begin", "read", "cancelled read", "needed", "closed", "too large"])
def test_a_read_that_fails_passes_its_error_on_and_holds_no_memory(reader: StagedReader, fault: str) -> None:
    def fill(memory: Tensor) -> "Future[None]":
        reading: Future[None] = Future()
        if fault == "begin":
            raise OSError("begin")
        if fault == "read":
            reading.set_exception(OSError("read"))
        if fault == "cancelled read":
            reading.cancel()
        return reading

    needed: Future[None] = Future()
    needed.set_exception(OSError("needed")) if fault == "needed" else needed.set_result(None)
    if fault == "closed":
        reader.close()
    read = reader.read(2 * PAGE if fault == "too large" else PAGE, fill, [needed])
    kind = {"cancelled read": CancelledError, "closed": RuntimeError, "too large": ValueError}.get(fault, OSError)
    with pytest.raises(kind):
        read.result(60)
    assert reader.pool.used_bytes == 0


@pytest.mark.parametrize("urgent", ["when it is queued", "later"])
def test_urgent_reads_get_staging_memory_before_others(urgent: str, reader: StagedReader) -> None:
    """All memory is in use, one read waits for it, and an urgent one is the last of three more."""
    held = reader.pool.acquire(PAGE)
    order: list[str] = []

    urgency = Urgency(urgent=urgent == "when it is queued")

    def read(name: str, urgency: Urgency | None = None) -> "Future[PinnedBuffer]":
        def fill(memory: Tensor) -> "Future[None]":
            order.append(name)
            return finished(None)

        return reader.read(PAGE, fill, urgency=urgency)

    queued = [read(name) for name in ("waits", "second", "third")] + [read("urgent", urgency)]
    urgency.begin_wait()
    for one in queued:
        one.add_done_callback(lambda filled: filled.result().release())
    held.release()
    for one in queued:
        one.result(60)
    assert order in (["waits", "urgent", "second", "third"], ["urgent", "waits", "second", "third"])


def test_a_copy_that_fails_releases_the_memory(reader: StagedReader) -> None:
    memory = reader.read(PAGE, fill_with_threes).result(60)
    with pytest.raises(RuntimeError, match="lost"):
        h2d_and_release(LostDevice(torch.device("cpu")), memory, torch.empty(PAGE, dtype=torch.uint8), None)
    assert reader.pool.used_bytes == 0
