"""Runs that resume from a record with one changed setting: the setting is refused by name, or logged."""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssd.model_states.journal.journal import identity_of
from lightning_ssd.model_states.stores.layout import Layout
from lightning_ssd.storage import StorageError
from tests.support.killed import KEPT, FailAt, Failure, Model, apart, fit, outcome, recovering, same
from tests.support.state_stores import make_layout


class Small(Model):
    """Has settings that a subclass changes, a resident parameter, and buffers of both kinds."""

    activation: Callable[[], nn.Module] = nn.Tanh
    dropout = 0.2
    name = "scale"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = dict(lr=1e-3, fused=True)
    step_size = 3
    table_value = 1.0
    shift_value = 1.0
    hyper = 1

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"hyper": self.hyper})
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), self.activation(), nn.Dropout(self.dropout)) for _ in range(2))
        )
        self.register_parameter(self.name, nn.Parameter(torch.ones(1)))
        self.register_buffer("table", torch.full((3,), self.table_value), persistent=False)
        self.register_buffer("shift", torch.full((3,), self.shift_value))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * getattr(self, self.name).sum()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def changed(**attributes: Any) -> type[pl.LightningModule]:
    """Returns a class of the same name with other attributes."""
    return type("Small", (Small,), attributes | {"__module__": __name__, "__qualname__": "Small"})


def data(rows: int = 16, batch_size: int = 4, **arguments: Any) -> Callable[[], Any]:
    dataset = TensorDataset(torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)))
    return lambda: DataLoader(dataset, batch_size, **arguments)


FIT: dict[str, Any] = dict(
    max_epochs=1, accumulate_grad_batches=1, val_check_interval=None, limit_val_batches=0, num_sanity_val_steps=0
)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": (dict(model=changed(options=dict(lr=1e-2, fused=True))), "`lr` of AdamW.* 0.001 and is 0.01"),
    "weight decay": (
        dict(model=changed(options=dict(lr=1e-3, fused=True, weight_decay=0.5))), "`weight_decay` .* 0.01 and is 0.5"
    ),
    "betas": (
        dict(model=changed(options=dict(lr=1e-3, fused=True, betas=(0.9, 0.99)))), r"`betas` .* \(0.9, 0.999\) and is"
    ),
    "implementation": (dict(model=changed(options=dict(lr=1e-3, foreach=True))), "`fused` .* True and is None"),
    "optimizer": (dict(model=changed(optimizer=torch.optim.Adam)), "optimizer 0 was .*AdamW and is .*Adam now"),
    "batch size": (dict(train=data(batch_size=2)), "`batch_size` of the training dataloader was 4 and is 2"),
    "shuffling": (dict(train=data(shuffle=True)), "`class of the sampler` .*Sequential.* and is .*Random"),
    "drop_last": (dict(train=data(drop_last=True)), "`drop_last` .* False and is True"),
    "length of the data": (dict(train=data(rows=20)), "`length of the dataset` .* 16 and is 20"),
    "workers": (dict(train=data(num_workers=1)), "`num_workers` .* 0 and is 1"),
    "accumulation": (dict(accumulate_grad_batches=2), "`accumulate_grad_batches` of the Trainer was 1 and is 2"),
    "clipping": (dict(gradient_clip_val=0.1), "`gradient_clip_val` of the Trainer was 0.5 and is 0.1"),
    "kind of clipping": (dict(gradient_clip_algorithm="value"), "`gradient_clip_algorithm` .* 'value'"),
    "batches": (dict(limit_train_batches=3), "`limit_train_batches` of the Trainer was 1.0 and is 3"),
    "precision": (dict(precision="bf16-mixed"), "`precision` of the Trainer was '32-true' and is 'bf16-mixed'"),
    "activation": (dict(model=changed(activation=nn.ReLU)), r"module `blocks.0.1` was .*Tanh\(\) and is .*ReLU\("),
    "dropout": (dict(model=changed(dropout=0.3)), "module `blocks.0.2` was .*p=0.2.* and is .*p=0.3"),
    "name of a parameter": (
        dict(model=changed(name="gain")), "parameter `scale` was .* missing now; .*`gain` is .* missing then"
    ),
    "buffer without a record": (dict(model=changed(table_value=2.0)), "buffer `table` was not persistent, .* and is"),
    "schedule": (dict(model=changed(step_size=2)), "`step_size` of LR scheduler 0 was 3 and is 2"),
    "class": (dict(model=type("Other", (Small,), {})), "the model was .*Small.* and is .*Other"),
    "format": (dict(strategy=dict(state_format="split")), "`state_format` was 'fp32' and is 'split'"),
    "min_bytes": (dict(strategy=dict(min_bytes=1)), "`min_bytes` was 1024 and is 1 now"),
    "checksum": (dict(strategy=dict(checksum=False)), "`checksum` was True and is False"),
    "units": (dict(strategy=dict(units=["Linear"])), r"`units` was None and is \['Linear'\]"),
}  # fmt: skip
NOTED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": (dict(max_epochs=2), "`max_epochs` of the Trainer was 1 and is 2"),
    "first values of a buffer": (dict(model=changed(shift_value=2.0)), "first value of buffer `shift`.* was .* and is"),
    "hyperparameter": (dict(model=changed(hyper=2)), "hyperparameter `hyper` was 1 and is 2"),
}
UNSAID: dict[str, dict[str, Any]] = {
    "overlap": dict(strategy=dict(overlap="naive")),
    "clip": dict(strategy=dict(clip="deferred")),
    "staging": dict(strategy=dict(staging_memory="64MiB")),
}


