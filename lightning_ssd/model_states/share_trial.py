"""Share trial: which optimizer steps the GPU makes, by the seconds of training steps with a few shares."""

import logging
import statistics
from collections.abc import Callable, Collection, Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_ssd.device import WorkCounter

log = logging.getLogger(__name__)


def choose_for_device(parameters: Sequence[int], cpu_rate: float, device_rate: float) -> list[bool]:
    """Returns for each flat parameter, in the order in which the next forward needs them, whether the device steps it.

    The CPU and the device make their steps in that order, at the same time. Each flat parameter is stepped by the
    processor that ends its step first. So no step ends later than if the CPU made all of them, and both processors end
    together at every point of the forward. (If the device stepped the first or the last flat parameters as a block, the
    forward would wait for the end of the block, long after the CPU was done with its own.)

    Args:
        parameters: number of parameters of each flat parameter.
        cpu_rate: parameters that the CPU steps per second.
        device_rate: parameters that the device steps per second, copies included.
    """
    cpu = device = 0.0
    chosen: list[bool] = []
    for numel in parameters:
        on_cpu, on_device = cpu + numel / cpu_rate, device + numel / device_rate
        chosen.append(on_device < on_cpu)
        cpu, device = (cpu, on_device) if chosen[-1] else (on_cpu, device)
    return chosen


class StepEnd(NamedTuple):
    """The end of a training step.

    Attributes:
        seconds: time of the end, by `perf_counter`.
        work: optimizer steps that the CPU has made so far.
        copied: copies from the device, and to it, so far.
    """

    seconds: float
    work: WorkCounter
    copied: tuple[WorkCounter, WorkCounter]


class ShareTrial:
    """Tries a few shares of flat parameters that the device steps, and keeps the fastest one.

    The rates of CPU and copies give a first idea of the share. But both sides use the bandwidth of host memory, and
    copies of weights and gradients are under way at the same time, so that the seconds of training steps decide.

    Other programs of the machine change these seconds, too. So the fastest share is measured again, right after steps
    that the CPU makes alone, and the device makes steps only if they were faster both times.

    Threads: the training thread.

    Args:
        parameters: number of parameters of each flat parameter, in the order in which the forward needs them.
        nbytes: bytes that a step of all flat parameters on the device copies in one direction.
        select: selects the flat parameters, by index, that the device steps from now on; returns False if it can't.

    Attributes:
        share: share of the parameters that the device steps, once the trial has ended; None before.
    """

    WARM_UP = 3
    """Steps before the first measured one."""
    WARMUP_AFTER_CHANGE = 2
    """Steps after a selection that are not measured: memory is page-locked, steps of the last selection end."""
    MEASURED = 5
    """Steps whose median is the seconds of a share."""
    FACTORS = (0.4, 0.8, 1.6)
    """Tried rates of the device / rate by the bandwidth that other copies leave."""
    BUSY = 0.6
    """Least share of the time in which the CPU makes steps, for shares to be tried."""
    GAIN = 0.02
    """Least share of a step's time that the device must save."""

    def __init__(self, parameters: Sequence[int], nbytes: int, select: Callable[[Collection[int]], bool]) -> None:
        self.share: float | None = None
        self._parameters = parameters
        self._nbytes = nbytes
        self._select = select
        self._run = self._try_shares()
        next(self._run)

    def note(self, end: StepEnd) -> None:
        """Records the end of a step, and may select other flat parameters for the next steps."""
        if self.share is not None:
            return
        try:
            self._run.send(end)
        except StopIteration as stop:
            self.share = stop.value

    def _try_shares(self) -> Generator[None, StepEnd, float]:
        """Receives the ends of steps, and returns the share."""
        ends = yield from self._measure(self.WARM_UP)
        rates = self._rates(ends[0], ends[-1])
        if rates is None:
            return 0.0
        none: frozenset[int] = frozenset()
        seconds = {none: [_median(ends)]}
        for factor in self.FACTORS:
            chosen = choose_for_device(self._parameters, rates[0], factor * rates[1])
            selection = frozenset(index for index, on_device in enumerate(chosen) if on_device)
            if selection not in seconds:
                if not self._select(selection):
                    break
                seconds[selection] = [_median((yield from self._measure(self.WARMUP_AFTER_CHANGE)))]
        best = min(seconds, key=lambda selection: seconds[selection][0])
        if best:
            for selection in (none, best):
                self._select(selection)
                seconds[selection].append(_median((yield from self._measure(self.WARMUP_AFTER_CHANGE))))
        pairs = zip(seconds[none], seconds[best], strict=True)
        if any(on_device > (1 - self.GAIN) * on_cpu for on_cpu, on_device in pairs):
            best = none
            self._select(none)
        log.info(
            "the GPU makes %.0f %% of the optimizer steps of values in host memory; seconds of a training step: %s",
            100 * self._share_of(best),
            ", ".join(
                f"{' and '.join(f'{one:.3f}' for one in measured)} with {100 * self._share_of(selection):.0f} %"
                for selection, measured in seconds.items()
            ),
        )
        return self._share_of(best)

    def _measure(self, warm_up: int) -> Generator[None, StepEnd, list[StepEnd]]:
        """Returns the ends of the last of `warm_up` steps, and of the measured ones after them."""
        ends: list[StepEnd] = []
        for _ in range(warm_up + self.MEASURED):
            end = yield
            ends.append(end)
        return ends[warm_up - 1 :]

    def _rates(self, first: StepEnd, last: StepEnd) -> tuple[float, float] | None:
        """Returns the parameters per second of CPU and device; None: unknown, or the CPU is not busy."""
        elapsed, work = last.seconds - first.seconds, last.work.since(first.work)
        copied = [after.since(before) for before, after in zip(first.copied, last.copied, strict=True)]
        if not self._nbytes or not work.amount or not all(of.seconds for of in copied):
            return None
        if work.seconds < self.BUSY * elapsed:
            return None
        bandwidth = min(of.amount / of.seconds * max(0.2, 1 - of.seconds / elapsed) for of in copied)
        return work.amount / work.seconds, bandwidth * sum(self._parameters) / self._nbytes

    def _share_of(self, selection: Collection[int]) -> float:
        return sum(self._parameters[index] for index in selection) / sum(self._parameters)


def _median(ends: Sequence[StepEnd]) -> float:
    """Returns the median of the seconds between neighbouring ends."""
    return statistics.median(after.seconds - before.seconds for before, after in pairwise(ends))
