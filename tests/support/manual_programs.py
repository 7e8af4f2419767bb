"""Programs of manual optimization: modules whose batches call given methods, for backwards, clipping and steps."""

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.access import Toy, fit

Operation = tuple[Any, ...]
"""The name of a method of `Program`, and its arguments."""

ALGORITHMS = st.sampled_from(["norm", "value"])
LIMITS = st.sampled_from([0.001, 0.01, 100.0])


class Program(Toy):
    """Manual optimization with one optimizer for each block: each batch is trained by a list of operations.

    Block 0 has a frozen parameter, and block 1 one that is never used.

    Args:
        operations: operations of each batch.
        kinds: classes of the optimizers.
    """

    def __init__(self, operations: list[list[Operation]], kinds: tuple[Any, Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.operations = operations
        self.kinds = kinds
        self.blocks[0].down.bias.requires_grad_(False)
        self.blocks[1].unused = nn.Parameter(torch.ones(8))
        self.large = 1.0
        self.assigned: set[nn.Parameter] = set()

    def configure_optimizers(self) -> Any:
        optimizers = [
            kind([one for one in block.parameters() if one.requires_grad], lr=0.05)
            for kind, block in zip(self.kinds, self.blocks, strict=True)
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.batch = batch[0]
        for name, *arguments in self.operations[batch_idx]:
            getattr(self, name)(*arguments)

    def has_gradients(self, number: int) -> bool:
        """Returns whether an optimizer has gradients: torch clips by value, and the scaler steps, no others."""
        return any(one.grad is not None for one in self.blocks[number].parameters())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.used:
            x = block(x)
        return x

    def compute(self, used: str) -> Tensor:
        self.used = [self.blocks[int(number)] for number in used]
        return self.loss(self.batch) * self.large

    def backward_of(self, used: str, by_lightning: bool) -> None:
        loss = self.compute(used)
        if not loss.requires_grad:
            return
        if by_lightning:
            self.manual_backward(loss)
        else:
            loss.backward()
        self.seen.append(loss.item())

    def clip(self, number: int, algorithm: str, limit: float) -> None:
        if self.has_gradients(number):
            self.clip_gradients(self.optimizers()[number], limit, algorithm)  # type: ignore[index]

    def clip_inner(self, number: int, algorithm: str, limit: float) -> None:
        if self.has_gradients(number):
            self.clip_gradients(self.optimizers()[number].optimizer, limit, algorithm)  # type: ignore[index,union-attr]

    def clip_by_torch(self, number: int, algorithm: str, limit: float) -> None:
        function = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
        if self.has_gradients(number):
            self.seen.append(function(self.blocks[number].parameters(), limit))

    def step(self, number: int) -> None:
        if self.has_gradients(number):
            self.optimizers()[number].step()  # type: ignore[index]

    def step_twice(self, number: int) -> None:
        self.step(number)
        self.step(number)

    def step_closure(self, number: int, used: str, algorithm: str, limit: float) -> None:
        optimizer: Any = self.optimizers()[number]  # type: ignore[index]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.compute(used)
            if loss.requires_grad:
                self.manual_backward(loss)
            self.clip(number, algorithm, limit)
            return loss

        if str(number) in used and self.blocks[number].up.weight.requires_grad:
            optimizer.step(closure=closure)

    def zero(self, number: int, to_none: bool) -> None:
        self.optimizers()[number].zero_grad(set_to_none=to_none)  # type: ignore[index,call-arg]

    def zero_module(self) -> None:
        self.zero_grad()

    def read(self, number: int) -> None:
        self.seen += [None if one.grad is None else one.grad.clone() for one in self.blocks[number].parameters()]

    def read_one(self, number: int) -> None:
        if (gradient := self.blocks[number].up.weight.grad) is not None:
            self.seen.append(float(gradient.sum()))

    def multiply(self, number: int, factor: float) -> None:
        if (gradient := self.blocks[number].up.weight.grad) is not None:
            gradient.mul_(factor)

    def assign(self, number: int, name: str = "bias") -> None:
        parameter = getattr(self.blocks[number].up, name)
        parameter.grad = torch.full_like(parameter, 0.5)
        self.assigned.add(parameter)

    def drop(self, number: int) -> None:
        self.blocks[number].up.weight.grad = None

    def keep(self, number: int) -> None:
        # A later backward adds to an assigned tensor in plain torch alone (docs/limits.md).
        self.kept = [
            one.grad.clone() if one in self.assigned and one.grad is not None else one.grad
            for one in self.blocks[number].parameters()
        ]

    def read_kept(self) -> None:
        self.seen += [None if one is None else one.clone() for one in getattr(self, "kept", [])]

    def toggle(self, number: int) -> None:
        with contextlib.suppress(KeyError):
            self.untoggle_optimizer(self.optimizers()[1 - number])  # type: ignore[index]
        self.toggle_optimizer(self.optimizers()[number])  # type: ignore[index]

    def untoggle(self, number: int) -> None:
        self.untoggle_optimizer(self.optimizers()[number])  # type: ignore[index]

    def schedule(self, number: int) -> None:
        self.lr_schedulers()[number].step()  # type: ignore[index,call-arg]

    def enlarge(self, factor: float) -> None:
        self.large = factor

    def on_train_end(self) -> None:
        self.kept = []
        self.assigned.clear()


def train(path: Path, make: Any, states: str | None, precision: str, scale: float, **arguments: Any) -> Any:
    """Trains with `precision`, and returns the module, or the text of plain Lightning's error."""
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        how = {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)}
    return fit(path, make(), states, **how, **arguments)
