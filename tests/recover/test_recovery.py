"""`recover=True`: trainings that end at any moment resume as if they had not ended."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from benchmarks.throttled_backend import ThrottledBackend
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states.journal.plain_data import DamagedError, from_bytes
from lightning_ssd.recipes.data.loader import ResumableDataLoader
from lightning_ssd.storage import StorageError
from tests.support import forks
from tests.support.direct import DirectBackend
from tests.support.faults import FaultyBackend
from tests.support.killed import KEPT, FailAt, Failure, Model, apart, fit, outcome, recovering, same
from tests.support.states import assert_nothing_is_left


def fit_with_failures(path: Path, batches: tuple[int, ...] = (5, 24), **arguments: Any) -> Any:
    """Trains again after each failure until a training ends; returns the last model."""
    options = arguments.pop("strategy", {})
    for batch in batches:
        with pytest.raises(Failure):
            fit(recovering(path, **options), callbacks=[FailAt(batch)], **arguments)
        assert (path / KEPT / "journal").exists()
    return fit(recovering(path, **options), **arguments)


@pytest.mark.parametrize(
    ("kills", "reads"),
    [(1, "staged"), *(pytest.param(8, name, marks=pytest.mark.thorough) for name in ("staged", "direct"))],
)
def test_killed_at_many_moments(tmp_path: Path, kills: int, reads: str) -> None:
    """Killed by SIGKILL, at any time and within a write: the result equals an uninterrupted training, bit for bit."""
    run = forks.run(["-m", "tests.support.killed", tmp_path, str(kills), reads], timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    assert f"{kills} kills" in run.stdout
    assert "resuming after step" in run.stderr
    assert_nothing_is_left(tmp_path)


def test_a_script_that_is_repeated_in_one_process_is_refused(tmp_path: Path) -> None:
    """Its first `fit` would resume from the record of the second one, whose number in the process is the same."""
    fit(recovering(tmp_path), max_epochs=1)
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[FailAt(5)])
    with pytest.raises(StorageError, match=r"another `fit` with this `path` has ended.*a `path` of its own"):
        fit(recovering(tmp_path), max_epochs=1)
    assert (tmp_path / KEPT / "journal").exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        dict(strategy=dict(clip="speculative", checksum=True)),
        dict(strategy=dict(overlap="none"), accumulate_grad_batches=3),
        dict(precision="bf16-true", strategy=dict(state_format="split", min_bytes=1)),
        dict(precision="bf16-true", strategy=dict(state_format="bf16", min_bytes=1)),
        dict(precision="bf16-true", strategy=dict(state_format="8bit", min_bytes=1, clip="speculative")),
        dict(strategy=dict(clip="deferred")),
        dict(strategy=dict(overlap="naive"), gradient_clip_val=None),
        dict(strategy=dict(states="ssd"), accumulate_grad_batches=1, val_check_interval=1.0),
        dict(precision="bf16-mixed", gradient_clip_val=None),
        dict(gradient_clip_val=0.05, gradient_clip_algorithm="value", check_val_every_n_epoch=2),
        dict(max_epochs=-1, max_steps=17, val_check_interval=None),
        dict(limit_train_batches=8, batches=(5, 7, 8, 20)),
    ],
    ids=str,
)
def test_failed_in_every_mode(tmp_path: Path, arguments: dict[str, Any]) -> None:
    plain = {name: value for name, value in arguments.items() if name not in ("strategy", "batches")}
    expected = fit(recovering(apart(tmp_path), **arguments.get("strategy", {})), **plain)
    assert same(outcome(fit_with_failures(tmp_path, **arguments)), outcome(expected))
    assert_nothing_is_left(tmp_path)


def test_failed_where_the_backend_reads_weights_to_device_buffers(tmp_path: Path) -> None:
    arguments: dict[str, Any] = dict(accumulate_grad_batches=1, val_check_interval=1.0)
    expected = fit(SSDOffloadStrategy(tmp_path, states="gpu", offload="none"), **arguments)
    direct = dict(backend=DirectBackend(), checksum=False)
    assert same(outcome(fit_with_failures(tmp_path, strategy=direct, **arguments)), outcome(expected))
    assert_nothing_is_left(tmp_path)


def test_numbers_are_plain_lightnings(tmp_path: Path) -> None:
    expected = fit(SSDOffloadStrategy(tmp_path, states="gpu", offload="none"))
    assert same(outcome(fit_with_failures(tmp_path)), outcome(expected))


class Stream(IterableDataset[Any]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([row] for row in torch.randn(44, 64, generator=torch.Generator().manual_seed(1)))


def resumable() -> Any:
    data = TensorDataset(torch.randn(44, 64))
    return ResumableDataLoader(data, batch_size=4, sampler=DistributedSampler(data, 1, 0))  # type: ignore[arg-type]


class Counting:
    """A stream without a length and with a `state_dict`."""

    def __init__(self) -> None:
        self.rows = torch.randn(44, 64, generator=torch.Generator().manual_seed(1))
        self.at = 0
        self.resume = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume = state["at"]

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resume = self.resume, 0
        while self.at < len(self.rows):
            batch = [self.rows[self.at : self.at + 4]]
            self.at += 4
            yield batch


def generator() -> Any:
    data = TensorDataset(torch.randn(44, 64))
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(Counting, id="counting"),
        pytest.param(generator, id="generator"),
        pytest.param(lambda: DataLoader(TensorDataset(torch.randn(44, 64)), 4, shuffle=True, num_workers=2), id="two"),
        pytest.param(lambda: DataLoader(Stream(), 4), id="stream"),
        pytest.param(resumable, id="resumable"),
    ],
)
def test_data_resumes_at_its_position(tmp_path: Path, train: Any) -> None:
    arguments: dict[str, Any] = dict(check_val_every_n_epoch=1, val_check_interval=1.0)
    expected = fit(recovering(apart(tmp_path)), train=train, **arguments)
    assert same(outcome(fit_with_failures(tmp_path, (5, 12, 13, 24), train=train, **arguments)), outcome(expected))


class TwoLoaders(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch["long"][0] + batch["short"][0]], batch_idx)


def test_several_loaders_of_different_lengths(tmp_path: Path) -> None:
    def train() -> Any:
        long, short = (DataLoader(TensorDataset(torch.randn(rows, 64)), 4, shuffle=True) for rows in (44, 20))
        return CombinedLoader({"long": long, "short": short}, "max_size_cycle")

    expected = fit(recovering(apart(tmp_path)), TwoLoaders, train=train)
    found = fit_with_failures(tmp_path, model=TwoLoaders, train=train)
    assert same(outcome(found), outcome(expected))


class RandomStream(Stream):
    """A stream without a length whose rows have noise from the training's random number generator."""

    def __iter__(self) -> Iterator[Any]:
        for (row,) in super().__iter__():
            yield [row + torch.rand_like(row)]


class SameLength(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0][0] + batch[1][0]], batch_idx)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_that_are_prefetched(tmp_path: Path, mode: Any) -> None:
    """The batch that the killed run has prefetched draws the random numbers of all loaders again, and no other does."""

    def train() -> Any:
        return CombinedLoader([DataLoader(RandomStream(), batch_size=4) for _ in range(2)], mode)

    arguments: dict[str, Any] = dict(model=SameLength, train=train, val_check_interval=None)
    expected = fit(recovering(apart(tmp_path)), **arguments)
    assert same(outcome(fit_with_failures(tmp_path, **arguments)), outcome(expected))


class Adversaries(Model):
    """Two optimizers in manual optimization; one of them steps in every other batch."""

    keeps_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in (first, second)[: 1 + batch_idx % 2]:
            optimizer.step()
        for optimizer in (first, second)[: 1 + batch_idx % 2] if self.keeps_gradients else (first, second):
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.blocks.parameters(), 1e-3, fused=True),
                torch.optim.SGD(self.head.parameters(), 1e-3, fused=True)]  # fmt: skip


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    arguments: dict[str, Any] = dict(accumulate_grad_batches=1, gradient_clip_val=None)
    expected = fit(SSDOffloadStrategy(tmp_path, states="gpu", offload="none"), Adversaries, **arguments)
    assert same(outcome(fit_with_failures(tmp_path, model=Adversaries, **arguments)), outcome(expected))


class Skipping(Model):
    """Sometimes skips a block, which is stepped less often."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for index, block in enumerate(self.blocks):
            if index != 1 or batch_idx % 3:
                x = block(x)
        loss: Tensor = self.head(x).square().mean()
        self.losses[int(self.batches)] = float(loss)
        return loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recover", [True, False])
def test_units_that_are_stepped_less_often(tmp_path: Path, recover: bool) -> None:
    """The result has the last step of each unit."""
    expected = fit(SSDOffloadStrategy(tmp_path, states="gpu", offload="none"), Skipping, accumulate_grad_batches=1)
    arguments: dict[str, Any] = dict(model=Skipping, accumulate_grad_batches=1)
    if recover:
        found = fit_with_failures(tmp_path, **arguments)
    else:
        found = fit(recovering(tmp_path, recover=False, states="ssd", clip="speculative"), **arguments)
    assert same(outcome(found), outcome(expected))


class Halves(Adversaries):
    """Two optimizers that step directly one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Model.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers(use_pl_optimizer=False):  # type: ignore[attr-defined]
            optimizer.step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        halves = self.blocks[8:], self.blocks[:8]
        return [torch.optim.AdamW(half.parameters(), 1e-3, fused=True) for half in halves]


