"""Callbacks that move model states between tiers during training."""

import random
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_ssd import tensor_locations
from lightning_ssd.model_states import find_units
from lightning_ssd.planning import PartPlan, Plan, UnitPlan

GPU, HOST, SSD = ("gpu", "gpu"), ("host", "host"), ("ssd", "ssd")


TIERS: Sequence[Any] = (GPU, HOST, SSD, ("host", "ssd"), ("ssd", "host"))


class Mover(pl.Callback):
    """Moves every unit to random tiers after every second step.

    Args:
        seed: seed of the choices.
        tiers: tiers to choose from.
    """

    def __init__(self, seed: int = 0, tiers: Sequence[Any] = TIERS) -> None:
        self.generator = random.Random(seed)
        self.tiers = tiers
        self.moves = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.fit_loop._should_accumulate() and trainer.global_step % 2:
            names = [unit.name for unit in find_units(pl_module)]
            move(trainer, {name: self.generator.choice(self.tiers) for name in names})
            self.moves += 1


def move(trainer: pl.Trainer, where: dict[str, Any]) -> None:
    units = {name: UnitPlan(weights, states, "keep", {}) for name, (weights, states) in where.items()}
    strategy: Any = trainer.strategy
    strategy.states_owner.move_states(Plan(units, 2**20, 2**20))
    found = {}
    for unit in find_units(trainer.lightning_module):
        stores = [
            store
            for flat, store in strategy.model_states.stores.items()
            if {item.parameter for item in flat.param_views} <= {parameter for _, parameter in unit.parameters}
        ]
        found[unit.name] = {
            (store.buffers.tiers[0], store.buffers.tiers[1] if store.layout.opt_state_bytes else where[unit.name][1])
            for store in stores
        } or {GPU}
    assert found == {name: {tiers} for name, tiers in where.items()}


class PartMover(Mover):
    """Moves every part of a unit to random tiers after every second step.

    Attributes:
        divided: moves after which a unit had parts in several tiers.
    """

    divided = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate() or not trainer.global_step % 2:
            return
        units = find_units(pl_module)
        where = {(unit.name, part.name): self.generator.choice(self.tiers) for unit in units for part in unit.parts}
        plans = {}
        for unit in units:
            names = [part.name for part in unit.parts]
            parts = [PartPlan(*where[unit.name, name]) for name in names]
            plans[unit.name] = UnitPlan("gpu", "gpu", "keep", {}).placed(names, parts)
        strategy: Any = trainer.strategy
        strategy.states_owner.move_states(Plan(plans, 2**20, 2**20))
        self.moves += 1
        self.divided += any(unit.parts for unit in plans.values())
        for row in tensor_locations(trainer):
            if row.kind != "gradient" and not row.name.endswith(".step"):  # a number in host memory
                assert row.tier == where[row.unit, row.part][row.kind != "weight"], row
