"""The tasks of simulated training steps, that is compute, transfers and optimizer jobs, and their dependencies.

They follow the rules by which the runtime orders its work: windows and staging memory, prefetches and evictions,
cancelled writes, deferred steps in halves, launches by the host.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

from lightning_ssd.planning.event_simulation import (
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    CPU,
    NORMAL,
    RESOURCES,
    SSD,
    URGENT,
    Task,
)
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile, PartProfile
from lightning_ssd.planning.plan import PartPlan, Plan
from lightning_ssd.planning.resident import JOBS_AHEAD, kept_weights
from lightning_ssd.planning.stages import Stage, cut_stages
from lightning_ssd.types import EVICT_MARGIN

IN_FLIGHT_BYTES = 2**25
"""Bytes of the writes that are running when backward needs them: only queued writes are cancelled."""

MAX_TRANSFERS = 192
"""Most transfers of swapped tensors to the GPU in a backward, or one for each stage if there are more stages."""

BACKWARD_LAUNCH = 0.5
"""Host time to launch a backward / host time to launch its forward: autograd runs in C++."""

OFFLOADED_LAUNCH = 1.2
"""Host time to launch a unit whose weights are offloaded / host time if they are on the GPU: hooks fetch weights and
offload gradients, and operators are given the weights by Python.

