"""Hooks on the modules of a model, which keep the weights of a unit on the device while its forward runs."""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_ssd.model_states.access import Access
from lightning_ssd.model_states.compile import (
    around_calls,
    before_compilations,
    compiled_regions,
    run_calls_within,
    run_functions_within,
    without_own_hooks,
)
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.parameter import OffloadedParameter, OffloadedView, ordinary
from lightning_ssd.model_states.prefetcher import ParamPrefetcher
from lightning_ssd.uncopied import ModuleHook


def hook_unit(
    index: int,
    modules: Sequence[nn.Module],
    flat_params: Sequence[FlatParameter],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
) -> list[Callable[[], None]]:
    """Makes the weights of a unit resident around the forwards of its modules. Hooks run on the forward's thread.

    Args:
        index: number of the unit.
        modules: modules whose forward needs its weights.
        flat_params: its flat parameters.
        prefetcher: makes them resident.
        access: stores the writes of a forward to views of the weights.
        summoned: returns whether all parameters are whole tensors at present, so that no weights are prefetched.

    Returns:
        Functions that remove the hooks.
    """

    def pre_forward(module: nn.Module) -> None:
        if not summoned():
            _check_transforms(module)
            prefetcher.pre_forward(index)
            access.begin_forward(flat_params)

    def post_forward() -> None:
        if not summoned():
            prefetcher.post_forward(index)
            access.end_forward(flat_params)

    return [around_calls(module, partial(pre_forward, module), post_forward) for module in modules]


def _check_transforms(module: nn.Module) -> None:
    """Raises RuntimeError if torch would use memory of the module's weights in C++ that is not there.

    Args:
        module: module whose forward begins.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            f"`torch.jit.trace` of {type(module).__name__}, which has offloaded weights, would trace memory that is "
            "freed. Trace a `copy.deepcopy` of the module, or trace and call it inside `with "
            "trainer.strategy.whole_weights():`."
        )
    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    for name, value in module.named_parameters():
        wrapped: Tensor = value
        while torch._C._functorch.is_functorch_wrapped_tensor(wrapped):
            wrapped = torch._C._functorch.get_unwrapped(wrapped)
        if wrapped is not value and isinstance(wrapped, OffloadedParameter | OffloadedView):
            raise RuntimeError(
                f"`torch.func` transforms {wrapped.source.name}, which is offloaded and given as {name} of "
                f"{type(module).__name__}. Give it `.detach().clone()` of the weights."
            )


def hook_compiled_region(
    region: nn.Module,
    flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
    mastered: Container[nn.Parameter],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
    hooked: Container[nn.Module],
) -> list[Callable[[], None]]:
    """Makes the weights of a compiled module resident around its calls, and its parameters ordinary ones.

    Args:
        region: the module. Hooks run on the thread that calls it, outside of compiled code.
        flat_of: the flat parameter of each offloaded parameter, and its index there.
        mastered: parameters on the device that have master weights.
        prefetcher: makes the weights resident.
        access: makes offloaded parameters ordinary ones.
        summoned: as in `hook_unit`.
        hooked: modules of the model that have hooks, which compiled code must not run.

    Returns:
        Functions that remove the hooks.
    """
    inner = [module for module in region.modules() if module is not region and module in hooked]
    weights = _CompiledWeights.of([region], inner, flat_of, mastered)
    if not weights.offloaded and not weights.with_masters:
        return []
    return [run_calls_within(region, partial(weights.ordinary, prefetcher, access, summoned))]


def hook_compiled_functions(
    model: nn.Module,
    flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
    mastered: Container[nn.Parameter],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
    hooked: Container[nn.Module],
) -> list[Callable[[], None]]:
    """Does as `hook_compiled_region` around calls of compiled functions that modules hold, and are given modules.

    Parameters among the arguments are replaced by clones. In mixed precision the weights of modules are whole ones, in
    fp32: the function's code is not examined for other uses of 16-bit weights than in products.
    """

    @contextlib.contextmanager
    def context(
        args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Iterator[tuple[list[object], dict[str, object]]]:
        clones: dict[nn.Parameter, Tensor] = {}

        def replaced(value: object) -> object:
            if isinstance(value, nn.Parameter) and value in flat_of:
                return clones.setdefault(value, value.clone())
            if type(value) is list:
                return [replaced(item) for item in value]
            return tuple(map(replaced, value)) if type(value) is tuple else value

        arguments = [replaced(value) for value in args], {name: replaced(value) for name, value in kwargs.items()}
        versions = [clone._version for clone in clones.values()]
        values = (*args, *kwargs.values())
        items = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
        given = [item for item in items if isinstance(item, nn.Module)]
        inner = [part for module in given for part in module.modules() if part in hooked]
        weights = _CompiledWeights.of(given, inner, flat_of, mastered)
        with weights.ordinary(prefetcher, access, summoned, under_autocast=True):
            yield arguments
        for (parameter, clone), version in zip(clones.items(), versions, strict=True):
            if clone._version != version:
                flat, index = flat_of[parameter]
                raise RuntimeError(
                    f"a compiled function has changed {flat.param_views[index].name} in place, which is offloaded and "
                    "an argument of it. Change it outside of the function, or set `states='gpu'`."
                )

    return run_functions_within(model, context)


@dataclass(frozen=True)
class _CompiledWeights:
    """The weights of modules that compiled code uses.

    Attributes:
        inner: modules whose own hooks the code must not run.
        offloaded: offloaded parameters.
        flat_params: their flat parameters.
        owners: modules with the names of offloaded parameters.
        with_masters: parameters on the device that have master weights.
    """

    inner: Sequence[nn.Module]
    offloaded: Sequence[nn.Parameter]
    flat_params: Mapping[FlatParameter, None]
    owners: Sequence[tuple[nn.Module, str]]
    with_masters: Sequence[nn.Parameter]

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        inner: Sequence[nn.Module],
        flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
        mastered: Container[nn.Parameter],
    ) -> "_CompiledWeights":
        """Returns the weights of `modules`; other arguments as of the class and of `hook_compiled_region`."""
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        offloaded = [parameter for parameter in parameters if parameter in flat_of]
        return cls(
            inner,
            offloaded,
            dict.fromkeys(flat_of[parameter][0] for parameter in offloaded),
            [(part, name) for part in parts for name, one in part._parameters.items() if one in flat_of],
            [parameter for parameter in parameters if parameter in mastered],
        )

    @contextlib.contextmanager
    def ordinary(
        self,
        prefetcher: ParamPrefetcher,
        access: Access,
        summoned: Callable[[], bool],
        *,
        under_autocast: bool = False,
    ) -> Iterator[None]:
        """Makes them resident, and ordinary parameters; arguments as of `hook_compiled_region` and `Access.whole`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_own_hooks(self.inner))
            if not summoned():
                stack.enter_context(prefetcher.resident(self.flat_params, record=True))
                stack.enter_context(access.whole(self.owners, under_autocast=under_autocast))
                stack.enter_context(access.ordinary(self.offloaded))
                stack.enter_context(ordinary(self.with_masters))
                stack.enter_context(_own_storages_when_compiled(self.flat_params))
            yield


