"""Policies of the activation offloader may change between any two micro-batches, and between forward and backward."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ssd.activations import ActivationOffloader, OffloadAll, OffloadPolicy
from lightning_ssd.activations.placement import FixedAmount, KeepAll
from tests.support.offloader import CPU, open_offloader

NBYTES = 32 * 32 * 4
PLACEMENTS = {
    "none": lambda: KeepAll(),
    "host": lambda: OffloadAll(("host",)),
    "ssd": lambda: OffloadAll(("ssd",)),
    "half": lambda: FixedAmount(0.5, ("host", "ssd")),
}
POLICIES = st.builds(
    lambda placement, **rules: OffloadPolicy(PLACEMENTS[placement](), **rules),
    st.sampled_from(sorted(PLACEMENTS)),
    window_bytes=st.sampled_from([0, NBYTES, 8 * NBYTES]),
    window_depth=st.sampled_from([None, 1]),
    hooks_enabled=st.booleans(),
)


def _chain(value: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        value = value.sin()
    return value.sum()


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[ActivationOffloader]:
    with open_offloader(tmp_path, host_memory="64MiB") as offloader:
        yield offloader


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(POLICIES, POLICIES), min_size=1, max_size=5))
def test_each_forward_follows_the_policy_in_force(
    offloader: ActivationOffloader, pairs: list[tuple[OffloadPolicy, OffloadPolicy]]
) -> None:
    """The first policy of each pair is in force in a forward, the second one in its backward."""
    leaf = torch.randn(32, 32, device=CPU, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(_chain(leaf), leaf)
    for in_forward, in_backward in pairs:
        offloader.run(in_forward)
        assert offloader.policy is in_forward
        before = offloader.stats()
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = _chain(leaf)
        stats = offloader.stats()
        stored, saved = stats.stored - before.stored, stats.saved - before.saved
        assert (saved > 0) == in_forward.hooks_enabled
        if not in_forward.hooks_enabled or isinstance(in_forward.placement, KeepAll):
            assert stored == 0
        elif isinstance(in_forward.placement, OffloadAll) and not in_forward.window_bytes:
            assert stored >= saved - 2 * NBYTES  # backward needs the rest first
        offloader.run(in_backward)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(gradient, expected)
        offloader.end_backward()
