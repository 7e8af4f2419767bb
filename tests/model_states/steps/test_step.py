"""The optimizer step of one flat parameter is torch's step, made once, or none, whenever the scale is known."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.device import Worker
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.optimizers.adam import any_kernel
from lightning_ssd.model_states.optimizers.optimizers import AdamOptimizer
from lightning_ssd.model_states.optimizers.step_work import StepWork, do_together
from lightning_ssd.model_states.stores.buffers import SpareMemory
from lightning_ssd.model_states.stores.state_store import StateStore
from tests.support.compare import same
from tests.support.faults import Move, Operation, WrappingBackend
from tests.support.models import Model
from tests.support.state_stores import Tiers, make_layout, masters_of, open_store, weights_of
from tests.support.states import ssd, train
from tests.support.steps import ARRIVED, Stepped

pytestmark = pytest.mark.timeout(60)


def torchs(
    store: StateStore, scale: float | None, limit: float | None = None, arrived: Sequence[bool] = ARRIVED
) -> list[Tensor]:
    """Returns the weights after torch's step of the gradients times `scale`."""
    parameters = [nn.Parameter(values) for values in weights_of(store.layout)]
    if scale is not None:
        for parameter, values, has_gradient in zip(parameters, weights_of(store.layout, seed=2), arrived, strict=True):
            parameter.grad = values * scale if has_gradient else None
        if limit is not None:
            torch.nn.utils.clip_grad_value_(parameters, limit)
        torch.optim.AdamW(parameters, lr=0.1, fused=True).step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("scale", [1.0, 0.125, None])
@pytest.mark.parametrize("kind", ["speculative", "deferred", "serial"])
@pytest.mark.parametrize("tiers", [("host", "host"), ("ssd", "ssd")])
def test_a_step_is_torchs_whatever_the_scale_turns_out_to_be(
    tmp_path: Path, worker: Worker, tiers: Tiers, kind: str, scale: float | None
) -> None:
    """A speculated scale of 1 is right, or the step is made again, or it is rolled back."""
    with open_store(tmp_path, tiers, make_layout(2)) as (store, _):
        known: Future[float | None] = Future()
        made = Stepped(store, worker, known)
        step = made.step
        _, done = step.speculative(1.0, finished(None), []) if kind == "speculative" else getattr(step, kind)([])
        worker.submit(lambda: None, priority=1).result()  # jobs that are ready have run
        assert not done.done() and store.steps == 0 and same(masters_of(store), weights_of(store.layout))
        known.set_result(scale)
        done.result(timeout=60)
        store.drain()
        assert same(masters_of(store), torchs(store, scale))
        assert store.steps == (scale is not None)
        jobs = (scale is not None) if kind != "speculative" else 1 + (scale == 0.125)
        assert made.jobs == [15] * jobs
        assert made.gradient.has_accum == [False, False]


def test_a_step_whose_scale_is_known_when_its_job_begins_is_made_in_place(tmp_path: Path, worker: Worker) -> None:
    """A second version is allocated for speculation alone."""
    layout = make_layout(2)
    with open_store(tmp_path, ("host", "host"), layout) as (store, _):
        store.buffers.spare = SpareMemory(2**20)
        known, on_host = Future[float | None](), Future[None]()
        made = Stepped(store, worker, known)
        _, done = made.step.speculative(1.0, on_host, [])
        known.set_result(0.125)
        on_host.set_result(None)
        done.result(timeout=60)
        assert same(masters_of(store), torchs(store, 0.125)) and made.jobs == [15]
        assert store.buffers.spare.reserved == 0 and not store.buffers.revertible


def test_a_speculation_without_memory_waits_for_the_scale(tmp_path: Path, worker: Worker) -> None:
    with open_store(tmp_path, ("host", "host"), make_layout(2)) as (store, _):
        store.buffers.spare = SpareMemory(0)
        known = Future[float | None]()
        made = Stepped(store, worker, known)
        _, done = made.step.speculative(1.0, finished(None), [])
        worker.submit(lambda: None, priority=1).result()
        assert made.jobs == []
        known.set_result(1.0)
        done.result(timeout=60)
        assert same(masters_of(store), torchs(store, 1.0)) and made.jobs == [15] and store.steps == 1


