"""Gradients that user code clips in manual optimization or with a loss scale, against plain Lightning, bit for bit."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ssd.model_states import build
from tests.support.access import PLACES, Toy, fit
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies
from tests.support.manual_programs import ALGORITHMS, LIMITS, Operation, Program, train

NUMBERS = st.sampled_from([0, 1])
USED = st.sampled_from(["0", "1", "01"])
OPERATIONS = st.one_of(
    *[st.tuples(st.just("backward_of"), USED, st.booleans())] * 4,
    *[st.tuples(st.just("clip"), NUMBERS, ALGORITHMS, LIMITS)] * 3,
    *[st.tuples(st.just("step"), NUMBERS)] * 3,
    *[st.tuples(st.just("zero"), NUMBERS, st.booleans())] * 2,
    st.tuples(st.just("clip_inner"), NUMBERS, ALGORITHMS, LIMITS),
    st.tuples(st.just("clip_by_torch"), NUMBERS, ALGORITHMS, LIMITS),
    st.tuples(st.just("step_twice"), NUMBERS),
    st.tuples(st.just("step_closure"), NUMBERS, USED, ALGORITHMS, LIMITS),
    st.tuples(st.just("zero_module")),
    st.tuples(st.just("read"), NUMBERS),
    st.tuples(st.just("read_one"), NUMBERS),
    st.tuples(st.just("multiply"), NUMBERS, st.sampled_from([0.5, 3.0, float("inf")])),
    st.tuples(st.just("assign"), NUMBERS, st.sampled_from(["bias", "weight"])),
    st.tuples(st.just("drop"), NUMBERS),
    st.tuples(st.just("keep"), NUMBERS),
    st.tuples(st.just("read_kept")),
    st.tuples(st.just("toggle"), NUMBERS),
    st.tuples(st.just("untoggle"), NUMBERS),
    st.tuples(st.just("schedule"), NUMBERS),
    st.tuples(st.just("enlarge"), st.sampled_from([1.0, 1e25, float("nan")])),
)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(st.lists(OPERATIONS, min_size=2, max_size=10), min_size=3, max_size=3),
    kinds=st.tuples(*[st.sampled_from([torch.optim.AdamW, torch.optim.SGD])] * 2),
    precision=st.sampled_from(["32-true", "bf16-mixed", "16-mixed"]),
    scale=st.sampled_from([2.0**16, 1000.0, 2.0**60]),
    late=st.booleans(),
    min_bytes=st.sampled_from([1, 64]),
    states=st.sampled_from(PLACES),
)
def test_programs_of_manual_optimization(
    operations: list[list[Operation]], kinds: Any, precision: str, scale: float, late: bool, min_bytes: int, states: str
) -> None:
    """With 64 bytes as the smallest, biases are on the device."""
    operations = [[("backward_of", "01", True), *of_batch] for of_batch in operations]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        expected = train(Path(folder), lambda: Program(operations, kinds), None, precision, scale)
        if late:
            patch.setattr(build, "make_copy_engine", LateCopies)
        strategy = {"min_bytes": min_bytes}
        found = train(Path(folder), lambda: Program(operations, kinds), states, precision, scale, strategy=strategy)
        assert_same(found, expected)


def summed(module: Any) -> int:
    """Returns the number of flat parameters whose gradients were summed in fp32 on the host; 0 in plain training."""
    states = getattr(module.trainer.strategy, "model_states", None)
    return 0 if states is None else sum(gradient.accum is not None for _, gradient in states.gradients.items())


PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


class Counting(Program):
    """Runs the same operations in each batch, and counts the flat parameters with sums on the host."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__([operations] * 3, (torch.optim.AdamW,) * 2)
        self.sums = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.sums = summed(self)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("algorithms", [[], ["norm"], ["value"], ["norm", "value"]])
@pytest.mark.parametrize("reads", [False, True])
def test_gradients_that_are_clipped_by_hand_are_not_summed_on_the_host(
    tmp_path: Path, algorithms: list[str], precision: str, reads: bool
) -> None:
    """They stay where they were copied to, and the jobs of the steps clip them, unless user code reads them."""
    operations: list[Operation] = [("zero", 0, True), ("zero", 1, True), ("backward_of", "01", True)]
    for number in (0, 1):
        operations += [("clip", number, algorithm, 0.001) for algorithm in algorithms]
        operations += [("read_one", number)] * reads
        operations.append(("step", number))
    found = train(tmp_path, lambda: Counting(operations), "host", precision, 2.0**8)
    assert_same(found, train(tmp_path, lambda: Counting(operations), None, precision, 2.0**8))
    assert bool(found.sums) == reads


class Hooked(Toy):
    """Has hooks between backward and step that read no gradient."""

    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **named: Any) -> None:
        super().configure_gradient_clipping(optimizer, *arguments, **named)

    def on_train_batch_end(self, *_: Any) -> None:
        self.sums = summed(self)


@pytest.mark.parametrize(("algorithm", "scale"), [(None, 2.0**8), ("norm", 2.0**60), ("value", 2.0**8)])
def test_scaled_gradients_that_no_hook_reads_are_not_summed_on_the_host(
    tmp_path: Path, algorithm: str | None, scale: float
) -> None:
    how: Any = {} if algorithm is None else {"gradient_clip_val": 0.001, "gradient_clip_algorithm": algorithm}
    found = train(tmp_path, Hooked, "host", "16-mixed", scale, **how)
    assert_same(found, train(tmp_path, Hooked, None, "16-mixed", scale, **how))
    assert bool(found.sums) == (scale == 2.0**60)  # values that are not finite are looked at


