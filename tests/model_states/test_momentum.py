"""SGD whose momentum changes during the training, as in a warm-up, against plain Lightning, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.support.compare import assert_same, same
from tests.support.models import Model
from tests.support.states import STEPS, offloading, some_stay, train
from tests.support.trainings import nothing_left  # noqa: F401

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dampening": {"dampening": 0.5},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "dampening, fused": {"dampening": 0.5, "fused": True},
    "dampening, foreach": {"dampening": 0.5, "foreach": True, "maximize": True},
}

BEGIN = 3
"""Steps of the first group without momentum."""


class Momentum(pl.Callback):
    """Sets the momentum of each group by the number of steps, and appends the keys of the optimizer's states to `seen`.

    The first group begins with momentum 0, the second one ends with it, and begins again later.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        first, second = trainer.optimizers[0].param_groups
        first["momentum"] = 0.0 if trainer.global_step < BEGIN else 0.9
        second["momentum"] = 0.5 if trainer.global_step in (1, 2, 5, 6, 7) else 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        states = trainer.optimizers[0].state_dict()["state"]
        pl_module.seen.append({number: sorted(state) for number, state in sorted(states.items())})


class WarmUp(Model):
    def __init__(self, name: str) -> None:
        super().__init__(lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, **SETTINGS[name]), groups=True)
        self.seen: list[Any] = []


STRATEGIES: dict[str, Callable[[], Any]] = {
    "host": offloading,
    "ssd": lambda: offloading("ssd"),
    "small stay": lambda: offloading(min_bytes=300),
    "units stay": some_stay,
    "auto": lambda: "auto",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("strategy", ["host", "ssd", "small stay", "units stay"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_momentum_begins_with_a_new_buffer(tmp_path: Path, strategy: str, name: str, clip: float | None) -> None:
    """torch makes the buffer, without dampening, in the first step with momentum; until then there is no state."""
    how: dict[str, Any] = {"callbacks": [Momentum()], "gradient_clip_val": clip}
    found, expected = (train(tmp_path, STRATEGIES[one](), WarmUp(name), **how) for one in (strategy, "auto"))
    assert_same(found, expected)
    assert expected.seen[0] != expected.seen[-1]


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [("auto", "host", BEGIN), ("host", "auto", 1), ("auto", "ssd", BEGIN + 2), ("ssd", "host", BEGIN)],
)
def test_checkpoints_amid_a_warm_up(tmp_path: Path, first: str, second: str, step: int) -> None:
    """They have the states of plain Lightning, which resumes from them, and from whose they resume."""
    name = "dampening"
    contents: dict[str, Any] = {}
    for strategy in ("auto", first):
        folder = tmp_path / strategy
        saves = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)
        how: dict[str, Any] = {"callbacks": [Momentum(), saves], "enable_checkpointing": True, "max_steps": step}
        train(folder, STRATEGIES[strategy](), WarmUp(name), **how)
        (states,) = torch.load(folder / f"step={step}.ckpt", weights_only=False)["optimizer_states"]
        contents[strategy] = states | {"state": dict(sorted(states["state"].items()))}  # their order may differ
    assert same(contents[first], contents["auto"])
    how = {"callbacks": [Momentum()], "ckpt_path": str(tmp_path / first / f"step={step}.ckpt")}
    found, expected = (train(tmp_path, STRATEGIES[one](), WarmUp(name), **how) for one in (second, "auto"))
    assert_same(found, expected)
    assert len(found.seen) == 2 * STEPS - step
