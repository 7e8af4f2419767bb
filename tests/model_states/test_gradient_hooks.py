"""The order in which hooks of gradients run: as in plain training, so that they draw the same random numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.access import compare
from tests.support.models import Block, ToyModel


class Attention(nn.MultiheadAttention):
    """Self-attention of rows, by one function that is given all weights."""

    def __init__(self) -> None:
        super().__init__(8, 2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        attended: Tensor = super().forward(x, x, x)[0]
        return attended


class Twice(Block):
    """A block that is called twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Checkpointed(Block):
    """A block whose forward runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Functions(nn.Module):
    """Products of parameters by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, bias=self.bias, weight=self.one)
        return torch.addmm(self.bias, y, self.two) + y @ (self.one @ self.two) + self.bias


LAYERS = {
    "linear": partial(Block, 8, 8),
    "attention": Attention,
    "twice": partial(Twice, 8, 8),
    "checkpointed": partial(Checkpointed, 8, 8),
    "functions": Functions,
}


class Noisy(ToyModel):
    """Adds noise to each gradient in a hook.

    Args:
        layer: makes the model.
        hook: method of tensors that registers the hook.
        registered_at: the hook of Lightning in which it is registered.
    """

    def __init__(self, layer: Any, hook: str, registered_at: str) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1))
        self.net = nn.Sequential(layer(), nn.Linear(8, 8))
        self.hook = hook
        self.registered_at = registered_at
        self.seen: list[str] = []

    def setup(self, stage: str) -> None:
        self.register("setup")

    def on_before_backward(self, loss: Tensor) -> None:
        if not self.seen:
            self.register("on_before_backward")

    def register(self, at: str) -> None:
        if at == self.registered_at:
            for name, parameter in self.net.named_parameters():
                getattr(parameter, self.hook)(partial(getattr(self, f"on_{self.hook}"), name))

    def on_register_hook(self, name: str, gradient: Tensor) -> Tensor:
        self.seen.append(name)
        return gradient + torch.randn_like(gradient)

    def on_register_post_accumulate_grad_hook(self, name: str, parameter: nn.Parameter) -> None:
        self.seen.append(name)
        assert parameter.grad is not None
        parameter.grad.add_(torch.randn_like(parameter.grad))

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - 1).square().mean()


@pytest.mark.parametrize("smallest", ["1B", "64B"], ids=["all offloaded", "biases on the device"])
@pytest.mark.parametrize("layer", LAYERS)
def test_hooks_of_gradients_run_in_plain_order(tmp_path: Path, layer: str, smallest: str) -> None:
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        make = partial(Noisy, LAYERS[layer], hook, "setup")
        compare(tmp_path, make, "host", strategy={"min_bytes": smallest}, precision="bf16-mixed")


def test_hooks_that_are_registered_after_the_forward_run_in_plain_order(tmp_path: Path) -> None:
    compare(
        tmp_path,
        partial(Noisy, LAYERS["linear"], "register_hook", "on_before_backward"),
        "host",
        precision="bf16-mixed",
    )
