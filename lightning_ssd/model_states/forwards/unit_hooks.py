"""Hooks on the modules of a model, which keep the weights of a unit on the device while its forward runs."""

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.access import Access, OffloadedTensor
from lightning_ssd.model_states.forwards.compiled_calls import (
    around_calls,
    before_compilations,
    run_calls_within,
    run_functions_within,
    without_own_hooks,
)
from lightning_ssd.model_states.units import FlatParameter, Unit, compiled_regions, ordinary
from lightning_ssd.model_states.weights import ParamPrefetcher
from lightning_ssd.uncopied import ModuleHook


class UnitHooks:
    """Keeps the weights of a model's modules on the device while their code runs. Hooks run on the thread of the call.

    Args:
        flat_of: the flat parameter of each offloaded parameter, and its index there.
        access: makes offloaded parameters ordinary ones, and stores the writes of a forward to views of the weights.
        summoned: returns whether all parameters are whole tensors at present, so that no weights are prefetched.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[Unit, Sequence[FlatParameter]]],
        flat_of: Mapping[nn.Parameter, tuple[FlatParameter, int]],
        mastered: Container[nn.Parameter],
        prefetcher: ParamPrefetcher,
        access: Access,
        summoned: Callable[[], bool],
    ) -> None:
        self._model = model
        self._units = units
        self._flat_of = flat_of
        self._mastered = mastered
        self._prefetcher = prefetcher
        self._access = access
        self._summoned = summoned
        self._regions = list(dict.fromkeys(compiled_regions(model)))
        self._hooked = {*self._regions, *(module for unit, _ in units for module in unit.modules)}
        """Modules that have hooks, which compiled code must not run."""

    def register(self) -> list[Callable[[], None]]:
        """Registers the hooks, and returns functions that remove them."""
        removals: list[Callable[[], None]] = []
        for region in self._regions:
            if any([one in self._flat_of or one in self._mastered for one in region.parameters()]):
                inner = [module for module in region.modules() if module is not region and module in self._hooked]
                removals.append(run_calls_within(region, self._around_compiled([region], inner)))
        removals += run_functions_within(self._model, self._around_function)
        for index, (unit, flat_params) in enumerate(self._units):
            for module in unit.modules if flat_params else ():
                begin = partial(self._pre_forward, index, flat_params, module)
                removals.append(around_calls(module, begin, partial(self._post_forward, index, flat_params)))
        return removals + self._hook_fused_layers() + self._keep_recurrent_weights()

    # ---- the forward of a unit ----

    def _pre_forward(self, unit: int, flat_params: Sequence[FlatParameter], module: nn.Module) -> None:
        if not self._summoned():
            _check_transforms(module)
            self._prefetcher.pre_forward(unit)
            self._access.begin_forward(flat_params)

    def _post_forward(self, unit: int, flat_params: Sequence[FlatParameter]) -> None:
        if not self._summoned():
            self._prefetcher.post_forward(unit)
            self._access.end_forward(flat_params)

    # ---- compiled code ----

    @contextlib.contextmanager
    def _around_function(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Iterator[tuple[list[object], dict[str, object]]]:
        """Makes weights resident around a call of a compiled function that a module holds, and that is given modules.

        Parameters among the arguments are replaced by clones. In mixed precision the weights of modules are whole ones,
        in fp32, and the function's code casts them, as that of compiled modules does.
        """
        clones: dict[nn.Parameter, Tensor] = {}

        def replaced(value: object) -> object:
            if isinstance(value, nn.Parameter) and value in self._flat_of:
                return clones.setdefault(value, value.clone())
            if type(value) is list:
                return [replaced(item) for item in value]
            return tuple(map(replaced, value)) if type(value) is tuple else value

        arguments = [replaced(value) for value in args], {name: replaced(value) for name, value in kwargs.items()}
        versions = [internals.version_of(clone) for clone in clones.values()]
        values = (*args, *kwargs.values())
        items = (item for value in values for item in (value if isinstance(value, list | tuple) else (value,)))
        given = [item for item in items if isinstance(item, nn.Module)]
        inner = [part for module in given for part in module.modules() if part in self._hooked]
        with self._around_compiled(given, inner)():
            yield arguments
        for (parameter, clone), version in zip(clones.items(), versions, strict=True):
            if internals.version_of(clone) != version:
                flat, index = self._flat_of[parameter]
                raise RuntimeError(
                    f"a compiled function has changed {flat.param_views[index].name} in place, which is offloaded and "
                    "an argument of it. Change it outside of the function, or set `states='gpu'`."
                )

    def _around_compiled(
        self, modules: Sequence[nn.Module], inner: Sequence[nn.Module]
    ) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns a function whose contexts make the weights of `modules` resident, and ordinary parameters.

        They are around calls of compiled code that uses these modules, and outside of the code itself, which must not
        run the hooks of the modules `inner`.
        """
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
        offloaded = [parameter for parameter in parameters if parameter in self._flat_of]
        flat_params = dict.fromkeys(self._flat_of[parameter][0] for parameter in offloaded)
        owners = [(part, name) for part in parts for name, one in part._parameters.items() if one in self._flat_of]
        with_masters = [parameter for parameter in parameters if parameter in self._mastered]

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(without_own_hooks(inner))
                if not self._summoned():
                    stack.enter_context(self._prefetcher.resident(flat_params, record=True))
                    stack.enter_context(self._access.whole(owners))
                    stack.enter_context(self._access.ordinary(offloaded))
                    stack.enter_context(ordinary(with_masters))
                    stack.enter_context(_own_storages_when_compiled(flat_params))
                yield

        return around

    # ---- torch's fused layers ----

    def _hook_fused_layers(self) -> list[Callable[[], None]]:
        """Makes torch choose the kernels of its transformer layers as in plain training.

        In evaluations `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` run one fused kernel, unless a weight
        has a class of its own or a module of the layer has hooks. `nn.TransformerEncoder` decides by the weights of its
        first layer whether it computes padded rows. Where torch would choose fused kernels, weights of a layer are
        ordinary and resident while it runs, and the check does not find our hooks. Modules inside of compiled ones are
        not hooked.
        """
        compiled = {module for region in self._regions for module in region.modules()}
        return [
            run_calls_within(module, partial(self._around_fused_layer, module))
            for module in self._model.modules()
            if module not in compiled
            and isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer | nn.MultiheadAttention)
        ]

    @contextlib.contextmanager
    def _around_fused_layer(self, module: nn.Module) -> Iterator[None]:
        layer = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
        parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
        recorded = torch.is_grad_enabled() and any([parameter.requires_grad for parameter in parameters])
        offloaded = [parameter for parameter in parameters if parameter in self._flat_of]
        flat_params = dict.fromkeys(self._flat_of[parameter][0] for parameter in offloaded)
        with contextlib.ExitStack() as stack:
            if not (module.training or recorded or self._summoned() or any([flat.mixed for flat in flat_params])):
                if layer is module:  # the encoder itself reads no values
                    stack.enter_context(self._prefetcher.resident(flat_params, record=True))
                    if type(module).forward is nn.TransformerEncoderLayer.forward:
                        stack.enter_context(_without_own_hooks(module))
                stack.enter_context(self._access.ordinary(offloaded))
            yield

    # ---- recurrent modules ----

    def _keep_recurrent_weights(self) -> list[Callable[[], None]]:
        """Makes `flatten_parameters` of recurrent modules with offloaded weights do nothing.

        User code calls it anywhere. It compares the addresses of the weights, and gives them other memory.
        """
        return [
            _disable_flattening(module)
            for module in self._model.modules()
            if isinstance(module, nn.RNNBase) and any([one in self._flat_of for one in module.parameters()])
        ]


