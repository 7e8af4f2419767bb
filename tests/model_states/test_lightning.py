"""Lightning's output and user code with offloaded states are the same as in plain Lightning."""

import copy
import csv
import dataclasses
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import load_sharded
from lightning_ssd.model_states.checkpoints.lazy import LazyTensor
from lightning_ssd.run import CheckpointFiles
from lightning_ssd.storage import StorageError
from tests.support.compare import assert_same, same
from tests.support.faults import FaultyBackend
from tests.support.garbage import collect
from tests.support.models import BlocksModel, Model, adamw
from tests.support.products import thorough
from tests.support.states import STEPS, host, loader, ssd, train
from tests.support.trainings import fit, make_trainer, rows

STRATEGIES = {"host": host, "ssd": ssd, "speculative": lambda: ssd(clip="speculative")}


NAMES = [name if name == "ssd" else thorough(name) for name in STRATEGIES]


@pytest.fixture(params=NAMES)
def strategy(request: pytest.FixtureRequest) -> Any:
    return STRATEGIES[request.param]()


def test_fifty_steps(tmp_path: Path, strategy: Any) -> None:
    how: Any = dict(max_epochs=8, gradient_clip_val=4.0)
    expected: Any = train(tmp_path, "auto", Model(), **how)
    assert_same(train(tmp_path, strategy, Model(), **how), expected)
    assert len(expected.losses) >= 50


class Shown(Model):
    """Records Lightning's output, steps schedulers of every kind, and edits the optimizer's groups."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "val"},
            {"scheduler": cosine, "interval": "step"},
        ]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.shown.append((self.global_step, optimizer.param_groups[0]["lr"], dict(self.trainer.callback_metrics)))
        if self.global_step == 7:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        self.shown.append(copy.deepcopy(optimizer.optimizer.state_dict()))
        self.shown.append({name: value.clone() for name, value in self.state_dict().items()})


def test_lightning_logs_and_saves_the_same(tmp_path: Path, strategy: Any) -> None:
    """Steps, rates, metrics, state dicts; schedulers by step and by metric; a group that is edited."""
    monitors = [pl.callbacks.LearningRateMonitor() for _ in range(2)]
    runs: list[Any] = []
    for how, monitor in (("auto", monitors[0]), (strategy, monitors[1])):
        logger = pl.loggers.CSVLogger(tmp_path / str(len(runs)))
        runs.append(train(tmp_path, how, Shown(), max_epochs=3, logger=logger, callbacks=[monitor],
                          gradient_clip_val=8.0, log_every_n_steps=1))  # fmt: skip
    assert_same(runs[1], runs[0])
    assert len(runs[0].shown) > 3 * STEPS and same(runs[1].shown, runs[0].shown)
    logged = []
    for index in range(2):
        (file,) = (tmp_path / str(index)).rglob("metrics.csv")
        rows = list(csv.DictReader(file.open()))
        logged.append([(row["step"], row["lr-AdamW"], row["lr-AdamW-1"]) for row in rows if row["lr-AdamW-1"]])
    assert logged[0] == logged[1] and len(logged[0]) >= 3 * STEPS


@pytest.mark.parametrize(("algorithm", "value"), [("value", 0.05), ("norm", 0), ("value", -1.0)])
def test_clipping_by_a_value_or_norm_above_0(tmp_path: Path, strategy: Any, algorithm: str, value: float) -> None:
    how: Any = dict(gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    assert_same(train(tmp_path, strategy, Model(), **how), train(tmp_path, "auto", Model(), **how))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=["fp64", "complex"])
def test_clipping_by_norm_with_parameters_that_are_kept_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch adds the norms dtype by dtype, and clips in fp64 if a gradient has it.

    Gradients without dimensions are then multiplied in fp64, too.
    """

    class Mixed(BlocksModel):
        def __init__(self) -> None:
            super().__init__(partial(torch.optim.AdamW, lr=1e-2))
            self.extra = nn.Parameter(torch.randn(8, dtype=dtype))
            self.scales = nn.ParameterList(torch.randn(()) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x + scale * super().forward(x)
            return x + self.extra.abs().float()

    expected, actual = (
        fit(tmp_path, how, Mixed(), rows(8), gradient_clip_val=0.1, max_epochs=2) for how in ("auto", host())
    )
    assert_same(actual, expected)


def test_accumulation_that_changes(tmp_path: Path, strategy: Any) -> None:
    def how() -> Any:
        scheduler = pl.callbacks.GradientAccumulationScheduler({0: 3, 1: 1, 2: 5})
        return dict(max_epochs=3, callbacks=[scheduler], gradient_clip_val=8.0)

    assert_same(train(tmp_path, strategy, Model(), **how()), train(tmp_path, "auto", Model(), **how()))


@pytest.mark.parametrize(("skipped", "fused", "clip"), [(0, True, None), (1, False, 0.05)])
def test_a_skipped_micro_batch_of_a_scaled_loss(
    tmp_path: Path, strategy: Any, skipped: int, fused: bool, clip: float | None
) -> None:
    """If the last micro-batch of a step has no loss, plain Lightning steps nothing and drops the other gradients."""

    class Skips(Model):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (2 + skipped, 6 + skipped) else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)

    found = []
    for how in ("auto", strategy):
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
        arguments: Any = dict(gradient_clip_val=clip, accumulate_grad_batches=2, plugins=[plugin])
        found.append(train(tmp_path, how, Skips(), **arguments))
    assert_same(found[1], found[0])


