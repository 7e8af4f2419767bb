"""The user's optimizer on flat parameters in host memory: same class, same options, states of the same names.

Each kind of optimizer has a class: Adam, SGD, optimizers that step each parameter alone, and optimizers that couple
parameters.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from lightning_ssd.model_states.optimizers.adam import (
    AdamKernel,
    ElementSpan,
    KernelCall,
    KernelOutputs,
    any_kernel,
    exact_kernel,
    follows_torch,
    implementation_of,
    make_calls,
    rounded_step,
    settings_of,
    torchs_step,
)
from lightning_ssd.model_states.optimizers.adam_c import KernelSettings
from lightning_ssd.model_states.optimizers.rank_mean import RankMean
from lightning_ssd.model_states.optimizers.rounding import random_bits, round_stochastically, step_keys
from lightning_ssd.model_states.optimizers.user_optimizers import registered_class
from lightning_ssd.model_states.stores import StagedState
from lightning_ssd.model_states.units import FlatParameter

Options = Mapping[str, Any]
"""A parameter group without its parameters."""

_OTHER_OPTIMIZER = (
    "The state dict is one of another model or optimizer. Load one of these, or, to begin with new states, leave it "
    "out: `checkpoint['optimizer_states'] = []` in `on_load_checkpoint`."
)

StepHalf = Literal["whole", "weights", "opt_state"]
"""Half of a step: the compute weights, which the next forward needs; all other values; or "whole": both halves."""


@dataclass(frozen=True)
class StepInput:
    """Input of one step of a flat parameter.

    Attributes:
        gradient: `flat.numel` elements in any floating dtype, or the mean of several ranks' ones.
        has_grad: for each parameter, whether it has a gradient; the others are not stepped, as in torch.
        scale: the gradient, converted to fp32, is multiplied with it.
    """

    options: Options
    gradient: Tensor | RankMean
    has_grad: Sequence[bool]
    scale: float


class FlatOptimizer(ABC):
    """An optimizer class, applied to one flat parameter in host memory.

    Threads: `step` and `commit` run on the threads that `OptimizerStep` names; all others on the training thread, while
    no step runs.

    Ownership: staged values and the gradient belong to the optimizer during a call only.

    Attributes:
        keeps_states: whether the optimizer object keeps its states in host memory, and not among staged values.
    """

    keeps_states: ClassVar[bool] = False

    def __init__(self, flat: FlatParameter) -> None:
        self.flat = flat

    @abstractmethod
    def state_names(self, options: Options) -> tuple[str, ...]:
        """Returns the names of optimizer states that have an element for each weight."""

    def has_halves(self, given: StepInput, staged: StagedState) -> bool:
        """Returns whether a step of all parameters, in place, can be made as "weights" and then as "opt_state"."""
        return False

    def step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> None:
        """Computes a step of the master weights, which counts from `commit` on, and rounds them to compute weights.

        Args:
            given: the input; neither it nor its gradient is changed, since a step may be made again.
            staged: values of the flat parameter; new values are written to `staged.out`.
            half: "whole", or where `has_halves`, "weights" and then "opt_state", with the same input.
        """
        make_calls(self.begin_step(given, staged, half))

    @abstractmethod
    def begin_step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> Sequence[KernelCall]:
        """Computes a step except for calls of adam.c, which it returns, to be made together with those of other steps.

        Until they are made, input and values belong to them. The arguments are those of `step`.
        """

    def commit(self, has_grad: Sequence[bool], options: Options) -> None:
        """Counts the last step, which had gradients of these parameters, and these options."""
        return None

    def revert(self) -> None:
        """Rolls the last `commit` back, if a step can be rolled back."""
        return None

    def get_extra_state(self) -> object:
        """Returns data that `set_extra_state` needs, to resume with the stored values."""
        raise NotImplementedError(f"{type(self).__name__} keeps states in memory")

    def set_extra_state(self, state: object) -> None:
        """Resumes with data that `get_extra_state` has returned in another process."""
        raise NotImplementedError(f"{type(self).__name__} keeps states in memory")

    @abstractmethod
    def state_of(self, index: int, staged: StagedState) -> dict[str, Any]:
        """Returns the state of parameter `index` as torch's optimizer would keep it, in fp32; tensors may be views."""

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Raises ValueError if `state`, of a state dict, can't be one of parameter `index`."""
        return None

    def converted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the state of a state dict as `load_state_dict` of torch's optimizer would convert it."""
        return state

    @abstractmethod
    def load_state(self, index: int, state: Mapping[str, Any], staged: StagedState) -> None:
        """Loads the state of parameter `index` that torch's optimizer (or `state_of`) has made."""

    def states_in_memory(self, index: int) -> Mapping[str, Any]:
        """Returns the states of parameter `index` that this object keeps in host memory, not among staged values."""
        return {}

    def has_state(self, index: int, names: Sequence[str], *, running: bool) -> bool | None:
        """Returns whether `state_of` has a state of parameter `index`; `None`: the end of the running step decides.

        Args:
            names: states among staged values.
            running: whether a step may be running, or be rolled back.
        """
        return bool(self.states_in_memory(index)) or (None if running else False)


