"""The user's optimizer on the host's flats: its class, its settings as they are now, its state by the same names."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.states.compiled import Settings, adam_library
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.home import Opened
from lightning_ssd.states.split import join, split

Options = Mapping[str, Any]
"""A parameter group without its parameters."""


class Rule(ABC):
    """How one optimizer class steps a flat.

    Args:
        flat: what it steps.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat

    @abstractmethod
    def state_names(self, options: Options) -> tuple[str, ...]:
        """Returns the names of the states that have an fp32 element for each weight."""

    @abstractmethod
    def step(self, options: Options, opened: Opened, gradient: Tensor, has: Sequence[bool], scale: float) -> None:
        """Makes a step, to be made known by `commit`, of the master weights, and rounds them to the compute weights.

        Args:
            options: the parameter group's settings.
            opened: the flat's values; the new ones are put in `opened.out`.
            gradient: `flat.numel` elements in any floating dtype.
            has: of each parameter, whether it has a gradient; those without are left alone, as torch does.
            scale: what the gradient, taken to fp32, is multiplied with.
        """

    def commit(self, has: Sequence[bool]) -> None:
        """The last step counts; `has` is what it was given."""
        return None

    def kept(self) -> object:
        """Returns what `take_over` wants, to go on from the values that the flat has."""
        raise NotImplementedError(f"{type(self).__name__} keeps states in memory")

    def take_over(self, kept: object) -> None:
        """Goes on from what `kept` returned in another process."""
        raise NotImplementedError(f"{type(self).__name__} keeps states in memory")

    @abstractmethod
    def state_of(self, index: int, opened: Opened) -> dict[str, Any]:
        """Returns the state of parameter `index` as torch's optimizer would keep it; tensors may be views."""

    @abstractmethod
    def load_state(self, index: int, state: Mapping[str, Any], opened: Opened) -> None:
        """Takes a state over that torch's optimizer (or `state_of`) made."""


class ElementwiseRule(Rule):
    """AdamW, Adam and SGD: what they do to an element does not depend on others, so a flat is stepped as one."""

    #: Elements of a chunk: 4 MiB of fp32.
    CHUNK = 2**20

    def __init__(self, flat: Flat) -> None:
        super().__init__(flat)
        self._steps = [0] * len(flat.slices)

    def step(self, options: Options, opened: Opened, gradient: Tensor, has: Sequence[bool], scale: float) -> None:
        if opened.out is not opened and not all(has):
            opened.out.copy(opened)
        for start, end, step in self._ranges(has):
            self._step_range(options, opened, gradient, slice(start, end), step, scale)
        if not all(has):
            opened.out.round()

    def kept(self) -> list[int]:
        return list(self._steps)

    def take_over(self, kept: Any) -> None:
        self._steps = list(kept)

    def commit(self, has: Sequence[bool]) -> None:
        self._steps = [step + has_gradient for step, has_gradient in zip(self._steps, has, strict=True)]

    def state_of(self, index: int, opened: Opened) -> dict[str, Any]:
        if self._steps[index] == 0:
            return {}
        item = self.flat.slices[index]
        return self._step_state(self._steps[index]) | {name: item.of(row) for name, row in opened.states.items()}

    def load_state(self, index: int, state: Mapping[str, Any], opened: Opened) -> None:
        item = self.flat.slices[index]
        for name, row in opened.states.items():
            if (value := state.get(name)) is not None:
                item.of(row).copy_(value)
            else:
                item.of(row).zero_()
        self._steps[index] = int(state.get("step", 1)) if state else 0

    def _step_range(
        self, options: Options, opened: Opened, gradient: Tensor, where: slice, step: int, scale: float
    ) -> None:
        """Makes step `step` (0 is the first) of the elements `where`.

        Torch's fused CPU kernels run over chunks that stay in the cache, between the conversions of the gradient to
        fp32 and of the master weights to the compute weights.
        """
        out = opened.out
        for low in range(where.start, where.stop, self.CHUNK):
            chunk = slice(low, min(low + self.CHUNK, where.stop))
            part = gradient[chunk].float()
            if scale != 1.0:
                part = part * scale
            if out is not opened:
                for name, values in out.states.items():
                    values[chunk].copy_(opened.states[name][chunk])
            states = {name: values[chunk] for name, values in out.states.items()}
            if opened.low is not None and out.low is not None:
                master = join(opened.weights[chunk], opened.low[chunk])
                self._kernel(options, master, part, states, step)
                split(master, out.weights[chunk], out.low[chunk])
            else:
                assert opened.master is not None and out.master is not None
                master = out.master[chunk]
                if out is not opened:
                    master.copy_(opened.master[chunk])
                self._kernel(options, master, part, states, step)
                if out.master is not out.weights:
                    out.weights[chunk].copy_(master)

    @abstractmethod
    def _kernel(
        self, options: Options, weights: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int
    ) -> None:
        """Makes a step of whole fp32 weights in place."""

    def _step_state(self, step: int) -> dict[str, Any]:
        return {"step": torch.tensor(float(step), dtype=torch.float32)}

    def _ranges(self, has: Sequence[bool]) -> list[tuple[int, int, int]]:
        """Returns start and end, in elements, of runs of parameters with a gradient and the same step."""
        ranges: list[tuple[int, int, int]] = []
        for index, item in enumerate(self.flat.slices):
            last = index + 1 == len(self.flat.slices)
            end = self.flat.numel if last else self.flat.slices[index + 1].start
            if not has[index]:
                continue
            if ranges and ranges[-1][1] == item.start and ranges[-1][2] == self._steps[index]:
                ranges[-1] = (ranges[-1][0], end, ranges[-1][2])
            else:
                ranges.append((item.start, end, self._steps[index]))
        return ranges


