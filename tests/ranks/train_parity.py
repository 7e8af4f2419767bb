"""Trains small models on two ranks with offloaded states, and with torch's DDP, and compares all bits.

A script for `processes.launch`. Its arguments are names of `CASES`; without any, it runs all.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.autoplan import auto_plan
from lightning_ssd.model_states import LazyTensor, StatesConfig
from lightning_ssd.model_states.optimizers import StepInput
from lightning_ssd.model_states.placement import RankStates, rank_states
from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import peer_memory
from tests.ranks.hand_over import torn_hand_overs
from tests.support.measurements import measure_few_bytes
from tests.support.meter import Meter, use

WIDTH, STEPS = 32, 4
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
"""Processes of a host."""


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
        self.whole_at_commit: list[bool] = []
        """Whether all parameters had memory, each time that memory of ranks was committed."""
        self.on_host = 0
        """Gradients that the device of another rank, or of this one, has read from host memory."""
        self.on_device = 0
        """Steps that the device of this rank has made."""
        self.evictions = 0
        """Times that all states were evicted from the device."""

    def forward(self, x: Tensor, index: int) -> Tensor:
        for number in self.case.route(self.rank, index):
            x = self.blocks[number](x)
        return self.head(x)

    def loss(self, batch: Tensor, index: int) -> Tensor:
        self.threads = torch.get_num_threads()
        return (self(batch, index) - batch.roll(1)).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer([one for one in self.parameters() if one.requires_grad])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if self.case.room is not None and isinstance(self.trainer.strategy, SSDOffloadStrategy):
            self.trainer.strategy.model_states.device_states.use(self.case.room(index))

    def on_train_batch_end(self, outputs: object, batch: Tensor, index: int) -> None:
        self.after_step(self.trainer.optimizers[0])


class ReadsGradients(Net):
    """Reads gradients between backward and step, of which each rank sees the mean."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = self.read()

    def read(self) -> list[Tensor | None]:
        return [None if one.grad is None else one.grad.detach().clone() for one in self.parameters()]


