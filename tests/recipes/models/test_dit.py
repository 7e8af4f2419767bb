"""DiT draws its noise from the position in the training, samples without random numbers, and resumes exactly."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import ImageDataModule
from lightning_ssd.recipes.models import DiT, SampleGrid
from tests.support.compare import assert_same
from tests.support.trainings import make_trainer


def tiny(**settings: Any) -> DiT:
    sizes = {"image_size": 8, "in_channels": 1, "patch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    return DiT(**{**sizes, "num_classes": 10, "warmup_steps": 2, "lr": 1e-2, **settings})


class Losses(pl.Callback):
    """Keeps the losses of training and of validation."""

    def __init__(self) -> None:
        self.training: list[Tensor] = []
        self.validation: list[Tensor] = []

    @property
    def values(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.training, self.validation

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.training.append(outputs["loss"].detach().clone())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validation.append(trainer.callback_metrics["val/loss"].clone())


def fit(folder: Path, model: DiT, strategy: Any = "auto", callbacks: Any = (), **settings: Any) -> tuple[Losses, Any]:
    losses = Losses()
    how = {
        "max_epochs": None,
        "max_steps": 4,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
    }
    resume = settings.pop("ckpt_path", None)
    torch.manual_seed(settings.pop("seed", 0))  # of the weights; the Trainer builds the model
    data = settings.pop("data", None) or ImageDataModule(batch_size=4)
    trainer = make_trainer(folder, strategy, callbacks=[losses, *callbacks], num_sanity_val_steps=0, **how | settings)
    trainer.fit(model, data, ckpt_path=resume)
    assert losses.training
    return losses, trainer


def grids(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


ALL = {"offload": 1.0, "min_bytes": 1, "host_memory": "64MiB"}
PLACES = {
    "all on SSD": {**ALL, "states": "ssd", "gpu_memory": "1B", "ssd_capacity": "64MiB"},
    "activations in host memory": {**ALL, "tier": "host", "states": "gpu"},
    "activations on SSD": {**ALL, "host_memory": 0, "states": "gpu", "ssd_capacity": "64MiB"},
    "states in host memory": {"offload": "none", "states": "host", "host_memory": "64MiB"},
    "states on SSD": {"offload": "none", "states": "ssd", "host_memory": "64MiB", "gpu_memory": "1B"},
}


def check_parity(tmp_path: Path, place: str, **settings: Any) -> None:
    """Losses, weights, and samples drawn during the training, equal plain Lightning's."""
    trainer = {key: settings.pop(key) for key in ("accumulate_grad_batches", "precision") if key in settings}
    how: dict[str, Any] = {"gradient_clip_val": 1.0, **trainer}
    plain, offloaded = tiny(**settings), tiny(**settings)
    grid = {"columns": 1, "classes": 3, "steps": 2}
    expected, _ = fit(tmp_path / "plain", plain, callbacks=[SampleGrid(**grid)], **how)
    strategy = SSDOffloadStrategy(**PLACES[place])  # type: ignore[arg-type]
    found, _ = fit(tmp_path / "offloaded", offloaded, strategy, [SampleGrid(**grid)], **how)
    assert_same((plain, expected.values), (offloaded, found.values))
    assert len(grids(tmp_path / "plain")) >= 2 and grids(tmp_path / "plain") == grids(tmp_path / "offloaded")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_offload_changes_no_bit(tmp_path: Path, place: str, checkpointing: bool, precision: str) -> None:
    how: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": precision}
    check_parity(tmp_path, place, gradient_checkpointing=checkpointing, **how)


