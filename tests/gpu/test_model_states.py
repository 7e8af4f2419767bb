"""Weights, gradients and optimizer states in host memory and on SSD, with a GPU: the same numbers, less memory."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import build
from lightning_ssd.model_states.stores.buffers import SSDBuffer
from tests.support.compare import assert_same
from tests.support.delays import DELAYS, SlowBackend, SlowCopies
from tests.support.killed import FailAt, Failure, apart, fit, outcome, recovering
from tests.support.killed import same as outcomes_are_the_same
from tests.support.moves import Mover
from tests.support.parity import SharedStorages, TinyGPT, exact, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def streamed(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(**{"states": "host", "min_bytes": 1, "tier": "host", "host_memory": "1GiB"} | arguments)


# SharedStorages uses one weight twice in a forward: see `build._compute_dtypes` for bf16.
@pytest.mark.parametrize(
    ("model", "precision"),
    [(TinyGPT, "32-true"), (TinyGPT, "bf16-mixed"), (TinyGPT, "16-mixed"), (SharedStorages, "32-true")],
)
@pytest.mark.parametrize(("accumulate", "checkpointing"), [(1, "none"), (3, "non_reentrant"), (1, "reentrant")])
@pytest.mark.parametrize("gpu_memory", ["1B", "auto"])
def test_numbers_are_those_of_plain_lightning(
    model: Any, precision: str, accumulate: int, checkpointing: Any, gpu_memory: Any
) -> None:
    how: dict[str, Any] = {
        "device": "cuda",
        "precision": precision,
        "accumulate": accumulate,
        "checkpointing": checkpointing,
        "model": exact(model),
        "recorded": False,
    }
    assert_same(train("auto", **how), train(streamed(gpu_memory=gpu_memory), **how))


@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize(
    ("model", "precision"),
    [(TinyGPT, "32-true"), (TinyGPT, "bf16-mixed"), (TinyGPT, "16-mixed"), (TinyGPT, "bf16-true"),
     (SharedStorages, "bf16-mixed")],
)  # fmt: skip
@pytest.mark.parametrize(("limit", "clip"), [(None, "auto"), (1.0, "deferred"), (1.0, "speculative")])
@pytest.mark.parametrize("gpu_memory", ["1B", "40kB"])
def test_numbers_do_not_move_with_the_timing(
    states: str, model: Any, precision: str, limit: float | None, clip: str, gpu_memory: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """AdamW steps on the CPU while the device computes, with clipping that does not wait: delays change nothing."""
    how: dict[str, Any] = {"device": "cuda", "precision": precision, "clip": limit, "model": model, "recorded": False}
    how["accumulate"] = 1 if gpu_memory == 1 else 2
    expected = train(streamed(gpu_memory=gpu_memory, overlap="none", clip="deferred"), **how)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    for seed in range(2):
        DELAYS.seed(seed)
        slow = streamed(states=states, gpu_memory=gpu_memory, clip=clip, backend=SlowBackend(), checksum=True)
        assert_same(expected, train(slow, **how))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_that_kvikio_reads_to_the_device_are_the_same(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In compat mode without GPUDirect Storage."""
    pytest.importorskip("kvikio")
    reads, read = [], SSDBuffer.read_to_device

    def recorded(buffer: SSDBuffer, target: Tensor, urgency: Any) -> Any:
        reads.append(target.is_cuda)
        return read(buffer, target, urgency)

    monkeypatch.setattr(SSDBuffer, "read_to_device", recorded)
    how: dict[str, Any] = {"device": "cuda", "precision": precision, "model": exact(TinyGPT), "recorded": False}
    direct = streamed(states="ssd", gpu_memory="1B", backend="kvikio", checksum=False)
    assert_same(train(streamed(gpu_memory="1B"), **how), train(direct, **how))
    assert reads and all(reads)


