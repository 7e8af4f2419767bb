"""`tensor_locations`: where the weights, gradients and optimizer states of a training are stored, tensor by tensor."""

from typing import Any

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import TensorLocation, find_units, locate_tensors
from lightning_ssd.waits import wait_for


def tensor_locations(trainer: pl.Trainer) -> list[TensorLocation]:
    """Returns the tier and address of every weight, gradient and optimizer state, between two steps of a training.

    Each tensor has a row, under any strategy: also tensors on the training device, and the shards of this process.
    Gradients have one while they exist. The table is read from the objects that store the tensors. Addresses are valid
    until the next step begins. The call waits for optimizer steps that have begun, and for their writes.

    Example:
        >>> class Where(pl.Callback):
        ...     def on_train_epoch_end(self, trainer, pl_module):
        ...         for row in tensor_locations(trainer):
        ...             print(row.kind, row.name, row.nbytes, row.tier, *row.files)

    Args:
        trainer: the Trainer, in a training or an evaluation.

    Raises:
        RuntimeError: the Trainer has no model.
        Exception: the error of an optimizer step that has failed.
    """
    if trainer.lightning_module is None:
        raise RuntimeError("the Trainer has no model. Call `tensor_locations` in a callback or in a hook of the model.")
    states = getattr(trainer.strategy, "model_states", None)
    if states is not None:
        states.drain()
        for store in states.stores.values():  # from the device of another rank, which may have stepped them
            wait_for(store.fetch(), "optimizer states on devices")
    return present_locations(trainer)


def present_locations(trainer: pl.Trainer) -> list[TensorLocation]:
    """Returns the same without waiting: steps and writes may run, so that files may not have the values yet."""
    strategy: Any = trainer.strategy
    config = getattr(strategy, "states_config", None)
    units = find_units(trainer.lightning_module, None if config is None else config.units)
    return locate_tensors(units, trainer.optimizers, strategy.root_device, getattr(strategy, "model_states", None))