class ElementwiseOptimizer(FlatOptimizer):
    """AdamW, Adam and SGD, whose step of one element does not depend on others: in chunks, with torch's bits.

    The implementation that torch would choose (for-loop, foreach or fused) is followed, so that on a CPU the numbers
    are those of the user's optimizer. The fused kernels round the last elements of a parameter differently: chunks
    never span two parameters.
    """

    _needed: tuple[str, ...] = ()
    """States that torch's optimizer has of each parameter that it has stepped."""

    CHUNK = 2**20
    """Elements of a chunk: 4 MiB of fp32. A multiple of every vector width."""

    def __init__(self, flat: FlatParameter) -> None:
        super().__init__(flat)
        self._steps = [0] * len(flat.param_views)
        self._steps_before = self._steps
        self._spans = [ElementSpan(view.start, view.numel, 0, view.random_key) for view in flat.param_views]
        self._device = flat.device

    def begin_step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> Sequence[KernelCall]:
        given = self._given_on_cpu(given)
        if missing := [name for name in self.state_names(given.options) if name not in staged.states]:
            raise RuntimeError(
                f"the optimizer of {self.flat.name} needs {', '.join(missing)} now, which it did not need at the "
                "start of the training. Set `momentum` or `amsgrad` from the start."
            )
        if staged.out is not staged and not all(given.has_grad):
            staged.out.copy(staged)
        spans: dict[int, list[ElementSpan]] = {}
        for steps, has_gradient, span in zip(self._steps, given.has_grad, self._spans, strict=True):
            if has_gradient:
                spans.setdefault(steps, []).append(span)
        calls: list[KernelCall] = []
        for steps, of_parameters in spans.items():
            calls += self._begin_spans(given, staged, of_parameters, steps, half)
        if not all(given.has_grad):
            make_calls(calls)
            staged.out.round()
            return ()
        return calls

    def _given_on_cpu(self, given: StepInput) -> StepInput:
        """Returns the input without options that only torch's GPU implementations support."""
        if self._device.type == "cpu":
            return given
        of_gpu = {"fused": True, "foreach": False, "capturable": False, "differentiable": False}
        return replace(given, options={**given.options, **of_gpu})

    def get_extra_state(self) -> list[int]:
        return list(self._steps)

    def set_extra_state(self, state: Any) -> None:
        self._steps = list(state)

    def revert(self) -> None:
        self._steps = self._steps_before

    def commit(self, has_grad: Sequence[bool], options: Options) -> None:
        self._steps_before = self._steps
        self._steps = [step + has_gradient for step, has_gradient in zip(self._steps, has_grad, strict=True)]

    def state_of(self, index: int, staged: StagedState) -> dict[str, Any]:
        if self._steps[index] == 0:
            return {}
        item = self.flat.param_views[index]
        return self._step_state(self._steps[index]) | {name: staged.state(name, item) for name in staged.states}

    def has_state(self, index: int, names: Sequence[str], *, running: bool) -> bool | None:
        if names and running and self._steps[index] < 2:
            return None
        return bool(names) and self._steps[index] > 0

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        item = self.flat.param_views[index]
        if missing := [name for name in self._needed if state and name not in state]:
            raise ValueError(f"the optimizer state of {item.name} lacks {', '.join(missing)}. {_OTHER_OPTIMIZER}")
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.shape != item.shape:
                raise ValueError(
                    f"{name} of {item.name} has the shape {list(value.shape)} in the loaded state dict, and the "
                    f"parameter has {list(item.shape)}. {_OTHER_OPTIMIZER}"
                )

    def load_state(self, index: int, state: Mapping[str, Any], staged: StagedState) -> None:
        item = self.flat.param_views[index]
        for name in staged.states:
            value = state.get(name)
            staged.set_state(name, item, torch.zeros(()) if value is None else value)
        self._steps[index] = int(state.get("step", 1)) if state else 0

    def _begin_spans(
        self, given: StepInput, staged: StagedState, spans: Sequence[ElementSpan], steps: int, half: StepHalf
    ) -> Sequence[KernelCall]:
        """Steps elements of parameters that have made `steps` steps so far, except for calls that it returns.

        Torch's kernels run over chunks that stay in the cache, between the conversions of the gradient to fp32 and of
        the master weights to the compute weights.
        """
        assert half == "whole", "torch's kernels make whole steps"
        options, gradient, scale, out = given.options, given.gradient, given.scale, staged.out
        for span in spans:
            for low in range(span.start, span.start + span.numel, self.CHUNK):
                chunk = slice(low, min(low + self.CHUNK, span.start + span.numel))
                part = span._replace(start=low, numel=chunk.stop - low, first=span.first + low - span.start)
                arrived = gradient[chunk]
                piece = arrived.float()
                if scale != 1.0:
                    piece = piece * scale
                elif options["foreach"] and piece is arrived:
                    piece = piece.clone()  # foreach changes its gradients, and a step may be made again
                old = new = staged.elements(chunk.start, chunk.stop)
                master = old.masters()
                if out is not staged:
                    new = out.elements(chunk.start, chunk.stop)
                    new.copy_states(old)
                    master = master if new.master is None else new.master.copy_(master)
                self._torchs_step(options, master, piece, new, steps, part)
                new.set_masters(master)
        return ()

    @abstractmethod
    def _torchs_step(
        self,
        options: Options,
        weights: Tensor,
        gradient: Tensor,
        values: StagedState,
        steps: int,
        span: ElementSpan,
    ) -> None:
        """Steps whole fp32 weights, those of `span`, and the states in `values` in place, with torch's own function."""

    def _step_state(self, step: int) -> dict[str, Any]:
        return {"step": torch.tensor(float(step), dtype=torch.float32)}


ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments, in the order in which kernels take them."""


class AdamOptimizer(ElementwiseOptimizer):
    """`torch.optim.Adam` and `AdamW`: in one pass by our own kernel (adam.c), where that gives torch's bits."""

    _needed = ("step", *ADAM_MOMENTS)

    def __init__(self, flat: FlatParameter, *, compiled: bool = True) -> None:
        super().__init__(flat)
        self._compiled = compiled
        self._items: dict[tuple[AdamKernel, tuple[ElementSpan, ...]], Tensor] = {}
        """The kernel's work list for the parameters of the last step, usually all parameters."""

    def state_names(self, options: Options) -> tuple[str, ...]:
        return (*ADAM_MOMENTS, "max_exp_avg_sq") if options["amsgrad"] else ADAM_MOMENTS

    def _begin_spans(
        self, given: StepInput, staged: StagedState, spans: Sequence[ElementSpan], steps: int, half: StepHalf
    ) -> Sequence[KernelCall]:
        found = self._kernel_of(given, staged, steps)
        if found is None:
            return super()._begin_spans(given, staged, spans, steps, half)
        kernel, name, settings = found
        key = kernel, tuple(spans)
        items = self._items.get(key)
        if items is None:
            items = kernel.items(spans)
            self._items = {key: items}
        out = staged.out
        values = [*self._arrays(staged), *self._arrays(out)]
        outputs = _outputs(half, staged)
        scales = [*staged.scales.values(), *out.scales.values()]
        gradient, mean = given.gradient, None
        if isinstance(gradient, RankMean):
            mean = gradient
        else:
            values.append(gradient)
        return [kernel.call(name, items, values, settings, outputs, staged.moments, scales, mean)]

    def has_halves(self, given: StepInput, staged: StagedState) -> bool:
        if staged.out is not staged or (found := self._kernel_of(self._given_on_cpu(given), staged, 0)) is None:
            return False
        # The rest is computed without the old weights, unless whole master weights still have them.
        _, _, settings = found
        return _has_whole_masters(staged) or bool(settings.decoupled)

    def device_settings(self, given: StepInput, staged: StagedState) -> KernelSettings | None:
        """Returns the numbers of a step that `cuda_step` makes as adam.c would; None: adam.c, or one call, does not."""
        if len(set(self._steps)) != 1 or not all(given.has_grad):
            return None
        found = self._kernel_of(self._given_on_cpu(given), staged, self._steps[0])
        return None if found is None else found[2]

    def _kernel_of(
        self, given: StepInput, staged: StagedState, steps: int
    ) -> tuple[AdamKernel, str, KernelSettings] | None:
        """Returns the kernel of a step, the name of its function and its numbers; None: torch's function is called."""
        name = self._function(staged, given.gradient.dtype) if self._compiled else None
        if name is None:
            return None
        exact = staged.moments == "fp32" and self._device.type == "cpu"
        implementation = implementation_of(given.options, self._device) if exact else "fused"
        kernel = exact_kernel(implementation) if exact else any_kernel()
        settings = settings_of(given.options, implementation, steps + 1, given.scale)
        if kernel is None or settings is None or (staged.moments == "fp32" and not follows_torch(settings)):
            return None
        return kernel, name, settings

    @staticmethod
    def _arrays(staged: StagedState) -> tuple[Tensor, ...]:
        """Returns a flat's arrays in the order of the functions in adam.c."""
        master = staged.low if staged.low is not None else staged.master
        assert master is not None
        return staged.weights, master, *map(staged.states.__getitem__, ADAM_MOMENTS)

    def _function(self, staged: StagedState, gradient: torch.dtype) -> str | None:
        """Returns the name of the function in adam.c for these dtypes."""
        kinds = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        kind = kinds.get(gradient)
        if staged.master is staged.weights and kind == "fp32":
            return "adam_fp32"
        if staged.weights.dtype != torch.bfloat16 or kind is None:
            return None
        return f"adam_whole_{kind}" if staged.low is None else f"adam_split_{kind}"

    def _torchs_step(
        self,
        options: Options,
        weights: Tensor,
        gradient: Tensor,
        values: StagedState,
        steps: int,
        span: ElementSpan,
    ) -> None:
        if values.moments == "fp32":
            torchs_step(options, weights, gradient, values.states, steps + 1)
            return
        settings = settings_of(options, "fused", steps + 1, 1.0)
        if settings is None:
            raise RuntimeError(self.refuse_rounded_moments(options))
        stepped = rounded_step(weights, gradient, [values.decode(name) for name in ADAM_MOMENTS], settings)
        if values.moments == "8bit":
            for name, new in zip(ADAM_MOMENTS, stepped, strict=True):
                values.encode(name, new)
            return
        random = random_bits(span.first, span.numel, step_keys(span.random_key, steps + 1), weights.device)
        for name, new, bits in zip(ADAM_MOMENTS, stepped, (random & 0xFFFF, random >> 16), strict=True):
            values.states[name].copy_(round_stochastically(new, bits))

    @staticmethod
    def refuse_rounded_moments(options: Options) -> str | None:
        """Returns the reason why a step with these options can't have rounded moments, with the remedy, or None."""
        if settings_of(options, "fused", 1, 1.0) is not None:
            return None
        return (
            "`state_format` of fewer bytes than fp32 supports Adam and AdamW without `amsgrad`, `differentiable` and "
            "`capturable`, and with numbers as `betas` and `weight_decay`. Change these, or take `state_format='split'`"
        )


