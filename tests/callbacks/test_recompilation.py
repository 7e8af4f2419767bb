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


def timeline(value: float, most: int = 10) -> SavedTimeline:
    """Returns ten storages of `10 * value` bytes, or of `most` if the value is 1."""
    return SavedTimeline(
        (most if value == 1 else round(10 * value),) * 10,
        frozenset(range(10)),
        tuple(map(float, range(10))),
        tuple(reversed(range(10))),
        tuple(map(float, range(10))),
        10.0,
        10.0,
    )


def search(seconds: list[float], room: float, most: int = 10, *, refine: bool = True) -> list[Trial]:
    """Returns the trials of a search in which a step takes `seconds[10 * memory_budget]` and its predicted stall.

    `timeline` has its storages.
    """
    progress = RegionProgress(StepTimer(make_clock(CPU), 3), room_bytes=room)
    recompilation = Recompilation(PartitionerBudget(), allowed=True)
    value: float | None = 1.0
    while value is not None:
        saved = timeline(value, most)
        plan = plan_storages(saved, room, SPEEDS, 0, fixed_window=True)  # type: ignore[arg-type]
        took = seconds[round(10 * value)] + plan.stall_seconds
        progress.timeline = saved
        progress.applied = Trial(value, plan, sum(saved.sizes), took, plan.stall_seconds / 20)
        progress.trials.append(progress.applied)
        value = recompilation.next_value(progress, SPEEDS, refine=refine)  # type: ignore[arg-type]
    return progress.trials


@given(seconds=st.lists(st.floats(10.0, 30.0), min_size=11, max_size=11), room=st.floats(0.0, 120.0))
def test_values_are_tried_until_none_is_left_beside_the_fastest(seconds: list[float], room: float) -> None:
    trials = search(seconds, room)
    tried = [round(10 * trial.memory_budget) for trial in trials]
    assert len(set(tried)) == len(tried) <= 1 + MAX_BUDGETS and all(1 <= value <= 10 for value in tried)
    fastest = min(trials, key=lambda trial: trial.seconds)
    above = [value for value in tried if value > round(10 * fastest.memory_budget)]
    assert len(tried) == 1 + MAX_BUDGETS or not above or min(above) == round(10 * fastest.memory_budget) + 1


@given(seconds=st.lists(st.floats(10.0, 30.0), min_size=11, max_size=11), room=st.floats(0.0, 120.0))
def test_values_become_lower_where_none_between_others_is_tried(seconds: list[float], room: float) -> None:
    tried = [trial.memory_budget for trial in search(seconds, room, refine=False)]
    assert tried == sorted(set(tried), reverse=True)


def test_a_search_that_goes_on_under_an_earlier_rule_tries_values_above_it() -> None:
    """It has not timed the user's value, 1, again."""
    (last,) = (trial for trial in search([10.0] * 11, 60.0, refine=False) if trial.plan and not trial.stalled)
    assert last.memory_budget < 0.9
    progress = RegionProgress(
        StepTimer(make_clock(CPU), 3), last, [last], timeline(last.memory_budget), room_bytes=60.0
    )
    recompilation = Recompilation(PartitionerBudget(), allowed=True)
    assert recompilation.next_value(progress, SPEEDS, refine=False) is None  # type: ignore[arg-type]
    value = recompilation.next_value(progress, SPEEDS, refine=True)  # type: ignore[arg-type]
    assert value is not None and last.memory_budget < value < 1.0


def test_a_value_between_is_found_where_recomputation_costs_more_than_transfers() -> None:
    """Compiled code that may not save all bytes saves far fewer than the value says, so that the first one is low."""
    recomputing = [10.0 + 2.0 * (10 - value) for value in range(11)]
    trials = search(recomputing, 0.0, most=20)
    tried = [trial.memory_budget for trial in trials]
    fastest = min(trials, key=lambda trial: trial.seconds)
    assert tried != sorted(tried, reverse=True) and fastest.memory_budget not in (1.0, min(tried))


def test_code_is_not_compiled_again_where_nothing_stalls() -> None:
    assert len(search([10.0] * 11, 1000.0)) == 1
