"""Trains a model on several devices, which sum gradients there or in host memory, and compares all bits.

A script for `processes.launch`, with the accelerator as its argument.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import build
from lightning_ssd.model_states.optimizers import StepInput
from lightning_ssd.model_states.placement import RankStates, rank_states
from lightning_ssd.model_states.steps import DeviceStates
from lightning_ssd.model_states.units import FlatParameter
from tests.support.delays import DELAYS, SlowCopies

WIDTH = 256
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Net(pl.LightningModule):
    """Each rank leaves out another layer in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(WIDTH, 4000, bias=False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embedding(batch)
        for number, layer in enumerate(self.layers):
            if (number + index + self.global_rank) % 4:
                x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class NetOnDevices(Net):
    """Optimizer states move to the devices of their owners, and back in one batch."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.trainer.strategy.model_states.device_states.use(0 if index == 8 else 10**9)


def train(clip: float | None, make: type[Net] = Net) -> list[Tensor]:
    torch.manual_seed(0)
    module = make()
    how: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"],
        False,
    )
    trainer = pl.Trainer(
        strategy=SSDOffloadStrategy(states="host", min_bytes=1024), accelerator=sys.argv[1], devices=DEVICES,
        precision="bf16-true", max_epochs=1, gradient_clip_val=clip, **how,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(trainer.global_rank)
    batches = [torch.randint(4000, (2, 64), generator=generator) for _ in range(12)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return [one.detach().clone() for one in module.parameters()]


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """Delays copies, and leaves room for two gradients alone on each device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_states, "LEAST_PEER_BYTES", 0)
        if sys.argv[1] == "gpu":
            patch.setattr(build, "make_copy_engine", SlowCopies)
        yield


def differences() -> Iterator[str]:
    on_devices: list[bool] = []
    commit = RankStates.commit

    def observed(states: RankStates) -> None:
        on_devices.append(states.peers is not None)
        commit(states)

    RankStates.commit = observed  # type: ignore[method-assign]
    expected = train(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_P2P_DISABLE", "1")
        if not all(map(torch.equal, train(None), expected)):
            yield "sums in host memory differ"
    expected = train(0.1)
    for seed in range(3):
        DELAYS.seed(seed + 10 * dist.get_rank())
        with little_room():
            if not all(map(torch.equal, train(0.1), expected)):
                yield "sums differ with the timing"
    steps: list[bool] = []
    step = DeviceStates.step

    def observed_step(states: DeviceStates, flat: FlatParameter, given: StepInput) -> bool:
        steps.append(step(states, flat, given))
        return steps[-1]

    DeviceStates.step = observed_step  # type: ignore[method-assign]
    if not all(map(torch.equal, train(0.1, NetOnDevices), expected)):
        yield "steps on devices differ"
    if not any(steps):
        yield "no step was made on a device"
    if on_devices != [True, False, True, True, True, True, True]:
        yield f"sums were made on devices in {on_devices}"


if __name__ == "__main__":
    print("; ".join(differences()) or "equal", flush=True)