class Watches(Net):
    """Registers a hook, which may read gradients, after two batches."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        super().on_train_batch_start(batch, index)
        if index == 2:
            self.head.weight.register_hook(lambda gradient: None)


class ReadsWeights(ReadsGradients):
    """Reads weights between backward and step: on rank 1 when rank 0 has made its steps, as far as it can."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.rank == 0:
            last = self.trainer.strategy.model_states.steps._worker.submit(lambda: None, priority=10**6)
            last.result()
            dist.send(torch.zeros(1), 1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.rank == 1:
            dist.recv(torch.zeros(1), 0)
        super().on_before_optimizer_step(optimizer)

    def read(self) -> list[Tensor | None]:
        return [one.detach().clone() for one in self.state_dict().values()]


class Looks(Net):
    """Rank 1 reads weights, optimizer states and a state dict after each step, and rank 0 does not."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.seen: list[Tensor | None] = []

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.rank == 1:
            moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
            values = [*self.state_dict().values(), *self.parameters(), *moments]
            self.seen += [value.detach().clone() for value in values]


class Writes(Net):
    """Writes weights after each step and in forward, which each rank runs in another order, and loads weights."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.averages: dict[str, Tensor] = {}

    def forward(self, x: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().forward(x, index)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        weights = dict(self.named_parameters())
        with torch.no_grad():
            for name in list(weights)[:: -1 if self.rank % 2 else 1]:
                weights[name].mul_(0.5)
                average = self.averages.setdefault(name, torch.zeros_like(weights[name]))
                average.lerp_(weights[name], 0.5)
            self.blocks[0].first.weight.copy_(self.averages["blocks.0.first.weight"])
        self.blocks[1].second.bias.data.zero_()
        self.blocks[2].load_state_dict({name: 2 * value for name, value in self.blocks[2].state_dict().items()})


class Validates(Net):
    """Sees losses of validation, in which callbacks may exchange the weights."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.seen: list[Tensor | None] = []

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.loss(batch, index))


class Normalizes(Net):
    """Has buffers, which each rank updates by its own batches and sends or receives before a forward."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, index: int) -> Tensor:
        return super().forward(self.norm(x) - self.norm.running_mean, index)


class Reloads(Looks):
    """All ranks load changed weights and optimizer states after a step."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"] * 0.5
        self.load_state_dict({name: value * 0.5 for name, value in self.state_dict().items()})
        optimizer.load_state_dict(state)
        super().after_step(optimizer)


class Overflows(Net):
    """The gradients of rank 1 in one batch are infinite."""

    def loss(self, batch: Tensor, index: int) -> Tensor:
        return super().loss(batch, index) * (1e8 if self.rank == 1 and index == 1 else 1.0)


FAILED = {place: threading.Event() for place in [(1, 1, "forward"), (1, 2, "backward"), (0, 3, "backward")]}
"""Rank, batch and place of each failure of `RunsOut`, which has happened if the event is set: it is not restored."""


class RunsOut(Net):
    """Runs out of memory on one rank at a time, which alone runs its micro-batch again."""

    def forward(self, x: Tensor, index: int) -> Tensor:
        self._fail(index, "forward")
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x.register_hook(lambda gradient: self._fail(index, "backward"))
        return self.head(x)

    def _fail(self, index: int, place: str) -> None:
        event = FAILED.get((self.rank, index, place))
        if self._trainer is not None and event is not None and not event.is_set():
            event.set()
            raise torch.OutOfMemoryError(f"Tried to allocate 20.00 GiB in {place}.")


class MayRunOut(Net):
    """Ten blocks, whose first micro-batches may run out of memory, and do not."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.blocks = nn.ModuleList(Block() for _ in range(10))


class OverflowsRead(Overflows, ReadsGradients):
    pass


class Meets(Net):
    """Each rank has blocks of its own, before whose input's gradient it waits for the other rank, in backward."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.own = nn.ModuleList(Block() for _ in range(3 * dist.get_world_size()))

    def forward(self, x: Tensor, index: int) -> Tensor:
        x = self.blocks[0](x)
        x.register_hook(_meet)
        for block in self.own[3 * self.rank : 3 * self.rank + 3]:
            x = block(x)
        return self.head(x)


def _meet(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


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


class Keeps(Net):
    """Zeroes no gradients, by hand, so that those of blocks that a rank does not use in a batch are from before."""

    def __init__(self, case: "Case") -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        self.manual_backward(self.loss(batch, index))
        self.optimizers().step()


def _all_blocks(rank: int, index: int) -> list[int]:
    return [0, 1, 2]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


class Coupled(torch.optim.Optimizer):
    """Steps all parameters by the norm of all gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        (group,) = self.param_groups
        norm = nn.utils.get_total_norm([one.grad for one in group["params"] if one.grad is not None])
        for parameter in group["params"]:
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(mean.lerp_(parameter.grad / norm, 0.1))
        return loss


@dataclass
class Case:
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    route: Callable[[int, int], list[int]] = _all_blocks
    module: type[Net] = Net
    scaled: bool = False
    tied: bool = False
    frozen: bool = False
    most_on_host: int | None = None
    """Most gradients that are copied to host memory: few, if all ranks compute them in the same order."""
    callback: Callable[[], pl.Callback] | None = None
    room: Callable[[int], int] | None = None
    """Returns the bytes of the device that optimizer states may use in a batch; None: none."""
    spare: bool = False
    """Whether the device has memory to spare, as `offload="auto"` finds."""
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


CASES = {
    "adamw": Case(most_on_host=0),
    "fused": Case(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)),
    "sgd with momentum": Case(sgd),
    "clipped by norm": Case(trainer={"gradient_clip_val": 0.05}, most_on_host=0),
    "speculation": Case(module=Writes, strategy={"clip": "speculative"}, trainer={"gradient_clip_val": 0.9}),
    "clipped by value": Case(trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "accumulated": Case(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "ragged accumulation": Case(sgd, trainer={"accumulate_grad_batches": 3}),
    "branches": Case(route=lambda rank, index: [0, 1 + (rank + index) % 2], trainer={"gradient_clip_val": 0.05}),
    "other order": Case(route=lambda rank, index: [0, 1, 2] if rank else [2, 1, 0]),
    "reversed order": Case(route=lambda rank, index: [2, 1, 0]),
    "branches with a collective in backward": Case(module=Meets),
    "unused on all ranks": Case(sgd, route=lambda rank, index: [0, 1]),
    "tied and frozen": Case(tied=True, frozen=True),
    "gradients are read": Case(module=ReadsGradients, trainer={"gradient_clip_val": 0.05}),
    "branches, gradients are read": Case(
        sgd, route=lambda rank, index: [0, 1 + (rank + index) % 2], module=ReadsGradients
    ),
    "gradients may be read later": Case(module=Watches, trainer={"gradient_clip_val": 0.05}),
    "weights are read before the step": Case(route=lambda rank, index: [0, 1], module=ReadsWeights),
    "values are read": Case(module=Looks),
    "buffers": Case(module=Normalizes, trainer={"accumulate_grad_batches": 2}),
    "adafactor": Case(adafactor, trainer={"gradient_clip_val": 0.05}),
    "16-mixed adafactor": Case(adafactor, module=Overflows, scaled=True),
    "optimizer couples parameters": Case(
        Coupled, lambda rank, index: [0, 1 + (rank + index) % 2], trainer={"accumulate_grad_batches": 3}
    ),
    "stochastic weight averaging": Case(
        sgd, callback=lambda: pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
    ),
    "moving average of weights": Case(
        module=Validates, callback=lambda: pl.callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=2)
    ),
    "weights are written": Case(module=Writes, frozen=True),
    "16-mixed, weights are written": Case(sgd, module=Writes, scaled=True),
    "out of memory": Case(module=RunsOut, trainer={"gradient_clip_val": 0.05}),
    "out of memory, maybe": Case(route=lambda rank, index: [*range(10)], module=MayRunOut, most_on_host=4 * 3),
    "16-mixed": Case(module=Overflows, scaled=True, trainer={"gradient_clip_val": 0.05}),
    "16-mixed, speculation": Case(module=Overflows, scaled=True, strategy={"clip": "speculative"}),
    "16-mixed, gradients are read": Case(module=OverflowsRead, scaled=True),
    "manual": Case(module=Manual),
    "manual, gradients are kept": Case(sgd, route=lambda rank, index: [0, 1 + (rank + index) % 2], module=Keeps),
    "steps after backward": Case(strategy={"overlap": "none"}),
    "values are loaded": Case(module=Reloads),
    "SSD": Case(strategy={"states": "ssd"}, most_on_host=0),
    "SSD, clipped by norm": Case(strategy={"states": "ssd"}, trainer={"gradient_clip_val": 0.05}),
    "SSD, branches": Case(strategy={"states": "ssd"}, route=lambda rank, index: [0, 1 + (rank + index) % 2]),
    "SSD, values are read": Case(strategy={"states": "ssd"}, module=Looks),
    "SSD, values are loaded": Case(strategy={"states": "ssd", "path": ["a", "b"]}, module=Reloads),
    "SSD, steps are recorded": Case(strategy={"states": "ssd", "recover": True}, module=Looks),
    "SSD, values are written": Case(strategy={"states": "ssd"}, module=Writes),
    "SSD, gradients are read": Case(strategy={"states": "ssd"}, module=ReadsGradients),
    "SSD, 16-mixed": Case(strategy={"states": "ssd"}, module=Overflows, scaled=True),
    "serial steps": Case(strategy={"overlap": "naive"}),
}

CASES["memory to spare"] = Case(
    module=Validates, callback=pl.Callback, spare=True, strategy={"states": "auto"}, trainer={"gradient_clip_val": 0.05}
)

ON_DEVICES = ("adamw", "fused", "clipped by norm", "clipped by value", "branches", "tied and frozen", "values are read",
        "values are loaded", "weights are written", "moving average of weights",
        "gradients may be read later")  # fmt: skip
"""Cases that are trained again with optimizer states on the devices of their owners."""

CASES |= {f"{name}, on devices": replace(CASES[name], room=lambda index: 10**9) for name in ON_DEVICES}
CASES |= {
    f"{name}, on devices at times": replace(CASES[name], room=lambda index: index % 3 * 10**5) for name in ON_DEVICES
}


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(STEPS)]


def make_scaler(case: Case) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=case.scaled)


