"""Gradients that are computed in parts, late, or in excess of the memory of device or host."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import shared_gradients
from lightning_ssd.device import CPUCopyEngine
from lightning_ssd.model_states import build
from lightning_ssd.model_states.gradients import gradient
from lightning_ssd.model_states.gradients.copies_in_flight import CopiesInFlight
from lightning_ssd.model_states.gradients.norms import GradientNorms
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
from tests.support.access import Toy, compare, fit
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies
from tests.support.models import BlocksModel, ToyModel
from tests.support.trainings import nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(60)


class Repeated(BlocksModel):
    """A block that is used several times under reentrant checkpointing, whose backward runs once for each use."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(3):
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
        output: Tensor = self.blocks[2](x)
        return output


class Tied(BlocksModel):
    """Weights of the first block are used again under reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        x = self.blocks[2](self.blocks[1](first(x)))
        output: Tensor = checkpoint(lambda y: nn.functional.linear(y, first.up.weight), x, use_reentrant=True)
        return output


class TiedBefore(BlocksModel):
    """Weights of the last block are used before under reentrant checkpointing, whose gradients arrive last."""

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.blocks[2]
        x = x.detach().requires_grad_()
        x = checkpoint(lambda y: nn.functional.linear(y, last.up.weight)[:, : y.shape[1]], x, use_reentrant=True)
        for block in self.blocks:
            x = block(x)
        return x


class Penalized(BlocksModel):
    """The weights of blocks under reentrant checkpointing are also in the loss, whose gradient arrives first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * torch.stack([parameter.abs().sum() for parameter in self.parameters()]).sum()


class PenalizedLater(Penalized):
    """The loss has no penalty in the first step, when the gradients of a weight are counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = super().training_step if batch_idx else super(Penalized, self).training_step
        return step(batch, batch_idx)


class ReadBetween(Repeated):
    """A hook of a tensor reads a gradient of which a part has arrived, and the part that another parameter has."""

    def forward(self, x: Tensor) -> Tensor:
        if x.grad_fn is None and torch.is_grad_enabled():
            x = x.requires_grad_()
        x = self.blocks[0](x)
        for _ in range(3):
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
            if x.requires_grad:
                x.register_hook(self.read)
        output: Tensor = self.blocks[2](x)
        return output

    def read(self, _: Tensor) -> None:
        for parameter in self.blocks[1].parameters():  # type: ignore[union-attr]
            if parameter.grad is not None:
                self.losses.append(parameter.grad.sum().item())


class Freezing(BlocksModel):
    """Parameters are frozen whose values backward needs after the last gradient of their block."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for block in self.blocks:
                for parameter in (*block.norm.parameters(), block.up.weight):
                    parameter.requires_grad_(False)


IN_PARTS = (Repeated, ReadBetween, Tied, Penalized, PenalizedLater, TiedBefore)


@pytest.mark.parametrize(
    ("module", "states"), [(module, ("host", "ssd")[number % 2]) for number, module in enumerate(IN_PARTS)]
)
def test_gradients_that_arrive_in_parts_are_added_up(tmp_path: Path, module: Any, states: str) -> None:
    compare(tmp_path, module, states)


@pytest.mark.parametrize("module", [ReadBetween, Penalized, Freezing])
def test_gradients_that_arrive_in_parts_are_clipped(tmp_path: Path, module: Any) -> None:
    compare(tmp_path, module, "host", gradient_clip_val=0.5)


