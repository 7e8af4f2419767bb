"""Folders of safetensors of a saved Hugging Face model: read into a model on `meta`, and written in the same layout.

A tensor is copied once, from the mapped file to its place in the model: the weights are never in memory twice.
"""

import contextlib
import json
import logging
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from lightning_ssd.model_states import put_in_place

log = logging.getLogger(__name__)

_SHOWN = 5  # names in a message
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of safetensors that a trained weight may have."""


class PretrainedFolder:
    """A folder that a causal language model was saved to with `save_pretrained`.

    Args:
        path: The folder: `config.json`, and `model.safetensors` or its shards with their index.

    Raises:
        FileNotFoundError: If `path` is no folder, or lacks a file.
        ValueError: If the configuration is not that of a causal language model, or the weights are quantized.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_config(path)
        self._file_of = _tensor_files(path)

    def bind(self, model: nn.Module) -> "InitialValues":
        """Returns the values of the folder for the parameters of `model`, which are on `meta` and tied as they will be
        trained, and gives its saved buffers theirs.

        Raises:
            ValueError: If a parameter has no tensor in the folder, or one of another shape.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers())
        found: dict[nn.Parameter, str] = {}
        unexpected: list[str] = []
        for stored, name in self._names_in(model):
            if name in parameters:
                found.setdefault(parameters[name], stored)
            elif name in buffers:
                owner, _, own = name.rpartition(".")
                model.get_submodule(owner)._buffers[own] = self.read(stored).clone()
            else:
                unexpected.append(stored)
        missing = [name for name, parameter in model.named_parameters() if parameter not in found]
        if missing:
            if self._in_other_layout(model, missing):
                raise ValueError(
                    f"{self.path} has the weights of {type(model).__name__} in a layout of files that transformers"
                    f" converts when it loads them, such as experts one by one, which is not supported: load the model"
                    f" by transformers, and save its `state_dict()` to model.safetensors by safetensors' `save_file`"
                )
            raise ValueError(
                f"{self.path} has no tensor for {_some(missing)} of {type(model).__name__}: it is incomplete, or its"
                f" config.json belongs to another model"
            )
        if unexpected := [name for name in unexpected if not _ignored(model, name)]:
            log.warning("%s has tensors that %s does not use: %s", self.path, type(model).__name__, _some(unexpected))
        for parameter, stored in found.items():
            self._check(stored, parameter)
        return InitialValues(self, found)

    def read(self, name: str) -> Tensor:
        """Returns a tensor of the folder, in its own dtype: a view of the mapped file, which takes no memory."""
        with _opened(self._file_of[name]) as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def save(self, model: nn.Module, value: Callable[[str], Tensor], folder: Path) -> None:
        """Writes weights to a folder of the same layout: names of files and tensors, shards, dtypes, tokenizer.

        One tensor at a time is in memory. Tensors that the model does not use are copied. The folder is replaced when
        the new one is whole.

        Args:
            model: Model that `bind` was called with. Its names are used, not its values.
            value: Returns the value of a parameter, by its name in `model`.
        """
        weights = set(self._file_of.values())
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names = {stored: name for stored, name in self._names_in(model) if name in parameters}
        with replaced_folder(folder) as part:
            for file in sorted(self.path.iterdir()):
                if file.is_file() and file not in weights and file.suffix != ".safetensors":
                    shutil.copy(file, part)
            for like in weights:
                # The header of the original file determines dtype and offset of every tensor.
                header, tensors = _header(like)
                order = sorted(tensors, key=lambda stored: tensors[stored]["data_offsets"])
                _write_tensors(
                    part / like.name,
                    header,
                    (
                        (value(names[stored]) if stored in names else self.read(stored), tensors[stored]["dtype"])
                        for stored in order
                    ),
                )

    def _names_in(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yields the folder's tensors and their names in `model`: `base_model_prefix` may be added or removed."""
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers()}
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        for stored in self._file_of:
            candidates = (stored, prefix + stored, stored.removeprefix(prefix))
            yield stored, next((name for name in candidates if name in known), stored)

    def _in_other_layout(self, model: nn.Module, missing: Iterable[str]) -> bool:
        """Returns whether transformers makes `missing` parameters from tensors of the folder with other names."""
        untyped: Any = model
        found: list[Any] = get_model_conversion_mapping(untyped)
        converters = [one for one in found if isinstance(one, WeightConverter)]
        renamings = [one for one in found if not isinstance(one, WeightConverter)]
        targets = {rename_source_key(stored, renamings, converters)[0] for stored in self._file_of}
        return not targets.isdisjoint(missing)

    def _check(self, stored: str, parameter: nn.Parameter) -> None:
        with _opened(self._file_of[stored]) as file:
            found = file.get_slice(stored)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != tuple(parameter.shape):
            raise ValueError(
                f"{stored!r} in {self._file_of[stored]} is of shape {shape}, and the model of config.json has"
                f" {tuple(parameter.shape)}: they do not belong together"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"{stored!r} in {self._file_of[stored]} is of dtype {dtype}, which can't be trained: take a folder"
                f" whose weights are not quantized"
            )


