"""Whole trainings with model states on SSD, or in tiers chosen by budgets, against plain Lightning."""

from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy, shared_gradients
from lightning_ssd.model_states import build
from lightning_ssd.model_states.placement import state_storage
from lightning_ssd.model_states.units import units
from lightning_ssd.storage import StorageError, StorageFullError
from tests.support.compare import assert_same
from tests.support.models import Block, Model
from tests.support.products import combinations, thorough
from tests.support.states import assert_nothing_is_left, loader, some_stay, ssd, train


# 8.0 is above the norm of some steps of `Model`, and below that of others.
@combinations(
    "overlap, clips, states",
    ["optimized", "naive", "none"],
    [("auto", None, 1), *product(["deferred", "speculative", "auto"], [0.5, 8.0], [1]), ("auto", 8.0, 3)],
    ["host", "ssd"],
    quick=[("optimized", ("auto", 8.0, 3), "ssd"), ("naive", ("speculative", 8.0, 1), "ssd")],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path, overlap: Any, clips: tuple[Any, float | None, int], states: str
) -> None:
    """Bit for bit in 32-true, in every mode, with checksums; no files remain."""
    clip, limit, accumulate = clips
    arguments = dict(accumulate_grad_batches=accumulate, gradient_clip_val=limit)
    expected = train(tmp_path, "auto", Model(), **arguments)
    strategy = ssd(states=states, overlap=overlap, clip=clip, checksum=True, gpu_memory="1B")
    assert_same(train(tmp_path, strategy, Model(), **arguments), expected)
    assert_nothing_is_left(tmp_path)


def test_some_steps_are_clipped_and_some_are_not(tmp_path: Path) -> None:
    """The test above assumes this."""
    norms: list[float] = []

    class Watching(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
            )

    train(tmp_path, "auto", Watching())
    assert min(norms) < 8.0 < max(norms)


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(12))


