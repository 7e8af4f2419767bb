"""The gradient scale of a step, or its error, is copied to the host exactly once."""

import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd import torch_internals as internals
from lightning_ssd.device import CPUCopyEngine, Mark
from lightning_ssd.futures import Future
from lightning_ssd.model_states import build
from lightning_ssd.model_states.gradients import grad_scale
from lightning_ssd.model_states.gradients.grad_scale import Clipping, GradScaleDecision
from lightning_ssd.model_states.gradients.norms import GradientNorms
from tests.support.compare import assert_same
from tests.support.models import BlocksModel
from tests.support.trainings import batches, fit, make_trainer, offloading, rows, small_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


class LateCopies(CPUCopyEngine):
    """d2h copies whose futures complete when the test releases them: a device behind the host."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.pending: list[Future[None]] = []

    def on_d2h(self, mark: Mark) -> "Future[None]":
        self.pending.append(Future())
        return self.pending[-1]


def opened(gate: GradScaleDecision, norm: float) -> "Future[float | None]":
    """Returns the scale of a step whose gradient has the given norm, clipped to 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    gate.begin(defer_to_user_hooks=False)
    gate.decide(gate.clip([parameter], {parameter: torch.tensor(norm)}, limit=1.0))
    return gate.scale


def test_scales_of_many_steps_may_be_in_flight_at_once() -> None:
    copies = LateCopies()
    gate = GradScaleDecision(copies, clip="deferred", needs_norm=True, loss_scaled=False)
    norms = [2.0 + step for step in range(GradScaleDecision.SLOTS)]
    factors = [opened(gate, norm) for norm in norms]
    assert not any(factor.done() for factor in factors)
    for copied in copies.pending:
        copied.set_result(None)
    assert [factor.result() for factor in factors] == pytest.approx([1 / norm for norm in norms], rel=1e-4)
    gate.close()


def test_an_interrupt_in_a_callback_of_the_scale_takes_effect_afterwards() -> None:
    """Steps that wait for the scale begin in callbacks, of which the device's are called while it is decided."""
    gate = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=False)
    begun: list[float | None] = []

    def begin(scale: "Future[float | None]") -> None:
        signal.raise_signal(signal.SIGINT)
        begun.append(scale.result())

    gate.begin(defer_to_user_hooks=False)
    gate.scale.add_done_callback(begin)
    # After a Ctrl-C in a training of this process, Lightning leaves a handler that ignores others.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            gate.decide(torch.tensor([0.5]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == [0.5]
    gate.close()


def test_norms_in_host_memory_are_copied_to_the_device_at_once() -> None:
    """The host waits for the device in each copy, and a model of several ranks has a norm for each parameter."""
    copied: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                copied.append(args[0].numel())
            return func(*args, **kwargs or {})

    gate = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=False)
    gate._copies = CPUCopyEngine(torch.device("meta"))  # a device without a driver
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    here = torch.ones((), device="meta")
    with Copies():
        gate.clip(parameters, dict(zip(parameters, (torch.tensor(2.0), here, torch.tensor(3.0)), strict=True)), 1.0)
    gate.close()
    assert copied == [2]


def test_a_slot_of_a_scale_is_used_again_after_the_scale_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one more scale than slots: the host waits for the first one, whose copy the device makes then."""
    copies = LateCopies()
    decision = GradScaleDecision(copies, clip="deferred", needs_norm=True, loss_scaled=False)

    def wait(scales: "Sequence[Future[float | None]]", work: str) -> None:
        copies.pending.pop(0).set_result(None)
        assert all(scale.done() for scale in scales)

    monkeypatch.setattr(grad_scale, "wait_for_all", wait)
    norms = [2.0 + step for step in range(GradScaleDecision.SLOTS + 1)]
    scales = [opened(decision, norm) for norm in norms]
    for copied in copies.pending:
        copied.set_result(None)
    assert [scale.result(timeout=0) for scale in scales] == pytest.approx([1 / norm for norm in norms], rel=1e-4)
    decision.close()


class LostDevice(CPUCopyEngine):
    """The device is lost while it copies: futures of d2h copies fail from number `after` on."""

    def __init__(self, device: torch.device, after: int) -> None:
        super().__init__(device)
        self.left = after

    def on_d2h(self, mark: Mark) -> "Future[None]":
        self.left -= 1
        if self.left >= 0:
            return super().on_d2h(mark)
        lost: Future[None] = Future()
        lost.set_exception(RuntimeError("CUDA error: the device is lost"))
        return lost


@pytest.mark.parametrize(
    ("clip", "after"), [(None, 0), (None, 6), ("deferred", 0), ("deferred", 2), ("speculative", 4)]
)
def test_a_device_that_is_lost_at_any_copy_ends_training_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: Any, after: int
) -> None:
    """This includes the norm's copy: jobs that wait for it fail."""
    monkeypatch.setattr(build, "make_copy_engine", lambda device: LostDevice(device, after))
    strategy = offloading(states="host", min_bytes=1, offload="none", **({} if clip is None else {"clip": clip}))
    trainer: pl.Trainer = make_trainer(tmp_path, strategy, gradient_clip_val=None if clip is None else 0.01)
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.fit(small_model(), batches())


