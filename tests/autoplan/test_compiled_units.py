"""Compiled units are planned as other units are, with plain numbers, and Dynamo compiles what it compiles without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import ForwardGraph, HostTier, SavedStorage
from lightning_ssd.autoplan import auto_plan
from lightning_ssd.profiling import trace_mode
from lightning_ssd.torch_internals import count_compiled
from tests.support.compare import assert_same
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import (
    STEPS,
    Block,
    Blocks,
    See,
    compile_forward,
    compile_in_place,
    compile_wrapped,
    train,
)
from tests.support.meter import Meter, use, use_slow_transfers
from tests.support.models import ManualSteps
from tests.support.plans import BOTH, draw, planner

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

SHORT = 190_000
"""Limit of memory without room for all saved tensors, in bytes."""


def short_for(backend: str) -> int:
    """Returns that limit for code of a backend: Inductor's saves less."""
    return SHORT - 15_000 if backend == "inductor" else SHORT


def limit(most: int, monkeypatch: pytest.MonkeyPatch, *, transfers: bool = True) -> None:
    """Limits the device's memory, on a machine with fast transfers, or with slow ones."""
    use(Meter(most, most - 10_000), monkeypatch)
    if not transfers:
        use_slow_transfers(monkeypatch)


def offloaded_bytes(see: See) -> int:
    """Returns the bytes that the plan offloads in a micro-batch, without the batch, which the Trainer refers to."""
    plan, profile = see.planner.plan, see.planner.runner.profile
    found = 0
    for index, unit in enumerate(profile.units):
        choices = plan.units[unit.name]
        found += 0 if choices.input == "keep" or not index else unit.input_bytes
        found += sum(one.saved_bytes for one in unit.operators if choices.operators[one.name] in ("host", "ssd"))
    return found


FORMS = [
    compile_in_place,
    *(pytest.param(one, marks=pytest.mark.thorough) for one in (compile_wrapped, compile_forward)),
]


@pytest.mark.parametrize("compiles", FORMS)
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.thorough), "aot_eager", INDUCTOR])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_saved_tensors_of_compiled_units_are_kept_or_offloaded_one_by_one(
    compiles: Any, backend: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unit may be checkpointed, which may take less time than offloading."""
    monkeypatch.setattr(ForwardGraph, "checkpoint_bytes", lambda self: {})
    how: dict[str, Any] = {"accumulate_grad_batches": accumulate, "build": lambda name: Blocks(name, Block, compiles)}
    plain, expected = train(backend, "auto", tmp_path, **how)
    see = See()
    limit(short_for(backend), monkeypatch)
    numbers, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], **how)
    assert counters == expected
    assert_same(numbers, plain)
    assert see.outcome == "plan"
    kept = {choice for unit in see.planner.plan.units.values() for choice in unit.operators.values()}
    assert kept > {"keep"}
    assert see.stored[-1] - see.stored[-2] == offloaded_bytes(see) > 0


@pytest.mark.parametrize("compiles", FORMS)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_checkpointed_units_run_their_code_again_and_nothing_is_compiled_again(
    compiles: Any, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"build": lambda name: Blocks(name, Block, compiles)}
    plain, expected = train(backend, "auto", tmp_path, **how)
    see = See()
    limit(short_for(backend), monkeypatch, transfers=False)
    numbers, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], **how)
    assert counters == expected
    assert_same(numbers, plain)
    checkpointed = [name for name, unit in see.planner.plan.units.items() if unit.checkpoint]
    assert checkpointed and see.stored[-1] == see.stored[-2]


class Sharing(Blocks):
    """Two of the blocks are also in the unit of the parameter that they share."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.blocks[2].up.weight = self.blocks[0].up.weight


def test_compiled_units_may_share_a_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that such a call saves belong to the unit of its operation."""
    plain, _ = train("aot_eager", "auto", tmp_path, build=Sharing)
    see = See()
    limit(SHORT - 15_000, monkeypatch)
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=Sharing)
    assert_same(numbers, plain)
    assert see.outcome == "plan" and not see.planner.plan.keeps_all


class Ticks:
    """A clock that passes a millisecond each time that it is read, and a second in each transfer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1e-3
        return self.seconds

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def transfers(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        """Has each call of a method take a second."""
        transfer = getattr(kind, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.seconds += 1
            return transfer(*args, **kwargs)

        monkeypatch.setattr(kind, name, slow)


def test_times_of_compiled_units_are_without_the_transfers_of_their_saved_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, see = Ticks(), See()
    monkeypatch.setattr(trace_mode, "make_clock", lambda device: clock)
    clock.transfers(monkeypatch, HostTier, "store")
    clock.transfers(monkeypatch, SavedStorage, "prefetch")
    limit(SHORT, monkeypatch)
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see])
    units = see.planner.runner.profile.units
    assert clock.seconds > len(units)
    assert all(0 < unit.forward_seconds < 1 for unit in units)
    assert all(0 < sum(one.backward_seconds for one in unit.operators) < 1 for unit in units)


class Recorded(pl.Callback):
    """Records for each recorded micro-batch whether code was compiled in it."""

    def __init__(self, see: See) -> None:
        self.see, self.before = see, 0
        self.compiled: list[bool] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = count_compiled()

    def on_after_backward(self, *_: Any) -> None:
        cycle = self.see.auto.planner
        if cycle is not None and cycle.phase == "recording":
            self.compiled.append(count_compiled() != self.before)


def test_a_micro_batch_in_which_code_is_compiled_is_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fourth batch on, batches have another shape."""
    see = See()
    recorded = Recorded(see)
    limit(SHORT, monkeypatch)
    shapes = [(16,)] * 3 + [(2, 8)] * 12
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, shapes=shapes, callbacks=[see, recorded])
    assert recorded.compiled == [True, False]
    assert see.planner.plan is not None


class Draw(pl.Callback):
    """Applies another random plan before each step, once the training is planned."""

    def __init__(self, see: See) -> None:
        self.see = see
        self.checkpointed = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        cycle = self.see.auto.planner if batch_idx else None
        if cycle is not None and cycle.plan is not None and not cycle.calibrating:
            plan = draw(cycle.plan, cycle.runner.profile, batch_idx, checkpoint=0.3)
            self.checkpointed += sum(unit.checkpoint for unit in plan.units.values())
            cycle.runner.apply(plan)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("states", ["gpu", "host"])
def test_random_plans(backend: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = train(backend, "auto", tmp_path, 30)
    see = See()
    draws = Draw(see)
    limit(SHORT, monkeypatch)
    strategy = SSDOffloadStrategy(**BOTH | {"states": states})
    numbers, counters = train(backend, strategy, tmp_path, 30, callbacks=[see, draws])
    assert counters == expected
    assert_same(numbers, plain)
    assert draws.checkpointed > 4


class Broken(Block):
    """A graph break, between whose graphs Python runs code."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        torch._dynamo.graph_break()
        Broken.calls += 1
        return self.down(x.sin())  # type: ignore[no-any-return]


class Normalized(Block):
    """Changes buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Hooked(Block):
    """Has a hook of the user inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, args, output: output.sin())


