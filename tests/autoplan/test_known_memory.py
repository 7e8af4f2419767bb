"""Memory of `offload="auto"` on a simulated allocator, from the first steps to plans and larger batches."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.activations.placement import OffloadExcess
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.autoplan.batches import BatchShape, BatchSizes, row_of, size_of_row
from lightning_ssd.autoplan.known_memory import KnownMemory
from lightning_ssd.autoplan.plan_cycle import GROWTH
from tests.support.allocator import TRAININGS, Allocator, Micro, Run, Training

EVENTS = ["", "", "validation", "reset", "forward", "larger", "smaller", "thaw", "freeze", "leak"]


def micro_batches(events: list[str]) -> list[Micro]:
    """Returns 20 micro-batches, some of which have an event before them."""
    found, scale, thawed = [], 2, False
    for event in ("", *events, *[""] * (19 - len(events))):
        scale += {"larger": 1, "smaller": -1 if scale > 1 else 0}.get(event, 0)
        thawed = event == "thaw" or (thawed and event != "freeze")
        found.append(Micro(event, scale, thawed))
    return found


def least_memory(training: Training, micros: list[Micro]) -> int:
    """Returns the peak of a training that offloads each saved storage at once."""
    run = Run(training, Allocator())
    run.memory.change(training.weights)
    peaks = []
    for number, micro in enumerate(micros):
        run.happen(micro.event)
        peaks.append(run.micro_batch(micro, lambda nbytes: False))
        if (number + 1) % training.accumulate == 0:
            run.step()
    return max(peaks)


def train_by_default(training: Training, memory: Allocator, micros: list[Micro], *, plannable: bool) -> list[int]:
    """Trains under the rules of `AutoPlanner`, and returns the peak of each micro-batch.

    A plan keeps as many storages as have room in the step that is recorded, beside all gradients. Micro-batches of
    other sizes follow its rows; those that may need more memory keep none.
    """
    limit = ResidentLimit(memory)
    placement, known = OffloadExcess(("host",), limit), KnownMemory(limit)
    run = Run(training, memory)
    memory.change(training.weights)
    peaks, expected, steps, planning, short = [], 0, 0, False, False
    sizes, recorded, fixed, scaled, level = BatchSizes(), None, 0.0, 0.0, 0
    for number, micro in enumerate(micros):
        run.happen(micro.event)
        shape, saved = BatchShape(((micro.scale, 8),), micro.scale, (micro.scale,)), micro.scale * sum(training.sizes)
        trained = frozenset({0, 1} if micro.thawed else {1})
        if not planning:
            if micro.event == "forward":
                placement.begin(expected)
            placement.begin(expected)
            known.begin(shape, trained)
            short |= known.short
            if known.fits and steps >= 2:
                peaks.append(run.micro_batch(micro, lambda nbytes: True))
                limit.end(hooks=False)
            else:
                peaks.append(
                    run.micro_batch(micro, lambda size: not (placement.tiers_for(size) and placement.may_wait))
                )
                placement.end()
                expected = saved
            known.end(shape, trained)
        else:
            left, before = 0.0, memory.level
            records = recorded is None and number % training.accumulate == 0
            bound, whole = sizes.bound(shape), None if recorded is None else sizes.bound(recorded[0])
            grown = before > level + GROWTH * memory.most
            if recorded is not None and bound and whole and trained <= recorded[1] and not grown:
                size = size_of_row(row_of(bound / whole))
                left = max(0.0, memory.most * (1 - GROWTH) - fixed - size * scaled)

            def keep(nbytes: int) -> bool:
                nonlocal left
                left -= nbytes
                return left >= 0

            peaks.append(run.micro_batch(micro, keep))
            if records:
                gradients = sum(run.gradients(micro)) if training.accumulate > 1 else 0
                recorded, level = (shape, trained), before
                fixed, scaled = before + sum(run.gradients(micro)) + gradients, peaks[-1] - before
            sizes.add(shape, saved)
        if (number + 1) % training.accumulate == 0:
            run.step()
            steps += 1
            planning |= plannable and short and steps >= 2 and not limit.measuring
            short = False
    return peaks


@settings(max_examples=100, deadline=None)
@given(TRAININGS, st.floats(1.0, 1.6), st.lists(st.sampled_from(EVENTS), max_size=18), st.booleans())
def test_never_exceeds_the_limit_if_offloading_everything_fits(
    training: Training, room: float, events: list[str], plannable: bool
) -> None:
    """Holds from the second micro-batch on: the memory of backward is unknown in the first one.

    `ResidentLimit` has a tolerance. Gradients that were not allocated in the measured micro-batch may exceed the limit.
    """
    micros = micro_batches(events)
    memory = Allocator()
    memory.most = least_memory(training, micros) * room
    peaks = train_by_default(training, memory, micros, plannable=plannable)
    gradients = sum(training.gradients) if training.accumulate > 1 else 0
    assert max(peaks[1:]) <= memory.most * (1 + ResidentLimit.TOLERANCE) + gradients


@given(TRAININGS)
def test_keeps_everything_where_everything_fits(training: Training) -> None:
    """Holds from the second micro-batch on. The user's peak of the allocator is not reset."""
    micros = micro_batches([])
    memory, free = Allocator(), Run(training, Allocator())
    memory.most = 100.0 * (sum(training.sizes) + sum(training.transients) + 4 * sum(training.gradients) + 1000)
    peaks = train_by_default(training, memory, micros, plannable=True)
    free.memory.change(training.weights)
    for number, micro in enumerate(micros):
        peak = free.micro_batch(micro, lambda nbytes: True)
        assert number == 0 or peaks[number] == peak
        if (number + 1) % training.accumulate == 0:
            free.step()
    assert not memory.resets


def test_a_measured_small_batch_tells_nothing_of_an_earlier_larger_one() -> None:
    """The second micro-batch, which is measured, has half of the samples of the first and third one."""
    training = Training(1, [1] * 8, [1] * 8, [0] * 8, 1)
    micros = micro_batches(["smaller", "larger"])
    memory = Allocator()
    memory.most = least_memory(training, micros)
    assert max(train_by_default(training, memory, micros, plannable=False)[1:]) <= memory.most


Trained = frozenset[int]


def measured(order: Sequence[Trained], most: float) -> list[int]:
    """Returns the numbers of the measured micro-batches of a training that trains other parameters in each of them."""
    memory = Allocator()
    memory.most = most
    limit = ResidentLimit(memory)
    placement, known = OffloadExcess(("host",), limit), KnownMemory(limit)
    shape, sizes = BatchShape(((2, 8),), 64, (64,)), [100] * 4
    memory.change(1000)
    found = []
    for number, trained in enumerate(order):
        placement.begin(sum(sizes))
        known.begin(shape, trained)
        placement.spread()
        found += [number] if limit.measuring else []
        kept = [size for size in sizes if known.fits or not placement.tiers_for(size)]
        memory.change(sum(kept) + 50)
        memory.change(-sum(kept) - 50)
        limit.end(hooks=not known.fits)
        known.end(shape, trained)
    assert memory.highest_of_micro_batch <= most
    return found


@pytest.mark.parametrize("most", [1e6, 1450.0], ids=["ample", "short"])
def test_each_set_of_trained_parameters_is_measured_once(most: float) -> None:
    assert measured([frozenset({0}), frozenset({1})] * 20, most) == [1, 2]