def save_new(model: nn.Module, value: Callable[[str], Tensor], folder: Path) -> None:
    """Writes a model without an original folder to a folder with its configuration and a file of weights.

    Args:
        model: Model of transformers. Names, shapes and dtypes of its parameters are used, not the values.
        value: Returns the value of a parameter, by its name in `model`.
        folder: Folder to write, which is replaced.
    """
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():  # tied ones once
        start, end = end, end + parameter.numel() * parameter.itemsize
        tensors[name] = {
            "dtype": kinds[parameter.dtype],
            "shape": list(parameter.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    del tensors["__metadata__"]
    with replaced_folder(folder) as part:
        model.config.save_pretrained(part)  # type: ignore[union-attr, operator]
        _write_tensors(
            part / "model.safetensors",
            struct.pack("<Q", len(text)) + text,
            ((value(name), tensors[name]["dtype"]) for name in tensors),
        )


class InitialValues(Mapping[nn.Parameter, Tensor]):
    """Values of a folder for a model's parameters, each read from its file anew at every look-up."""

    def __init__(self, folder: PretrainedFolder, names: dict[nn.Parameter, str]) -> None:
        self._folder = folder
        self._names = names

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._folder.read(self._names[parameter])

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._names  # the base class would read the value

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_tensors(file: Path, header: bytes, tensors: Iterable[tuple[Tensor, str]]) -> None:
    """Writes a file of safetensors: the header, and the tensors in the header's dtypes and order."""
    with file.open("wb") as out:
        out.write(header)
        for tensor, dtype in tensors:
            tensor = tensor.detach().to("cpu", _DTYPES.get(dtype, tensor.dtype)).contiguous()
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def check_replaceable(folder: Path, source: Path | None) -> None:
    """Checks that a folder can be replaced by a saved model without losing other files; makes its parents.

    Args:
        folder: Folder to replace, which may not exist.
        source: Original folder of the model, if any.

    Raises:
        ValueError: If `folder` is or holds `source`, is a file, holds anything but a saved model, or can't be written.
    """
    if source is not None and source.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder} is or holds the folder that the model comes from: name another one to save it to")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to save the model to")
    if folder.is_dir() and any(folder.iterdir()):
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ValueError(f"{folder} holds other files than a saved model, and saving replaces it: name another one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent).cleanup()
    except OSError as error:
        raise ValueError(f"{folder} can't be written ({error}): name another folder to save the model to") from error


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, which replaces `folder` on exit, and is removed after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)
        put_in_place(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _read_config(path: Path) -> PretrainedConfig:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"model.pretrained={path} holds no config.json: set it to a folder that a model was saved to with"
            f" `save_pretrained`, or leave it out for a tiny Llama with random weights"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    except ValueError as error:
        raise ValueError(f"model.pretrained={path} is of no model type that transformers knows: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model.pretrained={path} is of the model type {config.model_type!r}, which is no causal language model:"
            f" set it to the folder of one, such as a Llama, Qwen, Mistral or GPT-2"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"model.pretrained={path} has quantized weights, which can't be trained: take the folder of the model"
            f" before its quantization"
        )
    return config


def _tensor_files(path: Path) -> dict[str, Path]:
    """Returns the file of every tensor, in the order of files."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():
        files = [single]
    elif index.is_file():
        shards = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        files = [path / shard for shard in sorted(shards)]
    else:
        raise FileNotFoundError(
            f"model.pretrained={path} holds neither model.safetensors nor its index: save the model there by"
            f" transformers' `save_pretrained`"
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"model.pretrained={path} lacks {_some(missing)}, which its index names")
    file_of: dict[str, Path] = {}
    for file in files:
        with _opened(file) as opened:
            file_of |= dict.fromkeys(opened.keys(), file)
    return file_of


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole file of safetensors ({error}): copy it again") from error


def _header(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns the bytes before the first tensor's, and the description of each tensor in them."""
    with file.open("rb") as stream:
        length = stream.read(8)
        header = stream.read(struct.unpack("<Q", length)[0])
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return length + header, tensors


def _ignored(model: nn.Module, name: str) -> bool:
    """Returns whether transformers also ignores a tensor of this name that `model` does not use."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq$"))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
