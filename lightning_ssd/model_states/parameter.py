"""Tensor classes of offloaded parameters, and of aliases that user code makes of them.

Most uses of an offloaded parameter are in its unit's forward, whose hook has prefetched the weights: these operators
run directly. Every other operator on an offloaded parameter is run by its `Access`.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.activations import SavedWeight, check_version, mark_offloaded, offloaded_weights, storage_of
from lightning_ssd.device import refuse_access
from lightning_ssd.model_states.shared_memory import over

if TYPE_CHECKING:
    from lightning_ssd.model_states.access import Access
    from lightning_ssd.model_states.flat import FlatParameter
    from lightning_ssd.model_states.sources import Source, Weights


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Registers `hook` for accumulated gradients, also on a frozen parameter, which may require gradients later."""
    with torch._C.DisableTorchFunctionSubclass():
        wants = parameter.requires_grad
        parameter.requires_grad_(True)  # torch refuses the hook otherwise
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(wants)
    return handle


class Kind(Enum):
    """The effect of a function on its tensor arguments."""

    METADATA = auto()
    """Reads no element, and acts on the tensor object itself."""
    DTYPE = auto()
    """Reads no element; the result depends on the dtype with which the model was built."""
    MATMUL = auto()
    """Computes, writes no argument, returns no view, and autocast casts its arguments to 16 bits."""
    KERNEL = auto()
    """Computes, writes no argument and returns no view."""
    OPERATOR = auto()
    """An operator of autograd: the result may be a view, which autograd records if it records the argument."""
    COMPUTE = auto()
    """Any other function: it may return a view, and may write to its arguments unnoticed by autograd."""
    STRIDED = auto()
    """Addresses elements by their offset in the storage (`as_strided`)."""
    WRITE = auto()
    """Changes its arguments in place."""
    ALIAS = auto()
    """`Tensor.detach` and `Tensor.data`."""
    SET_DATA = auto()
    """Sets `Tensor.data`."""
    GET_GRAD = auto()
    """Reads `Tensor.grad`."""
    SET_GRAD = auto()
    """Sets or deletes `Tensor.grad`."""
    HOOK = auto()
    """Registers a hook that may read gradients."""
    EXPORT = auto()
    """Passes memory to code outside of torch, which gets a read-only copy."""
    ADDRESS = auto()
    """Returns an address, which is valid until the forward of the unit ends."""
    STORAGE = auto()
    """Returns the storage."""
    OFFSET = auto()
    """`Tensor.storage_offset`."""
    FREEZE = auto()
    """Sets whether autograd records operators on the tensor (`requires_grad`, `requires_grad_`)."""


class TrainedParameter(nn.Parameter):
    """Base class of parameters with additional state during a training. Copies and pickles are ordinary parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        with torch.inference_mode(False), torch.no_grad():
            return nn.Parameter(self.detach().clone(), self.requires_grad)


@contextlib.contextmanager
def ordinary(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes every `TrainedParameter` of `parameters` an ordinary one, while compiled code uses it."""
    classes = {parameter: type(parameter) for parameter in parameters if isinstance(parameter, TrainedParameter)}
    for parameter in classes:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, own in classes.items():
            parameter.__class__ = own


