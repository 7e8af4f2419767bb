"""Bad input, failing drives and killed runs raise a clear error, and leave no files."""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ssd import ActivationOffload, PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.storage import ChecksumError, StorageError, StorageFullError
from tests.support import forks
from tests.support.compare import assert_same
from tests.support.faults import FaultyBackend
from tests.support.forks import Program
from tests.support.products import thorough
from tests.support.trainings import (  # noqa: F401
    SmallModel,
    Watch,
    batches,
    make_trainer,
    nothing_left,
    offloading,
    package_threads,
    scratch_directories,
    script_environment,
    small_arguments,
    small_model,
)


def _plain(root: Path) -> SmallModel:
    model = small_model()
    make_trainer(root).fit(model, batches())
    return model


class TestBeforeTheFirstStep:
    def _refused(self, root: Path, error: type[Exception], match: str, **arguments: Any) -> None:
        """Asserts that strategy and callback refuse `arguments` before a step, and leave nothing."""
        for strategy, callbacks in (
            (offloading(**arguments), []),
            ("auto", [ActivationOffload(**(small_arguments() | arguments))]),
        ):
            model = small_model()
            trainer = make_trainer(root, strategy, callbacks=callbacks)
            with pytest.raises(error, match=match):
                trainer.fit(model, batches())
            assert model.losses == []
            assert scratch_directories(root) == []
            assert package_threads() == []

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            *(
                ({"path": "missing", "ssd_capacity": capacity}, StorageError, "missing' does not exist.*mkdir")
                for capacity in (None, "1MiB", "50%")
            ),
            ({"path": "file"}, StorageError, "file' is not a directory"),
            ({"path": [".", "missing"]}, StorageError, "missing' does not exist"),
            (
                {"path": "/sys/kernel"},
                StorageError,
                r"`path`.*/sys/kernel: \[E(PERM|ROFS|ACCES)\].*path",
            ),  # also for root
            ({"ssd_capacity": "99999TB"}, StorageFullError, "capacity 90.*available.*lower `ssd_capacity`"),
            ({"ssd_capacity": 0}, ValueError, "capacity.*at least"),
            *(
                ({"host_memory": "1MiB", "tier": tier}, ValueError, "`host_memory` of 1.00 MiB is too small")
                for tier in ("host", "ssd")
            ),
        ],
    )
    def test_arguments_that_fit_no_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, error: type[Exception], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("file").touch()
        self._refused(tmp_path, error, message, **arguments)

    def test_no_path_in_a_list(self) -> None:
        for build in (offloading, ActivationOffload):
            with pytest.raises(ValueError, match=r"`path=\[\]` names no directory"):
                build(path=[])

    def test_a_directory_that_is_given_twice(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        for build in (offloading, ActivationOffload):
            for other in (tmp_path, f"{tmp_path}/", tmp_path / "link"):
                with pytest.raises(ValueError, match="`path=.*names one directory twice"):
                    build(path=[tmp_path, other])

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_path_without_write_permission(self, tmp_path: Path) -> None:
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        self._refused(tmp_path, StorageError, r"`path`.*EACCES.*writable", path=locked)

    @pytest.mark.parametrize("states", ["auto", "gpu", "host"])
    def test_a_class_of_units_that_the_model_lacks(self, states: Any, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, offloading(states=states, units=["nn.GELU"]))
        with pytest.raises(ValueError, match="`units` names nn.GELU, which .* Give names without modules, .* GELU"):
            trainer.fit(small_model(), batches())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="kvikio may work here")
    def test_kvikio_where_there_is_no_gpu(self, tmp_path: Path) -> None:
        self._refused(tmp_path, StorageError, "kvikio.*posix", backend="kvikio")


def test_the_capacity_is_allocated_before_the_first_step(tmp_path: Path) -> None:
    """All of it, whole pages: 100 MB is no multiple of 4096."""
    taken: list[int] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            (directory,) = scratch_directories(tmp_path)
            taken.append((Path(directory) / "scratch.bin").stat().st_blocks * 512)

    trainer = make_trainer(tmp_path, offloading(ssd_capacity="100MB"), callbacks=[Look()])
    trainer.fit(small_model(), batches(1))
    assert taken[0] == 100_000_000 // 4096 * 4096


class _BreakAt(pl.Callback):
    """Breaks a drive when batch 2 begins."""

    def __init__(self, break_it: Callable[[], object]) -> None:
        self._break = break_it

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self._break()


def _io_error(operation: Any, number: int) -> Callable[[FaultyBackend], object]:
    return lambda backend: backend.error.update({operation: OSError(number, os.strerror(number))})


