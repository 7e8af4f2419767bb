"""A micro-batch that runs out of memory is run again with less, and no number and no hook shows it."""

import copy
import random
import weakref
from collections import ChainMap, Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.autoplan import auto_plan, plan_maker
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.model_states.optimizers import user_optimizers
from lightning_ssd.planning import HardwareProfile, ModelProfile, PartPlan, Plan, make_plan, simulate, state_moves
from lightning_ssd.retry.step_state import COPIED, UNRECORDED
from lightning_ssd.run import setup
from tests.support.compare import assert_same
from tests.support.limited_memory import LimitedMemory
from tests.support.meter import Meter, use
from tests.support.plans import BOTH, quiet_trainer
from tests.support.products import combinations, thorough

pytestmark = pytest.mark.timeout(180)

WIDTH = 8

AMPLE, SHORT = Meter(1e9, 10**6), Meter(1e6, 999_000)


class Counts:
    """An object of the user."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: deque[float] = deque(maxlen=4)

    def count(self) -> int:
        self.calls += 1
        return self.calls


class Stateful(pl.LightningModule):
    """Its `training_step` changes each kind of state, and all of it goes into the loss."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("zeros", torch.zeros(1).expand(2), persistent=False)  # no tensor to write to
        self.metric = MeanMetric()
        self.counts, self.seen, self.by_name, self.number = Counts(), [], {"sum": torch.zeros(())}, 0
        self.noise, self.python = torch.Generator().manual_seed(3), random.Random(4)
        self.numpy, self.array = np.random.default_rng(5), np.zeros(2)
        self.checkpointing = checkpointing

    def block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.number += 1
        self.counts.calls += self.number
        self.array += self.number
        self.mean.data.mul_(0.9).add_(batch.mean(0))
        self.by_name["sum"] += batch.sum()
        drawn = self.python.random() + self.numpy.random() + random.random() + np.random.rand()  # noqa: NPY002
        hidden = batch + torch.randn(WIDTH, generator=self.noise) + self.mean + drawn
        if self.checkpointing is None:
            hidden = self.block(self.block(hidden))
        else:
            hidden = checkpoint(self.block, checkpoint(self.block, hidden, use_reentrant=False), use_reentrant=False)
        states = self.counts.calls + sum(self.seen) + float(self.array.sum()) + self.by_name["sum"]
        loss = (self.last(hidden) * states.sin()).square().mean()
        self.seen.append(loss.item())
        self.counts.last.append(loss.item())
        self.metric.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return {"loss": loss, "hidden": hidden, "batch": batch}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CountHooks(pl.Callback):
    """Counts the calls of each hook, which draw random numbers."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.outputs: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs += outputs["hidden"].flatten().tolist() + outputs["batch"].flatten().tolist()


def _count(name: str) -> Any:
    def hook(self: CountHooks, *_: Any, **__: Any) -> None:
        self.calls[name] += 1
        torch.rand(1)

    return hook


for _name in [name for name in dir(pl.Callback) if name.startswith("on_") and name not in vars(CountHooks)]:
    setattr(CountHooks, _name, _count(_name))


@dataclass
class Run:
    weights: dict[str, Tensor]
    seen: list[float]
    state: tuple[Any, ...]
    outputs: list[float]
    metrics: list[dict[str, float]]
    calls: Counter[str]
    failures: int


def train(
    strategy: Any,
    memory: LimitedMemory | None = None,
    accumulate: int = 1,
    batches: int = 6,
    rows: Sequence[int] = (),
    module: Any = Stateful,
    callbacks: Sequence[pl.Callback] = (),
    **how: Any,
) -> Run:
    """Trains two epochs; returns all that a user sees."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    data = [torch.randn(count, WIDTH) for count in (rows or [4] * batches)]
    made, hooks = module(), CountHooks()
    memory = memory or LimitedMemory()
    with TemporaryDirectory() as root, memory:
        logger = CSVLogger(root)
        trainer = quiet_trainer(
            Path(root),
            strategy=strategy,
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            callbacks=[memory.counting, hooks, *callbacks],
            logger=logger,
            log_every_n_steps=1,
            **how,
        )
        trainer.fit(made, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
        metrics = list(logger.experiment.metrics)
    state = made.number, made.counts.calls, list(made.counts.last), made.array.tolist(), made.by_name["sum"].item()
    return Run(dict(made.state_dict()), made.seen, state, hooks.outputs, metrics, hooks.calls, memory.failures)


def assert_equal(one: Run, other: Run) -> None:
    assert_same(one.weights, other.weights)
    assert (one.seen, one.state, one.calls) == (other.seen, other.state, other.calls)
    assert one.metrics == other.metrics and one.outputs == other.outputs


def train_by_default(
    meter: Meter, memory: LimitedMemory, states: str = "gpu", arguments: dict[str, Any] | None = None, **how: Any
) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        use(meter, patch)
        return train(SSDOffloadStrategy(**BOTH | {"states": states} | (arguments or {})), memory, **how)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("failures", "meter", "accumulate", "checkpointing"),
    [
        ([(1, 5), (2, 35)], AMPLE, 2, None),
        ([(1, 40), (4, 20)], AMPLE, 1, False),
        ([(2, 10), (3, 35), (8, 35), (9, 5)], SHORT, 1, None),
    ],
)
def test_numbers_logs_and_hooks_are_those_of_a_training_with_enough_memory(
    failures: list[tuple[int, int]], meter: Meter, accumulate: int, checkpointing: bool | None
) -> None:
    how: dict[str, Any] = {"accumulate": accumulate, "module": lambda: Stateful(checkpointing)}
    run = train_by_default(meter, LimitedMemory(fails_at=failures), **how)
    assert run.failures == len(failures)
    assert_equal(train("auto", **how), run)


