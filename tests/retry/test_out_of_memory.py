"""An OutOfMemoryError gets a note on the uses of the memory and on remedies, and is not replaced."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.retry import out_of_memory
from lightning_ssd.sizes import format_bytes
from tests.support.meter import Meter, use
from tests.support.plans import planner, quiet_trainer
from tests.support.products import combinations

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 GiB."


class _RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError(MESSAGE)


class Large(pl.LightningModule):
    """Runs out of memory in its third step; or, with `largest`, whenever a batch has more rows."""

    def __init__(self, where: str = "forward", largest: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        self.batch_size = 2
        self.where, self.largest = where, largest
        self.failed: list[BaseException] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.layers(batch).square()
        fails = len(batch) > self.largest if self.largest is not None else self.global_step == 2
        if fails and self.where == "forward":
            self.failed.append(torch.OutOfMemoryError(MESSAGE))
            raise self.failed[-1]
        if fails and self.where == "backward":
            hidden = _RunsOut.apply(hidden)  # type: ignore[no-untyped-call]
        return hidden.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, foreach=False)
        if self.where == "step":
            optimizer.register_step_pre_hook(self._fail)
        return optimizer

    def _fail(self, *args: object) -> None:
        if self.global_step == 2:
            raise torch.OutOfMemoryError(MESSAGE)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, 64), batch_size=self.batch_size)


WEIGHTS = format_bytes(4 * 64 * 64 * 4)
STATES = format_bytes(2 * 4 * 64 * 64 * 4 + 4 * 4)  # two moments, and a step of each weight


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_error_names_bytes_and_arguments(where: str, tmp_path: Path) -> None:
    module = Large(where)
    strategy = SSDOffloadStrategy(tmp_path, states="gpu", min_bytes=1, offload="none" if where == "step" else 0.5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(module)
    assert type(caught.value) is torch.OutOfMemoryError and caught.value.args == (MESSAGE,)
    assert not module.failed or caught.value is module.failed[0]
    (note,) = caught.value.__notes__
    assert f"weights {WEIGHTS}" in note
    gradients = WEIGHTS if where == "step" else None
    assert gradients is None or f"gradients {gradients}" in note
    assert f"optimizer states {STATES}" in note
    assert ("saved activations that were not offloaded 0 B" in note) == (where == "step")
    for remedy in ("SwapPlanner(gpu_memory=...)", "states='host'", "gradient checkpointing"):
        assert remedy in note
    assert ("which drops most of the" in note) == (where != "step")
    assert ("offload='auto'`, which offloads" in note) == (where == "step")
    assert ("`offload=1.0`" in note) == (where != "step")


def test_the_error_names_master_weights_on_the_device(tmp_path: Path) -> None:
    """One of four layers is kept on the device, in bf16 with fp32 master weights."""
    strategy = SSDOffloadStrategy(tmp_path, tier="host", gpu_memory="120kB", min_bytes=1, offload="none")
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path, precision="bf16-true")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Large("forward"))
    (note,) = caught.value.__notes__
    for name, size in (("weights", 2), ("master weights", 4), ("optimizer states", 8)):
        nbytes = size * 64 * 64 + 4 * (name == "optimizer states")  # with the number of steps
        assert f" {name} {format_bytes(nbytes)}" in note


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(MESSAGE)


@pytest.mark.parametrize("states", ["gpu", "host"])
def test_the_error_names_the_module_that_ran(states: Any, tmp_path: Path) -> None:
    module = Large()
    module.layers.add_module("gate", Fails())
    strategy = SSDOffloadStrategy(tmp_path, states=states, min_bytes=1, offload=0.5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(module)
    (note,) = caught.value.__notes__
    assert "memory ran out in the module `layers.gate` (Fails), at `raise torch.OutOfMemoryError(MESSAGE)`" in note


class FailsInItsLoss(Large):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.layers(batch)
        with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of replaced kernels
            library.impl("_log_softmax", _fail, "CPU")
            return nn.functional.cross_entropy(logits, batch.argmax(1))


def test_the_error_in_a_loss_of_logits_names_losses_in_chunks(tmp_path: Path) -> None:
    notes = []
    for module in (FailsInItsLoss(), Large()):
        strategy = SSDOffloadStrategy(tmp_path, states="gpu", min_bytes=1, offload=0.5)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(module)
        notes += caught.value.__notes__
    assert ["linear_cross_entropy" in note for note in notes] == [True, False]


@pytest.fixture
def relu_backward_fails() -> Iterator[None]:
    """Has the operator of relu's backward run out of memory, which autograd calls without Python code."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of replaced kernels
        library.impl("threshold_backward", _fail, "CPU")
        yield