class RefusingCopies(CPUCopyEngine):
    """The device is lost before the mark of a scale is recorded."""

    def mark(self, *, awaited: bool = False) -> Mark:
        raise RuntimeError("CUDA error: the device is lost")


def test_a_scale_that_is_not_issued_fails_the_jobs_that_wait_for_it() -> None:
    """Otherwise the end of training would wait for these jobs forever."""
    decision = GradScaleDecision(RefusingCopies(CPU), clip="deferred", needs_norm=True, loss_scaled=False)
    parameter = torch.nn.Parameter(torch.zeros(1))
    decision.begin(defer_to_user_hooks=False)
    scale = decision.clip([parameter], {parameter: torch.tensor(2.0)}, limit=1.0)
    with pytest.raises(RuntimeError, match="the device is lost"):
        decision.decide(scale)
    decision.fail()
    assert str(decision.scale.exception(timeout=0)) == "CUDA error: the device is lost"
    decision.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("clip", "after"), [(None, 9), ("deferred", 1), ("speculative", 20)])
def test_steps_without_a_gradient_release_their_staging_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: Any, after: int
) -> None:
    """16 blocks on SSD share staging memory for a few: the end of training does not wait for it."""
    monkeypatch.setattr(build, "make_copy_engine", lambda device: LostDevice(device, after))
    arguments = {} if clip is None else {"clip": clip}
    strategy = SSDOffloadStrategy(states="ssd", min_bytes=1, offload="none", gpu_memory="1B", **arguments)
    trainer: pl.Trainer = make_trainer(tmp_path, strategy, gradient_clip_val=None if clip is None else 0.01)
    rows = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.fit(BlocksModel(depth=16), rows)


def steps_of(decision: GradScaleDecision, norms: list[float]) -> list[float | None]:
    """Returns the speculated scale of each step; the gradients have these norms, and are clipped to 1."""
    found: list[float | None] = []
    for norm in norms:
        parameter = torch.nn.Parameter(torch.zeros(1))
        decision.begin(defer_to_user_hooks=False)
        found.append(decision.speculate(revertible=True))
        decision.decide(decision.clip([parameter], {parameter: torch.tensor(norm)}, limit=1.0))
        decision.scale.result(timeout=60)
    return found


def test_auto_speculates_while_it_is_seldom_wrong() -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="auto", needs_norm=True, loss_scaled=False)
    speculated = steps_of(decision, [0.5] * 20 + [4.0] * 5 + [0.5] * 20)
    assert speculated[0] is None and speculated[19] == 1.0  # a new training has no earlier norms
    assert None in speculated[20:25]  # they were clipped
    assert speculated[-1] == 1.0
    decision.close()


def test_auto_gives_speculation_up_after_several_wrong_ones_alone() -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="auto", needs_norm=True, loss_scaled=False)
    given_up = []
    for norm in [0.5] * 20 + [4.0] * 2 + [0.5] * 20 + [4.0] * 8:
        steps_of(decision, [norm])
        given_up.append(decision.given_up)
    assert given_up[0] and not any(given_up[12:44]) and given_up[-1]
    decision.close()


@pytest.mark.parametrize(("clip", "expected"), [("speculative", 1.0), ("deferred", None)])
def test_speculative_and_deferred_do_not_depend_on_earlier_clipping(clip: Any, expected: float | None) -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip=clip, needs_norm=True, loss_scaled=False)
    assert steps_of(decision, [0.5, 4.0, 4.0, 4.0, 0.5]) == [expected] * 5
    decision.close()


def test_norms_of_offloaded_and_resident_gradients_are_clipped_as_torch_does() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 70, 9)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    expected = [parameter.grad for parameter in parameters]
    parameters[1].grad, parameters[2].grad = gradients[1].clone(), None
    parameters[0].grad = None
    norms = {parameters[index]: gradients[index].norm() for index in (0, 2)}
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=False)
    decision.begin(defer_to_user_hooks=False)
    decision.decide(decision.clip(parameters, norms, 0.5))
    scale = decision.scale.result(timeout=60)
    assert scale is not None and parameters[1].grad is not None
    found = [gradients[0] * scale, parameters[1].grad, gradients[2] * scale]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if other is not None)
    decision.close()


