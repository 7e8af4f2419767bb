"""Tensors whose values are elsewhere: offloaded parameters, and what other code has made of them without copying.

Most uses of an offloaded parameter are inside its unit's forward, whose hook has fetched the weights: those are let
through. Every other operator on one goes to its `Access`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from lightning_ssd.model_states.access import Access, Source
    from lightning_ssd.model_states.flat import FlatParameter


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Has `hook` called when autograd has accumulated a gradient of `parameter`, be it frozen now, as it may thaw."""
    with torch._C.DisableTorchFunctionSubclass():
        wants = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes the hook of no other
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(wants)
    return handle


class Kind(Enum):
    """What a function does with the tensors that it is given."""

    METADATA = auto()
    """It reads no element, and acts on the tensor object itself."""
    DTYPE = auto()
    """It reads no element; what it returns depends on the dtype of the model as it was built."""
    MATMUL = auto()
    """It computes, writes nothing, returns no view, and autocast casts its arguments to 16 bits."""
    KERNEL = auto()
    """It computes, writes nothing and returns no view."""
    OPERATOR = auto()
    """One of autograd's operators: what it returns may be a view, which autograd follows if it follows the argument."""
    COMPUTE = auto()
    """Anything else: it may return a view, and write to its arguments where autograd does not look."""
    WRITE = auto()
    """It changes its arguments in place."""
    ALIAS = auto()
    """`Tensor.detach` and `Tensor.data`."""
    SET_DATA = auto()
    GET_GRAD = auto()
    SET_GRAD = auto()
    HOOK = auto()
    """It registers a hook that may look at gradients."""
    EXPORT = auto()
    """It gives memory to code that is not torch's: a read-only copy."""
    ADDRESS = auto()
    """It returns an address, which is valid for a moment only."""
    FREEZE = auto()
    """It makes a tensor a leaf that autograd follows."""


