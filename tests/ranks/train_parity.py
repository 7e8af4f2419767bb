"""Trains small models on two ranks with offloaded states, and with torch's DDP, and compares all bits.

A script for `processes.launch`. Its arguments are names of `CASES`; without any, it runs all.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from tests.ranks.hand_over import torn_hand_overs

WIDTH, STEPS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Net(pl.LightningModule):
    """Three blocks, of which `route` may choose other ones on each rank and in each batch."""

    def __init__(self, case: "Case") -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        if case.tied:
            self.blocks[2].first.weight = self.blocks[0].first.weight
        if case.frozen:
            self.blocks[1].first.requires_grad_(False)
        self.rank = dist.get_rank()

    def forward(self, x: Tensor, index: int) -> Tensor:
        for number in self.case.route(self.rank, index):
            x = self.blocks[number](x)
        return self.head(x)

    def loss(self, batch: Tensor, index: int) -> Tensor:
        return (self(batch, index) - batch.roll(1)).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer([one for one in self.parameters() if one.requires_grad])


class ReadsGradients(Net):
    """Reads gradients between backward and step, of which each rank sees the mean."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = [None if one.grad is None else one.grad.detach().clone() for one in self.parameters()]


class Looks(Net):
    """Rank 1 reads weights, optimizer states and a state dict after each step, and rank 0 does not."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.seen: list[Tensor | None] = []

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        if self.rank == 1:
            moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
            values = [*self.state_dict().values(), *self.parameters(), *moments]
            self.seen += [value.detach().clone() for value in values]

    def on_train_batch_end(self, outputs: object, batch: Tensor, index: int) -> None:
        self.look(self.trainer.optimizers[0])


class Reloads(Looks):
    """All ranks load changed weights and optimizer states after a step."""

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"] * 0.5
        self.load_state_dict({name: value * 0.5 for name, value in self.state_dict().items()})
        optimizer.load_state_dict(state)
        super().look(optimizer)


class Overflows(Net):
    """The gradients of rank 1 in one batch are infinite."""

    def loss(self, batch: Tensor, index: int) -> Tensor:
        return super().loss(batch, index) * (1e8 if self.rank == 1 and index == 1 else 1.0)


class OverflowsRead(Overflows, ReadsGradients):
    pass


class Manual(Net):
    """Steps after two backwards, by hand."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, index))
        self.manual_backward(self.loss(batch * 0.5, index))
        optimizer.step()


def _all_blocks(rank: int, index: int) -> list[int]:
    return [0, 1, 2]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@dataclass
class Case:
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    route: Callable[[int, int], list[int]] = _all_blocks
    module: type[Net] = Net
    scaled: bool = False
    tied: bool = False
    frozen: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adamw": Case(),
    "fused": Case(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)),
    "sgd with momentum": Case(sgd),
    "clipped by norm": Case(trainer={"gradient_clip_val": 0.05}),
    "clipped by value": Case(trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "accumulated": Case(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "ragged accumulation": Case(sgd, trainer={"accumulate_grad_batches": 3}),
    "branches": Case(route=lambda rank, index: [0, 1 + (rank + index) % 2], trainer={"gradient_clip_val": 0.05}),
    "other order": Case(route=lambda rank, index: [0, 1, 2] if rank else [2, 1, 0]),
    "unused on all ranks": Case(sgd, route=lambda rank, index: [0, 1]),
    "tied and frozen": Case(tied=True, frozen=True),
    "gradients are read": Case(module=ReadsGradients, trainer={"gradient_clip_val": 0.05}),
    "branches, gradients are read": Case(
        sgd, route=lambda rank, index: [0, 1 + (rank + index) % 2], module=ReadsGradients
    ),
    "values are read": Case(module=Looks),
    "16-mixed": Case(module=Overflows, scaled=True, trainer={"gradient_clip_val": 0.05}),
    "16-mixed, gradients are read": Case(module=OverflowsRead, scaled=True),
    "manual": Case(module=Manual),
    "steps after backward": Case(strategy={"overlap": "none"}),
    "values are loaded": Case(module=Reloads),
    "SSD": Case(strategy={"states": "ssd"}),
    "SSD, clipped by norm": Case(strategy={"states": "ssd"}, trainer={"gradient_clip_val": 0.05}),
    "SSD, branches": Case(strategy={"states": "ssd"}, route=lambda rank, index: [0, 1 + (rank + index) % 2]),
    "SSD, values are read": Case(strategy={"states": "ssd"}, module=Looks),
    "SSD, values are loaded": Case(strategy={"states": "ssd", "path": ["a", "b"]}, module=Reloads),
    "SSD, steps are recorded": Case(strategy={"states": "ssd", "recover": True}, module=Looks),
    "SSD, gradients are read": Case(strategy={"states": "ssd"}, module=ReadsGradients),
    "SSD, 16-mixed": Case(strategy={"states": "ssd"}, module=Overflows, scaled=True),
}


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(STEPS)]


