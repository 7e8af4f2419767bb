"""Model states that move between device, host memory and SSDs during a training do not change the numbers."""

import copy
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_ssd import OffloadMonitor, SSDOffloadStrategy
from lightning_ssd.device import clock
from lightning_ssd.model_states import StatesConfig, build, find_units
from lightning_ssd.model_states.gradients.grad_scale import GradScaleDecision
from lightning_ssd.model_states.placement.unit_mover import UnitMover
from lightning_ssd.model_states.units import units
from lightning_ssd.model_states.units.units import PART_ELEMENTS
from lightning_ssd.planning import HardwareProfile, Plan, UnitPlan
from lightning_ssd.run import RunStates
from lightning_ssd.storage import StorageError
from lightning_ssd.waits import wait_for
from tests.support.compare import assert_same
from tests.support.faults import FaultyBackend
from tests.support.late_device import LateEngines
from tests.support.models import Model
from tests.support.moves import GPU, HOST, SSD, TIERS, Mover, move
from tests.support.plans import MACHINE, planner
from tests.support.products import combinations, thorough
from tests.support.states import STEPS, train


def ssd(path: Any, **arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(path, **{"states": "ssd", "min_bytes": 1, "host_memory": "64MiB"} | arguments)


@combinations(
    "precision_clip, accumulate",
    [("32-true", None), ("32-true", 0.5), ("bf16-mixed", None), ("bf16-true", None)],
    [1, 3],
    quick=[(("32-true", 0.5), 3), (("bf16-mixed", None), 1)],
)
def test_results_do_not_change(tmp_path: Path, accumulate: int, precision_clip: tuple[Any, float | None]) -> None:
    precision, clip = precision_clip
    how: Any = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    model = Model()
    # Only in bf16-true, fp32 master weights are stepped.
    plain = train(tmp_path, "auto" if precision != "bf16-true" else ssd(tmp_path), model, **how)
    mover = Mover(accumulate)
    assert_same(train(tmp_path, ssd(tmp_path, clip="deferred"), model, callbacks=[mover], **how), plain)
    assert mover.moves >= 3


def test_a_scale_that_is_known_while_a_step_begins_is_not_taken_for_the_speculated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread completes it. Values on SSDs that were moved there have one version: no step is made again."""
    read = GradScaleDecision.speculate

    class StepsLater(Model):
        """Steps begin when the scale is decided, as user code surrounds the optimizer's step."""

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class MovesAll(Mover):
        def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
            trainer.strategy.states_owner.make_states_movable()

    def reads(decision: GradScaleDecision, *, revertible: bool) -> float | None:
        speculated = read(decision, revertible=revertible)
        if decision.decided:
            wait_for(decision.scale, "the scale")
        return speculated

    monkeypatch.setattr(GradScaleDecision, "speculate", reads)
    monkeypatch.setattr(build, "make_copy_engine", LateEngines)
    model = StepsLater(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    how: Any = {"gradient_clip_val": 0.5, "max_epochs": 1, "batches": 4}
    plain = train(tmp_path, "auto", model, **how)
    mover = MovesAll(tiers=[SSD])
    strategy = ssd(tmp_path, states="auto", offload="none", clip="speculative")
    assert_same(train(tmp_path, strategy, model, callbacks=[mover], **how), plain)
    assert mover.moves


@pytest.mark.parametrize(
    ("make_optimizer", "groups"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True), True),
        thorough(lambda p: torch.optim.SGD(p, lr=1e-1, fused=True, momentum=0.9, nesterov=True), False),
        thorough(lambda p: torch.optim.RMSprop(p, lr=1e-3), True),
    ],
    ids=["amsgrad", "sgd", "rmsprop"],
)
def test_optimizer_states_are_moved_too(tmp_path: Path, make_optimizer: Any, groups: bool) -> None:
    model = Model(make_optimizer, groups)
    moved = train(tmp_path, ssd(tmp_path), model, callbacks=[Mover(1)])
    assert_same(moved, train(tmp_path, "auto", model))


class ChangesDirectory(Mover):
    """Changes the working directory before the first move.

    Args:
        folder: the new directory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os.chdir(self.folder)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("paths", ["one", "several", "none"])
def test_relative_paths_do_not_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str
) -> None:
    """Those of the strategy, and the Trainer's `default_root_dir` where the strategy has none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("drive", "other", "elsewhere"):
        Path(folder).mkdir()
    path: Any = {"one": "drive", "several": ["drive", Path("other")], "none": None}[paths]
    model, mover = Model(), ChangesDirectory(tmp_path / "elsewhere")
    moved = train(Path("drive" if path is None else "root"), ssd(path), model, callbacks=[mover])
    assert mover.moves >= 2 and not list(Path.cwd().iterdir()) and Path.cwd().name == "elsewhere"
    assert_same(moved, train(tmp_path, "auto", model))