def _has_whole_masters(staged: StagedState) -> bool:
    return staged.master is not None and staged.master is not staged.weights


def _outputs(half: StepHalf, staged: StagedState) -> KernelOutputs:
    """Returns the arrays that a half of a step stores. Master weights that are the compute weights are in the first."""
    if half == "whole":
        return KernelOutputs.ALL
    weights = KernelOutputs.WEIGHTS if _has_whole_masters(staged) else KernelOutputs.WEIGHTS | KernelOutputs.MASTERS
    return weights if half == "weights" else KernelOutputs.ALL & ~weights


class SGDOptimizer(ElementwiseOptimizer):
    """`torch.optim.SGD`. Only steps with momentum are counted: the first of them makes the buffer."""

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ("momentum_buffer",) if options["momentum"] else ()

    def load_state(self, index: int, state: Mapping[str, Any], staged: StagedState) -> None:
        super().load_state(index, state, staged)
        if state.get("momentum_buffer") is None:  # torch's optimizer has made no step with momentum
            self._steps[index] = 0

    def commit(self, has_grad: Sequence[bool], options: Options) -> None:
        super().commit([has_gradient and bool(options["momentum"]) for has_gradient in has_grad], options)

    def _torchs_step(
        self,
        options: Options,
        weights: Tensor,
        gradient: Tensor,
        values: StagedState,
        steps: int,
        span: ElementSpan,
    ) -> None:
        buffer = values.states.get("momentum_buffer")
        buffers = [buffer if steps else None]  # the first step makes one
        with torch.no_grad():
            sgd([weights], [gradient], buffers, **{name: options[name] for name in _SGD_OPTIONS})
        if buffer is not None and buffers[0] is not None and buffers[0] is not buffer:
            buffer.copy_(buffers[0])

    def _step_state(self, step: int) -> dict[str, Any]:
        return {}


