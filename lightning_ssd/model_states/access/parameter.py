"""Tensor classes of offloaded parameters and of aliases that user code makes of them, and the sources of their values.

Most uses of an offloaded parameter are in its unit's forward, whose hook has prefetched the weights: these operators
run directly. Every other operator on an offloaded parameter is run by its `Access`.
"""

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    SavedWeight,
    check_version,
    in_backward,
    mark_offloaded,
    offloaded_weights,
    storage_of,
)
from lightning_ssd.device import refuse_access
from lightning_ssd.model_states.access.autograd_forwards import is_given_to_forward
from lightning_ssd.model_states.access.grad_dtype import GradDtype
from lightning_ssd.model_states.access.references import references_saved
from lightning_ssd.model_states.access.torch_functions import KINDS, Kind, kind_of, running_statistics
from lightning_ssd.model_states.stores import StagedFlats
from lightning_ssd.model_states.units import FlatParameter, TrainedParameter, over
from lightning_ssd.model_states.weights import ParamPrefetcher

_IN_TRANSFORM = (
    "`torch.func` transforms an operator on weights that are offloaded. Clone the weights before the transform "
    "(`weight = self.weight.clone()`) and use the clones in the transformed function, or set `states='gpu'`."
)
"""Note on errors of operators inside of transforms such as `torch.func.vmap`."""


class _RunsOperators:
    """Runs functions of torch on offloaded tensors, directly or by their `Access`.

    Attributes:
        source: the values of which the tensor has all, or a part, in plain training.
        byte_offset: offset of the tensor in the source.
        versioned: whether writes increment the version counter of the source, as those through `Tensor.data` do not.
    """

    __slots__ = ()

    _DIRECT: tuple[Kind, ...]
    """Kinds of functions that need no memory of the tensor."""

    source: "Source"
    byte_offset: int
    versioned: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with internals.without_torch_function():
            kind, kwargs = KINDS.get(func) or kind_of(func), kwargs or {}
            reads_grad = kind is Kind.GET_GRAD and type(args[0]) is OffloadedParameter
            if not (reads_grad or torch.is_grad_enabled()):
                _note_function(args, kwargs)
            if kind in cls._DIRECT:
                return func(*args, **kwargs)
            try:
                if reads_grad:
                    return args[0].source.access.grad(args[0])
                if _runs_on_memory(kind, func, args, kwargs):
                    if in_backward():
                        args, kwargs = map_tensors(recomputed, (args, kwargs))
                    if kind is Kind.MATMUL and torch.is_grad_enabled():
                        args, kwargs = in_order_of_casts(args, kwargs)
                    with references_saved():
                        result = func(*args, **kwargs)
                    return _follow(result, args, kwargs) if kind is Kind.OPERATOR else result
                return access_of(args, kwargs).run(kind, func, args, kwargs)
            except RuntimeError as error:
                if internals.innermost_transform() is not None:
                    error.add_note(_IN_TRANSFORM)
                raise

    def set_(self, *_: Any, **__: Any) -> Tensor:
        """Raises RuntimeError. (Torch does not call `__torch_function__` for this method.)"""
        raise RuntimeError(
            f"`set_` gives {self.source.name}, which is offloaded, other memory. Set its `.data`, use `copy_`, or do "
            "it before `fit`, in `configure_model`."
        )


