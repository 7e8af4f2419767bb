"""Trainings whose numbers are compared: one with offload and one without. For CPU and GPU tests."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.trainings import make_trainer

Checkpointing = Literal["none", "non_reentrant", "reentrant"]
Model = Callable[[Checkpointing], pl.LightningModule]

BATCHES = 13
"""Batches an epoch: `accumulate=3` leaves a ragged window of one at its end."""


class _Trained(pl.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TinyGPT(_Trained):
    """transformers' GPT-2 with fused attention, a fused GELU, tied weights and dropout."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=97,
            n_positions=32,
            n_embd=32,
            n_layer=3,
            n_head=2,
            activation_function="gelu_pytorch_tanh",
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)
        if checkpointing != "none":
            self.model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch.abs() * 1000).long() % 97
        return self.model(input_ids=tokens, labels=tokens).loss


class SharedStorages(_Trained):
    """Hard cases of saved tensors: views, chunks of one storage, in-place operations, broadcasts, masks."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(_Block(32) for _ in range(3))
        self.head = nn.Linear(32, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.head(batch[..., None].expand(-1, -1, 32))  # zero strides
        for block in self.blocks:
            if self.checkpointing == "none":
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointing == "reentrant")
        # The head's weight again, transposed.
        logits = hidden @ self.head.weight
        return logits.float().square().mean() + logits[:, ::3].sigmoid().float().mean()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(width))
        self.register_buffer("bias", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # one storage, three saved tensors
        scores = (q @ k.transpose(-2, -1)).mul_(0.2)
        scores = scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -30.0)
        attended = nn.functional.dropout(scores.softmax(-1), 0.1, self.training) @ v
        x = x + attended * self.gate.expand_as(attended) + self.bias
        hidden = self.up(x).relu_()
        left, right = hidden.view(*hidden.shape[:-1], 2, -1).unbind(-2)
        mixed = torch.cat((left * right, left.transpose(0, 1).contiguous().transpose(0, 1).tanh()), dim=-1)
        mixed = mixed.clone()
        mixed[..., ::2].mul_(0.5)
        return x.add(self.down(nn.functional.dropout(mixed, 0.1, self.training)).clamp_(-5, 5))


@dataclass
class Run:
    """Results of a training.

    Attributes:
        losses: of every micro-batch.
        gradients: of every step, by parameter, as the optimizer found them.
        weights: of every parameter and buffer at the end.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Recorder(pl.Callback):
    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._run.losses.append(outputs["loss"].detach().cpu().clone())


class _GradientRecorder(_Recorder):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._run.gradients.append(
            {
                name: parameter.grad.detach().cpu().clone()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }
        )


def train(
    strategy: Any,
    *,
    device: str = "cpu",
    precision: Any = "32-true",
    accumulate: int = 1,
    checkpointing: Checkpointing = "none",
    steps: int = 20,
    callbacks: Sequence[pl.Callback] = (),
    model: Model = TinyGPT,
    clip: float | None = None,
    recorded: bool = True,
) -> Run:
    """Trains with Lightning's Trainer, the same way at every call.

    Args:
        strategy: what the Trainer gets: a name or an instance.
        device: `"cpu"` or `"cuda"`.
        precision: the Trainer's.
        accumulate: micro-batches a step; the last window of an epoch is as long as `BATCHES` leaves it.
        checkpointing: activation checkpointing of each block.
        steps: optimizer steps.
        callbacks: more callbacks.
        model: makes the model.
        clip: largest norm of the gradients.
        recorded: whether gradients are.

    Returns:
        All numbers, on the CPU.

    Raises:
        AssertionError: the training left files behind, or stopped early.
    """
    torch.manual_seed(1)
    module = model(checkpointing)
    data = torch.randn(2 * BATCHES, 24, generator=torch.Generator().manual_seed(2))
    run = Run()
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(
            Path(root),
            strategy,
            accelerator="gpu" if device == "cuda" else device,
            precision=precision,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            max_epochs=None,
            max_steps=steps,
            callbacks=[*callbacks, _GradientRecorder(run) if recorded else _Recorder(run)],
        )
        trainer.fit(module, DataLoader(data, batch_size=2))
        assert trainer.global_step == steps
        assert len(run.gradients) == (steps if recorded else 0)
        assert list(Path(root).iterdir()) == []
    assert run.losses and all(loss.isfinite() for loss in run.losses)
    run.weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    return run


def exact(model: Any) -> Any:
    """The model with SGD by a power of two, whose steps are the same on every machine, bit for bit."""

    class Exact(model):  # type: ignore[misc]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=2**-5)

    return Exact
