"""Slabs: committing and page-locking several, with a CUDA runtime that only counts."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from lightning_ssd.device import process_ram
from lightning_ssd.storage import Slab, StorageError, commit, slab

SIZES = (2**20, 3 * 2**20 + 4096, 65 * 2**20)  # the last one has two pieces


class FakeRuntime:
    """Page-locks no memory.

    Args:
        waiting: most callers that wait for each other before any of them locks its memory.
        refused: bytes of a slab that can't be page-locked.
    """

    def __init__(self, waiting: int = 1, refused: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self._together = threading.Barrier(waiting, timeout=60)
        self._refused = refused

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._together.wait()
        if nbytes == self._refused:
            raise RuntimeError("out of memory")
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def install(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def resident(memory: torch.Tensor) -> int:
    """Returns the bytes of RAM of the mappings that have parts of `memory`."""
    found, begin = 0, memory.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(bounds[1], 16) < begin + memory.numel() and begin < int(bounds[2], 16)
        elif within and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_committed_pages_are_resident_and_keep_their_bytes() -> None:
    slabs = [Slab(nbytes, pin=False) for nbytes in SIZES]
    for one in slabs:
        one.tensor[5000:70000].fill_(7)
    commit(slabs, pin=False)
    for one in slabs:
        assert resident(one.tensor) >= one.tensor.numel()
        assert one.tensor[5000:70000].eq(7).all() and one.tensor.sum(dtype=torch.int64) == 7 * 65000


def test_committed_slabs_take_no_more_memory_than_they_have() -> None:
    slabs = [Slab(2**21 + 4096, pin=False) for _ in range(64)]
    before = process_ram()
    commit(slabs, pin=False)
    assert process_ram() - before < 1.1 * sum(one.tensor.numel() for one in slabs)


def test_slabs_are_page_locked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(waiting=2)
    install(runtime, monkeypatch)
    monkeypatch.setattr(slab.os, "sched_getaffinity", lambda process: {0, 1})
    slabs = [Slab(nbytes, pin=False) for nbytes in SIZES[1:]]
    commit(slabs, pin=True)
    assert sorted(runtime.locked.values()) == sorted(SIZES[1:])
    for one in slabs:
        one.close()
    assert not runtime.locked


def test_slabs_of_which_one_can_not_be_page_locked_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(refused=SIZES[1])
    install(runtime, monkeypatch)
    slabs = [Slab(nbytes, pin=False) for nbytes in SIZES]
    slabs[0].pin()
    with pytest.raises(StorageError, match=r"could not page-lock 3\.00 MiB .*Lower the budget of host memory"):
        commit(slabs, pin=True)
    assert list(runtime.locked.values()) == [SIZES[0]]
    slabs[0].close()


def test_a_slab_made_in_inference_mode_is_committed_and_written_later() -> None:
    with torch.inference_mode():
        memory = Slab(SIZES[0], pin=False)
        commit([memory], pin=False)
    assert resident(memory.tensor) >= SIZES[0]
    memory.tensor.fill_(1)