def _fail(*args: object) -> Tensor:
    raise torch.OutOfMemoryError(MESSAGE)


class Relu(Large):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).relu().mean()


@pytest.mark.usefixtures("relu_backward_fails")
def test_the_error_of_a_second_attempt_names_the_operator_of_backward(tmp_path: Path) -> None:
    """The first attempt runs without a dispatch mode."""
    torch.compiler.reset()  # in a process with compiled code, the second one does too
    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError) as caught:
        use(Meter(1e9, 10**6), patch)
        strategy = SSDOffloadStrategy(tmp_path, states="gpu", min_bytes=1)
        quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(Relu())
    note = caught.value.__notes__[-1]
    operator = "`aten.threshold_backward.default` of float32[2, 64], float32[2, 64]"
    assert f"memory ran out in the operator {operator}; " in note


class GPU(Meter):
    def reserved(self) -> int:
        return self.level


@pytest.mark.parametrize(
    ("used", "free", "missing"),
    [
        ("70.00 GiB", "0 bytes", "10.00 GiB are missing; "),
        ("12.00 MiB", "21.00 GiB", "smaller fragments; "),
        ("12.00 MiB", "17.44 MiB", "other processes have left 17.44 MiB of the GPU; "),
    ],
)
def test_the_error_names_the_missing_bytes(
    used: str, free: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"{__name__}.MESSAGE",
        f"{MESSAGE} GPU 0 has a total capacity of 80.00 GiB of which {free} is free. Of the allocated memory {used} is "
        "allocated by PyTorch, and 2.00 MiB is reserved by PyTorch but unallocated.",
    )
    monkeypatch.setattr(out_of_memory, "allocator_memory", lambda device: GPU(0, 0))
    monkeypatch.setattr(out_of_memory, "process_gpu_memory", lambda device: 80 * 2**30)
    strategy = SSDOffloadStrategy(tmp_path, states="gpu", min_bytes=1, offload=0.5)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path).fit(Large())
    (note,) = caught.value.__notes__
    assert f"{missing}this process may use 80.00 GiB of the GPU" in note
    assert ("of 2 samples, at most about 1 fit" in note) == ("missing" in missing)


def test_remedies_are_those_that_the_training_does_not_use(tmp_path: Path) -> None:
    """The training has a planner, and offloaded states, which the note must not prefetch."""
    strategy = SSDOffloadStrategy(tmp_path, states="host", min_bytes=1, gpu_memory="1B", host_memory="64MiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[planner()], default_root_dir=tmp_path)
        trainer.fit(Large())
    (note,) = caught.value.__notes__
    assert "weights 0 B, gradients 0 B, optimizer states 0 B, buffers for offloaded weights" in note
    assert "`SwapPlanner(gpu_memory=...)` with fewer bytes" in note and "fewer bytes as `gpu_memory`" in note
    assert "states='host'" not in note and "`offload=" not in note


@pytest.mark.quick_cases(1)
@combinations(
    "where, states", ["forward", "backward"], ["gpu", "host"], quick=[("forward", "host"), ("backward", "gpu")]
)
def test_lightnings_batch_size_finder_continues_below_the_batch_that_ran_out_of_memory(
    states: Any, where: str, tmp_path: Path
) -> None:
    strategy = SSDOffloadStrategy(
        tmp_path, states=states, min_bytes=1, offload=1.0, gpu_memory="1B", ssd_capacity="1MiB"
    )
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    module = Large(where, largest=8)
    assert Tuner(trainer).scale_batch_size(module, max_trials=5, steps_per_trial=1) == 8
    trainer.fit(module)
    assert module.batch_size == 8 and trainer.global_step == 8
