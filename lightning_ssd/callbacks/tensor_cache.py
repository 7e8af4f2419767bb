"""How a callback finds the tensor cache of a training, whoever owns it."""

from lightning_ssd._lightning import pl
from lightning_ssd.activations import TensorCache


def trainer_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns the Trainer's own list of callbacks (which Lightning sets without declaring it)."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_tensor_cache(trainer: pl.Trainer) -> TensorCache | None:
    """Returns the tensor cache of the running fit: the strategy's, or that of an `ActivationOffload` callback."""
    for owner in (trainer.strategy, *trainer_callbacks(trainer)):
        cache = getattr(owner, "tensor_cache", None)
        if isinstance(cache, TensorCache):
            return cache
    return None
