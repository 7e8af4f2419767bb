"""The optimizer step of one flat, from its gradient's arrival until it counts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from lightning_ssd.device import Worker, all_of, finished, then
from lightning_ssd.spans import OPTIMIZER, span
from lightning_ssd.states.gradient import Gradient
from lightning_ssd.states.home import Home, Opened
from lightning_ssd.states.optimizers import FlatOptimizer, Options


@dataclass(frozen=True)
class OptimizerStep:
    """What one step needs. Its methods return a future that is done when the step counts, or was skipped.

    Who owns what until when: the gradient's memory is the step's until that future is done, which is the gradient's
    `settled`. What is opened is the reads', then the job's that makes the step, then the writes' (see `Home`).

    Attributes:
        home: of the flat.
        rule: its optimizer's.
        options: of its parameter group.
        gradient: of the flat.
        landed: of each parameter, whether it has a gradient in `gradient.landing`; None: what counts is what was
            summed up.
        factor: what to multiply the gradient with, or None if the step is skipped.
        limit: what elements of the gradient are clamped to, after that.
        stepper: runs the jobs.
        count: is told of each job, on its thread, how many parameters it has stepped, and in how many seconds.
        priority: of the jobs, and of what is read for them.
    """

    home: Home
    rule: FlatOptimizer
    options: Options
    gradient: Gradient
    landed: Sequence[bool] | None
    factor: "Future[float | None]"
    limit: float | None
    stepper: Worker
    count: Callable[[int, float], None]
    priority: int

    def early(self, guess: float, arrived: "Future[None]", ready: "Sequence[Future[None]]") -> "Future[None]":
        """Makes the step with a guess, as soon as it can, and again if the factor turns out to be another.

        Args:
            guess: of the factor.
            arrived: done when the gradient is there.
            ready: done when the flat may be opened. Until then it must not be: it would hold memory that steps of
                before, which these wait for, may want.
        """
        # Before the gradient is there, so that reads overlap with what comes before.
        opened = then(all_of(ready), lambda _: self.home.open(step=True, priority=self.priority))
        made = self._submit(lambda: self._make(opened.result(), guess), [arrived, opened])
        return then(all_of([made, self.factor]), lambda _: self._settle(guess))

    def late(self, after: "Sequence[Future[Any]]") -> "Future[None]":
        """Makes the step when the factor is known.

        Nothing is opened before: held until then, it would keep others from being opened, which the next forward
        wants first.
        """
        return then(all_of([*after, self.factor]), lambda _: self._settle(None))

    def naive(self, after: "Sequence[Future[Any]]") -> "Future[None]":
        """Reads, steps and writes in one job, in whose time no other runs (LoHan's figure 3b)."""

        def run() -> None:
            if (factor := self.factor.result()) is not None:
                self._make(self.home.open(step=True).result(), factor)
            self._end(counts=factor is not None)
            self.home.written().result()

        return self._submit(run, [*after, self.factor])

    def _submit(self, run: Any, after: "Sequence[Future[Any]]") -> "Future[None]":
        return self.stepper.submit(run, after, priority=self.priority)

    def _make(self, opened: Opened, factor: float) -> None:
        """Steps what is opened, and has it written."""
        begun = perf_counter()
        whole = self.gradient.landing if self.landed is not None else self.gradient.total
        assert whole is not None
        if self.limit is not None:
            whole, factor = (whole.float() * factor).clamp_(-self.limit, self.limit), 1.0
        changed = False
        has = self._has()
        try:
            with span(OPTIMIZER + self.home.flat.name):
                self.rule.step(self.options, opened, whole, has, factor)
            changed = True
            seconds = perf_counter() - begun
        finally:
            self.home.close(opened, changed=changed, step=True)
        slices = zip(self.home.flat.slices, has, strict=True)
        self.count(sum(item.numel for item, stepped in slices if stepped), seconds)

    def _settle(self, guess: float | None) -> "Future[None]":
        """Lets the step count that was made with a guess, if that was right; else it is made now."""
        factor = self.factor.result()
        if factor is None or factor == guess:
            self._end(counts=factor is not None)
            return finished(None)
        opened = self.home.open(step=True, priority=self.priority)

        def run() -> None:
            self._make(opened.result(), factor)
            self._end(counts=True)

        return self._submit(run, [opened])

    def _end(self, *, counts: bool) -> None:
        if counts:
            self.rule.commit(self._has())
            self.home.commit()
        self.gradient.summed = [False] * len(self.gradient.summed)

    def _has(self) -> Sequence[bool]:
        return self.gradient.summed if self.landed is None else self.landed
