"""`CompiledPlan` plans the saved tensors of trainings with compiled code, whose operators are not visible."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from lightning_ssd.activations import PartitionerBudget, PlannedExcess, SSDTierBase, compile_seconds
from lightning_ssd.autoplan.batches import BatchShape, BatchSizes, SeenBatches, row_of, size_of_row
from lightning_ssd.autoplan.known_memory import KnownMemory
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline, StoragePlan, TierSpeed, plan_storages, smaller_budget
from lightning_ssd.profiling import HOST_FILL, SavedTimelineRecorder
from lightning_ssd.sizes import format_bytes
from lightning_ssd.types import InputChoice
from lightning_ssd.uncopied import Uncopied

__all__ = ["CompiledPlan"]

MAX_RECORDINGS = 3
"""Micro-batches that are recorded, before the training is not planned as none had one forward and one backward."""

MAX_MISSED = 25
"""Steps without a large batch, after which any batch is recorded."""

MAX_COMPILE_SECONDS = 120.0
"""Seconds that code may take to compile for it to be compiled again."""

NO_TENSORS = BatchShape((), 0, ())
"""Shape of batches without tensors, which count as equal."""

log = logging.getLogger(__name__)

Phase = Literal["recording", "reading", "compiling", "decided"]


class CompiledPlan(Uncopied):
    """Plans saved storages by their order and times, once, and has code compiled again to save less, at most once.

    A dispatch mode would make Dynamo run compiled code in eager mode. So storages are recorded as the saved-tensor
    hooks see them (`SavedTimelineRecorder`): those of a compiled module appear together when its forward ends, and are
    used together when its backward begins. `plan_storages` chooses keep, host or SSD for each of them.

    One micro-batch is recorded, with all storages offloaded. If its plan would stall the training for longer than
    recomputing takes (`smaller_budget`), code is compiled again with a lower `activation_memory_budget`, and one more
    micro-batch is recorded. The plan is final then. Its rows are for micro-batches of other sizes; one that may need
    more memory than known ones offloads all storages (`KnownMemory`).

    All methods are called on the training thread, outside of forward and backward; none waits for the device.

    Args:
        training: the training.
        known: compares micro-batches with known ones; its limit is that of bytes that may be kept on the device.
        batches: batches of the whole training, of which a large one is recorded.
        recompiles: whether code may be compiled again.

    Attributes:
        plan: the plan for the recorded micro-batch; `None`: there is none yet.
        followed: the plan that the present micro-batch follows; `None`: storages without room are offloaded.
    """

    def __init__(self, training: Training, known: KnownMemory, batches: SeenBatches, *, recompiles: bool) -> None:
        self.plan: StoragePlan | None = None
        self.followed: StoragePlan | None = None
        self._training = training
        self._known = known
        self._batches: SeenBatches | None = batches
        """Batches of which a large one may be recorded; `None`: any."""
        self._recompiles = recompiles
        self._offloader = training.offloader
        self._budget = PartitionerBudget()
        self._placement = PlannedExcess(tuple(self._offloader.tiers), known.limit)
        self._recorder = SavedTimelineRecorder(make_clock(self._offloader.device))
        self._phase: Phase = "recording"
        self._num_recordings = self._num_missed = 0
        self._window_bytes = 0
        """Window of micro-batches without a plan."""
        self._room: float | None = None
        """Bytes of storages, and of the window, for which a micro-batch has room; `None`: not known."""
        self._timeline: SavedTimeline | None = None
        self._sizes = BatchSizes()
        self._recorded_shape = NO_TENSORS
        """Shape of the recorded batch."""
        self._shape = NO_TENSORS
        """Shape of the present batch."""
        self._saved_before = 0
        """Saved bytes of all micro-batches before the present one."""
        self._rows: dict[int, tuple[StoragePlan, tuple[float, ...]]] = {}
        """Plans by the number of their row, with the seconds until each of their storages is saved."""
        self._saved_at: tuple[float, ...] = ()
        """Those seconds of the plan that the present micro-batch follows."""
        self._offloader.run(replace(self._offloader.policy, placement=self._placement))
        known.restart()

    @property
    def decided(self) -> bool:
        """Whether the plan is final."""
        return self._phase == "decided"

    @property
    def rule(self) -> object:
        """Compares equal as long as micro-batches have the same code and the same plan."""
        return self._phase, self._budget.value, id(self.followed)

    @property
    def memory_budget(self) -> float:
        """The `activation_memory_budget` that compiled code has in this training; 1: the user's."""
        return self._budget.value

    # ---- a micro-batch ----

    def begin_micro_batch(self, shape: BatchShape | None, *, begins_step: bool) -> None:
        """Called when a micro-batch begins, before the limit has reduced its window.

        Args:
            shape: shape of the batch; `None`: unknown.
            begins_step: whether it is the first micro-batch of a step.
        """
        self._budget.enter()
        self._shape = NO_TENSORS if shape is None else shape
        self._saved_before = self._offloader.stats().saved
        self.followed = None
        limit = self._known.limit
        if self._room is None and self._num_recordings and limit.known:
            self._room = limit.room_bytes
        if self._phase == "recording" and begins_step and self._may_record(self._shape):
            self._record()
            return
        size = self._size()
        if self._phase != "decided" or self._timeline is None or size is None or limit.measuring:
            self._placement.follow(None)
            return
        number = row_of(size)
        if number not in self._rows:
            timeline = self._timeline.with_size(size_of_row(number))
            self._rows[number] = self._make(timeline), timeline.saved_at
        plan, self._saved_at = self._rows[number]
        self.followed = plan
        if plan.window_bytes != self._offloader.policy.window_bytes:
            self._offloader.run(replace(self._offloader.policy, window_bytes=plan.window_bytes))

    def follow(self) -> None:
        """Called before the forward of a micro-batch, when its window has room: its storages follow the plan."""
        if self.followed is not None:
            self._placement.follow(self.followed, self._saved_at)

    def _size(self) -> float | None:
        """Returns the most bytes that the micro-batch saves / those of the recorded one; `None`: not known."""
        if self._shape is NO_TENSORS:
            return 1.0
        return self._sizes.size(self._shape, self._recorded_shape)

    def _may_record(self, shape: BatchShape) -> bool:
        batches = self._batches
        return batches is None or shape is NO_TENSORS or (batches.covers(shape) and batches.is_large(shape))

    def _record(self) -> None:
        """Records the present micro-batch, with all storages offloaded."""
        self._window_bytes = self._offloader.policy.window_bytes
        self._training.set_window(self._window_bytes)  # plans have windows of their own, and other rules keep this one
        self._known.limit.measure()
        self._placement.follow(None)
        self._num_recordings += 1
        self._room = None
        recorder = self._recorder
        recorder.begin()
        self._offloader.run(
            replace(
                self._offloader.policy,
                hooks_enabled=True,
                on_saved=recorder.on_saved,
                on_unpacked=recorder.on_unpacked,
                on_stall=recorder.on_stall,
            )
        )

    @property
    def recording(self) -> bool:
        """Whether the present micro-batch is recorded."""
        return self._offloader.policy.on_saved is not None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time in the context, before the forward of a micro-batch, from recorded times."""
        yield
        if self.recording:
            self._recorder.begin()

    def end_backward(self) -> None:
        """Called when the backward of a micro-batch has ended."""
        if self.recording:
            self._recorder.end()

    def end_micro_batch(self, *, ran_out: bool = False) -> None:
        """Called when a micro-batch has ended; `ran_out` says that it was run again, as memory had run out."""
        self._budget.exit()
        saved = self._offloader.stats().saved - self._saved_before
        if self.recording:
            policy = self._offloader.policy
            self._offloader.run(replace(policy, on_saved=None, on_unpacked=None, on_stall=None))
            if not ran_out:
                self._sizes, self._recorded_shape = BatchSizes(), self._shape
                self._phase = "reading"
        if not ran_out and self._shape is not NO_TENSORS and self._offloader.policy.hooks_enabled:
            self._sizes.add(self._shape, saved)

    # ---- a step ----

    def end_step(self) -> None:
        """Called when a step has ended."""
        if self._phase == "compiling":
            self._known.restart()  # compilation may have needed memory of its own
            self._phase, self._num_recordings = "recording", 0
        elif self._phase == "reading":
            self._read()
        elif self._phase == "recording":
            self._num_missed += 1
            if self._num_missed == MAX_MISSED:
                self._batches = None

    def _read(self) -> None:
        """Reads the recorded times, once the device has passed them, and plans for these storages."""
        if not self._recorder.complete:
            self._phase = "recording"
            if self._num_recordings == MAX_RECORDINGS:
                self._phase = "decided"
                self._training.inform(
                    "offload='auto': offloads the saved tensors that have no room, as forwards and backwards alternate "
                    "in a step."
                )
            return
        timeline = self._recorder.timeline()
        if timeline is None or self._room is None:
            return  # the device is behind, or no other micro-batch has shown the room for storages
        self._timeline = timeline
        plan = self._make(timeline)
        value = smaller_budget(timeline, plan, self._room, self._speeds()) if self._may_recompile() else None
        if value is None:
            self._decide(plan)
            return
        self._training.inform(
            f"offload='auto': code is compiled again with activation_memory_budget={value:g}, so that it saves less "
            f"and recomputes, as transfers would delay a step by {plan.stall_seconds:.3f} s: the last digits of "
            "results may change. Deterministic algorithms prevent it."
        )
        self._budget.change(value)
        self._known.restart()
        self._sizes = BatchSizes()
        self._phase = "compiling"

    def _may_recompile(self) -> bool:
        unchanged = self._budget.value == 1.0 and self._budget.may_change
        return self._recompiles and unchanged and compile_seconds() <= MAX_COMPILE_SECONDS

    def _make(self, timeline: SavedTimeline) -> StoragePlan:
        assert self._room is not None
        fixed = self._training.fixed_window
        return plan_storages(timeline, self._room, self._speeds(), self._window_bytes, fixed_window=fixed)

    def _decide(self, plan: StoragePlan) -> None:
        """Puts a plan in force for good."""
        self.plan, self._phase = plan, "decided"
        saved, offloaded = format_bytes(sum(plan.sizes)), format_bytes(plan.offloaded_bytes)
        text = f"{offloaded} of {saved} that compiled code saves are offloaded"
        if self._budget.value != 1.0:
            text += f", with activation_memory_budget={self._budget.value:g}, which may change last digits of results"
        self._training.inform(f"offload='auto': {text}.")

    def _speeds(self) -> dict[InputChoice, TierSpeed]:
        """Returns the speeds of the tiers, as measured in the training so far."""
        out, into = self._offloader.copies.busy()
        write, read = (work.amount / work.seconds if work.seconds else math.inf for work in (out, into))
        speeds: dict[InputChoice, TierSpeed] = {}
        for name, tier in self._offloader.tiers.items():
            if isinstance(tier, SSDTierBase):
                drives = tier.blobs.write_bandwidth, tier.blobs.read_bandwidth
                speeds[name] = TierSpeed(min(write, drives[0]), min(read, drives[1]), tier.capacity)
            else:
                speeds[name] = TierSpeed(write, read, HOST_FILL * tier.capacity)
        return speeds

    def close(self) -> None:
        """Restores the user's `activation_memory_budget` and window; the training is over, or is planned anew."""
        self._budget.close()
        self._training.set_window(None)