class OffloadedParameter(TrainedParameter):
    """The class of a parameter while its weights are offloaded.

    Some functions of torch do not call `__torch_function__` and read a tensor's memory in C++: `torch.tensor(p)`,
    `x.new_tensor(p)`, `torch.utils.dlpack.to_dlpack(p)`, and reads of the tensor that `torch.Tensor(p)` returns. An
    evicted parameter has no memory: these functions raise RuntimeError (`device/empty_storage.py`), or end the process
    if torch is built without CUDA. Use `p.clone()` instead, or call them inside `whole_weights()`.
    `torch.from_dlpack(p)` and `torch.as_tensor(p)` work.

    Attributes:
        flat: flat parameter that it is a view of.
        source: its weights as in plain Lightning.
        used: number of the graph that its 16-bit weights were last used in, in mixed precision.
    """

    flat: "FlatParameter"
    source: "Source"
    used: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kind = _KINDS.get(func) or kind_of(func)
            if kind is Kind.METADATA:
                return func(*args, **(kwargs or {}))
            if _runs_on_memory(kind, args, kwargs):
                result = func(*args, **(kwargs or {}))
                return _follow(result, args, kwargs or {}) if kind is Kind.OPERATOR else result
            return access_of(args, kwargs).run(kind, func, args, kwargs or {})

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Does the same as `.data = source`. (Torch does not call `__torch_function__` for this method.)"""
        if not isinstance(source, Tensor) or args or kwargs:
            raise RuntimeError(
                f"`set_` gives {self.source.name}, which is offloaded, other memory, which can't be done while it "
                "trains. Do it before `fit`, in `configure_model`."
            )
        self.data = source
        return self


class OffloadedView(Tensor):
    """A tensor that in plain training shares memory with a parameter, gradient or optimizer state, such as `p.data`.

    Operators read the present values of the source, and writes are stored there. The view has no memory of its own,
    except in the forward of the weight's module: kernels of user code, which torch does not tell of, read it there.

    Attributes:
        source: source of the values.
        offset: offset of the view in the source, bytes.
        versioned: whether writes increment the version counter of the source, as those through `Tensor.data` do not.
        lent: whether the view has memory with the values, which belongs to the running forward.
    """

    source: "Source"
    offset: int
    versioned: bool
    lent: bool

    @staticmethod
    def make(source: "Source", offset: int, memory: Tensor, *, versioned: bool, lent: bool) -> "OffloadedView":
        """Returns a view of `source`; other arguments as the attributes.

        Args:
            memory: a tensor over the memory that is `lent`, or a hollow one.
        """
        with torch.inference_mode(False), torch.no_grad():
            view = memory.as_subclass(OffloadedView)
        view._init(source, offset, versioned, lent)
        return view

    def _init(self, source: "Source", offset: int, versioned: bool, lent: bool) -> None:
        self.source = source
        self.offset = offset
        self.versioned = versioned
        self.lent = lent
        source.aliases.add(self)
        if lent:
            cast("Weights", source).flat.borrowers.append(weakref.ref(self))
        else:
            mark_offloaded(storage_of(self), _ViewReferences(self))

    def end_loan(self, *, keep: bool) -> None:
        """Ends the use of lent memory by operators of torch, which read the present values from now on.

        Args:
            keep: whether the view keeps the memory, with the values of the forward that has ended.
        """
        self.lent = False
        if keep:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            self.data = hollow(self.size(), self.stride(), self.dtype, self.device)
        mark_offloaded(storage_of(self), _ViewReferences(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kind = _KINDS.get(func) or kind_of(func)
            if kind is Kind.METADATA or kind is Kind.DTYPE:
                return func(*args, **(kwargs or {}))
            if _runs_on_memory(kind, args, kwargs):
                result = func(*args, **(kwargs or {}))
                return _follow(result, args, kwargs or {}) if kind is Kind.OPERATOR else result
            return access_of(args, kwargs).run(kind, func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raises RuntimeError. (Torch does not call `__torch_function__` for this method.)"""
        raise RuntimeError(f"`set_` of a view of {self.source.name}, which is offloaded. Use `copy_`.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class FollowedView(OffloadedView):
    """A view of a parameter that autograd follows: its node is in the graph, and its values are those of the moment."""

    @staticmethod
    def follow(source: "Source", offset: int, value: Tensor, *, versioned: bool, lent: bool) -> "FollowedView":
        """Returns a view of `source` with the node and the geometry of `value`; other arguments as the attributes."""
        view = _Apart.apply(value, lent)  # type: ignore[no-untyped-call]
        view.__class__ = FollowedView
        assert isinstance(view, FollowedView)
        view._init(source, offset, versioned, lent)
        return view


class _ViewReferences:
    """Makes the references that autograd saves in place of a view.

    Args:
        view: the view, which is not kept alive: this object belongs to its storage.
    """

    def __init__(self, view: OffloadedView) -> None:
        self._view = weakref.ref(view)

    def save(self, tensor: Tensor) -> SavedWeight:
        view = self._view()
        if view is None or view is not tensor:
            raise RuntimeError(
                "autograd can't save a tensor that shares the memory of a view of offloaded weights, which has none. "
                "Take a `.clone()` of the view first."
            )
        return _SavedOffloadedView(view)


class LentReferences:
    """Makes the references that autograd saves in place of whole weights that a forward has been lent.

    Args:
        source: the weights.
        values: the whole values; their storage owns this object, and is freed when the forward ends.
    """

    def __init__(self, source: "Weights", values: Tensor) -> None:
        self._source = source
        self._start = int(values.storage_offset()) * values.itemsize

    def save(self, tensor: Tensor) -> SavedWeight:
        with torch._C.DisableTorchFunctionSubclass():
            offset = int(tensor.storage_offset()) * tensor.itemsize - self._start
            memory = apart(tensor, lent=False)
        return _SavedOffloadedView(OffloadedView.make(self._source, offset, memory, versioned=True, lent=False))


class _SavedOffloadedView(SavedWeight):
    """A view that autograd has saved for a function of user code, and whose values backward needs."""

    __slots__ = ("_counter", "_version", "_view")

    def __init__(self, view: OffloadedView) -> None:
        self._view = view
        self._counter = view.source.counter if view.versioned else None
        self._version = 0 if self._counter is None else self._counter._version

    def load(self) -> Tensor:
        view = self._view
        if self._counter is not None:
            check_version(self._counter, self._version, view.dtype, view.size())
        return view.source.values(view)


class _Apart(torch.autograd.Function):
    """A tensor in place of another one, as `apart` returns it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, lent: bool) -> Tensor:
        return apart(value, lent=lent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def apart(value: Tensor, *, lent: bool) -> Tensor:
    """Returns a tensor like `value` that is no view for autograd: over its memory (`lent`), or a hollow one."""
    if lent:
        return over(value.untyped_storage(), value)
    return hollow(value.size(), value.stride(), value.dtype, value.device)


def hollow(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor without memory."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        refuse_access(tensor.untyped_storage(), "a view of a weight")
        return tensor


def offloaded_in(value: Any, found: "dict[int, OffloadedParameter | OffloadedView]") -> None:
    """Adds every offloaded tensor of a tree of arguments to `found`, by identity."""
    if isinstance(value, OffloadedParameter | OffloadedView):
        found[id(value)] = value
    elif isinstance(value, list | tuple):
        for item in value:
            offloaded_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            offloaded_in(item, found)


def access_of(args: Any, kwargs: Mapping[str, Any] | None) -> "Access":
    """Returns the `Access` of the offloaded tensors among some arguments."""
    found: dict[int, OffloadedParameter | OffloadedView] = {}
    offloaded_in(args, found)
    offloaded_in(kwargs, found)
    return next(iter(found.values())).source.access


def _follow(result: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an operator that has used the memory of weights, with `OffloadedView` in place of views."""
    if not _shares_weights(result):
        return result
    found: dict[int, OffloadedParameter | OffloadedView] = {}
    offloaded_in(args, found)
    offloaded_in(kwargs, found)
    return next(iter(found.values())).source.access.wrap(result, found, found)


def _shares_weights(result: Any) -> bool:
    if isinstance(result, list | tuple):
        return any(map(_shares_weights, result))
    if type(result) is not Tensor or result.layout is not torch.strided:
        return False
    return offloaded_weights(result.untyped_storage()) is not None


def autocast_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether autocast is enabled and casts arguments of matrix products on `device` to `dtype`."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


def _runs_on_memory(kind: Kind, args: Any, kwargs: Mapping[str, Any] | None) -> bool:
    """Returns whether a function can use the memory of its offloaded arguments, because forwards use all of them."""
    return (
        (kind is Kind.MATMUL or kind is Kind.KERNEL or (kind is Kind.OPERATOR and torch.is_grad_enabled()))
        and _in_forward(args, kind)
        and (not kwargs or ("out" not in kwargs and _in_forward(kwargs.values(), kind)))
        and saves_references()
    )


def _in_forward(values: Iterable[Any], kind: Kind) -> bool:
    """Returns whether all parameters among `values` are in use by a forward, and their views have memory."""
    for value in values:
        of = type(value)
        if of is OffloadedParameter:
            flat = value.flat
            if not (flat.users and flat.resident) or flat.shared:
                return False
            if flat.mixed:
                if not (kind is Kind.MATMUL and autocast_to(flat.dtype, flat.device)):
                    return False
                if value.requires_grad and torch.is_grad_enabled():
                    value.source.access.note_use(value)
            if kind is Kind.OPERATOR and not value.requires_grad:
                return False
        elif issubclass(of, OffloadedView):
            if not value.lent or value.source.flat.shared or (kind is Kind.OPERATOR and not value.requires_grad):
                return False
            # Normalizations may write statistics, and memory that was shared with user code is not that of the weights.
            if kind is Kind.KERNEL or offloaded_weights(storage_of(value)) is None:
                return False
        elif (of is list or of is tuple) and not _in_forward(value, kind):
            return False
    return True


def saves_references() -> bool:
    """Returns True unless autograd would save a weight without hooks, which save a reference in its place."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def kind_of(func: Callable[..., Any]) -> Kind:
    """Returns the kind of a function for which torch has called `__torch_function__`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = cast(Any, func).__self__.__name__
        if name == "__get__":
            kind = _GETTERS.get(attribute, Kind.METADATA)
        else:
            kind = _SETTERS.get(attribute, Kind.METADATA)
    elif name in _EXPORTS:
        kind = Kind.EXPORT
    elif name in _ADDRESSES:
        kind = Kind.ADDRESS
    elif name in _STORAGES:
        kind = Kind.STORAGE
    elif name in _STRIDED:
        kind = Kind.STRIDED
    elif (name.endswith("_") and not name.endswith("__")) or name in _WRITING_DUNDERS:
        kind = Kind.WRITE
    else:
        kind = Kind.COMPUTE if isinstance(func, FunctionType) else Kind.OPERATOR
    _KINDS[func] = kind
    return kind


_GETTERS = {
    "data": Kind.ALIAS,
    "grad": Kind.GET_GRAD,
    "_grad": Kind.GET_GRAD,
    "dtype": Kind.DTYPE,
    "itemsize": Kind.DTYPE,
    "nbytes": Kind.DTYPE,
    "__cuda_array_interface__": Kind.ADDRESS,
    **dict.fromkeys(("T", "mT", "H", "mH", "real", "imag"), Kind.COMPUTE),
}
"""Attributes whose values depend on elements or on the dtype; all others are metadata."""

_SETTERS = {"data": Kind.SET_DATA, "grad": Kind.SET_GRAD, "requires_grad": Kind.FREEZE}

_EXPORTS = ("numpy", "__array__", "__dlpack__")
_ADDRESSES = ("data_ptr", "const_data_ptr", "mutable_data_ptr")
_STORAGES = ("untyped_storage", "storage", "_typed_storage")
_STRIDED = ("as_strided", "as_strided_copy", "as_strided_scatter")
_WRITING_DUNDERS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__",
                    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
                    "__imatmul__")  # fmt: skip

