"""`LightningTraining`: a Trainer's training, as `autoplan` sees it."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.autoplan import StatesOwner
from lightning_ssd.callbacks.find import find_model_states, get_offloader
from lightning_ssd.callbacks.prefetch_scheduler import find_schedulers
from lightning_ssd.model_states import ModelStates, StatesConfig, Unit, find_units
from lightning_ssd.types import StateFormat
from lightning_ssd.uncopied import Uncopied


class LightningTraining(Uncopied):
    """The training of a Trainer and its module; implements `autoplan.Training`, see there."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._module = module

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def offloader(self) -> ActivationOffloader:
        return get_offloader(self._trainer)

    @property
    def states(self) -> ModelStates | None:
        return find_model_states(self._trainer)

    @property
    def owner(self) -> StatesOwner | None:
        return states_owner(self._trainer)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._trainer.optimizers

    @property
    def automatic(self) -> bool:
        return self._module.automatic_optimization

    @property
    def replicated(self) -> bool:
        if self._trainer.world_size == 1 or self.states is not None:  # all ranks map all offloaded states
            return True
        return isinstance(self._trainer.strategy.model, DistributedDataParallel)

    @property
    def repeats_digits(self) -> bool:
        config = self._states_config()
        return self._trainer.world_size > 1 or (config is not None and config.recover)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes the files of the training."""
        return self._trainer.is_global_zero

    @property
    def micro_batches(self) -> int:
        return self._trainer.accumulate_grad_batches

    @property
    def scales_gradients(self) -> bool:
        return clips_norm(self._trainer) or self._trainer.precision == "16-mixed"

    @property
    def fixed_window(self) -> bool:
        return any(one.is_fixed for one in find_schedulers(self._trainer))

    @property
    def state_format(self) -> StateFormat:
        return "fp32" if (config := self._states_config()) is None else config.state_format

    def _states_config(self) -> StatesConfig | None:
        config: StatesConfig | None = getattr(self._trainer.strategy, "states_config", None)
        return config

    def units(self) -> list[Unit]:
        config = self._states_config()
        return list(find_units(self._module, None if config is None else config.units))

    def set_window(self, window_bytes: int | None) -> None:
        for scheduler in find_schedulers(self._trainer):
            scheduler.override_window(window_bytes)

    def inform(self, text: str) -> None:
        pl.utilities.rank_zero_info(text)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(metrics), step=step)


def clips_norm(trainer: pl.Trainer) -> bool:
    """Returns whether gradients are clipped by their norm at present, which callbacks may change."""
    algorithm = trainer.gradient_clip_algorithm or "norm"  # Lightning's default
    return (trainer.gradient_clip_val or 0) > 0 and algorithm == "norm"


def states_owner(trainer: pl.Trainer) -> StatesOwner | None:
    """Returns the owner of model states, if the strategy is one that can offload them."""
    owner: StatesOwner | None = getattr(trainer.strategy, "states_owner", None)
    return owner
