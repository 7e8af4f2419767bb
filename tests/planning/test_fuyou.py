"""Fuyou's cost model and its choice.

Reproduced: table 2. Not reproduced: the stars of figure 9. The bandwidths and times measured are not in the text.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning.fuyou import (
    SwapCandidate,
    choose_swaps,
    largest_swap,
    priority_queues,
    swap_benefit_factor,
)
from lightning_ssd.planning.phase import PhaseWork, iteration_seconds
from tests.support.papers import fuyou_phases
from tests.support.profiles import GB, H100

# Table 2, in units of b s h^2 FLOP (the paper prints b s h^3) and of b s h activations.
TABLE_2 = {"qkv": (6, 3, 1), "htoh": (2, 1, 1), "hto4h": (8, 4, 1), "4htoh": (8, 1, 4)}


def test_table_2() -> None:
    """The ratios of the swap benefit factors."""
    unit = swap_benefit_factor(2, 1)
    for flops, seconds, ratio in TABLE_2.values():
        assert swap_benefit_factor(flops, seconds) / unit == ratio


def test_queues_of_table_2() -> None:
    """4htoh has high priority, all others have low."""
    candidates = [SwapCandidate(size, flops, flops) for flops, size, _ in TABLE_2.values()]
    assert priority_queues(candidates, bandwidth=1.0) == ([3], [0, 1, 2])


def test_equations_3_to_8() -> None:
    """Each resource's time, by hand: 1 G parameters, 10 GB swapped."""
    machine = replace(H100, copy_out=10e9, copy_in=10e9, copy_out_both=10e9, copy_in_both=10e9)
    machine = replace(machine, ssd_read=4e9, ssd_write=2e9)
    forward, backward = fuyou_phases(forward=2.0, recompute=0.5, optimizer=3.0, parameters=GB, swapped=10 * GB)
    assert forward.times(machine) == {"compute": 2, "copy_in": 0.2, "copy_out": 1, "ssd": 2 / 4 + 10 / 2, "cpu": 0}
    assert backward.times(machine) == {
        "compute": 4.5, "copy_in": 1.2, "copy_out": 0.2, "ssd": (12 + 2 + 10) / 4 + 14 / 2, "cpu": 3
    }  # fmt: skip
    assert iteration_seconds(machine, forward, backward) == 5.5 + 13


def test_largest_swap() -> None:
    """Equations 9 and 10: 10 s of computation, 4 s of SSDs; 6 s at the least of the bandwidths."""
    machine = replace(H100, copy_out=10e9, copy_in=10e9, copy_out_both=10e9, copy_in_both=10e9)
    machine = replace(machine, ssd_read=4e9, ssd_write=2e9)
    assert largest_swap(machine, PhaseWork(10, GB, GB, 8 * GB, 4 * GB)) == 6 * 2e9
    assert largest_swap(machine, PhaseWork(1, GB, GB, 8 * GB, 4 * GB)) == 0


def test_high_queue_first() -> None:
    """With room for two of table 2's layers, 4htoh is swapped first, then the first layer of the forward."""
    candidates = [SwapCandidate(size, flops, flops) for flops, size, _ in TABLE_2.values()]
    chosen = choose_swaps(candidates, 0, 4, bandwidth=1.0, iteration=lambda swapped, recompute: recompute)
    assert chosen == (3, 0)


CANDIDATES = st.lists(st.builds(SwapCandidate, st.floats(1, 100), st.floats(0, 100), st.floats(0, 100)), max_size=20)


@given(CANDIDATES, st.floats(0, 100), st.floats(0, 1000), st.floats(0, 10))
def test_amount_is_within_its_limits(
    candidates: list[SwapCandidate], start: float, largest: float, per_byte: float
) -> None:
    """Equation 11: D_start <= D_f <= D_max. And it is never worse than swapping nothing more."""

    def iteration(swapped: float, recompute: float) -> float:
        return recompute + per_byte * swapped

    chosen = choose_swaps(candidates, start, largest, 1.0, iteration)
    swapped = start + sum(candidates[index].nbytes for index in chosen)
    assert len(set(chosen)) == len(chosen)
    assert swapped <= max(start, largest) * (1 + 1e-9)
    total = sum(item.seconds for item in candidates)
    left = total - sum(candidates[index].seconds for index in chosen)
    assert iteration(swapped, left) <= iteration(start, total) * (1 + 1e-9) + 1e-9
    assert iteration(swapped, max(0.0, left)) == pytest.approx(iteration(swapped, left), abs=1e-6)
