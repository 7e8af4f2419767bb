"""`AutoPlanner`: the three outcomes of `offload="auto"`, with the numbers of plain Lightning in each."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import ActivationOffload, ModelProfiler, SSDOffloadStrategy
from lightning_ssd.activations import OffloadAll, OffloadExcess
from lightning_ssd.autoplan import plan_cycle
from lightning_ssd.autoplan.profiled_steps import MAX_WAIT
from lightning_ssd.autoplan.unplanned_checkpoints import UnplannedCheckpoints
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.model_states import StatesConfig
from tests.support.compare import assert_same
from tests.support.meter import Meter, use
from tests.support.parity import SharedStorages, TinyGPT, train
from tests.support.plans import BOTH, planner, quiet_trainer

pytestmark = pytest.mark.timeout(120)

AMPLE, SHORT = Meter(1e9, 10**6), Meter(1e6, 990_000)


class See(pl.Callback):
    """Records the rules that each micro-batch follows."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.hooks: list[bool] = []
        self.placements: list[type] = []
        self.modes: list[str] = []
        self.planned: list[bool] = []
        self.followed: list[bool] = []
        """Whether each micro-batch follows a row of the plan."""
        self.auto: AutoPlanner | None = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        offloader = find_offloader(trainer)
        assert offloader is not None
        swaps = self.auto.planner
        self.outcomes.append(self.auto.outcome)
        self.hooks.append(offloader.policy.hooks_enabled)
        self.placements.append(type(offloader.policy.placement))
        self.modes.append(type(offloader.policy.mode).__name__)
        self.followed.append(swaps is not None and not swaps.offloads_all)
        self.planned.append(swaps is not None and swaps.plan is not None and not swaps.measuring)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.stats = offloader.stats()
        self.planners = int(self.auto is not None and self.auto.planner is not None)
        self.prediction = None if self.auto is None or self.auto.planner is None else self.auto.planner.prediction
        self.trainer = trainer


