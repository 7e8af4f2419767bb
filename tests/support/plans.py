"""Random plans, and trainings under them. For CPU and GPU tests."""

import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_ssd import SwapPlanner
from lightning_ssd.planning import ModelProfile, Plan, UnitPlan
from tests.support.trainings import make_trainer

BOTH: dict[str, Any] = {"min_bytes": 1, "host_memory": "64MiB", "states": "gpu"}
"""Arguments of a strategy with both tiers, for activations alone."""

MACHINE = Path(__file__).parents[2] / "configs/machines/h100.json"


class Watch(pl.Callback):
    """Totals of offloaded and recomputed bytes."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        offloader: Any = trainer.strategy.offloader  # type: ignore[attr-defined]
        self.stats = offloader.stats()


def quiet_trainer(default_root_dir: Path | None = None, **arguments: Any) -> pl.Trainer:
    """Returns a Trainer on one device that only trains, with further `arguments`."""
    return make_trainer(default_root_dir or Path.cwd(), **{"max_epochs": None} | arguments)


def planner(**arguments: Any) -> SwapPlanner:
    """Returns a SwapPlanner that measures for three steps."""
    return SwapPlanner(**{"machine": MACHINE, "warm_up": 2, "steps": 1} | arguments)


def draw(plan: Plan, profile: ModelProfile, seed: int, *, recompute: float = 0.25, checkpoint: float = 0.25) -> Plan:
    """Returns a plan with random choices for all saved tensors. About a third of the units keep all of theirs.

    Args:
        plan: plan with the other entries.
        profile: profile of the plan's model.
        seed: seed of the choices.
        recompute: share of the recomputable tensors to recompute.
        checkpoint: share of the units to checkpoint among those that may be.
    """
    generator = random.Random(seed)
    units = {}
    plain = False
    for unit in profile.units:
        operators: dict[str, Any] = {}
        checkpointed = unit.checkpoint_bytes is not None and generator.random() < checkpoint
        kept = checkpointed or generator.random() < 0.35
        plain_before, plain = plain, kept and not checkpointed
        for operator in unit.operators:
            again = operator.recompute_seconds is not None and generator.random() < recompute
            choice = "recompute" if again else generator.choice(["keep", "host", "ssd"])
            operators[operator.name] = "keep" if kept else choice
        before = plan.units[unit.name]
        where: Any = "keep" if plain or plain_before else generator.choice(["keep", "host", "ssd"])
        units[unit.name] = UnitPlan(before.weights, before.states, where, operators, checkpoint=checkpointed)
    return replace(plan, units=units, window_bytes=generator.choice([0, 2**14, 2**20]))


KEEP_CHECKPOINT_OFFLOAD = ("keep", "checkpoint", "host")
"""Treatments of units for `in_turn`."""


def in_turn(plan: Plan, profile: ModelProfile, kinds: Sequence[str]) -> Plan:
    """Returns the plan that treats the units that may be checkpointed by `kinds`, in turn; the others keep all."""
    turn = itertools.cycle(kinds)
    units: dict[str, UnitPlan] = {}
    after_checkpointed = False
    for unit in profile.units:
        kind = next(turn) if unit.checkpoint_bytes is not None else "keep"
        choice: Any = "host" if kind == "host" else "keep"
        operators = {operator.name: choice if operator.saved_bytes else "keep" for operator in unit.operators}
        where = "keep" if after_checkpointed else choice
        after_checkpointed = kind == "checkpoint"
        before = plan.units[unit.name]
        units[unit.name] = replace(before, input=where, operators=operators, checkpoint=after_checkpointed)
    return replace(plan, units=units)


def pinned(plan: Plan, **arguments: Any) -> SwapPlanner:
    """Returns a SwapPlanner that reads `plan` from a file and applies it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plan.save(path)
        return planner(plan=path, **arguments)
