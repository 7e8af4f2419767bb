"""Checkpoint files of the strategy: which ones it writes and reads itself, a few units at a time, never all in RAM.

Files of other kinds (remote paths, other `checkpoint_io` plugins, replaced saving functions) are Lightning's.
"""

import copy
import shlex
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.model_states import (
    find_replaced,
    is_sharded,
    load_sharded,
    parameters_of,
    replace_values,
    save,
    save_sharded,
)
from lightning_ssd.sizes import check_choice

_MAPPED = ("state_dict", "current_model_state", "optimizer_states", "callbacks")
"""Entries of a checkpoint whose large tensors remain mapped, because their values are copied when they are loaded:
weights, weights beside the averaged ones of Lightning's `WeightAveraging`, and states of optimizers and callbacks."""

_MAPPED_BYTES = 2**20
"""Fewest bytes of a tensor's memory that remains mapped."""

_save_checkpoint = fabric.plugins.TorchCheckpointIO.save_checkpoint  # as Lightning has it


class CheckpointFiles:
    """Writes checkpoints with lazy tensors in the strategy's format.

    Args:
        format: the strategy's argument `checkpoints`.

    Raises:
        ValueError: there is no such format.
    """

    def __init__(self, format: Literal["file", "sharded"]) -> None:
        check_choice("checkpoints", format, ("file", "sharded"))
        self._format = format
        self._explained = False
        """Whether the log has said who loads a sharded checkpoint."""

    def write(
        self,
        plugin: fabric.plugins.CheckpointIO,
        checkpoint: dict[str, Any],
        path: str | Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> bool:
        """Writes a checkpoint, a few units at a time. Returns False if the Trainer's plugin must write it.

        It must if other code has replaced a saving function, because that code needs ordinary tensors.

        Args:
            checkpoint: the checkpoint, with lazy tensors.
            path: the file, or directory of a sharded checkpoint.
            module, optimizers: those of the training, which name the optimizer states of a sharded checkpoint.
        """
        method = getattr(plugin.save_checkpoint, "__func__", None)
        if not _is_local(plugin, path) or method is not _save_checkpoint or torch.save is not torch.serialization.save:
            return False
        if self._format == "file":
            save(checkpoint, path)
            return True
        names = {parameter: name for name, parameter in module.named_parameters()}
        numbered = [
            {number: names[item] for number, item in enumerate(parameters_of(optimizer)) if item in names}
            for optimizer in optimizers
        ]
        save_sharded(checkpoint, path, numbered)
        if not self._explained:
            self._explained = True
            pl.utilities.rank_zero_info(
                f"{path} is a sharded checkpoint. `load_from_checkpoint` and Trainers with other strategies load "
                f"the file that is made of it by `{_consolidate_command(path)}`."
            )
        return True


def present_path(plugin: fabric.plugins.CheckpointIO, path: str | Path) -> str | Path:
    """Returns `path`, or the temporary name of a local checkpoint whose replacement was killed."""
    return find_replaced(Path(path)) if _is_local(plugin, path) else path


def read_checkpoint(
    plugin: fabric.plugins.CheckpointIO, path: str | Path, *, weights_only: bool | None, mapped: bool
) -> dict[str, Any] | None:
    """Returns the checkpoint at `path`, or None if the Trainer's plugin must read it.

    Large weights, optimizer states and callbacks' states are mapped: if the file is later overwritten in place, their
    values change. All other tensors are in memory, because hooks of user code and schedulers keep them after loading.
    `copy_mapped_states` is for optimizers.

    Args:
        path: file, or directory that `save_sharded` wrote, as `present_path` returns it.
        weights_only: as in `torch.load`.
        mapped: whether a file is mapped, not read.

    Raises:
        ValueError: `path` is a directory that `save_sharded` has not written.
    """
    if not _is_local(plugin, path):
        return None
    torch.cuda.empty_cache()
    if Path(path).is_dir():
        if not is_sharded(path):
            raise ValueError(
                f"{path} is a directory that `checkpoints='sharded'` has not written. If another strategy has, make a "
                f"file of it: {_consolidate_command(path)}"
            )
        return _copy_unless_large(load_sharded(path, weights_only=weights_only))
    if not mapped or not zipfile.is_zipfile(path):  # or it is missing
        return None
    return _copy_unless_large(torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True))


def _consolidate_command(path: str | Path) -> str:
    """Returns the command of Lightning that makes one file of the sharded checkpoint at `path`."""
    return f"python -m {pl.__name__}.utilities.consolidate_checkpoint {shlex.quote(str(path))}"


def copy_mapped_states(optimizers: Iterable[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Copies the states that `optimizers` share with a checkpoint of `read_checkpoint`, once they are loaded.

    `Optimizer.load_state_dict` keeps states of parameters on the CPU by reference.
    """
    mapped: set[int] = set()
    memo: dict[int, Any] = {}

    def noted(_: str, value: Any) -> Any:
        if _is_strided(value):
            mapped.add(value.untyped_storage().data_ptr())
        return value

    def copied(_: str, value: Any) -> Any:
        is_mapped = _is_strided(value) and value.untyped_storage().data_ptr() in mapped
        return copy.deepcopy(value, memo) if is_mapped else value

    replace_values(checkpoint["optimizer_states"], noted)
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if (replaced := replace_values(state, copied)) is not state:
                optimizer.state[parameter] = replaced


def _copy_unless_large(loaded: dict[str, Any]) -> dict[str, Any]:
    """Copies all tensors in a mapped checkpoint but large ones of `_MAPPED` entries; shared memory remains shared."""
    memo: dict[int, Any] = {}

    def small_copied(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_large = _is_strided(value) and value.untyped_storage().nbytes() >= _MAPPED_BYTES
        return value if is_large else copy.deepcopy(value, memo)

    for key, value in loaded.items():
        loaded[key] = replace_values(value, small_copied) if key in _MAPPED else copy.deepcopy(value, memo)
    return loaded


def _is_strided(value: Any) -> bool:
    """Returns whether `value` is a tensor with one memory, unlike sparse ones."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_local(plugin: fabric.plugins.CheckpointIO, path: str | Path) -> bool:
    """Returns whether `path` is local, and the user has set no `checkpoint_io` of another class."""
    return type(plugin) is fabric.plugins.TorchCheckpointIO and "://" not in str(path)