_KINDS: dict[Any, Kind] = {
    Tensor.detach: Kind.ALIAS,
    Tensor.register_hook: Kind.HOOK,
    Tensor.register_post_accumulate_grad_hook: Kind.HOOK,
    Tensor.element_size: Kind.DTYPE,
    Tensor.requires_grad_: Kind.FREEZE,
    Tensor.storage_offset: Kind.OFFSET,
    # Functions that read no element. A function that is missing here is slower, but correct.
    **dict.fromkeys(
        (
            Tensor.dim,
            Tensor.get_device,
            Tensor.is_complex,
            Tensor.is_contiguous,
            Tensor.is_floating_point,
            Tensor.nelement,
            Tensor.numel,
            Tensor.retain_grad,
            Tensor.size,
            Tensor.stride,
            Tensor.__hash__,
            Tensor.__len__,
            torch.is_floating_point,
            torch.is_complex,
            torch.numel,
            torch.is_same_size,
        ),
        Kind.METADATA,
    ),
    **dict.fromkeys(
        (
            torch.nn.functional.linear,
            torch.nn.functional.conv1d,
            torch.nn.functional.conv2d,
            torch.nn.functional.conv3d,
            torch.nn.functional.conv_transpose1d,
            torch.nn.functional.conv_transpose2d,
            torch.nn.functional.conv_transpose3d,
            torch.conv1d,
            torch.conv2d,
            torch.conv3d,
            torch.matmul,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.__rmatmul__,
            torch.mm,
            Tensor.mm,
            torch.mv,
            Tensor.mv,
            torch.bmm,
            Tensor.bmm,
            torch.addmm,
            Tensor.addmm,
            torch.baddbmm,
            Tensor.baddbmm,
        ),
        Kind.MATMUL,
    ),
    **dict.fromkeys(
        (
            torch.nn.functional.layer_norm,
            torch.nn.functional.batch_norm,
            torch.nn.functional.group_norm,
            torch.nn.functional.rms_norm,
            torch.nn.functional.instance_norm,
            torch.nn.functional.prelu,
            torch.nn.functional.bilinear,
        ),
        Kind.KERNEL,
    ),
}
"""Kinds of functions that their names do not tell, and cached results of `kind_of`."""