@contextlib.contextmanager
def _own_storages_when_compiled(flat_params: Iterable[FlatParameter]) -> Iterator[None]:
    """Gives resident parameters storages of their own while torch compiles code that uses them, and runs it first.

    Higher-order operators (`torch.cond`, `torch.compiler.nested_compile_region`) refuse operands that share a storage.
    Later calls of the code run with shared ones: compiled code does not depend on it, as the parameters do not overlap.
    """
    changed: list[FlatParameter] = []

    def change() -> None:
        if not changed:
            changed.extend(flat for flat in flat_params if not flat.has_own_storages)  # others are of an outer call
            for flat in changed:
                flat.use_own_storages()

    try:
        with before_compilations(change):
            yield
    finally:
        for flat in changed:
            flat.attach()


def hook_fused_layers(
    model: nn.Module,
    flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
) -> list[Callable[[], None]]:
    """Makes torch choose the kernels of its transformer layers as in plain training.

    In evaluations `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run one fused kernel, unless a weight has a
    class of its own or a module of the layer has hooks. `nn.TransformerEncoder` decides by the weights of its first
    layer whether it computes padded rows. Where torch would choose fused kernels, weights of a layer are ordinary
    and resident while it runs, and the check does not find our hooks.

    Args:
        model: the model; modules inside of compiled ones are not hooked.
        flat_of: the flat parameter of each offloaded parameter, and its index there.
        prefetcher: makes weights resident.
        access: makes offloaded parameters ordinary ones.
        summoned: as in `hook_unit`.

    Returns:
        Functions that remove the hooks.
    """
    compiled = {module for region in compiled_regions(model) for module in region.modules()}
    return [
        _hook_fused(module, flat_of, prefetcher, access, summoned)
        for module in model.modules()
        if module not in compiled
        and isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer | nn.MultiheadAttention)
    ]


def _hook_fused(
    module: nn.Module,
    flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
) -> Callable[[], None]:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        layer = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
        parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
        recorded = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        offloaded = [parameter for parameter in parameters if parameter in flat_of]
        flat_params = dict.fromkeys(flat_of[parameter][0] for parameter in offloaded)
        with contextlib.ExitStack() as stack:
            if not (module.training or recorded or summoned() or any(flat.mixed for flat in flat_params)):
                if layer is module:  # the encoder itself reads no values
                    stack.enter_context(prefetcher.resident(flat_params, record=True))
                    if type(module).forward is nn.TransformerEncoderLayer.forward:
                        stack.enter_context(_without_own_hooks(module))
                stack.enter_context(access.ordinary(offloaded))
            yield

    return run_calls_within(module, context)


@contextlib.contextmanager
def _without_own_hooks(layer: nn.Module) -> Iterator[None]:
    """Makes `layer.modules()`, by which torch looks for hooks, return only the modules that have hooks of user code."""
    hooked = [
        module
        for module in layer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not isinstance(hook, ModuleHook)
    ]
    vars(layer)["modules"] = lambda: iter(hooked)
    try:
        yield
    finally:
        del vars(layer)["modules"]
