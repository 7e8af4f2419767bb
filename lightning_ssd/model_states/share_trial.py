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

    The CPU and the device make their steps in that order, at the same time. Each flat parameter goes to the one that
    ends its step first. Neither the first ones nor the last ones go to the device as a block: the forward would wait
    for the block's end where the other side was done long before. So no step ends later than if the CPU made all, and
    both sides end together at every point of the forward.

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
        seconds: the time.
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

    Threads: the training thread.

    Args:
        parameters: number of parameters of each flat parameter, in the order in which the forward needs them.
        nbytes: bytes that a step copies one way, of all of them.
        select: has the device step the flat parameters of these indices, and no others; returns whether it can.

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
    """Least share of the time that the CPU makes steps in for shares to be tried."""
    GAIN = 0.015
    """Least share of a step's time that the device must save."""

    def __init__(self, parameters: Sequence[int], nbytes: int, select: Callable[[Collection[int]], bool]) -> None:
        self.share: float | None = None
        self._parameters = parameters
        self._nbytes = nbytes
        self._select = select
        self._run = self._try_shares()
        next(self._run)

    def note(self, end: StepEnd) -> None:
        """Notes the end of a step, and may select flat parameters for the next ones."""
        if self.share is not None:
            return
        try:
            self._run.send(end)
        except StopIteration as stop:
            self.share = stop.value

    def _try_shares(self) -> Generator[None, StepEnd, float]:
        """Receives the ends of steps, and returns the share."""
        for _ in range(self.WARM_UP):
            end = yield
        first = end
        seconds: dict[float, float] = {}
        seconds[0.0], end = yield from self._measure(end)
        rates = self._rates(first, end)
        if rates is None:
            return 0.0
        selections: dict[float, set[int]] = {0.0: set()}
        for factor in self.FACTORS:
            chosen = choose_for_device(self._parameters, rates[0], factor * rates[1])
            selections[factor] = {index for index, on_device in enumerate(chosen) if on_device}
            if not self._select(selections[factor]):
                break
            for _ in range(self.WARMUP_AFTER_CHANGE):
                end = yield
            seconds[factor], end = yield from self._measure(end)
        best = min(seconds, key=lambda factor: seconds[factor] * (1.0 if factor else 1 - self.GAIN))
        self._select(selections[best])
        shares = {factor: self._share_of(selections[factor]) for factor in seconds}
        log.info(
            "the GPU makes %.0f %% of the optimizer steps of values in host memory; seconds of a training step: %s",
            100 * shares[best],
            ", ".join(f"{seconds[factor]:.3f} with {100 * share:.0f} %" for factor, share in shares.items()),
        )
        return shares[best]

    def _measure(self, begin: StepEnd) -> "Generator[None, StepEnd, tuple[float, StepEnd]]":
        """Returns the median of the seconds of the next steps, and the last end."""
        ends = [begin]
        for _ in range(self.MEASURED):
            end = yield
            ends.append(end)
        return statistics.median(after.seconds - before.seconds for before, after in pairwise(ends)), ends[-1]

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
