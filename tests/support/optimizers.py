"""Optimizers whose parameters depend on each other."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Program(Optimizer):
    """Its step is a list of operations."""

    def __init__(self, groups: Any, operations: list[str]) -> None:
        super().__init__(groups, {"lr": 1e-2})
        self.operations = operations
        self.total = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for name in self.operations:
            getattr(self, name)(closure)
        return loss

    def every(self) -> list[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        groups = self.param_groups
        return [(group, p, p.grad) for group in groups for p in group["params"] if p.grad is not None]

    def global_norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([grad for _, _, grad in self.every()])))

    def elementwise(self, closure: Any) -> None:
        for group, p, grad in self.every():
            p.add_(grad, alpha=-group["lr"])

    def momentum(self, closure: Any) -> None:
        for group, p, grad in self.every():
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            p.add_(average.lerp_(grad, 0.3), alpha=-group["lr"])

    def parameter_norm(self, closure: Any) -> None:
        for group, p, grad in self.every():
            p.sub_(grad / (grad.norm() + 1e-3) * group["lr"])

    def group_norm(self, closure: Any) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if grads:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                group["average"] = 0.9 * group.get("average", 0.0) + norm.item()
                torch._foreach_add_([p for p in group["params"] if p.grad is not None], grads, alpha=-group["average"])

    def clipped(self, closure: Any) -> None:
        norm = self.global_norm()
        for _, _, grad in self.every():
            grad.mul_(0.5 / (norm + 1e-6))

    def trust_ratio(self, closure: Any) -> None:
        weights = torch.stack([p.square().sum() for _, p, _ in self.every()]).sum().sqrt()
        for group, p, grad in self.every():
            p.sub_(grad * weights / (self.global_norm() + 1e-3) * group["lr"])

    def attribute(self, closure: Any) -> None:
        self.total += self.global_norm().item()
        for _, p, grad in self.every():
            p.add_(grad, alpha=-0.1 / self.total)

    def decay(self, closure: Any) -> None:
        for group, p, _ in self.every():
            p.mul_(1 - group["lr"])

    def again(self, closure: Any) -> None:
        """The closure at another point, as SAM does."""
        every = self.every()
        steps = [grad * 0.05 for _, _, grad in every]
        for (_, p, _), step in zip(every, steps, strict=True):
            p.add_(step)
        if closure is not None:
            with torch.enable_grad():
                closure()
        for (_, p, _), step in zip(every, steps, strict=True):
            p.sub_(step)


class Coupled(torch.optim.AdamW):
    """A step of AdamW with another one around it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99).add_(self.state[p]["exp_avg"], alpha=0.1)
        return loss
