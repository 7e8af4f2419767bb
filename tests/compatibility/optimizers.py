"""Optimizers: every class of torch.optim with its default arguments, settings of them, and optimizers of users."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.compatibility.case import EQUAL, Case, Expectation
from tests.compatibility.families import VOCABULARY, WIDTH, Trained, mlp, numbers, rows

Make = Callable[[list[nn.Parameter]], Any]


class Optimized(Trained):
    """A small MLP and the optimizers that `make` makes."""

    def __init__(self, make: Make) -> None:
        super().__init__(nn.Sequential(mlp(), mlp()), rows)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(list(self.parameters()))


class Matrices(Optimized):
    """Parameters of two dimensions alone."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))


class Sparse(Optimized):
    """An embedding with sparse gradients."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, sparse=True), mlp())
        self.inputs = numbers

    def configure_optimizers(self) -> Any:
        embedding, rest = self.model[0].parameters(), self.model[1].parameters()
        return [self.make(list(embedding)), torch.optim.AdamW(rest)]

    automatic_optimization = False

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss


class Signs(Optimizer):
    """A user's optimizer that steps each parameter independently."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.add_(momentum.sign(), alpha=-group["lr"])
        return loss


class GlobalNorm(Signs):
    """A user's optimizer that divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / norm)
        return loss


class TrustRatio(Signs):
    """LAMB's and LARS's step: a ratio of norms for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(group["lr"] * ratio * parameter.grad)
        return loss


class Decayed(torch.optim.AdamW):
    """A subclass of AdamW that overrides `step`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)
        return loss


def hooked(parameters: list[nn.Parameter]) -> Optimizer:
    """Returns AdamW with hooks around its step, which change the learning rate."""
    optimizer = torch.optim.AdamW(parameters, 1e-2)

    def before(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.param_groups[0]["lr"] *= 0.9

    def after(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.param_groups[0]["lr"] *= 0.5

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def grouped(parameters: list[nn.Parameter]) -> Optimizer:
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    rest = [parameter for parameter in parameters if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}])


def case(name: str, make: Make, states: Expectation = EQUAL, *, kind: type[Optimized] = Optimized, **how: Any) -> Case:
    return Case(name, lambda: kind(make), states, **how)


KINDS: dict[str, type[Optimized]] = {"Muon": Matrices, "SparseAdam": Sparse}


def _default(cls: type[Optimizer]) -> Case:
    name = cls.__name__
    make: Any = cls
    return case(f"{name}, default arguments", make, kind=KINDS.get(name, Optimized), quick=name == "AdamW")


CLASSES = [cls for name, cls in sorted(vars(torch.optim).items()) if isinstance(cls, type) and cls is not Optimizer]
CASES = [
    *(_default(cls) for cls in CLASSES),
    case("AdamW, fused", lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    case("AdamW, foreach", lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    case("AdamW, amsgrad", lambda parameters: torch.optim.AdamW(parameters, amsgrad=True)),
    case("AdamW, maximize", lambda parameters: torch.optim.AdamW(parameters, maximize=True)),
    case("AdamW, learning rate in a tensor", lambda parameters: torch.optim.AdamW(parameters, torch.tensor(1e-2))),
    case("AdamW, parameter groups", grouped),
    case("Adam, weight decay", lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1)),
    case("SGD, momentum, Nesterov", lambda parameters: torch.optim.SGD(parameters, 1e-2, 0.9, nesterov=True)),
    case("SGD, fused", lambda parameters: torch.optim.SGD(parameters, 1e-2, 0.9, fused=True)),
    case(
        "RMSprop, centered, momentum", lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9)
    ),
    case("Step hooks", hooked),
    case("A user's optimizer, parameter by parameter", Signs, quick=True),
    case("A user's optimizer with a trust ratio of each parameter", TrustRatio),
    case("A user's optimizer with a norm over all gradients", GlobalNorm),
    case("A subclass of AdamW that overrides `step`", Decayed),
]