@pytest.mark.parametrize("state_format", ["split", "bf16", "8bit"])
def test_formats_and_versions_are_moved_too(tmp_path: Path, state_format: Any) -> None:
    how: Any = {"precision": "bf16-true", "gradient_clip_val": 0.5}
    how_states: Any = {"state_format": state_format, "clip": "speculative"}
    plain = train(tmp_path, ssd(tmp_path, **how_states), Model(), **how)
    mover = Mover(2, TIERS[1:])
    assert_same(train(tmp_path, ssd(tmp_path, **how_states), Model(), callbacks=[mover], **how), plain)


def test_loss_scaling_beside_moves(tmp_path: Path) -> None:
    """Steps that the scaler may skip have two versions, of which a move frees some: weights alone may have both."""

    def run(**arguments: Any) -> Any:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        return train(tmp_path, ssd(tmp_path), Model(), plugins=[plugin], **arguments)

    assert_same(run(callbacks=[Mover(0)]), run())


def test_checkpoints_of_states_that_moved(tmp_path: Path) -> None:
    """Checkpoints are saved after moves, and resumed by plain Lightning and with other moves."""
    saves = pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True, every_n_epochs=1)
    how: Any = {"callbacks": [Mover(3), saves], "max_epochs": 1, "enable_checkpointing": True}
    train(tmp_path, ssd(tmp_path), Model(), **how)
    rest: Any = {"ckpt_path": tmp_path / "saved/last.ckpt"}
    plain = train(tmp_path, "auto", Model(), **rest)
    assert_same(train(tmp_path, ssd(tmp_path), Model(), callbacks=[Mover(4)], **rest), plain)
    whole = train(tmp_path, "auto", Model())
    assert plain.losses == whole.losses[-len(plain.losses) :]  # type: ignore[operator, index, arg-type]


def test_what_is_read_amid_moves_is_plain_lightnings(tmp_path: Path) -> None:
    """Weights after each step, and optimizer states in checkpoints, while units move between all tiers."""

    class Reads(pl.Callback):
        def __init__(self) -> None:
            self.read: list[Any] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step % 3 == 0:
                path = tmp_path / "read.ckpt"
                trainer.save_checkpoint(path)
                saved = torch.load(path, weights_only=False)
                states = saved["optimizer_states"][0]["state"]
                self.read.append((saved["state_dict"], dict(sorted(states.items()))))
            self.read.append(copy.deepcopy(pl_module.state_dict()))

    how: Any = {"gradient_clip_val": 0.5, "max_epochs": 1}
    plain, ours, mover = Reads(), Reads(), Mover(1)
    expected = train(tmp_path, "auto", Model(), callbacks=[plain], **how)
    assert_same(train(tmp_path, ssd(tmp_path), Model(), callbacks=[ours, mover], **how), expected)
    assert_same(ours.read, plain.read)
    assert mover.moves > 2


