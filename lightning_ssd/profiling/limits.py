"""Limits of a training: rates and bytes that it may use, and GPU memory that no recorded operator explains."""

from dataclasses import replace

import torch

from lightning_ssd.activations import ActivationOffloader, SSDTier, SSDTierBase
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    calibrate_step_rate,
    default_plan,
    resident_bytes,
    simulate,
)
from lightning_ssd.profiling.machine import measure_machine, mixed_bandwidth
from lightning_ssd.profiling.profiler import Profiler
from lightning_ssd.types import InputChoice, OffloadTierName, StateFormat

HOST_FILL = 0.85
"""Share of the host tier that tensors of different sizes fill before fragments leave no room."""


def measure_training_machine(offloader: ActivationOffloader, state_format: StateFormat | None) -> HardwareProfile:
    """Measures the machine of a training, in the host memory that it leaves.

    Its SSDs are those of `offloader`. `state_format` is that of offloaded states; None: all are on the device.
    """
    tiers = offloader.tiers.values()
    room = sum(tier.host_limit - tier.host_bytes for tier in tiers)
    machine = measure_machine(None, state_format=state_format, host_memory=room if tiers else None)
    if offloader.device.type == "cuda":
        torch.cuda.empty_cache()  # free the measurement's tensors
    ssd = offloader.tiers.get("ssd")
    if isinstance(ssd, SSDTierBase):
        read, write = ssd.blobs.read_bandwidth, ssd.blobs.write_bandwidth
        machine = replace(machine, ssd_read=read, ssd_write=write, ssd_mixed=mixed_bandwidth(read, write))
    return machine


def current_placement(profiler: Profiler, offloader: ActivationOffloader) -> FixedPlacement:
    """Returns the tiers of model states, and the host memory that remains for activations."""
    # One half of the staging memory is for prefetched reads, the other one for delayed writes.
    staging = _staging_bytes(offloader) // 2
    return replace(
        profiler.fixed_placement(), staging_bytes=staging, host_limit=int(HOST_FILL * _capacity(offloader, "host"))
    )


def limit_hardware(
    machine: HardwareProfile,
    profile: ModelProfile,
    placement: FixedPlacement,
    offloader: ActivationOffloader,
    *,
    gpu_bytes: int,
    ssd_bytes_per_day: int | None,
) -> HardwareProfile:
    """Returns the machine with the bytes of each tier that a training may use.

    Args:
        placement: tiers of model states, which are allocated already.
        offloader: activation offloader, whose tiers have fixed capacities.
        gpu_bytes: bytes of the GPU that the training may use.
        ssd_bytes_per_day: bytes that may be written to the SSDs a day; `None`: the limit of `machine`.
    """
    states = simulate(profile, machine, default_plan(profile, placement, {}, 0))
    return replace(
        machine,
        gpu_bytes=gpu_bytes,
        host_bytes=states.host_peak_bytes + _capacity(offloader, "host") + _staging_bytes(offloader),
        ssd_bytes=states.ssd_peak_bytes + _capacity(offloader, "ssd"),
        ssd_bytes_per_day=machine.ssd_bytes_per_day if ssd_bytes_per_day is None else ssd_bytes_per_day,
    )


def add_unseen_memory(
    profile: ModelProfile,
    hardware: HardwareProfile,
    plan: Plan,
    profiler: Profiler,
    device: torch.device,
    *,
    automatic_optimization: bool,
) -> ModelProfile:
    """Returns the profile with the measured GPU memory that no recorded operator accounts for (CUDA).

    Args:
        plan: plan of the timed steps.
        automatic_optimization: True if Lightning calls the optimizers, so that no optimizer step is part of a timed
            backward.
    """
    if device.type != "cuda":
        return profile
    resident = resident_bytes(profile, plan)[0]
    # At least 0: the steps may have had fewer bytes in flight than the simulation assumes.
    other = max(0, profiler.peak_bytes - simulate(profile, hardware, plan).gpu_peak_bytes)
    # Between steps no transfer is in flight, and all saved tensors are freed.
    if not plan.offloads_states and automatic_optimization:
        other = min(other, profiler.resting_bytes - resident)
    between = max(0, profiler.between_bytes - resident - other)
    return replace(profile, other_gpu_bytes=other, between_gpu_bytes=between)


def with_measured_step_rate(
    profile: ModelProfile,
    hardware: HardwareProfile,
    plan: Plan,
    profiler: Profiler,
    device: torch.device,
) -> HardwareProfile:
    """Returns the machine with the rate of the CPU optimizer in the timed steps (CUDA).

    The rate in `hardware` was measured without a training, whose threads use processors and host memory, too.

    Arguments are those of `add_unseen_memory`.
    """
    stepped = profiler.stepped
    if device.type != "cuda" or not (stepped.amount and stepped.seconds):
        return hardware
    step_seconds = simulate(profile, hardware, plan).step_seconds
    return calibrate_step_rate(profile, hardware, plan, stepped.amount / stepped.seconds, step_seconds)


def offloading_plan(profile: ModelProfile, placement: FixedPlacement, offloader: ActivationOffloader) -> Plan:
    """Returns the plan of steps in which all saved tensors are offloaded."""
    tiers: dict[InputChoice, int] = {name: tier.capacity for name, tier in offloader.tiers.items()}
    return default_plan(profile, placement, tiers, offloader.policy.window_bytes)


def _capacity(offloader: ActivationOffloader, tier: OffloadTierName) -> int:
    """Returns the bytes of a tier for activations, 0 if the offloader lacks the tier."""
    return offloader.tiers[tier].capacity if tier in offloader.tiers else 0


def _staging_bytes(offloader: ActivationOffloader) -> int:
    """Returns the bytes of host memory that stages transfers to and from the SSDs."""
    ssd = offloader.tiers.get("ssd")
    return ssd.staging.budget if isinstance(ssd, SSDTier) else 0
