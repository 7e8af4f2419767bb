"""Hooks on the modules of a model, which keep the weights of a unit on the device while its forward runs."""

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from lightning_ssd.model_states.access import Access
from lightning_ssd.model_states.compile import (
    around_calls,
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
    offloaded = [parameter for parameter in region.parameters() if parameter in flat_of]
    with_masters = [parameter for parameter in region.parameters() if parameter in mastered]
    if not offloaded and not with_masters:
        return []
    flat_params = dict.fromkeys(flat_of[parameter][0] for parameter in offloaded)
    owners = [
        (module, name)
        for module in region.modules()
        for name, parameter in module._parameters.items()
        if parameter in flat_of
    ]
    inner = [module for module in region.modules() if module is not region and module in hooked]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_own_hooks(inner))
            if not summoned():
                stack.enter_context(prefetcher.resident(flat_params, record=True))
                stack.enter_context(access.whole(owners))
                stack.enter_context(access.ordinary(offloaded))
                stack.enter_context(ordinary(with_masters))
            yield

    return [run_calls_within(region, context)]


def hook_compiled_functions(
    model: nn.Module,
    flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
    mastered: Container[nn.Parameter],
    prefetcher: ParamPrefetcher,
    access: Access,
    summoned: Callable[[], bool],
    hooked: Container[nn.Module],
) -> list[Callable[[], None]]:
    """Gives compiled functions that modules hold ordinary weights in place of offloaded ones.

    Modules that a function is given are treated as by `hook_compiled_region`, except in mixed precision: the function's
    code is not examined for other uses of 16-bit weights than in products, so that it gets clones in fp32. So it does
    in place of parameters among its arguments.
    """

    def replaced(value: object) -> object:
        if isinstance(value, nn.Parameter) and value in flat_of:
            return value.clone()
        if type(value) is list:
            return [replaced(item) for item in value]
        return tuple(map(replaced, value)) if type(value) is tuple else value

    @contextlib.contextmanager
    def context(arguments: Sequence[object]) -> Iterator[None]:
        given = [value for value in arguments if isinstance(value, nn.Module)]
        given += [part for value in arguments if isinstance(value, list | tuple) for part in value if _is_module(part)]
        parameters = list(dict.fromkeys(parameter for part in given for parameter in part.parameters()))
        offloaded = [parameter for parameter in parameters if parameter in flat_of]
        flat_params = dict.fromkeys(flat_of[parameter][0] for parameter in offloaded)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                without_own_hooks(child for part in given for child in part.modules() if child in hooked)
            )
            if not summoned():
                if any(flat.mixed for flat in flat_params):
                    clones = {parameter: parameter.clone() for parameter in offloaded}
                    for part in given:
                        stack.enter_context(_with_parameters(part, clones))
                else:
                    stack.enter_context(prefetcher.resident(flat_params, record=True))
                    stack.enter_context(access.ordinary(offloaded))
                stack.enter_context(ordinary(parameter for parameter in parameters if parameter in mastered))
            yield

    return run_functions_within(model, context, replaced)


def _is_module(value: object) -> TypeGuard[nn.Module]:
    return isinstance(value, nn.Module)


def _with_parameters(
    module: nn.Module, replacements: Mapping[nn.Parameter, Tensor]
) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which `module` has other tensors in place of some parameters."""
    own = module.named_parameters(remove_duplicate=False)
    return _reparametrize_module(module, {name: replacements[one] for name, one in own if one in replacements})


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
