"""Lifetimes of tensors that `ModelProfiler` measures in a training are those of the step traced without memory."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import ModelProfiler, SSDOffloadStrategy, cli, tensor_locations
from lightning_ssd.device.clock import HostClock
from lightning_ssd.model_states import find_units
from lightning_ssd.planning import HardwareProfile
from lightning_ssd.profiling.lifetimes import LifetimeRecorder
from lightning_ssd.profiling.tracing import fake_tensors, trace
from lightning_ssd.replay import PHASES, LifetimeProfile
from tests.support import forks
from tests.support.models import Model
from tests.support.parity import SharedStorages, TinyGPT
from tests.support.plans import MACHINE
from tests.support.trainings import script_environment, train

TOKENS = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
TEXTS = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
MODELS: list[tuple[Any, Tensor]] = [
    (Model, TOKENS),
    (lambda: TinyGPT("none"), TEXTS),
    (lambda: TinyGPT("non_reentrant"), TEXTS),
    (lambda: SharedStorages("none"), TEXTS),
]


SAME_OPERATORS = (0, 3)
"""Models without a mask, which transformers makes by other operators if tensors have no memory."""


class Losses(pl.Callback):
    """The loss of each step, and the dispatch modes and hooks at its begin."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.hooked: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        hooks = [one for module in pl_module.modules() for one in module._forward_pre_hooks]
        self.hooked.append(bool(hooks) or torch.utils._python_dispatch._get_current_dispatch_mode() is not None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def batches(batch: Tensor, count: int) -> Any:
    return DataLoader([batch] * count, batch_size=None)  # type: ignore[arg-type]


def measured(make: Any, batch: Tensor, path: Path, *, warm_up: int = 2) -> tuple[LifetimeProfile, Losses]:
    """Returns the lifetimes of a step of a training, with its losses."""
    losses = Losses()
    profiler = ModelProfiler(path / "profile.json", warm_up, 2, lifetimes=path / "lifetimes.json")
    torch.manual_seed(1)
    train(path, SSDOffloadStrategy(path, states="gpu", min_bytes=1), make(), batches(batch, 8),
          callbacks=[profiler, losses], max_epochs=1)  # fmt: skip
    return LifetimeProfile.from_json(path / "lifetimes.json"), losses


def traced(make: Any, batch: Tensor) -> LifetimeProfile:
    """Returns the lifetimes of the same step without memory."""
    recorder = LifetimeRecorder()
    machine = HardwareProfile.from_json(MACHINE)
    with fake_tensors() as mode:
        model = make()
        found = model.configure_optimizers()
        optimizer = found[0][0] if isinstance(found, tuple) else found
        units = [unit for unit in find_units(model, None) if unit.parameters]
        trace(units, model, lambda one: model.training_step(one, 0), batch, mode, machine, 1, recorder, [optimizer])
    return recorder.profile("traced", HostClock())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_a_measured_step_has_the_tensors_of_a_traced_one(number: int, tmp_path: Path) -> None:
    make, batch = MODELS[number]
    actual, _ = measured(make, batch, tmp_path)
    expected = traced(make, batch)
    assert actual.step_seconds > 0
    kinds: tuple[str, ...] = ("weight", "gradient", "optimizer state")
    if number in SAME_OPERATORS:
        kinds += ("saved tensor",)
        assert operators(actual) == operators(expected)
    for kind in kinds:
        found = [
            sorted((one.unit, one.name, one.nbytes) for one in profile.tensors if one.kind == kind and one.nbytes > 4)
            for profile in (actual, expected)
        ]
        assert found[0] == found[1] and found[0]
    phases = {actual.operators[use].phase for one in actual.tensors if one.kind == "weight" for use in one.uses}
    assert phases == set(PHASES)


@pytest.mark.parametrize("states", ["gpu", "host"])
def test_locations_have_the_names_of_a_profile(states: Any, tmp_path: Path) -> None:
    """Gradients, and the numbers of steps, are no offloaded tensors."""
    found: list[set[tuple[str, str]]] = []

    class Locations(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append({(row.kind, row.name) for row in tensor_locations(trainer)})

    train(tmp_path, SSDOffloadStrategy(tmp_path, states=states, min_bytes=1), Model(), batches(TOKENS, 1),
          callbacks=[Locations()], max_epochs=1)  # fmt: skip
    kinds = ("weight", "gradient", "optimizer state")
    names = {(one.kind, one.name) for one in traced(Model, TOKENS).tensors if one.kind in kinds}
    if states == "host":
        names = {(kind, name) for kind, name in names if kind != "gradient" and not name.endswith(".step")}
    assert found == [names]


def operators(profile: LifetimeProfile) -> list[tuple[str, str]]:
    """Returns phases and names of the operators that are the same in both steps.

    Lightning divides the loss by the number of micro-batches; gradients of views are copied if they have memory.
    """
    return [(one.phase, one.name) for one in profile.operators if one.name not in ("div", "new_zeros", "copy_")]


def test_the_training_does_not_change_and_no_hook_remains(tmp_path: Path) -> None:
    make, batch = MODELS[1]
    _, profiled = measured(make, batch, tmp_path)
    plain = Losses()
    torch.manual_seed(1)
    train(tmp_path, "auto", make(), batches(batch, 8), callbacks=[plain], max_epochs=1)
    assert profiled.losses == plain.losses
    assert not any(profiled.hooked[:1]) and not any(profiled.hooked[6:])


def test_constants_of_an_optimizer_are_no_saved_tensors(tmp_path: Path) -> None:
    class Foreach(Model):
        """Its optimizer adds a constant to the steps of all parameters, as it does on a GPU by default."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=True)

    profile, _ = measured(Foreach, TOKENS, tmp_path)
    saved = [one for one in profile.tensors if one.kind == "saved tensor"]
    assert saved and {profile.operators[one.uses[-1]].phase for one in saved} == {"backward"}


def test_the_first_step_can_be_measured(tmp_path: Path) -> None:
    """Optimizer states are allocated in it."""
    profile, _ = measured(*MODELS[0], tmp_path, warm_up=1)
    states = [one for one in profile.tensors if one.kind == "optimizer state"]
    assert states and all(one.is_global for one in states)


_DISTRIBUTED = """
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import fully_shard

from lightning_ssd import ActivationOffload, ModelProfiler
from tests.support.trainings import SmallModel, batches, make_trainer

root = Path({root!r})


class Sharded(SmallModel):
    def configure_model(self):
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def train(name, kind, strategy):
    profiler = ModelProfiler(root / f"{{name}}-profile.json", 1, 1, lifetimes=root / f"{{name}}.json")
    callbacks = [ActivationOffload(root), profiler]
    make_trainer(root, strategy, devices=2, max_epochs=2, callbacks=callbacks).fit(kind(), batches())


train("ddp", SmallModel, pl.strategies.DDPStrategy())
train("fsdp", Sharded, pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
"""


@pytest.mark.thorough
def test_collectives_of_two_processes_are_uses(tmp_path: Path) -> None:
    """Under FSDP2, weights, gradients and optimizer states have the bytes of their shard."""
    script = tmp_path / "script.py"
    script.write_text(_DISTRIBUTED.format(root=str(tmp_path)))
    done = forks.run([script], env=script_environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    replicated, sharded = (LifetimeProfile.from_json(tmp_path / f"{name}.json") for name in ("ddp", "fsdp"))

    def users(profile: LifetimeProfile, kind: str) -> list[set[str]]:
        return [{profile.operators[use].name for use in one.uses} for one in profile.tensors if one.kind == kind]

    def nbytes(profile: LifetimeProfile, kind: str) -> int:
        return sum(one.nbytes for one in profile.tensors if one.kind == kind and one.nbytes > 4)

    buffers = users(replicated, "communication buffer") + users(replicated, "gradient")
    assert any("c10d::allreduce_" in names for names in buffers)
    weights = users(sharded, "weight")
    assert weights and all("fsdp::all_gather_copy_in" in names for names in weights)
    gradients = users(sharded, "gradient")
    assert gradients and all("c10d::_reduce_scatter_base_" in names for names in gradients)
    assert any("c10d::_allgather_base_" in names for names in users(sharded, "communication buffer"))
    for kind in ("weight", "gradient", "optimizer state"):
        assert 2 * nbytes(sharded, kind) == pytest.approx(nbytes(replicated, kind), rel=0.01)


def test_the_command_reads_measured_lifetimes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(*MODELS[0], tmp_path)
    file = str(tmp_path / "lifetimes.json")
    assert cli.main(["profile", "--profile", file, "--machine", str(MACHINE), "--out", str(tmp_path / "out")]) == 0
    assert "active tensors" in capsys.readouterr().out and (tmp_path / "out/active.png").is_file()
    (tmp_path / "lifetimes.json").write_text('{"version": 0}')
    for arguments, message in ((["--profile", file], "has the version 0"), ([], "give a RECIPE, or")):
        with pytest.raises(SystemExit):
            cli.main(["profile", *arguments, "--machine", str(MACHINE)])
        assert message in capsys.readouterr().err


def test_the_command_says_that_pictures_need_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(*MODELS[0], tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what makes `import` fail
    arguments = ["--profile", str(tmp_path / "lifetimes.json"), "--machine", str(MACHINE)]
    assert cli.main(["profile", *arguments, "--out", str(tmp_path / "out")]) == 0
    assert "`pip install matplotlib`" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lifetimes.json"]


@pytest.mark.parametrize(
    "states, arguments, message",
    [("host", {}, "Set `states='gpu'`"), ("gpu", {"accumulate_grad_batches": 2}, "Set `accumulate_grad_batches=1`")],
)
def test_trainings_whose_lifetimes_are_not_measured(
    tmp_path: Path, states: Any, arguments: dict[str, Any], message: str
) -> None:
    profiler = ModelProfiler(tmp_path / "profile.json", lifetimes=tmp_path / "lifetimes.json")
    with pytest.raises(ValueError, match=message):
        train(tmp_path, SSDOffloadStrategy(tmp_path, states=states, min_bytes=1), Model(), batches(TOKENS, 2),
              callbacks=[profiler], max_epochs=1, **arguments)  # fmt: skip
