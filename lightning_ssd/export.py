"""Writes a checkpoint's weights to a folder of safetensors, which `transformers` and others load."""

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_ssd.model_states import is_sharded, load_sharded
from lightning_ssd.storage import StorageError

_COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")


def export(
    checkpoint: Path,
    folder: Path,
    *,
    prefix: str | None = None,
    shard_bytes: int = 4 * 2**30,
    dtype: torch.dtype | None = None,
    like: Path | None = None,
    trust: bool = False,
) -> list[Path]:
    """Writes the weights in `checkpoint` as safetensors, one file at a time, in RAM for one file.

    Args:
        checkpoint: a Lightning checkpoint, a file of `torch.save` with a state dict, or a sharded checkpoint.
        folder: folder to write, which must be empty if it exists.
        prefix: only weights whose names begin with it are written, without it: `"model."` for a module that has its
            model as `self.model`. None: that of a recipe's model, and none in other checkpoints.
        shard_bytes: most bytes of a file, unless a single weight is larger.
        dtype: dtype to which floating-point weights are cast; None: they are not cast.
        like: folder from which configuration and tokenizer are copied. None: the folder from which a recipe's model was
            loaded, if the checkpoint names one that still exists; else only the configuration is written, if the
            checkpoint of a recipe has one.
        trust: also load objects that are not tensors, which may run code of the file.

    Returns:
        The files of weights.

    Raises:
        ValueError: there are no such weights, the folder is not empty, the file is no checkpoint, or needs `trust`.
        OSError: a file could not be read or written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name another folder, or empty it.")
    sharded = is_sharded(checkpoint)
    if not sharded and (checkpoint.is_dir() or not zipfile.is_zipfile(checkpoint)):
        raise ValueError(
            f"{checkpoint} is no checkpoint: name one that the Trainer has saved, or a file of `torch.save`."
        )
    try:
        if sharded:
            loaded: Any = load_sharded(checkpoint, weights_only=not trust)
        else:
            loaded = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=not trust)
    except (OSError, StorageError):
        raise
    except Exception as error:  # torch and pickle raise errors of many classes
        if trust or "weights_only" not in str(error).lower():
            raise ValueError(f"{checkpoint} can't be read as a checkpoint: {error}") from error
        raise ValueError(
            f"{checkpoint} has objects that are not tensors, such as hyperparameters of user classes. If you trust it, "
            "add --trust."
        ) from error
    weights = _find_weights(loaded)
    if not weights:
        raise ValueError(f"{checkpoint} has no state dict: name a checkpoint, or a file with a state dict.")
    config = _recipe_config(loaded)
    if prefix is None:
        prefix = "" if config is None else "model."
    chosen = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    seen: set[object] = set()
    for name, value in list(chosen.items()):  # tied weights are written once: loading ties them again
        memory = value.untyped_storage().data_ptr(), value.storage_offset()
        key = (*memory, value.shape, value.stride(), value.dtype)
        if key in seen and value.numel():
            del chosen[name]
        seen.add(key)
    if not chosen:
        starts = sorted({name.split(".")[0] + "." for name in weights})
        raise ValueError(f"no weight in {checkpoint} begins with {prefix!r}. They begin with {', '.join(starts)}.")
    like = _pretrained_folder(loaded) if like is None else like
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if like is not None:
            for file in (file for pattern in _COPIED for file in like.glob(pattern) if file.is_file()):
                shutil.copyfile(file, folder / file.name)
        elif config is not None:
            (folder / "config.json").write_text(config)
        return _write(chosen, folder, shard_bytes, dtype)
    except BaseException:
        for written in folder.iterdir():  # else the next try would find that the folder is not empty
            written.unlink()
        if made:
            folder.rmdir()
        raise


def _pretrained_folder(loaded: object) -> Path | None:
    """Returns the folder with a configuration that the hyperparameters of a checkpoint name as `pretrained`, if any."""
    settings = loaded.get("hyper_parameters") if isinstance(loaded, dict) else None
    given = settings.get("pretrained") if isinstance(settings, dict) else None
    return Path(given) if isinstance(given, str) and (Path(given) / "config.json").is_file() else None


def _recipe_config(loaded: object) -> str | None:
    """Returns the configuration of a recipe's model, in JSON, if the checkpoint has one."""
    config = loaded.get("model_config") if isinstance(loaded, dict) else None
    return config if isinstance(config, str) else None


def _find_weights(loaded: object) -> dict[str, Tensor]:
    """Returns the tensors of the state dict in a loaded file, or nothing if it has none.

    A state dict may have other entries, too: those of `get_extra_state`, and in a checkpoint any that user code adds.
    """
    if not isinstance(loaded, dict):
        return {}
    state = loaded.get("state_dict", loaded)
    if not isinstance(state, dict):
        return {}
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = [name for name in state if name not in weights]
    is_state_dict = "state_dict" in loaded or all(str(name).endswith("_extra_state") for name in others)
    return weights if is_state_dict else {}


def _write(weights: dict[str, Tensor], folder: Path, shard_bytes: int, dtype: torch.dtype | None) -> list[Path]:
    def of(value: Tensor) -> torch.dtype:
        return dtype if dtype is not None and value.is_floating_point() else value.dtype

    sizes = {name: value.numel() * of(value).itemsize for name, value in weights.items()}
    shards = _divide_into_files(sizes, shard_bytes)
    files: list[Path] = []
    where: dict[str, str] = {}
    for index, names in enumerate(shards):
        name = "model" if len(shards) == 1 else f"model-{index + 1:05}-of-{len(shards):05}"
        files.append(folder / f"{name}.safetensors")
        shard = {key: weights[key].to(of(weights[key]), copy=True).contiguous() for key in names}
        files[-1].touch()
        mode = files[-1].stat().st_mode  # that of the umask, which `save_file` ignores
        save_file(shard, files[-1], metadata={"format": "pt"})
        files[-1].chmod(mode)
        where |= dict.fromkeys(names, files[-1].name)
    if len(shards) > 1:
        index_of = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of, indent=2))
    return files


def _divide_into_files(sizes: Mapping[str, int], most: int) -> list[list[str]]:
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