def test_a_serial_step_ends_when_its_values_are_written(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It excludes all other jobs until then. The drive writes nothing before the step waits for its writes."""
    events: list[str] = []
    gate = threading.Event()

    class Late(WrappingBackend):
        name = "late"

        def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
            if operation == "write":
                assert gate.wait(timeout=60)
                events.append("write")
            return call(buffer, offset)

    gate.set()
    with open_store(tmp_path, ("ssd", "ssd"), make_layout(2), Late()) as (store, _):
        store.drain()
        gate.clear()
        events.clear()
        written = store.written

        def wait_for_writes(*arguments: Any) -> "Future[None]":
            gate.set()
            return written(*arguments)

        monkeypatch.setattr(store, "written", wait_for_writes)
        done, _ = Stepped(store, worker, finished(1.0)).step.serial([])
        done.add_done_callback(lambda _: events.append("end"))
        done.result(timeout=60)
        worker.submit(lambda: None).result(timeout=60)  # the callback of `done` has run, on the same thread
        gate.set()
        store.drain()
        assert events == ["write", "write", "end"]


@pytest.mark.parametrize("drop", [False, True])
def test_the_memory_of_a_speculation_that_is_given_up_is_freed(tmp_path: Path, worker: Worker, drop: bool) -> None:
    with open_store(tmp_path, ("host", "host"), make_layout(2)) as (store, _):
        store.buffers.spare = SpareMemory(2**20)
        assert store.buffers.add_second()
        made = Stepped(store, worker, finished(0.5))
        made.step.deferred([], drop_second=drop)[1].result(timeout=60)
        assert same(masters_of(store), torchs(store, 0.5))
        assert (store.buffers.spare.reserved == 0) == drop and store.buffers.revertible != drop


def test_a_scale_that_is_no_number_makes_one_step(tmp_path: Path, worker: Worker) -> None:
    """NaN does not equal itself."""
    with open_store(tmp_path, ("host", "host"), make_layout(1)) as (store, _):
        made = Stepped(store, worker, finished(float("nan")))
        made.step.speculative(1.0, finished(None), [])[1].result(timeout=60)
        assert made.jobs == [15] and store.steps == 1


def test_gradients_are_clamped_after_they_are_scaled(tmp_path: Path, worker: Worker) -> None:
    with open_store(tmp_path, ("host", "host"), make_layout(1)) as (store, _):
        made = Stepped(store, worker, finished(0.5), limit=0.25)
        made.step.deferred([])[1].result(timeout=60)
        assert same(masters_of(store), torchs(store, 0.5, limit=0.25))


def test_accumulated_gradients_are_those_of_the_step(tmp_path: Path, worker: Worker) -> None:
    """They are in another buffer, and are dropped after the step."""
    with open_store(tmp_path, ("host", "host"), make_layout(1)) as (store, _):
        made = Stepped(store, worker, finished(1.0))
        made.gradient.add(ARRIVED)
        made.gradient.host_grad.fill_(float("nan"))
        object.__setattr__(made.step, "arrived", None)
        made.step.deferred([])[1].result(timeout=60)
        assert same(masters_of(store), torchs(store, 1.0))
        assert made.gradient.has_accum == [False, False]


@pytest.mark.parametrize("kind", ["speculative", "deferred", "serial"])
@pytest.mark.parametrize("failing", ["gradient", "scale"])
def test_a_step_that_fails_has_the_error_and_commits_nothing(
    tmp_path: Path, worker: Worker, kind: str, failing: str
) -> None:
    with open_store(tmp_path, ("ssd", "ssd"), make_layout(2)) as (store, _):
        failed: Future[Any] = Future()
        failed.set_exception(ArithmeticError("the device is lost"))
        scale = failed if failing == "scale" else finished(1.0)
        on_host = failed if failing == "gradient" else finished(None)
        made = Stepped(store, worker, scale)
        step = made.step
        _, done = step.speculative(1.0, on_host, []) if kind == "speculative" else getattr(step, kind)([on_host])
        with pytest.raises(ArithmeticError, match="the device is lost"):
            done.result(timeout=60)
        assert store.steps == 0
        assert same(masters_of(store), weights_of(store.layout))  # staging memory has room for one: it was released


@pytest.mark.parametrize("all_arrived", [True, False])
@pytest.mark.parametrize("scale", [0.125, None])
def test_weights_are_final_before_the_rest_is_made(
    tmp_path: Path, worker: Worker, scale: float | None, all_arrived: bool
) -> None:
    """If a parameter has no gradient, the step is made as a whole."""
    with open_store(tmp_path, ("host", "host"), make_layout(2, torch.bfloat16)) as (store, _):
        known = Future[float | None]()
        made = Stepped(store, worker, known)
        object.__setattr__(made.step, "arrived", [True, all_arrived])
        object.__setattr__(made.step, "opt_state_priority", 9)
        held, between = Future[None](), list[Tensor]()
        weights, done = made.step.deferred([], weights_first=True)
        worker.submit(lambda: held.result(), [weights], priority=1)
        known.set_result(scale)
        weights.result(timeout=60)
        between.append(store.stage().result().weights.clone())
        in_parts = all_arrived and scale is not None and any_kernel() is not None
        assert not in_parts or (not done.done() and store.steps == 0)
        held.set_result(None)
        done.result(timeout=60)
        staged = store.stage().result()
        assert torch.equal(staged.weights, between[0]) and store.steps == (scale is not None)
        assert staged.master is not None and torch.equal(staged.weights, staged.master.bfloat16())
        assert made.jobs == ([] if scale is None else [85 if all_arrived else 15])


@pytest.mark.parametrize("failing", ["gradient", "scale", "weights", "opt_state"])
def test_a_step_in_two_parts_that_fails_commits_nothing(
    tmp_path: Path, worker: Worker, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Master weights and optimizer states are those before the step."""
    with open_store(tmp_path, ("host", "host"), make_layout(1, torch.bfloat16)) as (store, _):
        failed: Future[Any] = Future()
        failed.set_exception(ArithmeticError("the device is lost"))
        made = Stepped(store, worker, failed if failing == "scale" else finished(1.0))
        object.__setattr__(made.step, "arrived", [True, True])
        begin_step = made.step.flat_optimizer.begin_step

        def fail(given: Any, staged: Any, half: Any) -> Any:
            if half == failing or (failing == "opt_state" and any_kernel() is None):
                raise ArithmeticError("the device is lost")
            return begin_step(given, staged, half)

        if failing in ("weights", "opt_state"):
            monkeypatch.setattr(made.step.flat_optimizer, "begin_step", fail)
        if failing == "weights" and any_kernel() is None:
            pytest.skip("there is no C compiler")
        _, done = made.step.deferred([failed if failing == "gradient" else finished(None)], weights_first=True)
        with pytest.raises(ArithmeticError, match="the device is lost"):
            done.result(timeout=60)
        assert store.steps == 0 and same(masters_of(store), weights_of(store.layout))
        staged = store.stage().result()
        assert not any(values.any() for values in staged.states.values())


@pytest.mark.skipif(any_kernel() is None, reason="there is no C compiler")
def test_all_offloaded_units_compute_their_weights_first_if_others_stay_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first units stay, and count neither as units nor as priorities."""
    halves: dict[str, list[str]] = {}
    begin_step = AdamOptimizer.begin_step

    def noted(self: AdamOptimizer, given: Any, staged: Any, half: Any = "whole") -> Any:
        halves.setdefault(self.flat.name, []).append(half)
        return begin_step(self, given, staged, half)

    monkeypatch.setattr(AdamOptimizer, "begin_step", noted)
    strategy = ssd(states="auto", gpu_memory="90kB", tier="host", clip="deferred")
    train(tmp_path, strategy, Model(), gradient_clip_val=0.01, max_steps=1)
    assert len(halves) > 1 and strategy.model_states is None
    assert set(map(tuple, halves.values())) == {("weights", "opt_state")}


@pytest.mark.skipif(any_kernel() is None, reason="there is no C compiler")
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_steps_of_one_priority_are_made_by_one_call(
    tmp_path: Path, failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have torch's numbers, and a step that fails before the call does not keep the other one from being made."""
    together: list[int] = []

    def noted(works: Sequence[StepWork]) -> None:
        together.append(len(works))
        do_together(works)

    worker = Worker("test", noted)
    release = threading.Event()
    with ExitStack() as stack:
        stack.callback(worker.close)
        stores = [stack.enter_context(open_store(tmp_path, ("host", "host"), make_layout(1)))[0] for _ in range(2)]
        held = worker.submit(lambda: None if release.wait(60) else None, priority=-2)
        steps = [Stepped(store, worker, finished(0.5)) for store in stores]
        for step in steps:
            object.__setattr__(step.step, "arrived", [True, True])

        def fail(*_: Any) -> Any:
            raise ArithmeticError("no step")

        if failing is not None:
            monkeypatch.setattr(steps[failing].step.flat_optimizer, "begin_step", fail)
        done = [step.step.deferred([])[1] for step in steps]
        release.set()
        held.result(timeout=60)
        for index, (future, store) in enumerate(zip(done, stores, strict=True)):
            if index == failing:
                with pytest.raises(ArithmeticError, match="no step"):
                    future.result(timeout=60)
                assert same(weights_of(store.layout), masters_of(store)) and store.steps == 0
            else:
                future.result(timeout=60)
                assert same(torchs(store, 0.5, arrived=[True, True]), masters_of(store)) and store.steps == 1
        assert together == ([2] if failing is None else [1])
        assert sum(sum(step.jobs) for step in steps) == (2 if failing is None else 1) * 85