def make_scaler(case: Case) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=case.scaled)


def train_offloaded(case: Case) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(dist.get_rank())  # the values of rank 0 count
    for path in case.strategy.get("path", ()):
        Path(path).mkdir(exist_ok=True)
    module = case.module(case)
    strategy = SSDOffloadStrategy(**{"states": "host", "min_bytes": 1024} | case.strategy)
    scaled = {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", make_scaler(case))} if case.scaled else {}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), use_distributed_sampler=False,
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **case.trainer, **scaled,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches(dist.get_rank()), batch_size=None))
    (optimizer,) = trainer.optimizers
    return module, optimizer.state_dict()


def train_plain(case: Case) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(dist.get_rank())
    module = case.module(case)
    wrapped = nn.parallel.DistributedDataParallel(_Loss(module), find_unused_parameters=True)
    optimizer = case.optimizer([one for one in module.parameters() if one.requires_grad])
    window, scaler = case.trainer.get("accumulate_grad_batches", 1), make_scaler(case)
    for _ in range(2):
        own = batches(dist.get_rank())
        for index, batch in enumerate(own):
            steps = (index + 1) % window == 0 or index + 1 == len(own)
            with contextlib.nullcontext() if steps else wrapped.no_sync():
                with torch.autocast("cpu", torch.float16, enabled=case.scaled):
                    loss = wrapped(batch, index)
                scaler.scale(loss / window).backward()
                if case.module is Manual:
                    wrapped(batch * 0.5, index).backward()
            if not steps:
                continue
            scaler.unscale_(optimizer)
            if limit := case.trainer.get("gradient_clip_val"):
                by_value = case.trainer.get("gradient_clip_algorithm") == "value"
                clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
                clip(module.parameters(), limit)
            if not isinstance(module, Looks):
                module.seen = [None if one.grad is None else one.grad.clone() for one in module.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if isinstance(module, Looks):
                module.look(optimizer)
            optimizer.zero_grad()
    return module, optimizer.state_dict()


class _Loss(nn.Module):
    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Tensor, index: int) -> Tensor:
        return self.module.loss(batch, index)


def differences(case: Case) -> Iterator[str]:
    (ours, our_state), (plain, plain_state) = train_offloaded(case), train_plain(case)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(one, other):
            yield f"weight {name}: {(one - other).abs().max()}"
    if our_state["state"].keys() != plain_state["state"].keys():
        yield f"states of {our_state['state'].keys()} instead of {plain_state['state'].keys()}"
    for key, state in plain_state["state"].items():
        for name, value in state.items():
            found = our_state["state"].get(key, {}).get(name)
            if (found is None) != (value is None) or (found is not None and not torch.equal(found, value)):
                yield f"state {name} of parameter {key}"
    if issubclass(case.module, (ReadsGradients, Looks)) and not case.trainer:
        for number, (one, other) in enumerate(zip(ours.seen, plain.seen, strict=True)):
            if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                yield f"value {number} that was read"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"hand-overs: {torn_hand_overs() or 'equal'}", flush=True)
    for name in sys.argv[1:] or CASES:
        found = list(differences(CASES[name]))
        print(f"{name}: {'; '.join(found) or 'equal'}", flush=True)
