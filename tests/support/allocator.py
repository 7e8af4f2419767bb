"""A simulated allocator, and trainings that allocate on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from lightning_ssd.activations.micro_batch import MicroBatchProfile
from lightning_ssd.activations.placement import SSDTrainAuto
from tests.support.meter import Meter


class Allocator(Meter):
    """Counts bytes as torch's allocator does."""

    def __init__(self) -> None:
        super().__init__(most=0.0, highest=0)
        self.highest_of_micro_batch = self.resets = 0

    def reset_peak(self) -> None:
        self.highest = self.level
        self.resets += 1

    def change(self, nbytes: int) -> None:
        self.level += nbytes
        self.highest = max(self.highest, self.level)
        self.highest_of_micro_batch = max(self.highest_of_micro_batch, self.level)


@dataclass
class Training:
    """A training whose saved storages are `sizes`, each with a transient tensor and a gradient of its layer."""

    weights: int
    sizes: list[int]
    transients: list[int]
    gradients: list[int]
    accumulate: int
    beyond: int = 0
    """Bytes beyond the limit that validation takes."""

    @property
    def states(self) -> int:
        return 2 * sum(self.gradients)

    def run(
        self, auto: SSDTrainAuto | None, memory: Allocator, micro_batches: int, events: Sequence[str] = ()
    ) -> list[int]:
        """Trains on `memory`, and returns the peak of each micro-batch; None: all storages are offloaded at once.

        `events` happen before each micro-batch after the first: a validation that takes all the memory there is, user
        code that resets the allocator's peak, a forward without a backward.
        """
        peaks = []
        memory.change(self.weights)
        allocated = [False] * len(self.sizes)
        for number in range(micro_batches):
            event = events[number - 1] if 0 < number <= len(events) else ""
            if event == "validation":
                free = int(memory.most) + self.beyond - memory.level
                memory.change(free)
                memory.change(-free)
            elif event == "reset":
                memory.reset_peak()
            elif event == "forward" and auto is not None:
                auto.begin(sum(self.sizes))
            memory.highest_of_micro_batch = 0
            if auto is not None:
                auto.begin(sum(self.sizes) if number else 0)
            kept = []
            for size, transient in zip(self.sizes, self.transients, strict=True):
                memory.change(size + transient)
                memory.change(-transient)
                # Until amounts are known, a store that would have to wait is given up: nothing is offloaded.
                is_kept = auto is not None and not (auto.tiers_for(size) and auto.may_wait)
                kept.append(size if is_kept else 0)
                memory.change(kept[-1] - size)
            for index in reversed(range(len(self.sizes))):
                fetched = self.sizes[index] - kept[index]
                memory.change(fetched + self.transients[index])
                if not allocated[index]:
                    memory.change(self.gradients[index])
                    allocated[index] = True
                memory.change(-self.transients[index] - self.sizes[index])
            peaks.append(memory.highest_of_micro_batch)
            if auto is not None:
                auto.end()
                saved = sum(self.sizes)
                stalls = {"host": (0.1, 0.1), "ssd": (0.0, 0.0)}
                auto.observe(MicroBatchProfile(1.0, 2.0, stalls, saved, auto.revision))  # type: ignore[arg-type]
            if (number + 1) % self.accumulate == 0:
                if number + 1 == self.accumulate:
                    memory.change(self.states)
                memory.change(-sum(self.gradients))
                allocated = [False] * len(self.sizes)
        return peaks


SIZES = st.integers(1, 1000)
TRAININGS = st.integers(1, 12).flatmap(
    lambda count: st.builds(
        Training,
        weights=SIZES,
        sizes=st.lists(SIZES, min_size=count, max_size=count),
        transients=st.lists(SIZES, min_size=count, max_size=count),
        gradients=st.lists(st.integers(0, 300), min_size=count, max_size=count),
        accumulate=st.integers(1, 3),
        beyond=st.integers(0, 100),
    )
)
