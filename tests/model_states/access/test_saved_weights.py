"""Weights and views of them that user code passes to functions, saves for backward, or makes leaves of."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.access import PLACES, Toy, compare, fit


class Multiply(torch.autograd.Function):
    """A function of user code that saves its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return gradient @ weight.float().t(), x.float().t() @ gradient


class Kernel(torch.autograd.Function):
    """A kernel of user code, which reads the memory of its arguments in C++ (here `torch.tensor`), in backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ _elements(weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return gradient @ _elements(weight), gradient.t() @ x.float()


def _elements(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # it advises to call `clone`
        return torch.tensor(tensor)


class Returned(torch.autograd.Function):
    """A function of user code whose result is a view of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Own(nn.Module):
    """A unit whose forward makes views of its weight."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + torch.arange(64).view(8, 8) / 64)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Given(nn.Module):
    """A unit that gets a tensor besides its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, self.weight, bias)


class Heads(Toy):
    """Applies `use` to the blocks' result and the module."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(optimizer=torch.optim.AdamW, lr=0.01)
        self.head = nn.Linear(8, 8)
        self.given = Given()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, super().forward(x))


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a view in the forward of another unit": lambda m, x: m.given(x, m.head.weight[0]),
    "a function that saves a view": lambda m, x: Multiply.apply(x, m.head.weight.t()),
    "a checkpoint of a view": lambda m, x: checkpoint(torch.matmul, x, m.head.weight.t(), use_reentrant=False),
    "a reentrant checkpoint of a view": lambda m, x: checkpoint(torch.matmul, x, m.head.weight.t(), use_reentrant=True),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.thorough)])
def test_uses_of_weights_whose_backward_needs_them(tmp_path: Path, states: str, precision: str, use: str) -> None:
    compare(tmp_path, lambda: Heads(USES[use]), states, precision=precision)


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda x, w: F.linear(x, w.view(-1).view(8, 8).t()).mm(w.t()) @ w.chunk(2)[0].t() @ w[4:],
    "other operators": lambda x, w: F.layer_norm(x * w.t()[0] + w[1].sin(), (8,), w[2], w.t()[3]),
    "many parts": lambda x, w: torch.stack([x * w[index] for index in range(8)]).sum(0),
    "a kernel": lambda x, w: Kernel.apply(x, w.view(8, 8)),
    "a kernel without autograd": lambda x, w: x @ w + x.float() @ _elements(w.detach().t()),
    "a view that a function returns": lambda x, w: x @ Returned.apply(w) * Returned.apply(w.t())[2],
}


@pytest.mark.parametrize(
    ("reentrant", "precision"),
    [(None, "bf16-mixed"), (False, "32-true"), pytest.param(True, "bf16-mixed", marks=pytest.mark.thorough)],
)
def test_views_in_the_forward_of_their_own_module(tmp_path: Path, reentrant: bool | None, precision: str) -> None:
    """Without checkpointing (`reentrant` is None), and in forwards that are recomputed in backward."""

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__(optimizer=torch.optim.AdamW, lr=0.01)
            self.own = nn.ModuleList(Own(use) for use in OWN.values())

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)  # reentrant checkpoints need inputs that require gradients
            for own in self.own:
                result = own(x) if reentrant is None else checkpoint(own, x, use_reentrant=reentrant)
                x = F.layer_norm(result, (8,))  # type: ignore[arg-type]
            return x

    compare(tmp_path, Model, "host", precision=precision)


def _outside(modules: Any, x: Tensor) -> Tensor:
    """Uses weights outside of the forwards of their modules."""
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    for weight in weights:
        x = F.linear(x @ weight, weight).tanh()
    return x


@pytest.mark.parametrize(("call", "precision"), [(lambda modules, x: modules(x), "bf16-mixed"), (_outside, "32-true")])
def test_checkpoints_of_several_frozen_units(tmp_path: Path, call: Any, precision: str) -> None:
    """Each unit that is recomputed evicts the one before it, whose weights backward needs, too."""

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__(optimizer=torch.optim.AdamW, lr=0.01)
            convolution = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 1))
            normalized = [nn.LayerNorm(8), nn.Linear(8, 8), nn.PReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8)]
            self.frozen = nn.Sequential(convolution, nn.Flatten(), *normalized).requires_grad_(False)
            self.use = call  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return checkpoint(self.use, self.frozen, x, use_reentrant=False)  # type: ignore[no-any-return]

    compare(tmp_path, Model, "host", precision=precision)


def test_a_saved_view_whose_weights_are_changed_is_refused(tmp_path: Path) -> None:
    class Changes(Heads):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.head.weight.add_(1)
            return loss

    for states in (None, "host"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fit(tmp_path, Changes(USES["a function that saves a view"]), states)


def test_an_alias_of_a_weight_is_no_leaf(tmp_path: Path) -> None:
    """Its gradient would be lost."""

    class Leaf(Toy):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            alias = self.blocks[0].up.weight.detach()
            alias.requires_grad = True
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="Take a `.clone\\(\\)` of it first"):
        fit(tmp_path, Leaf(), "host")


@pytest.mark.parametrize("overlap", ["optimized", "none"])
@pytest.mark.parametrize(
    ("in_loss", "zeroes", "error"),
    [
        pytest.param(False, False, None, id="dropped only"),
        pytest.param(True, False, "is added to the one that the last step has used", id="in the loss, too"),
        pytest.param(True, True, "`zero_grad` drops gradients of head", id="after another zero_grad"),
    ],
)
def test_gradients_that_lightning_drops_before_its_backward_are_not_stepped(
    tmp_path: Path, overlap: str, in_loss: bool, zeroes: bool, error: str | None
) -> None:
    """Gradients of a backward in `training_step`, after which Lightning calls `zero_grad`."""

    class Backward(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.head(x) if in_loss else x)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if zeroes:
                self.trainer.optimizers[0].zero_grad()
            self.head(batch[0]).sum().backward()
            return loss

    if error is None or (zeroes and overlap == "none"):
        compare(tmp_path, Backward, "host", strategy={"overlap": overlap})
        return
    with pytest.raises(RuntimeError, match=error):
        fit(tmp_path, Backward(), "host")
