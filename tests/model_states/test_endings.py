"""A drive fails at any transfer of a training: `fit` raises an error, or has plain Lightning's numbers."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd.storage import StorageError
from tests.support.endings import STEPS, WIDTH, Keep, Toy, equal, offload, weights
from tests.support.faults import FailingAtBackend, Move, Operation, WrappingBackend
from tests.support.trainings import Watch, make_trainer, nothing_left, package_threads  # noqa: F401


def train(root: Path, strategy: Any, model: type[Toy] = Toy, **arguments: Any) -> Toy:
    module = model()
    rows = torch.randn(STEPS * 4, WIDTH, generator=torch.Generator().manual_seed(5))
    trainer = make_trainer(root, strategy, **({"gradient_clip_val": 0.1} | arguments))
    try:
        trainer.fit(module, DataLoader(rows, 4), DataLoader(rows[:4], 4))
    except BaseException as error:
        error.module = module  # type: ignore[attr-defined]
        error.optimizer = trainer.optimizers[0]  # type: ignore[attr-defined]
        raise
    return module


class FailLast(pl.Callback):
    """Makes every write fail from the beginning of a batch on, when writes of earlier steps have ended."""

    def __init__(self, backend: FailingAtBackend, batch: int = STEPS - 1) -> None:
        self._backend = backend
        self._batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            trainer.strategy.model_states.drain()
            self._backend.arm()


class See(pl.Callback):
    """Records the hooks that Lightning calls at the end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_exception(self, *_: Any) -> None:
        self.seen.append("exception")

    def on_fit_end(self, *_: Any) -> None:
        self.seen.append("fit end")


class StopAt(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.should_stop = True


ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "epochs": (STEPS - 1, {}),
    "max_steps in the middle of an epoch": (1, dict(max_steps=2, max_epochs=-1)),
    "should_stop": (1, dict(callbacks=[StopAt()], min_epochs=0)),
    "no validation": (STEPS - 1, dict(limit_val_batches=0)),
    "validation after the last step": (STEPS - 1, dict(check_val_every_n_epoch=1, num_sanity_val_steps=0)),
}


def test_the_number_of_steps_is_rolled_back_with_the_weights(tmp_path: Path) -> None:
    """The next step of a resumed training would have another bias correction."""

    class Stepping(Toy):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    backend = FailingAtBackend(0, "write", dead=True, armed=False)
    with pytest.raises(StorageError) as raised:
        train(tmp_path, offload(backend, clip="speculative"), Stepping, callbacks=[FailLast(backend)])
    states = raised.value.optimizer.state_dict()["state"].values()  # type: ignore[attr-defined]
    assert [float(state["step"]) for state in states] == [STEPS - 1, STEPS - 1]


@pytest.mark.parametrize(("end", "recover"), [(end, number % 2 == 0) for number, end in enumerate(ENDS)])
def test_the_last_step_is_written_before_fit_returns(tmp_path: Path, end: str, recover: bool) -> None:
    """Otherwise `fit` raises an error, and a recorded run resumes after the previous step."""
    batch, arguments = ENDS[end]
    backend, see = FailingAtBackend(0, "write", dead=True, armed=False), See()
    callbacks = [*arguments.get("callbacks", []), FailLast(backend, batch), see]
    options = dict(clip="speculative", recover=recover)
    with pytest.raises(StorageError, match=r"could not write .*scratch\.bin: \[EIO\]") as raised:
        train(tmp_path, offload(backend, **options), **(arguments | {"callbacks": callbacks}))
    assert see.seen == ["exception"]
    keep = Keep()
    expected = train(tmp_path, "auto", **(arguments | {"callbacks": [*arguments.get("callbacks", []), keep]}))
    assert equal(weights(raised.value.module), keep.kept[batch])  # type: ignore[attr-defined]
    assert (tmp_path / "lightning_ssd-kept-rank0" / "journal").exists() == recover
    if recover:
        assert equal(weights(train(tmp_path, offload("posix", **options), **arguments)), weights(expected))


@pytest.mark.parametrize("at", range(4))
def test_every_write_of_the_last_step_is_checked(tmp_path: Path, at: int) -> None:
    """Also writes of optimizer states, which are not read afterwards; the next run resumes before that step."""
    mode, keep = {"recover": True}, Keep()
    backend = FailingAtBackend(at, "write", armed=False)
    with pytest.raises(StorageError, match="EIO"):
        train(tmp_path, offload(backend, **mode), callbacks=[FailLast(backend)], gradient_clip_val=None)
    train(tmp_path, "auto", callbacks=[keep], gradient_clip_val=None)
    assert equal(weights(train(tmp_path, offload("posix", **mode), gradient_clip_val=None)), keep.kept[-1])


