"""`MicroBatchSwitch`: the position of a micro-batch in its accumulation window."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor

from lightning_ssd import MicroBatchSwitch
from lightning_ssd.callbacks.micro_batch_switch import ends_short_window
from tests.support.trainings import SmallModel, batches, make_trainer, nothing_left, offloading, small_model  # noqa: F401


class TraceMode(pl.Callback):
    """Records, for each batch, the switch's `current`, and whether the optimizer then stepped."""

    def __init__(self, switch: MicroBatchSwitch) -> None:
        self.switch = switch
        self.indices: list[list[int]] = [[]]
        self.said_last: list[bool] = []
        self.stepped: list[bool] = []
        self._steps = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.indices[-1]:
            self.indices.append([])

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        current = self.switch.current
        assert current is not None
        self.indices[-1].append(current.index)
        self.said_last.append(current.is_last)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.stepped.append(trainer.global_step > self._steps)


def _record(root: Path, count: int, *others: pl.Callback, strategy: Any = None, **arguments: Any) -> TraceMode:
    switch = MicroBatchSwitch()
    recorder = TraceMode(switch)
    model = arguments.pop("model", None) or small_model()
    trainer = make_trainer(
        root, strategy or offloading(), callbacks=[*others, switch, recorder], num_sanity_val_steps=0, **arguments
    )
    trainer.fit(model, batches(count), batches(1))
    assert recorder.said_last == recorder.stepped
    return recorder


@pytest.mark.parametrize("strategy", ["auto", "ssd_offload"])
def test_windows_of_three_with_a_ragged_end(tmp_path: Path, strategy: str) -> None:
    """The positions are the same with and without an offloading strategy, in every epoch."""
    recorder = _record(tmp_path, 10, strategy=strategy, accumulate_grad_batches=3, max_epochs=2)
    assert recorder.indices == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]] * 2


@pytest.mark.parametrize(
    ("count", "expected"), [(7, [False, False, True]), (6, [False, False]), (2, [False])], ids=["ragged", "even", "one"]
)
def test_a_window_is_short_if_others_are_longer(tmp_path: Path, count: int, expected: list[bool]) -> None:
    found = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not trainer.fit_loop._should_accumulate():
                found.append(ends_short_window(trainer))

    _record(tmp_path, count, Look(), accumulate_grad_batches=3, max_epochs=2)
    assert found == expected * 2


def test_every_batch_is_a_window_without_accumulation(tmp_path: Path) -> None:
    assert _record(tmp_path, 4).indices == [[0, 0, 0, 0]]


def test_changing_accumulation(tmp_path: Path) -> None:
    scheduler = GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})
    recorder = _record(tmp_path, 6, scheduler, max_epochs=3)
    assert recorder.indices == [[0] * 6, [0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 0, 1]]


def test_validation_in_the_middle_of_a_window(tmp_path: Path) -> None:
    assert _record(tmp_path, 6, accumulate_grad_batches=3, val_check_interval=2).indices == [[0, 1, 2, 0, 1, 2]]


def test_limited_batches_end_the_window(tmp_path: Path) -> None:
    assert _record(tmp_path, 6, accumulate_grad_batches=3, limit_train_batches=5).indices == [[0, 1, 2, 0, 1]]


class _Manual(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_one_window_a_batch(tmp_path: Path) -> None:
    assert _record(tmp_path, 3, model=small_model(kind=_Manual)).indices == [[0, 0, 0]]


def test_an_epoch_that_ends_in_the_middle_of_a_window(tmp_path: Path) -> None:
    """`on_train_batch_start` returns -1 to skip the rest of the epoch: the next one begins a window."""

    class Skipping(SmallModel):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    switch = MicroBatchSwitch()
    recorder = TraceMode(switch)
    make_trainer(tmp_path, offloading(), callbacks=[switch, recorder], accumulate_grad_batches=3, max_epochs=2).fit(
        small_model(kind=Skipping), batches(6)
    )
    assert recorder.indices == [[0, 1], [0, 1]]


def test_a_resumed_run_begins_a_window_also_where_the_one_before_was_cut_off(tmp_path: Path) -> None:
    """The first run fails inside its second window; the second one resumes after the first, with the same callback."""

    class Failing(SmallModel):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 4:
                raise KeyError

    switch = MicroBatchSwitch()
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1)
    arguments: dict[str, Any] = {"accumulate_grad_batches": 3, "enable_checkpointing": True}
    with pytest.raises(KeyError):
        make_trainer(tmp_path, offloading(), callbacks=[switch, checkpoint], **arguments).fit(
            small_model(kind=Failing), batches(6)
        )
    recorder = TraceMode(switch)
    make_trainer(tmp_path, offloading(), callbacks=[switch, recorder], **arguments).fit(
        small_model(), batches(6), ckpt_path=checkpoint.best_model_path, weights_only=False
    )
    assert recorder.indices == [[0, 1, 2]]
    assert recorder.said_last == recorder.stepped == [False, False, True]


class Skipping(SmallModel):
    """Skips the optimizer step in every other batch, after its loss was computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def test_a_batch_without_backward_has_a_record_of_its_own(tmp_path: Path) -> None:
    """Its saved tensors do not count as the beginning of the next batch."""
    begun: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            begun.append(trainer.strategy.offloader.stats().micro_batches)

    trainer = make_trainer(tmp_path, offloading(), callbacks=[Count()], limit_val_batches=0)
    trainer.fit(Skipping(), batches(4))
    assert begun == [1, 2, 3, 4]
