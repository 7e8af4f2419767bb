"""Random programs that share storages in every way, and write through any alias, have plain autograd's results."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ssd.activations import ActivationOffloader
from tests.support.aliases import ALIASES, MODULES, PROGRAMS, Program, changes, input_of, run, same
from tests.support.offloader import change_policy, gradients, open_offloader

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(
    scope="module",
    params=[("ssd", 1.0), ("host", 1.0), ("host", 0.5)],
    ids=lambda param: f"{param[0]} {param[1]}",
)
def offloader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ActivationOffloader]:
    tier, offload = request.param
    host_memory = 0 if tier == "ssd" else "64MiB"
    path: Path = tmp_path_factory.mktemp("scratch")
    with open_offloader(path, tier=tier, host_memory=host_memory, offload=offload, checksum=True) as offloader:
        yield offloader


def check(
    offloader: ActivationOffloader, program: Program, window: int, survivors: int = 0, backwards: int = 1
) -> None:
    expected, told = run(program, nullcontext, survivors, backwards)
    change_policy(offloader, window_bytes=window)
    for _ in range(2):  # the second run knows the order of the first
        offloader.begin_micro_batch()
        actual, actually_told = run(program, offloader.hooks, survivors, backwards)
        offloader.end_backward()
        assert actually_told == told
        assert all(map(same, actual, expected))


WINDOWS = st.sampled_from([0, 100, 10_000])


@pytest.mark.quick_cases(1)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS, window=WINDOWS, survivors=st.integers(0, 2), backwards=st.integers(1, 3))
def test_random_programs(
    offloader: ActivationOffloader, program: Program, window: int, survivors: int, backwards: int
) -> None:
    check(offloader, program, window, survivors, backwards)


@pytest.mark.thorough
@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS, window=WINDOWS, survivors=st.integers(0, 2), backwards=st.integers(1, 3))
def test_many_random_programs(
    offloader: ActivationOffloader, program: Program, window: int, survivors: int, backwards: int
) -> None:
    check(offloader, program, window, survivors, backwards)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alias", sorted(ALIASES))
@pytest.mark.parametrize("early", [False, True], ids=["before", "after"])
def test_a_change_through_every_alias(offloader: ActivationOffloader, alias: str, early: bool) -> None:
    """A tensor is saved, changed through an alias that was made before or after the save, saved again, and deleted."""
    make = ("alias", alias, 3, 0)
    saves = [("save", "sigmoid", 3, 0), ("save", "mul", 3, 0)]
    program: Program = [("save", "sin", 0, 0)]  # number 3
    program += [make, *saves] if early else [*saves, make]
    add = sorted(changes()).index("aten.add_.Tensor/0")
    last = -1 if not early else 4
    program += [("change", add, last, 1), ("save", "tanh", 3, 0), ("save", "mul", last, 3)]
    program += [("delete", "", 3, 0)] * 8
    check(offloader, program, 0)


def test_the_table_of_changes_is_large() -> None:
    """Most of torch's in-place operators are called."""
    names = {name.split("/")[0].removeprefix("aten.").split(".")[0] for name in changes()}
    assert len(names) > 100
    assert {"add_", "mul_", "sigmoid_", "masked_fill_", "index_fill_", "copy_", "t_", "tanh_"} <= names


def test_programs_are_worth_running(offloader: ActivationOffloader) -> None:
    """Most steps are legal, bytes are stored and loaded, and a change through an alias changes gradients."""
    before = offloader.stats()
    program: Program = [("save", "sin", 0, 0), ("save", "mul", 3, 1), ("save", "tanh", 4, 1)]
    grads, told = run(program, nullcontext)
    check(offloader, program, 0)
    changed: Program = [*program, ("other change", "numpy", 3, 0)]
    other_grads, other_told = run(changed, nullcontext)
    check(offloader, changed, 0)
    assert set(told) == set(other_told) == {""}
    assert not all(map(same, grads, other_grads))
    after = offloader.stats()
    assert after.stored > before.stored and after.loaded > before.loaded


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_write_to_parts_of_a_storage(offloader: ActivationOffloader, name: str) -> None:
    torch.manual_seed(0)
    forward, x = MODULES[name](), input_of(name)
    torch.manual_seed(1)
    expected = gradients(forward, [x])
    before = offloader.stats().stored  # the first micro-batch may follow the order of an earlier test's
    for _ in range(3):
        torch.manual_seed(1)
        offloader.begin_micro_batch()
        assert all(map(torch.equal, gradients(forward, [x], offloader.hooks), expected))
        offloader.end_backward()
    assert offloader.stats().stored > before
