"""Serialization of plain data, with a checksum: JSON for structure and scalars, safetensors for arrays, no pickles.

    magic           names the format and its version
    digest          xxh3, 128 bits, of all bytes after it
    length          of the JSON, 8 bytes
    JSON            lists, strings, numbers; each other value is an object with one key, which names its kind
    safetensors     the bytes of every tensor and array, in the order in which the JSON mentions them

Only the types that are listed here are written, and only they are made when bytes are read: the bytes select no code.
"""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn

MAGIC = b"lightning_ssd journal 2\n"

_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1

_FACTORIES: dict[str, Callable[[], object]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set}
"""Default factories of a `defaultdict` that can be written."""


class NotPlainError(ValueError):
    """A value is not plain data; the message names it, its type, and the remedy."""


class DamagedError(ValueError):
    """The bytes differ from the written ones."""


@dataclass(frozen=True)
class PlainData:
    """An encoded copy of a value.

    Attributes:
        tree: structure and scalars, of JSON's types.
        arrays: one-dimensional uint8 tensors on the CPU, to which the tree refers by index.
    """

    tree: object
    arrays: Sequence[Tensor]


def encode(value: object, name: str, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> PlainData:
    """Encodes a value: None, numbers, strings, bytes, tensors, arrays, and containers of these.

    Args:
        copy: returns a copy of a contiguous tensor on the CPU. The copy may run until `to_bytes` is called.

    Raises:
        NotPlainError: the value contains an object of another type.
    """
    arrays: list[Tensor] = []
    try:
        return PlainData(_Encoder(arrays, copy).encode(value, name), arrays)
    except RecursionError:
        raise NotPlainError(
            f"{name} contains itself, or is nested too deeply to be written. Make it flatter."
        ) from None


def decode(data: PlainData) -> Any:
    """Returns the encoded value, with tensors on the CPU.

    Raises:
        DamagedError: the tree was not made by `encode`.
    """
    try:
        return _decode(data.tree, data.arrays)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"it has values that are never written: {error!r}") from error


def to_bytes(parts: Mapping[str, PlainData]) -> bytes:
    """Returns the bytes of several values by name."""
    trees = {name: part.tree for name, part in parts.items()}
    arrays = {f"{name}/{index}": array for name, part in parts.items() for index, array in enumerate(part.arrays)}
    structure = json.dumps(trees, allow_nan=False, separators=(",", ":")).encode()
    body = struct.pack("<Q", len(structure)) + structure + safetensors.torch.save(arrays)
    return MAGIC + xxhash.xxh3_128_digest(body) + body


def from_bytes(content: bytes) -> dict[str, PlainData]:
    """Returns the values that `to_bytes` has written, by name.

    Raises:
        DamagedError: the bytes are damaged, or of another version of the format.
    """
    start = len(MAGIC) + 16
    if content[: len(MAGIC)] != MAGIC:
        raise DamagedError("it was written by another version of lightning_ssd, or is damaged")
    body = memoryview(content)[start:]
    if len(content) < start + 8 or xxhash.xxh3_128_digest(body) != content[len(MAGIC) : start]:
        raise DamagedError("its bytes are not those that were written (checksum)")
    (length,) = struct.unpack_from("<Q", body)
    trees: dict[str, object] = json.loads(bytes(body[8 : 8 + length]))
    arrays = safetensors.torch.load(bytes(body[8 + length :]))
    found: dict[str, PlainData] = {}
    for name, tree in trees.items():
        count = sum(key.startswith(f"{name}/") for key in arrays)
        found[name] = PlainData(tree, [arrays[f"{name}/{index}"] for index in range(count)])
    return found


