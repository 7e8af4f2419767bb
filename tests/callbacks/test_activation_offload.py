"""`ActivationOffload`: activation offload under strategies that are not ours."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import ActivationOffload, MicroBatchSwitch, OffloadMonitor, PrefetchScheduler
from lightning_ssd.callbacks.find import find_offloader
from tests.support import forks
from tests.support.compare import assert_same
from tests.support.trainings import (  # noqa: F401
    SmallModel,
    Watch,
    batches,
    make_trainer,
    nothing_left,
    package_threads,
    scratch_directories,
    script_environment,
    small_arguments,
    small_model,
)


def _offload(**arguments: Any) -> ActivationOffload:
    return ActivationOffload(**(small_arguments() | arguments))


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_on_one_device_the_numbers_are_those_without_it(tmp_path: Path, tier: str) -> None:
    arguments: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    plain, offloaded, watch = small_model(), small_model(), Watch()
    make_trainer(tmp_path, **arguments).fit(plain, batches(), batches(1))
    trainer = make_trainer(tmp_path, callbacks=[_offload(tier=tier), watch], **arguments)
    trainer.fit(offloaded, batches(), batches(1))
    assert_same(plain, offloaded)
    assert set(watch.bytes_out) == {tier}
    assert watch.moved > 0


class _SeesCallbacks(SmallModel):
    """Records in each micro-batch how many of some callbacks there are, and whether saved tensors are offloaded."""

    KINDS = (MicroBatchSwitch, PrefetchScheduler, OffloadMonitor, ActivationOffload)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[int]] = []
        self.offloaded: list[bool] = []
        self.batch_size, self.lr = 2, 0.1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.seen.append([sum(type(callback) is kind for callback in callbacks) for kind in self.KINDS])
        offloader = find_offloader(self.trainer)
        self.offloaded.append(offloader is not None and "training_step" in vars(self.trainer.strategy))
        return super().training_step(batch, batch_idx)


def test_it_brings_the_callbacks_that_it_needs_once(tmp_path: Path) -> None:
    mine = OffloadMonitor(progress_bar=False)
    trainer = make_trainer(tmp_path, callbacks=[mine, _offload()])
    given = list(trainer.callbacks)
    model = small_model(kind=_SeesCallbacks)
    trainer.fit(model, batches())
    assert trainer.callbacks == given
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches())
    assert model.seen and all(counts == [1, 1, 1, 1] for counts in model.seen)
    assert trainer.callbacks == given


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("search", ["batch size", "learning rate"])
@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_lightnings_tuner_searches_with_offloaded_activations(search: str, how: str, tmp_path: Path) -> None:
    """The Tuner removes all callbacks while it searches: it would find a batch that fits without offload."""
    sizes: dict[str, Any] = {"steps_per_trial": 1, "max_trials": 2}
    finder = BatchSizeFinder(**sizes) if search == "batch size" else LearningRateFinder(num_training_steps=3)
    trainer = make_trainer(tmp_path, callbacks=[*([finder] if how == "callback" else []), _offload()])
    given = list(trainer.callbacks)
    model = small_model(kind=_Loads)
    if how == "callback":
        trainer.fit(model)
    elif search == "batch size":
        Tuner(trainer).scale_batch_size(model, **sizes)
    else:
        Tuner(trainer).lr_find(model, num_training=3)
    assert model.offloaded and all(model.offloaded)
    assert trainer.callbacks == given
    assert not vars(trainer.strategy).keys() & {"training_step", "on_train_start"}
    assert scratch_directories(tmp_path) == [] and package_threads() == []


class _Loads(_SeesCallbacks):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.cat(list(batches())), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return batches(1)


def test_a_refit_and_an_evaluation_work_with_the_same_callback(tmp_path: Path) -> None:
    models = []
    for callbacks in ([], [_offload()]):
        model = small_model()
        for _ in range(2):
            trainer = make_trainer(tmp_path, callbacks=callbacks)
            trainer.fit(model, batches())
            trainer.validate(model, batches(1), verbose=False)
        models.append(model)
    assert_same(*models)


class _Failing(SmallModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise KeyError("deliberate")
        return loss


class _FailingAtTrainStart(SmallModel):
    def on_train_start(self) -> None:
        raise KeyError("deliberate")


@pytest.mark.parametrize("kind", [_Failing, _FailingAtTrainStart])
def test_after_an_exception_nothing_is_left_and_it_trains_again(tmp_path: Path, kind: type[SmallModel]) -> None:
    callback = _offload()
    trainer = make_trainer(tmp_path, callbacks=[callback])
    with pytest.raises(KeyError, match="deliberate"):
        trainer.fit(small_model(kind=kind), batches())
    assert "training_step" not in vars(trainer.strategy)
    assert callback.offloader is None
    assert scratch_directories(tmp_path) == []
    assert package_threads() == []
    model, plain = small_model(), small_model()
    make_trainer(tmp_path, callbacks=[callback]).fit(model, batches())
    make_trainer(tmp_path).fit(plain, batches())
    assert_same(plain, model)


_DISTRIBUTED = """
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import fully_shard

from lightning_ssd import ActivationOffload, tensor_locations
from tests.support.trainings import SmallModel, Watch, batches, make_trainer, scratch_directories, small_arguments

root = Path({root!r})
rank = int(os.environ.get("LOCAL_RANK", 0))
directories = []


class Sharded(SmallModel):
    def configure_model(self):
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def strategies():
    yield "ddp", SmallModel, pl.strategies.DDPStrategy
    yield "fsdp", Sharded, lambda: pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


class Look(Watch):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        trainer.strategy.barrier()
        directories.append(sorted(path.rsplit("-", 1)[1] for path in scratch_directories(root)))
        trainer.strategy.barrier()


def weights(model):
    return [getattr(parameter, "to_local", lambda: parameter)().detach().clone() for parameter in model.parameters()]


class Weights(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        pl_module.final = weights(trainer.strategy.model)
        rows = {{row.name: row for row in tensor_locations(trainer)}}
        for (name, _), shard in zip(pl_module.named_parameters(), pl_module.final, strict=True):
            for found in (rows[name], rows[name + ".exp_avg"]):
                assert (found.tier, found.nbytes) == ("gpu", shard.nbytes), found


def train(kind, strategy, *callbacks):
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(
        root, strategy, devices=2, max_epochs=2, accumulate_grad_batches=2, callbacks=[Weights(), *callbacks]
    )
    trainer.fit(model, batches())
    return model


for name, kind, make in strategies():
    plain, watch = train(kind, make()), Look()
    offloaded = train(kind, make(), ActivationOffload(**{arguments!r}), watch)
    assert len(plain.losses) == 6 and plain.losses == offloaded.losses, name
    assert plain.final and all(map(torch.equal, plain.final, offloaded.final)), name
    assert watch.moved > 0, name
    assert directories.pop() == ["rank0", "rank1"], name
    (root / f"{{name}}-rank{{rank}}").touch()
"""


@pytest.mark.thorough
def test_two_processes_train_on_one_path_under_ddp_and_fsdp(tmp_path: Path) -> None:
    """Losses and weights are those of the same strategy without it; each rank has its directory, and leaves none.

    FSDP is PyTorch's `fully_shard`: the older class refuses to run without a GPU.
    """
    script = tmp_path / "script.py"
    script.write_text(_DISTRIBUTED.format(root=str(tmp_path), arguments=small_arguments()))
    done = forks.run([script], env=script_environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    passed = {path.name for path in tmp_path.glob("*-rank*")}
    assert passed == {f"{name}-rank{rank}" for name in ("ddp", "fsdp") for rank in (0, 1)}
