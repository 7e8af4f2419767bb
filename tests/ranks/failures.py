"""Trainings of two ranks that end with an error. A script for `processes.launch`, whose argument names the failure."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states.placement import rank_states
from lightning_ssd.model_states.steps.peer_sums import PeerSums
from tests.support.measurements import measure_few_bytes

WIDTH = 32

ACCELERATOR = os.environ.get("RANKS_ACCELERATOR", "cpu")
DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
"""Processes of a host."""


class Net(pl.LightningModule):
    """Calls `act` in one place: "forward", "backward", or after a "step"."""

    order = slice(None)

    def __init__(self, act: Callable[["Net", int], None] | None = None, where: str = "forward") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act, self.where, self.batch = act, where, 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.batch = index
        x = batch
        for number, layer in enumerate(self.layers[self.order]):
            x = layer(x)
            if number == 1 and self.where == "backward":
                x.register_hook(lambda gradient: self._act("backward"))
        self._act("forward")
        return x.square().mean()

    def on_train_batch_end(self, outputs: object, batch: Tensor, index: int) -> None:
        self._act("step")

    def _act(self, where: str) -> None:
        if self.act is not None and self.where == where:
            self.act(self, self.batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Net, batches: int = 4, clip: float | None = None, precision: Any = "32-true", **strategy: Any) -> None:
    trainer = pl.Trainer(
        strategy=SSDOffloadStrategy(**{"states": "host", "min_bytes": 1024} | strategy), accelerator=ACCELERATOR,
        devices=DEVICES, num_nodes=dist.get_world_size() // DEVICES,
        gradient_clip_val=clip, precision=precision, use_distributed_sampler=False, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([torch.ones(4, WIDTH) for _ in range(batches)], batch_size=None))


def die(module: Net, index: int, rank: int = 1) -> None:
    if dist.get_rank() == rank and index == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def fail_and_stay(**strategy: Any) -> None:
    """Rank 1 fails, and its process does not end before rank 0's, with which the store ends."""
    try:
        fit(Net(fail), **strategy)
    except ValueError:
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(minutes=5))


def fail(module: Net, index: int) -> None:
    if dist.get_rank() == 1 and index == 2:
        raise ValueError("a bad batch")


def leave(module: Net, index: int) -> None:
    if dist.get_rank() == 1 and index == 2:
        sys.exit("enough")


def write_other_values(module: Net, index: int) -> None:
    module.layers[0].weight.data.fill_(dist.get_rank())


def write_on_one_rank(module: Net, index: int) -> None:
    if dist.get_rank() == 1:
        module.layers[0].weight.data.zero_()


def lose_a_step(module: Net, index: int) -> None:
    """Rank 1 does not learn what the owners of flat parameters have written to SSDs."""

    def fail(hashes: object) -> None:
        raise ValueError("a lost message")

    if dist.get_rank() == 1 and index == 2:
        for store in module.trainer.strategy.model_states.steps._stores.values():
            store.adopt_hashes = fail


class Reversed(Net):
    """Uses its layers in another order than that of the model, in which owners sum gradients over hosts."""

    order = slice(None, None, -1)


class Wider(Net):
    """Rank 1 has other shapes."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            self.layers[1] = nn.Linear(WIDTH, WIDTH, bias=False)


class OtherRate(Net):
    """Rank 1 has another learning rate."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2 * (1 + dist.get_rank()))


class WaitsAtTheEndOfAnEpoch(Net):
    """As ranks do in a validation, and to save a checkpoint."""

    def on_train_epoch_end(self) -> None:
        self.trainer.strategy.barrier()


class FailsInSetup(Net):
    def setup(self, stage: str) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no data")


class OtherClipping(Net):
    def setup(self, stage: str) -> None:
        self.trainer.gradient_clip_val = 0.1 * (1 + dist.get_rank())