def test_fit_after_fit(tmp_path: Path) -> None:
    """The same Trainer, then another one with another strategy, on the same module."""

    def fits(first: Any, second: Any) -> Model:
        model = Model()
        trainer = make_trainer(tmp_path, first)
        trainer.fit(model, loader())
        trainer.validate(model, loader(2))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader())
        make_trainer(tmp_path, second).fit(model, loader())
        return model

    expected = fits("auto", "auto")
    assert_same(fits(ssd(), host()), expected)
    assert_same(fits(host(), "auto"), expected)


class EverySecond(pl.callbacks.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 1


class EverySecondCall(pl.callbacks.WeightAveraging):
    """Counts the calls of `should_update`."""

    count = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self.count += 1
        return self.count % 2 == 1


class AtRandom(pl.callbacks.WeightAveraging):
    """Draws from the training's random number generator, from which dropout draws, too."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and bool(torch.rand(()) < 0.5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "make_callback",
    [
        lambda: pl.callbacks.EMAWeightAveraging(decay=0.9),
        EverySecond,
        EverySecondCall,
        AtRandom,
        lambda: pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=2),
    ],
    ids=["EMA", "every second step", "every second call", "at random", "SWA"],
)
def test_averages_of_weights(tmp_path: Path, strategy: Any, make_callback: Any) -> None:
    """Averages are used in validation as in Lightning, are in the model at the end, and are saved."""
    how: Any = dict(max_epochs=4, gradient_clip_val=None)
    callback = make_callback()
    expected: Any = train(tmp_path, "auto", Model(), callbacks=[make_callback()], **how)
    plain: Any = train(tmp_path, "auto", Model(), **how)
    assert_same(train(tmp_path, strategy, Model(), callbacks=[callback], **how), expected)
    assert any(
        not torch.equal(one, other) for one, other in zip(plain.parameters(), expected.parameters(), strict=True)
    )
    assert not [name for name in vars(callback) if name.startswith(("on_", "should_"))]


class OfManyDtypes(Model):
    """Has weights that are never offloaded, and buffers, in dtypes other than fp32."""

    def __init__(self, weights: torch.dtype, buffers: torch.dtype) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((16,), 0.1, dtype=weights))
        self.register_buffer("mean", torch.full((16,), 0.1, dtype=buffers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift.float() + self.mean.float()
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("part", ["weights", "buffers"])
def test_averages_of_weights_and_buffers_keep_their_dtypes(
    tmp_path: Path, strategy: Any, part: str, dtype: torch.dtype
) -> None:
    def trained(strategy: Any) -> Any:
        callback = pl.callbacks.EMAWeightAveraging(decay=0.9)
        model = OfManyDtypes(**{"weights": torch.float32, "buffers": torch.float32, part: dtype})  # type: ignore[arg-type]
        return train(tmp_path, strategy, model, callbacks=[callback])

    expected, found = trained("auto"), trained(strategy)
    assert_same(found, expected)
    assert same(dict(found.named_buffers()), dict(expected.named_buffers()))


def test_whole_weights_can_be_read_and_changed(tmp_path: Path, strategy: Any) -> None:
    class Shrinking(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            if isinstance(self.trainer.strategy, SSDOffloadStrategy):
                with self.trainer.strategy.whole_weights(), self.trainer.strategy.whole_weights():
                    self.shrink()
            else:
                self.shrink()

        def shrink(self) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.9)

    how: Any = dict(gradient_clip_val=None)
    assert_same(train(tmp_path, strategy, Shrinking(), **how), train(tmp_path, "auto", Shrinking(), **how))


def test_masters_are_swapped_with_an_average_whole(tmp_path: Path, strategy: Any) -> None:
    """In bf16-true an average that is never updated changes nothing, although every validation exchanges it twice."""

    class Never(pl.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return False

        def on_train_end(self, *_: Any) -> None:
            pass

    def weights(strategy: Any, callbacks: list[pl.Callback]) -> Any:
        model = Model().bfloat16()  # as `trainer.init_module` builds it
        trained: Any = train(tmp_path, strategy, model, callbacks=callbacks, precision="bf16-true")
        return list(trained.parameters())

    assert_same(weights(strategy, [Never()]), weights(host(), []))


# ---- after training ----


def fitted(path: Path, strategy: Any, model: pl.LightningModule | None = None, **arguments: Any) -> pl.Trainer:
    trainer = make_trainer(path, strategy, **arguments)
    trainer.fit(Model() if model is None else model, loader())
    return trainer


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make_optimizer", [adamw, lambda p: torch.optim.Adagrad(p, lr=0.1)], ids=["AdamW", "Adagrad"])
@pytest.mark.parametrize("checkpoints", ["file", "sharded"])
def test_a_checkpoint_that_is_saved_after_training_has_optimizer_states(
    tmp_path: Path, strategy: Any, checkpoints: Any, make_optimizer: Any
) -> None:
    """It equals plain Lightning's, also after an evaluation, and either strategy resumes from the other's."""
    strategy._checkpoints = CheckpointFiles(checkpoints)
    plain = fitted(tmp_path, "auto", Model(make_optimizer))
    ours = fitted(tmp_path, strategy, Model(make_optimizer))
    assert not list(tmp_path.rglob("lightning_ssd-*"))
    contents = []
    for name, trainer in (("plain", plain), ("ours", ours)):
        trainer.validate(trainer.lightning_module, loader(1), verbose=False)
        trainer.save_checkpoint(tmp_path / name)
        sharded = (tmp_path / name).is_dir()
        assert sharded == (name == "ours" and checkpoints == "sharded")
        load = load_sharded if sharded else partial(torch.load, weights_only=False)
        contents.append(load(tmp_path / name))
    assert len(contents[0]["optimizer_states"][0]["state"]) == 25
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert same(contents[1][part], contents[0][part]), part

    def resumed(how: Any, name: str) -> Any:
        model = Model(make_optimizer)
        trainer = make_trainer(tmp_path, how, max_epochs=2)
        trainer.fit(model, loader(), ckpt_path=str(tmp_path / name))
        return model

    expected = resumed("auto", "plain")
    assert_same(resumed(host(), "ours"), expected)
    assert_same(resumed(ssd(), "plain"), expected)
    if checkpoints == "file":
        assert_same(resumed("auto", "ours"), expected)


def open_scratch_files() -> list[str]:
    files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]  # not that of the listing
    return [str(path) for path in files if "scratch.bin" in os.readlink(path)]


def test_optimizer_states_on_ssds_are_kept_there_until_the_optimizer_is_freed(tmp_path: Path) -> None:
    collect()
    others = len(open_scratch_files())  # of optimizers of other tests
    trainer = fitted(tmp_path, ssd())
    (optimizer,) = trainer.optimizers
    tensors = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    lazy = [value for value in tensors if isinstance(value, LazyTensor)]
    assert len(lazy) == len(tensors) and all(value._loaded is None for value in lazy)
    assert len(open_scratch_files()) == others + 1 and not list(tmp_path.rglob("lightning_ssd-*"))
    assert copy.deepcopy(optimizer.state_dict())["state"] and type(lazy[0]) is Tensor
    del optimizer, tensors, lazy, trainer
    collect()
    assert len(open_scratch_files()) <= others


@dataclasses.dataclass(frozen=True)
class Result:
    """A user's record of a training."""

    name: str
    settings: Any
    optimizer: torch.optim.Optimizer


def test_optimizers_are_copied_with_other_objects(tmp_path: Path, strategy: Any) -> None:
    trainer, plain = fitted(tmp_path, strategy), fitted(tmp_path, "auto")
    settings = Result("settings", None, None)  # type: ignore[arg-type]
    copied = copy.deepcopy(Result("result", settings, trainer.optimizers[0]))
    assert copied.optimizer is not trainer.optimizers[0]
    assert_same(copied.optimizer.state_dict()["state"], plain.optimizers[0].state_dict()["state"])


class Keeping(Model):
    """Returns the same optimizer in every fit."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = self.make_optimizer(list(self.parameters()))
        return self.kept


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make_optimizer", [adamw, lambda p: torch.optim.Adagrad(p, lr=0.1)], ids=["AdamW", "Adagrad"])
def test_an_optimizer_of_two_fits_keeps_its_states(tmp_path: Path, make_optimizer: Any) -> None:
    def twice(first: Any, second: Any) -> Any:
        model = Keeping(make_optimizer)
        fitted(tmp_path, first, model)
        fitted(tmp_path, second, model)
        return model

    expected = twice("auto", "auto")
    for first, second in ((ssd(), host()), (host(), "auto"), ("auto", ssd()), (ssd(), ssd())):
        assert_same(twice(first, second), expected)


def test_states_of_a_step_that_failed_are_not_saved_as_if_they_were_whole(tmp_path: Path) -> None:
    storage = FaultyBackend()
    strategy = ssd(backend=storage)

    class Failing(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                storage.error["write"] = OSError(errno.EIO, "Input/output error")

    trainer = None
    with pytest.raises(StorageError):
        model = Failing()
        trainer = make_trainer(tmp_path, strategy)
        trainer.fit(model, loader())
    assert trainer is not None
    with pytest.raises(RuntimeError, match="optimizer states of .* are not available"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert not (tmp_path / "after.ckpt").exists()


def _evaluate(module: Any, trainer: Any) -> None:
    trainer.validate(module, loader(), verbose=False)


def _evaluate_by_same_strategy(module: Any, trainer: Any) -> None:
    other = pl.Trainer(strategy=trainer.strategy, logger=False, enable_progress_bar=False)
    other.validate(module, loader(), verbose=False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("act", [_evaluate, _evaluate_by_same_strategy])
def test_a_run_within_a_run_of_the_same_strategy_is_refused(tmp_path: Path, act: Any) -> None:
    """Model states of the outer run are restored; in `on_fit_end`, as the message says, they are already."""
    trained: list[Any] = []

    class Nested(Model):
        def __init__(self, hook: str) -> None:
            super().__init__()
            self.hook = hook

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.loss(batch[0])

        def on_train_end(self) -> None:
            trained.append(self)
            if self.hook == "on_train_end":
                act(self, self.trainer)

        def on_fit_end(self) -> None:
            if self.hook == "on_fit_end":
                act(self, self.trainer)

    train(tmp_path, "auto", Nested(""))
    with pytest.raises(RuntimeError, match="ssd_offload strategy.* has not ended.*`on_fit_end`"):
        train(tmp_path, ssd(), Nested("on_train_end"))
    train(tmp_path, ssd(), Nested("on_fit_end"))
    plain, *ours = trained
    for module in ours:
        assert same(module.state_dict(), plain.state_dict())
        assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


class SavesInHooks(Model):
    """Saves a checkpoint in hooks of validation, test and prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Any] = []

    def save(self) -> None:
        path = Path(self.trainer.default_root_dir) / "in_hook.ckpt"
        self.trainer.save_checkpoint(path)
        self.saved.append(torch.load(path, weights_only=False))
        path.unlink()

    def on_validation_start(self) -> None:
        self.save()

    def on_validation_end(self) -> None:
        self.save()

    def on_test_epoch_end(self) -> None:
        self.save()

    def on_predict_end(self) -> None:
        self.save()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0]).item())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


def test_a_checkpoint_that_an_evaluation_after_training_saves_is_that_of_plain_lightning(
    tmp_path: Path, strategy: Any
) -> None:
    def evaluated(strategy: Any) -> SavesInHooks:
        model = SavesInHooks()
        trainer = fitted(tmp_path, strategy, model)
        trainer.validate(model, loader(1), verbose=False)
        trainer.test(model, loader(1), verbose=False)
        trainer.predict(model, loader(1))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader())
        return model

    found, expected = evaluated(strategy), evaluated("auto")
    assert found.losses == expected.losses
    assert len(found.saved) == 4 and len(found.saved[0]["optimizer_states"][0]["state"]) == 25
    for mine, theirs in zip(found.saved, expected.saved, strict=True):
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            assert same(mine[part], theirs[part]), part