def test_code_that_wraps_lightnings_backward_sees_each_micro_batch_once() -> None:
    lightnings = pl.strategies.Strategy.backward
    with mock.patch.object(pl.strategies.Strategy, "backward", autospec=True, side_effect=lightnings) as seen:
        run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 35)]), batches=2)
    assert run.failures == 1 and seen.call_count == 4


class FailsBeforeBackward(Stateful):
    def on_before_backward(self, loss: Tensor) -> None:
        copied = copy.deepcopy(self.trainer.precision_plugin)
        assert copied.backward.__self__ is copied  # type: ignore[attr-defined]
        raise KeyError


def test_the_precision_plugin_is_as_before_if_a_hook_before_backward_fails() -> None:
    plugin = pl.plugins.Precision()
    with pytest.raises(KeyError):
        train_by_default(AMPLE, LimitedMemory(), module=FailsBeforeBackward, plugins=[plugin])
    assert not vars(plugin)


class OtherState(Stateful):
    """State in a namespace and in a scheduler, a read-only array, and a trained tensor, no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.tokens = SimpleNamespace(calls=0), np.ones(4)
        self.tokens.flags.writeable = False
        self.prompt = torch.ones(WIDTH, requires_grad=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.names.calls += 1
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] + (self.prompt * batch).square().mean()
        self.seen += [self.names.calls, *self.prompt.tolist()]
        return output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.parameters(), self.prompt], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class CodeState(Stateful):
    """State that code reaches: variables of functions and hooks, objects of methods.

    Its forward also changes hooks, the grad mode and `requires_grad`, and changes them back if it does not fail.
    """

    def __init__(self) -> None:
        super().__init__()
        calls, number, counts = [], 0, Counts()

        def count() -> int:
            nonlocal number
            number += 1
            return number + len(calls)

        def add(found: dict[str, int]) -> int:
            found["calls"] = found.get("calls", 0) + 1
            return found["calls"]

        self.first.register_forward_hook(lambda *_: calls.append(1))
        self.functions = [count, partial(add, {}), counts.count]
        self.own_hooks = [[0], [1]]  # a list, unlike the attributes of `nn.Module` with such names
        self.objects = np.array([[], None], dtype=object)
        self.scripted = torch.jit.script(nn.BatchNorm1d(WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.objects[0].append(1)
        self.own_hooks[0].append(1)
        self.seen += [
            len(self.own_hooks[0]),
            *(one() for one in self.functions),
            len(self.objects[0]),
        ]
        changed = [self.last.weight.requires_grad, torch.is_grad_enabled(), len(self.norm._forward_hooks)]
        self.seen += map(float, changed)
        handle = self.norm.register_forward_hook(lambda module, args, output: output * 1.5)
        torch.set_grad_enabled(False)
        self.last.weight.requires_grad_(False)
        self.block(self.block(batch))
        self.last.weight.requires_grad_(True)
        torch.set_grad_enabled(True)
        handle.remove()
        return super().training_step(self.scripted(batch).detach(), batch_idx)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("allocation", [2, 12, 50, 58])
def test_state_that_code_reaches_is_restored(allocation: int) -> None:
    run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, allocation)]), module=CodeState, batches=3)
    assert run.failures == 1
    assert_equal(train("auto", module=CodeState, batches=3), run)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("allocation", [10, 50])
def test_state_of_other_objects_and_gradients_of_other_tensors_are_restored(allocation: int) -> None:
    run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, allocation)]), module=OtherState, batches=3)
    assert run.failures == 1
    assert_equal(train("auto", module=OtherState, batches=3), run)


class ElementState(Stateful):
    """State of elements of sets and of keys, and of dictionaries in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.members, self.frozen, self.keyed = {Counts()}, frozenset([Counts()]), {Counts(): 0}
        self.chain = ChainMap({"calls": 0})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen += [one.count() for objects in (self.members, self.frozen, self.keyed) for one in objects]
        self.chain["calls"] += 1
        self.seen.append(self.chain["calls"])
        return super().training_step(batch, batch_idx)