def test_recomputing_changes_no_bit(tmp_path: Path) -> None:
    kept, recomputed = tiny(), tiny(gradient_checkpointing=True)
    first, _ = fit(tmp_path, kept, max_steps=2)
    second, _ = fit(tmp_path, recomputed, max_steps=2)
    assert recomputed.model is not None and recomputed.model.transformer.gradient_checkpointing  # type: ignore[union-attr]
    assert_same((kept, first.values), (recomputed, second.values))


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ssd", marks=pytest.mark.thorough)])
def test_resumed_run_draws_the_noise_of_the_run_that_was_not_interrupted(tmp_path: Path, strategy: str) -> None:
    def place() -> Any:
        return strategy if strategy == "auto" else SSDOffloadStrategy(**PLACES["all on SSD"])  # type: ignore[arg-type]

    whole = tiny()
    # Two steps, a checkpoint; the learning rate's schedule is that of the whole run.
    losses, _ = fit(tmp_path, whole, place(), [Save(tmp_path / "two.ckpt", at=2)])
    resumed = tiny()
    # A checkpoint of Lightning does not restore the global generators.
    later, _ = fit(tmp_path, resumed, place(), ckpt_path=tmp_path / "two.ckpt", seed=99)
    assert later.training == losses.training[2:] and len(later.training) == 2
    assert resumed.seen == whole.seen == 16
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


