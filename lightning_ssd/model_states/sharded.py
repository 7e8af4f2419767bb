"""Checkpoints as directories: tensors in safetensors files of bounded size, and the rest beside them.

    weights-00001.safetensors ...     the model's weights, by their names
    optimizer-00001.safetensors ...   all other tensors, by their paths in the checkpoint
    index.json                        the file of each tensor
    rest.ckpt                         the checkpoint, with names in place of tensors

When the checkpoint is written, the tensors of one file are in memory at a time; when it is read, files are mapped.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_ssd.model_states.lazy import LazyTensor
from lightning_ssd.model_states.replace import find_replaced, put_in_place, remove, sync_directory
from lightning_ssd.model_states.values import replace_values

SHARD_BYTES = 2**30
"""Most bytes of a file, unless a single tensor is larger."""

_KEY = "tensor of lightning_ssd"
"""Key of a dictionary that replaces a tensor; its value is the tensor's name."""

_ORDER = "dimensions in memory"
"""Key in that dictionary, unless the tensor is contiguous: its dimensions by descending strides, as the file has them.

Fused optimizers step optimizer states in the order of memory, so that these need the strides of their parameters."""

_STATE_DICT = "state_dict/"


def save_sharded(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Writes a directory that atomically replaces an older directory or file of its name.

    Args:
        checkpoint: the checkpoint to save; lazy tensors are read one file at a time.
        path: the directory; its parent is made if it is missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    remove(part)  # left by a process that was killed
    part.mkdir()
    try:
        tensors: dict[str, Tensor] = {}
        first: dict[object, str] = {}
        rest = replace_values(
            checkpoint,
            lambda name, value: _named(name, value, tensors, first) if isinstance(value, Tensor) else value,
        )
        sizes: dict[str, dict[str, int]] = {"weights": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            sizes["weights" if name.startswith(_STATE_DICT) else "optimizer"][name] = tensor.nbytes
        index: dict[str, str] = {}
        for kind, of_kind in sizes.items():
            for number, shard in enumerate(divide_into_files(of_kind, SHARD_BYTES)):
                file = f"{kind}-{number + 1:05}.safetensors"
                save_file({_in_file(name): _plain(name, tensors[name]) for name in shard}, part / file)
                index |= dict.fromkeys(shard, file)
        torch.save(rest, part / "rest.ckpt")
        (part / "index.json").write_text(json.dumps(index, indent=1))
        for file_path in part.iterdir():
            with open(file_path, "rb") as written:
                os.fsync(written.fileno())
        sync_directory(part)
        put_in_place(part, path)
    finally:
        remove(part)


def load_sharded(path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns the checkpoint in a directory that `save_sharded` wrote; its tensors are mapped, not read.

    Raises:
        FileNotFoundError: a file is missing.
    """
    path = find_replaced(Path(path))
    index: dict[str, str] = json.loads((path / "index.json").read_text())
    files = {file: safe_open(path / file, framework="pt") for file in set(index.values())}

    def restored(_: str, value: Any) -> Any:
        if not isinstance(value, dict) or _KEY not in value:
            return value
        name = value[_KEY]
        file: Any = files[index[name]]
        found: Tensor = file.get_tensor(_in_file(name))
        if (order := value.get(_ORDER)) is not None:
            found = found.permute(sorted(range(len(order)), key=order.__getitem__))
        return found

    rest = torch.load(path / "rest.ckpt", map_location="cpu", weights_only=weights_only)
    checkpoint: dict[str, Any] = replace_values(rest, restored)
    return checkpoint


def is_sharded(path: str | Path) -> bool:
    """Returns whether `path` is a directory that `save_sharded` wrote."""
    return (find_replaced(Path(path)) / "rest.ckpt").is_file()


def _in_file(name: str) -> str:
    return name.removeprefix(_STATE_DICT)


def _named(name: str, tensor: Tensor, tensors: dict[str, Tensor], names: dict[object, str]) -> dict[str, Any]:
    # Tied tensors are one object, or one piece of memory: they are written once, under the first name.
    identity = _identity(tensor)
    if identity not in names:
        while name in tensors:  # such as the path of both keys 1 and "1"
            name += "_"
        names[identity] = name
        tensors[name] = tensor
    first = names[identity]
    order = _order(first, tensor)
    return {_KEY: first} if order == sorted(order) else {_KEY: first, _ORDER: order}


def _order(name: str, tensor: Tensor) -> list[int]:
    """Returns the dimensions of a tensor in the order of its file; weights are contiguous for other programs."""
    stride = (0,) * tensor.dim() if name.startswith(_STATE_DICT) else tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dimension: -stride[dimension])


def _identity(tensor: Tensor) -> object:
    if isinstance(tensor, LazyTensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def divide_into_files(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Returns the names of the tensors of each file: of at most `most` bytes, unless a single tensor is larger."""
    shards: list[list[str]] = []
    filled = 0
    for name, nbytes in sizes.items():
        if not shards or filled + nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Returns a copy in memory of its own, because safetensors refuses tensors that share memory."""
    values = tensor.values() if isinstance(tensor, LazyTensor) else tensor.detach().cpu()
    return values.permute(_order(name, tensor)).contiguous().clone()