def train_offloaded(case: Case) -> tuple[Net, dict[str, Any]]:
    for path in case.strategy.get("path", ()):
        Path(path).mkdir(exist_ok=True)
    return train_by(SSDOffloadStrategy(**{"states": "host", "min_bytes": 1024} | case.strategy), case)


def train_by(strategy: pl.strategies.Strategy, case: Case) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(dist.get_rank())  # the values of rank 0 count
    module = case.module(case)
    scaled = {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", make_scaler(case))} if case.scaled else {}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=DEVICES, num_nodes=dist.get_world_size() // DEVICES,
        use_distributed_sampler=False,
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[] if case.callback is None else [case.callback()], num_sanity_val_steps=0, **case.trainer, **scaled,
    )  # fmt: skip
    loader = DataLoader(batches(dist.get_rank()), batch_size=None)
    commit = RankStates.commit

    def observed(states: RankStates) -> None:
        module.whole_at_commit.append(all(one.untyped_storage().nbytes() for one in module.parameters()))
        commit(states)

    release = RankStates.release

    def counted(states: RankStates, flat: FlatParameter) -> None:
        module.on_host += 1
        release(states, flat)

    step = DeviceStates.step

    def observed_step(states: DeviceStates, flat: FlatParameter, given: StepInput) -> bool:
        made = step(states, flat, given)
        module.on_device += made
        return made

    use_device = DeviceStates.use

    def observed_use(states: DeviceStates, nbytes: int) -> None:
        module.evictions += not nbytes and any(map(states.steps, states._optimizers))
        use_device(states, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStates, "step", observed_step)
        patch.setattr(DeviceStates, "use", observed_use)
        patch.setattr(RankStates, "commit", observed)
        patch.setattr(RankStates, "release", counted)
        patch.setattr(rank_states, "LEAST_PEER_BYTES", 0)  # room for two gradients: ranks wait for each other's
        if case.module is Meets:
            patch.setattr(peer_memory, "PATIENCE_SECONDS", 0.0)
        if case.module in (RunsOut, MayRunOut) or case.spare:
            use(Meter(1e9, 10**6), patch)
        if case.spare:
            patch.setattr(auto_plan, "PROVEN", 1)
            patch.setattr(StatesConfig, "resident_budget", lambda *_, **how: 0.0)
        trainer.fit(module, loader, loader if case.module is Validates else None)
    (optimizer,) = trainer.optimizers
    return module, optimizer.state_dict()