class OffloadedParameter(_RunsOperators, TrainedParameter):
    """The class of a parameter while its weights are offloaded.

    Some functions of torch do not call `__torch_function__` and read a tensor's memory in C++: `torch.tensor(p)`,
    `x.new_tensor(p)`, `torch.utils.dlpack.to_dlpack(p)`, and reads of the tensor that `torch.Tensor(p)` returns. An
    evicted parameter has no memory: these functions raise RuntimeError (`device/empty_storage.py`), or end the process
    if torch is built without CUDA. Use `p.clone()` instead, or call them inside `whole_weights()`.
    `torch.from_dlpack(p)` and `torch.as_tensor(p)` work.

    Attributes:
        flat: flat parameter that it is a view of.
    """

    _DIRECT = (Kind.METADATA,)
    _OWN = ("flat", "source")

    flat: FlatParameter
    byte_offset = 0
    versioned = True

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Does the same as `.data = source`, or raises RuntimeError for memory of another kind or shape."""
        if not isinstance(source, Tensor) or args or kwargs:
            return super().set_(source, *args, **kwargs)
        self.data = source
        return self

    @property
    def plain_dtype(self) -> torch.dtype:
        """The dtype in plain training."""
        return self.source.item.dtype

    def part_of(self, values: Tensor) -> Tensor:
        """Returns an ordinary tensor over the part of `values`, the whole values of the source, that this one has."""
        return values.detach()

    def save(self) -> SavedWeight:
        """Returns the reference that autograd saves in place of the plain parameter, which has another dtype."""
        return _SavedTensor(self)


class AliasGraph:
    """The graph that an alias of offloaded values, such as `p.data`, and its views have in plain training.

    Args:
        followed: for gradients, `Gradient.followed`, which tells whether there is one.
        index: index of the parameter of a gradient.
    """

    def __init__(self, followed: set[int] | None = None, index: int = 0) -> None:
        self._followed = set() if followed is None else followed
        self._index = index

    @property
    def freed(self) -> bool:
        """Whether there is one in plain training, which is freed here: autograd can't differentiate the tensors."""
        return self._index in self._followed

    @freed.setter
    def freed(self, freed: bool) -> None:
        (self._followed.add if freed else self._followed.discard)(self._index)


