"""Checkpoints as directories of `torch.distributed.checkpoint`: the files of Lightning's FSDP strategy, and one more.

    __0_0.distcp       `model` and `optimizer_0` ...: the state dicts of the module and of each optimizer
    .metadata          keys, shapes and offsets of the values in `__0_0.distcp`
    meta.pt            all other entries of the checkpoint
    lightning_ssd.pt   the state dicts, with offsets in `__0_0.distcp` in place of tensors

`torch.distributed.checkpoint` keeps neither keys that are numbers, nor attributes of dictionaries, nor the order of
dimensions in memory, and it unpickles `.metadata`. The strategy therefore reads `lightning_ssd.pt` and `meta.pt` alone,
and maps tensors in `__0_0.distcp`. Other programs read the other three files.

When a checkpoint is written, one tensor at a time is in memory.
"""

import io
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.checkpoints.lazy import LazyTensor, save
from lightning_ssd.model_states.checkpoints.replace import find_replaced, put_in_place, remove, sync_directory
from lightning_ssd.model_states.checkpoints.values import replace_values

_DATA, _REST, _STATES = "__0_0.distcp", "meta.pt", "lightning_ssd.pt"

_ALIGNMENT = 64
"""Bytes to whose multiples `torch.save` aligns a tensor in its file, and to which each such file is aligned in ours."""

_OFFSET = "offset of a tensor"
"""Key of a dictionary that replaces a tensor: its offset in `__0_0.distcp`, and a tensor on `meta` like it."""


def save_sharded(checkpoint: Mapping[str, Any], path: str | Path, names: Sequence[Mapping[int, str]] = ()) -> None:
    """Writes a directory that atomically replaces an older directory or file of its name.

    Args:
        checkpoint: the checkpoint to save; its lazy tensors are read one after the other.
        path: the directory; its parent is made if it is missing.
        names: of each optimizer, the names of the parameters that its state dict numbers. As with Lightning's FSDP
            strategy, these replace the numbers in `__0_0.distcp`, whose keys are strings.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    remove(part)  # left by a process that was killed
    part.mkdir()
    try:
        states = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
        offsets = _save_distributed(states, part, names)

        def located(_: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or (offset := offsets.get(_identity(value))) is None:
                return value
            return {_OFFSET: (offset, _like(value))}

        save(replace_values(states, located), part / _STATES)
        save({key: value for key, value in checkpoint.items() if key not in states}, part / _REST)
        sync_directory(part)
        put_in_place(part, path)
    finally:
        remove(part)


def load_sharded(path: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns the checkpoint in a directory that `save_sharded` wrote; its large tensors are mapped, not read.

    Args:
        weights_only: as in `torch.load`, for all files that are unpickled.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file of tensors is shorter than when it was written.
    """
    path = find_replaced(Path(path))
    rest, states = (
        torch.load(path / name, map_location="cpu", weights_only=weights_only, mmap=True) for name in (_REST, _STATES)
    )
    nbytes = (path / _DATA).stat().st_size
    data = torch.UntypedStorage.from_file(str(path / _DATA), shared=False, nbytes=nbytes) if nbytes else None

    def mapped(_: str, value: Any) -> Any:
        if not isinstance(value, dict) or _OFFSET not in value:
            return value
        offset, like = value[_OFFSET]
        if data is None or offset + like.nbytes > nbytes:
            raise ValueError(f"{path / _DATA} is shorter than when it was written: copy the checkpoint again")
        found = torch.empty(0, dtype=like.dtype)
        return found.set_(data[offset : offset + like.nbytes], 0, like.shape, like.stride())

    checkpoint: dict[str, Any] = {**rest, **replace_values(states, mapped)}
    return checkpoint


def is_sharded(path: str | Path) -> bool:
    """Returns whether `path` is a directory that `save_sharded` wrote."""
    return (find_replaced(Path(path)) / _STATES).is_file()


def _save_distributed(states: Mapping[str, Any], folder: Path, names: Sequence[Mapping[int, str]]) -> dict[object, int]:
    """Writes `__0_0.distcp` and `.metadata`, and returns the offsets of tensors by their identities.

    This is `torch.distributed.checkpoint.save` in one process, except that `FileSystemWriter` holds all tensors until
    it has written the last one.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    optimizers = states.get("optimizer_states", [])
    named = {"model": states.get("state_dict", {})} | {
        f"optimizer_{index}": _by_name(state, names[index] if index < len(names) else {})
        for index, state in enumerate(optimizers)
    }
    tensors: dict[Tensor, Tensor] = {}
    """Tensors by those on `meta` that replace them in the plan."""

    def planned(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            raise ValueError(f"{name} is a sparse tensor: write checkpoints that have it with checkpoints='file'")
        like = _like(value)
        tensors[like] = value
        return like

    planner = DefaultSavePlanner()
    planner.set_up_planner(replace_values(named, planned), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    results: list[WriteResult] = []
    offsets: dict[object, int] = {}
    written: dict[object, Any] = {}
    with open(folder / _DATA, "w+b") as file:
        for item in plan.items:
            start = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            if item.type is WriteItemType.BYTE_IO:
                identity: object = item.index
                file.write(cast(io.BytesIO, planner.resolve_data(item)).getbuffer())
            else:
                tensor = tensors[planner.lookup_object(item.index)]
                identity = _identity(tensor)
                if identity not in written:  # tied tensors are written once
                    torch.save(_plain(tensor), file)
                    offsets[identity] = _find_data(file)
            if identity not in written:
                written[identity] = internals.new_storage_info(_DATA, start, file.seek(0, os.SEEK_END) - start)
            results.append(WriteResult(item.index, written[identity].length, written[identity]))
        file.flush()
        os.fsync(file.fileno())
    FileSystemWriter(folder).finish(metadata, [results])
    return offsets


def _by_name(state: Mapping[str, Any], names: Mapping[int, str]) -> Mapping[str, Any]:
    """Returns the state dict of an optimizer with names of parameters in place of their numbers."""
    if not {"state", "param_groups"} <= state.keys():  # an optimizer whose `state_dict` is not torch's
        return state

    def name(key: Any) -> str:
        return names.get(key, str(key))

    groups = [{**group, "params": [name(number) for number in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {name(key): value for key, value in state["state"].items()}, "param_groups": groups}


def _identity(tensor: Tensor) -> object:
    """Returns a value that tied tensors share: they are one object, or one piece of memory."""
    if isinstance(tensor, LazyTensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _like(tensor: Tensor) -> Tensor:
    """Returns a dense tensor on `meta` with the order of dimensions of `tensor`, whose values are not read."""
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))


def _plain(tensor: Tensor) -> Tensor:
    """Returns a copy in memory of its own, because `torch.save` writes the whole memory of a tensor."""
    values = tensor.values() if isinstance(tensor, LazyTensor) else tensor.detach()
    return torch.empty_like(_like(tensor), device="cpu").copy_(values)


def _find_data(file: IO[bytes]) -> int:
    """Returns the offset of a tensor's bytes in a file at whose end `torch.save` has written the tensor."""
    with zipfile.ZipFile(file) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    file.seek(entry.header_offset)
    name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))
    return entry.header_offset + 30 + int(name_bytes) + int(extra_bytes)