class LaterRate(Net):
    """Rank 1 changes its learning rate in training."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 1 and dist.get_rank() == 1:
            self.optimizers().param_groups[0]["lr"] = 0.5


class LaterRateOfReadGradients(LaterRate):
    """Rank 1 changes its learning rate where user code may read gradients."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class DropsGradients(Net):
    """Rank 1 drops the gradients of a layer before the step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.batch == 2 and dist.get_rank() == 1:
            self.layers[0].weight.grad = None


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError("an option")


class UnshowableOption(Net):
    """The only gradient of rank 1 can't be passed to its owner, rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 1 and dist.get_rank() == 1:
            self.optimizers().param_groups[0]["other"] = Unshowable()


class NewGroup(Net):
    """Adds a parameter group, as BackboneFinetuning does."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.layers[2].parameters())})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers[:2].parameters(), lr=1e-2)


class OwnBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        super().training_step(batch, index).backward()
        self.optimizers().step()


class FullDevices(Net):
    """Devices have room for the gradients of two layers, which rank 1 owns; that of the third one, rank 0."""

    def __init__(self, act: Callable[["Net", int], None] | None = None, where: str = "forward") -> None:
        super().__init__(act, where)
        rank_states.LEAST_PEER_BYTES = 0
        sizes = (WIDTH, 40, 30, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in itertools.pairwise(sizes))


def stop(module: Net, index: int) -> None:
    if dist.get_rank() == 1 and index == 2:
        module.trainer.should_stop = True


def fail_on_device() -> None:
    """The device of rank 1 can't sum a gradient, whose clipped step waits until rank 1 has computed all of them."""
    write, calls = PeerSums.write, itertools.count()

    def written(sums: PeerSums, *args: Any) -> list[float]:
        if dist.get_rank() == 1 and next(calls) >= 2:
            raise ValueError("a lost device")
        return write(sums, *args)

    PeerSums.write = written  # type: ignore[method-assign]
    fit(FullDevices(), clip=0.1)


class OnDevices(Net):
    """Optimizer states are on the devices of their owners, from the first step on."""

    def on_train_start(self) -> None:
        for _ in self.layers:
            self.trainer.strategy.model_states.device_states.use(10**9)


def values_after(act: Callable[[Net, int], None], precision: str, *, states: bool) -> None:
    """Raises an error whose text says whether a module has the values of two steps after its third batch has failed.

    `states`: whether optimizer states are compared, too. They are not available where the third step has begun.
    """
    found = []
    for module, batches in [(OnDevices(), 2), (OnDevices(act), 4)]:
        torch.manual_seed(0)
        for layer in module.layers:
            layer.reset_parameters()
        try:
            fit(module, batches, precision=precision)
        except Exception as error:
            print(f"failed: {error}", flush=True)
        (optimizer,) = module.trainer.optimizers
        kept = [value for state in optimizer.state.values() for value in state.values()] if states else []
        found.append([*module.parameters(), *kept])
    expected, ours = found
    same = len(ours) == len(expected) and all(map(torch.equal, ours, expected))
    raise ValueError(f"the values are those of two steps: {same}")


CAUGHT: dict[str, tuple[Callable[[], None], str]] = {
    "other model": (lambda: fit(Wider()), r"rank 0 and rank 1 train differently: 'layers.1.bias"),
    "other learning rate": (
        lambda: fit(OtherRate()),
        "'lr of parameter group 0 of optimizer 0: 0.01' on",
    ),
    "other clipping": (lambda: fit(OtherClipping()), "'gradient_clip_val: 0.1' on rank 0, 'gradient_clip_val: 0.2' on"),
    "values that another rank has written": (
        lambda: fit(Net(lose_a_step), states="ssd"),
        "a lost message",
    ),
    "backward of a tensor": (lambda: fit(OwnBackward()), "Call `self.manual_backward"),
    "new parameter group": (lambda: fit(NewGroup()), "parameter groups of an optimizer were changed during training"),
}
"""Trainings whose error all ranks raise, and its text."""

