"""Page-locked memory, and kvikio where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ssd.storage import BlobStore, PinnedPool
from tests.support.storage import noise

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slab_bytes", [None, 2**20])
def test_buffers_are_page_locked_and_copies_are_exact(slab_bytes: int | None) -> None:
    pool = PinnedPool(5 * 2**20 + 4096, pin=True, slab_bytes=slab_bytes)
    buffers = [pool.acquire(nbytes) for nbytes in (2**20 + 1, 4096, 3 * 2**20)]
    for seed, buffer in enumerate(buffers):
        assert buffer.tensor.is_pinned()
        data = noise(buffer.tensor.numel(), seed)
        buffer.tensor.copy_(data.cuda(), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer.tensor, data)
    for buffer in buffers:
        buffer.release()
    whole = pool.acquire(5 * 2**20)
    assert whole.tensor.is_pinned()
    whole.release()
    pool.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kvikio_round_trips(tmp_path: Path, device: str) -> None:
    pytest.importorskip("kvikio")
    store = BlobStore([tmp_path], device=torch.device("cuda"), backend="kvikio", checksum=False, piece_bytes=2**20)
    try:
        assert store.device_buffers
        for nbytes in (100, 2**20, 3 * 2**20 + 5):
            blob = store.allocate(nbytes)
            data = noise(nbytes).to(device)
            back = torch.zeros_like(data)
            torch.cuda.synchronize()
            for move, memory in ((store.write, data), (store.read, back)):
                for future in [move(p, memory[p.start : p.start + p.nbytes]) for p in blob.pieces]:
                    future.result()
            assert torch.equal(back, data)
            store.free(blob)
    finally:
        store.close()
    assert list(tmp_path.iterdir()) == []
