"""A simulated allocator, and trainings that allocate on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

    def run(
        self, auto: SSDTrainAuto | None, memory: Allocator, micro_batches: int, events: Sequence[str] = ()
    ) -> list[int]:
        """Trains on `memory`, and returns the peak of each micro-batch; None: all storages are offloaded at once.

        `events` happen before each micro-batch after the first: a validation that takes all the memory there is, user
        code that resets the allocator's peak, a forward without a backward.
        """
        peaks = []
        memory.change(self.weights)
        run = Run(self, memory)
        for number in range(micro_batches):
            event = events[number - 1] if 0 < number <= len(events) else ""
            run.happen(event)
            if event == "forward" and auto is not None:
                auto.begin(sum(self.sizes))
            if auto is not None:
                auto.begin(sum(self.sizes) if number else 0)
            # Until amounts are known, a store that would have to wait is given up: nothing is offloaded.
            peaks.append(
                run.micro_batch(
                    Micro(event, 1, thawed=True),
                    lambda size: auto is not None and not (auto.tiers_for(size) and auto.may_wait),
                )
            )
            if auto is not None:
                auto.end()
                stalls = {"host": (0.1, 0.1), "ssd": (0.0, 0.0)}
                auto.observe(MicroBatchProfile(1.0, 2.0, stalls, sum(self.sizes), auto.revision))  # type: ignore[arg-type]
            if (number + 1) % self.accumulate == 0:
                run.step()
        return peaks


@dataclass
class Micro:
    """A micro-batch: its training, the size of its batch, and the event before it."""

    event: str
    scale: int
    thawed: bool


@dataclass
class Run:
    """Runs a training on an allocator. `keep` decides which saved storages are kept."""

    training: Training
    memory: Allocator
    allocated: list[int] = field(default_factory=list)
    """Bytes of each layer's gradients."""
    stepped: set[int] = field(default_factory=set)
    """Layers with optimizer states."""

    def gradients(self, micro: Micro) -> list[int]:
        """Half of the layers are frozen before a thaw, and after a freeze."""
        whole = self.training.gradients
        return whole if micro.thawed else [*[0] * (len(whole) // 2), *whole[len(whole) // 2 :]]

    def happen(self, event: str) -> None:
        memory = self.memory
        if event == "validation" and memory.most:
            free = int(memory.most) + self.training.beyond - memory.level
            memory.change(free)
            memory.change(-free)
        elif event == "reset":
            memory.reset_peak()
        elif event == "leak":
            memory.change(1 + self.training.weights)

    def micro_batch(self, micro: Micro, keep: Callable[[int], bool]) -> int:
        """Returns the peak of a micro-batch."""
        memory, gradients = self.memory, self.gradients(micro)
        self.allocated = self.allocated or [0] * len(gradients)
        memory.highest_of_micro_batch = 0
        kept = []
        for size, transient in zip(self.training.sizes, self.training.transients, strict=True):
            size, transient = micro.scale * size, micro.scale * transient
            memory.change(size + transient)
            memory.change(-transient)
            kept.append(size if keep(size) else 0)
            memory.change(kept[-1] - size)
        for index in reversed(range(len(kept))):
            size, transient = micro.scale * self.training.sizes[index], micro.scale * self.training.transients[index]
            memory.change(size - kept[index] + transient)
            if not self.allocated[index]:
                memory.change(gradients[index])
                self.allocated[index] = gradients[index]
            memory.change(-transient - size)
        return memory.highest_of_micro_batch

    def step(self) -> None:
        """Steps the optimizer, which allocates the states of parameters at their first step."""
        for index, nbytes in enumerate(self.allocated):
            if nbytes and index not in self.stepped:
                self.memory.change(2 * nbytes)
                self.stepped.add(index)
        self.memory.change(-sum(self.allocated))
        self.allocated = []


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