@pytest.mark.parametrize("state_format", ["split", "bf16"])
@pytest.mark.parametrize(("limit", "clip"), [(None, "auto"), (1.0, "deferred"), (1.0, "speculative")])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_formats_do_not_move_with_the_timing(
    states: str, state_format: Any, limit: float | None, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With delays in every copy, read and write."""
    how: dict[str, Any] = {"device": "cuda", "precision": "bf16-true", "clip": limit, "model": TinyGPT}
    how["recorded"] = False
    expected = train(streamed(overlap="none", clip="deferred", state_format=state_format), **how)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    for seed in range(2):
        DELAYS.seed(seed)
        slow = streamed(states=states, clip=clip, state_format=state_format, backend=SlowBackend())
        assert_same(expected, train(slow, **how))


@pytest.mark.parametrize("gpu_memory", ["150kB", "400kB"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_resident_masters_are_stepped_on_the_device(gpu_memory: str, limit: float | None) -> None:
    """In bf16-true, units on the device with their masters have the numbers of units whose masters are on the host."""
    how: dict[str, Any] = {"device": "cuda", "precision": "bf16-true", "model": exact(TinyGPT), "recorded": False}
    how |= {"accumulate": 2, "clip": limit}
    some = streamed(states="auto", gpu_memory=gpu_memory)
    found, expected = train(some, **how), train(streamed(overlap="none"), **how)
    if limit is None:
        assert_same(found, expected)
    for one, other in zip(found.losses, expected.losses, strict=True):  # a norm is summed in another order
        torch.testing.assert_close(one, other, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("model", "precision"),
    [(TinyGPT, "32-true"), (TinyGPT, "bf16-mixed"), (TinyGPT, "16-mixed"), (TinyGPT, "bf16-true"),
     (SharedStorages, "32-true")],
)  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 2])
def test_states_that_move_amid_a_training(
    model: Any, precision: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They move from step to step, also to the device, and every copy is delayed."""
    how: dict[str, Any] = {"device": "cuda", "precision": precision, "model": exact(model), "recorded": False}
    how["accumulate"] = accumulate
    expected = train(streamed(overlap="none"), **how)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    for seed in range(2):
        DELAYS.seed(seed)
        mover = Mover(seed)
        slow = streamed(states="ssd", tier="ssd", backend=SlowBackend(), checksum=True)
        assert_same(expected, train(slow, callbacks=[mover], **how))
        assert mover.moves > 4


class ClippedByHand(TinyGPT):
    """Manual optimization, which clips the gradients of two micro-batches."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipping_in_manual_optimization(states: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left to the jobs of the step, and every copy is delayed."""
    how: dict[str, Any] = {"device": "cuda", "precision": precision, "model": exact(ClippedByHand), "recorded": False}
    expected, plain = train(streamed(overlap="none"), **how), train("auto", **how)
    for one, other in zip(expected.losses, plain.losses, strict=True):  # sums have their norm on the CPU
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    for seed in range(2):
        DELAYS.seed(seed)
        assert_same(expected, train(streamed(states=states, backend=SlowBackend(), checksum=True), **how))


def test_a_failed_training_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `recover=True`, it equals one that did not fail, with dropout on the device and delays in every copy."""
    how: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "gradient_clip_val": None}
    expected = fit(recovering(apart(tmp_path)), **how)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    DELAYS.seed(0)
    for batch in (5, 12, 24):
        with pytest.raises(Failure):
            fit(recovering(tmp_path, backend=SlowBackend()), callbacks=[FailAt(batch)], **how)
    found = fit(recovering(tmp_path, backend=SlowBackend()), **how)
    assert min(found.losses) >= 22
    assert outcomes_are_the_same(outcome(found), outcome(expected))


def test_hooks_see_gradients() -> None:
    """A callback that reads gradients before the step gets plain Lightning's."""
    how: dict[str, Any] = {"device": "cuda", "model": exact(SharedStorages)}
    plain, other = train("auto", **how), train(streamed(), **how)
    assert_same(plain, other)
    for ones, others in zip(plain.gradients, other.gradients, strict=True):
        assert ones.keys() == others.keys()
        assert all(torch.equal(ones[name], others[name]) for name in ones)


class Wide(pl.LightningModule):
    """16 blocks of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(16))
        self.mean = MeanMetric()
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        loss = batch.square().mean()
        self.mean.update(loss.detach())  # the rest of the model is always resident
        assert self.device.type == self.mean.compute().device.type == "cuda"
        return loss

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def test_memory_is_that_of_the_units_at_hand(tmp_path: Path) -> None:
    """The device has a few units of 4 GiB of weights, gradients and states."""
    torch.use_deterministic_algorithms(False)
    model = Wide()
    before = torch.cuda.memory_allocated()
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=4, strategy=SSDOffloadStrategy(
            states="host", offload="none", gpu_memory="256MiB"
        ), logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64, 4096), batch_size=16))
    one = 4096 * 4096 * 4
    # Weights within the budget, gradients in flight, and the tensors of one block.
    assert max(model.peaks) - before < (4 + 4 + 4) * one
    assert torch.cuda.memory_allocated() - before < one


class Coupled(torch.optim.Optimizer):
    """Momentum and a norm over all parameters, for which those on the GPU must be moved to the others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
        for p in parameters:
            assert p.grad is not None
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            p.sub_(average.lerp_(p.grad, 0.1) / norm * self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("min_bytes", [1, 4000])
def test_a_coupled_optimizer_steps_whole_on_the_cpu(states: Any, min_bytes: int) -> None:
    """Its norms are summed in another order on the CPU, so that numbers are close."""

    class Model(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Coupled(self.parameters())

    arguments: dict[str, Any] = dict(device="cuda", model=Model, steps=5, recorded=False)
    strategy = SSDOffloadStrategy(states=states, min_bytes=min_bytes, offload="none")
    expected, actual = train("auto", **arguments), train(strategy, **arguments)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], weight, rtol=1e-3, atol=1e-5)


def test_blocks_that_thaw() -> None:
    """SGD by a power of two: bit for bit."""

    class Model(exact(TinyGPT)):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.model.transformer.h[0].requires_grad_(False)
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=2**-5)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 2:
                block = self.model.transformer.h[0].requires_grad_(True)
                self.trainer.optimizers[0].add_param_group({"params": list(block.parameters())})

    arguments: dict[str, Any] = dict(device="cuda", model=Model, steps=5, recorded=False)
    assert_same(train(streamed(), **arguments), train("auto", **arguments))
