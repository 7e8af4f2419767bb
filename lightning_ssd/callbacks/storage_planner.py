"""`StoragePlanner`: plans for the saved storages of compiled code, with the memory and the speeds of the training."""

import math
from dataclasses import dataclass

from lightning_ssd.activations import ActivationOffloader, AllocatorMeter, SSDTierBase
from lightning_ssd.callbacks.region_progress import RegionProgress
from lightning_ssd.planning import SavedTimeline, StoragePlan, TierSpeed, plan_storages
from lightning_ssd.profiling import HOST_FILL
from lightning_ssd.types import InputChoice


@dataclass(frozen=True)
class StoragePlanner:
    """Makes plans for recorded storages, and says whether the plan of an earlier training has room.

    All methods are called on the training thread, between two steps, while a `RegionSearch` tries rules.

    Attributes:
        offloader: activation offloader of the training.
        meter: the device's allocator.
        fixed_window: whether plans must have the window of micro-batches without a plan, which the user has fixed.
    """

    offloader: ActivationOffloader
    meter: AllocatorMeter
    fixed_window: bool

    def plan(self, progress: RegionProgress, spare_bytes: float = 0.0) -> StoragePlan:
        """Returns a plan for the recorded storages of a shape, of whose micro-batches the room is known.

        Args:
            progress: progress of the shape.
            spare_bytes: bytes of memory beside the room.
        """
        timeline, room, window = progress.timeline, progress.room_bytes, progress.window_bytes
        assert timeline is not None and room is not None
        return plan_storages(timeline, room + spare_bytes, self.speeds(), window, fixed_window=self.fixed_window)

    def has_room(self, plan: StoragePlan, progress: RegionProgress, spare_bytes: float) -> bool:
        """Returns whether the device and the tiers have room for a plan of the recorded storages, with its window.

        Args:
            plan: the plan.
            progress: progress of their shape.
            spare_bytes: bytes of memory beside the room.
        """
        timeline, room, window = progress.timeline, progress.room_bytes, progress.window_bytes
        assert timeline is not None and room is not None
        if self.fixed_window and plan.window_bytes != window:
            return False
        needed = plan.kept_bytes + _in_flight_bytes(plan, timeline)
        return set(plan.choices) <= {"keep", *self.offloader.tiers} and needed <= room + spare_bytes

    def spare_bytes(self, plan: StoragePlan, progress: RegionProgress) -> float:
        """Returns the bytes that steps under a plan leave of the memory that they were expected to need.

        The room for a plan is the memory beside the peak of everything else, which may be at a time when few storages
        are alive. A plan that keeps so many more bytes raises no peak by more, but for the bytes that it has in flight
        then: if steps exceed the limit by them, later ones keep less.

        Args:
            plan: the plan; `MeasuredPeaks` of the shape have no spare bytes.
            progress: progress of the shape. Peaks were reset when the plan's trial began.
        """
        assert progress.timeline is not None
        expected = progress.peaks.others + plan.kept_bytes + _in_flight_bytes(plan, progress.timeline)
        return max(0.0, expected - self.meter.peak())

    def speeds(self) -> dict[InputChoice, TierSpeed]:
        """Returns the speeds of the tiers, as measured in the training so far."""
        out, into = self.offloader.copies.busy()
        write, read = (work.amount / work.seconds if work.seconds else math.inf for work in (out, into))
        speeds: dict[InputChoice, TierSpeed] = {}
        for name, tier in self.offloader.tiers.items():
            if isinstance(tier, SSDTierBase):
                drives = tier.blobs.write_bandwidth, tier.blobs.read_bandwidth
                speeds[name] = TierSpeed(min(write, drives[0]), min(read, drives[1]), tier.capacity)
            else:
                speeds[name] = TierSpeed(write, read, HOST_FILL * tier.capacity)
        return speeds

    def memory(self) -> tuple[float, float]:
        """Returns the bytes of the device, and of host memory for activations, that this training may use."""
        host = self.offloader.tiers.get("host")
        return self.meter.limit(), 0 if host is None else host.capacity


def _in_flight_bytes(plan: StoragePlan, timeline: SavedTimeline) -> int:
    """Returns the most bytes of a plan's window, and of storages that are kept because backward needs them soon."""
    return plan.window_bytes + timeline.early_bytes(plan.window_bytes)