@pytest.mark.parametrize(
    ("under_the_strategy", "break_drive", "error", "match"),
    [
        (True, _io_error("write", errno.ENOSPC), StorageFullError, "ENOSPC.*Free space"),
        (False, lambda backend: setattr(backend, "flip", True), ChecksumError, "not what was written"),
    ],
    ids=["disk full", "flipped bit"],
)
def test_a_fault_in_the_middle_of_a_run_ends_it_before_a_wrong_number_is_used(
    tmp_path: Path,
    under_the_strategy: bool,
    break_drive: Callable[[FaultyBackend], object],
    error: type[StorageError],
    match: str,
) -> None:
    """The error names file and offset, no optimizer step used the batch, and the module can be trained again."""
    backend = FaultyBackend()
    arguments = small_arguments() | {"backend": backend}
    callbacks = [PrefetchScheduler(window_bytes=0), Watch(), _BreakAt(lambda: break_drive(backend))]
    if not under_the_strategy:
        callbacks.append(ActivationOffload(**arguments))
    trainer = make_trainer(
        tmp_path, SSDOffloadStrategy(**arguments) if under_the_strategy else "auto", callbacks=callbacks
    )
    model = small_model()
    with pytest.raises(error, match=match) as raised:
        trainer.fit(model, batches())
    assert raised.match(rf"at offset \d+ (in|of) {tmp_path}/lightning_ssd-.*/scratch.bin")
    assert trainer.global_step == 2
    assert scratch_directories(tmp_path) == []
    assert package_threads() == []

    model.load_state_dict(small_model().state_dict())
    model.zero_grad()
    model.losses.clear()
    make_trainer(tmp_path, offloading()).fit(model, batches())
    assert_same(_plain(tmp_path), model)


def test_a_failed_write_is_reported_even_if_the_bytes_are_never_loaded(tmp_path: Path) -> None:
    """Backward does not use the lost bytes; the next batch's first store raises the error."""
    backend = FaultyBackend()

    class Dropping(SmallModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.losses.append(self.loss(batch).item())
            staging = self.trainer.strategy.offloader.tiers["ssd"].staging
            staging.acquire(staging.budget).release()  # when all writes have ended

    break_drive = _BreakAt(lambda: _io_error("write", errno.EIO)(backend))
    model = small_model(kind=Dropping)
    trainer = make_trainer(tmp_path, offloading(backend=backend), callbacks=[break_drive])
    with pytest.raises(StorageError, match=r"at offset \d+ in .*scratch.bin: \[EIO\]"):
        trainer.fit(model, batches())
    assert len(model.losses) <= 3


_HELD = """
import signal
import sys
from pathlib import Path

import torch

# A shell starts a job in the background with Ctrl-C ignored, and what that job starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support.trainings import SmallModel, batches, make_trainer, offloading, small_model

FORWARD = {forward!r}


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if FORWARD:
            hold()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not FORWARD:
            hold()
        return grad


def hold():
    print("inside", flush=True)
    sys.stdin.readline()


class HeldModel(SmallModel):
    def loss(self, batch):
        hidden = self.net[:3](batch)
        if len(self.losses) == 2:
            hidden = Held.apply(hidden)
        return self.net[3:](hidden).pow(2).mean()


make_trainer(Path({root!r}), offloading()).fit(small_model(kind=HeldModel), batches())
print("trained", flush=True)
"""


@contextmanager
def _held_run(root: Path, *, forward: bool = True) -> Iterator[tuple[Program, Callable[[], tuple[str, str]]]]:
    """Runs a training in another process, and yields when that process waits for input within a step.

    Yields:
        The program, and a function that gives it the input, and returns the rest of its output and its errors.
    """
    script = root / "script.py"
    script.write_text(_HELD.format(root=str(root), forward=forward))
    (stdin, writes), (reads, stdout) = os.pipe(), os.pipe()
    with open(writes, "wb", buffering=0) as given, open(reads) as printed, (root / "errors").open("w") as errors:
        process = forks.start([script], env=script_environment(), stdin=stdin, stdout=stdout, stderr=errors)
        os.close(stdin)
        os.close(stdout)

        def end() -> tuple[str, str]:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                given.write(b"\n")
            output = printed.read()
            process.wait(60)
            return output, (root / "errors").read_text()

        try:
            if "inside" not in (line.strip() for line in printed):
                pytest.fail((root / "errors").read_text())
            yield process, end
        finally:
            process.kill()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("number", "forward"),
    [
        (signal.SIGTERM, True),
        thorough(signal.SIGTERM, False),
        thorough(signal.SIGINT, True),
        (signal.SIGINT, False),
    ],
)
def test_a_terminated_run_leaves_no_files(tmp_path: Path, number: signal.Signals, forward: bool) -> None:
    with _held_run(tmp_path, forward=forward) as (process, end):
        assert len(scratch_directories(tmp_path)) == 1
        process.send_signal(number)
        # Ctrl-C ends the step at once; SIGTERM lets it end, as Lightning does.
        output, errors = end()
    assert process.returncode in (0, 1), errors  # Lightning's: 0 after SIGTERM
    assert "trained" not in output
    assert scratch_directories(tmp_path) == []


@pytest.mark.parametrize("arguments", [{}, {"offload": "none", "states": "gpu"}], ids=["hooks", "no hooks"])
def test_functions_that_refuse_hooks_work_without_offloading(arguments: dict[str, Any], tmp_path: Path) -> None:
    class Module(SmallModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.func.grad(torch.sin)(torch.tensor(1.0)) * super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    strategy = SSDOffloadStrategy(tmp_path, **{"offload": 1.0, "min_bytes": 1} | arguments)
    failure = contextlib.nullcontext() if arguments else pytest.raises(RuntimeError, match="saved tensor hooks")
    with failure:
        make_trainer(tmp_path, strategy=strategy).fit(Module(), batches())
