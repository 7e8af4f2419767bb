"""The order of events in a step: overlap, order of jobs, and prefetches of weights."""

import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy, register_optimizer
from lightning_ssd.device import CPUCopyEngine, Worker
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states import build
from lightning_ssd.model_states.gradients import GradScaleDecision
from lightning_ssd.model_states.optimizers.adam import any_kernel
from lightning_ssd.model_states.steps.step import OptimizerStep
from lightning_ssd.model_states.steps.weights_first import WeightsFirst
from lightning_ssd.model_states.stores.buffers import SSDBuffer
from lightning_ssd.model_states.weights.prefetcher import ParamPrefetcher
from tests.support.access import loader
from tests.support.compare import assert_same
from tests.support.locks import WatchedLock
from tests.support.models import Block
from tests.support.trainings import make_trainer

UNITS = 4


class Chain(pl.LightningModule):
    """Blocks that record the begin of their forward, and the end of their backward."""

    ORDER: Sequence[int] = range(UNITS)

    def __init__(self, events: list[tuple[str, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8, norm=False) for _ in range(UNITS))
        self.events = events

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for index in self.ORDER:
            self.events.append(("forward", index))
            x = self.blocks[index](x)
            self.after(index, x)
            x.register_hook(lambda _, index=index: self.events.append(("backward", index)))
        return x.square().mean()

    def after(self, index: int, x: Tensor) -> None:
        """Sees the output of a block."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.strategy.model_states.drain()  # type: ignore[union-attr]
        self.events.append(("end", self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def events_of(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: type[Chain] = Chain,
    clip_norm: float | None = None,
    **arguments: Any,
) -> list[list[tuple[str, int]]]:
    """Returns the events of each training step; the methods that step and prefetch are wrapped to record events."""
    events: list[tuple[str, int]] = []

    def told(cls: Any, name: str, tell: Callable[..., tuple[str, int]]) -> None:
        function = getattr(cls, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(tell(self, *args))
            return function(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, run)

    def unit(flat: Any) -> int:
        return int(flat.param_views[0].name.split(".")[1])

    told(
        OptimizerStep,
        "_make",
        lambda step, *args: ("rest" if "opt_state" in args[2:] else "step", unit(step.store.flat)),
    )
    for kind in ("speculative", "deferred", "serial"):
        told(OptimizerStep, kind, lambda step, *_, kind=kind: (kind, unit(step.store.flat)))
    told(ParamPrefetcher, "_prefetch_unit", lambda stream, index: ("want", index))
    told(ParamPrefetcher, "evict", lambda stream, flat: ("release", unit(flat)))
    strategy = SSDOffloadStrategy(**({"states": "host", "min_bytes": 1, "gpu_memory": "1B"} | arguments))
    trainer = make_trainer(path, strategy, gradient_clip_val=clip_norm)
    trainer.fit(model(events), loader())
    steps: list[list[tuple[str, int]]] = [[]]
    for event in events:
        steps[-1].append(event)
        if event[0] == "end":
            steps.append([])
    return steps


def test_units_are_stepped_during_backward_the_last_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = events_of(tmp_path, monkeypatch)[1]
    submitted = [index for kind, index in step if kind == "speculative"]
    assert submitted == [3, 2, 1, 0]
    # The step of a unit is submitted before backward has passed the unit after the next.
    assert step.index(("speculative", 3)) < step.index(("backward", 1))
    assert not any(kind in ("serial", "deferred") for kind, _ in step)


class HeldSteps:
    """Blocks the steps of all units but the first until the next forward of the first unit has ended.

    Second parts of steps are blocked until the whole forward has ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.rests: list[int] = []
        self.in_time: list[bool] = []
        self.ended = False
        self.first_is_over, self.forward_is_over = threading.Event(), threading.Event()
        begun = threading.Event()
        make, submit, enqueue = OptimizerStep._make, Worker.submit, Worker._enqueue

        def is_optimizer(worker: Worker) -> bool:
            return worker._thread.name == "lightning_ssd-cpu-optimizer"

        def submitted(worker: Worker, run: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
            def job() -> Any:
                begun.set()
                return run()

            return submit(worker, job if is_optimizer(worker) else run, *arguments, **options)

        def enqueued(worker: Worker, job: Any) -> None:
            enqueue(worker, job)
            if is_optimizer(worker) and threading.current_thread() != worker._thread:
                # The first job begins before another thread can queue a second one.
                self.in_time.append(begun.wait(timeout=20))

        def held(step: OptimizerStep, staged: Any, scale: float, half: str = "whole") -> Any:
            unit = int(step.store.flat.param_views[0].name.split(".")[1])
            if half == "opt_state":
                self.in_time.append(self.forward_is_over.wait(timeout=20))
                self.rests.append(unit)
            else:
                if unit == 0 and not self.ended:
                    self.first_is_over.clear()
                    self.forward_is_over.clear()
                elif unit:
                    self.in_time.append(self.first_is_over.wait(timeout=20))
                self.made.append(unit)
            return make(step, staged, scale, half)  # type: ignore[arg-type]

        monkeypatch.setattr(OptimizerStep, "_make", held)
        monkeypatch.setattr(Worker, "submit", submitted)
        monkeypatch.setattr(Worker, "_enqueue", enqueued)


class Clipped(Chain):
    """Clipped in every step; reports its forward to `HeldSteps`."""

    def __init__(self, held: HeldSteps) -> None:
        super().__init__([])
        self.held = held

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.blocks[0](batch[0])
        self.held.first_is_over.set()
        for block in self.blocks[1:]:
            x = block(x)
        self.held.forward_is_over.set()
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.held.ended = self.trainer.is_last_batch  # no forward follows

    def on_train_batch_end(self, *_: Any) -> None:
        if self.held.ended:
            self.held.first_is_over.set()
            self.held.forward_is_over.set()


def test_the_forward_of_a_unit_waits_for_its_own_deferred_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the first part only. First parts are in the forward's order, second parts in backward's."""
    held = HeldSteps(monkeypatch)
    monkeypatch.setattr(WeightsFirst, "DOWN", 0.0)  # backward waits for the blocked steps
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B", clip="deferred")
    trainer = make_trainer(tmp_path, strategy, limit_train_batches=3, gradient_clip_val=1e-3)
    trainer.fit(Clipped(held), loader())
    assert trainer.global_step == 3
    assert held.made == [0, 1, 2, 3] * 3
    assert held.rests == ([] if any_kernel() is None else [3, 2, 1, 0] * 3)
    assert all(held.in_time)


class LastCopy(CPUCopyEngine):
    """The last copy of a gradient is under way until a test completes `copied`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.last: Any = None
        self.copied: Future[None] = finished(None)

    def d2h_each(self, *arguments: Any, **options: Any) -> Any:
        super().d2h_each(*arguments, **options)
        self.last, self.copied = object(), Future()
        return self.last

    def reached(self, mark: Any) -> bool:
        return mark is not self.last or self.copied.done()

    def on_d2h(self, mark: Any) -> "Future[None]":
        return self.copied if mark is self.last else finished(None)


def test_clipped_steps_wait_for_the_copies_of_their_own_gradients_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first unit's gradient is copied last, and may be a large embedding's. The others are stepped meanwhile."""
    copies = LastCopy(torch.device("cpu"))
    monkeypatch.setattr(build, "make_copy_engine", lambda device: copies)
    made, others = list[int](), threading.Event()
    make = OptimizerStep._make

    def told(step: OptimizerStep, staged: Any, scale: float, half: Any = "whole") -> Any:
        if half != "opt_state":
            made.append(int(step.store.flat.param_views[0].name.split(".")[1]))
            if made[-1] and not copies.copied.done():
                others.set()
                copies.copied.set_result(None)
        return make(step, staged, scale, half)

    class Waits(Chain):
        def on_train_batch_end(self, *_: Any) -> None:
            in_time.append(others.wait(timeout=20))
            others.clear()
            if not in_time[-1]:
                copies.copied.set_result(None)  # or the training would wait for ever
            super().on_train_batch_end()

    in_time: list[bool] = []
    monkeypatch.setattr(OptimizerStep, "_make", told)
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B", clip="deferred")
    make_trainer(tmp_path, strategy, limit_train_batches=3, gradient_clip_val=1e-3).fit(Waits([]), loader())
    assert in_time == [True] * 3
    assert made == [1, 0, 2, 3] * 3


@pytest.mark.parametrize("clips_later", [False, True])
def test_the_scale_is_decided_before_the_device_steps_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips_later: bool
) -> None:
    """The CPU's steps wait for it. An optimizer whose own code follows the closure may clip again."""
    events: list[str] = []
    module = import_module(torch.optim.SGD.__module__)
    decide, own_step = GradScaleDecision.decide, module.sgd

    def decided(decision: GradScaleDecision, scale: Tensor | None) -> None:
        if not decision.decided:
            events.append("scale")
        decide(decision, scale)

    def stepped(params: list[Tensor], *arguments: Any, **options: Any) -> None:
        if params and threading.current_thread() is threading.main_thread():
            events.append("device")
        own_step(params, *arguments, **options)

    class Later(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Resident(Chain):
        def configure_optimizers(self) -> Any:
            return (Later if clips_later else torch.optim.SGD)(self.parameters(), lr=0.01)

    register_optimizer(Later)
    monkeypatch.setattr(GradScaleDecision, "decide", decided)
    monkeypatch.setattr(module, "sgd", stepped)
    strategy = SSDOffloadStrategy(min_bytes=1, gpu_memory="5KiB", clip="deferred")
    make_trainer(tmp_path, strategy, limit_train_batches=2, gradient_clip_val=1e-3).fit(Resident([]), loader())
    assert events == (["device", "scale"] if clips_later else ["scale", "device"]) * 2


def test_overlap_naive_is_serial_and_none_steps_after_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naive = events_of(tmp_path, monkeypatch, overlap="naive")[1]
    assert [index for kind, index in naive if kind == "serial"] == [3, 2, 1, 0]
    monkeypatch.undo()
    none = events_of(tmp_path, monkeypatch, overlap="none")[1]
    last = none.index(("backward", 0))
    assert all(none.index(("speculative", unit)) > last for unit in range(UNITS))


def test_weights_are_fetched_ahead_and_released_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two units, the next one is prefetched before its forward, and the previous one is evicted."""
    step = events_of(tmp_path, monkeypatch, gpu_memory="2KiB")[1]
    for unit in range(1, UNITS - 1):
        assert step.index(("want", unit)) < step.index(("forward", unit))
    assert step.index(("release", 0)) < step.index(("forward", 3))


class Shuffled(Chain):
    """Blocks that are not used in the order of their registration."""

    ORDER = (2, 0, 3, 1)


def test_the_order_of_uses_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = events_of(tmp_path, monkeypatch, Shuffled, gpu_memory="2KiB")[1]
    for before, unit in pairwise(Shuffled.ORDER):
        assert ("want", unit) in step[step.index(("forward", before)) : step.index(("forward", unit))]


def test_the_first_backward_fetches_ahead_in_reverse_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = events_of(tmp_path, monkeypatch, gpu_memory="2KiB")[0]
    for unit in (1, 0):
        assert ("want", unit) in step[step.index(("backward", unit + 2)) : step.index(("backward", unit))]


def test_weights_that_find_no_memory_ahead_are_loaded_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has memory for one unit of the two in the budget: no prefetch succeeds, and no micro-batch fails."""
    resize, unit_bytes, resident, failures = torch.UntypedStorage.resize_, [0], set[int](), []

    def limited(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes:
            unit_bytes[0] = unit_bytes[0] or nbytes
            if nbytes == unit_bytes[0] and resident - {storage._cdata}:
                failures.append(storage)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            resident.add(storage._cdata)
        else:
            resident.discard(storage._cdata)
        return resize(storage, nbytes)

    def trained(**arguments: Any) -> Chain:
        torch.manual_seed(0)
        model = Chain([])
        strategy = SSDOffloadStrategy(states="host", min_bytes=1, offload="none", path=tmp_path, **arguments)
        make_trainer(tmp_path, strategy, max_epochs=1).fit(model, loader(3))
        return model

    expected = trained()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", limited)
    model = trained(gpu_memory="2KiB")
    assert len([kind for kind, _ in model.events if kind == "forward"]) == 3 * UNITS and failures
    assert_same(model, expected)


class ReadsLate(Chain):
    """Weights are read in backward, after the gradient of their block was complete."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.output.register_hook(self.read)
        return loss

    def read(self, gradient: Tensor) -> None:
        self.blocks[3].up.weight.detach().norm()  # type: ignore[union-attr, operator]

    def after(self, index: int, x: Tensor) -> None:
        if index == 0:
            self.output = x


class UsesDetached(Chain):
    """Weights are used once more without a gradient."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch = [self.blocks[0](batch[0]) @ self.blocks[3].up.weight.detach()]  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [ReadsLate, UsesDetached])
def test_weights_of_a_block_whose_step_has_begun_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[Chain]
) -> None:
    """They may have the next step's values."""
    with pytest.raises(RuntimeError, match=r"after their gradient was complete.* Set `overlap='none'`"):
        events_of(tmp_path, monkeypatch, model)
    monkeypatch.undo()
    events_of(tmp_path, monkeypatch, model, overlap="none")


def test_weights_of_the_next_forward_are_fetched_when_a_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefetch overlaps with loading the next batch, because it does not wait for the begin of that forward."""
    for step in events_of(tmp_path, monkeypatch)[:-1]:
        submitted, end = step.index(("speculative", 0)), len(step) - 1
        assert ("want", 0) in step[submitted:end]


class HeldJobs(Chain):
    """Jobs of a step are queued from the backward on, and run when the step has ended."""

    def hold(self, model_states: Any, wait: Callable[[], object]) -> None:
        model_states.steps._worker.submit(wait)

    def on_before_backward(self, loss: Tensor) -> None:
        self.ended = threading.Event()
        self.hold(self.trainer.strategy.model_states, lambda: self.ended.wait(60))  # type: ignore[union-attr]

    def on_train_batch_end(self, *_: Any) -> None:
        self.events.append(("released", 0))
        self.ended.set()
        super().on_train_batch_end()


@pytest.mark.parametrize("clip", ["speculative", "deferred"])
def test_queued_jobs_run_in_the_order_of_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: Any
) -> None:
    for step in events_of(tmp_path, monkeypatch, HeldJobs, clip=clip, clip_norm=1e3)[1:-1]:
        assert [index for kind, index in step if kind == clip] == [3, 2, 1, 0]
        jobs = step[step.index(("released", 0)) :]
        assert [index for kind, index in jobs if kind == "step"] == [0, 1, 2, 3]


class HeldReads(HeldJobs):
    """States of a step are requested from the backward on, and read when the step has ended."""

    def hold(self, model_states: Any, wait: Callable[[], object]) -> None:
        stores = model_states.stores
        model_states.staging.states._worker.submit(wait)

        def stage(buffer: SSDBuffer, memory: Tensor | None, *, read: bool, urgency: Any = None) -> Any:
            (flat,) = [flat for flat, store in stores.items() if buffer in store.buffers]
            self.events.append(("read", int(flat.param_views[0].name.split(".")[1])))
            return read_buffer(buffer, memory, read=read, urgency=urgency)

        SSDBuffer.stage = stage  # type: ignore[method-assign]


read_buffer = SSDBuffer.stage


def test_queued_reads_of_states_are_made_in_the_order_of_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSDBuffer, "stage", read_buffer)  # put back at the end
    for step in events_of(tmp_path, monkeypatch, HeldReads, states="ssd", offload="none")[1:-1]:
        reads = step[step.index(("released", 0)) :]
        assert list(dict.fromkeys(index for kind, index in reads if kind == "read")) == [0, 1, 2, 3]


class Call(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def in_backward(function: Callable[[], None], operations: int) -> None:
    """Calls `function` in an autograd node of the calling thread, whose number depends on `operations`."""
    x = torch.zeros(1, requires_grad=True)
    for _ in range(operations):
        x = x.sin()
    Call.apply(x, function).sum().backward()


class TwoThreads(pl.Callback):
    """Two threads of one backward: autograd's, and the training thread, which runs operations on the CPU."""

    fetches = 0
    resident = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        states = trainer.strategy.model_states  # type: ignore[union-attr]
        stream: ParamPrefetcher = states._prefetcher
        stream.check_caller = lambda: None  # type: ignore[method-assign]  # as for autograd's threads of a GPU
        stream.evict_all()
        first, *others = states.stores
        into, arrived = states._copies.h2d, threading.Event()

        def held(*args: Any, **kwargs: Any) -> Any:
            self.fetches += 1
            if self.fetches == 1:
                other.start()
                assert arrived.wait(60)  # the other thread waits for this one, or begins a second prefetch
            else:
                arrived.set()
            return into(*args, **kwargs)

        other = threading.Thread(target=stream.unshard, args=(first,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(states._copies, "h2d", held)
            patch.setattr(stream, "_lock", WatchedLock(arrived))
            stream.unshard(first)
            other.join()

        def node() -> None:
            stream.unshard(first)
            thread = threading.Thread(target=in_backward, args=(lambda: [stream.unshard(flat) for flat in others], 5))
            thread.start()
            thread.join()
            self.resident = first.resident  # this thread may still have to launch its kernels

        in_backward(node, 1)


def test_two_threads_fetch_weights_once_and_evict_none_that_the_other_uses(tmp_path: Path) -> None:
    threads = TwoThreads()
    trainer = make_trainer(
        tmp_path,
        SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B"),
        max_epochs=None,
        max_steps=1,
        callbacks=[threads],
    )
    trainer.fit(Chain([]), loader())
    assert threads.fetches == 1
    assert threads.resident