class Replaced(pl.Callback):
    """Replaces an attribute of a submodule after each micro-batch; sees whether the replaced value is freed."""

    def __init__(self) -> None:
        self.freed: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, pl_module.first.tag = getattr(pl_module.first, "tag", Counts()), Counts()
        reference = weakref.ref(before)
        del before
        self.freed.append(reference() is None)


def test_values_that_a_module_refers_to_no_more_are_freed_at_once() -> None:
    replaced = Replaced()
    train_by_default(AMPLE, LimitedMemory(), batches=10, callbacks=[replaced])
    assert replaced.freed == [True] * 20


class Guarded:
    """An object that refuses to be asked for unknown attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name}")


class LazyDict(dict[str, int]):
    """A dictionary whose iteration is expensive."""

    def keys(self) -> Any:
        raise RuntimeError("should not be loaded")

    __iter__ = items = values = keys


class Unwatched(Tensor):
    """A tensor that allows no function of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} is not allowed")


class Unreadable:
    """An object like a proxy that is not bound."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not bound")


class OddObjects(Stateful):
    """Objects that raise errors if they are treated like other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded, self.lazy, target = Guarded(), LazyDict(calls=0), Counts()
        self.proxy = weakref.proxy(target)  # which is dead in the training
        self.unwatched = torch.ones(2).as_subclass(Unwatched)
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.zero, self.system = torch._efficientzerotensor((2,)), random.SystemRandom()
        self.anonymous = type("Anonymous", (), {"__module__": None})()
        self.bare = nn.LazyBatchNorm1d(affine=False)
        self.__dict__["unreadable"] = Unreadable()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.guarded.calls += 1
        self.lazy["calls"] += 1
        self.seen += [self.guarded.calls, self.lazy["calls"]]
        return super().training_step(self.bare(batch), batch_idx)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("module", [ElementState, OddObjects])
def test_state_of_elements_and_odd_objects_is_restored(module: type[Stateful]) -> None:
    run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 10)]), module=module, batches=3)
    assert run.failures == 1
    assert_equal(train("auto", module=module, batches=3), run)


def train_offloaded(
    precision: str, clip: float | None, accumulate: int, sees_gradients: bool, fails_at: Sequence[tuple[int, int]] = ()
) -> Run:
    """Trains with offloaded states.

    Without hooks that see gradients, later micro-batches step during backward: callbacks of these trainings have one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "user_sees_gradients", lambda trainer: sees_gradients)
        how: dict[str, Any] = {"precision": precision, "gradient_clip_val": clip, "accumulate": accumulate}
        return train_by_default(AMPLE, LimitedMemory(fails_at=fails_at), states="host", batches=3, **how)


with_enough_memory = cache(train_offloaded)


@combinations(
    "allocation, precision, clip_accumulate, sees_gradients",
    [5, 25, 34, 40],  # the first gradient arrives in the 30th
    ["32-true", "bf16-mixed"],
    [(None, 1), (0.1, 1), (0.1, 3)],
    [False, True],
    quick=[(25, "32-true", (0.1, 1), False), (40, "bf16-mixed", (0.1, 3), False)],
)
def test_offloaded_states_are_those_of_a_training_with_enough_memory(
    allocation: int, precision: str, clip_accumulate: tuple[float | None, int], sees_gradients: bool
) -> None:
    run = train_offloaded(precision, *clip_accumulate, sees_gradients, [(2, allocation)])
    assert run.failures == 1
    assert_equal(with_enough_memory(precision, *clip_accumulate, sees_gradients), run)


class UsesTwice(Stateful):
    """In mixed precision, the gradients of its last layer, the first ones of backward, are added in fp32."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__(checkpointing)
        layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(layer, nn.ReLU(), layer)  # type: ignore[assignment]


@pytest.mark.parametrize(("allocation", "sees_gradients"), [(50, False), thorough(56, True)])
def test_gradients_that_were_added_in_fp32_are_dropped(
    allocation: int, sees_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "user_sees_gradients", lambda trainer: sees_gradients)
    how: dict[str, Any] = {"states": "host", "batches": 3, "precision": "bf16-mixed", "module": UsesTwice}
    run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, allocation)]), **how)
    assert run.failures == 1
    assert_equal(train_by_default(AMPLE, LimitedMemory(), **how), run)