@pytest.mark.parametrize("host_memory", ["450kB", thorough("1GB")])
def test_states_that_fit_are_in_host_memory(tmp_path: Path, host_memory: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(tmp_path, "auto", Deep())
    with caplog.at_level("INFO"):
        assert_same(train(tmp_path, ssd(states="auto", gpu_memory="1B", host_memory=host_memory), Deep()), expected)
    assert ("host memory is short: rounded moments" in caplog.text) == (host_memory != "1GB")
    (line,) = [message for message in caplog.messages if "weights, gradients and optimizer states take" in message]
    assert ("0 B on SSDs" in line) == (host_memory == "1GB")


class Sparing(Deep):
    """Some units are used in part, and in some batches not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if self.training and index % 5 == self.global_step % 5:
                continue
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True) if index % 2 else block(x)
        for block in self.spare:
            x = x + block.up(x).sum(-1, keepdim=True) / 1000  # type: ignore[operator]
        logits: Tensor = self.head(x)
        return logits


@combinations("num_flat_params, accumulate, model", [1, 2], [1, 3], [Deep, Sparing], quick=[(1, 3, Sparing)])
def test_gradients_share_memory(
    tmp_path: Path, num_flat_params: int, accumulate: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is as small as one flat parameter's: backward waits for steps, and no step waits for backward."""
    monkeypatch.setattr(shared_gradients, "AT_ONCE", num_flat_params)
    arguments = dict(accumulate_grad_batches=accumulate)
    expected = train(tmp_path, "auto", model(), **arguments)
    assert_same(train(tmp_path, ssd(gpu_memory="1B"), model(), **arguments), expected)
    assert_nothing_is_left(tmp_path)


def test_parts_of_a_unit_that_fit_on_the_device_are_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of memory between the sizes of two units is used by a part of the second one."""
    found: list[set[str]] = []
    expected = train(tmp_path, "auto", Model(), gradient_clip_val=8.0)
    for least in (units.PART_ELEMENTS, 1024):
        monkeypatch.setattr(units, "PART_ELEMENTS", least)
        strategy = ssd(states="auto", gpu_memory="90kB")

        class Watching(Model):
            def on_train_start(self) -> None:
                states: Any = strategy.model_states  # noqa: B023
                offloaded = {view.name for flat in states.stores for view in flat.param_views}
                found.append({name for name, _ in self.named_parameters()} - offloaded)

        assert_same(train(tmp_path, strategy, Watching(), gradient_clip_val=8.0), expected)
    names = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.bias")
    assert found[1] - found[0] == {f"blocks.1.{name}" for name in names} and found[0]


@pytest.mark.parametrize(("gpu_memory", "leaves"), [("auto", False), ("1MB", False), ("10kB", True)])
def test_auto_keeps_states_that_fit_on_the_device(tmp_path: Path, gpu_memory: Any, leaves: bool) -> None:
    strategy = SSDOffloadStrategy(gpu_memory=gpu_memory, min_bytes=1)

    class Watching(Model):
        def on_train_start(self) -> None:
            assert (strategy.model_states is not None) == leaves

    assert_same(train(tmp_path, strategy, Watching()), train(tmp_path, "auto", Model()))


def test_auto_accepts_a_model_that_was_built_on_meta(tmp_path: Path) -> None:
    model: Any = train(tmp_path, SSDOffloadStrategy(), Built())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.head.weight is model.embed.weight


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "budgets",
    [
        {"ssd_capacity": "1MiB"},
        {"ssd_capacity": "1MiB", "host_memory": "200KiB"},
        {"ssd_capacity": "200MiB", "host_memory": "100MiB"},
        {"host_memory": "1MiB", "tier": "host"},
    ],
)
def test_activations_have_the_rest_of_the_budgets_that_states_do_not_use(
    tmp_path: Path, budgets: dict[str, Any]
) -> None:
    expected = train(tmp_path, "auto", Model())
    assert_same(train(tmp_path, ssd(offload="ssdtrain", **budgets), Model()), expected)
    assert_nothing_is_left(tmp_path)


def test_host_memory_alone_if_that_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ssd(states="auto", tier="host", gpu_memory="1B")
    with caplog.at_level("INFO", "lightning_ssd"):
        assert_same(train(tmp_path, strategy, Model()), train(tmp_path, "auto", Model()))
    assert any("and 0 B on SSDs" in message for message in caplog.messages)


def test_large_units_have_several_flats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STAGED_FLAT_ELEMENTS", 1000)
    expected = train(tmp_path, "auto", Model(), gradient_clip_val=8.0)
    assert_same(train(tmp_path, ssd(), Model(), gradient_clip_val=8.0), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ssd_capacity": "64KiB"}, StorageFullError, "64.00 KiB"),
        (
            {"states": "host", "host_memory": "10kB"},
            ValueError,
            "`host_memory` of 9.77 KiB is too small.*states='auto'",
        ),
        (
            {"states": "auto", "gpu_memory": "1B", "host_memory": "10kB"},
            ValueError,
            "`host_memory` of 9.77 KiB is too small",
        ),
        ({"path": "/nowhere"}, StorageError, "'/nowhere' does not exist"),
    ],
)
def test_plans_and_budgets_that_do_not_fit(tmp_path: Path, arguments: Any, error: Any, message: str) -> None:
    """No files remain, and the model has whole parameters."""
    model, before = Model(), Model().state_dict()
    trainer = pl.Trainer(accelerator="cpu", strategy=ssd(**arguments), max_epochs=1, default_root_dir=tmp_path,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    with pytest.raises(error, match=message):
        trainer.fit(model, loader())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_nothing_is_left(tmp_path)


def test_memory_that_runs_out_during_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that had been moved are whole again."""
    model, before = Model(), Model().state_dict()
    made = state_storage.make_buffer
    places: list[Any] = []

    def make_buffer(*args: Any, **kwargs: Any) -> Any:
        places.append(None)
        if len(places) == 6:
            raise StorageError("could not take 4 GiB of host memory")
        return made(*args, **kwargs)

    monkeypatch.setattr(state_storage, "make_buffer", make_buffer)
    trainer = pl.Trainer(accelerator="cpu", strategy=ssd(), max_epochs=1, default_root_dir=tmp_path, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    with pytest.raises(StorageError, match="could not take"):
        trainer.fit(model, loader())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_nothing_is_left(tmp_path)


# ---- evaluation alone ----


@pytest.mark.parametrize(
    ("states", "precision"), [("host", "32-true"), ("ssd", "64-true"), ("host", "16-true"), ("ssd", "bf16-true")]
)
def test_evaluation_of_a_model_that_was_never_trained(tmp_path: Path, states: str, precision: Any) -> None:
    class Evaluated(Model):
        def on_test_start(self) -> None:
            with torch.no_grad():
                self.blocks[0].up.weight.div_(3)
                self.losses.append(float(self.blocks[0].up.weight.norm()))
            states = getattr(self.trainer.strategy, "model_states", None)
            assert states is None or self.blocks[0].up.weight in states.parameters

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.losses.append(self.loss(batch[0]).item())

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0])

    def evaluate(strategy: Any) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
        model = Evaluated()
        trainer = pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, default_root_dir=tmp_path, precision=precision)  # fmt: skip
        trainer.validate(model, loader(2))
        trainer.test(model, loader(2))
        predicted: Any = trainer.predict(model, loader(2))
        return model.losses, predicted, model.state_dict()

    losses, predicted, weights = evaluate("auto")
    actual = evaluate(ssd(states=states, gpu_memory="1B"))
    assert actual[0] == losses and len(losses) == 5
    assert all(torch.equal(a, b) for a, b in zip(actual[1], predicted, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in actual[2].items())
    assert weights["head.weight"].dtype == actual[2]["head.weight"].dtype
    assert_nothing_is_left(tmp_path)


# ---- models that are built on meta ----


class Built(Model):
    """`Model`, made in `configure_model` on `meta`."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.losses = []
        self.rates = []
        self.made = False

    def configure_model(self) -> None:
        if not self.made:
            self.made = True
            with torch.device("meta"):
                made = Model()
            self.embed, self.blocks, self.head = made.embed, made.blocks, made.head
            self.make_optimizer, self.groups = made.make_optimizer, False


def test_a_model_that_was_built_on_meta(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model: Any = train(tmp_path, ssd(), Built(), max_epochs=6)
    assert model.head.weight is model.embed.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.blocks[0].norm.weight > 0.5, torch.ones(16, dtype=torch.bool))
    assert torch.isfinite(torch.tensor(model.losses)).all()
    for name, parameter in model.named_parameters():
        assert 0 < parameter.std() < 1.5 or name.endswith("norm.weight"), name


def test_init_module_on_meta(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", strategy=ssd(), max_epochs=1, default_root_dir=tmp_path, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    with trainer.init_module(empty_init=True):
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    trainer.fit(model, loader())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_parameters_and_buffers_that_are_not_initialized(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

    class Buffered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("table", torch.arange(16.0))

    for kind, message in ((Scaled, "parameter 'scale.scale' .*Scaled has no `reset_parameters`"),
                          (Buffered, "buffer 'table' of Buffered was built on `meta`")):  # fmt: skip

        class Wrong(Built):
            def configure_model(self) -> None:
                super().configure_model()
                with torch.device("meta"):
                    self.scale = kind()  # noqa: B023

        with pytest.raises(ValueError, match=message):
            train(tmp_path, ssd(), Wrong())
        assert_nothing_is_left(tmp_path)


# ---- bf16-true ----


@combinations(
    "accumulate, strategy",
    [1, 2],
    [{"states": "host"}, {"states": "ssd"}, {"states": "auto", "gpu_memory": "90kB"}],
    quick=[(1, {"states": "ssd"}), (2, {"states": "auto", "gpu_memory": "90kB"})],
)
def test_bf16_true_has_fp32_masters(tmp_path: Path, strategy: dict[str, Any], accumulate: int) -> None:
    """Equals a loop with bf16 weights whose fp32 masters torch's fused AdamW steps, with sums in fp32, bit for bit."""
    model = Model()
    reference = Model().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses: list[float] = []
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5**epoch
        for batch, (tokens,) in enumerate(loader()):
            loss = reference.loss(tokens)
            losses.append(loss.item())
            (loss / accumulate).backward()
            for master, parameter in zip(masters, reference.parameters(), strict=True):
                grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
                master.grad = grad if master.grad is None else master.grad + grad
            if (batch + 1) % accumulate and batch + 1 < len(loader()):
                continue
            optimizer.step()
            optimizer.zero_grad()
            for master, parameter in zip(masters, reference.parameters(), strict=True):
                parameter.data.copy_(master)
    trained: Any = train(
        tmp_path,
        ssd(**strategy),
        model,
        precision="bf16-true",
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
    )
    assert trained.losses == losses
    for actual, expected in zip(trained.parameters(), reference.parameters(), strict=True):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


class Residents(pl.Callback):
    """Counts the resident parameters with masters."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.masters = [parameter for parameter in pl_module.parameters() if id(parameter) not in of_optimizer]


def test_masters_of_resident_parameters(tmp_path: Path) -> None:
    """They are clipped, saved, resumed, evaluated and averaged like others; then the optimizer has the parameters."""
    residents = Residents()

    def callbacks(name: str) -> list[pl.Callback]:
        saved = pl.callbacks.ModelCheckpoint(tmp_path / name, save_last=True, every_n_epochs=1)
        return [residents, saved, pl.callbacks.EMAWeightAveraging(decay=0.9)]

    how: Any = dict(precision="bf16-true", gradient_clip_val=4.0, enable_checkpointing=True)
    whole: Any = train(tmp_path, some_stay(), Model(), callbacks=callbacks("whole"), max_epochs=2, **how)
    assert 0 < len(residents.masters) < len(list(whole.parameters()))
    saved = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=False)
    assert all(value.dtype == torch.float32 for value in saved["state_dict"].values())
    expected: Any = train(tmp_path, ssd(states="host"), Model(), callbacks=callbacks("others"), max_epochs=2, **how)
    other = torch.load(tmp_path / "others" / "last.ckpt", weights_only=False)
    assert_same(whole, expected)
    for name, value in saved["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    train(tmp_path, some_stay(), Model(), callbacks=callbacks("half"), max_epochs=1, **how)
    last = str(tmp_path / "half" / "last.ckpt")
    found: Any = train(tmp_path, some_stay(), Model(), callbacks=callbacks("rest"), max_epochs=2, ckpt_path=last, **how)
    assert found.losses == expected.losses[-len(found.losses) :]
    optimizer = found.optimizers().optimizer if hasattr(found.optimizers(), "optimizer") else found.optimizers()
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == {
        id(parameter) for parameter in found.parameters()
    }


def test_masters_wait_for_hooks_that_read_gradients(tmp_path: Path) -> None:
    class Watching(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert all(parameter.grad is not None for parameter in self.parameters())

    how: Any = dict(precision="bf16-true", limit_val_batches=0)
    assert_same(train(tmp_path, some_stay(), Watching(), **how), train(tmp_path, some_stay(), Model(), **how))
