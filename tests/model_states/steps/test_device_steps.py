"""Optimizer steps on the device of offloaded values: the numbers of plain Lightning, memory, order and failures.

On a CPU "device", the device's kernels are those of the CPU.
"""

import contextlib
import copy
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.device import CPUCopyEngine, Worker
from lightning_ssd.futures import Future, ended, finished
from lightning_ssd.model_states import build
from lightning_ssd.model_states.gradients.gradient import Gradient
from lightning_ssd.model_states.gradients.waiting_gradient import WaitingGradient
from lightning_ssd.model_states.steps.device_stepper import DeviceStepper
from lightning_ssd.model_states.steps.device_steps import DeviceSteps
from lightning_ssd.model_states.steps.piece_transfers import CUT, pieces
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
from lightning_ssd.model_states.stores.layout import Layout
from lightning_ssd.model_states.stores.state_store import StateStore, pin_values
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.storage import Slab
from tests.support.compare import assert_same, same
from tests.support.device_steps import Shared
from tests.support.held_copies import HeldCopies
from tests.support.late_device import LateEngines
from tests.support.models import Model
from tests.support.moves import Mover
from tests.support.products import combinations
from tests.support.state_stores import CPU, STATES, Tiers, make_layout, masters_of, open_store, weights_of
from tests.support.states import assert_nothing_is_left, offloading, ssd, train
from tests.support.steps import Stepped

pytestmark = pytest.mark.timeout(120)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True, maximize=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@combinations(
    "states, optimizer, precision, state_format, accumulate, clip",
    ["host", "ssd"],
    [adamw, adam, fused, momentum],
    ["32-true", "bf16-mixed", "bf16-true"],
    ["fp32", "split", "bf16"],
    [1, 3],
    [None, ("auto", "norm"), ("deferred", "norm"), ("speculative", "norm"), ("auto", "value")],
    quick=[
        ("host", adamw, "32-true", "fp32", 1, ("deferred", "norm")),
        ("ssd", fused, "bf16-true", "split", 1, ("speculative", "norm")),
        ("ssd", adamw, "bf16-true", "bf16", 1, ("deferred", "norm")),
    ],
    # Lightning refuses to clip for a fused optimizer in mixed precision.
    possible=lambda states, optimizer, precision, state_format, accumulate, clip: (
        (optimizer is not fused or precision != "bf16-mixed" or clip is None)
        and (state_format != "bf16" or optimizer in (adamw, fused))
    ),
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: str,
    optimizer: Any,
    precision: Any,
    state_format: Any,
    accumulate: int,
    clip: Any,
) -> None:
    """Weights, losses and optimizer states, bit for bit; other units are stepped by the device in each step.

    Gradients of some of them stay on the device.
    """
    # Without a window of one micro-batch, whose step the device could make.
    how: dict[str, Any] = dict(precision=precision, accumulate_grad_batches=accumulate, limit_train_batches=6)
    if clip is not None:
        how |= {"gradient_clip_val": 0.5 if clip[1] == "norm" else 1e-3, "gradient_clip_algorithm": clip[1]}
    strategy = dict(clip="auto" if clip is None else clip[0], state_format=state_format)
    plain = precision != "bf16-true" and state_format == "fp32"  # no fp32 masters there, and exact ties are rounded up
    expected = train(tmp_path, "auto" if plain else offloading(overlap="none", **strategy), Model(optimizer), **how)
    shared = Shared(monkeypatch)
    assert_same(train(tmp_path, offloading(states, **strategy), Model(optimizer), **how), expected)
    assert (shared.steps > shared.waiting > 0) == (accumulate == 1)


@pytest.mark.parametrize(("gpu_memory", "selected"), [("100kB", False), ("1MB", True)])
def test_pieces_take_memory_of_prefetched_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_memory: Any, selected: bool
) -> None:
    """Without room for them and three units, the CPU makes all steps."""
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**15)
    found: list[bool] = []
    end = StepScheduler.end

    def end_and_plan(scheduler: StepScheduler) -> None:
        end(scheduler)
        found.append(scheduler._device_steps.plan(scheduler._device_steps._order, ()))

    monkeypatch.setattr(StepScheduler, "end", end_and_plan)
    train(tmp_path, offloading(gpu_memory=gpu_memory), Model(), max_epochs=1)
    assert found and set(found) == {selected}