def train_plain(case: Case) -> tuple[Net, dict[str, Any]]:
    if case.callback is not None:
        return train_by(pl.strategies.DDPStrategy(), case)
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
            if isinstance(module, ReadsGradients):
                module.seen = module.read()
            scaler.step(optimizer, *[_no_closure] * (case.optimizer is Coupled))
            scaler.update()
            module.after_step(optimizer)
            if case.module is not Keeps:
                optimizer.zero_grad()
    return module, optimizer.state_dict()


def _no_closure() -> None:
    """The closure of a step whose backward has ended."""


class _Loss(nn.Module):
    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Tensor, index: int) -> Tensor:
        return self.module.loss(batch, index)


def torn() -> Iterator[str]:
    if count := torn_hand_overs():
        yield f"{count} torn values"


def same(one: Tensor, other: Tensor) -> bool:
    """Whether values are those of DDP, which adds those of more than two ranks in another order."""
    return torch.equal(one, other) if dist.get_world_size() == 2 else torch.allclose(one, other, 1e-4, 1e-5)


def in_shared_memory(values: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= values.data_ptr() < end:
            return "memfd:lightning_ssd" in line
    return False


def differences(case: Case) -> Iterator[str]:
    (ours, our_state), (plain, plain_state) = train_offloaded(case), train_plain(case)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if not same(one, other):
            yield f"weight {name}: {(one - other).abs().max()}"
        dist.broadcast(first := one.detach().clone(), 0)
        if not torch.equal(one, first):
            yield f"weight {name} is not that of rank 0"
    for (name, one), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        if not same(one, other):
            yield f"buffer {name}"
    if ours.threads != plain.threads:
        yield f"operators on {ours.threads} threads in place of {plain.threads}"
    most = case.most_on_host if os.environ.get("NCCL_P2P_DISABLE") != "1" else None
    if most is not None and ours.on_host > most:
        yield f"{ours.on_host} gradients were copied to host memory"
    chosen = case.room is not None or case.spare
    if bool(ours.on_device) != (chosen and case.trainer.get("gradient_clip_algorithm") != "value"):
        yield f"{ours.on_device} steps were made on the device"
    if case.spare and ours.evictions != 3:  # before both validations, and at the end
        yield f"states were evicted from the device {ours.evictions} times"
    if any(ours.whole_at_commit):
        yield "a model has had its memory while that of its states was committed"
    offloaded = [one for one in ours.parameters() if one.nbytes >= 1024]
    if "states" not in case.strategy and not all(map(in_shared_memory, offloaded)):
        yield "each rank has a copy of the weights"
    shared = any(isinstance(value, LazyTensor) for state in our_state["state"].values() for value in state.values())
    if shared == (case.optimizer in (adafactor, Coupled)):  # which each rank steps whole, with states of its own
        yield "optimizer states are shared" if shared else "each rank has copies of the optimizer states"
    if our_state["state"].keys() != plain_state["state"].keys():
        yield f"states of {our_state['state'].keys()} instead of {plain_state['state'].keys()}"
    for key, state in plain_state["state"].items():
        for name, value in state.items():
            found = our_state["state"].get(key, {}).get(name)
            if (found is None) != (value is None) or (found is not None and not same(found, value)):
                yield f"state {name} of parameter {key}"
    if case.module is RunsOut and not all(event.is_set() for (rank, *_), event in FAILED.items() if rank == ours.rank):
        yield "memory has sufficed"
    if issubclass(case.module, (ReadsGradients, Looks, Validates)) and not case.trainer:
        for number, (one, other) in enumerate(zip(ours.seen, plain.seen, strict=True)):
            if (one is None) != (other is None) or (one is not None and not same(one, other)):
                yield f"value {number} that was read"


if __name__ == "__main__":
    measure_few_bytes()
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        found = list(torn() if name == "hand-overs" else differences(CASES[name]))
        print(f"{name}: {'; '.join(found) or 'equal'}", flush=True)
