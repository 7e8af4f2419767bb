"""Random programs of tensor operations: the same gradients, or the same error, with offload and without."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ssd.activations import ActivationOffloader
from tests.support.offloader import change_policy, open_offloader
from tests.support.programs import STEPS, run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["ssd", "host"])
def offloader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ActivationOffloader]:
    path: Path = tmp_path_factory.mktemp("scratch")
    with open_offloader(path, tier=request.param, host_memory=0 if request.param == "ssd" else "64MiB") as offloader:
        yield offloader


@pytest.mark.quick_cases(1)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, losses=st.integers(1, 4), window=st.sampled_from([0, 200, 10_000]))
def test_random_programs(
    offloader: ActivationOffloader, steps: list[tuple[str, int, int]], losses: int, window: int
) -> None:
    """Gradients are equal bit for bit, errors are raised where PyTorch raises them, twice in a row."""
    expected, error, legal = run(steps, losses, nullcontext)
    change_policy(offloader, window_bytes=window)
    for _ in range(2):  # the second run knows the order of the first
        offloader.begin_micro_batch()
        actual, actual_error, actual_legal = run(steps, losses, offloader.hooks)
        offloader.end_backward()
        assert (actual_error, actual_legal) == (error, legal)
        for one, other in zip(actual, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


def test_programs_are_worth_running(offloader: ActivationOffloader) -> None:
    """The programs of the test above have gradients, and raise PyTorch's errors."""
    before = offloader.stats().loaded
    change_policy(offloader, window_bytes=0)
    offloader.begin_micro_batch()
    grads, error, legal = run([("mul", 0, 1), ("sin", 4, 0), ("matmul", 5, 2)], 1, offloader.hooks)
    assert all(isinstance(grad, Tensor) for grad in grads) and error == "" and legal == 3
    assert offloader.stats().loaded > before
    offloader.begin_micro_batch()
    _, error, _ = run([("mul", 0, 1), ("sin", 4, 0), ("relu_", 4, 0), ("add", 5, 6)], 1, offloader.hooks)
    assert error == "in place"
