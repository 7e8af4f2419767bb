"""Toy models: residual blocks of any width, and the parts of a LightningModule that they share."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[Any], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


class Block(nn.Module):
    """A residual block: a norm, if wanted, and two matrices with a GELU between them.

    Args:
        width: features of input and output.
        hidden: features between the two matrices.
        norm: whether inputs are normalized.
    """

    def __init__(self, width: int = 16, hidden: int = 64, *, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ToyModel(pl.LightningModule):
    """Trains by `loss`, which subclasses define, and appends its value in every micro-batch to `losses`.

    Args:
        make_optimizer: called with the parameters that require gradients.
        seed: of the weights that subclasses initialize.
    """

    def __init__(self, make_optimizer: MakeOptimizer = adamw, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.make_optimizer = make_optimizer
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the loss of a micro-batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch[0] if isinstance(batch, list) else batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class BlocksModel(ToyModel):
    """Residual blocks of width 8 on rows; the loss is the mean squared distance of the outputs from one.

    Args:
        make_optimizer: called with the parameters that require gradients.
        depth: blocks.
        norm: whether blocks normalize their inputs.
    """

    def __init__(self, make_optimizer: MakeOptimizer = adamw, *, depth: int = 3, norm: bool = True) -> None:
        super().__init__(make_optimizer)
        self.blocks = nn.ModuleList(Block(8, 8, norm=norm) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - 1).square().mean()


class Model(ToyModel):
    """Four blocks between an embedding of 32 tokens and a head that is tied to it; losses of validation, too.

    Args:
        make_optimizer: called with the parameters.
        groups: whether biases and norms are in a group of their own, without weight decay.
    """

    def __init__(self, make_optimizer: MakeOptimizer = adamw, groups: bool = False) -> None:
        super().__init__(make_optimizer)
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.groups = groups
        self.rates: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0]).item())

    def configure_optimizers(self) -> Any:
        parameters: Any = list(self.parameters())
        if self.groups:
            decayed = [parameter for parameter in parameters if parameter.dim() > 1]
            rest = [parameter for parameter in parameters if parameter.dim() <= 1]
            parameters = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
        optimizer = self.make_optimizer(parameters)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ManualSteps(pl.LightningModule):
    """Base class before another module, whose `training_step` returns the loss: the optimizer is stepped by hand."""

    automatic_optimization = False

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss
