"""`gradient_clip_val` and `gradient_clip_algorithm` that user code changes, against plain Lightning, bit for bit."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import build
from tests.support import trainings
from tests.support.access import PLACES
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies
from tests.support.models import BlocksModel
from tests.support.trainings import nothing_left, rows  # noqa: F401

Clipping = tuple[float | None, str | None]
"""`gradient_clip_val` and `gradient_clip_algorithm`."""

CLIPPINGS: dict[str, Clipping] = {
    "none": (None, None),
    "zero": (0, "norm"),
    "norm": (0.01, None),
    "large norm": (1e3, "norm"),
    "value": (0.001, "value"),
}


class Changes(pl.Callback):
    """Clips otherwise in each call of a hook, in turn.

    Args:
        hook: name of the hook, which is called before the step.
        clippings: keys of `CLIPPINGS`.
    """

    def __init__(self, hook: str, clippings: list[str]) -> None:
        self.calls = 0
        setattr(self, hook, lambda trainer, *_: self.change(trainer, clippings))

    def change(self, trainer: pl.Trainer, clippings: list[str]) -> None:
        trainer.gradient_clip_val, trainer.gradient_clip_algorithm = CLIPPINGS[clippings[self.calls % len(clippings)]]  # type: ignore[assignment]
        self.calls += 1


class Hooked(BlocksModel):
    """A hook between backward and step delays the steps."""

    def on_after_backward(self) -> None:
        pass


def fit(
    path: Path,
    states: str | None,
    hook: str,
    clippings: list[str],
    *,
    first: str = "none",
    precision: str = "32-true",
    scale: float = 2.0**8,
    kind: type[BlocksModel] = BlocksModel,
    strategy: Any = None,
    **arguments: Any,
) -> BlocksModel:
    """Trains eight blocks: more than those whose gradients have room in shared memory.

    Args:
        path: the Trainer's directory.
        states: tier of the states; None: plain Lightning.
        hook: as in `Changes`.
        clippings: as in `Changes`.
        first: key of the clipping that the Trainer is made with.
        precision: the Trainer's.
        scale: first loss scale in `16-mixed`.
        kind: class of the model.
        strategy: other arguments of the strategy.
        **arguments: other arguments of the Trainer.
    """
    value, algorithm = CLIPPINGS[first]
    how: dict[str, Any] = {"precision": precision, "gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    if precision == "16-mixed":
        del how["precision"]
        how["plugins"] = pl.plugins.MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        )
    chosen: Any = "auto"
    if states is not None:
        small = {"states": states, "min_bytes": 1, "gpu_memory": "1B", "ssd_capacity": "1MiB", "offload": "none"}
        chosen = SSDOffloadStrategy(**small | {"staging_memory": "16MiB"} | (strategy or {}))
    model = kind(functools.partial(torch.optim.AdamW, lr=1e-2), depth=8)
    callbacks = [Changes(hook, clippings)]
    defaults: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0}
    return trainings.fit(path, chosen, model, rows(5), callbacks=callbacks, **defaults | how | arguments)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("states", "hook", "overlap"),
    [
        ("host", "on_fit_start", "optimized"),
        ("ssd", "on_train_start", "none"),
        ("host", "on_train_epoch_start", "naive"),
        ("ssd", "on_train_batch_start", "optimized"),
    ],
)
def test_clipping_by_norm_that_begins_after_setup(tmp_path: Path, states: str, hook: str, overlap: str) -> None:
    found, expected = (fit(tmp_path, place, hook, ["norm"], strategy={"overlap": overlap}) for place in (states, None))
    assert_same(found, expected)


@settings(max_examples=5, deadline=None)
@given(
    clippings=st.lists(st.sampled_from(sorted(CLIPPINGS)), min_size=1, max_size=9),
    first=st.sampled_from(sorted(CLIPPINGS)),
    hook=st.sampled_from(["on_train_epoch_start", "on_train_batch_start"]),
    precision=st.sampled_from(["32-true", "bf16-mixed", "16-mixed"]),
    scale=st.sampled_from([2.0**8, 1000.0, 2.0**60]),
    kind=st.sampled_from([BlocksModel, BlocksModel, Hooked]),
    accumulated=st.sampled_from([1, 2, 3]),
    overlap=st.sampled_from(["optimized", "naive", "none"]),
    clip=st.sampled_from(["auto", "deferred", "speculative"]),
    late=st.booleans(),
    states=st.sampled_from([*PLACES, "auto"]),
)
def test_any_changes_of_clipping(
    clippings: list[str],
    first: str,
    hook: str,
    precision: str,
    scale: float,
    kind: type[BlocksModel],
    accumulated: int,
    overlap: str,
    clip: str,
    late: bool,
    states: str,
) -> None:
    """Also amid an accumulation, and with a loss scale that is no power of two."""
    how: dict[str, Any] = {"first": first, "precision": precision, "scale": scale, "kind": kind}
    how["accumulate_grad_batches"] = accumulated
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        expected = fit(Path(folder), None, hook, clippings, **how)
        if late:
            patch.setattr(build, "make_copy_engine", LateCopies)
        strategy = {"overlap": overlap, "clip": clip}
        assert_same(fit(Path(folder), states, hook, clippings, strategy=strategy, **how), expected)


@pytest.mark.parametrize(("to", "overlap"), [("norm", "optimized"), ("value", "none")])
def test_clipping_that_begins_within_a_step_is_refused(tmp_path: Path, to: str, overlap: str) -> None:
    """The steps of units have begun without it in backward, or at its end."""

    class ChangesLate(BlocksModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
            if batch_idx == 2:
                self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm = CLIPPINGS[to]  # type: ignore[assignment]
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

    with pytest.raises(RuntimeError, match="Change them before it, such as in `on_train_batch_start`"):
        fit(tmp_path, "host", "on_fit_start", ["none"], kind=ChangesLate, strategy={"overlap": overlap})
