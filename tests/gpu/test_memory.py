"""GPU memory that a capped process may use: budgets follow the cap, and a training needs less."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.device import make_copy_engine, process_gpu_memory, usable_gpu_memory
from lightning_ssd.device.memory import FRAGMENTS
from lightning_ssd.storage import Slab
from tests.support.garbage import collect
from tests.support.parity import TinyGPT
from tests.support.plans import BOTH, planner, quiet_trainer

pytestmark = pytest.mark.gpu

CAP = 2**30


@pytest.fixture
def capped() -> Iterator[torch.device]:
    """The GPU, of which this process may have 1 GiB."""
    device = torch.device("cuda", torch.cuda.current_device())
    collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(device).total_memory, device)
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_what_kernels_write_to_mapped_memory_is_on_the_host_at_their_mark() -> None:
    memory, copies = Slab(64, pin=True), make_copy_engine(torch.device("cuda"))
    mapped = copies.mapped(memory.tensor)
    source = torch.zeros(64, dtype=torch.uint8, device="cuda")
    for value in range(100):
        torch.bitwise_or(source.fill_(value), 0, out=mapped)
        copies.on_d2h(copies.mark(awaited=True)).result(timeout=60)
        assert memory.tensor.tolist() == [value] * 64
    copies.close()
    memory.close()


def test_the_allocator_agrees(capped: torch.device) -> None:
    limit = process_gpu_memory(capped)
    assert limit == pytest.approx(CAP, rel=1e-3)
    assert usable_gpu_memory(capped) == pytest.approx(CAP - FRAGMENTS, rel=1e-3)
    most = torch.empty(limit - 2**25 - torch.cuda.memory_reserved(capped), dtype=torch.uint8, device=capped)
    # Memory of this process counts as available.
    assert process_gpu_memory(capped) == limit
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**26, dtype=torch.uint8, device=capped)
    del most


def test_a_planner_plans_within_the_cap(capped: torch.device, tmp_path: Path) -> None:
    first = planner()
    trainer = quiet_trainer(
        accelerator="gpu",
        max_steps=12,
        strategy=SSDOffloadStrategy(**BOTH),
        callbacks=[first],
        default_root_dir=tmp_path,
    )
    trainer.fit(TinyGPT("none"), DataLoader([torch.randn(2, 16) for _ in range(12)], batch_size=None))
    assert 0.9 * (CAP - FRAGMENTS) < first.cycle.runner.hardware.gpu_bytes <= CAP - FRAGMENTS


def train_a_step(path: Path, module: pl.LightningModule, callback: pl.Callback) -> None:
    trainer = quiet_trainer(
        accelerator="gpu",
        max_steps=1,
        strategy=SSDOffloadStrategy(tier="host"),
        callbacks=[callback],
        default_root_dir=path,
    )
    trainer.fit(module, DataLoader([torch.randn(2, 16)], batch_size=None))


def test_states_are_offloaded_from_a_capped_gpu(capped: torch.device, tmp_path: Path) -> None:
    """AdamW's states, gradients and weights of 64M parameters take 1 GiB."""

    class Large(TinyGPT):
        def __init__(self) -> None:
            super().__init__("none")
            self.more = nn.Embedding(2**16, 2**10)

    offloaded = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
            offloaded.append(trainer.strategy.model_states is not None)

    train_a_step(tmp_path, Large(), Look())
    assert offloaded == [True]


def test_segments_expand_during_a_training_only(tmp_path: Path) -> None:
    kinds: list[bool] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            kinds.extend(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())

    collect()
    torch.cuda.empty_cache()
    before = len(torch.cuda.memory_snapshot())
    train_a_step(tmp_path, TinyGPT("none"), Look())
    assert sum(kinds) > 0 and len(kinds) - sum(kinds) <= before
    collect()
    torch.cuda.empty_cache()
    later = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    address = later.data_ptr()
    inside = [one for one in torch.cuda.memory_snapshot() if 0 <= address - one["address"] < one["total_size"]]
    assert [one["is_expandable"] for one in inside] == [False]
