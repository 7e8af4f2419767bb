"""Storages in flight are evicted once their copies should be done, by the recorded times of a plan."""

from collections import deque
from typing import Any

import torch

from lightning_ssd.activations import OffloadAll, OffloadPolicy, SavedStorage, Segment, State, UnitDispatchMode
from lightning_ssd.activations.in_flight import InFlight
from lightning_ssd.activations.micro_batch import MicroBatch
from lightning_ssd.activations.tier import Load, StoredCopy
from lightning_ssd.device import CPUCopyEngine, Mark, WorkCounter, make_clock
from tests.support.offloader import CPU, MIB


class LaggingEngine(CPUCopyEngine):
    """An engine whose device is behind the host, and copies 1 GB in a second."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.device = torch.device("cuda")
        self.copied = WorkCounter(0, 0.0)

    def busy(self) -> tuple[WorkCounter, WorkCounter]:
        return self.copied, WorkCounter(0, 0.0)


class Copy(StoredCopy):
    def wait_copied(self) -> Mark:
        return None

    def load(self, *, urgent: bool) -> Load:
        raise NotImplementedError

    def free(self) -> None:
        return None


class Recorded(UnitDispatchMode):
    """A mode that knows the seconds of the forward."""

    def begin_segment(self, segment: Segment) -> None:
        return None

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


def test_copies_have_the_recorded_time_until_later_regions_save() -> None:
    """A region saves its storages at one time: their bytes do not show that time has passed."""
    sizes, saved_at = [5 * MIB, 10 * MIB, MIB, MIB, MIB], [0.010, 0.010, 0.018, 0.026, 0.100]
    mode = Recorded([])
    copies = LaggingEngine()
    in_flight = InFlight(copies, OffloadPolicy(OffloadAll(("host",)), mode, window_bytes=100 * MIB))
    copies.copied = WorkCounter(10**9, 1.0)
    batch = MicroBatch(None, make_clock(CPU), 0, 0)
    in_flight.begin_micro_batch(batch)
    records: list[SavedStorage] = []

    def evicted() -> list[bool]:
        return [record.state is State.OFFLOADED for record in records]

    seen = []
    for index, nbytes in enumerate(sizes):
        record = SavedStorage(torch.empty(nbytes, dtype=torch.uint8), batch, index, deque())
        batch.add(record)
        mode.elapsed = saved_at[index]
        record.offload(Copy(), "host")
        assert record.data is not None
        in_flight.add(record, record.data, record.copy or Copy())
        records.append(record)
        in_flight.evict_copied()
        seen.append(evicted())
    # 5 MiB are copied until 0.0153 s, and 10 MiB more until 0.0257 s; margins are 3 % of these times.
    assert seen[:4] == [[False], [False] * 2, [True, False, False], [True, False, False, False]]
    assert seen[4] == [True, True, True, True, False]
