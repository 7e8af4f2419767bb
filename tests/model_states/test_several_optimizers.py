"""Several optimizers whose forwards, backwards and steps alternate, against plain Lightning, bit for bit."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ssd.model_states import build
from tests.support.access import PLACES, Toy, compare
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies
from tests.support.manual_programs import ALGORITHMS, LIMITS, Operation, Program, train
from tests.support.models import Block


class Alternating(Program):
    """Keeps the losses of forwards for later backwards, also for those of later batches.

    A step drops the losses whose graphs have the weights from before it, for which plain Lightning raises an error.

    Args:
        operations: operations of each batch.
        kinds: classes of the optimizers, one for each block.
    """

    def __init__(self, operations: list[list[Operation]], kinds: tuple[Any, Any, Any]) -> None:
        super().__init__(operations, kinds[:2])
        self.kinds = kinds
        self.blocks.append(Block(8, 8, norm=False))
        self.kept_losses: list[tuple[str, Tensor]] = []

    def forward_of(self, used: str) -> None:
        loss = self.compute(used)
        self.seen.append(loss.item())
        if loss.requires_grad:
            self.kept_losses.append((used, loss))

    def backward_of_kept(self, number: int, retain: bool) -> None:
        if self.kept_losses:
            number %= len(self.kept_losses)
            self.manual_backward(self.kept_losses[number][1], retain_graph=retain)
            if not retain:
                del self.kept_losses[number]

    def step(self, number: int) -> None:
        if self.has_gradients(number):
            super().step(number)
            self.kept_losses = [(used, loss) for used, loss in self.kept_losses if str(number) not in used]

    def step_within(self, outer: int, inner: int, used: str) -> None:
        """Steps an optimizer in the closure of another one."""
        optimizer: Any = self.optimizers()[outer]  # type: ignore[index]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.compute(used)
            self.manual_backward(loss)
            self.step(inner)
            self.seen.append(loss.item())
            return loss

        if str(outer) in used and outer != inner:
            optimizer.step(closure=closure)
            self.kept_losses = [kept for kept in self.kept_losses if str(outer) not in kept[0]]

    def on_train_end(self) -> None:
        super().on_train_end()
        self.kept_losses.clear()


NUMBERS = st.sampled_from([0, 1, 2])
USED = st.sampled_from(["0", "00", "01", "001", "1212", "2", "22", "210"])
OPERATIONS = st.one_of(
    *[st.tuples(st.just("forward_of"), USED)] * 4,
    *[st.tuples(st.just("backward_of_kept"), st.integers(0, 3), st.booleans())] * 4,
    *[st.tuples(st.just("step"), NUMBERS)] * 4,
    *[st.tuples(st.just("zero"), NUMBERS, st.booleans())] * 2,
    *[st.tuples(st.just("step_within"), NUMBERS, NUMBERS, USED)] * 2,
    st.tuples(st.just("clip"), NUMBERS, ALGORITHMS, LIMITS),
    st.tuples(st.just("read_one"), NUMBERS),
    st.tuples(st.just("schedule"), NUMBERS),
)
GENERATOR_WAITS: list[Operation] = [
    ("forward_of", "00"),
    ("forward_of", "11"),
    ("backward_of_kept", 1, False),
    ("step", 1),
    ("backward_of_kept", 0, False),
    ("step", 0),
]
"""Block 1 is stepped while the graph of block 0, which has used its weights twice, waits for its backward."""


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    operations=st.lists(st.lists(OPERATIONS, min_size=4, max_size=14), min_size=3, max_size=3),
    kinds=st.tuples(*[st.sampled_from([torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])] * 3),
    precision=st.sampled_from(["32-true", "bf16-mixed", "16-mixed"]),
    late=st.booleans(),
    states=st.sampled_from(PLACES),
)
@example([GENERATOR_WAITS] * 3, (torch.optim.SGD,) * 3, "bf16-mixed", False, "host")
@example([GENERATOR_WAITS] * 3, (torch.optim.SGD,) * 3, "16-mixed", False, "ssd")
@example([[("step_within", 0, 1, "01")]] * 3, (torch.optim.AdamW,) * 3, "32-true", False, "host")
def test_programs_of_several_optimizers(
    operations: list[list[Operation]], kinds: Any, precision: str, late: bool, states: str
) -> None:
    def make() -> Alternating:
        return Alternating([[("forward_of", "012"), *of_batch] for of_batch in operations], kinds)

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        expected = train(Path(folder), make, None, precision, 2.0**8)
        if late:
            patch.setattr(build, "make_copy_engine", LateCopies)
        assert_same(train(Path(folder), make, states, precision, 2.0**8), expected)


class Retaining(Toy):
    """Steps between two backwards of one graph, which needs no weight: the operators' inputs have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        layer, optimizer = self.blocks[0].up, self.optimizers()
        result = layer(batch[0]) + layer(batch[0].flip(0)) + layer(batch[0].square())
        for loss in (result.sin().mean(), result.square().mean()):
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()  # type: ignore[union-attr]
            self.seen.append(loss.item())


@pytest.mark.parametrize(("precision", "states"), [("32-true", "host"), ("bf16-mixed", "ssd"), ("16-mixed", "host")])
def test_a_step_between_two_backwards_of_one_graph(tmp_path: Path, states: str, precision: Any) -> None:
    """The gradients of both are summed in fp32."""
    compare(tmp_path, Retaining, states, precision=precision)
