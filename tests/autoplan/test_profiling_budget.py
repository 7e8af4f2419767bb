"""Profiling ends within its steps and seconds, whatever the first step takes."""

import pytest

from lightning_ssd.autoplan import profiling_budget
from lightning_ssd.autoplan.profiling_budget import MAX_SECONDS, MAX_STEPS, ProfilingBudget


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profiling_budget, "perf_counter", made.perf_counter)
    return made


def spend(clock: Clock, seconds: list[float]) -> ProfilingBudget:
    """Returns the budget of a training after steps that took so many seconds each."""
    budget = ProfilingBudget()
    for each in seconds:
        budget.begin_step()
        clock.now += each
        budget.end_step()
    return budget


@pytest.mark.parametrize(
    ("steps", "counted"),
    [([2.0], 2.0), ([2.0, 2.0], 4.0), ([22.0, 2.0], 4.0), ([22.0, 2.0, 3.0], 7.0), ([2.0, 22.0], 24.0)],
)
def test_the_start_of_a_process_is_not_counted(clock: Clock, steps: list[float], counted: float) -> None:
    assert spend(clock, steps).seconds == pytest.approx(counted)


def test_a_step_is_allowed_if_it_ends_within_the_budget(clock: Clock) -> None:
    budget = spend(clock, [20.0, 2.0])
    left = int((MAX_SECONDS - 4.0) / 2.0)
    assert budget.allows(left) and not budget.allows(left + 1)


def test_short_steps_are_limited_by_their_number(clock: Clock) -> None:
    budget = spend(clock, [0.1] * 10)
    assert budget.allows(MAX_STEPS - 10) and not budget.allows(MAX_STEPS - 9)


def test_waits_that_are_no_profiling_are_not_counted(clock: Clock) -> None:
    """For the first batch, the next one, and a validation amid a step."""
    budget = ProfilingBudget()
    clock.now += 40.0
    for _ in range(3):
        budget.begin_step()
        clock.now += 1.0
        budget.pause()
        clock.now += 100.0
        budget.resume()
        clock.now += 1.0
        budget.end_step()
        budget.pause()
        clock.now += 100.0
        budget.resume()
    assert budget.seconds == pytest.approx(6.0) and budget.allows(12) and not budget.allows(13)


def test_the_time_of_the_planner_between_steps_is_counted(clock: Clock) -> None:
    budget = spend(clock, [1.0, 1.0])
    with budget.counted():
        clock.now += 5.0
        assert budget.seconds == pytest.approx(7.0)
    clock.now += 5.0
    assert budget.seconds == pytest.approx(7.0)