def test_no_step_runs_while_values_are_page_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the CPU may allocate or free a second version, and pages that are freed can't be locked."""
    calls: list[str] = []
    monkeypatch.setattr(Slab, "pin", lambda slab: calls.append("pin"))
    copies: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(DeviceSteps, "_make_stepper", lambda steps: True)
    layout = Layout(
        FlatParameter("flat", [("w", nn.Parameter(torch.zeros(5)))], torch.float32, CPU), False, STATES, True, 1
    )
    with open_store(tmp_path, ("host", "host"), layout) as (store, _):
        stores = {layout.flat: store}
        steps = DeviceSteps(stores, [layout.flat], copies, SimpleNamespace(), lambda: calls.append("drain"))  # type: ignore[arg-type]
        assert steps.plan([layout.flat], ())
    assert calls == ["drain", "pin", "pin"]


def test_staging_memory_is_page_locked_for_values_on_ssds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(Slab, "pin", lambda slab: locked.append(slab.tensor.numel()))
    with open_store(tmp_path, ("host", "ssd"), make_layout(1)) as (store, scratch):
        pin_values([store])
        assert locked == [store.flat.nbytes, scratch.states.pool.budget]


@pytest.mark.parametrize(("states", "clip"), [("host", "deferred"), ("ssd", "speculative"), ("ssd", None)])
def test_a_device_that_is_behind_the_host_has_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, clip: Any
) -> None:
    """No wait is missing, and no memory has another owner too early."""
    how: dict[str, Any] = {"gradient_clip_val": 0.5 if clip else None, "max_epochs": 1}
    expected = train(tmp_path, "auto", Model(), **how)
    shared = Shared(monkeypatch)
    monkeypatch.setattr(LateEngines, "made", [])
    monkeypatch.setattr(build, "make_copy_engine", LateEngines)
    assert_same(train(tmp_path, offloading(states, clip=clip or "auto"), Model(), **how), expected)
    assert shared.steps > 0 and len(LateEngines.made) == 2
    assert LateEngines.all_violations() == []
    assert "late-device" not in [thread.name for thread in threading.enumerate()]


def test_states_that_move_and_checkpoints_amid_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What user code reads after each step is plain Lightning's; units move between all tiers."""

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

    how: dict[str, Any] = {"gradient_clip_val": 0.5, "max_epochs": 1}
    plain, ours = Reads(), Reads()
    expected = train(tmp_path, "auto", Model(), callbacks=[plain], **how)
    shared = Shared(monkeypatch)
    mover = Mover(1)
    assert_same(train(tmp_path, ssd(tier="ssd"), Model(), callbacks=[ours, mover], **how), expected)
    assert_same(ours.read, plain.read)
    assert shared.steps > 0 and mover.moves > 2


class Lost(CPUCopyEngine):
    """Copies of the device's steps, which fail in one direction from a number of calls on."""

    calls_left = 0
    direction = "d2h"

    def sibling(self) -> CPUCopyEngine:
        return Failing(self.device)


class Failing(CPUCopyEngine):
    """See `Lost`."""

    def _call(self, direction: str) -> None:
        if direction == Lost.direction:
            Lost.calls_left -= 1
            if Lost.calls_left < 0:
                raise RuntimeError("the device is lost")

    def d2h(self, *arguments: Any, **named: Any) -> Any:
        self._call("d2h")
        return super().d2h(*arguments, **named)

    def h2d(self, *arguments: Any, **named: Any) -> Any:
        self._call("h2d")
        return super().h2d(*arguments, **named)


