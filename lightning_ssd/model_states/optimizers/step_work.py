"""Work of optimizer steps that is done together: calls of adam.c, between which no thread waits for Python's lock.

After each call, the lock is usually held by the training thread, which launches the forward, and jobs of the CPU
optimizer would wait for it: with several flat parameters in a unit, once for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from lightning_ssd.model_states.optimizers.adam import KernelCall, make_calls
from lightning_ssd.spans import OPTIMIZER, span


@dataclass
class StepWork:
    """The calls by which the step of a flat parameter ends.

    Attributes:
        seconds: seconds of the step, of which `do_together` adds those of the calls.
    """

    name: str
    calls: Sequence[KernelCall]
    seconds: float


def do_together(works: Sequence[StepWork]) -> None:
    """Makes the calls of several steps. Their seconds are shared by the numbers of elements."""
    calls = [call for work in works for call in work.calls]
    begun = perf_counter()
    with span(OPTIMIZER + ", ".join(work.name for work in works)):
        make_calls(calls)
    seconds = perf_counter() - begun
    numels = [sum([call.numel for call in work.calls]) for work in works]
    total = max(1, sum(numels))
    for work, numel in zip(works, numels, strict=True):
        work.seconds += seconds * numel / total