class Shrinks(Block):
    """Changes a weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.99)
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "states"), [(Broken, "gpu"), (Normalized, "gpu"), (Hooked, "gpu"), (Shrinks, "gpu"), (Shrinks, "host")]
)
def test_units_whose_second_run_could_have_other_effects_are_not_checkpointed(
    make: Callable[[], nn.Module], states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"build": lambda name: Blocks(name, make)}
    Broken.calls = 0
    plain, expected = train("aot_eager", "auto", tmp_path, **how)
    see, calls = See(), Broken.calls
    limit(SHORT, monkeypatch, transfers=False)
    strategy = SSDOffloadStrategy(**BOTH | {"states": states})
    numbers, counters = train("aot_eager", strategy, tmp_path, callbacks=[see], **how)
    assert counters == expected and Broken.calls == 2 * calls
    assert_same(numbers, plain)
    assert see.outcome == "plan"
    assert all(unit.checkpoint_bytes is None for unit in see.planner.runner.profile.units)


class Later(Blocks):
    """Changes a weight of the blocks that backward does not need, after their forwards."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for block in self.blocks:
                block.down.bias.mul_(0.99)  # type: ignore[operator, union-attr]
        return loss


def test_units_whose_weights_change_after_their_forward_are_not_checkpointed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = train("aot_eager", "auto", tmp_path, build=Later)
    see = See()
    limit(SHORT, monkeypatch, transfers=False)
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=Later)
    assert_same(numbers, plain)
    assert all(unit.checkpoint_bytes is None for unit in see.planner.runner.profile.units)


class Checkpointed(Blocks):
    """Blocks that the user checkpoints, of which each call of a compiled graph is counted."""

    def __init__(self) -> None:
        super().__init__("eager", compiles=lambda block, backend: block)
        self.calls = 0
        for block in self.blocks:
            block.compile(backend=self.count)

    def count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.requires_grad_()
        for block in self.blocks:
            batch = checkpoint(block, batch, use_reentrant=False)
        loss = self.head(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss  # type: ignore[no-any-return]


def test_blocks_that_the_user_checkpoints_run_compiled_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the backward that is recorded."""
    made: list[Checkpointed] = []

    def build(backend: str) -> Checkpointed:
        made.append(Checkpointed())
        return made[-1]

    plain, expected = train("", "auto", tmp_path, build=build)
    see = See()
    limit(SHORT - 30_000, monkeypatch)
    numbers, counters = train("", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=build)
    assert_same(numbers, plain)
    assert counters == expected
    assert see.outcome == "plan"
    assert made[0].calls == made[1].calls == 2 * 4 * STEPS


class Taught(Blocks):
    """Calls its blocks in inference mode first, as a teacher, on a tensor that is made there."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            target = self.blocks[0](batch + 1).mean().item()
        return super().training_step(batch + target, batch_idx)


def test_compiled_units_that_are_called_in_inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = train("aot_eager", "auto", tmp_path, build=Taught)
    see = See()
    limit(SHORT, monkeypatch)
    numbers, counters = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=Taught)
    assert counters == expected
    assert_same(numbers, plain)
    assert see.outcome == "plan"