@pytest.mark.parametrize("delayed", [0, 2])
def test_gradients_that_were_added_in_fp32_to_earlier_ones_are_not_added_again(
    delayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_plan, "FIRST_MICRO_BATCHES", delayed)
    how: dict[str, Any] = {"states": "host", "batches": 4, "precision": "bf16-mixed", "module": UsesTwice}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 50)]), accumulate=2, **how)
    assert any("could not be run again" in note and "offloaded parameters" in note for note in caught.value.__notes__)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("states", ["gpu", "host"])
@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.integers(1, 24), st.integers(1, 64), max_size=12),
    st.integers(1, 3),
    st.sampled_from([AMPLE, SHORT]),
    st.sampled_from([None, False, True]),
    st.sampled_from(["32-true", "bf16-mixed"]),
    st.sampled_from([None, 0.1]),
    st.booleans(),
    st.booleans(),
)
def test_any_allocation_may_fail(
    states: str,
    failures: dict[int, int],
    accumulate: int,
    meter: Meter,
    checkpointing: Any,
    precision: str,
    clip: float | None,
    sees_gradients: bool,
    twice: bool,
) -> None:
    """At most one of each micro-batch: a second failure is an error. All micro-batches are prepared for one.

    With offloaded states, the steps of all micro-batches begin after their backward.
    """

    def module() -> Stateful:
        return UsesTwice(checkpointing) if twice else Stateful(checkpointing)

    how: dict[str, Any] = {"accumulate": accumulate, "module": module, "precision": precision}
    how |= {"batches": 12 if states == "gpu" else 6, "gradient_clip_val": clip}
    run = None
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto_plan, "PROVEN", 2 * how["batches"])
            patch.setattr(auto_plan, "FIRST_MICRO_BATCHES", 2 * how["batches"])
            patch.setattr(setup, "user_sees_gradients", lambda trainer: sees_gradients)
            run = train_by_default(meter, LimitedMemory(fails_at=failures.items()), states=states, **how)
    except torch.OutOfMemoryError as error:
        # Reentrant checkpointing accumulates gradients in several backwards. Offloaded ones are added in fp32.
        summed = states == "host" and twice and precision == "bf16-mixed"
        assert checkpointing or summed
        assert states == "host" or accumulate > 1
        assert "could not be run again" in str(error.__notes__)
    if run is not None:
        expected = train("auto", **how) if states == "gpu" else train_by_default(AMPLE, LimitedMemory(), states, **how)
        assert_equal(expected, run)


def test_a_backward_whose_gradients_were_stepped_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_plan, "FIRST_MICRO_BATCHES", 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 40)]), states="host", batches=3)
    assert any("could not be run again" in note and "offloaded parameters" in note for note in caught.value.__notes__)


def least_memory(**how: Any) -> int:
    """Returns the peak of a training that offloads all saved tensors, one at a time."""
    memory = LimitedMemory()
    train(SSDOffloadStrategy(**BOTH, offload=1.0), memory, callbacks=[PrefetchScheduler(window_bytes=0)], **how)
    return memory.highest_ever


@pytest.mark.parametrize(("share", "rows", "accumulate"), [(1.01, [64] * 10, 1)])
def test_trains_wherever_offloading_everything_fits(share: float, rows: list[int], accumulate: int) -> None:
    how: dict[str, Any] = {"rows": rows, "accumulate": accumulate}
    memory = LimitedMemory(share * least_memory(**how))
    run = train_by_default(memory, memory, **how)
    assert_equal(train("auto", **how), run)


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(st.floats(1.01, 1.6), st.lists(st.integers(8, 100), min_size=4, max_size=12), st.integers(1, 3))
def test_never_runs_out_of_memory_where_offloading_everything_fits(
    share: float, rows: list[int], accumulate: int
) -> None:
    test_trains_wherever_offloading_everything_fits(share, rows, accumulate)