@pytest.mark.parametrize(("group", "calls"), [(None, 1), (512, 7)])
def test_norms_of_small_gradients_are_measured_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int | None, calls: int
) -> None:
    """In each step of six blocks with two matrices of 256 bytes and four vectors; or in groups of 512 bytes."""
    measured: list[int] = []
    measure = internals.foreach_norm

    def counted(gradients: list[Tensor], **options: Any) -> list[Tensor]:
        measured.append(len(gradients))
        return measure(gradients, **options)

    def make() -> BlocksModel:
        return BlocksModel(functools.partial(torch.optim.AdamW, lr=1e-2), depth=6)

    expected = fit(tmp_path, "auto", make(), rows(3), gradient_clip_val=0.1)
    if group is not None:
        monkeypatch.setattr(GradientNorms, "GROUP_BYTES", group)
    monkeypatch.setattr(internals, "foreach_norm", counted)
    found = fit(tmp_path, SSDOffloadStrategy(states="host", min_bytes=1), make(), rows(3), gradient_clip_val=0.1)
    assert_same(found, expected)
    assert (len(measured), sum(measured)) == (3 * calls, 3 * 6 * 6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), None])
def test_a_gradient_that_is_not_finite_skips_the_step_that_has_it(bad: float | None) -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=True)
    scales = []
    for value in (1.0, bad, 1.0):
        decision.begin(defer_to_user_hooks=False)
        if value is not None:
            decision.check(torch.tensor([0.5, value]))
        found: dict[torch.device, Tensor] = {}
        decision.merge_checks(found)
        decision.decide(torch.tensor([0.125]))
        scales.append(decision.scale.result(timeout=60))
        assert bool(found[CPU]) == (scales[-1] is None)
    assert scales == [0.125, 0.125 if bad is None else None, 0.125]
    decision.close()


def test_a_gradient_on_the_device_that_is_not_finite_skips_the_step_of_offloaded_ones() -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=True)
    decision.begin(defer_to_user_hooks=False)
    decision.check(torch.tensor([0.5]))
    decision.merge_checks({CPU: torch.ones(())})
    decision.decide(torch.tensor([0.125]))
    assert decision.scale.result(timeout=60) is None
    decision.close()


@pytest.mark.parametrize("others", [{}, {CPU: torch.zeros(())}, {CPU: torch.ones(())}])
def test_a_fused_optimizer_makes_up_for_one_step(others: dict[torch.device, Tensor]) -> None:
    """It subtracts the record from its number of steps, which has no dimension."""
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=True)
    decision.begin(defer_to_user_hooks=False)
    decision.check(torch.tensor([float("inf")]))
    found = dict(others)
    decision.merge_checks(found)
    assert torch.equal(found[CPU], torch.ones(()))
    decision.close()


def test_offloaded_gradients_are_clipped_after_they_are_unscaled() -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=True)
    offloaded, resident = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    resident.grad = torch.tensor([4.0])  # unscaled by Lightning
    decision.begin(defer_to_user_hooks=False)
    clipping = Clipping(unscale=torch.tensor([0.125]))
    norms = {offloaded: torch.tensor(3.0 * 8)}  # 3 and 4 have a norm of 5
    clipping.coefficient = decision.clip([offloaded, resident], norms, 1.0, clipping.unscale)
    decision.decide(clipping.scale)
    assert decision.scale.result(timeout=60) == pytest.approx(1 / 5 / 8)
    assert resident.grad.item() == pytest.approx(4 / 5)
    decision.close()


def test_a_step_that_was_not_decided_fails_its_jobs_at_the_end() -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=True, loss_scaled=False)
    decision.begin(defer_to_user_hooks=False)
    decision.fail()
    with pytest.raises(RuntimeError, match="training ended before this optimizer step was made"):
        decision.scale.result(timeout=60)
    decision.close()


@pytest.mark.parametrize("needs_norm", [False, True])
def test_gradients_that_user_code_may_clip_have_no_scale_before_it_has(needs_norm: bool) -> None:
    decision = GradScaleDecision(CPUCopyEngine(CPU), clip="deferred", needs_norm=needs_norm, loss_scaled=False)
    for scale, expected in ((None, 1.0), (torch.tensor([0.5]), 0.5)):
        decision.begin(defer_to_user_hooks=True)
        assert not decision.scale.done()
        decision.decide(scale)
        assert decision.scale.result(timeout=60) == expected
    decision.close()
