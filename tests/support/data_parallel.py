"""Trainings of two processes on the CPU, each with Lightning's `ddp` and with this package; a program for both ranks.

`python -m tests.support.data_parallel ROOT` launches the second process, as users' scripts do. Each process writes a
file for each case: `NAME.RANK`, with an error's text if the case has failed. Devices, hosts and names of cases may
follow ROOT, for other launchers.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from lightning_ssd import SSDOffloadStrategy
from tests.support.compare import assert_same
from tests.support.measurements import measure_few_bytes
from tests.support.models import Block, BlocksModel
from tests.support.plans import BOTH, draw, pinned, planner
from tests.support.plans import Watch as PlanWatch
from tests.support.trainings import (
    ROWS,
    WIDTH,
    Look,
    SmallModel,
    batches,
    make_trainer,
    offloading,
    rows,
    scratch_directories,
    small_arguments,
)

Outcome = list[Any]
Case = Callable[[Path, Any], Outcome]
"""Trains in a directory with a strategy, and returns what must be equal for both strategies."""

WORLD = {"devices": 2, "num_nodes": 1}
"""The Trainer's arguments for two processes."""

CASES: dict[str, tuple[Case, dict[str, Any]]] = {}
"""The cases, and their arguments of `DDPStrategy`."""


STATES = {"states": "auto"}
"""The strategy's argument of the running case."""


def ours(**arguments: Any) -> SSDOffloadStrategy:
    return offloading(**STATES | arguments)


def case(**ddp: Any) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[function.__name__] = function, ddp
        return function

    return add


class Validated(SmallModel):
    """Logs synchronized values, which are the same in both processes, and values of each process."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("own_val_loss", self.loss(batch), sync_dist=False)


class Branching(SmallModel):
    """Each process uses one of two blocks, in turns, and batch norms have statistics of their own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.net[0].bias.requires_grad_(False)
        self.batch_idx = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    def forward(self, batch: Tensor) -> Tensor:
        return self.batch_norm(self.branches[(self.global_rank + self.batch_idx) % 2](self.net(batch)))


class Manual(SmallModel):
    """Two optimizers in manual optimization, of which one steps every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), 0.1, momentum=0.9) for index in (0, 2)]


def model(kind: type[SmallModel]) -> Any:
    """Returns a model with other weights in each process: those of rank 0 are trained."""
    torch.manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
    return kind()


def trainer(root: Path, strategy: Any, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    return make_trainer(root, strategy, **WORLD | {"max_epochs": 2, "callbacks": list(callbacks)} | arguments)


def shuffled(count: int) -> DataLoader:
    return DataLoader(batches(count).dataset, batch_size=ROWS, shuffle=True)


def metrics(trained: pl.Trainer) -> dict[str, float]:
    return {name: value.item() for name, value in trained.callback_metrics.items()}


@case()
def metrics_stop_and_select(root: Path, strategy: Any) -> Outcome:
    """Ragged accumulation; decisions by a validation metric; shuffled data; checkpoints, written once and loaded."""
    best = ModelCheckpoint(root, "{epoch}-{val_loss:.5f}", monitor="val_loss", save_top_k=2)
    early = EarlyStopping("val_loss", min_delta=0.05, patience=1)
    arguments = {"max_epochs": 6, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    trained = trainer(root, strategy, best, early, **arguments)
    module = model(Validated)
    trained.fit(module, shuffled(5), batches(3))
    files = sorted(path.name for path in root.glob("*.ckpt"))
    assert len(files) == 2 and early.stopped_epoch
    resumed = model(Validated)
    again = trainer(root, type(trained.strategy)() if strategy == "ddp" else ours(), max_epochs=6)
    again.fit(resumed, shuffled(5), batches(3), ckpt_path=best.best_model_path)
    weights = torch.load(best.best_model_path, weights_only=False)
    saved = [weights["state_dict"], weights["optimizer_states"][0]["state"]]
    return [module, metrics(trained), files, best.best_model_score, early.stopped_epoch, resumed, saved]


@case()
def clipping_by_norm(root: Path, strategy: Any) -> Outcome:
    module = model(SmallModel)
    trainer(root, strategy, gradient_clip_val=0.1).fit(module, batches())
    return [module]


@case()
def clipping_by_value_twice(root: Path, strategy: Any) -> Outcome:
    module = model(SmallModel)
    trained = trainer(root, strategy, gradient_clip_val=0.001, gradient_clip_algorithm="value")
    trained.fit(module, batches())
    trained.fit_loop.max_epochs = 3
    trained.fit(module, batches())
    assert len(module.losses) == 9
    return [module]


@case(find_unused_parameters=True)
def branches_and_buffers(root: Path, strategy: Any) -> Outcome:
    module = model(Branching)
    trainer(root, strategy).fit(module, batches())
    return [module]


@case()
def manual_optimization(root: Path, strategy: Any) -> Outcome:
    module = model(Manual)
    trainer(root, strategy).fit(module, batches())
    return [module]


@case()
def synchronized_batch_norm(root: Path, strategy: Any) -> Outcome:
    """Lightning replaces batch norms by synchronized ones, with which torch's DDP refuses a CPU, and restores them."""
    module, error = model(Branching), None
    try:
        trainer(root, strategy, sync_batchnorm=True).fit(module, batches())
    except ValueError as raised:
        error = str(raised)
    assert error is not None and "SyncBatchNorm" in error and not isinstance(module.batch_norm, nn.SyncBatchNorm)
    return [type(module.batch_norm).__name__]


