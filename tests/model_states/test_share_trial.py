"""The share of optimizer steps that the GPU makes: by rates no step ends later, by trial the fastest share is kept."""

from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as some

from lightning_ssd.device import WorkCounter
from lightning_ssd.model_states.share_trial import ShareTrial, StepEnd, choose_for_device

Numbers = some.lists(some.integers(1, 10**9), max_size=20)
Rate = some.floats(1e6, 1e11)


@given(Numbers, Rate, Rate)
def test_no_step_ends_later_than_on_the_cpu_alone(parameters: list[int], cpu_rate: float, device_rate: float) -> None:
    """And none could be moved to the other side and end earlier there, with those before it as they are."""
    chosen = choose_for_device(parameters, cpu_rate, device_rate)
    cpu = device = alone = 0.0
    for numel, on_device in zip(parameters, chosen, strict=True):
        ends = device + numel / device_rate, cpu + numel / cpu_rate
        if on_device:
            device = ends[0]
        else:
            cpu = ends[1]
        alone += numel / cpu_rate
        assert ends[0 if on_device else 1] == min(ends) <= alone * (1 + 1e-9)


class Training:
    """Steps of 20 flat parameters of 1e8 parameters; their seconds depend on the device's share and on their number."""

    def __init__(self, seconds: Callable[[float, int], float], *, busy: float = 0.9, memory: bool = True) -> None:
        self.selected: list[frozenset[int]] = []
        self._seconds = seconds
        self._busy = busy
        self._memory = memory
        self.trial = ShareTrial([10**8] * 20, 14 * 20 * 10**8, self._select)
        now, work, copied = 0.0, WorkCounter(0, 0.0), WorkCounter(0, 0.0)
        for number in range(60):
            share = len(self.selected[-1]) / 20 if self.selected else 0.0
            step = seconds(share, number)
            now += step
            work = work.plus(round(2 * 10**9 * (1 - share)), busy * step * (1 - share))
            copied = copied.plus(4 * 10**9, 0.1 * step)
            self.trial.note(StepEnd(now, work, (copied, copied)))

    def _select(self, indices: Collection[int]) -> bool:
        if indices and not self._memory:
            return False
        self.selected.append(frozenset(indices))
        return True


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (lambda share, number: 0.5 + 0.3 * abs(share - 0.25), 0.1, 0.4),
        (lambda share, number: 0.7 - 0.3 * share, 0.4, 1.0),
        (lambda share, number: 0.5 + 0.1 * share, 0.0, 0.0),
        (lambda share, number: 0.5 - 0.001 * share, 0.0, 0.0),
    ],
)
def test_the_fastest_share_is_kept(seconds: Callable[[float, int], float], least: float, most: float) -> None:
    training = Training(seconds)
    assert training.trial.share is not None and least <= training.trial.share <= most
    assert len(training.selected[-1]) / 20 == training.trial.share
    assert len(set(training.selected)) > 2


@given(some.integers(0, 44), some.integers(0, 44), some.floats(0.8, 1.2))
def test_another_program_on_the_machine_does_not_decide(first: int, last: int, slower: float) -> None:
    """Steps from the first to the last take another time; the device, which makes none faster, makes none."""
    training = Training(lambda share, number: 0.7 * (slower if first <= number <= last else 1.0))
    assert training.trial.share == 0.0 and training.selected[-1] == frozenset()


def test_a_share_that_was_fast_only_once_is_not_kept() -> None:
    training = Training(lambda share, number: 0.7 if share == 0 or number > 29 else 0.6)
    assert training.trial.share == 0.0 and training.selected[-1] == frozenset()


def test_nothing_is_tried_if_the_cpu_waits_for_the_device() -> None:
    training = Training(lambda share, number: 0.5, busy=0.3)
    assert training.selected == [] and training.trial.share == 0.0


def test_without_memory_the_cpu_makes_all_steps() -> None:
    training = Training(lambda share, number: 0.5 - 0.4 * share, memory=False)
    assert training.selected == [frozenset()] and training.trial.share == 0.0