def test_hooks_that_read_other_gradients_still_do_after_a_move(tmp_path: Path) -> None:
    """They were added when training had begun, so that later steps wait for the end of backward."""

    class Reads(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            weights = [block.up.weight for block in pl_module.blocks]
            found = pl_module.found = []

            def read(_: Any) -> None:
                found.append([None if weight.grad is None else weight.grad.sum().item() for weight in weights])

            weights[0].register_post_accumulate_grad_hook(read)  # the last one in backward

    runs = []
    for strategy, callbacks in (("auto", []), (ssd(tmp_path), [Mover(6)])):
        runs.append(train(tmp_path, strategy, Model(), callbacks=[Reads(), *callbacks]))
    assert_same(runs[1], runs[0])
    assert runs[1].found == runs[0].found and len(runs[0].found[0]) > 1


def test_no_files_or_threads_are_left(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    model = train(tmp_path, ssd(scratch), Model(), callbacks=[Mover(5)])
    assert not list(scratch.iterdir())
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_a_wrong_plan_is_an_error_before_states_move(tmp_path: Path) -> None:
    class Wrong(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                with pytest.raises(ValueError, match="does not place the unit"):
                    trainer.strategy.states_owner.move_states(
                        Plan({"embed": UnitPlan("host", "host", "keep", {})}, 0, 0)
                    )

    model = Model()
    assert_same(train(tmp_path, ssd(tmp_path), model, callbacks=[Wrong()]), train(tmp_path, "auto", model))


def test_a_drive_that_fails_while_states_move(tmp_path: Path) -> None:
    """The error names the file, and no files remain."""
    backend = FaultyBackend()

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.strategy.model_states.drain()
                backend.error["write"] = OSError(errno.EIO, "Input/output error")
                move(trainer, {unit.name: SSD for unit in find_units(pl_module)})

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(StorageError, match=str(scratch)):
        train(tmp_path, ssd(scratch, states="host", backend=backend), Model(), callbacks=[Fails()])
    assert not list(scratch.iterdir())


def test_memory_that_runs_out_between_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units without room on the device keep their tiers, and training continues."""
    bring = UnitMover._copy_to_device
    brought = []

    def one_only(self: Any, item: Any) -> Any:
        if brought:
            raise torch.OutOfMemoryError("no room")
        brought.append(item)
        return bring(self, item)

    class Once(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 3 and not brought:
                monkeypatch.setattr(UnitMover, "_copy_to_device", one_only)
                units = {unit.name: UnitPlan("gpu", "gpu", "keep", {}) for unit in find_units(pl_module)}
                trainer.strategy.states_owner.move_states(Plan(units, 2**20, 2**20))
                assert trainer.strategy.model_states.stores

    model = Model()
    assert_same(train(tmp_path, ssd(tmp_path), model, callbacks=[Once()]), train(tmp_path, "auto", model))
    assert brought


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("least", "gpu_memory"), [(PART_ELEMENTS, "125kB"), (512, "130kB")])
def test_teraios_plan_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, gpu_memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts of units are moved to the tiers of its plan, and a micro-batch offloads the saved tensors of its plan."""
    monkeypatch.setattr(units, "PART_ELEMENTS", least)
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)
    now = 0.0

    def tick() -> float:
        """Operators take the same time in every run, whatever other threads do meanwhile."""
        nonlocal now
        if threading.current_thread() is threading.main_thread():
            now += 1e-4
        return now

    monkeypatch.setattr(clock, "perf_counter", tick)
    moves: list[Plan] = []
    placed: dict[str, tuple[str, str]] = {}
    stored: list[int] = []
    caplog.set_level("INFO")
    move_states = RunStates.move_states

    def record_move(run: RunStates, plan: Plan) -> None:
        moves.append(plan)
        move_states(run, plan)

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            stored.append(trainer.strategy.offloader.stats().stored)
            placed.clear()
            for flat, store in trainer.strategy.model_states.stores.items():
                for view in flat.param_views:
                    placed[view.name] = store.buffers.tiers

    monkeypatch.setattr(RunStates, "move_states", record_move)
    machine = tmp_path / "machine.json"
    rates = dict.fromkeys(("copy_in", "copy_out", "copy_in_both", "copy_out_both"), 1e9)
    rates |= dict.fromkeys(("ssd_read", "ssd_write", "ssd_mixed"), 1e8)
    replace(HardwareProfile.from_json(MACHINE), **rates).to_json(machine)
    swaps = planner(planner="teraio", machine=machine, gpu_memory=gpu_memory)
    how: Any = {"limit_val_batches": 0, "batches": 12}
    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, host_memory="64MiB")
    actual = train(tmp_path, strategy, Model(), callbacks=[swaps, Watch()], **how)
    assert actual.losses == train(tmp_path, "auto", Model(), **how).losses
    plan, runner = swaps.cycle.plan, swaps.cycle.runner
    assert len(moves) == 1 and plan is not None and runner is not None
    own = {unit.name for unit in runner.profile.units if unit.weight_bytes}
    found = {name: replace(unit, input="keep", operators={}) for name, unit in plan.units.items() if name in own}
    assert found == {
        name: replace(unit, input="keep", operators={}) for name, unit in moves[0].units.items() if name in own
    }
    assert len({part.states for part in plan.placements}) > 1
    planned = {
        name: part
        for unit in find_units(actual)
        for of_unit in unit.parts
        if (part := plan.units[unit.name].of(of_unit.name)).weights != "gpu"
        for name, _ in of_unit.parameters
    }
    assert placed == {name: (part.weights, part.states) for name, part in planned.items()}
    divided = sum(bool(unit.parts) for unit in plan.units.values())
    assert bool(divided) == (least == 512)
    assert (f"and those of {divided} units, part by part, in several tiers" in caplog.text) == bool(divided)
    offloaded = 0
    for unit in runner.profile.units:
        choices = plan.units[unit.name].operators
        offloaded += sum(one.saved_bytes for one in unit.operators if choices[one.name] != "keep")
        # The input of the first unit is the batch, which user code owns, too.
        offloaded += unit.input_bytes if unit.name != "embed" and plan.units[unit.name].input != "keep" else 0
    assert stored[-1] - stored[-2] == offloaded > 0


class Scalars(Model):
    """Has parameters of one element without dimensions."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


def test_scalar_states_are_moved_too(tmp_path: Path) -> None:
    model = Scalars(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))  # counts on the CPU on any device
    how: Any = {"precision": "bf16-true"}
    plain = train(tmp_path, ssd(tmp_path), model, **how)
    assert_same(train(tmp_path, ssd(tmp_path), model, callbacks=[Mover(6, [GPU, HOST, SSD])], **how), plain)


class OwnWindows(Model):
    """Accumulates gradients over three batches, without Lightning's knowledge."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if (batch_idx + 1) % 3:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


def test_gradients_that_wait_for_a_step_are_not_lost(tmp_path: Path) -> None:
    class Early(pl.Callback):
        refused = moved = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            where = {unit.name: HOST if batch_idx % 2 else SSD for unit in find_units(pl_module)}
            if (batch_idx + 1) % 3:
                assert not trainer.strategy.states_owner.can_move_states()
                with pytest.raises(ValueError, match="gradients wait for their step"):
                    move(trainer, where)
                self.refused += 1
            else:
                move(trainer, where)
                self.moved += 1

    early = Early()
    plain = train(tmp_path, "auto", OwnWindows())
    assert_same(train(tmp_path, ssd(tmp_path), OwnWindows(), callbacks=[early]), plain)
    assert early.refused and early.moved


def test_scratch_space_that_runs_out_between_units(tmp_path: Path) -> None:
    """Units that exchange tiers need room for one of them: units without room keep their tiers."""

    class Swaps(pl.Callback):
        found: set[Any] = set()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            names = [unit.name for unit in find_units(pl_module)]
            if trainer.global_step in (2, 4):
                on_ssd = names[:3] if trainer.global_step == 2 else names[3:]
                units = {name: UnitPlan(*(SSD if name in on_ssd else HOST), "keep", {}) for name in names}
                trainer.strategy.states_owner.move_states(Plan(units, 2**20, 2**20))
                self.found.add(
                    sum(store.buffers.tiers[0] == "ssd" for store in trainer.strategy.model_states.stores.values())
                )

    small: Any = {"states": "host", "ssd_capacity": "80KiB", "tier": "ssd", "offload": "none"}
    model, swaps = Model(), Swaps()
    assert_same(train(tmp_path, ssd(tmp_path, **small), model, callbacks=[swaps]), train(tmp_path, "auto", model))
    assert swaps.found


def test_values_on_the_device_are_kept_until_they_are_in_the_new_tier(tmp_path: Path) -> None:
    backend = FaultyBackend()
    kept: dict[str, Any] = {}

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                move(trainer, {unit.name: GPU for unit in find_units(pl_module)})
                kept["model"] = pl_module
                kept["weights"] = {name: value.clone() for name, value in pl_module.state_dict().items()}
                backend.error["write"] = OSError(errno.EIO, "Input/output error")
                move(trainer, {unit.name: SSD for unit in find_units(pl_module)})

    with pytest.raises(StorageError, match=str(tmp_path)):
        train(tmp_path, ssd(tmp_path, backend=backend), Model(), callbacks=[Fails()])
    for name, value in kept["model"].state_dict().items():
        assert torch.equal(value, kept["weights"][name]), name


def test_an_error_says_that_parameters_on_the_device_are_one_step_ahead(tmp_path: Path) -> None:
    """All steps of offloaded parameters fail, after the optimizer has stepped those on the device."""
    backend = FaultyBackend()

    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                names = [unit.name for unit in find_units(pl_module)]
                move(trainer, {name: ("host", "ssd") if name == "blocks.0" else GPU for name in names})
                backend.error["read"] = OSError(errno.EIO, "Input/output error")

    with pytest.raises(StorageError) as caught:
        train(tmp_path, ssd(tmp_path, backend=backend), Model(), callbacks=[Fails()])
    notes = getattr(caught.value, "__notes__", [])
    assert any("not those of one step" in note and "parameters on the device" in note for note in notes), notes


class Written(Logger):
    """Records logged bytes written to SSDs."""

    name = version = "written"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert all(value >= 0 for value in metrics.values())
        if "OffloadMonitor/ssd_bytes_written" in metrics:
            self.seen.append(metrics["OffloadMonitor/ssd_bytes_written"])

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        return None


def test_written_bytes_are_counted_across_moves(tmp_path: Path) -> None:
    """Each move replaces offloaders and scratch spaces."""
    written = Written()
    everything: Any = {"offload": 1.0, "spill": "ssd_first"}
    callbacks = [OffloadMonitor(), Mover(7, [GPU, SSD])]
    train(tmp_path, ssd(tmp_path, **everything), Model(), callbacks=callbacks, logger=written, log_every_n_steps=1)
    assert len(written.seen) == 2 * STEPS
    assert written.seen == sorted(written.seen) and written.seen[0] < written.seen[-1]
