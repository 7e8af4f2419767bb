"""The parts of a model that are offloaded: flat parameters, the stores of their values, and how they are stepped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_ssd.device import CopyEngine
from lightning_ssd.model_states.optimizers import FlatOptimizer
from lightning_ssd.model_states.stores import StateStaging, StateStore
from lightning_ssd.model_states.units import FlatParameter, Unit


@dataclass(frozen=True)
class OffloadedModel:
    """The flat parameters of a model, where their values are stored, and how they are stepped.

    Attributes:
        units: the units of the model as it was built, each with its flat parameters. User code may since have replaced
            modules or parameters; the new ones are in no unit.
        flat_optimizers: how each flat parameter is stepped; those without gradients have none.
        groups: for each flat parameter with a flat optimizer, its optimizer and the index of its parameter group.
        staging: memory and threads for values on SSDs; None where there are none.
    """

    units: Sequence[tuple[Unit, Sequence[FlatParameter]]]
    stores: Mapping[FlatParameter, StateStore]
    flat_optimizers: Mapping[FlatParameter, FlatOptimizer]
    groups: Mapping[FlatParameter, tuple[Optimizer, int]]
    copies: CopyEngine
    staging: StateStaging | None

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters of all flat parameters."""
        return {item.parameter for flat in self.stores for item in flat.param_views}

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of `groups`, each once."""
        return list({id(optimizer): optimizer for optimizer, _ in self.groups.values()}.values())