_SGD_OPTIONS = ("foreach", "fused", "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class GenericOptimizer(FlatOptimizer):
    """Any other optimizer that steps each parameter on its own: its own `step`, on tensors in host memory.

    Its states, of any kind, are kept in host memory, and a step can't be rolled back.
    """

    keeps_states = True

    def __init__(self, flat: FlatParameter, optimizer: Optimizer) -> None:
        super().__init__(flat)
        self._parameters = [nn.Parameter(torch.empty(0, dtype=torch.float32)) for _ in flat.param_views]
        # Not a copy: `Optimizer.__getstate__` omits attributes of subclasses.
        self._optimizer: Optimizer = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(optimizer.__dict__)
        self._optimizer.__dict__.pop("zero_grad", None)  # the hook of `optimizer_hooks`
        self._optimizer._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
        self._optimizer._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
        self._optimizer.state = defaultdict(dict)
        self._on_gpu = flat.device.type != "cpu"

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ()

    def begin_step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> Sequence[KernelCall]:
        masters, gradient = staged.masters(), given.gradient[:]
        for item, parameter, has_gradient in zip(self.flat.param_views, self._parameters, given.has_grad, strict=True):
            parameter.data = item.of(masters)
            parameter.grad = item.of(gradient).float() * given.scale if has_gradient else None
        options = given.options
        if self._on_gpu and "capturable" in options:  # an option for parameters on a GPU
            options = {**options, "capturable": False}
        self._optimizer.param_groups = [{**options, "params": self._parameters}]
        _own_step(type(self._optimizer))(self._optimizer)
        staged.set_masters(masters)
        for parameter in self._parameters:
            parameter.grad = None
        return ()

    def state_of(self, index: int, staged: StagedState) -> dict[str, Any]:
        return dict(self.states_in_memory(index))

    def states_in_memory(self, index: int) -> Mapping[str, Any]:
        states: Mapping[str, Any] = self._optimizer.state.get(self._parameters[index], {})
        return states

    def converted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        parameter = self._parameters[0]

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(dtype=parameter.dtype, device=parameter.device)
            if isinstance(value, dict):
                return {name: convert(one) for name, one in value.items()}
            return type(value)(map(convert, value)) if isinstance(value, list | tuple) else value

        return {name: value if name == "step" else convert(value) for name, value in state.items()}

    def load_state(self, index: int, state: Mapping[str, Any], staged: StagedState) -> None:
        self._optimizer.state[self._parameters[index]] = dict(state)


class WholeOptimizer(FlatOptimizer):
    """An optimizer that is stepped whole (see `WholeStep`): its states are in host memory, in `Optimizer.state`."""

    keeps_states = True

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ()

    def begin_step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> Sequence[KernelCall]:
        raise AssertionError("an optimizer that is stepped whole steps no flat parameter")

    def state_of(self, index: int, staged: StagedState) -> dict[str, Any]:
        return {}

    def load_state(self, index: int, state: Mapping[str, Any], staged: StagedState) -> None:
        assert not state


def _own_step(cls: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Returns the `step` of a class without torch's wrapper: hooks run once, around the user's `step`."""
    step: Any = cls.step
    return cast(Callable[[Optimizer], object], step.__wrapped__ if getattr(step, "hooked", False) else step)


def is_adam(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer` makes the steps of Adam or AdamW."""
    return registered_class(type(optimizer)) in (torch.optim.AdamW, torch.optim.Adam)


def runs_closure_first(optimizer: Optimizer) -> bool:
    """Returns whether `step` calls its closure first and once, and changes no gradients after it."""
    return is_adam(optimizer) or registered_class(type(optimizer)) is torch.optim.SGD


def make_flat_optimizer(optimizer: Optimizer, flat: FlatParameter, whole: Container[Optimizer] = ()) -> FlatOptimizer:
    """Returns how `optimizer` steps `flat`; `whole`: optimizers that are stepped whole."""
    if optimizer in whole:
        return WholeOptimizer(flat)
    if is_adam(optimizer):
        return AdamOptimizer(flat)
    if registered_class(type(optimizer)) is torch.optim.SGD:
        return SGDOptimizer(flat)
    return GenericOptimizer(flat, optimizer)