def _check_transforms(module: nn.Module) -> None:
    """Raises RuntimeError if torch would use memory of the module's weights in C++ that is not there."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            f"`torch.jit.trace` of {type(module).__name__}, which has offloaded weights, would trace memory that is "
            "freed. Trace a `copy.deepcopy` of the module, or trace and call it inside `with "
            "trainer.strategy.whole_weights():`."
        )
    if internals.innermost_transform() is None:
        return
    for name, value in module.named_parameters():
        wrapped: Tensor = value
        while internals.is_transformed(wrapped):
            wrapped = internals.untransformed(wrapped)
        if wrapped is not value and isinstance(wrapped, OffloadedTensor):
            raise RuntimeError(
                f"`torch.func` transforms {wrapped.source.name}, which is offloaded and given as {name} of "
                f"{type(module).__name__}. Give it `.detach().clone()` of the weights."
            )


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


def _disable_flattening(module: nn.RNNBase) -> Callable[[], None]:
    """Makes `module.flatten_parameters` do nothing, except in copies of it; returns a function that restores it.

    A pickle of a method has its name: after unpickling it is the method of the class.
    """
    name, attributes, original = "flatten_parameters", vars(module), weakref.ref(module)

    def flatten_parameters(called: nn.RNNBase) -> None:
        if called is not original():  # `copy.deepcopy` gives the method to the copy, whose weights are ordinary ones
            type(called).flatten_parameters(called)

    restore = partial(setattr, module, name, attributes[name]) if name in attributes else partial(delattr, module, name)
    attributes[name] = MethodType(flatten_parameters, module)
    return restore