def test_steps_that_wait_for_others_do_not_hold_staging_memory(tmp_path: Path) -> None:
    """Steps of the second optimizer are first in the forward's order, and must not be staged before the first's."""
    arguments: dict[str, Any] = dict(accumulate_grad_batches=1, gradient_clip_val=None, max_epochs=1)
    expected = fit(SSDOffloadStrategy(tmp_path, states="gpu", offload="none"), Halves, **arguments)
    slow = ThrottledBackend(2e7)
    assert same(outcome(fit(recovering(tmp_path, backend=slow), Halves, **arguments)), outcome(expected))


class Watching(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(parameter.grad is not None for parameter in self.parameters())


def test_hooks_that_read_gradients(tmp_path: Path) -> None:
    expected = fit(recovering(apart(tmp_path)), Watching)
    assert same(outcome(fit_with_failures(tmp_path, model=Watching)), outcome(expected))


def test_callbacks_resume_with_their_state(tmp_path: Path) -> None:
    """A user's checkpoints and early stopping, whose state is in the Trainer's."""

    def callbacks() -> list[pl.Callback]:
        checkpoint = pl.callbacks.ModelCheckpoint(tmp_path / "saved", monitor="loss", save_top_k=2, every_n_epochs=1)
        return [checkpoint, pl.callbacks.EarlyStopping("loss", patience=3)]

    options = dict(enable_checkpointing=True)
    expected = fit(recovering(apart(tmp_path)), callbacks=callbacks(), **options)
    best = {path.name for path in (tmp_path / "saved").iterdir()}
    for path in (tmp_path / "saved").iterdir():
        path.unlink()
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[*callbacks(), FailAt(20)], **options)
    found = fit(recovering(tmp_path), callbacks=callbacks(), **options)
    assert same(outcome(found), outcome(expected))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == best


