"""Runs operators on offloaded parameters and gradients outside of a unit's own forward.

An operator reads the same values as in plain training: those of the last step that was begun, whole, in the dtype and
on the device of the plain tensor. Its writes are stored in the master weights (or the gradient on the host) before the
operator returns, after the steps that have begun and before the next one.

- If autograd records the operator (a tied head, a weight penalty), its inputs are the compute weights, and all units
  that it reads are kept on the device until it returns. In mixed precision, operators that autocast would not run in
  16 bits read the master weights instead.
- If autograd does not record the operator, its inputs are copies of the values, or the resident values.
- In mixed precision the parameter in the graph has 16 bits, and `GradDtype` has its gradient summed in fp32 where plain
  Lightning does.
- Results that share memory with the inputs become `OffloadedView` objects, which read the present values and write
  through, as aliases do in plain training. In the forward of the weight's own module a view is backed: it has the flat
  parameter's memory until that forward ends, and kernels of user code may read it.

The tensor classes, in `parameter`, pass each function of torch to `Access` that they do not run directly. The effects
of functions are in `torch_functions`, their arguments in `operands`, and the values in `sources`.

Threads: the training thread, and autograd's while the training thread waits in `backward`; never two at a time. `run`
and `grad` refuse others.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import in_backward
from lightning_ssd.model_states.access.grad_dtype import GradDtype
from lightning_ssd.model_states.access.gradient_access import GradientAccess
from lightning_ssd.model_states.access.operands import (
    differentiate,
    geometry,
    offset_in,
    substitute,
)
from lightning_ssd.model_states.access.parameter import (
    FollowedValues,
    FollowedView,
    OffloadedParameter,
    OffloadedTensor,
    OffloadedView,
    Source,
    WholeWeight,
    apply,
    as_non_view,
    autocast_to,
    hollow,
    in_order_of_casts,
    map_tensors,
    not_followed,
    offloaded_in,
    recomputed,
    share_all,
    without_graph,
)
from lightning_ssd.model_states.access.references import references_saved
from lightning_ssd.model_states.access.sources import Weights
from lightning_ssd.model_states.access.torch_functions import Kind, running_statistics
from lightning_ssd.model_states.stores import StagedFlats, StateStore
from lightning_ssd.model_states.units import FlatParameter, SharedMemory, check_shareable, ordinary, same_stride
from lightning_ssd.model_states.weights import ParamPrefetcher

_REMEDY = "Do it inside `with trainer.strategy.whole_weights():`."


class Access:
    """Runs operators on offloaded tensors for one `ModelStates`.

    Args:
        prefetcher: prefetches their weights.
        staged: stages their values on the host.
        grad_dtype: sums gradients of 16-bit weights in fp32.
        grads: reads and assigns their gradients.
        begin_change: called before weights of a flat parameter change; raises RuntimeError if they may not.
        watched: called when user code registers a hook that may read gradients.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        prefetcher: ParamPrefetcher,
        staged: StagedFlats,
        grad_dtype: GradDtype,
        grads: GradientAccess,
        *,
        begin_change: Callable[[FlatParameter], None],
        watched: Callable[[], None],
    ) -> None:
        self.prefetcher = prefetcher
        self.staged = staged
        self.grad_dtype = grad_dtype
        self.begin_change = begin_change
        self.add_grad = grads.add
        self._grads = grads
        self._watched = watched
        self._versions: dict[FlatParameter, list[int]] = {}
        """Version counters of the parameters whose compute weights a running forward has, before it."""
        self._bases: dict[int, Tensor] = {}
        """Values that the running operator reads, by identity of the source, which several tensors may share."""
        self._flats = list(stores)
        # `torch.utils.swap_tensors` would replace parameters unnoticed. It refuses tensors that have weak references.
        self._unswappable = [weakref.ref(item.parameter) for flat in stores for item in flat.param_views]

    def open(self) -> None:
        """Makes the parameters of the flat parameters `OffloadedParameter` objects."""
        for flat in self._flats:
            for index, item in enumerate(flat.param_views):
                item.parameter.__class__ = OffloadedParameter
                assert isinstance(item.parameter, OffloadedParameter)
                item.parameter.flat = flat
                if (source := vars(item.parameter).get("source")) is None:
                    item.parameter.source = Weights(self, flat, index)
                else:  # the states were moved
                    source.move(self, flat, index)
        self.grad_dtype.open()

    def close(self) -> None:
        """Makes the parameters ordinary ones, without values, which the caller restores.

        Their attribute `source` has their aliases until other model states take these over, or `end_aliases`.
        """
        self.grad_dtype.close()
        for flat in self._flats:
            for item in flat.param_views:
                del item.parameter.flat  # type: ignore[attr-defined]
                item.parameter.__class__ = nn.Parameter

    @contextlib.contextmanager
    def ordinary(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Makes parameters ordinary ones while compiled code uses them. Their compute weights are resident.

        Raises:
            RuntimeError: the compiled code has changed a weight that is on the device in 16 bits, or memory that is
                shared with a weight.
        """
        offloaded = [parameter for parameter in parameters if isinstance(parameter, OffloadedParameter)]
        versions = [internals.version_of(parameter) for parameter in offloaded]
        with ordinary(offloaded):
            yield
        for flat in dict.fromkeys(parameter.flat for parameter in offloaded):
            if flat.shared and self.staged.differing(flat):
                raise RuntimeError(
                    f"compiled code has changed a tensor that shares memory with a weight of {flat.name}, which is "
                    "offloaded. Change it outside of the compiled module, or set `states='gpu'`."
                )
        for parameter, version in zip(offloaded, versions, strict=True):
            if internals.version_of(parameter) == version:
                continue
            source = parameter.source
            if source.flat.mixed:
                raise _changed_by_compiled(source.name)
            with torch.no_grad():
                source.write(source.read())

    @contextlib.contextmanager
    def whole(self, owners: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
        """Gives compiled code whole weights that have 16 bits on the device.

        Args:
            owners: modules with the names of their offloaded parameters.

        Raises:
            RuntimeError: the compiled code has changed a weight.
        """
        found = {
            (module, name): parameter
            for module, name in owners
            if isinstance(parameter := module._parameters.get(name), OffloadedParameter) and parameter.flat.mixed
        }
        if not found:
            yield
            return
        parameters = {id(parameter): parameter for parameter in found.values()}
        with self._values(parameters, computing=torch.is_grad_enabled()) as values:
            versions = {key: internals.version_of(value) for key, value in values.items()}
        try:
            for (module, name), parameter in found.items():
                module._parameters[name] = values[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for (module, name), parameter in found.items():
                module._parameters[name] = parameter
        for key, value in values.items():
            if internals.version_of(value) != versions[key]:
                raise _changed_by_compiled(parameters[key].source.name)

    def begin_forward(self, flat_params: Iterable[FlatParameter]) -> None:
        """Begins a forward that is given the compute weights of `flat_params`."""
        for flat in flat_params:
            flat.forwards += 1
            if flat.forwards == 1 and not flat.mixed:
                self._versions[flat] = flat.versions()

    def end_forward(self, flat_params: Iterable[FlatParameter]) -> None:
        """Ends a forward: its views of the weights lose their memory, and the weights that it has changed are stored.

        Views of a recomputation in backward keep their memory, because autograd unpacks them next for kernels that
        need it. Weights may have changed without a call of `run`, if user code calls torch in C++.
        """
        recomputing = in_backward()
        for flat in flat_params:
            flat.forwards -= 1
            if flat.forwards:
                continue
            flat.release_views(keep=recomputing)
            if (before := self._versions.pop(flat, None)) is None:
                continue
            with torch.inference_mode(False), torch.no_grad():
                for index, version in enumerate(flat.versions()):
                    if version != before[index] and flat.memory(index) is None:
                        Weights(self, flat, index).write(flat.view(index))

    def grad(self, parameter: OffloadedParameter) -> Tensor | None:
        """Returns `parameter.grad`, by a shorter way than `run`: optimizers read it of every parameter in every step.

        Raises:
            RuntimeError: compiled code reads it.
        """
        if parameter.flat.summoned:
            return parameter.grad
        self.prefetcher.check_caller()
        if internals.compile_context() is not None:
            raise _in_compiled_code(parameter)
        return self._grads.get(parameter.flat, parameter.source.index)

    def run(self, kind: Kind, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs `func`, which was called with offloaded tensors.

        Raises:
            RuntimeError: `func` can't have the same effect as in plain training; the message names a remedy.
        """
        found = offloaded_in(args, kwargs)
        if all([isinstance(tensor, OffloadedParameter) and tensor.flat.summoned for tensor in found.values()]):
            outputs = internals.tree_leaves(args[0]) if func is torch.autograd.grad else ()
            if any([isinstance(output, Tensor) and not output.requires_grad for output in outputs]):
                self._grads.check_graphs()  # they may be gradients, or results of them
            return func(*args, **kwargs)
        self.prefetcher.check_caller()
        one = next(iter(found.values()))
        if internals.compile_context() is not None:
            raise _in_compiled_code(one)
        if func is torch.autograd.grad or func is torch.autograd.backward:
            return self._differentiate(func, args, kwargs, found.values())
        first = args[0] if args else None
        if func is Tensor.share_memory_:
            raise RuntimeError(
                f"`share_memory_` would move {one.source.name}, which is offloaded, to memory of other processes, "
                "which would not see its later values. Call it before `fit`, or send other processes a `.clone()`."
            )
        if isinstance(first, OffloadedView) and _is_kept(func, first, args[1:], kwargs):
            return first
        if func is Tensor.detach_ and isinstance(first, OffloadedView) and first.graph.freed:
            first.graph.freed = False
            return first
        if isinstance(first, OffloadedTensor):
            match kind:
                case Kind.ALIAS:
                    return self._alias(first, versioned=func is Tensor.detach)
                case Kind.DTYPE:
                    like = torch.empty_strided(first.size(), first.stride(), dtype=first.plain_dtype, device="meta")
                    return func(like, *args[1:], **kwargs)
                case Kind.SET_DATA:
                    return self._set_data(first, args[1])
                case Kind.SET_GRAD if isinstance(first, OffloadedParameter):
                    return self._grads.set(first.flat, first.source.index, args[1] if len(args) > 1 else None)
                case Kind.GET_GRAD | Kind.SET_GRAD:
                    return func(*args, **kwargs)
                case Kind.HOOK:
                    self._watched()
                    if isinstance(first, OffloadedParameter):
                        self.grad_dtype.add_hooked(first, first.flat)
                    return func(*args, **kwargs)
                case Kind.FREEZE:
                    if type(first) is OffloadedView and (args[1:] or (kwargs.get("requires_grad", True),))[0]:
                        raise RuntimeError(
                            f"autograd can't follow a view of {first.source.name}, which is offloaded. "
                            "Take a `.clone()` of it first, or make a parameter of it before `fit`, in "
                            "`configure_model`."
                        )
                    return func(*args, **kwargs)
                case Kind.OFFSET:
                    return (first.source.origin + first.byte_offset) // first.itemsize
                case Kind.ADDRESS | Kind.STORAGE:
                    return func(self._addressed(kind, func, first), *args[1:], **kwargs)
                case Kind.EXPORT:
                    return self._export(func, first, args[1:], kwargs)
        return self._operate(kind, func, args, kwargs, found)

    def _differentiate(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], found: Collection[OffloadedTensor]
    ) -> Any:
        """Runs `torch.autograd.grad` or `backward`, which was called with the tensors `found`.

        Raises:
            RuntimeError: autograd can't follow a tensor, or torch has no `Tensor.grad_dtype`, by which `grad` returns
                gradients of 16-bit weights in fp32.
        """
        for tensor in found:
            if isinstance(tensor, OffloadedView):
                if tensor.graph.freed:
                    raise not_followed(tensor.source.name)
            elif func is torch.autograd.grad and tensor.flat.mixed and not tensor.source.whole:
                if not self.grad_dtype.sum_in_fp32(tensor, tensor.flat):
                    raise RuntimeError(
                        f"`torch.autograd.grad` with respect to {tensor.source.name}, which is offloaded and has 16 "
                        "bits on the device, would return a gradient of 16 bits. Call `backward` and read `.grad`, set "
                        "`states='gpu'`, or use torch 2.10 or later."
                    )
        with references_saved():
            return differentiate(func, args, kwargs)

    def _operate(
        self,
        kind: Kind,
        func: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        found: dict[int, OffloadedTensor],
    ) -> Any:
        # The argument that a function of this kind changes is the first one, which may be passed by name.
        written = args[:1] or [kwargs.get(name) for name in ("input", "self", "tensor")] if kind is Kind.WRITE else ()
        # False for `x += p`, which writes to a tensor of the user, and which autograd follows.
        writes = bool(offloaded_in(written, kwargs.get("out")))
        computing = torch.is_grad_enabled() and not writes
        if writes and kind is Kind.MATMUL:
            kind = Kind.WRITE  # autocast casts nothing for `out`
        if kind is Kind.MATMUL and computing:
            for arg in (*args, *kwargs.values()):  # autocast casts a weight twice that it is given twice
                if type(arg) is OffloadedParameter and arg.requires_grad and _rounds(arg, kind):
                    self.grad_dtype.note_use(arg, arg.flat)
        statistics = offloaded_in(running_statistics(func, args, kwargs))
        with self._values(found, statistics.values(), computing=computing, kind=kind) as values, references_saved():
            given, named = substitute(args, values), substitute(kwargs, values)
            if kind is Kind.MATMUL:  # it writes no argument and returns no view
                if computing:
                    given, named = in_order_of_casts(given, named)
                return func(*given, **named)
            nodes = {key: value.grad_fn for key, value in values.items()}
            versions = {key: internals.version_of(value) for key, value in values.items()}
            shapes = {key: geometry(value) for key, value in values.items() if writes}
            try:
                result = func(*given, **named)
            except BaseException:
                # `torch.utils.checkpoint` ends a recomputation by an error in the operator that saves its last tensor.
                self._store(found, _changed(values, versions), statistics)
                raise
            changed = _changed(values, versions)
            unfollowed = {key: found[key] for key, node in nodes.items() if values[key].grad_fn is not node}
            if any([tensor.requires_grad for tensor in unfollowed.values()]):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            if writes and not changed:  # some kernels do not increment versions (`torch._fused_adamw_`)
                changed = list(values)
            for key, shape in shapes.items():
                if geometry(values[key]) != shape:
                    raise RuntimeError(
                        f"`{func.__name__}` gives {found[key].source.name}, which is offloaded, another shape or other "
                        "memory, which can't be done while it trains. Do it before `fit`, in `configure_model`."
                    )
            self._store(found, changed, statistics)
            for tensor in unfollowed.values():
                if tensor.versioned or isinstance(tensor, OffloadedParameter):
                    raise RuntimeError(
                        f"`{func.__name__}` writes a tensor that requires a gradient to {tensor.source.name}, which is "
                        "offloaded, or to a view of it, and autograd can't follow that. Write to its `.data`, or "
                        "within `torch.no_grad()`."
                    )
                tensor.graph.freed = True  # `.data`, or a gradient, whose graph no parameter has
            return self.wrap(result, values, found)

    def _store(self, found: Mapping[int, OffloadedTensor], changed: Iterable[int], statistics: Iterable[int]) -> None:
        """Stores the tensors of `found` that the running operator has changed, and statistics that it may have."""
        with torch.inference_mode(False), torch.no_grad():
            for source in {id(found[key].source): found[key].source for key in (*changed, *statistics)}.values():
                source.write(self.base(source))
            for tensor in map(found.__getitem__, changed):
                if tensor.versioned:
                    tensor.source.changed()

    @contextlib.contextmanager
    def _values(
        self,
        found: Mapping[int, OffloadedTensor],
        statistics: Iterable[OffloadedTensor] = (),
        *,
        computing: bool,
        kind: Kind = Kind.COMPUTE,
    ) -> Iterator[dict[int, Tensor]]:
        """Yields the tensors that replace offloaded ones, `found` by identity, as arguments of an operator of this
        kind, which may write `statistics`.

        `computing` is True if autograd records it; `Kind.MATMUL` is given if autocast may cast its arguments to 16
        bits.
        """
        held: dict[FlatParameter, None] = {}
        """Flat parameters whose compute weights are arguments of the operator."""
        for tensor in found.values():
            source = tensor.source
            if isinstance(source, Weights) and not source.whole and (not source.flat.mixed or _rounds(tensor, kind)):
                held[source.flat] = None
        before, self._bases = self._bases, {}
        try:
            with self.prefetcher.resident(held, record=computing):
                if kind is Kind.STRIDED:
                    self._bases = {id(tensor.source): tensor.source.in_own_storage() for tensor in found.values()}
                for tensor in statistics:
                    # A copy in mixed precision, whose later changes are no error if autograd has saved it.
                    self._bases[id(tensor.source)] = tensor.source.read()
                yield {key: self._stand_in(tensor, computing, kind) for key, tensor in found.items()}
        finally:
            self._bases = before

    def _stand_in(self, tensor: OffloadedTensor, computing: bool, kind: Kind) -> Tensor:
        """Returns the argument of the running operator in place of `tensor`."""
        if isinstance(tensor, OffloadedParameter):
            source = tensor.source
            if source.whole:
                return tensor
            if _rounds(tensor, kind):
                return recomputed(tensor) if in_backward() else tensor
            if computing and tensor.requires_grad:
                if source.in_flat_memory and kind is not Kind.STRIDED:
                    return tensor
                if source.flat.mixed and not self.grad_dtype.sum_in_fp32(tensor, source.flat):
                    self.grad_dtype.sum_on_host(source.flat)
                return WholeWeight.of(tensor, source)
        if computing and tensor.requires_grad:
            return apply(FollowedValues, tensor, self._value(tensor))
        if computing and isinstance(tensor, OffloadedView) and tensor.graph.freed:
            return without_graph(self._value(tensor), tensor.source.name)
        return self._value(tensor)

    def values(self, tensor: OffloadedTensor) -> Tensor:
        """Returns the present values of `tensor`, which no operator may change: they are the resident ones, or a copy.

        Raises:
            RuntimeError: the step of its flat parameter has begun.
        """
        if isinstance(tensor.source, Weights) and not tensor.source.whole:
            self.prefetcher.check(tensor.source.flat)
        with self._values({id(tensor): tensor}, computing=False) as values:
            return values[id(tensor)].detach()

    def base(self, source: Source) -> Tensor:
        """Returns the values of `source` for the running operator, whose writes to them are stored afterwards."""
        if id(source) not in self._bases:
            self._bases[id(source)] = source.base()
        return self._bases[id(source)]

    def _value(self, tensor: OffloadedTensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            value = tensor.part_of(self.base(tensor.source))
        # Autograd refuses in-place writes as it does for a leaf, and `torch.matmul` chooses its kernel by this, also
        # where autograd records nothing.
        return value.requires_grad_(tensor.requires_grad)

    def wrap(
        self,
        result: Any,
        values: Mapping[int, Tensor],
        found: Mapping[int, OffloadedTensor],
    ) -> Any:
        """Returns `result` with tensors of `found` in place of their substitutes `values`, and of views of these."""
        originals = {id(value): found[key] for key, value in values.items()}
        sources = {id(tensor.source): tensor.source for tensor in found.values()}
        versioned = all([tensor.versioned for tensor in found.values()])
        with internals.without_dispatch():  # no operators of the user, which modes would report
            # A source without values in `_bases` has an argument whose own memory the operator has used.
            bases = {key: self._bases[key] if key in self._bases else one.base() for key, one in sources.items()}
        views = {key: tensor for key, tensor in found.items() if isinstance(tensor, OffloadedView)}
        graphs = {id(tensor.source): tensor.graph for tensor in views.values()}
        graphs_of_values = {id(values[key]): tensor.graph for key, tensor in views.items()}

        def wrap(value: Tensor) -> Tensor:
            if id(value) in originals:
                return originals[id(value)]
            if type(value) is not Tensor or value.layout is not torch.strided:
                return value
            if internals.is_transformed(value):  # a transform's result, no view of a weight
                return value
            for key, base in bases.items():
                if (offset := offset_in(value, base)) is None:
                    continue
                source, backed = sources[key], sources[key].backs_views
                counted = versioned and internals.is_view(value)  # not those of `unsafe_chunk`
                graph = graphs_of_values.get(id(internals.base_of(value)), graphs.get(key))
                if not value.requires_grad or (graph is not None and graph.freed):
                    memory = as_non_view(value, backed=backed)
                    return OffloadedView.make(source, offset, memory, versioned=counted, backed=backed, graph=graph)
                if source.whole:
                    return value
                memory = apply(FollowedValues, value, as_non_view(value, backed=backed))
                return FollowedView.make(source, offset, memory, versioned=counted, backed=backed)
            return value

        return map_tensors(wrap, result)

    def _alias(self, tensor: OffloadedTensor, *, versioned: bool) -> OffloadedView:
        """Returns an alias of `tensor`, which autograd does not follow."""
        source, backed = tensor.source, tensor.source.backs_views
        if backed:
            memory = as_non_view(self.values(tensor), backed=True)
        else:
            memory = hollow(tensor.size(), tensor.stride(), tensor.plain_dtype, tensor.device)
        versioned = versioned and tensor.versioned
        return OffloadedView.make(source, tensor.byte_offset, memory, versioned=versioned, backed=backed)

    def _set_data(self, tensor: OffloadedTensor, data: Tensor) -> None:
        source = tensor.source
        if share_all(data, tensor):
            return  # as by `p.grad.data += x`
        if isinstance(tensor, OffloadedView):
            raise RuntimeError(f"`.data` of a view of {source.name}, which is offloaded, can't be set. Use `copy_`.")
        if isinstance(data, OffloadedTensor):
            data = self._memory(data, source.name)
        assert isinstance(source, Weights)
        item = source.item
        plain = (item.shape, item.dtype, source.flat.device)
        if (data.shape, data.dtype, data.device) != plain or data.layout is not torch.strided:
            whole = data.shape == item.shape and data.dtype in (torch.float32, item.dtype)
            raise RuntimeError(
                f"`.data` of {source.name}, which is offloaded, can't become {data.dtype} {list(data.shape)} on "
                f"{data.device} while it trains: it is {plain[1]} {list(plain[0])} on {plain[2]}. "
                + (_REMEDY if whole else "Set it before `fit`, in `configure_model`.")
            )
        if not same_stride(data, item.stride):
            raise RuntimeError(
                f"`.data` of {source.name}, which is offloaded, can't become a tensor of strides {data.stride()} while "
                f"it trains: its own are {item.stride}. Use `copy_`, or set a tensor with its strides."
            )
        check_shareable(data, source.name)
        for flat in self._flats:
            if not all([memory.referenced or memory.foreign for memory in flat.shared.values()]):
                self.staged.pull(flat)  # drops memory that user code no longer references
        self.begin_change(source.flat)
        with torch.inference_mode(False), torch.no_grad():
            source.flat.release_views()
            if source.aliases:
                with self.prefetcher.resident([] if source.whole else [source.flat], record=False):
                    values = source.in_own_storage()
                source.end_aliases(values)
            source.flat.shared.pop(source.index, None)
            self._operate(Kind.WRITE, Tensor.copy_, (tensor, data), {}, {id(tensor): tensor})
            source.flat.shared[source.index] = SharedMemory(data)

    def _addressed(self, kind: Kind, func: Callable[..., Any], tensor: OffloadedTensor) -> Tensor:
        """Returns an ordinary tensor in place of `tensor`, for a `func` that returns its address or its storage.

        Raises:
            RuntimeError: the memory is freed after the call.
        """
        source = tensor.source
        if not source.backs_views and not source.whole:
            raise RuntimeError(
                f"`{func.__name__}` of {source.name}, which is offloaded, gives an address that is not valid after the "
                f"call. {_REMEDY}"
            )
        if kind is Kind.STORAGE:  # writes to it count, as long as it is referenced
            return self._memory(tensor, source.name)
        with self._values({}, computing=False):
            return self._value(tensor)

    def _export(self, func: Callable[..., Any], tensor: OffloadedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs `func`, which passes memory to code outside of torch: a NumPy array shares it with the parameter.

        Memory of a gradient is a read-only copy: it has other values once the gradient is clipped, added to or stepped.
        """
        if isinstance(tensor.source, Weights):
            return func(self._memory(tensor, tensor.source.name).requires_grad_(tensor.requires_grad), *args, **kwargs)
        warnings.warn(
            f"`{func.__name__}` of an offloaded gradient gives a copy of its values, which later changes of the "
            "gradient do not change. Call it again after these, such as clipping.",
            stacklevel=2,
        )
        exported = func(self.values(tensor).clone().requires_grad_(tensor.requires_grad), *args, **kwargs)
        if hasattr(exported, "setflags"):
            exported.setflags(write=False)
        return exported

    def _memory(self, tensor: OffloadedTensor, sharing: str) -> Tensor:
        """Returns an ordinary tensor over the memory that `tensor` has in plain training. Messages say that `sharing`
        needs it.
        """
        source = tensor.source
        if not isinstance(source, Weights):
            raise RuntimeError(
                f"`.data` of {sharing} can't share memory with {source.name}, which is offloaded. "
                "Copy the values (`copy_`), or set a `.clone()` of them."
            )
        with torch.inference_mode(False), torch.no_grad():
            with self.prefetcher.resident([] if source.whole else [source.flat], record=False):
                base = source.share()
            return tensor.part_of(base)


def _changed(values: Mapping[int, Tensor], versions: Mapping[int, int]) -> list[int]:
    """Returns the keys of the values whose version counters differ from `versions`."""
    return [key for key, value in values.items() if internals.version_of(value) != versions[key]]


def _changed_by_compiled(name: str) -> RuntimeError:
    return RuntimeError(
        f"compiled code has changed {name} in place, which is offloaded and has 16 bits on the device. Change it "
        "outside of the compiled module, or set `states='gpu'`."
    )


def _in_compiled_code(tensor: OffloadedTensor) -> RuntimeError:
    """Returns the error of a function that Dynamo compiles and that is given `tensor`."""
    return RuntimeError(
        f"{tensor.source.name}, which is offloaded, is given to a compiled function, or to `torch.cond` or another "
        "operator that compiles its functions. Compile the module whose forward calls it (`module.compile()`), in "
        "`setup` at the latest, or give it a `.clone()`. Call `backward` and `optimizer.step` outside of compiled "
        "functions and without compiled autograd. Or set `states='gpu'`."
    )


_CONVERSIONS = (Tensor.to, Tensor.cpu, Tensor.float)


def _is_kept(func: Callable[..., Any], tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a conversion returns `tensor` itself, which needs no values: those of a gradient may be gone."""
    if func not in _CONVERSIONS or "memory_format" in kwargs:
        return False
    with internals.without_dispatch():  # no operators of the user, which modes would report
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return func(empty, *args, **kwargs) is empty


def _rounds(tensor: OffloadedTensor, kind: Kind) -> bool:
    """Returns whether autocast would round `tensor`, a plain parameter, to the 16 bits that it has on the device."""
    if kind is not Kind.MATMUL or not isinstance(tensor, OffloadedParameter):
        return False
    flat = tensor.flat
    return flat.mixed and not tensor.source.whole and autocast_to(flat.dtype, flat.device)