@pytest.fixture
def see() -> See:
    return See()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "precision", "accumulate"),
    [
        (TinyGPT, "32-true", 1),
        pytest.param(SharedStorages, "bf16-mixed", 3, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("outcome", ["keep", "plan", "offload"])
def test_numbers_are_plain_lightnings_in_each_outcome(
    model: Any, precision: str, accumulate: int, outcome: str, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    how: dict[str, Any] = {"model": model, "precision": precision, "accumulate": accumulate, "steps": 16}
    plain = train("auto", **how)
    use(AMPLE if outcome == "keep" else SHORT, monkeypatch)
    if outcome == "offload":
        monkeypatch.setattr("lightning_ssd.autoplan.auto_plan.obstacle_to_planning", lambda *_: "several devices")
    assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[see], **how))
    assert see.outcomes[-1] == outcome
    first = see.outcomes.index(outcome)
    assert first <= 4 * accumulate and set(see.outcomes[first:]) == {outcome}
    assert all(see.hooks[:first])
    if outcome == "keep":
        assert not any(see.hooks[first + accumulate :])
        assert see.planners == 0
    elif outcome == "plan":
        assert see.planned.index(True) < 14 * accumulate  # whether the plan intercepts units depends on measured times
        assert see.planners == 1 and see.stats.stored
    else:
        assert all(see.hooks) and set(see.placements) == {OffloadExcess} and see.stats.stored
    assert see.auto is None or see.auto.planner is None  # it ends with the training


class Losses(TinyGPT):
    """Logs its losses."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.thorough
def test_loggers_get_no_metrics_that_plain_lightning_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(SHORT, monkeypatch)
    monkeypatch.setattr(plan_cycle, "COMPARED_STEPS", 1)
    compared: list[bool] = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
            compared.append(auto.planner is not None and auto.planner.comparison is not None)

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        tmp_path,
        strategy=SSDOffloadStrategy(**BOTH),
        max_steps=40,
        log_every_n_steps=1,
        callbacks=[Look()],
        logger=logger,
    )
    trainer.fit(Losses("none"), DataLoader([torch.randn(2, 16) for _ in range(40)], batch_size=None))
    assert compared == [True]
    assert set(logger.experiment.metrics_keys) == {"loss", "epoch", "step"}


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Each item is a batch with the given number of samples."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self._rows[index], 16, generator=torch.Generator().manual_seed(index))


def fit(root: Path, rows: Sequence[int], callbacks: Sequence[pl.Callback], strategy: Any = None, **how: Any) -> None:
    trainer = quiet_trainer(
        root, strategy=strategy or SSDOffloadStrategy(**BOTH), callbacks=list(callbacks), max_epochs=1, **how
    )
    trainer.fit(TinyGPT("none"), DataLoader(Lengths(rows), batch_size=None))


def test_hooks_are_enabled_again_for_larger_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See) -> None:
    """Blocks are checkpointed in a larger batch if memory could be short; later batches of its size are known."""
    use(Meter(2e6, 10**6), monkeypatch)
    fit(tmp_path, [2, 2, 2, 2, 1, 4, 4, 4, 3], [see])
    assert see.hooks == [True, True, False, False, False, True, False, False, False]
    assert see.stats.stored == 0


def test_hooks_are_enabled_when_other_parameters_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    class Thaw(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.model.transformer.wte.requires_grad_(False)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            pl_module.model.transformer.wte.requires_grad_(batch_idx >= 4)

    use(AMPLE, monkeypatch)
    fit(tmp_path, [2] * 7, [Thaw(), see])
    assert see.hooks == [True, True, False, False, True, False, False]


def test_a_training_that_outgrows_its_memory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    meter = Meter(1e6, 400_000)

    class Grow(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                meter.level, meter.highest = 700_000, 990_000

    use(meter, monkeypatch)
    fit(tmp_path, [2] * 20, [Grow(), see])
    assert see.outcomes[4] == "keep" and not see.hooks[4]
    assert all(see.hooks[5:10]) and see.outcomes[-1] == "plan"


def test_units_are_checkpointed_in_batches_that_are_larger_than_all_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    """As a person would write, and without a second profile: nothing is offloaded for them."""
    checkpointed: list[int] = []

    class Rows(pl.Callback):
        def on_before_backward(self, *_: Any) -> None:
            assert see.auto is not None
            runner = None if see.auto.planner is None else see.auto.planner.runner
            units = () if runner is None or runner.row is None else runner.row.plan.units.values()
            checkpointed.append(sum(unit.checkpoint for unit in units))

    use(Meter(1e6, 950_000), monkeypatch)
    fit(tmp_path, [4] * 14 + [5] + [4, 1] + [5] * 2, [see, Rows()])
    assert checkpointed[14] == checkpointed[-1] == max(checkpointed) > checkpointed[13]
    assert all(see.followed[13:]) and see.modes.count("TraceMode") == 1


def test_a_large_batch_is_recorded_for_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See) -> None:
    """Batches differ in size: the plan is made for the largest, some steps later, and applies to smaller ones."""
    use(Meter(5e5, 450_000), monkeypatch)
    fit(tmp_path, [2, 3, 2, 1, 2, 1, 3, *[2] * 4, *[1, 2, 3] * 6], [see])
    assert see.modes.index("TraceMode") == 6
    assert see.planned[-3:] == [True] * 3 and see.modes[-3:] == ["PlanMode"] * 3


def test_a_large_batch_is_waited_for_during_a_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    """They, the recorded one and the checked one after it keep the tensors that have room."""
    use(Meter(5e5, 450_000), monkeypatch)
    fit(tmp_path, [3, *[2] * 11], [see])
    recorded = see.modes.index("TraceMode")
    assert recorded == 3 + MAX_WAIT
    assert set(see.placements[: recorded + 2]) == {OffloadExcess} and see.placements[recorded + 2] is OffloadAll


@pytest.mark.parametrize(("level", "recorded"), [(0, 3), (900_000, 1)])
def test_the_second_step_is_recorded_if_the_first_one_has_shown_that_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, see: See, level: int, recorded: int
) -> None:
    """Bytes that are allocated after the first step and its saved bytes are more than there are."""
    how: dict[str, Any] = {"model": TinyGPT, "precision": "32-true", "accumulate": 1, "steps": 10}
    plain = train("auto", **how)
    use(Meter(1e6, 990_000, level), monkeypatch)
    assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[see], **how))
    assert see.modes.index("TraceMode") == see.outcomes.index("plan") == recorded
    assert see.planned[-1]


def test_hooks_are_enabled_before_steps_that_grow_without_them_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    """Batches have one shape, and their forwards need more and more memory, as with texts of any length."""
    meter = Meter(1e6, 290_000)

    class Grows(TinyGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            meter.highest += 50_000 if meter.highest < 990_000 else 0
            return super().training_step(batch, batch_idx)

    use(meter, monkeypatch)
    trainer = quiet_trainer(tmp_path, strategy=SSDOffloadStrategy(**BOTH), callbacks=[see], max_epochs=1)
    trainer.fit(Grows("none"), DataLoader(Lengths([2] * 20), batch_size=None))
    assert see.outcomes[2] == "keep" and not see.hooks[2]
    assert all(see.hooks[14:]) and see.outcomes[-1] == "plan"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("unplanned", [1, 2])
def test_the_plan_stays_in_force_after_a_skipped_batch(
    unplanned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    """If a hook of the module skips a batch, Lightning ends the epoch without calling the batch's last hooks."""

    class Skips(TinyGPT):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if self.current_epoch and len(batch) == 3 else None

    class Epochs(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Tensor]:
            assert self.trainer is not None
            first = self.trainer.current_epoch == 0
            rows = [2] * 14 if first else [3] if self.trainer.current_epoch <= unplanned else [2] * 2
            return DataLoader(Lengths(rows), batch_size=None)

    use(Meter(5e5, 450_000), monkeypatch)
    trainer = quiet_trainer(
        tmp_path,
        strategy=SSDOffloadStrategy(**BOTH),
        callbacks=[see],
        max_epochs=unplanned + 2,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(Skips("none"), datamodule=Epochs())
    assert see.modes[13:] == ["PlanMode"] * 3


def test_the_log_does_not_say_that_memory_is_short_where_states_are_the_reason_for_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)
    use(AMPLE, monkeypatch)
    with caplog.at_level("INFO"):
        fit(tmp_path, [2] * 4, [], SSDOffloadStrategy(min_bytes=1, host_memory="64MiB"))
    assert "offload='auto': plans which saved tensors" in caplog.text
    assert "offloaded model states may be moved.\n" in caplog.text and "room" not in caplog.text


class Unknown(TinyGPT):
    """Batches are numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.ones(2, 16), batch_idx)


@pytest.mark.parametrize(("meter", "outcome"), [(AMPLE, "keep"), (SHORT, "offload")])
def test_batches_without_tensors_keep_hooks_enabled_and_are_not_planned(
    meter: Meter, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    use(meter, monkeypatch)
    trainer = quiet_trainer(tmp_path, strategy=SSDOffloadStrategy(**BOTH), callbacks=[see], max_epochs=1)
    trainer.fit(Unknown("none"), DataLoader(range(8), batch_size=None))  # type: ignore[arg-type]
    assert see.outcomes[-1] == outcome and all(see.hooks)


class _Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh().square()


class TorchScript(pl.LightningModule):
    """Its blocks are scripted or traced, so that they take no hooks; the module is scripted when it was trained."""

    def __init__(self, checkpointing: Any = "none") -> None:
        super().__init__()
        scripted = [torch.jit.script(_Squares()) for _ in range(2)]
        traced = torch.jit.trace(_Squares(), torch.randn(2, 16))  # type: ignore[no-untyped-call]
        self.blocks = torch.nn.Sequential(_Squares(), *scripted, traced, _Squares(), torch.jit.script(_Squares()))
        self.script: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def on_train_end(self) -> None:
        self.script = self.to_torchscript()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["gpu", "host"])
def test_modules_of_torchscript_are_planned_with_the_numbers_of_plain_lightning(
    states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    def trained(strategy: Any, *callbacks: pl.Callback) -> TorchScript:
        torch.manual_seed(1)
        module = TorchScript()
        if states == "host":  # offloaded weights have hooks until the training has ended
            module.on_train_end = lambda: None  # type: ignore[method-assign]
        trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=list(callbacks), max_epochs=1)
        trainer.fit(module, DataLoader(Lengths([2] * 16), batch_size=None))
        return module

    trained("auto")  # TorchScript optimizes code in the first training of a process, which has other last digits
    plain = trained("auto")
    use(Meter(1e6, 999_990), monkeypatch)
    strategy = SSDOffloadStrategy(**BOTH | {"states": states})
    mine = trained(strategy, see)
    assert see.planned[-1] and see.outcomes[-1] == "plan"
    assert_same(dict(plain.state_dict()), dict(mine.state_dict()))
    if states == "gpu":
        assert_same(mine.script(torch.ones(2, 16)), mine(torch.ones(2, 16)))


def test_all_is_kept_on_a_cpu(tmp_path: Path, see: See) -> None:
    fit(tmp_path, [2] * 3, [see])
    assert see.hooks == [False] * 3 and see.outcomes == ["keep"] * 3 and not see.stats.stored


@pytest.mark.parametrize("user", ["planner", "profiler", "amount"])
def test_it_does_not_override_the_users_decision(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    use(AMPLE, monkeypatch)
    given: dict[str, Any] = {"planner": [planner()], "profiler": [ModelProfiler(tmp_path / "profile.json")]}
    amount = {"offload": 1.0} if user == "amount" else {}
    fit(tmp_path, [2] * 8, [*given.get(user, []), see], SSDOffloadStrategy(**(BOTH | amount)))
    assert set(see.outcomes) == {"measuring"} and see.auto is not None and not see.auto.decides


def test_it_decides_for_the_activation_offload_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    use(SHORT, monkeypatch)
    offload = ActivationOffload(min_bytes=1, host_memory="64MiB", path=tmp_path)
    fit(tmp_path, [2] * 12, [offload, see], "auto")
    assert see.outcomes[-1] == "plan" and see.planned[-1]


@pytest.mark.parametrize(("meter", "said"), [(AMPLE, "keeps all saved tensors on the CPU: a step needs at most"),
                                            (SHORT, "plans which saved tensors are kept")])  # fmt: skip
def test_one_line_names_the_outcome(
    meter: Meter, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(meter, monkeypatch)
    with caplog.at_level("INFO"):
        fit(tmp_path, [2] * 12, [])
    assert len([line for line in caplog.messages if line.startswith("offload='auto': ")]) == 1
    assert f"offload='auto': {said}" in caplog.text


def test_the_log_names_the_host_memory_of_steps_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of saved tensors for which there is no room before units are checkpointed."""
    monkeypatch.setattr(UnplannedCheckpoints, "begin_all", lambda *_: None)
    monkeypatch.setattr(UnplannedCheckpoints, "_lacks_room", lambda *_: False)
    use(SHORT, monkeypatch)
    with caplog.at_level("INFO"):
        fit(tmp_path, [2] * 12, [])
    assert "Until a plan is in force, those that are offloaded take " in caplog.text


def test_compiled_code_that_was_compiled_before_is_not_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see: See
) -> None:
    """Its frames are not compiled again in the second training: the graph of the loss shows them."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh().sin()

    block = Block()
    compiled = torch.compile(lambda x: block(x), backend="aot_eager")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for _ in range(8):
                batch = compiled(batch)
            return batch.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    use(Meter(2000, 1900), monkeypatch)
    for _ in range(2):
        trainer = quiet_trainer(tmp_path, strategy=SSDOffloadStrategy(**BOTH), callbacks=[see], max_epochs=1)
        trainer.fit(Model(), DataLoader(Lengths([2] * 6), batch_size=None))
        assert see.outcomes[-1] == "offload"
        assert see.auto is not None and see.auto.planner is None


def test_a_pickled_callback_does_not_continue_its_training() -> None:
    auto = AutoPlanner()
    auto._plan = object()  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(auto)).outcome == "measuring"