def run(path: Path, **arguments: Any) -> Any:
    options = arguments.pop("strategy", {})
    model = arguments.pop("model", changed())
    return fit(recovering(path, **options), model, **(FIT | {"train": data()} | arguments))


def fail(path: Path) -> None:
    with pytest.raises(Failure):
        run(path, callbacks=[FailAt(2)])
    assert (path / KEPT / "journal").exists()


def _some(names: Any, *default: str) -> list[Any]:
    return [name if name in default else pytest.param(name, marks=pytest.mark.thorough) for name in names]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", _some(REFUSED, "learning rate", "batch size", "activation", "name of a parameter", "min_bytes")
)
def test_a_changed_setting_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """The record is kept: with the original setting the run resumes."""
    arguments, message = REFUSED[name]
    fail(tmp_path)
    with pytest.raises(
        StorageError, match=f"(?s){message}.*(?:Put them back|Restore that setting).* remove {tmp_path}/{KEPT}"
    ):
        run(tmp_path, **arguments)
    assert min(run(tmp_path).losses) == 2
    assert not (tmp_path / KEPT).exists()


@pytest.mark.parametrize("name", _some(NOTED, "epochs", "hyperparameter"))
def test_a_setting_that_may_change_is_said(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, message = NOTED[name]
    fail(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert min(run(tmp_path, **arguments).losses) == 2
    assert "resuming after step 2 of a run that was killed" in caplog.text
    (line,) = [record.getMessage() for record in caplog.records if "have changed since" in record.getMessage()]
    assert re.search(message, line)


@pytest.mark.parametrize("name", _some(UNSAID))
def test_a_setting_that_changes_no_number_may_change(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = outcome(run(apart(tmp_path)))
    fail(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = run(tmp_path, **UNSAID[name])
    assert min(found.losses) == 2 and same(outcome(found), expected)
    assert "have changed since" not in caplog.text


def test_a_given_checkpoint_has_priority_over_a_record_of_other_settings(tmp_path: Path) -> None:
    saved = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    run(tmp_path, callbacks=[saved], enable_checkpointing=True)
    (checkpoint,) = (tmp_path / "saved").glob("*step=2.ckpt")
    fail(tmp_path)
    other = REFUSED["learning rate"][0]
    assert run(tmp_path, ckpt_path=checkpoint, **other) is not None
    assert not (tmp_path / KEPT).exists()


def test_the_record_of_a_later_fit_is_not_resumed_by_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of two fits of the same model: killed in the second, and run again."""
    from lightning_ssd.recover import recovery

    first = run(tmp_path)
    second = outcome(run(tmp_path))
    monkeypatch.setattr(recovery, "_ended", Counter())
    run(tmp_path)
    fail(tmp_path)
    monkeypatch.setattr(recovery, "_ended", Counter())  # a new process
    with pytest.raises(StorageError, match="`fit` in its script was 2 and is 1 now.* `path` of its own"):
        run(tmp_path)
    (tmp_path / "first").mkdir()
    again = run(tmp_path / "first")
    assert same(outcome(again), outcome(first)) and min(again.losses) == 0
    found = run(tmp_path)
    assert min(found.losses) == 2 and same(outcome(found), second)


def test_fits_with_paths_of_their_own_may_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that tries several settings, and skips finished ones."""
    from lightning_ssd.recover import recovery

    paths = [tmp_path / name for name in "abc"]
    expected = outcome(run(tmp_path))
    for path in paths:
        path.mkdir()
    run(paths[0])
    run(paths[1])
    fail(paths[2])
    monkeypatch.setattr(recovery, "_ended", Counter())  # a new process
    found = run(paths[2])
    assert min(found.losses) == 2 and same(outcome(found), expected)


def test_a_record_without_checksums_is_not_read_with_them(tmp_path: Path) -> None:
    """The error names the argument; a record is read as it was written, with checksums or without."""
    with pytest.raises(Failure):
        run(tmp_path, callbacks=[FailAt(2)], strategy=dict(checksum=False))
    message = f"had checksum=False.* set checksum=False in this run, too, or remove {tmp_path}"
    with pytest.raises(StorageError, match=message):
        run(tmp_path)
    assert min(run(tmp_path, strategy=dict(checksum=False)).losses) == 2


def test_other_numbers_of_loaders_are_refused(tmp_path: Path) -> None:
    """Two, and then one of them."""

    def both() -> Any:
        return [data()(), data()()]

    model = changed(training_step=lambda self, batch, index: Small.training_step(self, _first(batch), index))
    with pytest.raises(Failure):
        run(tmp_path, model=model, train=both, callbacks=[FailAt(2)])
    with pytest.raises(StorageError, match="1 more training dataloaders were read"):
        run(tmp_path, model=model)
    assert min(run(tmp_path, model=model, train=both).losses) == 2


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch[0], list) else batch


def test_a_model_that_stays_on_the_device_is_recorded(tmp_path: Path) -> None:
    """All its parameters are smaller than `min_bytes`."""
    expected = outcome(run(apart(tmp_path), strategy=dict(min_bytes=2**20)))
    with pytest.raises(Failure):
        run(tmp_path, callbacks=[FailAt(2)], strategy=dict(min_bytes=2**20))
    found = run(tmp_path, strategy=dict(min_bytes=2**20))
    assert min(found.losses) == 2 and same(outcome(found), expected)
    assert not (tmp_path / KEPT).exists()


class Stateful(pl.Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["mine"]


def test_states_that_are_not_plain_data_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\['callbacks'\]\['Stateful'\]\['mine'\] is a .*Linear"):
        run(tmp_path, callbacks=[Stateful(nn.Linear(1, 1))])


def test_hyperparameters_of_any_type_are_the_scripts(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hyper(Small):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"activation": nn.Tanh(), "call": print})

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(checkpoint["hyper_parameters"]["call"])

    with pytest.raises(Failure):
        run(tmp_path, model=Hyper, callbacks=[FailAt(2)])
    assert min(run(tmp_path, model=Hyper).losses) == 2
    assert seen == [print]


def test_buffers_may_be_resized_in_training(tmp_path: Path) -> None:
    """Observers of quantization-aware training do so."""

    class Observed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("observed", torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.observed.resize_(3 + batch_idx).fill_(batch_idx)
            return super().training_step(batch, batch_idx)

    plain = outcome(fit("auto", Observed))
    assert same(outcome(fit(recovering(tmp_path), Observed)), plain)


def test_a_record_of_arrays_at_other_offsets_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other versions of the package."""
    ours = identity_of([make_layout(2)])
    assert ours == identity_of([make_layout(2)])
    arrays = tuple(replace(array, start=2 * array.start) for array in make_layout(2).arrays)
    monkeypatch.setattr(Layout, "arrays", arrays)
    assert identity_of([make_layout(2)]) != ours
