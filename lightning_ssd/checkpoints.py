"""Checkpoint files of the strategy: which ones it writes and reads itself, a few units at a time, never all in RAM.

Files of other kinds (remote paths, other `checkpoint_io` plugins, replaced saving functions) are Lightning's.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_ssd._lightning import fabric
from lightning_ssd.model_states import is_sharded, load_sharded

_save_checkpoint = fabric.plugins.TorchCheckpointIO.save_checkpoint  # as Lightning has it


def can_write(plugin: fabric.plugins.CheckpointIO, path: str | Path) -> bool:
    """Returns whether a checkpoint with lazy tensors may be written to `path` without the Trainer's plugin.

    It may not if other code has replaced a saving function, because that code needs ordinary tensors.
    """
    method = getattr(plugin.save_checkpoint, "__func__", None)
    return is_local(plugin, path) and method is _save_checkpoint and torch.save is torch.serialization.save


def read_checkpoint(
    plugin: fabric.plugins.CheckpointIO, path: str | Path, *, weights_only: bool | None, mapped: bool
) -> dict[str, Any] | None:
    """Returns the checkpoint at `path`, or None if the Trainer's plugin must read it.

    Args:
        plugin: the Trainer's plugin.
        path: file, or directory that `save_sharded` wrote.
        weights_only: as in `torch.load`.
        mapped: whether a file is mapped, not read.
    """
    if not is_local(plugin, path):
        return None
    torch.cuda.empty_cache()
    if is_sharded(path):
        return load_sharded(path, weights_only=weights_only)
    if not mapped or not zipfile.is_zipfile(path):  # or it is missing
        return None
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    return loaded


def is_local(plugin: fabric.plugins.CheckpointIO, path: str | Path) -> bool:
    """Returns whether `path` is local, and the user has set no `checkpoint_io` of another class."""
    return type(plugin) is fabric.plugins.TorchCheckpointIO and "://" not in str(path)
