"""`SaveFolder` writes the trained model as a folder that transformers, or peft, loads."""

import logging
from pathlib import Path

from torch import Tensor
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import LazyTensor
from lightning_ssd.sizes import check_count, parse_path

log = logging.getLogger(__name__)


class SaveFolder(pl.Callback):
    """Writes the model of a `CausalLM` recipe, or its adapters, to a folder when training ends.

    The folder has the layout of the model's original one, and `from_pretrained` loads it. Tensors are written one at a
    time, so that host memory need not hold the model. An existing folder is replaced when the new one is complete.

    Args:
        folder: Folder to write. None: `model` beside the logger's files, or in `default_root_dir`.
        every_n_steps: Optimizer steps after which the folder is also written during training. None: only at the end.
    """

    def __init__(self, folder: str | Path | None = None, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps, 1)
        self.folder = None if folder is None else parse_path("folder", folder, "finetuned")
        self.every_n_steps = every_n_steps
        self._saved_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuses models that can't be written, and folders that can't be replaced, before training.

        Raises:
            TypeError: If the model has no `save_folder` or no `check_folder`.
            ValueError: If the folder can't be replaced.
        """
        if not all(callable(getattr(pl_module, name, None)) for name in ("save_folder", "check_folder")):
            raise TypeError(
                f"SaveFolder writes models that have `save_folder` and `check_folder`, and not"
                f" {type(pl_module).__name__}"
            )
        pl_module.check_folder(self.path(trainer))  # type: ignore[operator]
        self._saved_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Writes the folder every `every_n_steps` steps."""
        every = self.every_n_steps
        if every is not None and trainer.global_step > self._saved_step and trainer.global_step % every == 0:
            self._save(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the folder."""
        if trainer.global_step > self._saved_step or self.every_n_steps is None:
            self._save(trainer, pl_module)

    def path(self, trainer: pl.Trainer) -> Path:
        """Returns the folder that a training of `trainer` writes."""
        log_dir = trainer.log_dir  # on all devices: it is broadcast
        return self.folder or Path(log_dir or trainer.default_root_dir) / "model"

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved_step = trainer.global_step
        weights = trainer.strategy.lightning_module_state_dict()  # on all devices: it may gather

        def value(name: str) -> Tensor:
            tensor: Tensor = weights[name]
            # `values` reads without caching: a cached tensor would stay in memory until the last one is written.
            return tensor.values() if isinstance(tensor, LazyTensor) else tensor

        folder = self.path(trainer)
        if trainer.is_global_zero:
            pl_module.save_folder(value, folder)  # type: ignore[operator]
            log.info("the model of step %d is in %s", trainer.global_step, folder)
