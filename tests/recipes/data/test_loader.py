"""A run that resumes from a checkpoint equals the run that was not interrupted."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import MaskedTextDataModule, SpanCorruptionDataModule, TextDataModule, input_ids
from lightning_ssd.recipes.models import GPT, T5

BATCHES = 5  # in an epoch


class Batches(pl.Callback):
    """Keeps the batches and losses of training, and the epoch each belongs to."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.samples: list[tuple[Tensor, Tensor]] = []
        self.losses: list[Tensor] = []
        self.epochs: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(input_ids(batch).clone())
        self.samples.append((input_ids(batch).clone(), batch.get("labels", input_ids(batch)).clone()))
        self.losses.append(outputs["loss"].detach().clone())
        self.epochs.append(trainer.current_epoch)


def fit(data: TextDataModule, folder: Path, resume: Path | None = None, **trainer_settings: Any) -> tuple[Batches, GPT]:
    torch.manual_seed(0)
    model: Any = GPT(vocab_size=260, n_positions=16, n_embd=16, n_layer=2, n_head=2, lr=1e-2, warmup_steps=3)
    if isinstance(data, SpanCorruptionDataModule):
        model = T5(vocab_size=260, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, lr=1e-2, warmup_steps=3)
    record = Batches()
    save = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[record, save],
        **trainer_settings,
    )
    trainer.fit(model, data, ckpt_path=resume)
    return record, model


@pytest.fixture
def text(tmp_path: Path) -> TextDataModule:
    """`BATCHES` batches of two blocks, and a block to hold out."""
    file = tmp_path / "text.txt"
    file.write_bytes(random.Random(0).randbytes(16 * (2 * BATCHES + 1)))
    return TextDataModule(file, block_size=16, batch_size=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [MaskedTextDataModule, SpanCorruptionDataModule])
def test_resumed_run_repeats_masks_and_spans(tmp_path: Path, text: TextDataModule, kind: Any, workers: int) -> None:
    def samples(folder: str, resume: Path | None, workers: int) -> list[tuple[Tensor, Tensor]]:
        data = kind(path=text.path, block_size=14, batch_size=2, num_workers=workers)
        return fit(data, tmp_path / folder, resume, max_steps=9)[0].samples

    straight = samples("straight", None, 0)
    resumed = samples("resumed", tmp_path / "straight" / "step=7.ckpt", workers)
    assert len(resumed) == 2
    for one, other in zip(resumed, straight[7:], strict=True):
        assert all(map(torch.equal, one, other))


def again(text: TextDataModule, **changed: Any) -> TextDataModule:
    """Returns the same data, as another process makes it."""
    assert text.path is not None
    return TextDataModule(text.path, **{"block_size": 16, "batch_size": 2, **changed})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("end", [{"max_steps": 12}, {"max_epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, text: TextDataModule, end: dict[str, int], accumulate: int
) -> None:
    settings: dict[str, Any] = {**end, "accumulate_grad_batches": accumulate}
    straight, model = fit(text, tmp_path / "straight", **settings)
    steps = len(list((tmp_path / "straight").glob("*.ckpt")))
    assert steps >= 9
    in_epoch = -(-BATCHES // accumulate)
    for step in (2, in_epoch + 1, 2 * in_epoch):  # within the first and second epoch, and at its end
        checkpoint = tmp_path / "straight" / f"step={step}.ckpt"
        resumed, other = fit(again(text), tmp_path / str(step), checkpoint, **settings)
        seen = step // in_epoch * BATCHES + step % in_epoch * accumulate
        assert len(resumed.batches) == len(straight.batches) - seen
        assert all(map(torch.equal, resumed.batches, straight.batches[seen:]))
        assert all(map(torch.equal, resumed.losses, straight.losses[seen:]))
        assert resumed.epochs == straight.epochs[seen:]
        assert other.seen == model.seen == 32 * len(straight.batches)
        assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_workers_that_read_ahead_do_not_move_the_place(tmp_path: Path, text: TextDataModule) -> None:
    straight, _ = fit(text, tmp_path / "straight", max_steps=8)
    ahead = again(text, num_workers=2)
    resumed, _ = fit(ahead, tmp_path / "resumed", tmp_path / "straight" / "step=7.ckpt", max_steps=8)
    assert torch.equal(resumed.batches[0], straight.batches[7]) and len(resumed.batches) == 1
    fit(again(text, num_workers=2), tmp_path / "ahead", max_steps=8)
    resumed, _ = fit(again(text), tmp_path / "other", tmp_path / "ahead" / "step=3.ckpt", max_steps=8)
    assert all(map(torch.equal, resumed.losses, straight.losses[3:]))


def test_epochs_differ_and_each_sees_every_block_once(tmp_path: Path, text: TextDataModule) -> None:
    record, _ = fit(text, tmp_path / "run", max_epochs=2)
    first, second = torch.cat(record.batches[:BATCHES]), torch.cat(record.batches[BATCHES:])
    assert not torch.equal(first, second)
    assert {tuple(block) for block in first.tolist()} == {tuple(block) for block in second.tolist()}
    assert len(first) == len(text.train_set)


def test_seed_decides_the_order(text: TextDataModule) -> None:
    orders = []
    for data in (text, again(text), again(text, seed=1)):
        data.setup()
        orders.append(torch.cat([batch["input_ids"] for batch in data.train_dataloader()]))
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_other_batches_than_the_checkpoints_are_refused_amid_an_epoch(tmp_path: Path, text: TextDataModule) -> None:
    fit(text, tmp_path / "run", max_steps=BATCHES + 1)
    other = again(text, batch_size=1)
    with pytest.raises(ValueError, match=r"data\.batch_size"):
        fit(other, tmp_path / "amid", tmp_path / "run" / "step=2.ckpt", max_steps=BATCHES + 1)


def test_next_epoch_may_have_other_batches(tmp_path: Path, text: TextDataModule) -> None:
    fit(text, tmp_path / "run", max_epochs=2)
    other = again(text, batch_size=5)
    resumed, _ = fit(other, tmp_path / "next", tmp_path / "run" / f"step={BATCHES}.ckpt", max_epochs=2)
    assert [len(batch) for batch in resumed.batches] == [5, 5]
