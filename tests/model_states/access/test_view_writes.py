"""Views of offloaded weights, made at any time of a step with autograd on or off, and written at any later time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.access import PLACES, Toy, fit
from tests.support.aliases import ALIASES
from tests.support.compare import assert_same

TIMES = ["fit start", "batch start", "own forward", "before backward", "backward", "after backward", "before step",
         "batch end"]  # fmt: skip
"""When user code runs, in the order of a step."""

ROWS = torch.linspace(-2, 2, 64).view(8, 8)

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda view: view.mul_(0.75),
    "add_": lambda view: view.add_(0.125),
    "item": lambda view: view.__setitem__(..., view * 0.5),
    "foreach": lambda view: torch._foreach_mul_([view], 0.75),
    "out": lambda view: torch.mul(view, 0.75, out=view),
    "out of a product": lambda view: torch.matmul(view.clone(), torch.eye(view.size(-1)) * 0.5, out=view),
    "statistics": lambda view: F.batch_norm(ROWS[:, : view.numel()], view, torch.ones(view.numel()), training=True),
    "data": lambda view: view.data.mul_(0.75),
    "detach": lambda view: view.detach().sub_(0.125),
    "view of it": lambda view: view.view_as(view).mul_(0.5),
}

LEFT_OUT = {"numpy", "dlpack", "set_", "complex"}
"""Aliases by code that is not torch's own, which get a read-only copy or are refused."""


class Viewing(Toy):
    """A toy whose user code makes views of weights and writes them; `events` are (time, action) pairs."""

    def __init__(self, events: Sequence[tuple[str, Any]]) -> None:
        super().__init__(lr=2**-4, momentum=0.5)
        self.events = events
        self.views: list[Tensor] = []
        self.own_forward = self.blocks[0].up.register_forward_hook(lambda *_: self.reach("own forward"))

    def weight(self, number: int) -> Tensor:
        owners = (self.blocks[0].up.weight, self.blocks[1].down.weight, self.blocks[0].up.bias, self.target.up.weight)
        return owners[number % 4]

    def reach(self, time: str) -> None:
        for at, action in self.events:
            if at == time:
                self.act(time, *action)

    def act(self, time: str, kind: str, name: str, number: int, grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            if kind == "take":
                taken = ALIASES[name](self.weight(number))
                self.views += taken[:2]
            elif kind == "write" and self.views:
                WRITES[name](self.views[number % len(self.views)])
            elif kind == "read":
                self.seen += [view.detach().clone() for view in self.views]
            elif kind == "drop":
                self.views.clear()

    def on_fit_start(self) -> None:
        self.reach("fit start")

    def on_train_batch_start(self, *_: Any) -> None:
        self.reach("batch start")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x.requires_grad:
            x.register_hook(lambda _: self.reach("backward"))
        return self.blocks[1](x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.reach("before backward")
        return loss

    def on_after_backward(self) -> None:
        self.reach("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.reach("before step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("batch end")
        self.seen += [self.weight(number).detach().clone() for number in range(4)]


def program(take: tuple[str, str], write: tuple[str, str]) -> Any:
    """Returns a program that makes a view with autograd on, writes it with autograd off, and drops it."""
    return (take[0], ("take", take[1], 0, True)), (write[0], ("write", write[1], 0, False)), [("batch end", DROP)]


DROP = ("drop", "", 0, False)
WRITTEN_AND_DROPPED = (
    ("own forward", ("take", "select", 0, True)), ("own forward", ("write", "data", 0, False)), [("own forward", DROP)]
)  # fmt: skip
NUMBERS = st.integers(0, 7)
TAKE = st.tuples(st.just("take"), st.sampled_from(sorted(set(ALIASES) - LEFT_OUT)), NUMBERS, st.booleans())
WRITE = st.tuples(st.just("write"), st.sampled_from(sorted(WRITES)), NUMBERS, st.booleans())
OTHER = st.tuples(st.sampled_from(["read", "read", "drop"]), st.just(""), NUMBERS, st.booleans())
EVENTS = st.lists(st.tuples(st.sampled_from(TIMES), TAKE | WRITE | OTHER), min_size=1, max_size=5)
PROGRAMS = st.tuples(st.tuples(st.sampled_from(TIMES), TAKE), st.tuples(st.sampled_from(TIMES), WRITE), EVENTS)


def run(path: Path, events: Sequence[Any], states: str | None, precision: Any) -> Viewing | Exception:
    """Returns the trained module, or the error that training has ended with."""
    module = Viewing(events)
    try:
        fit(path, module, states, precision=precision)
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        return error
    module.seen += [view.detach().clone() for view in module.views]
    return module


NAMED = (
    "offloaded",
    "their step had begun",
    "is gone",
    "modified by an inplace operation",
    "a leaf Variable",
    "is a view and is being modified inplace",
)
"""Errors in place of a result: each names its cause, and the last three are autograd's own."""

ONLY_PLAIN = ("created in no_grad mode", "is a view and", "functions with out=", "is not differentiable")
"""Errors of plain training alone, about views that autograd would have to follow: here they are written through."""


def check(path: Path, program: Any, states: str, precision: str) -> None:
    """Asserts that numbers are plain Lightning's, or an error is raised; an error of plain Lightning is raised, too."""
    first, second, others = program
    events = [first, second, *others]
    found, plain = run(path, events, states, precision), run(path, events, None, precision)
    if isinstance(found, Exception):
        assert isinstance(plain, Exception) or any(text in str(found) for text in NAMED), (found, plain)
    elif isinstance(plain, Exception):
        assert any(text in str(plain) for text in ONLY_PLAIN), plain
    else:
        assert_same(found, plain)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAMS, st.sampled_from(["32-true", "bf16-mixed"]))
@example(program(("before backward", "select"), ("before backward", "mul_")), "32-true")
@example(program(("before backward", "t"), ("after backward", "data")), "32-true")
@example(program(("own forward", "chunk"), ("before backward", "mul_")), "32-true")
@example(program(("own forward", "select"), ("own forward", "mul_")), "32-true")
@example(program(("before backward", "unbind"), ("before backward", "data")), "bf16-mixed")
@example(program(("own forward", "select"), ("batch end", "mul_")), "bf16-mixed")
@example(program(("own forward", "chunk"), ("own forward", "mul_")), "bf16-mixed")
@example(WRITTEN_AND_DROPPED, "32-true")
@example(program(("own forward", "t"), ("own forward", "out of a product")), "32-true")
@example(program(("own forward", "select"), ("own forward", "statistics")), "bf16-mixed")
def test_written_views(tmp_path: Path, program: Any, precision: str) -> None:
    check(tmp_path, program, "host", precision)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAMS, st.sampled_from(["32-true", "bf16-mixed"]), st.sampled_from(PLACES))
def test_more_written_views(tmp_path: Path, program: Any, precision: str, states: str) -> None:
    check(tmp_path, program, states, precision)