@pytest.mark.parametrize("allocation", [2, 35])
def test_a_repeated_micro_batch_is_logged_in_one_line(allocation: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train_by_default(AMPLE, LimitedMemory(fails_at=[(2, allocation)]), batches=3)
    part = "forward" if allocation == 2 else "backward"
    (line,) = [line for line in caplog.messages if "run out of memory" in line]
    assert run.failures == 1
    assert line == (
        f"offload='auto': the CPU has run out of memory in the {part} of a micro-batch, which is run again with all "
        f"saved tensors offloaded or recomputed. {UNRECORDED}"
    )


def test_a_plan_that_ran_out_of_memory_is_replaced_by_a_smaller_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        train_by_default(SHORT, LimitedMemory(fails_at=[(15, 30)]), batches=9)
    assert "SwapPlanner: a step has run out of memory: planning again with 937.50 KiB of the GPU." in caplog.messages


class Layer(GradientCheckpointingLayer):
    """A layer whose author allows that it is checkpointed."""

    reruns: ClassVar[list[nn.Module]] = []
    """Layers whose forward has run in the present backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            self.reruns.append(self)
        return self.linear(x).tanh()


class Layers(Stateful):
    """Its units `hidden.0` to `hidden.2`, each of which is called twice, may be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(Layer() for _ in range(3))

    def block(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x)
        return super().block(x)


class Reruns(pl.Callback):
    """Records each micro-batch.

    Attributes:
        seen: calls of layers that ran again in its backward.
        planned: whether a plan was in force.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.planned: list[bool] = []

    def on_train_batch_start(self, *_: Any) -> None:
        Layer.reruns.clear()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        cycle = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner)).planner
        self.seen.append(len(Layer.reruns))
        self.planned.append(cycle is not None and cycle.plan is not None and not cycle.measuring)


@pytest.mark.parametrize("failures", [(4, 5, 6), (5, 6, 7, 9)])
def test_a_training_whose_profiles_run_out_of_memory_checkpoints_units_without_a_plan(
    failures: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The first profiles fail in the recorded micro-batch, or one in the checked one before; or a later micro-batch."""
    reruns, how = Reruns(), {"batches": 6, "module": Layers}
    memory = LimitedMemory(fails_at=[(number, 60) for number in failures])
    with caplog.at_level("INFO"):
        run = train_by_default(Meter(1e6, 999_990), memory, callbacks=[reruns], **how)
    assert run.failures == len(failures)
    assert_equal(train("auto", **how), run)
    assert reruns.seen[-3:] == [6, 6, 6] and not any(reruns.planned)
    lines = [line for line in caplog.messages if "profiling needs more memory than there is" in line]
    assert [line.split()[1] for line in lines] == ["checkpoints"]


class Frees(pl.Callback):
    """Other processes free memory after the tenth micro-batch. Records whether saved tensors have hooks in each."""

    def __init__(self, memory: LimitedMemory) -> None:
        self._memory = memory
        self.hooked: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.hooked.append(trainer.strategy.offloader.policy.hooks_enabled)
        if len(self.hooked) == 10:
            self._memory.most = 1e9


def test_hooks_are_disabled_once_all_has_room_after_profiles_that_ran_out_of_memory() -> None:
    """No unit of the model may be checkpointed."""
    how: dict[str, Any] = {"rows": [64] * 10}
    memory = LimitedMemory(1.1 * least_memory(**how), [(number, 35) for number in (3, 4, 5, 6)])
    frees = Frees(memory)
    run = train_by_default(memory, memory, callbacks=[frees], **how)
    assert run.failures >= 3 and all(frees.hooked[:10]) and not any(frees.hooked[-3:])
    assert_equal(train("auto", **how), run)


class Offloaded(pl.Callback):
    """Records after each micro-batch whether model states are offloaded."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(bool(trainer.strategy.model_states and trainer.strategy.model_states.stores))


def check_third_attempt(failures: list[tuple[int, int]], arguments: dict[str, Any] | None = None, **how: Any) -> None:
    offloaded, memory = Offloaded(), LimitedMemory(fails_at=failures)
    run = train_by_default(AMPLE, memory, states="auto", arguments=arguments, callbacks=[offloaded], **how)
    failed = failures[0][0]
    assert run.failures == 2
    # A plan, once there is one, may move them back to the device, which has room in all other micro-batches.
    assert offloaded.seen[:failed] == [False] * (failed - 1) + [True]
    assert_equal(train("auto", **how), run)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("failures", "how"),
    [
        ([(1, 5), (1, 12)], {}),
        ([(2, 40), (2, 90)], {"gradient_clip_val": 0.1}),
        ([(2, 40), (2, 52)], {"precision": "bf16-mixed"}),
        ([(3, 5), (3, 50)], {"accumulate": 2}),
        ([(2, 5), (2, 12)], {"accumulate": 2}),
        ([(4, 5), (4, 18)], {"accumulate": 2, "gradient_clip_val": 0.1}),
        ([(5, 5), (5, 18)], {"accumulate": 3, "precision": "bf16-mixed"}),
    ],
)
def test_model_states_are_offloaded_where_memory_lacks_without_saved_tensors(
    failures: list[tuple[int, int]], how: dict[str, Any]
) -> None:
    """Also after optimizer states were made on the device, and while gradients of micro-batches before wait."""
    check_third_attempt(failures, **how)


class ZeroesByItself(Stateful):
    """Its optimizer zeroes the gradients of every second step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        zero_grad = optimizer.zero_grad
        optimizer.zero_grad = lambda *_: zero_grad() if self.number % 2 else None  # type: ignore[method-assign]
        return optimizer


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(2, 55),
    st.integers(1, 55),
    st.sampled_from([Stateful, UsesTwice, ZeroesByItself]),
    st.sampled_from([{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}]),
    st.integers(1, 3),
    st.sampled_from([1, 4 * WIDTH + 1]),
)
def test_any_two_allocations_may_fail(
    number: int, first: int, later: int, module: Any, how: dict[str, Any], accumulate: int, min_bytes: int
) -> None:
    how = how | {"module": module, "accumulate": accumulate}
    memory = LimitedMemory(fails_at=[(number, first), (number, first + later)])
    run = train_by_default(AMPLE, memory, "auto", {"min_bytes": min_bytes}, **how)
    assert_equal(train("auto", **how), run)