def test_a_record_that_is_being_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record of a training that fails before the record is on the drive."""
    failed = threading.Event()
    flush = os.fdatasync

    class FailFirst(FailAt):
        def on_exception(self, *_: Any) -> None:
            failed.set()

    def flush_then(file: int) -> None:
        assert failed.wait(60)
        flush(file)

    expected = fit(recovering(apart(tmp_path)))
    with monkeypatch.context() as patch, pytest.raises(Failure):
        patch.setattr(os, "fdatasync", flush_then)
        fit(recovering(tmp_path), callbacks=[FailFirst(2)])
    found = fit(recovering(tmp_path))
    assert min(found.losses) == 2
    assert same(outcome(found), outcome(expected))


def test_a_failure_before_the_first_step_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[FailAt(0)])
    assert_nothing_is_left(tmp_path)


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 65)


def test_states_of_another_model_are_neither_resumed_nor_lost(tmp_path: Path) -> None:
    expected = fit(recovering(apart(tmp_path)))
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[FailAt(20)])
    with pytest.raises(StorageError, match="of another model or with other settings.* or remove .*kept"):
        fit(recovering(tmp_path), Wider)
    assert same(outcome(fit(recovering(tmp_path))), outcome(expected))


def test_every_bit_of_a_journal_counts(tmp_path: Path) -> None:
    """With any flipped bit of a sample, the run is refused, and nothing of the journal is used."""
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[FailAt(20)])
    journal = tmp_path / KEPT / "journal"
    content = journal.read_bytes()
    sample = random.Random(3)
    for bit in [*(sample.randrange(8 * len(content)) for _ in range(200)), 0, 8 * len(content) - 1]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            from_bytes(bytes(flipped))
    journal.write_bytes(content[:-1])
    message = r"(?s)journal.* can't be read: its bytes are not those that were written.* or remove"
    with pytest.raises(StorageError, match=message):
        fit(recovering(tmp_path))
    assert (tmp_path / KEPT / "scratch.bin").stat().st_size
    journal.write_bytes(content)
    assert min(fit(recovering(tmp_path)).losses) > 15


def test_a_scratch_file_that_was_cut_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure):
        fit(recovering(tmp_path), callbacks=[FailAt(20)])
    with open(tmp_path / KEPT / "scratch.bin", "r+b") as file:
        file.truncate(8192)
    with pytest.raises(StorageError, match="scratch.bin is not the file of the run that was killed"):
        fit(recovering(tmp_path))


def test_two_at_once_need_two_paths(tmp_path: Path) -> None:
    """The second run raises an error, for the same model or another one, and changes nothing."""

    class Meanwhile(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if int(module.batches) == 9:
                random = torch.get_rng_state()
                for model in (Model, Wider):
                    with pytest.raises(StorageError, match="another run, which is alive.*another `path`"):
                        fit(recovering(tmp_path), model)
                torch.set_rng_state(random)

    expected = fit(recovering(apart(tmp_path)))
    assert same(outcome(fit(recovering(tmp_path), callbacks=[Meanwhile()])), outcome(expected))
    assert_nothing_is_left(tmp_path)


def fail_at(batch: int, path: Any, **arguments: Any) -> None:
    with pytest.raises(Failure):
        fit(recovering(path), callbacks=[FailAt(batch)], **arguments)


def test_weights_that_are_loaded_before_a_killed_run_resumes(tmp_path: Path) -> None:
    pretrained = {name: torch.zeros_like(value) for name, value in Model().state_dict().items()}

    class Pretrained(Model):
        def on_fit_start(self) -> None:
            self.load_state_dict(pretrained)

    fail_at(16, tmp_path, model=Pretrained)
    with pytest.raises(RuntimeError, match="would overwrite its weights.*in `setup`"):
        fit(recovering(tmp_path), Pretrained)
    assert (tmp_path / KEPT / "journal").exists()


def test_a_run_that_failed_after_weights_were_loaded_begins_anew(tmp_path: Path) -> None:
    """The values that its last record named are overwritten."""
    failing = [True]

    class Loading(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if int(self.batches) == 14:
                self.blocks.load_state_dict({name: 0.5 * value for name, value in self.blocks.state_dict().items()})
                float(self.head.weight.detach().sum())  # the loaded values are stored
                if failing:
                    raise Failure

    with pytest.raises(Failure):
        fit(recovering(tmp_path), Loading)
    failing.clear()
    found = fit(recovering(tmp_path), Loading)
    assert min(found.losses) == 0
    assert same(outcome(found), outcome(fit("auto", Loading)))


def test_the_next_run_resumes_from_the_last_step_after_a_drive_failed(tmp_path: Path) -> None:
    backend = FaultyBackend()

    class Break(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if int(module.batches) == 15:
                backend.error["write"] = OSError(5, "Input/output error")

    expected = fit(recovering(apart(tmp_path)))
    with pytest.raises(StorageError, match=r"scratch\.bin"):
        fit(recovering(tmp_path, backend=backend), callbacks=[Break()])
    found = fit(recovering(tmp_path))
    assert min(found.losses) >= 12, "it went on, and did not begin anew"
    assert same(outcome(found), outcome(expected))


def test_trainings_that_can_not_be_recovered_are_refused(tmp_path: Path) -> None:
    for states in ("gpu", "host"):
        with pytest.raises(ValueError, match=r"Set `states='ssd'`, or `recover=False`"):
            recovering(tmp_path, states=states)

    class NAdam(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.NAdam(self.parameters())

    def staying() -> Any:
        return DataLoader(TensorDataset(torch.randn(44, 64)), 4, num_workers=1, persistent_workers=True)

    with pytest.raises(ValueError, match="Set `persistent_workers=False`, or `recover=False`"):
        fit(recovering(tmp_path), train=staying)

    with pytest.raises(ValueError, match="those of NAdam are in memory"):
        fit(recovering(tmp_path), NAdam)

    class Fetching(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(ValueError, match="fetches them itself"):
        fit(recovering(tmp_path), Fetching)

    class Twice(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match=r"stepped twice in one `training_step`"):
        fit(recovering(tmp_path), Twice, accumulate_grad_batches=1, gradient_clip_val=None)

    class Keeping(Adversaries):
        keeps_gradients = True

        def configure_optimizers(self) -> Any:
            return list(reversed(super().configure_optimizers()))

    with pytest.raises(RuntimeError, match="keeps gradients from one batch to the next"):
        fit(recovering(tmp_path, min_bytes=1), Keeping, accumulate_grad_batches=1, gradient_clip_val=None)

    class Projecting(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with torch.no_grad():
                self.head.weight.clamp_(-1e-3, 1e-3)

    with pytest.raises(RuntimeError, match="are changed outside of the optimizer"):
        fit(recovering(tmp_path, min_bytes=1), Projecting)
    assert_nothing_is_left(tmp_path)