ENDS = {
    "kill": (lambda: fit(Net(die, "backward")), 0, "RankError: rank 1 has died"),
    "raise": (lambda: fit(Net(fail)), 0, "RankError: rank 1 has failed: ValueError: a bad batch"),
    "exit": (lambda: fit(Net(leave)), 0, "RankError: rank 1 has failed: SystemExit"),
    "other options": (
        lambda: fit(LaterRate()),
        0,
        "RankError: (rank 1 has failed: )?ranks . and . step layers.. with diff",
    ),
    "other options of read gradients": (
        lambda: fit(LaterRateOfReadGradients()),
        0,
        "RankError: (rank 1 has failed: )?ranks . and . step layers.. with diff",
    ),
    "dropped gradients": (
        lambda: fit(DropsGradients()),
        0,
        "RankError: (rank 1 has failed: )?ranks . and . step layers.0 with diff",
    ),
    "setup": (lambda: fit(FailsInSetup()), 0, "rank 1 has failed: ValueError: no data"),
    "no gradients": (lambda: fit(UnshowableOption()), 0, "RankError: rank 1 has failed: ValueError: an option"),
    "fewer batches": (
        lambda: fit(Net(), 4 - dist.get_rank()),
        0,
        "RankError: (rank 1 has failed: )?rank 1 is at the end of an epoch, and rank 0 is not: it had fewer",
    ),
    "fewer batches, and a barrier": (
        lambda: fit(WaitsAtTheEndOfAnEpoch(), 4 - dist.get_rank()),
        0,
        "RankError: rank 1 is at the end of an epoch, and rank 0 is not: it had fewer batches",
    ),
    "other weights": (
        lambda: fit(Net(write_other_values)),
        0,
        "RankError: (rank 1 has failed: )?user code writes weights of layers.0",
    ),
    "weights of one rank": (
        lambda: fit(Net(write_on_one_rank, "step")),
        0,
        "RankError: (rank 1 has failed: )?user code writes weights of layers.0",
    ),
    "stops earlier": (
        lambda: fit(FullDevices(stop, "step")),
        0,
        "RankError: rank 1 has ended its training, and rank 0 goes on",
    ),
    "lost device": (fail_on_device, 0, "RankError: rank 1 has failed: ValueError: a lost device"),
    "raise, with states on devices": (
        lambda: values_after(fail, "bf16-mixed", states=False),
        0,
        "the values are those of two steps: True",
    ),
    "raise, with states on devices, on the rank that fails": (
        lambda: values_after(fail, "bf16-mixed", states=True),
        1,
        "the values are those of two steps: True",
    ),
    "kill, with states on devices": (
        lambda: values_after(die, "32-true", states=False),
        0,
        "the values are those of two steps: True",
    ),
    "kill, in DDP": (lambda: fit(Net(die, "backward"), states="gpu"), 0, "lightning_ssd: rank 1 has died"),
    "kill of rank 0, in DDP": (
        lambda: fit(Net(partial(die, rank=0)), states="gpu"),
        1,
        "lightning_ssd: rank 0 has died",
    ),
    "raise, in DDP": (lambda: fit(Net(fail, "backward"), states="gpu"), 0, "lightning_ssd: rank 1 has failed: Value"),
    "raise and stay, in DDP": (
        lambda: fail_and_stay(states="gpu"),
        0,
        "(lightning_ssd|RankError): rank 1 has failed: ValueError: a bad batch",
    ),
}
"""Trainings that end at another place on each rank, as their collectives would not match; and the error of a rank."""

ENDS_ON_HOSTS = {
    "kill": lambda: fit(Net(die, "backward")),
    "raise between sums": lambda: fit(Reversed(fail, "backward")),
    "raise and stay": fail_and_stay,
}
"""Trainings of two hosts, the second of which ends."""

if __name__ == "__main__":
    measure_few_bytes()
    dist.init_process_group("gloo")
    if sys.argv[1:]:
        (ENDS[sys.argv[1]][0] if DEVICES > 1 else ENDS_ON_HOSTS[sys.argv[1]])()
    for name, (run, _) in {} if sys.argv[1:] else CAUGHT.items():
        try:
            run()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: no error", flush=True)