STATES_LACK_ROOM = Meter(2400, 2390)
"""A limit below the 2.5 KiB of the weights, gradients and optimizer states of `Stateful`."""


@combinations(
    "how, limit",
    [{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"accumulate": 2}],
    [STATES_LACK_ROOM, SHORT],
    quick=[({"gradient_clip_val": 0.1}, STATES_LACK_ROOM), ({}, SHORT)],
)
def test_plans_move_model_states_from_the_device_where_no_plan_fits_beside_them(
    how: dict[str, Any], limit: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin on the device, and where plans fit, there are no offloaded states."""
    monkeypatch.setattr(state_moves, "MIN_LEAVE_GAIN", 1.0)  # times are measured ones
    states: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            states.append(trainer.strategy.model_states)

    run = train_by_default(limit, LimitedMemory(), states="auto", callbacks=[Look()], batches=18, **how)
    assert states[0] is None
    assert (states[-1] is not None and bool(states[-1].stores)) == (limit is STATES_LACK_ROOM)
    assert_equal(train("auto", batches=18, **how), run)


def test_model_states_are_moved_once_a_plan_beside_them_has_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_moves, "MIN_LEAVE_GAIN", 1.0)  # times are measured ones
    offloaded = Offloaded()
    limit = Meter(3500, 3490)  # a plan needs 3,400 bytes, and after the failure has 4 % less than the limit
    run = train_by_default(limit, LimitedMemory(fails_at=[(15, 30)]), states="auto", callbacks=[offloaded], batches=18)
    assert run.failures == 1
    assert offloaded.seen == [False] * 15 + [True] * 21
    assert_equal(train("auto", batches=18), run)


@pytest.mark.parametrize(("module", "action"), [(Stateful, "offloads"), (Layers, "checkpoints")])
def test_a_plan_that_exceeds_the_limit_and_runs_out_of_memory_ends_if_none_needs_less(
    module: Any, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers are checkpointed without it, too."""
    memory, reruns = LimitedMemory(fails_at=[(number, 30) for number in range(12, 15)]), Reruns()
    with caplog.at_level("INFO"):
        run = train_by_default(STATES_LACK_ROOM, memory, batches=18, module=module, callbacks=[reruns])
    assert_equal(train("auto", batches=18, module=module), run)
    peaks = [line for line in caplog.messages if "SwapPlanner: saved tensors" in line]
    ends = [line for line in caplog.messages if "no plan needs less memory than one that has run out of it" in line]
    assert [line.split()[1] for line in ends] == [action] and "Use smaller micro-batches" in ends[0]
    assert reruns.planned[11] and not reruns.planned[-1] and reruns.seen[-1] == (6 if module is Layers else 0)
    assert len(peaks) == len(set(peaks)) <= 3


def test_a_training_whose_model_states_were_offloaded_is_planned_again_after_its_profiles_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reruns, offloaded = Reruns(), Offloaded()
    failures = [*[(number, 60) for number in (4, 5, 6)], (9, 40), (9, 90)]
    memory, how = LimitedMemory(fails_at=failures), {"batches": 18, "module": Layers}
    run = train_by_default(Meter(1e6, 999_990), memory, states="auto", callbacks=[reruns, offloaded], **how)
    assert run.failures == 5 and not any(reruns.planned[:9]) and reruns.planned[-1]
    assert_equal(train("auto", **how), run)


@pytest.mark.parametrize(("share", "moves"), [(0.65, False), (0.6, True)])
def test_model_states_leave_the_device_for_a_large_gain_only(
    share: float, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they may stay: the time of a placement that was never profiled is uncertain, and counts as 15 % longer."""
    resident_plans: list[Plan] = []

    def make(
        profile: ModelProfile, hardware: HardwareProfile, planner: Any, placement: Any = None, clip: Any = None
    ) -> Plan:
        if placement is not None:
            resident_plans.append(make_plan(profile, hardware, planner, placement))
            return resident_plans[-1]
        return resident_plans[-1].placed(profile, [PartPlan("host", "host")] * len(profile.parts))

    def predict(profile: ModelProfile, hardware: HardwareProfile, plan: Plan) -> Any:
        resident = {part.states for part in plan.parts(profile)} == {"gpu"}
        stay = simulate(profile, hardware, plan if resident else resident_plans[-1])
        # So many times longer, computation does not bound the gain.
        seconds = 10 * (1 if resident else share) * stay.step_seconds
        return replace(stay, step_seconds=seconds, offloaded_share=0.0 if resident else 1.0)

    monkeypatch.setattr(plan_maker, "make_plan", make)
    monkeypatch.setattr(plan_maker, "simulate", predict)
    offloaded = Offloaded()
    train_by_default(SHORT, LimitedMemory(), states="auto", callbacks=[offloaded], batches=9)
    assert resident_plans and any(offloaded.seen) == moves


def test_model_states_stay_where_the_user_wants_them() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(1, 5), (1, 12)]), states="gpu")
    note = next(note for note in caught.value.__notes__ if "memory has run out again in the forward" in note)
    assert "Use smaller micro-batches" in note and "a loss in chunks of tokens" in note


def test_the_order_of_optimizer_hooks_is_plain_lightnings() -> None:
    """A hook before `step` runs before the forward of the closure, so that states can't be offloaded within it."""
    order: list[str] = []

    class Hooked(Stateful):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            order.append("forward")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda *_: order.append("step"))
            return optimizer

    train_by_default(AMPLE, LimitedMemory(), states="auto", module=Hooked, batches=2)
    assert order == ["step", "forward"] * 4


class ZeroesRarely(Stateful):
    """Adds the gradients of two steps, and zeroes those of an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx % 4 == 0:
            output["loss"] = output["loss"] + self.rare(batch).square().mean()
        return output

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


class SeesGradients(Stateful):
    """Reads the gradients of the step before, in the forward and before they are zeroed."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.read_gradient()
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.read_gradient()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.read_gradient()

    def read_gradient(self) -> None:
        gradient = self.last.weight.grad
        self.seen.append(-1.0 if gradient is None else gradient.sum().item())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("module", [ZeroesRarely, SeesGradients])
@pytest.mark.parametrize("number", [2, 3])
def test_gradients_of_the_step_before_are_offloaded_with_the_model_states(module: Any, number: int) -> None:
    check_third_attempt([(number, 5), (number, 18)], module=module)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (2, {"module": ZeroesByItself}),
        (2, {"accumulate": 2, "gradient_clip_val": 0.1}),
        (2, {"accumulate": 3, "precision": "bf16-mixed"}),
    ],
)
@pytest.mark.parametrize(("first", "second"), [(40, 90), thorough(5, 50), thorough(40, 52)])
@pytest.mark.parametrize("min_bytes", [1, 4 * WIDTH + 1])  # biases are on the device with the second one
def test_gradients_that_failed_backwards_have_added_to_earlier_ones_are_offloaded(
    number: int, how: dict[str, Any], first: int, second: int, min_bytes: int
) -> None:
    """And the last attempt does not add to them."""
    check_third_attempt([(number, first), (number, second)], {"min_bytes": min_bytes}, **how)


