"""Simulates a training step under a plan, and predicts its seconds and the bytes in each tier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from lightning_ssd.planning.endurance import DAY
from lightning_ssd.planning.event_simulation import COPY_IN, COPY_OUT, RESOURCES, SSD, MemoryLog, run
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.resident import resident_bytes
from lightning_ssd.planning.step_tasks import Launch, StepTasks

STEPS = 3
"""Simulated steps. The last one is that of the steady state, because the first begins without work in flight, and the
optimizer jobs of a step overlap the next forward. `count_steps` says where one step fewer is enough."""

MICRO_BATCHES = 3
"""Simulated micro-batches of a step that has many: the first, one that stands for all others, and the last."""


REMAP_BANDWIDTH = 45e9
"""Bytes of the largest tensor / seconds in which torch's allocator frees cached GPU memory and maps it anew for that
tensor: a step in which this happened once, for 4.6 GiB, took about 0.1 s more (Qwen2.5 of 1.5B, H200)."""


OFFLOADED_COST = 0.15
"""Share by which plans count a step as longer if all states are offloaded. The host and the CPU's optimizer delay each
other more, or less, than was predicted, and states take RAM. Steps of a Whisper-medium in 16 GiB, with 75 to 100 % of
its states in RAM, were predicted at 0.52, 0.65 and 0.69 s (three H200 hosts), and took 0.67, 0.67 and 0.62 s. With 15 %
of its states in RAM, they were predicted at 0.55, 0.68 and 0.70 s, and took 0.55, 0.62 and 0.57 s. With a cost of 0.1,
the first host's plan would have most states in RAM."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a training step under a plan.

    Attributes:
        step_seconds: duration of a step in the steady state.
        busy_seconds: busy time per step of each resource: "compute", "copy_in", "copy_out", "ssd", "cpu" and "launch",
            the host thread that launches the GPU's work.
        stall_seconds: time per step in which the GPU computes nothing.
        gpu_peak_bytes: peak of GPU memory.
        host_peak_bytes: peak of host memory.
        ssd_peak_bytes: peak of bytes stored on SSDs.
        ssd_read_bytes: bytes read from SSDs per step.
        ssd_written_bytes: bytes written to SSDs per step.
        copied_bytes: bytes copied to and from the GPU per step.
        bound: the busiest resource.
        offloaded_share: bytes of weights, gradients and states of offloaded parts / those of all parts, both counted as
            if they were on the GPU.
    """

    step_seconds: float
    busy_seconds: dict[str, float]
    stall_seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int
    ssd_peak_bytes: int
    ssd_read_bytes: int
    ssd_written_bytes: int
    copied_bytes: int
    bound: str
    offloaded_share: float

    @property
    def cost_seconds(self) -> float:
        """Seconds by which plans are compared: those of a step, and more if states are offloaded."""
        return (1 + OFFLOADED_COST * self.offloaded_share) * self.step_seconds

    def excess_bytes(self, hardware: HardwareProfile) -> int:
        """Returns the sum of bytes by which the plan exceeds the limits of memory and SSD writes, 0 if it fits."""
        return sum(self.lacking_bytes(hardware).values())

    def lacking_bytes(self, hardware: HardwareProfile) -> dict[str, int]:
        """Returns the bytes by which the plan exceeds each limit, by name; limits that it keeps are absent."""
        excess = {
            "GPU memory": self.gpu_peak_bytes - hardware.gpu_bytes,
            "RAM": self.host_peak_bytes - hardware.host_bytes,
            "SSD space": self.ssd_peak_bytes - hardware.ssd_bytes,
            "SSD writes in a step, by the daily limit": self.excess_written(hardware),
        }
        return {name: nbytes for name, nbytes in excess.items() if nbytes > 0}

    def excess_written(self, hardware: HardwareProfile) -> int:
        """Returns the bytes that a step writes to SSDs beyond its share of the daily limit."""
        if hardware.ssd_bytes_per_day is None:
            return 0
        return max(0, ceil(self.ssd_written_bytes - hardware.ssd_bytes_per_day * self.step_seconds / DAY))


def count_steps(model: ModelProfile, plan: Plan) -> int:
    """Returns the number of simulated steps: one fewer with several micro-batches, or with all states on the GPU."""
    offloads = any(part.states != "gpu" for part in plan.parts(model))
    return STEPS if offloads and model.micro_batches == 1 else STEPS - 1


def simulate(model: ModelProfile, hardware: HardwareProfile, plan: Plan) -> Prediction:
    """Returns the prediction for `plan` on `hardware`.

    Offloaded weights are prefetched before a unit's forward and backward, from SSDs through host memory, and are kept
    from forward to backward if there is room for them. Swapped tensors are offloaded after the forward of their stage,
    and prefetched in the order in which backward needs them, up to the window's bytes ahead. Gradients are offloaded
    when a unit's backward ends. Then the optimizer job of each part of the unit reads states, steps on the CPU and
    writes them back; the unit's next forward waits for these jobs only. A deferred job of states in host memory has two
    halves: the next forward waits for the first one, and the copy of the unit's next gradient for the second. Copies
    slow the jobs down, because they share the bandwidth of host memory. While the window or the staging memory is full,
    compute and copies wait. The GPU computes only work that the host has launched, and a plan adds to the launch time.
    Two effects are not simulated: the accumulation of gradients on the CPU, and speculative steps that are rolled back.

    Raises:
        ValueError: the plan does not match the model.
    """
    plan.check(model)
    if model.micro_batches <= MICRO_BATCHES + 2:
        return simulate_every_micro_batch(model, hardware, plan)
    # All micro-batches between the first and the last add the same time.
    fewer = simulate_every_micro_batch(replace(model, micro_batches=MICRO_BATCHES - 1), hardware, plan)
    few = simulate_every_micro_batch(replace(model, micro_batches=MICRO_BATCHES), hardware, plan)
    more = model.micro_batches - MICRO_BATCHES

    def extend(one: float, other: float) -> float:
        return other + more * max(0.0, other - one)

    busy = {name: extend(fewer.busy_seconds[name], few.busy_seconds[name]) for name in few.busy_seconds}
    seconds = max(extend(fewer.step_seconds, few.step_seconds), *busy.values())
    return replace(
        few,
        step_seconds=seconds,
        busy_seconds=busy,
        stall_seconds=max(0.0, seconds - busy["compute"]),
        ssd_read_bytes=round(extend(fewer.ssd_read_bytes, few.ssd_read_bytes)),
        ssd_written_bytes=round(extend(fewer.ssd_written_bytes, few.ssd_written_bytes)),
        copied_bytes=round(extend(fewer.copied_bytes, few.copied_bytes)),
        bound=max(busy, key=lambda resource: busy[resource]),
    )


def simulate_every_micro_batch(model: ModelProfile, hardware: HardwareProfile, plan: Plan) -> Prediction:
    """Simulates every micro-batch."""
    builder = StepTasks(model, hardware, plan)
    ends = [builder.add_step(step) for step in range(count_steps(model, plan))]
    if hardware.host_memory_bandwidth is not None:
        builder.share_host_memory(hardware.host_memory_bandwidth)
    memory = run(builder.tasks, hardware)
    return _prediction(builder, hardware, memory, ends[-2].end, ends[-1].end)


def remap_seconds(model: ModelProfile, hardware: HardwareProfile, gpu_peak_bytes: int) -> float:
    """Returns the seconds of a step in which the allocator frees cached memory to have room for the largest tensor.

    Cached memory is in pieces between other tensors. If the bytes beside the peak are fewer than those of the largest
    tensor, there may be no piece of that size. Then the allocator waits for the GPU, frees all cached memory, and maps
    memory anew. The fewer bytes there are, the more often that is assumed to happen.
    """
    lacking = gpu_peak_bytes + model.largest_tensor_bytes - hardware.gpu_cache_bytes
    return model.micro_batches * min(max(0, lacking), model.largest_tensor_bytes) / REMAP_BANDWIDTH


def _launch_delay(launches: Sequence[Launch], begin: float) -> float:
    """Returns the largest launch delay: seconds from a compute task's simulated end until the host has launched it.

    Args:
        begin: time from which on the host launches.
    """
    issued, delay = begin, 0.0
    for compute, seconds, waits in launches:
        issued = max([issued, *(wait.end for wait in waits)]) + seconds
        delay = max(delay, issued - compute.end)
    return delay


def _prediction(
    builder: StepTasks, hardware: HardwareProfile, memory: MemoryLog, begin: float, end: float
) -> Prediction:
    model, plan = builder.model, builder.plan
    busy = dict.fromkeys(RESOURCES, 0.0)
    read = written = copied = 0.0
    last = builder.tasks[-1].step
    for task in builder.tasks:
        if task.step == last:
            busy[RESOURCES[task.resource]] += task.end - task.begin
            if task.resource == SSD:
                if task.write:
                    written += task.amount
                else:
                    read += task.amount
            elif task.resource in (COPY_IN, COPY_OUT):
                copied += task.amount
    busy["launch"] = builder.launch_seconds
    gpu, host, ssd = (sum(both) for both in zip(resident_bytes(model, plan), memory.peaks(), strict=True))
    gpu = max(0, gpu + model.other_gpu_bytes)
    # The step grows by the largest launch delay. The host launches from the begin of the step on, if it synchronizes in
    # each step. Else it is ahead, until it waits for a job.
    launch_delay = _launch_delay(builder.launches, begin if model.synchronizes else -inf)
    # A resource may have a backlog at the end of the simulated steps, which can't grow in the steady state.
    seconds = max(end - begin + launch_delay, *busy.values())
    seconds += remap_seconds(model, hardware, gpu)
    parts = [(profile.resident_bytes, part.offloaded) for unit in builder.units for profile, part in unit]
    offloaded, states = sum(nbytes for nbytes, away in parts if away), sum(nbytes for nbytes, _ in parts)
    return Prediction(
        step_seconds=seconds,
        busy_seconds=busy,
        stall_seconds=max(0.0, seconds - busy["compute"]),
        gpu_peak_bytes=gpu,
        host_peak_bytes=host,
        ssd_peak_bytes=ssd,
        ssd_read_bytes=round(read),
        ssd_written_bytes=round(written),
        copied_bytes=round(copied),
        bound=max(busy, key=lambda resource: busy[resource]),
        offloaded_share=offloaded / max(1, states),
    )