class Save(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


def test_sampling_does_not_change_the_random_numbers_of_training(tmp_path: Path) -> None:
    states = []
    for callbacks in ([SampleGrid(columns=1, steps=1)], []):
        losses, _ = fit(tmp_path, tiny(), callbacks=callbacks)
        states.append((losses.training, torch.get_rng_state()))
    assert states[0][0] == states[1][0] and torch.equal(states[0][1], states[1][1])


def test_noise_differs_between_micro_batches_ranks_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(model: DiT, seen: int, rank: int) -> float:
        monkeypatch.setattr(DiT, "global_rank", rank)
        torch.manual_seed(0)
        model.configure_model()
        model.seen = seen
        return model.training_loss(batch).item()

    batch = {"images": torch.zeros(4, 1, 8, 8), "labels": torch.arange(4)}
    values = [losses(tiny(noise_seed=seed), seen, rank) for seed in (0, 1) for seen in (0, 4) for rank in (0, 1)]
    assert len(set(values)) == 8
    assert losses(tiny(), 0, 0) == values[0]


def test_labels_are_dropped_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(label_dropout=0.25)
    seen: list[Tensor] = []
    monkeypatch.setattr(DiT, "forward", lambda self, images, timesteps, labels: seen.append(labels) or images)
    model.training_loss({"images": torch.zeros(4000, 1, 8, 8), "labels": torch.arange(4000) % 10})
    dropped = seen[0] == -1
    assert 0.22 < dropped.float().mean() < 0.28
    assert torch.equal(seen[0][~dropped], (torch.arange(4000) % 10)[~dropped])
    model.evaluate({"images": torch.zeros(40, 1, 8, 8), "labels": torch.arange(40) % 10})
    assert torch.equal(seen[1], torch.arange(40) % 10)


def trained() -> DiT:
    """Returns a model whose blocks are not the identity, as after a training."""
    torch.manual_seed(0)
    model = tiny()
    model.configure_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def test_new_model_predicts_nothing_and_a_trained_one_heeds_timestep_and_label() -> None:
    fresh = tiny()
    fresh.configure_model()
    images, times, labels = torch.randn(2, 1, 8, 8), torch.tensor([3, 3]), torch.tensor([1, 1])
    assert not fresh(images, times, labels).any()  # adaLN-zero
    model = trained()
    base = model(images, times, labels)
    for changed in (
        model(images, times + 400, labels),
        model(images, times, labels + 1),
        model(images, times, -labels),
    ):
        assert not torch.allclose(base, changed)


def test_guidance_extrapolates_from_no_label() -> None:
    model, noise = trained(), torch.randn(3, 1, 8, 8)
    labels = torch.arange(3)
    unguided, none, guided = (model.sample(noise, labels, steps=1, guidance=scale) for scale in (1.0, 0.0, 2.0))
    without = model.sample(noise, torch.full_like(labels, -1), steps=1, guidance=1.0)
    torch.testing.assert_close(none, without)
    assert not torch.equal(unguided, none) and not torch.equal(guided, unguided)
    assert guided.abs().max() <= 1  # clipped
    assert torch.equal(model.sample(noise, labels, steps=3), model.sample(noise, labels, steps=3))


def test_conditioning_is_shared_by_all_blocks() -> None:
    model = tiny(num_layers=3)
    model.configure_model()
    names = [name for name, _ in model.named_parameters() if "embed" in name and "pos_embed" not in name]
    assert len(names) == 5 and all(name.startswith("model.embedding.") for name in names)


def test_model_built_on_meta_has_the_values_of_one_that_was_not(tmp_path: Path) -> None:
    class OnMeta(DiT):
        def configure_model(self) -> None:
            if self.model is None:
                with torch.device("meta"):
                    super().configure_model()

    model = tiny()
    settings = dict(model.hparams)
    arguments = {**PLACES["states in host memory"], "gpu_memory": "1B"}
    late = OnMeta(**{**settings, "lr": 0.0})
    fit(tmp_path, late, SSDOffloadStrategy(**arguments), max_steps=1)  # type: ignore[arg-type]
    model.configure_model()
    for (name, mine), theirs in zip(late.named_parameters(), model.parameters(), strict=True):
        assert bool(mine.any()) == bool(theirs.any()), name
        if mine.any():
            assert 0.5 < mine.std() / theirs.std() < 2, name
    for (name, buffer), other in zip(late.named_buffers(), model.buffers(), strict=True):
        if "pos_embed" in name:
            assert torch.equal(buffer, other)


def test_flops_are_those_of_the_matrix_products() -> None:
    model = tiny(in_channels=3)
    model.configure_model()
    batch = {"images": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(batch["images"], torch.zeros(2, dtype=torch.int64), batch["labels"])
    assert counter.get_total_flops() == model.forward_flops(batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 9}, r"model\.image_size=9 is not a multiple of model\.patch_size=4"),
        ({"num_heads": 3}, r"model\.hidden_size=16 is not a multiple of 4 and of model\.num_heads=3"),
        ({"patch_size": 0}, r"model\.patch_size=0 is out of range: set it to 1 or more"),
        ({"num_heads": 0}, r"model\.num_heads=0 is out of range"),
        ({"num_layers": -1}, r"model\.num_layers=-1 is out of range"),
        ({"label_dropout": 1.0}, r"model\.label_dropout=1\.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 16}, r"8 pixels a side and the model 16: set model\.image_size=8"),
        ({"in_channels": 3}, r"1 channels and the model 3: set model\.in_channels=1"),
        ({"num_classes": 9}, r"10 classes and the model 9: set model\.num_classes=10"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_training(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, tiny(**settings))


@pytest.mark.parametrize(
    ("images", "label", "message"),
    [
        (torch.zeros(1, 8, 8), 10, r"Labels from 0 to 10 .*0 to 9: raise model\.num_classes"),
        (torch.zeros(1, 8, 8), -2, r"Labels from -2 to 0 "),
        (torch.zeros(1, 12, 12), 1, r"shape \(1, 12, 12\) and the model takes \(1, 8, 8\)"),
    ],
)
def test_batches_of_other_loaders_are_checked(tmp_path: Path, images: Tensor, label: int, message: str) -> None:
    rows = [{"images": images, "labels": torch.tensor(value)} for value in (0, label)]
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, tiny(), data=DataLoader(rows, batch_size=2), limit_val_batches=0, val_check_interval=None)  # type: ignore[arg-type]


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ModuleNotFoundError, match=r"DiT needs diffusers.*pip install 'lightning-ssd\[images\]'"):
        tiny()


def test_grid_needs_a_dit(tmp_path: Path) -> None:
    class Other(pl.LightningModule):
        pass

    with pytest.raises(TypeError, match="SampleGrid samples from a .*DiT, not Other"):
        SampleGrid().setup(None, Other(), "fit")  # type: ignore[arg-type]