@case()
def bf16_mixed(root: Path, strategy: Any) -> Outcome:
    module = model(SmallModel)
    trainer(root, strategy, precision="bf16-mixed").fit(module, batches())
    return [module]


@case()
def ways_to_run(root: Path, strategy: Any) -> Outcome:
    """A user's sampler, no distributed sampler, overfitting and a development run, in one module."""
    module = model(SmallModel)
    sampled = DataLoader(batches(4).dataset, batch_size=ROWS, sampler=SequentialSampler(range(2 * ROWS)))
    for arguments in (
        {"use_distributed_sampler": False},
        {"overfit_batches": 2},
        {"fast_dev_run": 2},
    ):
        made = strategy if strategy == "ddp" else ours()
        trainer(root, made, **arguments).fit(module, sampled)
    return [module]


@case()
def evaluation(root: Path, strategy: Any) -> Outcome:
    """Without a training, and ranks, devices and collectives."""
    module, evaluated = model(Validated), trainer(root, strategy)
    seen: Outcome = [evaluated.validate(module, batches(3), verbose=False)]
    seen += [torch.cat(evaluated.predict(module, batches(3))), module]
    rank, strategy = evaluated.global_rank, evaluated.strategy
    seen += [evaluated.world_size, rank, evaluated.local_rank, evaluated.node_rank, evaluated.device_ids]
    seen += [evaluated.num_devices, evaluated.distributed_sampler_kwargs, evaluated.is_global_zero]
    seen += [strategy.broadcast({"rank": rank}), strategy.reduce(torch.tensor(rank), reduce_op="sum")]
    seen += [strategy.reduce_boolean_decision(rank == 0, all=all_) for all_ in (True, False)]
    return [*seen, strategy.all_gather(torch.tensor([rank, 5]))]


def planned(root: Path) -> None:
    """Each process profiles and plans; then each follows another plan, with the same numbers.

    Model states are on the devices first, and then in host memory.
    """

    def train(strategy: Any, *callbacks: pl.Callback) -> Any:
        torch.manual_seed(0)
        module = BlocksModel(depth=4)
        module.blocks.append(nn.BatchNorm1d(8))
        trainer(root, strategy, *callbacks, max_epochs=4).fit(module, rows(6))
        return module

    plain = train("ddp")
    for states in ("gpu", "host"):
        arguments, first = BOTH | {"states": states}, planner(save=root / f"{states}.yaml")
        assert_same(train(SSDOffloadStrategy(**arguments), first), plain)
        assert first.cycle is not None and first.cycle.plan is not None and (root / f"{states}.yaml").exists()
        profile = first.cycle.runner.profile
        for seed in (0, 2):
            watch = PlanWatch()
            drawn = draw(first.cycle.plan, profile, seed + torch.distributed.get_rank(), recompute=0.7)
            assert_same(train(SSDOffloadStrategy(**arguments), pinned(drawn), watch), plain)
            assert watch.stats.recomputed