class StepsWithoutGrad(Stateful):
    """Its closures are called in a context without gradients, and record the grad mode."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            self.seen.append(float(torch.is_grad_enabled()))
            return optimizer_closure()

        with torch.no_grad():
            optimizer.step(closure=closure)


def test_closures_run_in_the_grad_mode_of_a_step() -> None:
    check_third_attempt([(2, 40), (2, 52)], module=StepsWithoutGrad)


class StepsByHand(Stateful):
    """Manual optimization, whose closure records the grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        outputs = []

        def closure() -> Tensor:
            self.seen.append(float(torch.is_grad_enabled()))
            outputs.append(Stateful.training_step(self, batch, batch_idx))
            optimizer.zero_grad()
            self.manual_backward(outputs[-1]["loss"])
            return outputs[-1]["loss"]  # type: ignore[no-any-return]

        with torch.no_grad():
            optimizer.step(closure=closure)
        return {name: value.detach() for name, value in outputs[-1].items()}


class CallsTwice(torch.optim.SGD):
    """Steps twice, with the gradients of a closure each."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step(closure)


class CallsClosureTwice(Stateful):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return CallsTwice(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("module", [StepsByHand, CallsClosureTwice])
def test_closures_that_user_code_calls_run_as_often_as_in_plain_lightning(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_optimizers, "_REGISTERED", user_optimizers._REGISTERED | {CallsTwice})
    how: dict[str, Any] = {"module": module, "batches": 3}
    assert_equal(train("auto", **how), train_by_default(AMPLE, LimitedMemory(), states="auto", **how))


class StepsTorchOptimizer(Stateful):
    """Its closure runs within `step` of torch's optimizer, without Lightning's wrapper."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(optimizer_closure)