class Whole(Blocks):
    """Blocks that are called in a compiled function."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend, compiles=lambda block, backend: block)
        self.run = torch.compile(nn.Sequential.forward, backend=backend)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.run(nn.Sequential(*self.blocks, self.head), batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss


class Hidden(Blocks):
    """Eager blocks, and a compiled function that no module shows."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend, compiles=lambda block, backend: block)
        self.functions = [torch.compile(lambda x: x.sin() * 1.1, backend=backend)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.functions[0](batch), batch_idx)


class Mixed(Hidden):
    """The same with compiled blocks: the function is noticed while it runs under a mode."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        for block in self.blocks:
            block.compile(backend=backend)


def compiled_as_a_whole(backend: str) -> pl.LightningModule:
    return torch.compile(Blocks(backend, compiles=lambda block, backend: block), backend=backend)  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("build", [Whole, Hidden, Mixed, compiled_as_a_whole])
def test_without_a_plan_for_other_compiled_code_a_line_names_the_remedy(
    backend: str,
    build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, expected = train(backend, "auto", tmp_path, build=build)
    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    with caplog.at_level("INFO"):
        numbers, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=build)
    assert counters == expected
    assert_same(numbers, plain)
    assert see.outcome == "offload" and see.stored[-1] > see.stored[-2]
    assert "`for block in model.blocks: block.compile()`" in caplog.text


def test_swap_planner_plans_compiled_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = train("aot_eager", "auto", tmp_path)
    swaps = planner()
    numbers, counters = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[swaps])
    assert counters == expected
    assert_same(numbers, plain)
    assert swaps.cycle.plan is not None and "compiled" in swaps.cycle.plan.units["blocks.0"].operators


class Manual(ManualSteps, Blocks):
    """Manual optimization: weights may change between a forward and its backward, so that no forward runs again."""


def test_with_manual_optimization_no_unit_is_checkpointed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = train("aot_eager", "auto", tmp_path, build=Manual)
    see = See()
    limit(SHORT, monkeypatch, transfers=False)
    numbers, counters = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], build=Manual)
    assert counters == expected
    assert_same(numbers, plain)
    assert see.planner.plan is not None
    assert not any(unit.checkpoint for unit in see.planner.plan.units.values())


def test_epochs_that_are_shorter_than_an_accumulation_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps have two micro-batches of four."""
    how: dict[str, Any] = {"accumulate_grad_batches": 4, "limit_train_batches": 2}
    plain, _ = train("aot_eager", "auto", tmp_path, **how)
    see = See()
    limit(SHORT, monkeypatch)
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], **how)
    assert_same(numbers, plain)
    assert see.planner.plan is not None


def test_saved_tensors_of_cuda_graphs_are_kept_from_the_step_on_that_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hooks(pl.Callback):
        enabled: list[bool] = []  # noqa: RUF012

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.enabled.append(trainer.strategy.offloader.policy.hooks_enabled)

    hooks, see = Hooks(), See()
    use(Meter(1e6, 980_000), monkeypatch)
    monkeypatch.setattr(auto_plan, "runs_cuda_graphs", lambda *_: True)
    with caplog.at_level("INFO"):
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 6, callbacks=[hooks, see])
    assert see.outcome == "keep"
    assert hooks.enabled == [True] + [False] * 5
    assert "records CUDA graphs (`mode='reduce-overhead'`)" in caplog.text


def test_batches_of_two_sizes_have_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo compiles for the two sizes what it compiles in plain training."""
    shapes = [(16,), (8,)] * 12
    plain, expected = train("aot_eager", "auto", tmp_path, shapes=shapes)
    see, freeing = See(), []

    class Rows(pl.Callback):
        def on_before_backward(self, *_: Any) -> None:
            runner = None if see.auto.planner is None else see.auto.planner.runner
            if runner is not None and runner.row is not None:
                freeing.append(sum(not unit.keeps_all for unit in runner.row.plan.units.values()))

    limit(SHORT, monkeypatch)
    strategy = SSDOffloadStrategy(**BOTH)
    numbers, counters = train("aot_eager", strategy, tmp_path, shapes=shapes, callbacks=[see, Rows()])
    assert counters == expected
    assert_same(numbers, plain)
    larger, smaller = freeing[-2:]
    assert freeing[-4:-2] == [larger, smaller] and larger > smaller