def test_a_training_whose_copies_fail_ends_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names values that are lost, since they were overwritten in part."""
    Shared(monkeypatch, share=1.0)
    monkeypatch.setattr(build, "make_copy_engine", Lost)
    monkeypatch.setattr(Lost, "calls_left", 22)
    with pytest.raises(RuntimeError, match="the device is lost") as raised:
        train(tmp_path, offloading(clip="deferred"), Model(), gradient_clip_val=0.5)
    assert "are NaN now" in "".join(raised.value.__notes__)
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(("direction", "kept"), [("d2h", 0.0), ("h2d", 1.0)])
def test_the_cpu_makes_steps_whose_copies_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, kept: float
) -> None:
    """No value was overwritten before. Gradients that have stayed on the device are copied to the host."""
    expected = train(tmp_path, "auto", Model(), gradient_clip_val=0.5)
    shared = Shared(monkeypatch, share=1.0, kept=kept)
    monkeypatch.setattr(build, "make_copy_engine", Lost)
    monkeypatch.setattr(Lost, "calls_left", 0)
    monkeypatch.setattr(Lost, "direction", direction)
    assert_same(train(tmp_path, offloading(clip="deferred"), Model(), gradient_clip_val=0.5), expected)
    assert shared.steps > 0 > Lost.calls_left and (shared.waiting > 0) == (kept > 0)


def test_a_gradient_that_a_lost_device_has_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy to the host succeeds: training ends with the error."""
    shared = Shared(monkeypatch, share=1.0, kept=1.0)
    monkeypatch.setattr(build, "make_copy_engine", Lost)
    monkeypatch.setattr(Lost, "calls_left", 0)
    with pytest.raises(RuntimeError, match="the device is lost"):
        train(tmp_path, offloading(clip="deferred"), Model(), gradient_clip_val=0.5)
    assert shared.waiting > 0
    assert_nothing_is_left(tmp_path)


# ---- one step of one flat parameter ----


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceStepper]:
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**15)
    made = DeviceStepper(HeldCopies())
    yield made
    made.close()


def copies_of(stepper: DeviceStepper) -> HeldCopies:
    assert isinstance(stepper._copies, HeldCopies)
    return stepper._copies


@contextlib.contextmanager
def stepped(
    path: Path,
    worker: Worker,
    versions: int,
    scale: "Future[float | None] | None" = None,
    tiers: Tiers = ("host", "host"),
    *,
    waiting: bool = False,
) -> Iterator[Stepped]:
    """Yields a step of three parameters, which have many pieces, from fp32 weights that `weights_of` returns.

    `waiting`: the gradient is on the device, and host memory has none.
    """
    shapes = [(70, 50), (7,), (9000,)]
    parameters = [(str(shape), nn.Parameter(torch.zeros(shape))) for shape in shapes]
    layout = Layout(FlatParameter("flat", parameters, torch.float32, CPU), False, STATES, steps=True, versions=versions)
    with open_store(path, tiers, layout, staging=2**18) as (store, _):
        made = Stepped(store, worker, finished(0.5) if scale is None else scale, arrived=[True] * 3)
        if waiting:
            made.step = replace(made.step, waiting=moved_to_device(made.gradient, store.flat))
        yield made


def moved_to_device(gradient: Gradient, flat: FlatParameter) -> WaitingGradient:
    """Returns the gradient in host memory on the device instead."""
    values = [view.flatten(view.of(gradient.host_grad).clone()) for view in flat.param_views]
    gradient.host_grad.fill_(float("nan"))
    return WaitingGradient(flat, values, None, gradient)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(CUT, 4 * CUT))
def test_pieces_have_all_elements_once(sizes: list[int], elements: int) -> None:
    parameters = [(str(size), nn.Parameter(torch.zeros(size))) for size in sizes]
    flat = FlatParameter("flat", parameters, torch.float32, CPU)
    made = list(pieces(flat, elements))
    starts = [piece.start for piece in made]
    assert [0, *(piece.end for piece in made)] == [*starts, flat.numel]
    assert all(start % CUT == 0 for start in starts)
    assert all(0 < piece.end - piece.start <= elements for piece in made)
    assert all(piece.start <= start < start + numel <= piece.end for piece in made for start, numel, *_ in piece.spans)
    stepped = [element for piece in made for start, numel, *_ in piece.spans for element in range(start, start + numel)]
    assert stepped == [view.start + index for view in flat.param_views for index in range(view.numel)]