class _Encoder:
    def __init__(self, arrays: list[Tensor], copy: Callable[[Tensor], Tensor]) -> None:
        self._arrays = arrays
        self._copy = copy

    def encode(self, value: Any, name: str) -> object:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if _MIN_INT <= value <= _MAX_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._all(value, name)
        if (encoded := self._container(value, kind, name)) is not None:
            return encoded
        if (encoded := self._array(value, kind)) is not None:
            return encoded
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is PosixPath:
            return {"path": str(value)}
        if kind is torch.dtype or kind is torch.device:
            return {"dtype" if kind is torch.dtype else "device": str(value).removeprefix("torch.")}
        raise NotPlainError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which is not plain data: None, numbers, strings, "
            "bytes, paths, tensors, NumPy arrays, and lists, tuples, sets and dictionaries of these. Keep it out, or "
            "put plain data in its place"
        )

    def _all(self, values: Any, name: str) -> list[object]:
        if all(type(item) is int and _MIN_INT <= item <= _MAX_INT for item in values):
            return list(values)  # among them the states of random generators, hundreds of numbers in each record
        return [self.encode(item, f"{name}[{index}]") for index, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], name: str) -> list[object]:
        return [[self.encode(key, f"a key of {name}"), self.encode(item, f"{name}[{key!r}]")] for key, item in
                value.items()]  # fmt: skip

    def _container(self, value: Any, kind: type, name: str) -> object:
        if kind is dict:
            return {"dict": self._pairs(value, name)}
        if kind in (tuple, set, frozenset, torch.Size):
            return {kind.__name__: self._all(value, name)}
        if kind in (OrderedDict, Counter):
            return {kind.__name__: self._pairs(value, name)}
        if kind is deque:
            return {"deque": [value.maxlen, self._all(value, name)]}
        if kind is defaultdict and _FACTORIES.get(getattr(value.default_factory, "__name__", "")):
            return {"defaultdict": [value.default_factory.__name__, self._pairs(value, name)]}
        return None

    def _array(self, value: Any, kind: type) -> object:
        if kind in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and not value.is_quantized:
            whole = value.detach().resolve_conj().resolve_neg().contiguous()
            self._arrays.append(self._copy(whole).view(-1).view(torch.uint8))
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [dtype, list(value.shape), len(self._arrays) - 1]}
        if kind is np.str_:  # a NumPy array would drop null characters at its end
            return {"str_": str.__str__(value)}
        if kind is np.bytes_:
            return {"bytes_": value.hex()}
        if isinstance(value, np.ndarray | np.generic) and kind.__module__ == "numpy" and value.dtype.kind in "biufcSU":
            content = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
            self._arrays.append(torch.from_numpy(content))
            of = "ndarray" if kind is np.ndarray else "numpy"
            return {of: [value.dtype.str, list(value.shape), len(self._arrays) - 1]}
        return None


def _decode(tree: Any, arrays: Sequence[Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    return _KINDS[kind](content, arrays)


def _decode_pairs(pairs: Any, arrays: Sequence[Tensor]) -> dict[Any, Any]:
    return {_decode(key, arrays): _decode(value, arrays) for key, value in pairs}


def _decode_tensor(content: Any, arrays: Sequence[Tensor]) -> Tensor:
    name, shape, index = content
    whole: Tensor = arrays[index].clone()  # the clone is aligned for its dtype
    return whole.view(_dtype(name)).reshape(shape)


def _decode_numpy(content: Any, arrays: Sequence[Tensor]) -> Any:
    name, shape, index = content
    dtype = np.dtype(name)
    if not dtype.itemsize:  # empty strings, for which NumPy makes no array from bytes
        return np.zeros(shape, dtype)
    return np.frombuffer(arrays[index].numpy().tobytes(), dtype=dtype).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


_KINDS: dict[str, Callable[[Any, Sequence[Tensor]], Any]] = {
    "int": lambda content, _: int(content, 16),
    "float": lambda content, _: struct.unpack(">d", bytes.fromhex(content))[0],
    "complex": lambda content, _: complex(*struct.unpack(">dd", bytes.fromhex(content))),
    "bytes": lambda content, _: bytes.fromhex(content),
    "path": lambda content, _: Path(content),
    "dtype": lambda content, _: _dtype(content),
    "device": lambda content, _: torch.device(content),
    "tuple": lambda content, arrays: tuple(_decode(content, arrays)),
    "set": lambda content, arrays: set(_decode(content, arrays)),
    "frozenset": lambda content, arrays: frozenset(_decode(content, arrays)),
    "Size": lambda content, arrays: torch.Size(_decode(content, arrays)),
    "deque": lambda content, arrays: deque(_decode(content[1], arrays), content[0]),
    "dict": _decode_pairs,
    "OrderedDict": lambda content, arrays: OrderedDict(_decode_pairs(content, arrays)),
    "Counter": lambda content, arrays: Counter(_decode_pairs(content, arrays)),
    "defaultdict": lambda content, arrays: defaultdict(_FACTORIES[content[0]], _decode_pairs(content[1], arrays)),
    "tensor": _decode_tensor,
    "ndarray": _decode_numpy,
    "str_": lambda content, _: np.str_(content),
    "bytes_": lambda content, _: np.bytes_(bytes.fromhex(content)),
    "numpy": lambda content, arrays: _decode_numpy(content, arrays)[()],
}
"""Functions that decode the values of each kind that JSON does not have."""
