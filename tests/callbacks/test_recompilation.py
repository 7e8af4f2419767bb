"""`Recompilation`: the values of `activation_memory_budget` that are tried, for any times of steps."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.activations import PartitionerBudget
from lightning_ssd.callbacks.recompilation import MAX_BUDGETS, Recompilation
from lightning_ssd.callbacks.region_progress import RegionProgress, Trial
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline, TierSpeed, plan_storages
from tests.support.storage import CPU

SPEEDS = {"host": TierSpeed(10.0, 10.0, 1e9)}


def search(seconds: list[float], room: float, most: int = 10) -> list[Trial]:
    """Returns the trials of a search in which a step takes `seconds[10 * memory_budget]` and its predicted stall.

    Each of ten storages has `10 * memory_budget` bytes, and `most` with a budget of 1.
    """
    progress = RegionProgress(StepTimer(make_clock(CPU), 3), room_bytes=room)
    recompilation = Recompilation(PartitionerBudget(), allowed=True)
    value: float | None = 1.0
    while value is not None:
        timeline = SavedTimeline(
            (most if value == 1 else round(10 * value),) * 10,
            frozenset(range(10)),
            tuple(map(float, range(10))),
            tuple(reversed(range(10))),
            tuple(map(float, range(10))),
            10.0,
            10.0,
        )
        plan = plan_storages(timeline, room, SPEEDS, 0, fixed_window=True)  # type: ignore[arg-type]
        took = seconds[round(10 * value)] + plan.stall_seconds
        progress.timeline = timeline
        progress.applied = Trial(value, plan, sum(timeline.sizes), took, plan.stall_seconds / 20)
        progress.trials.append(progress.applied)
        value = recompilation.next_value(progress, SPEEDS)  # type: ignore[arg-type]
    return progress.trials


@given(seconds=st.lists(st.floats(10.0, 30.0), min_size=11, max_size=11), room=st.floats(0.0, 120.0))
def test_values_are_tried_until_none_is_left_beside_the_fastest(seconds: list[float], room: float) -> None:
    trials = search(seconds, room)
    tried = [round(10 * trial.memory_budget) for trial in trials]
    assert len(set(tried)) == len(tried) <= 1 + MAX_BUDGETS and all(1 <= value <= 10 for value in tried)
    fastest = min(trials, key=lambda trial: trial.seconds)
    above = [value for value in tried if value > round(10 * fastest.memory_budget)]
    assert len(tried) == 1 + MAX_BUDGETS or not above or min(above) == round(10 * fastest.memory_budget) + 1


def test_a_value_between_is_found_where_recomputation_costs_more_than_transfers() -> None:
    """Compiled code that may not save all bytes saves far fewer than the value says, so that the first one is low."""
    recomputing = [10.0 + 2.0 * (10 - value) for value in range(11)]
    trials = search(recomputing, 0.0, most=20)
    tried = [trial.memory_budget for trial in trials]
    fastest = min(trials, key=lambda trial: trial.seconds)
    assert tried != sorted(tried, reverse=True) and fastest.memory_budget not in (1.0, min(tried))


def test_code_is_not_compiled_again_where_nothing_stalls() -> None:
    assert len(search([10.0] * 11, 1000.0)) == 1
