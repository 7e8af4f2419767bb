"""A case of compatibility: a training, run by plain Lightning and under offload, and the expected outcome."""

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy

STEPS = 3
MIN_BYTES = 64
"""Bytes of the smallest activation that is offloaded in a case: nearly all of them are."""

Offloaded = Literal["activations", "host", "ssd"]
PLACEMENTS: tuple[Offloaded, ...] = ("activations", "host", "ssd")


@dataclass(frozen=True)
class Equal:
    """Losses, weights and buffers equal plain Lightning's bit for bit."""

    def __str__(self) -> str:
        return "equal"


@dataclass(frozen=True)
class Within:
    """Losses and weights differ from plain Lightning's by no more than `tolerance`, relative and absolute.

    Attributes:
        tolerance: largest difference.
        because: the reason, as the second half of a sentence.
    """

    tolerance: float
    because: str

    def __str__(self) -> str:
        return f"within {self.tolerance:g}, because {self.because}"


@dataclass(frozen=True)
class Refused:
    """An error whose message contains `message`, before a wrong number is used."""

    message: str

    def __str__(self) -> str:
        return f"refused: {self.message}"


Expectation = Equal | Within | Refused
EQUAL = Equal()


@dataclass(frozen=True)
class Run:
    """Results of a training.

    Attributes:
        losses: of every batch, training and validation.
        values: parameters and buffers at the end, by name.
        offloaded: the bytes of each fit's activations that were offloaded, and the units' flat buffers.
    """

    losses: list[Tensor] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    offloaded: list[tuple[int, int]] = field(default_factory=list)


Fit = Callable[[pl.Trainer, pl.LightningModule], Any]


def fit(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Fits on `STEPS` batches; a batch is its index, from which modules make their inputs."""
    trainer.fit(module, indices())


def indices(count: int = 2 * STEPS) -> DataLoader[Any]:
    """Returns a loader of batch indices."""
    return DataLoader(range(count), batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes:
        name: of the row, unique in its table.
        module: makes the module; the random number generator is seeded before it.
        states: the outcome where weights and optimizer states are offloaded, too.
        activations: the outcome where activations are.
        trainer: arguments of the Trainer, made anew for each run where they are objects.
        fit: runs the training.
        quick: runs by default, as a representative of its table.
    """

    name: str
    module: Callable[[], pl.LightningModule]
    states: Expectation = EQUAL
    activations: Expectation = EQUAL
    trainer: Callable[[], Mapping[str, Any]] = dict
    fit: Fit = fit
    quick: bool = False

    def expected(self, placement: Offloaded) -> Expectation:
        """Returns the outcome to expect where `placement` is offloaded."""
        return self.activations if placement == "activations" else self.states


def strategy(placement: Offloaded) -> SSDOffloadStrategy:
    """Returns the strategy that offloads nearly all activations, and model states to host memory or SSD."""
    if placement == "activations":
        return SSDOffloadStrategy(min_bytes=MIN_BYTES, offload=1.0, ssd_capacity="16MiB", staging_memory="16MiB")
    return SSDOffloadStrategy(
        states=placement, min_bytes=1, offload=1.0, ssd_capacity="64MiB", staging_memory="16MiB", gpu_memory="1B"
    )


class _Recorder(pl.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for loss in getattr(pl_module, "seen", ()):
            self.run.losses.append(loss)
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self.run.losses.append(outputs["loss"].detach().clone())
        if hasattr(pl_module, "seen"):
            pl_module.seen = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if isinstance(chosen := trainer.strategy, SSDOffloadStrategy) and chosen.offloader is not None:
            flats = 0 if chosen.model_states is None else len(chosen.model_states.stores)
            self.run.offloaded.append((chosen.offloader.stats().stored, flats))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.run.losses.extend(value.detach().clone() for _, value in sorted(trainer.callback_metrics.items()))


def train(case: Case, chosen: Any) -> Run:
    """Returns the numbers of `case` under the strategy `chosen`."""
    pl.seed_everything(3, verbose=False)
    module, run = case.module(), Run()
    arguments = dict(case.trainer())
    callbacks: Sequence[pl.Callback] = arguments.pop("callbacks", ())
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = pl.Trainer(
            strategy=chosen,
            accelerator="cpu",
            devices=1,
            default_root_dir=root,
            callbacks=[*callbacks, _Recorder(run)],
            **quiet | arguments,
        )
        case.fit(trainer, module)
        assert not list(Path(root).glob("lightning_ssd-*"))
    run.values.update({name: value.detach().clone() for name, value in module.state_dict().items()})
    return run


def outcome(case: Case, placement: Offloaded, plain: Run | Exception) -> Expectation:
    """Runs `case` and returns its outcome beside that of plain Lightning.

    Raises:
        AssertionError: the training differs, or failed, in a way that the case does not expect.
    """
    expected = case.expected(placement)
    try:
        run = train(case, strategy(placement))
    except Exception as error:
        if isinstance(expected, Refused) and expected.message in str(error):
            return expected
        raise
    if isinstance(plain, Exception):
        raise AssertionError(f"plain Lightning raises {plain!r}") from plain
    assert not isinstance(expected, Refused), f"it trains, though it should refuse with {expected.message!r}"
    assert run.losses, "no loss was seen"
    assert any(activations for activations, _ in run.offloaded), "no activation was offloaded"
    assert placement == "activations" or any(flats for _, flats in run.offloaded), "no weight was offloaded"
    assert len(run.losses) == len(plain.losses), f"{len(run.losses)} losses, not {len(plain.losses)}"
    assert run.values.keys() == plain.values.keys()
    tolerance = expected.tolerance if isinstance(expected, Within) else 0.0
    pairs = [(f"loss {index}", *pair) for index, pair in enumerate(zip(run.losses, plain.losses, strict=True))]
    pairs += [(name, value, plain.values[name]) for name, value in run.values.items()]
    for name, mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        if not tolerance:
            assert torch.equal(mine, theirs) or _both_nan(mine, theirs), (
                f"{name} differs by {_difference(mine, theirs)}"
            )
        else:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023
    assert any(torch.isfinite(loss).all() for loss in run.losses)
    return expected if isinstance(expected, Within) else EQUAL


def _both_nan(mine: Tensor, theirs: Tensor) -> bool:
    return mine.is_floating_point() and torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def _difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.to(torch.complex128) - theirs.to(torch.complex128)).abs().max())


def run_plain(case: Case) -> Run | Exception:
    """Returns the numbers of `case` under plain Lightning, or the error that it raises."""
    try:
        return train(case, "auto")
    except Exception as error:
        return error