class LateGradient(ToyModel):
    """In the third step, a hook runs another backward through a layer whose gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        extra = self.second(batch[0]).mean()
        first = self.first(batch[0])
        if batch_idx == 2:
            first.register_hook(lambda _: extra.backward())
        second = self.second(batch[0])  # created last, so that backward begins with it
        return (first - 1).square().mean() + (second - 1).square().mean()


def test_a_gradient_that_arrives_after_its_step_has_begun_is_an_error(tmp_path: Path) -> None:
    """The step would be made without this gradient."""
    with pytest.raises(RuntimeError, match=r"second\..* arrived after the optimizer step .* Set `overlap='none'`"):
        fit(tmp_path, LateGradient(), "host")
    assert_same(
        fit(tmp_path, LateGradient(), "host", strategy={"overlap": "none"}).state_dict(),
        fit(tmp_path, LateGradient(), None).state_dict(),
    )


def test_a_block_is_not_stepped_before_backward_has_used_its_frozen_parameters(tmp_path: Path) -> None:
    compare(tmp_path, Freezing, "host")


class Checkpointed(BlocksModel):
    """Eight blocks whose forwards are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__(depth=8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradient_memory_that_steps_release_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """Also in the first backward, when the number of gradients of each unit is unknown, and where sums release it."""
    grown: list[int] = []

    class Counted(gradient.Slab):
        def __init__(self, nbytes: int, *, pin: bool) -> None:
            grown.append(nbytes)
            super().__init__(nbytes, pin=pin)

    monkeypatch.setattr(gradient, "Slab", Counted)
    monkeypatch.setattr(shared_gradients, "AT_ONCE", 1)
    compare(tmp_path, Checkpointed, "ssd", accumulate_grad_batches=accumulate)
    assert grown == []


class ToldCopies(LateCopies):
    """Counts the copies to the host that the compute stream has not waited for, and those that a thread waits for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waiting: set[int] = set()
        self.most = 0
        self.num_awaited = 0
        self.num_groups = 0

    def d2h(self, *args: Any, awaited: bool = False, **kwargs: Any) -> Any:
        mark = super().d2h(*args, awaited=awaited, **kwargs)
        self.num_awaited += awaited
        self.waiting.add(mark.number)
        self.most = max(self.most, len(self.waiting))
        return mark

    def d2h_each(self, *args: Any, **kwargs: Any) -> Any:
        self.num_groups += 1
        return super().d2h_each(*args, **kwargs)

    def wait(self, mark: Any) -> None:
        if mark is not None and mark.direction == "d2h":
            # The copies of a stream end in the order in which they were issued.
            self.waiting = {number for number in self.waiting if number > mark.number}
        super().wait(mark)


@pytest.mark.parametrize(("nbytes", "clip"), [(1, None), (2**28, None), (2**28, 1e-3)])
def test_gradients_in_flight_are_bounded_and_waited_for_when_backward_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, clip: float | None
) -> None:
    """Two blocks have eight gradients. With a limit below one gradient, at most one more is in flight.

    If steps wait for the norm of all gradients, it precedes their copies, which are waited for when the step ends.
    """
    engines: list[ToldCopies] = []
    left: list[int] = []
    after_backward: set[int] = set()
    end_backward = StepScheduler.end_backward

    def watched(scheduler: StepScheduler, **named: Any) -> None:
        end_backward(scheduler, **named)
        after_backward.add(len(engines[0].waiting))

    def make(device: torch.device) -> ToldCopies:
        engines.append(ToldCopies(device))
        return engines[-1]

    class Watching(Toy):
        def on_train_batch_end(self, *_: Any) -> None:
            left.append(len(engines[0].waiting))

    monkeypatch.setattr(build, "make_copy_engine", make)
    monkeypatch.setattr(CopiesInFlight, "MAX_BYTES", nbytes)
    monkeypatch.setattr(StepScheduler, "end_backward", watched)
    fit(tmp_path, Watching(), "host", strategy={"offload": "none"}, gradient_clip_val=clip)
    assert left == [0, 0, 0]
    assert max(after_backward) == (8 if clip else 0)
    assert engines[0].most == (2 if nbytes == 1 else 8)
    # Those of a block are copied together, unless that is too much memory.
    assert engines[0].num_groups == (24 if nbytes == 1 else 6)
    # In each of three steps, the last gradients of two blocks.
    assert engines[0].num_awaited == 6


class TwoStreams(CPUCopyEngine):
    """Two compute streams, each with the number of gradients of either one that its work is ordered after."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.compute = 0
        self.ordered_after = [[0, 0], [0, 0]]
        self.num_copies = 0

    def compute_gradient(self, stream: int) -> None:
        self.compute = stream
        self.ordered_after[stream][stream] += 1

    def follow(self, stream: int | None) -> int:
        if stream is not None:
            both = zip(self.ordered_after[self.compute], self.ordered_after[stream], strict=True)
            self.ordered_after[self.compute] = [max(counts) for counts in both]
        return self.compute

    def d2h_each(self, *args: Any, **kwargs: Any) -> Any:
        self.num_copies += 1
        assert self.ordered_after[self.compute] == [self.ordered_after[stream][stream] for stream in (0, 1)]
        return super().d2h_each(*args, **kwargs)


def test_gradients_that_are_copied_together_are_computed_on_any_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code computes weights' gradients on one stream, and those of biases on another one."""
    engines: list[TwoStreams] = []

    def make(device: torch.device) -> TwoStreams:
        engines.append(TwoStreams(device))
        return engines[-1]

    class Computing(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            engines[0].compute = 0
            engines[0].follow(1)  # as at the end of a backward
            for parameter in self.blocks.parameters() if batch_idx == 0 else ():
                parameter.register_hook(lambda grad: engines[0].compute_gradient(grad.dim() - 1))

    monkeypatch.setattr(build, "make_copy_engine", make)
    fit(tmp_path, Computing(), "host", strategy={"offload": "none"})
    assert engines[0].num_copies == 6


def test_no_gradient_stays_on_the_device_between_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first micro-batch are in host memory until the next one's are added. Norms of them would be kept."""
    grads: list[Any] = []
    left: list[int] = []
    measure = GradientNorms.measure

    def noted(norms: GradientNorms, flat: Any, parameter: Any, grad: Tensor, **named: Any) -> None:
        grads.append(weakref.ref(grad))
        measure(norms, flat, parameter, grad, **named)

    class Watching(Toy):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Steps wait for this hook."""

        def on_train_batch_end(self, *_: Any) -> None:
            left.append(sum([grad() is not None for grad in grads]))

    monkeypatch.setattr(GradientNorms, "measure", noted)
    fit(tmp_path, Watching(), "host", accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert len(grads) == 24 and left == [0, 0, 0]


def test_a_step_consumes_all_accumulated_gradients(tmp_path: Path) -> None:
    """Otherwise the next step, of one micro-batch, would use them."""
    pending: list[bool] = []

    class Watching(Toy):
        def on_train_batch_end(self, *_: Any) -> None:
            pending.append(self.trainer.strategy.model_states.gradients.pending)  # type: ignore[union-attr]

    fit(tmp_path, Watching(), "host", accumulate_grad_batches=2)
    assert pending == [True, False, False]


def test_a_step_that_can_not_be_rolled_back_waits_for_the_norm(tmp_path: Path) -> None:
    """A speculative step would be made twice, because all steps are clipped."""

    def make() -> Toy:
        return Toy(optimizer=torch.optim.RMSprop)

    compare(tmp_path, make, "ssd", strategy={"clip": "speculative"}, gradient_clip_val=1e-3)


def test_adding_to_a_gradient_that_a_step_has_consumed_is_an_error(tmp_path: Path) -> None:
    """Steps during backward keep no gradients. `zero_grad` drops all when training starts, and is replaced later."""

    class Replacing(Toy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.zero_grad = lambda set_to_none=True: None

    with pytest.raises(RuntimeError, match="which is gone. Call `optimizer.zero_grad"):
        fit(tmp_path, Replacing(), "host")


def test_a_graph_whose_weights_were_stepped_is_an_error(tmp_path: Path) -> None:
    """As in plain Lightning, whose step changes the saved weights in place."""

    class Retained(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            loss = self.loss(batch[0])
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                self.manual_backward(loss)
            self.seen.append(loss.item())
            optimizer.zero_grad()

    for states in (None, "host", "ssd"):
        assert len(fit(tmp_path, Retained(), states).seen) == 3


def test_a_state_dict_that_would_wait_for_the_end_of_its_own_backward_is_an_error(tmp_path: Path) -> None:
    """The last block's step waits for the norm of all gradients, and backward for the hook that reads its values."""

    class Asking(Toy):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if self.training and x.requires_grad and self.trainer.global_step == 1:
                x.register_hook(lambda _: self.state_dict())
            output: Tensor = self.blocks[1](x)
            return output

    with pytest.raises(RuntimeError, match=r"Set `overlap='none'`"):
        fit(tmp_path, Asking(), "host", strategy={"clip": "deferred"}, gradient_clip_val=1.0)
