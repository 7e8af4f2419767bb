"""Finds the activation offloader of a training, the strategy's or that of an `ActivationOffload`, and model states."""

from typing import Protocol, cast

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, OffloadConfig
from lightning_ssd.model_states import ModelStates


class _Owner(Protocol):
    """A strategy or callback that has an activation offloader."""

    offloader: ActivationOffloader
    config: OffloadConfig


def trainer_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns the Trainer's own list of callbacks (which Lightning sets without declaring it)."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_offloader(trainer: pl.Trainer) -> ActivationOffloader | None:
    """Returns the running fit's activation offloader, or None if activations are not offloaded."""
    owner = _owner(trainer)
    return None if owner is None else owner.offloader


def get_offloader(trainer: pl.Trainer) -> ActivationOffloader:
    """Returns the running fit's activation offloader, which the caller knows to exist."""
    offloader = find_offloader(trainer)
    assert offloader is not None
    return offloader


def find_model_states(trainer: pl.Trainer) -> ModelStates | None:
    """Returns the offloaded model states of the running fit, or None if the strategy offloads none."""
    return getattr(trainer.strategy, "model_states", None)


def offload_config(trainer: pl.Trainer) -> OffloadConfig:
    """Returns the configuration of the activation offloader that `find_offloader` returns."""
    owner = _owner(trainer)
    assert owner is not None
    return owner.config


def _owner(trainer: pl.Trainer) -> _Owner | None:
    for owner in (trainer.strategy, *trainer_callbacks(trainer)):
        if isinstance(getattr(owner, "offloader", None), ActivationOffloader):
            return cast(_Owner, owner)
    return None