def test_model_states_are_not_offloaded_within_a_step_of_torch() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 5), (2, 18)]), states="auto", module=StepsTorchOptimizer)
    assert any("memory has run out again in the forward" in note for note in caught.value.__notes__)


def test_model_states_are_offloaded_where_they_leave_no_room_for_saved_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The host tier has 32 MiB, the least that one may have, until model states take some of it."""
    with caplog.at_level("INFO"):
        check_third_attempt([(2, 40), (2, 52)], {"tier": "host", "host_memory": "32MiB"})
    (line,) = [line for line in caplog.messages if "run out of memory again" in line]
    assert line.endswith("with its model states offloaded, which leave no room to offload saved tensors: all are kept.")


def test_the_error_of_model_states_without_room_says_why_they_were_offloaded() -> None:
    with pytest.raises(ValueError, match="`host_memory` of 0 B is too small") as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 5), (2, 18)]), "auto", {"host_memory": 0})
    assert any("memory had run out in the forward" in note for note in caught.value.__notes__)


class Windows(pl.Callback):
    """Records the window of each micro-batch that stores saved tensors."""

    def __init__(self) -> None:
        self.windows: list[int] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.windows.append(trainer.strategy.offloader.policy.window_bytes)


def test_a_training_without_a_plan_prefetches_again_after_it_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measured micro-batches after the second attempt have no window, and later ones one that has room."""
    monkeypatch.setattr("lightning_ssd.autoplan.auto_plan.obstacle_to_planning", lambda *_: "several devices")
    windows = Windows()
    run = train_by_default(SHORT, LimitedMemory(fails_at=[(2, 10)]), callbacks=[windows])
    assert run.failures == 1
    assert 0 in windows.windows and 0 < windows.windows[-1] <= SHORT.most - SHORT.highest


class Twice(Stateful):
    """Always runs out of memory in the second micro-batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.last(self.fails(batch))
        return super().training_step(batch, batch_idx)

    def fails(self, batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")


def test_the_error_of_a_second_failure_says_what_was_tried() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        train_by_default(AMPLE, LimitedMemory(), module=Twice)
    assert any("memory has run out again in the forward, with all saved" in note for note in caught.value.__notes__)


class SeesBackward(Stateful):
    def on_before_backward(self, loss: Tensor) -> None:
        self.number += 1


class CalledBeforeBackward(Stateful):
    """A callback sets an attribute before backward."""

    def configure_callbacks(self) -> pl.Callback:
        return pl.callbacks.LambdaCallback(on_before_backward=lambda _, module, loss: setattr(module, "number", 1))


class DoublesLoss(Stateful):
    """A callback changes the loss, of which no other attempt would know."""

    def configure_callbacks(self) -> pl.Callback:
        return pl.callbacks.LambdaCallback(on_before_backward=lambda _, module, loss: loss.mul_(2))


class ChangesParameters(Stateful):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            self.last.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


class Reads(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.more = iter(range(100))


class Unhashable(type):
    """A class of classes that are not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        return cls is other


class HasUnhashable(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.unhashable = Unhashable("OfUnhashableClass", (), {})()


class WritesLargeArray(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.large = np.zeros(COPIED // 8 + 1)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SeesBackward, "`on_before_backward` of the module"),
        (CalledBeforeBackward, "set `number` of the module"),
        (DoublesLoss, "changed the loss"),
        (ChangesParameters, "changed a parameter"),
        (Reads, "range_iterator"),
        (WritesLargeArray, "ndarray"),
        (HasUnhashable, "OfUnhashableClass"),
    ],
)
def test_a_micro_batch_with_visible_side_effects_is_not_run_again(module: Any, reason: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 35)]), module=module)
    assert any("could not be run again" in note and reason in note for note in caught.value.__notes__)


class Reduces(Stateful):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        dist.all_reduce(torch.zeros(1))
        return super().training_step(batch, batch_idx)


def test_a_micro_batch_that_has_run_collectives_is_not_run_again() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train_by_default(AMPLE, LimitedMemory(fails_at=[(2, 35)]), module=Reduces)
    finally:
        dist.destroy_process_group()
    assert any("has run collectives" in note for note in caught.value.__notes__)


def test_objects_that_cannot_be_recorded_do_not_keep_from_training() -> None:
    how: dict[str, Any] = {"module": HasUnhashable, "batches": 2}
    assert_equal(train("auto", **how), train_by_default(AMPLE, LimitedMemory(), **how))