On an H200, GPT-2 XL in 24 GiB with two thirds of its states on the GPU took 0.401 s a step. From the profile of that
training, 0.461 s are predicted with equal launches, and 0.407 s with these.
"""


class Launch(NamedTuple):
    """The host's launch of a compute task's work.

    Attributes:
        compute: the task.
        seconds: seconds of the host.
        waits: tasks before whose end the host can't issue the copy of the weights to the GPU: their read from SSDs, or
            else the optimizer jobs that step them.
    """

    compute: Task
    seconds: float
    waits: Sequence[Task]


class StepTasks:
    """Makes the tasks of steps, one after the other.

    Args:
        model: profile of the model, with all micro-batches of a step.
        hardware: profile of the machine.
        plan: plan of the steps, which matches the model.

    Attributes:
        units: profiles and placements of the parts of each unit.
        stages: stages of a forward, in order.
        tasks: tasks of all steps so far.
        launch_seconds: host seconds to launch the GPU's work of the last step.
        launches: launches of the last step.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, plan: Plan) -> None:
        self.model = model
        self.plan = plan
        parts = iter(plan.parts(model))
        self.units = [[(profile, next(parts)) for profile in unit.own_parts] for unit in model.units]
        self.stages = cut_stages(model, plan)
        self._weights = [
            (
                sum(profile.weight_bytes for profile, part in unit if part.weights != "gpu"),
                sum(profile.weight_bytes for profile, part in unit if part.weights == "ssd"),
            )
            for unit in self.units
        ]
        """By unit, the bytes of the weights that are copied to the GPU, and the part that is read from SSDs."""
        for stage in self.stages:
            if self._weights[stage.unit][0]:
                stage.launch *= OFFLOADED_LAUNCH
                stage.rerun_launch *= OFFLOADED_LAUNCH
        self.tasks: list[Task] = []
        self._cpu_step_rate = hardware.cpu_step_rate
        self._weights_first, self._rest_later = hardware.cpu_weights_first, hardware.cpu_rest_later
        self._gpu_memory_bandwidth = hardware.gpu_memory_bandwidth
        self._compute: Task | None = None
        """The last compute task."""
        self._incoming = BoundedFifo(plan.window_bytes)
        self._outgoing = BoundedFifo(plan.window_bytes)
        self._read_ahead = BoundedFifo(plan.staging_bytes)
        self._written_behind = BoundedFifo(plan.staging_bytes)
        self._offloaded_parameters = sum(
            profile.parameters for parts in self.units for profile, part in parts if part.offloaded
        )
        self._offloaded_gradients = [
            sum(profile.gradient_bytes for profile, part in parts if part.offloaded) for parts in self.units
        ]
        self._kept_gradients = [
            sum(profile.resident_gradient_bytes for profile, part in parts if not part.offloaded)
            for parts in self.units
        ]
        self._forwarded = _forwarded(self.stages, plan.window_bytes, hardware.copy_out)
        self._staged = _staged(self.stages, 2 * plan.staging_bytes, hardware.ssd_write)
        self._updated: list[list[Task]] = [[] for _ in self.units]
        """By unit, the tasks of the last optimizer jobs at whose end the next forward may begin."""
        self._second_halves: list[list[Task]] = [[] for _ in self.units]
        """By unit, the second halves of the last optimizer jobs."""
        # Tensors are prefetched one by one. With many stages, one transfer for all of a stage is accurate enough.
        self._max_pieces = max(1, MAX_TRANSFERS // len(self.stages))
        self._jobs: list[Task] = []
        """The last task of each job that uses staging memory."""
        self._kept_weights = kept_weights(model, plan)
        self._overhead = hardware.host_overhead
        self._intercepted = plan.intercepted
        self._packed = [
            intercepted or (plan.offloads_states and not unit.checkpoint)
            for intercepted, unit in zip(plan.intercepted, plan.units.values(), strict=True)
        ]
        """By unit, whether its saved tensors are packed, as weights among them may be offloaded."""
        self.launch_seconds = 0.0
        self.launches: list[Launch] = []

    def add_step(self, step: int) -> Task:
        """Adds the tasks of a step; returns its last compute task."""
        self.launch_seconds = 0.0
        self.launches.clear()
        for micro_batch in range(self.model.micro_batches):
            stored = [self._add_forward(step, index) for index in range(len(self.stages))]
            backward_start = self._compute
            gradients: list[Task | None] = [None] * len(self.units)
            for index in reversed(range(len(self.stages))):
                gradient = self._add_backward(step, index, stored[index], backward_start, first=micro_batch == 0)
                if gradient is not None:
                    gradients[self.stages[index].unit] = gradient
            if micro_batch == self.model.micro_batches - 1:
                self._add_jobs(step, gradients, backward_start)
        assert self._compute is not None
        return self._compute

    def share_host_memory(self, bandwidth: float) -> None:
        """Lengthens the CPU optimizer's jobs by the time in which concurrent copies use the bandwidth of host memory.

        This is the time of all copies if jobs run during the whole step, and less if the step is longer than its jobs.
        """
        last = self.tasks[-1].step
        amounts = [0.0] * len(RESOURCES)
        for task in self.tasks:
            if task.step == last:
                amounts[task.resource] += task.amount
        if not amounts[CPU]:
            return
        needed = (amounts[COPY_IN] + amounts[COPY_OUT]) / bandwidth
        longer = 1 + needed / amounts[CPU]
        if needed < amounts[COMPUTE]:
            longer = min(longer, 1 / (1 - needed / amounts[COMPUTE]))
        for task in self.tasks:
            if task.resource == CPU:
                task.amount *= longer

    def _task(self, resource: int, amount: float, step: int, *after: Task | None, write: bool = False,
              priority: int = NORMAL) -> Task:  # fmt: skip
        task = Task(resource, amount, step, *after, write=write, priority=priority)
        self.tasks.append(task)
        return task

    def _add_compute(self, step: int, seconds: float, *after: Task | None) -> Task:
        self._compute = self._task(COMPUTE, seconds, step, self._compute, *after)
        return self._compute

    def _add_launch(self, compute: Task, seconds: float, waits: Sequence[Task] = ()) -> None:
        """Adds the launch of a compute task's work, for which the host waits for the ends of `waits`."""
        self.launch_seconds += seconds
        self.launches.append(Launch(compute, seconds, waits))

    def _add_prefetch(
        self, step: int, nbytes: int, from_ssd: int, allocated: int, *after: Task | None
    ) -> tuple[Task, Task | None]:
        """Adds a transfer of `nbytes` to the GPU, of which `from_ssd` are read from SSDs, once the tasks `after` have
        ended.

        The caller frees the bytes in the window of incoming bytes. The transfer allocates `allocated` bytes on the GPU.

        Returns:
            The copy to the GPU, and the read, if there is one.
        """
        room = self._incoming.allocate(nbytes)
        read = None
        if from_ssd:
            read = self._task(SSD, from_ssd, step, *self._read_ahead.allocate(from_ssd), *after, priority=URGENT)
            read.host = (from_ssd, 0)
            allocation = self._task(COPY_IN, 0, step, *room, *after)  # while it is read
            allocation.gpu = (allocated, 0)
        copy = self._task(COPY_IN, nbytes, step, *room, read, *(() if read else after))
        copy.gpu = (0 if read else allocated, 0)
        copy.host = (0, from_ssd)
        if from_ssd:
            self._read_ahead.free_after(from_ssd, copy)
        return copy, read

    def _shared(self, nbytes: int) -> float:
        """Returns the seconds by which copies of `nbytes` delay compute, because both use the GPU's memory."""
        return nbytes / self._gpu_memory_bandwidth

    def _allocated_bytes(self, weights: int) -> int:
        """Returns the GPU bytes that prefetched weights allocate: none if memory is reserved for them."""
        return weights if self.model.param_budget_bytes is None else 0

    def _add_forward(self, step: int, index: int) -> Task | None:
        """Adds a stage's forward; returns the task at whose end its swapped tensors are in their tier."""
        stage = self.stages[index]
        weights, from_ssd = self._weights[stage.unit] if stage.first else (0, 0)
        updated = self._updated[stage.unit] if stage.first else []
        prefetched = None
        before = self._compute
        waits: Sequence[Task] = ()
        if weights:
            prefetched, read = self._add_prefetch(step, weights, from_ssd, self._allocated_bytes(weights), *updated)
            waits, updated = ([read] if read else updated), []
        room = self._outgoing.allocate(0) if stage.swapped else []
        compute = self._add_compute(
            step, stage.forward + self._shared(weights + stage.swapped), prefetched, *updated, *room
        )
        overhead = self._overhead
        added = overhead.dispatch * stage.operations if self._intercepted[stage.unit] else 0.0
        added += overhead.pack * stage.num_saved if self._packed[stage.unit] else 0.0
        added += overhead.record * stage.remat_operations + overhead.offload * stage.num_swapped
        added += overhead.checkpoint * stage.num_rerun_saved
        self._add_launch(compute, stage.launch + added, waits)
        if weights:
            # The bytes in the window are freed once the unit is in use: when the previous compute task has ended.
            self._incoming.free_after(weights, before or compute)
        released = self._allocated_bytes(self._weights[stage.unit][0]) if stage.last else 0
        compute.gpu = (stage.saved + stage.fwd_workspace, stage.fwd_workspace + released)
        if index in self._forwarded:  # backward does not use the copy, whose writes to SSDs are cancelled
            copy = self._task(COPY_OUT, stage.swapped, step, compute)
            self._outgoing.free_after(stage.swapped, copy)
            excess = stage.to_ssd - 2 * self.plan.staging_bytes
            if excess > 0:  # the host blocks until the rest fits into staging memory
                self._add_compute(step, 0.0, self._task(SSD, excess, step, copy, write=True))
            return None
        return self._add_swap_out(step, index, compute) if stage.swapped else None

    def _add_swap_out(self, step: int, index: int, compute: Task) -> Task:
        stage = self.stages[index]
        to_ssd = stage.to_ssd - self._staged.get(index, 0)
        room = self._written_behind.allocate(to_ssd) if to_ssd else []
        copy = self._task(COPY_OUT, stage.swapped, step, compute, *room)
        copy.gpu = (0, stage.swapped)
        copy.host = (stage.swapped, 0)
        self._outgoing.free_after(stage.swapped, copy)
        if not to_ssd:
            return copy
        write = self._task(SSD, to_ssd, step, copy, write=True)
        write.host = (0, to_ssd)
        write.ssd = to_ssd
        self._written_behind.free_after(to_ssd, write)
        return write

    def _add_backward(
        self, step: int, index: int, stored: Task | None, backward_start: Task | None, *, first: bool
    ) -> Task | None:
        """Adds a stage's backward; returns the task at whose end the unit's gradient is offloaded, if it is complete.

        Its swapped tensors are in their tier when `stored` ends, and are prefetched after `backward_start`, the last
        task of the forward. The first backward of a step frees the last step's gradients.
        """
        stage = self.stages[index]
        unit = stage.unit
        weights, from_ssd = self._weights[unit] if stage.last and unit not in self._kept_weights else (0, 0)
        before = self._compute
        assert before is not None
        swapped = 0 if index in self._forwarded else stage.swapped
        to_ssd = 0 if index in self._forwarded else stage.to_ssd - self._staged.get(index, 0)
        nbytes, from_ssds = weights + swapped, from_ssd + to_ssd
        prefetched = None
        count = min(self._max_pieces, ceil(swapped / stage.largest)) if swapped else 1
        for piece in range(count if nbytes else 0):
            copied, read, freed, deleted, allocated = (
                total * (piece + 1) // count - total * piece // count
                for total in (nbytes, from_ssds, from_ssd + swapped, to_ssd, self._allocated_bytes(weights) + swapped)
            )
            # Weights are those of the last step, tensors those of this forward.
            updated = self._updated[unit] if weights else []
            begin = backward_start if swapped else None
            prefetched, _ = self._add_prefetch(step, copied, read, allocated, stored, begin, *updated)
            prefetched.host = (0, freed)
            prefetched.ssd = -deleted
            self._incoming.free_after(copied, before)
        gradient = self._offloaded_gradients[unit]
        room = self._outgoing.allocate(gradient) if gradient and stage.first else []
        seconds = stage.backward + stage.remat_seconds + self._shared(nbytes + (gradient if stage.first else 0))
        compute = self._add_compute(step, seconds, prefetched, *room)
        added = self._overhead.replay * stage.remat_operations + self._overhead.prefetch * stage.num_swapped
        added += stage.rerun_launch + self._overhead.rerun * stage.num_rerun_saved
        self._add_launch(compute, BACKWARD_LAUNCH * stage.launch + added)
        released = self._allocated_bytes(self._weights[unit][0]) if stage.first else 0
        allocated = stage.remat_bytes + stage.bwd_workspace + (gradient if stage.first else 0)
        if first and index == len(self.stages) - 1:
            allocated -= sum(self._kept_gradients)
        if first and stage.first:
            allocated += self._kept_gradients[unit]
        compute.gpu = (allocated, stage.saved + stage.recomputed + stage.bwd_workspace + released)
        if not (stage.first and gradient):
            return compute if stage.first else None
        second_halves = self._second_halves[unit]
        copy = self._task(COPY_OUT, gradient, step, compute, *second_halves)
        if second_halves:  # the host blocks until the last step has freed the gradient's memory
            self._add_compute(step, 0.0, *second_halves)
        copy.gpu = (0, gradient)
        self._outgoing.free_after(gradient, copy)
        return copy

    def _share_in_halves(self) -> float:
        """Returns the largest share of units whose deferred steps, in two halves, do not delay the next backward."""
        second_halves = self._rest_later * self._offloaded_parameters / self._cpu_step_rate
        backward = sum(stage.backward + stage.remat_seconds for stage in self.stages)
        # A step is as long as backward and the first halves, and no shorter than all halves.
        return min(1.0, backward / second_halves) if second_halves else 0.0

    def _add_jobs(self, step: int, gradients: Sequence[Task | None], backward_start: Task | None) -> None:
        """Adds the optimizer steps after backward: one task on the GPU for resident parts, jobs for the others.

        A unit's gradient is in its tier when its task of `gradients` ends; states are prefetched after
        `backward_start`, the last task of the last forward.
        """
        scale_known = self._compute
        between = self._between_seconds()
        resident_step: Task | None = None
        if between:
            self.launch_seconds += between  # an upper bound of the host's time for these steps
            resident_step = self._add_compute(step, between)
            moved = max(0, self.model.between_offloaded - self._offloaded_parameters)  # since steps were measured
            workspace = self.model.between_gpu_bytes + self.model.step_workspace * moved
            resident_step.gpu = (workspace, workspace)
        deferred = self.plan.clip == "deferred"
        order = range(len(self.units)) if deferred else reversed(range(len(self.units)))
        num_in_halves = self._share_in_halves() * len(self.units) if deferred else 0
        for index in order:
            before, self._updated[index] = self._updated[index], []
            self._second_halves[index] = []
            for profile, part in self.units[index]:
                if part.states != "gpu":
                    after = (gradients[index], scale_known if deferred else None)
                    in_halves = index < num_in_halves and part.in_host
                    self._add_job(step, index, profile, part, after, before, backward_start, in_halves=in_halves)
                elif resident_step is not None and resident_step not in self._updated[index]:
                    self._updated[index].append(resident_step)

    def _between_seconds(self) -> float:
        """Returns the GPU seconds between backward and the next forward: steps of resident parameters, and idle time.

        The measured idle time (see `ModelProfile.between_offloaded`) is scaled by the number of offloaded parameters.
        """
        placed = [item for parts in self.units for item in parts]

        def step_seconds(profiles: Iterable[PartProfile]) -> float:
            if self.model.step_bytes is not None:
                nbytes = self.model.step_bytes * sum(profile.parameters for profile in profiles)
            else:
                nbytes = sum(profile.resident_bytes + profile.state_bytes_written for profile in profiles)
            return nbytes / self._gpu_memory_bandwidth

        measured, offloaded_then = self.model.between_seconds, self.model.between_offloaded
        if measured is None:
            return step_seconds(profile for profile, part in placed if not part.offloaded)
        if not offloaded_then or not self.model.parameters:
            return measured
        per_parameter = step_seconds(profile for profile, _ in placed) / self.model.parameters
        offloaded = self._offloaded_parameters
        idle = max(0.0, measured - per_parameter * (self.model.parameters - offloaded_then))
        return per_parameter * (self.model.parameters - offloaded) + min(1.0, offloaded / offloaded_then) * idle

    def _add_job(
        self,
        step: int,
        index: int,
        profile: PartProfile,
        part: PartPlan,
        after: Sequence[Task | None],
        before: Sequence[Task],
        backward_start: Task | None,
        *,
        in_halves: bool,
    ) -> None:
        """Adds the optimizer job of a part that is not on the GPU, in two halves if `in_halves`.

        It steps after the tasks `after`, and those of the unit in the step before (`before`); its states are prefetched
        after `backward_start`, the last task of the last forward.
        """
        on_ssd = part.states == "ssd"
        written = (profile.state_bytes_written if on_ssd else 0) + (
            profile.weight_bytes if part.weights == "ssd" else 0
        )
        read = None
        if on_ssd and profile.state_bytes_read:
            room = self._jobs[-JOBS_AHEAD] if len(self._jobs) >= JOBS_AHEAD else None
            read = self._task(SSD, profile.state_bytes_read, step, room, backward_start, *before)
        # Among ready jobs, that of the first unit is the most urgent for the next forward.
        seconds = profile.parameters / self._cpu_step_rate
        if in_halves:
            first = self._task(CPU, self._weights_first * seconds, step, *after, priority=index)
            self._updated[index].append(first)
            last = 2 * len(self.units) - index
            self._second_halves[index].append(self._task(CPU, self._rest_later * seconds, step, first, priority=last))
            return
        done = self._task(CPU, seconds, step, read, *after, priority=index)
        if written:
            done = self._task(SSD, written, step, done, write=True)
        if on_ssd:
            self._jobs.append(done)
        self._updated[index].append(done)


class BoundedFifo:
    """Memory of a fixed size that is allocated and freed in FIFO order."""

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes
        self._items: list[tuple[int, Task]] = []
        self._used = 0
        self._oldest = 0
        self._freed: list[Task] = []

    def allocate(self, nbytes: int) -> list[Task]:
        """Allocates `nbytes`; returns the tasks that have to end before there is room for them.

        An item that is larger than the whole memory waits until the memory is empty.
        """
        freed = self._freed[-1:]  # in order: this item waits for the tasks that earlier ones wait for, too
        while self._oldest < len(self._items) and self._used + nbytes > self._limit:
            size, task = self._items[self._oldest]
            self._used -= size
            self._oldest += 1
            freed.append(task)
        self._freed = freed
        return freed

    def free_after(self, nbytes: int, task: Task) -> None:
        """Frees the last item, of `nbytes`, at the end of `task`."""
        self._items.append((nbytes, task))
        self._used += nbytes


def _forwarded(stages: Sequence[Stage], window_bytes: int, copy_out: float) -> set[int]:
    """Returns the stages whose swapped bytes are still being copied when backward begins, and are not evicted.

    The activation offloader behaves like this under a plan: it evicts a storage when its copy should be done by the
    elapsed seconds of the forward, and the oldest storage when the window is full.
    """
    elapsed = copied_at = 0.0
    window: deque[tuple[int, int, float]] = deque()
    used = 0
    for index, stage in enumerate(stages):
        elapsed += stage.forward
        if stage.swapped:
            copying = stage.swapped / copy_out
            copied_at = max(copied_at, elapsed) + copying
            window.append((index, stage.swapped, (1 + EVICT_MARGIN) * copied_at))
            used += stage.swapped
        while window and (window[0][2] <= elapsed or (len(window) > 1 and used > window_bytes)):
            used -= window.popleft()[1]
    return {index for index, _, _ in window}


def _staged(stages: Sequence[Stage], staging_bytes: int, ssd_write: float) -> dict[int, int]:
    """Returns, by stage, the bytes for SSDs that are still in staging memory when backward needs them.

    Writes of these bytes are cancelled, and they are not read. If staging memory is full at the end of forward, drives
    continue to write while backward needs the last saved tensors.
    """
    left = sum(stage.to_ssd for stage in stages) - ssd_write * sum(stage.forward for stage in stages)
    room = staging_bytes - IN_FLIGHT_BYTES - ssd_write * sum(stage.backward + stage.remat_seconds for stage in stages)
    left = round(min(left, room))
    staged = {}
    for index in reversed(range(len(stages))):
        if left > 0 and stages[index].to_ssd:
            staged[index] = min(left, stages[index].to_ssd)
            left -= staged[index]
    return staged