class Uneven(Toy):
    """Two blocks of different sizes, by which the writes of their optimizer states differ from all others."""

    FIRST_BYTES, SECOND_BYTES = 20480, 24576

    def __init__(self) -> None:
        super().__init__()
        linears = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH + 16, bias=False)
        self.blocks = nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class LateFault(WrappingBackend):
    """Fails one write of the first block's optimizer states, after the second block's next step or half a second.

    Attributes:
        armed: whether the next such write fails.
        overtaken: whether the next step's values were written before.
    """

    name = "late"

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.overtaken: list[bool] = []
        self._writes: list[int] = []
        self._next_step = threading.Event()

    def arm(self) -> None:
        """Makes the next step's write fail."""
        self.armed = True
        self._writes.clear()
        self._next_step.clear()

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        if operation == "write" and self.armed and buffer.numel() == Uneven.FIRST_BYTES:
            self.armed = False
            self.overtaken.append(self._next_step.wait(timeout=0.5))  # it is set at once if that step does not wait
            raise OSError(errno.EIO, "Input/output error")
        done = call(buffer, offset)
        if operation == "write" and buffer.numel() == Uneven.SECOND_BYTES:
            self._writes.append(offset)
            if len(self._writes) == 2:
                self._next_step.set()
        return done


def test_a_step_overwrites_nothing_that_the_step_before_is_rolled_back_to(tmp_path: Path) -> None:
    """A write of a step is running while the next step of another block could be made, and then fails."""
    backend, keep = LateFault(), Keep()

    class ArmAtSecond(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.strategy.model_states.drain()
                backend.arm()

    train(tmp_path, "auto", Uneven, gradient_clip_val=1e6, callbacks=[keep])
    with pytest.raises(StorageError, match="EIO") as raised:
        train(tmp_path, offload(backend, clip="speculative"), Uneven, gradient_clip_val=1e6, callbacks=[ArmAtSecond()])
    assert backend.overtaken == [False]
    found = weights(raised.value.module)  # type: ignore[attr-defined]
    assert [equal(found, kept) for kept in keep.kept] == [False, True, False, False]


def test_a_checkpoint_at_the_end_is_of_a_whole_step_or_none(tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    backend = FailingAtBackend(0, "write", dead=True, armed=False)
    with pytest.raises(StorageError, match="EIO"):
        train(tmp_path, offload(backend), callbacks=[FailLast(backend), Save()])
    assert not (tmp_path / "end.ckpt").exists()


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("hook", "error"),
    [("on_train_batch_end", Broken), ("on_train_epoch_end", KeyboardInterrupt), ("on_train_end", Broken)],
)
def test_an_error_of_the_user_is_not_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, error: type[BaseException]
) -> None:
    """Not by errors of a drive that fails at the same time; Lightning turns Ctrl-C into `SystemExit`."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning would make this process ignore Ctrl-C

    class Raise(pl.Callback):
        pass

    def fail(self: Any, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        if hook != "on_train_batch_end" or arguments[-1] == STEPS - 1:
            raise error

    setattr(Raise, hook, fail)
    backend = FailingAtBackend(0, "write", dead=True, armed=False)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error) as raised:
        train(
            tmp_path, offload(backend, clip="speculative"), callbacks=[FailLast(backend), Raise()], limit_val_batches=0
        )
    assert not isinstance(raised.value, StorageError)
    keep = Keep()
    train(tmp_path, "auto", callbacks=[keep])
    assert any(equal(weights(raised.value.module), step) for step in keep.kept)  # type: ignore[attr-defined]


@pytest.mark.parametrize("recover", [False, True])
def test_weights_that_can_not_be_read_at_the_end_are_said_to_be_lost(tmp_path: Path, recover: bool) -> None:
    """Also after a training without an error; with a record they are not lost."""
    backend = FailingAtBackend(0, "read", dead=True, armed=False)

    class Unread(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.model_states.drain()
            backend.arm()

    with pytest.raises(StorageError, match=r"could not read .*scratch\.bin") as raised:
        train(tmp_path, offload(backend, recover=recover), callbacks=[Unread()])
    (note,) = raised.value.__notes__
    assert "could not be read, and are NaN now: blocks.0" in note
    assert all(bool(value.isnan().all()) for value in weights(raised.value.module).values())  # type: ignore[attr-defined]
    if recover:
        expected = train(tmp_path, "auto")
        assert equal(weights(train(tmp_path, offload("posix", recover=True))), weights(expected))


def test_weights_of_an_evaluation_that_can_not_be_read(tmp_path: Path) -> None:
    backend = FailingAtBackend(0, "read", dead=True, armed=False)

    class Unread(pl.Callback):
        def on_validation_end(self, *_: Any) -> None:
            backend.arm()

    trainer = make_trainer(tmp_path, offload(backend), callbacks=[Unread()])
    with pytest.raises(StorageError, match="could not read"):
        trainer.validate(Toy(), DataLoader(torch.randn(4, WIDTH), 4), verbose=False)


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "rename"])
def test_a_journal_that_can_not_be_written_is_named_and_the_last_record_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The next run resumes from that record."""
    real = getattr(os, call)
    broken = False

    class Break(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            nonlocal broken
            if batch_idx == 2 and not broken:
                trainer.strategy.model_states.finish()
                broken = True

    def fail(*arguments: Any, **options: Any) -> Any:
        if broken:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    expected = train(tmp_path, "auto", max_epochs=2)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=f"{tmp_path}/.*ENOSPC.*Free space"):
        patch.setattr(os, call, fail)
        train(tmp_path, offload("posix", recover=True), callbacks=[Break()], max_epochs=2)
    assert (tmp_path / "lightning_ssd-kept-rank0" / "journal").exists()
    found = train(tmp_path, offload("posix", recover=True), max_epochs=2)
    assert equal(weights(found), weights(expected))
