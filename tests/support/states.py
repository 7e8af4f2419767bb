"""Trainings of a small model whose states are offloaded, and of the same model under plain Lightning."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy

STEPS = 12


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(pl.LightningModule):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, make_optimizer: MakeOptimizer = adamw, groups: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.make_optimizer = make_optimizer
        self.groups = groups
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

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


def loader(batches: int = STEPS, seed: int = 1) -> Any:
    tokens = torch.randint(32, (batches * 4, 9), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)


def host(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(states="host", min_bytes=1, **arguments)


def train(path: Path, strategy: Any, model: pl.LightningModule, **arguments: Any) -> pl.LightningModule:
    """Trains a copy of `model`, validated after every epoch."""
    model = copy.deepcopy(model)
    ckpt_path = arguments.pop("ckpt_path", None)
    defaults = dict(
        num_sanity_val_steps=0, max_epochs=2, enable_progress_bar=False, enable_model_summary=False, logger=False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=path,
        **{"enable_checkpointing": False} | defaults | arguments,
    )
    trainer.fit(model, loader(), loader(2, seed=2), ckpt_path=ckpt_path)
    return model


def assert_same(actual: Any, expected: Any) -> None:
    assert actual.losses == expected.losses and len(actual.losses) > 0
    weights = dict(expected.state_dict())
    assert list(weights) == list(actual.state_dict())
    for name, value in actual.state_dict().items():
        assert torch.equal(value, weights[name]), name


def ssd(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(**{"states": "ssd", "min_bytes": 1, "offload": "none"} | arguments)


def some_stay() -> SSDOffloadStrategy:
    """Returns a strategy that keeps a part of `Model`'s units on the device, and the others in host memory."""
    return ssd(states="auto", gpu_memory="90kB", tier="host")


def assert_nothing_is_left(path: Path) -> None:
    assert not list(path.glob("lightning_ssd-*"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]


def tree_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return type(a) is type(b) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(tree_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(tree_equal(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


class Large(pl.LightningModule):
    """16 blocks of 4 MiB, so 192 MiB with AdamW's states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        self.extra = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[0].float().repeat(1, 114)[:, :1024]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            assert self.trainer.strategy.model_states is not None  # type: ignore[attr-defined]
            self.trainer.strategy.model_states.drain()  # type: ignore[attr-defined]
            before = most = memory()
            ended = threading.Event()

            def watch() -> None:
                nonlocal most
                while not ended.wait(0.001):
                    most = max(most, memory())

            watcher = threading.Thread(target=watch)
            watcher.start()
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "large.ckpt")
            ended.set()
            watcher.join()
            self.extra = most - before


def memory() -> int:
    """Bytes of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
