"""Lazy tensors of a checkpoint: their values are read from the tiers at first use, or when the file is written.

A checkpoint of all weights and optimizer states needs RAM for one tensor at a time.
"""

import contextlib
import copy
import io
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.checkpoints.replace import remove, replacing
from lightning_ssd.model_states.checkpoints.values import replace_values
from lightning_ssd.model_states.units import in_memory_order

_MARK_BYTES = 32


class LazyTensor(Tensor):
    """A CPU tensor whose values are read when a function first uses them, and which is an ordinary tensor from then on.

    It has no memory until then. Functions of torch read the values by `__torch_function__`, or, if they read tensors in
    C++ alone (`torch.tensor(lazy)`), by `__torch_dispatch__`. C++ code that calls neither raises an error: it finds a
    tensor on `meta` (`parameter.data = lazy`), or a storage that refuses access.
    """

    _read: Callable[[], Tensor]
    _loaded: Tensor | None

    @staticmethod
    def make(like: Tensor, read: Callable[[], Tensor]) -> "LazyTensor":
        """Returns a lazy tensor with the shape, strides and dtype of `like`, which is dense.

        Args:
            like: a tensor on any device.
            read: returns the values, on the CPU, with any strides.
        """
        with torch.inference_mode(False):  # an evaluation may make it, and its end read the values
            tensor: LazyTensor = internals.make_wrapper(
                LazyTensor,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype,
                device=torch.device("meta"),
                dispatch_device=True,
            )
            internals.refuse_data_pointer(tensor)
        tensor._read = read
        tensor._loaded = None
        return tensor

    def load(self) -> Tensor:
        """Reads the values unless they were read before, and returns this tensor, which is an ordinary one now."""
        with torch.inference_mode(False):
            values = self._alias()
        internals.swap_tensor(self, values)
        del self._read, self._loaded
        self.__class__ = Tensor  # type: ignore[assignment]
        return self

    def values(self) -> Tensor:
        """Returns the values without storing them in the tensor."""
        return self._read() if self._loaded is None else self._loaded

    def _alias(self) -> Tensor:
        """Reads the values unless they were read before, and returns a new tensor that shares their memory."""
        if self._loaded is None:
            with torch.inference_mode(False):
                values = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype)
            self._loaded = values.copy_(self._read())
        return self._loaded.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # `__torch_function__` would search all objects in `memo`, and pass a copy of it on.
        return copy.deepcopy(self.load(), memo)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        shown = cast(Any, func).__self__.__name__ if name == "__get__" else name
        if shown in _CONVERSIONS and _changes_nothing(*args, **(kwargs or {})):
            return args[0]
        if shown in _SHAPES:
            with internals.without_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = load_lazy((args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        # C++ code holds the tensors at present, so that they can't become ordinary ones yet.
        args, kwargs = replace_values((args, dict(kwargs or {})), _aliased)
        return func(*args, **kwargs)


def _aliased(_: str, value: Any) -> Any:
    return value._alias() if isinstance(value, LazyTensor) else value


_SHAPES = ("shape", "dtype", "device", "size", "dim", "ndim", "numel", "element_size", "is_floating_point", "layout",
           "requires_grad", "nbytes", "itemsize", "stride", "__len__", "__hash__", "is_cuda", "grad_fn",
           "is_leaf")  # fmt: skip
"""Functions and attributes that read no values."""


_CONVERSIONS = ("to", "cpu")
"""Functions that may return the tensor itself: Lightning moves optimizer states to the CPU after training."""


def _changes_nothing(tensor: Tensor, device: object = "cpu", *more: object, **options: object) -> bool:
    """Returns whether `tensor.to(device, *more, **options)` is known to be `tensor`, which is on the CPU."""
    to_cpu = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    return to_cpu and not more and set(options) <= {"non_blocking"}


class LazyTensors:
    """All lazy tensors that are alive, and the context in which state dicts have lazy tensors."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        """Lazy tensors, and those that have become ordinary ones."""
        self._copies: weakref.WeakSet[Tensor] = weakref.WeakSet()
        """Those of `_alive` that are copies in plain training."""
        self._made: dict[object, Tensor] = {}
        self.enabled = False
        """Whether state dicts have lazy tensors."""

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Makes state dicts of its body contain lazy tensors."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False
            self._made.clear()

    def make(self, key: object, like: Tensor, read: Callable[[], Tensor], *, copied: bool) -> Tensor:
        """Returns a lazy tensor.

        Args:
            key: identity of the values. In one `making` context, equal keys give the same tensor, so that tied weights
                are in a file once.
            like: a dense tensor of the same shape, strides and dtype.
            read: returns the values, until `load` has read them.
            copied: whether user code that changes the stored values does not change the tensor.
        """
        if (made := self._made.get(key)) is not None:
            return made
        tensor = LazyTensor.make(like, read)
        self._alive.add(tensor)
        if copied:
            self._copies.add(tensor)
        self._made[key] = tensor
        return tensor

    def load_all(self) -> None:
        """Reads the values of all lazy tensors, before a step changes the stored values."""
        self.load_copies()
        load_lazy(list(self._alive))
        self._alive.clear()

    def load_copies(self) -> None:
        """Reads the values of lazy tensors that are copies, before user code changes the stored values."""
        load_lazy(list(self._copies))
        self._copies.clear()


def load_lazy(checkpoint: Any) -> Any:
    """Returns `checkpoint`, in whose dicts, lists and tuples the lazy tensors have become ordinary ones."""
    return replace_values(checkpoint, lambda _, value: value.load() if isinstance(value, LazyTensor) else value)


def note_unread(error: BaseException) -> None:
    """Adds the remedy to torch's error about an assignment to `Tensor.data`, which calls no hook of a lazy tensor."""
    if isinstance(error, RuntimeError) and "variable.set_data" in str(error):
        error.add_note(
            "If a value of a checkpoint or an optimizer state is assigned to `.data`: with offloaded states it has no "
            "memory until it is read. Assign `value.detach()`."
        )


def save(checkpoint: Any, path: str | Path) -> None:
    """Writes the same file as `torch.save`, with the values of one lazy tensor in memory at a time.

    Lazy tensors inside objects other than dicts, lists and tuples, such as dataclasses, remain in memory once they are
    written.

    The file is replaced atomically when the new one is durable: after a kill, the old or the new one exists.

    Args:
        path: a local file; its directory is made if it is missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{_escaped(path.name)}.*.part"):
        if not _alive(leftover):  # its process was killed
            remove(leftover)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    marks: dict[bytes, Tensor] = {}
    stand_ins: dict[LazyTensor, Tensor] = {}

    def marked(_: str, tensor: Any) -> Any:
        if not isinstance(tensor, LazyTensor):
            return tensor
        if tensor in stand_ins:
            return stand_ins[tensor]
        if tensor._loaded is not None or tensor.nbytes < _MARK_BYTES:
            return tensor.load()
        with internals.without_torch_function():
            plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            mark = secrets.token_bytes(_MARK_BYTES)
            in_memory_order(plain, plain.stride()).view(torch.uint8)[:_MARK_BYTES] = torch.frombuffer(
                bytearray(mark), dtype=torch.uint8
            )
        marks[mark] = tensor
        stand_ins[tensor] = plain
        return plain

    checked = torch.serialization.get_crc32_options()
    try:
        with replacing(path, part) as file:
            # torch can't compute checksums of values that it does not write itself. torch.load verifies none.
            torch.serialization.set_crc32_options(False)
            filling = _Filling(file, marks)
            try:
                torch.save(replace_values(checkpoint, marked), cast(IO[bytes], filling))
            except BaseException as error:
                # torch closes its file after an error, and raises an error about that instead of the first one.
                interrupt = error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else None
                raise (filling.error or interrupt or error) from None
            assert not marks, "a tensor was not written in one piece"
    finally:
        torch.serialization.set_crc32_options(checked)


class _Filling:
    """A file that writes a lazy tensor's values in place of its mark.

    Not an `io` class, whose finaliser would flush the closed file.

    `torch.serialization.skip_data` can't be used instead. It leaves holes for ordinary tensors, too, and the tensor of
    a hole is known only after all objects of the checkpoint are unpickled from the file.
    """

    def __init__(self, file: io.BufferedWriter, marks: dict[bytes, Tensor]) -> None:
        self._file = file
        self._marks = marks
        self.error: BaseException | None = None
        """The first error of a `write`."""

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def _write(self, data: Any) -> int:
        if len(data) >= _MARK_BYTES and (tensor := self._marks.pop(bytes(data[:_MARK_BYTES]), None)) is not None:
            loaded = tensor.values() if isinstance(tensor, LazyTensor) else tensor
            values = in_memory_order(loaded, tensor.stride()).view(torch.uint8)
            assert values.numel() == len(data)
            self._file.write(values.numpy().data)
            return len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _alive(part: Path) -> bool:
    """Returns whether the process that writes the file `part` is alive."""
    process = part.name.split(".")[-2]
    return process.isdigit() and Path(f"/proc/{process}").exists()