class AdamRule(ElementwiseRule):
    """`torch.optim.Adam` and `AdamW`: in one pass by our own kernel (adam.c), where it was compiled."""

    def __init__(self, flat: Flat, *, compiled: bool = True) -> None:
        super().__init__(flat)
        self._library = adam_library() if compiled else None

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if options["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _step_range(
        self, options: Options, opened: Opened, gradient: Tensor, where: slice, step: int, scale: float
    ) -> None:
        name = self._function(opened, gradient)
        beta1, beta2 = map(float, options["betas"])
        lr, decay = float(options["lr"]), float(options["weight_decay"])
        if self._library is None or name is None or options["amsgrad"] or beta1 <= 0.5:
            super()._step_range(options, opened, gradient, where, step, scale)
            return
        decoupled = options["decoupled_weight_decay"] or not decay
        settings = Settings(
            scale=-scale if options["maximize"] else scale,
            decay=1 - lr * decay if decoupled else decay,
            lerp=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            correction=math.sqrt(1 - beta2 ** (step + 1)),
            eps=options["eps"],
            step_size=-(lr / (1 - beta1 ** (step + 1))),
            decoupled=decoupled,
            threads=torch.get_num_threads(),
        )
        values = [array for of in (opened, opened.out) for array in self._arrays(of)]
        addresses = [ctypes.c_void_p(array[where].data_ptr()) for array in (*values, gradient)]
        getattr(self._library, name)(ctypes.c_int64(where.stop - where.start), *addresses, ctypes.byref(settings))

    @staticmethod
    def _arrays(opened: Opened) -> tuple[Tensor, ...]:
        """Returns a flat's arrays in the order of the functions in adam.c."""
        kept = opened.low if opened.low is not None else opened.master
        assert kept is not None
        return opened.weights, kept, opened.states["exp_avg"], opened.states["exp_avg_sq"]

    def _function(self, opened: Opened, gradient: Tensor) -> str | None:
        """Returns the name of the function in adam.c for these dtypes."""
        kinds = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        kind = kinds.get(gradient.dtype)
        if opened.master is opened.weights and kind == "fp32":
            return "adam_fp32"
        if opened.weights.dtype != torch.bfloat16 or kind is None:
            return None
        return f"adam_whole_{kind}" if opened.low is None else f"adam_split_{kind}"

    def _kernel(
        self, options: Options, weights: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int
    ) -> None:
        kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            [weights],
            [gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if options["amsgrad"] else [],
            [torch.tensor(float(step + 1), dtype=torch.float32)],
            amsgrad=options["amsgrad"],
            lr=float(options["lr"]),
            beta1=float(options["betas"][0]),
            beta2=float(options["betas"][1]),
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
        )


class SGDRule(ElementwiseRule):
    """`torch.optim.SGD`."""

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ("momentum_buffer",) if options["momentum"] else ()

    def _kernel(
        self, options: Options, weights: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int
    ) -> None:
        torch._fused_sgd_(
            [weights],
            [gradient],
            list(states.values()),
            weight_decay=options["weight_decay"],
            momentum=options["momentum"],
            lr=float(options["lr"]),
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            maximize=options["maximize"],
            is_first_step=step == 0,
        )

    def _step_state(self, step: int) -> dict[str, Any]:
        return {}


class OwnStepRule(Rule):
    """Any other optimizer whose parameters don't depend on each other: its own `step`, on the flat's host tensors.

    Its states, whatever they are, stay in host memory, and a step can't be taken back.
    """

    def __init__(self, flat: Flat, optimizer: Optimizer) -> None:
        super().__init__(flat)
        self._parameters = [nn.Parameter(torch.empty(0, dtype=torch.float32)) for _ in flat.slices]
        # Not a copy: `Optimizer.__getstate__` would leave out what subclasses keep.
        self._optimizer: Optimizer = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(optimizer.__dict__)
        self._optimizer.__dict__.pop("zero_grad", None)  # that of model states
        self._optimizer._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()
        self._optimizer._optimizer_step_post_hooks = type(optimizer._optimizer_step_post_hooks)()
        self._optimizer.state = defaultdict(dict)

    def state_names(self, options: Options) -> tuple[str, ...]:
        return ()

    def step(self, options: Options, opened: Opened, gradient: Tensor, has: Sequence[bool], scale: float) -> None:
        masters = opened.masters()
        for item, parameter, has_gradient in zip(self.flat.slices, self._parameters, has, strict=True):
            parameter.data = item.of(masters)
            parameter.grad = item.of(gradient).float() * scale if has_gradient else None
        self._optimizer.param_groups = [{**options, "params": self._parameters}]
        type(self._optimizer).step(self._optimizer)
        opened.take(masters)
        for parameter in self._parameters:
            parameter.grad = None

    def state_of(self, index: int, opened: Opened) -> dict[str, Any]:
        return dict(self._optimizer.state[self._parameters[index]])

    def load_state(self, index: int, state: Mapping[str, Any], opened: Opened) -> None:
        self._optimizer.state[self._parameters[index]] = dict(state)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rule_for(optimizer: Optimizer, flat: Flat) -> Rule:
    """Returns how `optimizer` steps `flat`."""
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return AdamRule(flat)
    if type(optimizer) is torch.optim.SGD:
        return SGDRule(flat)
    return OwnStepRule(flat, optimizer)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses what can't be stepped unit by unit.

    Raises:
        ValueError: with the remedy.
    """
    if type(optimizer) in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise ValueError(
            f"{type(optimizer).__name__} can't step one unit after the other on the host. "
            "Take another optimizer (AdamW, Adam, SGD, or any whose parameters don't depend on each other), or set "
            "`states='gpu'`, which leaves weights, gradients and optimizer states to it."
        )