def too_large(root: Path) -> None:
    """States that have no room on one of the devices are offloaded by both processes, if host memory has room."""

    def train(strategy: Any, *callbacks: pl.Callback) -> Any:
        module = model(SmallModel)
        trainer(root, strategy, *callbacks).fit(module, batches())
        return module

    by_rank, look = ["24KiB", "1GiB"], LookAtStates()
    strategy = ours(states="auto", gpu_memory=by_rank[int(os.environ.get("LOCAL_RANK", 0))])
    assert_same(train(strategy, look), train("ddp"))
    assert look.host > 0 and look.ssd == 0


class LookAtStates(pl.Callback):
    """Sees the bytes of offloaded model states."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states: Any = trainer.strategy.model_states  # type: ignore[attr-defined]
        self.host, self.ssd = states.nbytes.host, states.nbytes.ssd


def refusals(root: Path) -> None:
    """What several hosts refuse of states that are offloaded, before anything is trained."""
    for arguments in ({"states": "ssd"}, {"recover": True}, {"overlap": "naive", "states": "host"}):
        refused = trainer(root, SSDOffloadStrategy(**small_arguments() | arguments))
        try:
            refused.fit(model(SmallModel), batches())
        except ValueError as error:
            assert f"`{next(iter(arguments))}=" in str(error) and "`states='gpu'`" in str(error), error
        else:
            raise AssertionError(f"{arguments} was not refused")


def offloaded(root: Path) -> None:
    """Both processes offload, to directories of their own, and leave none."""
    look = Look(root)
    trained = trainer(root, offloading(), look)
    trained.fit(model(SmallModel), batches())
    directories = sorted(path.rsplit("-", 1)[1] for path in look.directories)
    assert look.moved > 0 and directories == ["rank0", "rank1"], directories
    trained.strategy.barrier()
    assert scratch_directories(root) == []


def compare(name: str, root: Path) -> None:
    """Runs a case with Lightning's strategy and with ours, in directories that both processes share.

    Ours offloads activations, and then model states to host memory, too.
    """
    run, ddp = CASES[name]
    plain: Any = pl.strategies.DDPStrategy(**ddp) if ddp else "ddp"
    expected = run(root / name / "ddp", plain)
    for states in ("auto", "host"):
        STATES["states"] = states
        assert_same(run(root / name / states, ours(ddp=ddp)), expected)


class Failing(SmallModel):
    """Rank 1 raises an error in its fourth batch; rank 0 waits for it in backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and len(self.losses) == 3:
            raise KeyError("deliberate")
        return super().training_step(batch, batch_idx)


def failing(root: Path) -> None:
    """Ends the program with the errors of both processes."""
    trainer(root, offloading(), max_epochs=100).fit(model(Failing), batches())


OTHERS = {"planned": planned, "too_large": too_large, "offloaded": offloaded}
"""Further cases, which make their own comparisons."""

ON_HOSTS = {"refusals": refusals}
"""Such cases of several hosts."""


def main(root: Path, devices: str = "2", num_nodes: str = "1", *names: str) -> None:
    torch.set_num_threads(1)
    WORLD.update(devices=int(devices), num_nodes=int(num_nodes))
    if names == ("failing",):
        failing(root)
    for name in names or (*CASES, *OTHERS):
        failed = ""
        try:
            others = OTHERS | ON_HOSTS
            others[name](root / name) if name in others else compare(name, root)
        except Exception:
            failed = traceback.format_exc()
        (root / f"{name}.{torch.distributed.get_rank()}").write_text(failed)
        if failed:
            print(failed, file=sys.stderr, flush=True)


if __name__ == "__main__":
    measure_few_bytes()
    main(Path(sys.argv[1]), *sys.argv[2:])