class TrainedParameter(nn.Parameter):
    """The class of a parameter while one training has more to it than its values. Copies and pickles are ordinary."""

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
    """Makes those of `parameters` that are of a training's own class ordinary ones, while compiled code uses them."""
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

    Some functions of torch, which do not call `__torch_function__`, read a tensor's memory in C++, and an evicted
    parameter has none: on a CPU they end the process with SIGSEGV. They are `torch.tensor(p)`, `x.new_tensor(p)`,
    `torch.utils.dlpack.to_dlpack(p)`, and reads of the tensor that `torch.Tensor(p)` returns. Give them `p.clone()`, or
    call them inside `whole_weights()`. `torch.from_dlpack(p)` and `torch.as_tensor(p)` work.

    Attributes:
        flat: the flat that it belongs to.
        source: its weights as plain Lightning has them.
    """

    flat: "FlatParameter"
    source: "Source"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kind = _KINDS.get(func) or kind_of(func)
            if kind is Kind.METADATA or (
                (kind is Kind.MATMUL or kind is Kind.KERNEL or (kind is Kind.OPERATOR and torch.is_grad_enabled()))
                and _in_forward(args, kind)
                and (not kwargs or _in_forward(kwargs.values(), kind))
                and _saves_references()
            ):
                return func(*args, **(kwargs or {}))
            return access_of(args, kwargs).run(kind, func, args, kwargs or {})

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """As `.data = source`: torch does not show this method to `__torch_function__`."""
        if not isinstance(source, Tensor) or args or kwargs:
            raise RuntimeError(
                f"`set_` gives {self.source.name}, which is offloaded, other memory, which can't be done while it "
                "trains. Do it before `fit`, in `configure_model`."
            )
        self.data = source
        return self


class OffloadedView(Tensor):
    """What shares memory with a parameter, a gradient or an optimizer state in plain training: `p.data`, `p.grad`, ...

    It has no memory of its own. An operator on it reads the values of that moment, and what is written to it counts.

    Attributes:
        source: the values that it is a view of.
        offset: where the view begins in the source, in bytes.
        versioned: whether autograd notices what is written to it: not through `Tensor.data`.
    """

    source: "Source"
    offset: int
    versioned: bool

    @staticmethod
    def make(
        source: "Source",
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        versioned: bool,
    ) -> "OffloadedView":
        """Returns a view of `source`; arguments as the attributes."""
        with torch.inference_mode(False), torch.no_grad():
            hollow = torch.empty_strided(size, stride, dtype=dtype, device=device)
            hollow.untyped_storage().resize_(0)
            view = hollow.as_subclass(OffloadedView)
        view.source = source
        view.offset = offset
        view.versioned = versioned
        source.aliases.add(view)
        return view

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kind = _KINDS.get(func) or kind_of(func)
            if kind is Kind.METADATA or kind is Kind.DTYPE:
                return func(*args, **(kwargs or {}))
            return access_of(args, kwargs).run(kind, func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: torch does not show this method to `__torch_function__`."""
        raise RuntimeError(f"`set_` of a view of {self.source.name}, which is offloaded. Use `copy_`.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def offloaded_in(value: Any, found: "dict[int, OffloadedParameter | OffloadedView]") -> None:
    """Puts every offloaded tensor of a tree of arguments into `found`, by identity."""
    if isinstance(value, OffloadedParameter | OffloadedView):
        found[id(value)] = value
    elif isinstance(value, list | tuple):
        for item in value:
            offloaded_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            offloaded_in(item, found)


def access_of(args: Any, kwargs: Mapping[str, Any] | None) -> "Access":
    """Returns the access of the offloaded tensors among some arguments."""
    found: dict[int, OffloadedParameter | OffloadedView] = {}
    offloaded_in(args, found)
    offloaded_in(kwargs, found)
    return next(iter(found.values())).source.access


def autocast_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast is on and casts the arguments of matrix products on `device` to `dtype`."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


def _in_forward(values: Iterable[Any], kind: Kind) -> bool:
    """Whether all parameters among `values` are in use by a forward, and may be given to the function as they are."""
    for value in values:
        of = type(value)
        if of is OffloadedParameter:
            flat = value.flat
            if not (flat.users and flat.resident) or flat.shared:
                return False
            if flat.mixed and not (kind is Kind.MATMUL and autocast_to(flat.dtype, flat.device)):
                return False
            if kind is Kind.OPERATOR and not value.requires_grad:
                return False
        elif of is OffloadedView or ((of is list or of is tuple) and not _in_forward(value, kind)):
            return False
    return True


def _saves_references() -> bool:
    """Whether autograd, if it saves a weight, gives it to hooks, which keep a reference in its place."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def kind_of(func: Callable[..., Any]) -> Kind:
    """Returns the kind of a function that `__torch_function__` was called with."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = cast(Any, func).__self__.__name__
        if name == "__get__":
            kind = _GETTERS.get(attribute, Kind.METADATA)
        else:
            kind = {"data": Kind.SET_DATA, "grad": Kind.SET_GRAD}.get(attribute, Kind.METADATA)
    elif name in _EXPORTS:
        kind = Kind.EXPORT
    elif name in _ADDRESSES:
        kind = Kind.ADDRESS
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
    "__cuda_array_interface__": Kind.EXPORT,
    **dict.fromkeys(("T", "mT", "H", "mH", "real", "imag"), Kind.COMPUTE),
}
"""Attributes that show elements, or the dtype; the others are metadata."""

_EXPORTS = ("numpy", "__array__", "__dlpack__")
_ADDRESSES = ("data_ptr", "storage", "_typed_storage")
_WRITING_DUNDERS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__",
                    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
                    "__imatmul__")  # fmt: skip

_KINDS: dict[Any, Kind] = {
    Tensor.detach: Kind.ALIAS,
    Tensor.register_hook: Kind.HOOK,
    Tensor.register_post_accumulate_grad_hook: Kind.HOOK,
    Tensor.element_size: Kind.DTYPE,
    Tensor.requires_grad_: Kind.FREEZE,
    # What reads no element. What is left out here costs time, and is right nevertheless.
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
            Tensor.untyped_storage,
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
"""By function: those that `kind_of` does not tell by their names, and those that it has told already."""