class OffloadedView(_RunsOperators, Tensor):
    """A tensor that in plain training shares memory with a parameter or gradient, such as `p.data`.

    Operators read the present values of the source, and writes are stored there. The view has no memory of its own,
    except in the forward of the weight's module: kernels of user code, which torch does not report, read it there.

    Attributes:
        backed: whether the view has memory with the values, which the flat parameter owns until the forward ends.
        graph: its graph in plain training, which it shares with the tensor of which it is a view for autograd.
    """

    _DIRECT = (Kind.METADATA, Kind.DTYPE)

    backed: bool
    graph: AliasGraph

    @classmethod
    def make(
        cls,
        source: "Source",
        offset: int,
        memory: Tensor,
        *,
        versioned: bool,
        backed: bool,
        graph: AliasGraph | None = None,
    ) -> "OffloadedView":
        """Makes `memory` a view of `source`, and returns it; other arguments as the attributes.

        Args:
            memory: with `backed`, a new tensor over the memory of the values; otherwise a hollow one.
            graph: as the attribute; None: it is no view of another tensor for autograd.
        """
        memory.__class__ = cls
        view = cast(OffloadedView, memory)
        view.source = source
        view.byte_offset = offset
        view.versioned = versioned
        view.backed = backed
        view.graph = graph or AliasGraph()
        source.aliases.add(view)
        if backed:
            source.flat.backed_views.append(weakref.ref(view))
        else:
            view._mark()
        return view

    def _mark(self) -> None:
        """Has autograd save references in place of the view, which has no memory."""
        mark_offloaded(storage_of(self), AliasReferences(self.source, self.byte_offset, versioned=self.versioned))

    def release(self, *, keep: bool) -> None:
        """Ends the forward that has backed the view: operators of torch read the present values from now on.

        Args:
            keep: whether the view keeps the memory, with the values of that forward.
        """
        self.backed = False
        if keep:
            return
        with internals.without_torch_function(), torch.inference_mode(False), torch.no_grad():
            self.data = hollow(self.size(), self.stride(), self.dtype, self.device)
        self._mark()

    def end(self, values: Tensor) -> None:
        """Makes the view an ordinary tensor that shares the memory of `values`, the whole values of the source."""
        with internals.without_torch_function(), torch.inference_mode(False), torch.no_grad():
            self.data = self.part_of(values)
            name, freed = self.source.name, self.graph.freed
            del self.source, self.byte_offset, self.versioned, self.backed, self.graph
            self.__class__ = Tensor  # type: ignore[assignment]
            if freed:
                without_graph(self, name)

    @property
    def plain_dtype(self) -> torch.dtype:
        """The dtype in plain training."""
        return self.dtype

    def part_of(self, values: Tensor) -> Tensor:
        """Returns an ordinary tensor over the part of `values`, the whole values of the source, that this one has."""
        start = values.storage_offset() * values.itemsize + self.byte_offset
        return torch.empty(0, dtype=self.dtype, device=values.device).set_(
            values.untyped_storage(), start // self.itemsize, self.size(), self.stride()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


OffloadedTensor = OffloadedParameter | OffloadedView
"""A parameter whose weights are offloaded, or a view of offloaded values."""


class FollowedView(OffloadedView):
    """A view of a parameter whose node is in autograd's graph. Its values are those of the parameter at each read."""

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node of the operator that made the view, as in plain torch: user code looks for the parameter's there."""
        with internals.without_torch_function():
            node: Any = super().grad_fn
        if isinstance(node, internals.node_class(FollowedValues)):
            node = cast(Any, node).next_functions[0][0]
        if node is not None and any([_is_of_weights(following) for following, _ in node.next_functions]):
            return _ViewNode(node)
        return node


class Source(ABC):
    """Whole values of an offloaded tensor, wherever they are stored.

    Args:
        flat: flat parameter of the parameter that the values belong to.
        index: index of the parameter in `flat`.
        name: names the values in messages; None: by the name of the parameter.
    """

    def __init__(self, access: "OperatorAccess", flat: FlatParameter, index: int, name: str | None = None) -> None:
        self.name = name or flat.param_views[index].name
        self.aliases: weakref.WeakSet[OffloadedView] = weakref.WeakSet()
        """Views of the values that user code references."""
        self.move(access, flat, index)

    def move(self, access: "OperatorAccess", flat: FlatParameter, index: int) -> None:
        """Has the source, and its aliases, read and write the values at another place; arguments as of the class."""
        self.access = access
        self.flat = flat
        self.index = index
        self.item = flat.param_views[index]

    @abstractmethod
    def read(self) -> Tensor:
        """Returns the values on the device of the plain parameter: the resident ones, or a copy."""

    @abstractmethod
    def write(self, values: Tensor) -> None:
        """Stores `values`, a result of `read` that an operator has changed."""

    @property
    def whole(self) -> bool:
        """Whether the tensor is a plain one at present: training has ended, or weights are summoned."""
        return False

    @property
    def backs_views(self) -> bool:
        """Whether views share memory with the values, because the forward of the weight's module runs."""
        return False

    def base(self) -> Tensor:
        """Returns the values for an operator, as `read` does: with `backs_views`, in the memory that views share."""
        return self.read()

    @property
    def in_flat_memory(self) -> bool:
        """Whether the values on the device are those of plain training, in the memory of the flat parameter."""
        return False

    def in_own_storage(self) -> Tensor:
        """Returns the values as `read` does, at the place that they have in their storage in plain training."""
        return self.read().clone() if self.in_flat_memory else self.read()

    @property
    def origin(self) -> int:
        """Offset of the values in their storage in plain training, bytes."""
        return 0

    def end_aliases(self, values: Tensor) -> None:
        """Makes the aliases ordinary tensors that share the memory of `values`, whole values as of `read`."""
        for alias in list(self.aliases):
            alias.end(values)
        self.aliases.clear()

    def changed(self) -> None:
        """Increments the parameter's version counter, by which autograd detects in-place changes."""
        if not self.whole:
            torch.autograd.graph.increment_version(self.item.parameter)


class OperatorAccess(Protocol):
    """The part of `Access` that offloaded tensors and their sources use; see there."""

    @property
    def grad_dtype(self) -> GradDtype: ...
    @property
    def prefetcher(self) -> ParamPrefetcher: ...
    @property
    def staged(self) -> StagedFlats: ...
    def run(self, kind: Kind, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any: ...
    def wrap(self, result: Any, values: Mapping[int, Tensor], found: Mapping[int, OffloadedTensor]) -> Any: ...
    def grad(self, parameter: OffloadedParameter) -> Tensor | None: ...
    def base(self, source: Source) -> Tensor: ...
    def values(self, tensor: OffloadedTensor) -> Tensor: ...
    def begin_change(self, flat: FlatParameter) -> None: ...
    def add_grad(self, flat: FlatParameter, index: int, gradient: Tensor) -> None: ...


class AliasReferences:
    """Makes the references that autograd saves in place of tensors over the memory of a view, or of a forward's values.

    The storage of that memory owns this object.

    Args:
        start: offset of the storage in the source, bytes.
        versioned: as of `OffloadedView`, of all views of the memory.
    """

    def __init__(self, source: Source, start: int = 0, *, versioned: bool) -> None:
        self._source = source
        self._start = start
        self._versioned = versioned

    def save(self, tensor: Tensor) -> SavedWeight:
        if isinstance(tensor, OffloadedView) and not tensor.backed:
            return _SavedTensor(tensor)
        with internals.without_torch_function():
            offset = self._start + int(tensor.storage_offset()) * tensor.itemsize
            memory = as_non_view(tensor, backed=False)
        view = OffloadedView.make(self._source, offset, memory, versioned=self._versioned, backed=False)
        return _SavedTensor(view)


class _SavedTensor(SavedWeight):
    """An offloaded tensor that autograd has saved for a function of user code, and whose values backward needs."""

    __slots__ = ("_counter", "_tensor", "_version")

    def __init__(self, tensor: OffloadedTensor) -> None:
        self._tensor = tensor
        self._counter = tensor.source.item.parameter if tensor.versioned else None
        self._version = 0 if self._counter is None else internals.version_of(self._counter)

    def load(self) -> Tensor:
        tensor = self._tensor
        if self._counter is not None:
            check_version(self._counter, self._version, tensor.dtype, tensor.size())
        return tensor.source.access.values(tensor) if isinstance(tensor, OffloadedTensor) else tensor.detach()


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Applies an autograd function to tensors that no transform of `torch.func` maps, outside of the transforms."""
    if internals.innermost_transform() is None:
        return cast(Tensor, function.apply(*args))
    with internals.without_transforms():
        return cast(Tensor, function.apply(*args))


class WholeWeight(torch.autograd.Function):
    """The whole weights of a parameter for an operator that can't use the flat parameter's memory.

    That memory has 16 bits, or tensors of user code share memory with the parameter.
    """

    @staticmethod
    def of(parameter: Tensor, source: Source) -> Tensor:
        """Returns the whole weights. Their node runs in backward as soon as it is ready, as that of the parameter does.

        So hooks of gradients run in the order of plain training.
        """
        weights = apply(WholeWeight, parameter, source)
        internals.run_node_first(weights.grad_fn)
        return weights

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, source: Source) -> Tensor:
        ctx.source = weakref.ref(source)  # a graph that the module keeps would keep the module, without end
        with torch.inference_mode(False):
            return source.access.base(source).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        source: Source | None = ctx.source()
        if source is None or source.flat not in source.access.grad_dtype.summed_on_host:
            return gradient, None
        source.access.add_grad(source.flat, source.index, gradient)
        return None, None


class _ViewNode:
    """The node of a view, whose next node is the parameter's as in plain torch, without `WholeWeight` between them."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    @property
    def next_functions(self) -> tuple[Any, ...]:
        return tuple(
            node.next_functions[0] if _is_of_weights(node) else (node, number)
            for node, number in self._node.next_functions
        )


def _is_of_weights(node: Any) -> bool:
    return isinstance(node, internals.node_class(WholeWeight))


class FollowedValues(torch.autograd.Function):
    """Memory in place of a tensor that autograd follows: the values of a view for an operator, or a view's own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, memory: Tensor) -> Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _WithoutGraph(torch.autograd.Function):
    """A tensor whose graph was freed: that of `create_graph=True`, or of tensors written to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, name: str) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.tensor_name = name
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise not_followed(ctx.tensor_name)


def without_graph(tensor: Tensor, name: str) -> Tensor:
    """Returns `tensor`, which requires a gradient from now on, and through which a backward raises RuntimeError."""
    with torch.inference_mode(False), torch.enable_grad():
        return apply(_WithoutGraph, torch.empty((), device=tensor.device, requires_grad=True), tensor, name)


def as_non_view(value: Tensor, *, backed: bool) -> Tensor:
    """Returns a tensor like `value` that is no view for autograd: over its memory (`backed`), or a hollow one."""
    if backed:
        return over(value.untyped_storage(), value)
    return hollow(value.size(), value.stride(), value.dtype, value.device)


def hollow(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor without memory."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        refuse_access(tensor.untyped_storage(), "a view of a weight")
        return tensor


def share_all(*tensors: object) -> bool:
    """Returns whether two tensors are offloaded, and have the same memory, shape and strides in plain training."""
    one, other = (
        (tensor.source, tensor.byte_offset, tensor.plain_dtype, tensor.shape, tensor.stride())
        if isinstance(tensor, OffloadedTensor)
        else None
        for tensor in tensors
    )
    return one is not None and one == other


def offloaded_in(*trees: Any) -> dict[int, OffloadedTensor]:
    """Returns the offloaded tensors in trees of arguments, by identity, in order."""
    found: dict[int, OffloadedTensor] = {}
    for tree in trees:
        of = type(tree)  # `isinstance` of a parameter's class runs Python code, for each argument of each product
        if of is OffloadedParameter or issubclass(of, OffloadedView):
            found[id(tree)] = tree
        elif isinstance(tree, list | tuple):
            found |= offloaded_in(*tree)
        elif isinstance(tree, dict):
            found |= offloaded_in(*tree.values())
    return found


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Applies a function to the tensors of a tree; a list or tuple is returned itself if no item changes.

    The recursion is here: in a nested function it would be a reference cycle, which keeps weights on the device.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        mapped = [map_tensors(function, item) for item in value]
        if any([new is not old for new, old in zip(mapped, value, strict=True)]):
            return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def access_of(args: Any, kwargs: Mapping[str, Any]) -> OperatorAccess:
    """Returns the access of the offloaded tensors among some arguments."""
    return next(iter(offloaded_in(args, kwargs).values())).source.access


def _follow(result: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of an operator that has used the memory of weights, with `OffloadedView` in place of views."""
    if not _shares_weights(result):
        return result
    found = offloaded_in(args, kwargs)
    return next(iter(found.values())).source.access.wrap(result, found, found)


def _shares_weights(result: Any) -> bool:
    if isinstance(result, list | tuple):
        return any(map(_shares_weights, result))
    if type(result) is not Tensor or result.layout is not torch.strided:
        return False
    return offloaded_weights(result.untyped_storage()) is not None


def autocast_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether autocast is enabled and casts arguments of matrix products on `device` to `dtype`.

    Transforms such as `torch.func.vmap` divide products into operators of which autocast casts only some.
    """
    return (
        torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) == dtype
        and internals.innermost_transform() is None
    )


def _runs_on_memory(kind: Kind, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a function can use the memory of its offloaded arguments, because forwards use all of them."""
    return (
        (
            kind is Kind.MATMUL
            or kind is Kind.KERNEL
            or (kind is Kind.OPERATOR and torch.is_grad_enabled())
            # Offloaded statistics are stored by `Access`: no version counter tells that they have changed.
            or (kind is Kind.NORMALIZATION and not offloaded_in(running_statistics(func, args, kwargs)))
        )
        and _in_forward(args, kind)  # last, as it counts uses
        and (not kwargs or ("out" not in kwargs and _in_forward(kwargs.values(), kind)))
    )


def _in_forward(values: Iterable[Any], kind: Kind) -> bool:
    """Returns whether a forward on this thread, or a recomputation of one, uses all parameters among `values`, and
    their views have memory.
    """
    for value in values:
        of = type(value)
        if of is OffloadedParameter:
            flat = value.flat
            thread = get_ident()
            in_use = flat.users and flat.thread == thread
            # Operators of user code may change weights unnoticed, which are compared only when a forward ends.
            if not in_use and kind is not Kind.OPERATOR:
                in_use = flat.recomputed_by == thread and in_backward()
            if not (in_use and flat.resident) or flat.shared:
                return False
            if flat.mixed:
                if not (kind is Kind.MATMUL and autocast_to(flat.dtype, flat.device)):
                    return False
                if value.requires_grad and torch.is_grad_enabled():
                    value.source.access.grad_dtype.note_use(value, flat)
            if kind is Kind.OPERATOR and not value.requires_grad:
                return False
        elif issubclass(of, OffloadedView):
            flat = value.source.flat
            if not value.backed or value.graph.freed or flat.shared or flat.thread != get_ident():
                return False
            if kind is Kind.OPERATOR and not value.requires_grad:
                return False
            if offloaded_weights(storage_of(value)) is None:  # memory that was shared with user code
                return False
        elif (of is list or of is tuple) and not _in_forward(value, kind):
            return False
    return True


def recomputed(tensor: Tensor) -> Tensor:
    """Returns the argument of an operator in backward: a view of the memory in place of a frozen parameter.

    The hooks of `torch.utils.checkpoint` keep the tensors that a recomputation saves until autograd unpacks them. They
    detach those that require a gradient, and keep others as they are. A view keeps the memory, which a parameter loses
    when it is evicted for the next unit that is recomputed.
    """
    return tensor.detach() if type(tensor) is OffloadedParameter and not tensor.requires_grad else tensor


def in_order_of_casts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns arguments of a matrix product whose gradients autograd accumulates in the order of plain training.

    In plain training the node of autocast's cast is between a parameter and the product, and casts of later arguments
    run later in backward: compilers evaluate the arguments of autocast's calls from right to left. A 16-bit parameter
    has no cast. Its gradient would be accumulated first, that of a bias before that of the weight, and hooks of user
    code would run in another order. So those behind another leaf have a node that does nothing.
    """
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs} if kwargs else dict(enumerate(args))
    leaves = [
        name for name, value in given.items() if isinstance(value, Tensor) and value.is_leaf and value.requires_grad
    ]
    if len(leaves) < 2:  # most products: their input is no leaf, and there is no bias
        return args, kwargs
    for name in reversed(leaves[1:]):
        parameter = given[name]
        if type(parameter) is OffloadedParameter and parameter.flat.mixed:
            with internals.without_dispatch():  # no operator of plain training, which modes would report
                given[name] = parameter.view_as(parameter)
    return [given.pop(index) for index in range(len(args))], given


def not_followed(name: str) -> RuntimeError:
    """Returns the error of a use of a tensor whose graph was freed, where plain training differentiates it."""
    return RuntimeError(
        f"autograd can't differentiate {name}, which is offloaded: the graphs of `create_graph=True` and of tensors "
        "that were written to it are freed. Use the results of `torch.autograd.grad(loss, parameters, "
        "create_graph=True)`, write to a `.clone()`, or set `states='gpu'`."
    )


def _note_function(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Has gradients of 16-bit weights summed in fp32, if a user's autograd function that was given them runs `args`.

    Torch does not call `__torch_function__` for `torch.autograd.Function.apply`, whose backward may return gradients
    in fp32, as it does in plain training.

    Raises:
        RuntimeError: the function was given a tensor whose graph was freed, for which its backward would not run.
    """
    frame = sys._getframe(1)  # a thread of autograd may have no frame before that: a hook may be a method in C
    for value in offloaded_in(args, kwargs).values():
        differs = value.graph.freed if isinstance(value, OffloadedView) else value.flat.mixed and value.requires_grad
        if differs and not torch.is_inference_mode_enabled() and is_given_to_forward(value, frame):
            if isinstance(value, OffloadedView):
                raise not_followed(value.source.name)
            value.source.access.grad_dtype.sum_in_fp32(value, value.flat)