def test_gradients_that_several_backwards_add_to_are_summed_between_them(tmp_path: Path) -> None:
    """The second backward would wait for their sum, which the CPU makes during the forward before it instead."""
    waiting: list[bool] = []

    class Accumulating(Toy):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for rows in batch[0].split(2):
                self.manual_backward(self.loss(rows))
                if (states := getattr(self.trainer.strategy, "model_states", None)) is not None:
                    waiting.append(any(any(gradient.arrived) for _, gradient in states.gradients.items()))
            self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()

    def make() -> Toy:
        module = Accumulating()
        module.automatic_optimization = False
        module.seen.append(0)
        return module

    assert_same(fit(tmp_path, make(), "host"), fit(tmp_path, make(), None))
    assert waiting == [True, False, False, False, False, False]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("by", ["clip", "clip_inner", "clip_by_torch", "multiply"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tensor_that_is_assigned_to_a_gradient_is_changed_in_place(tmp_path: Path, by: str, precision: str) -> None:
    """Reads of other gradients do not replace it, and clipping by the optimizer changes it for user code, too."""

    class Assigning(Program):
        def change(self) -> None:
            self.assign(0)
            assigned = self.blocks[0].up.bias.grad
            self.read(0)
            if by == "multiply":
                assigned.mul_(0.5)
            else:
                getattr(self, by)(0, "norm", 0.01)
                getattr(self, by)(0, "value", 0.001)
            self.seen.append(assigned.clone())

    operations: list[Operation] = [("backward_of", "01", True), ("change",), ("step", 0), ("zero", 0, True)]

    def make() -> Program:
        return Assigning([operations] * 3, (torch.optim.AdamW,) * 2)

    found = train(tmp_path, make, "host", precision, 2.0**8)
    assert_same(found, train(tmp_path, make, None, precision, 2.0**8))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("scale", [2.0**8, 2.0**60])
@pytest.mark.parametrize("states", PLACES)
def test_an_optimizer_that_unscales_gradients_in_its_step(
    tmp_path: Path, states: str, scale: float, reads: bool
) -> None:
    """Hooks read scaled gradients, and a step with infinite ones is skipped."""

    def read(module: Any) -> Any:
        return [None if one.grad is None else one.grad.clone() for one in module.blocks.parameters() if reads]

    def make() -> Toy:
        return Toy("on_before_optimizer_step", read, optimizer=torch.optim.AdamW, fused=True)

    assert_same(train(tmp_path, make, states, "16-mixed", scale), train(tmp_path, make, None, "16-mixed", scale))


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path, hooked: bool) -> None:
    """With a loss scale that is no power of two, each of both rounds."""

    def make() -> Toy:
        return (Hooked if hooked else Toy)(optimizer=torch.optim.AdamW, lr=0.01)

    how = {"gradient_clip_val": 0.01}
    found = train(tmp_path, make, "host", "16-mixed", 1000.0, **how)
    assert_same(found, train(tmp_path, make, None, "16-mixed", 1000.0, **how))


@pytest.mark.parametrize("value", [1e30, float("inf")])
def test_finite_gradients_with_an_infinite_norm_are_stepped(tmp_path: Path, value: float) -> None:
    def enlarge(module: Any) -> None:
        module.blocks[0].up.weight.grad[0] = value

    def make() -> Toy:
        return Toy("on_after_backward", enlarge)

    assert_same(train(tmp_path, make, "host", "16-mixed", 2.0**8), train(tmp_path, make, None, "16-mixed", 2.0**8))


@pytest.mark.parametrize(("clip", "hooked"), [({}, True), ({"gradient_clip_val": 0.01}, False)])
def test_a_scaler_that_is_disabled_skips_no_step(tmp_path: Path, clip: Any, hooked: bool) -> None:
    def fitted(states: str | None) -> Any:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
        return fit(tmp_path, (Hooked if hooked else Toy)(), states, plugins=plugin, **clip)

    assert_same(fitted("host"), fitted(None))


class Clipped(Toy):
    """Manual optimization, clipped."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch[0])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.01, "norm")
        optimizer.step()
        self.seen.append(loss.item())


@pytest.mark.parametrize("kind", [Clipped, Hooked])
def test_steps_that_the_scaler_skips_are_recorded(tmp_path: Path, kind: type[Toy]) -> None:
    """Their gradients are not, since the next step drops them."""
    strategy = {"recover": True}
    found = train(tmp_path, kind, "ssd", "16-mixed", 2.0**60, strategy=strategy, max_epochs=3)
    assert_same(found, train(tmp_path, kind, None, "16-mixed", 2.0**60, max_epochs=3))


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.01}])
def test_a_step_with_infinite_gradients_after_one_that_has_registered_a_hook_is_skipped(
    tmp_path: Path, clip: Any
) -> None:
    class Registers(Toy):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.blocks[0].up.weight.register_post_accumulate_grad_hook(
                    lambda parameter: self.seen.append(parameter.grad.sum())
                )
            return super().training_step(batch, batch_idx)

    found = train(tmp_path, Registers, "host", "16-mixed", 2.0**60, max_epochs=2, **clip)
    assert_same(found, train(tmp_path, Registers, None, "16-mixed", 2.0**60, max_epochs=2, **clip))