def num_pieces(store: StateStore) -> int:
    """Returns the pieces of a step with weights, two states and gradient in fp32."""
    return len(list(pieces(store.flat, DeviceStepper.PIECE_BYTES // 16)))


def torchs(store: StateStore) -> list[Tensor]:
    parameters = [nn.Parameter(values) for values in weights_of(store.layout)]
    for parameter, values in zip(parameters, weights_of(store.layout, seed=2), strict=True):
        parameter.grad = values * 0.5
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()
    return [parameter.detach() for parameter in parameters]


@combinations(
    "versions, tiers, waiting",
    [1, 2],
    [("host", "host"), ("host", "ssd"), ("ssd", "ssd")],
    [False, True],
    quick=[(1, ("host", "host"), True)],
)
def test_a_failure_at_any_copy_leaves_the_step_to_the_cpu(
    tmp_path: Path,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    versions: int,
    tiers: Tiers,
    waiting: bool,
) -> None:
    """Or values are lost and can't be read, if some were overwritten in place; then nothing is committed."""
    in_place = versions == 1 and "host" in tiers
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**15)
    outcomes: list[str] = []
    for fail_at in itertools.count(2):  # the first call orders the memory of the pieces
        stepper = DeviceStepper(HeldCopies())
        with stepped(tmp_path, worker, versions, tiers=tiers, waiting=waiting) as made:
            store, copies = made.step.store, copies_of(stepper)
            copies.fail_at = fail_at
            if versions == 2:
                assert store.buffers.add_second()
            weights, done = made.step.on_device(stepper, [])
            ended(done).result(timeout=60)
            assert stepper.failed == (len(copies.calls) >= fail_at)
            if in_place and stepper.failed and "d2h" in copies.calls[: fail_at - 1]:
                for future in (weights, done, store.stage()):
                    with pytest.raises(RuntimeError, match="the device is lost"):
                        future.result(timeout=60)
                assert store.steps == 0
                outcomes.append("lost")
            else:
                weights.result(timeout=60)
                assert done.exception() is None and store.steps == 1 and same(masters_of(store), torchs(store))
                outcomes.append("made")
            assert store.staging is not None and store.staging.states.pool.used_bytes == 0
        stepper.close()
        if not stepper.failed:
            break
    assert len(outcomes) > 20 and ("lost" in outcomes) == in_place


def test_pieces_are_bounded_and_weights_come_first(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """No more pieces are on the device than have memory; the step is committed when all its copies have ended."""
    copies = copies_of(stepper)
    copies.held = []
    with stepped(tmp_path, worker, 1) as made:
        store = made.step.store
        ends = 2 * num_pieces(store)
        assert ends > 2 * DeviceStepper.PIECES
        weights, done = made.step.on_device(stepper, [])
        for end in range(0, ends, 2):
            copies.until("on_d2h", min(ends, end + 2 * DeviceStepper.PIECES))
            assert not weights.done() and not done.done()
            copies.held[end].set_result(None)
            if end == ends - 2:
                weights.result(timeout=60)
                now = store.stage().result().weights
                assert same([view.of(now) for view in store.flat.param_views], torchs(store))
            assert not done.done() and store.steps == 0
            copies.held[end + 1].set_result(None)
        done.result(timeout=60)
        assert store.steps == 1 and same(masters_of(store), torchs(store))


@pytest.mark.parametrize(("tiers", "versions"), [(("host", "ssd"), 1), (("ssd", "host"), 2), (("ssd", "ssd"), 2)])
def test_values_on_ssds_are_written_when_all_copies_have_ended(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, tiers: Tiers, versions: int
) -> None:
    """They keep their staging memory until then. The next forward waits, and reads the new weights."""
    copies, scale = copies_of(stepper), Future[float | None]()
    copies.held = []
    with stepped(tmp_path, worker, versions, scale, tiers) as made:
        store, before = made.step.store, weights_of(made.step.store.layout)
        store.drain()
        ends = 2 * num_pieces(store)
        weights, done = made.step.on_device(stepper, [])
        store.announce_step(weights, done)
        target = torch.zeros(store.flat.nbytes, dtype=torch.uint8)
        prefetched = store.prefetch_to(target, None)
        pool = store.staging.states.pool  # type: ignore[union-attr]
        assert pool.used_bytes == 0  # nothing is read before the scale is known
        scale.set_result(0.5)
        for end in range(0, ends, 2):
            copies.until("on_d2h", min(ends, end + 2 * DeviceStepper.PIECES))
            for future in copies.held[end : end + 2]:
                assert pool.used_bytes > 0 and not weights.done() and store.steps == 0
                future.set_result(None)
        prefetched.result(timeout=60)
        assert weights.done() and done.exception() is None and store.steps == 1
        store.drain()
        assert pool.used_bytes == 0
        now = target.view(torch.float32)
        assert same([view.of(now) for view in store.flat.param_views], torchs(store))
        assert same(masters_of(store), torchs(store)) and made.jobs == []
        if versions == 2:
            store.revert()
            assert same(masters_of(store), before)


@pytest.mark.parametrize("waiting", [False, True])
def test_the_cpu_steps_what_was_read_if_the_device_can_not(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, waiting: bool
) -> None:
    """Values on SSDs are read once. A gradient on the device is copied to the host."""
    with stepped(tmp_path, worker, 1, tiers=("ssd", "ssd"), waiting=waiting) as made:
        store = made.step.store
        read = store.staging.store.stats().bytes_read  # type: ignore[union-attr]
        made.step = replace(made.step, arrived=[True, False, True])
        made.step.on_device(stepper, [])[1].result(timeout=60)
        assert store.staging.store.stats().bytes_read - read < 4 * store.flat.nbytes  # type: ignore[union-attr]
        assert store.steps == 1 and "h2d" not in copies_of(stepper).calls
        new, all_new = masters_of(store), torchs(store)
        assert torch.equal(new[0], all_new[0]) and torch.equal(new[2], all_new[2])


@pytest.mark.parametrize("end", ["made", "skipped", "failed"])
def test_a_gradient_on_the_device_belongs_to_the_step_until_it_has_ended(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, end: str
) -> None:
    """It is copied neither to the host nor from there, and its memory is free then."""
    copies, scale = copies_of(stepper), Future[float | None]()
    with stepped(tmp_path, worker, 1, scale, waiting=True) as made:
        store, waiting = made.step.store, made.step.waiting
        assert waiting is not None
        memory = [weakref.ref(values) for values in waiting._values]
        before = weights_of(store.layout)
        copies.held = []
        _, done = made.step.on_device(stepper, [])
        assert all(reference() is not None for reference in memory)
        if end == "failed":
            scale.set_exception(RuntimeError("no scale"))
        else:
            scale.set_result(0.5 if end == "made" else None)
        for number in range(2 * num_pieces(store) if end == "made" else 0):
            copies.until("on_d2h", min(2 * num_pieces(store), number // 2 * 2 + 2 * DeviceStepper.PIECES))
            assert all(reference() is not None for reference in memory) and not done.done()
            copies.held[number].set_result(None)
        ended(done).result(timeout=60)
        assert (done.exception() is not None) == (end == "failed")
        assert all(reference() is None for reference in memory)
        assert same(masters_of(store), torchs(store) if end == "made" else before)
        pieces_made = num_pieces(store) if end == "made" else 0
        assert copies.calls.count("h2d") == copies.calls.count("d2h") == 3 * pieces_made  # weights and two states


@pytest.mark.parametrize("versions", [1, 2])
def test_a_copy_that_fails_on_the_device_leaves_no_mixed_values(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, versions: int
) -> None:
    """All copies were issued. The CPU makes the step if the values before are whole; else they are lost."""
    copies = copies_of(stepper)
    copies.held = []
    with stepped(tmp_path, worker, versions) as made:
        store = made.step.store
        if versions == 2:
            assert store.buffers.add_second()
        ends = 2 * num_pieces(store)
        _, done = made.step.on_device(stepper, [])
        for end in range(ends):
            copies.until("on_d2h", min(ends, end // 2 * 2 + 2 * DeviceStepper.PIECES))
            if end == 3:
                copies.held[end].set_exception(RuntimeError("the device is lost"))
            else:
                copies.held[end].set_result(None)
        ended(done).result(timeout=60)
        if versions == 2:
            assert store.steps == 1 and same(masters_of(store), torchs(store))
        else:
            with pytest.raises(RuntimeError, match="the device is lost"):
                store.stage().result(timeout=60)
            assert store.lost and store.steps == 0


@pytest.mark.parametrize("begun", [False, True], ids=["waits for the scale", "waits for memory"])
def test_closing_ends_every_step(tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """No future stays open."""
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**15)
    stepper = DeviceStepper(HeldCopies())
    copies, scale = copies_of(stepper), Future[float | None]()
    with stepped(tmp_path, worker, 1, scale) as made:
        weights, done = made.step.on_device(stepper, [])
        if begun:
            copies.held = []
            scale.set_result(0.5)
            copies.until("on_d2h", 2 * DeviceStepper.PIECES)
        stepper.close()
        if begun:
            for future in copies.held or []:
                future.set_result(None)
        else:
            scale.set_exception(RuntimeError("training ended"))
        for future in (weights, done):
            with pytest.raises(RuntimeError, match="training ended"):
                future.result(timeout=60)
        assert made.step.store.lost == begun


@contextlib.contextmanager
def two_steps(path: Path, worker: Worker) -> Iterator[tuple[Stepped, Stepped]]:
    """Yields steps of two flat parameters; the second one is the more urgent one."""
    folders = [path / name for name in ("late", "urgent")]
    for folder in folders:
        folder.mkdir()
    with stepped(folders[0], worker, 1) as late, stepped(folders[1], worker, 1) as urgent:
        late.step, urgent.step = replace(late.step, priority=1), replace(urgent.step, priority=0)
        yield late, urgent


def is_of(source: Tensor, made: Stepped) -> bool:
    """Whether `source` is a part of the stored values."""
    memory = [array.untyped_storage() for array in made.step.store.stage().result().by_key().values()]
    return source.untyped_storage().data_ptr() in [storage.data_ptr() for storage in memory]


def test_urgent_values_overtake_others_at_the_copies(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """They wait for the pieces that are being copied, and not for those that were submitted before."""
    copies = copies_of(stepper)
    copies.held_in, num_arrays = [], 4  # weights, two states and the gradient
    with two_steps(tmp_path, worker) as (late, urgent):
        futures = []
        for made, ahead in ((late, DeviceStepper.AHEAD), (urgent, 0)):
            futures.append(made.step.on_device(stepper, [])[1])
            if ahead:
                copies.until("h2d", num_arrays * ahead)
        begun = len(copies.sources)
        copies.held_in[0].set_result(None)
        copies.until("h2d", begun + num_arrays)
        assert is_of(copies.sources[0], late) and is_of(copies.sources[begun], urgent)
        release, copies.held_in = copies.held_in, None
        for future in release[1:]:
            future.set_result(None)
        for done in futures:
            done.result(timeout=60)


@pytest.mark.parametrize("room", [4, 3], ids=["enough", "too little"])
def test_pieces_take_device_memory_while_steps_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """An allocation that fails is no error, and the budget of weights is as before without a stepper."""
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**10)
    budget = 64 * 2**10

    class Little(HeldCopies):
        def empty(self, nbytes: int) -> Tensor:
            if nbytes > room * 2**10:
                raise torch.OutOfMemoryError
            return super().empty(nbytes)

    def change(nbytes: int) -> bool:
        nonlocal budget
        budget += nbytes
        return True

    prefetcher: Any = SimpleNamespace(change_budget=change)
    flat = FlatParameter("flat", [("w", nn.Parameter(torch.zeros(2**14)))], torch.float32, CPU)
    with open_store(tmp_path, ("host", "host"), Layout(flat, False, STATES, True, 1)) as (store, _):
        drains: list[None] = []
        steps = DeviceSteps({flat: store}, [flat], Little(), prefetcher, lambda: drains.append(None))
        assert steps.plan([flat], ()) == (room == DeviceStepper.PIECES)
        assert budget == (60 if room == DeviceStepper.PIECES else 64) * 2**10
        assert steps.plan([], ())
        assert budget == 64 * 2**10 and len(drains) == (room == DeviceStepper.PIECES)  # no step uses the freed memory
