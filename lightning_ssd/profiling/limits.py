"""Limits of a training: the rates and bytes of the machine that it may use, and GPU memory of unknown origin."""

from dataclasses import replace

import torch

from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.activations.ssd_base import SSDTierBase
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    default_plan,
    resident_bytes,
    simulate,
)
from lightning_ssd.profiling.machine import measure_machine, mixed_bandwidth
from lightning_ssd.profiling.model import Profiler
from lightning_ssd.types import InputChoice, OffloadTierName

HOST_FILL = 0.85
"""Share of the host tier that tensors of different sizes can fill."""


def measure_training_machine(offloader: ActivationOffloader) -> HardwareProfile:
    """Measures the machine of a training, whose SSDs are those of `offloader`."""
    machine = measure_machine(None)
    if offloader.device.type == "cuda":
        torch.cuda.empty_cache()  # of tensors of the measurement
    ssd = offloader.tiers.get("ssd")
    if isinstance(ssd, SSDTierBase):
        read, write = ssd.blobs.read_bandwidth, ssd.blobs.write_bandwidth
        machine = replace(machine, ssd_read=read, ssd_write=write, ssd_mixed=mixed_bandwidth(read, write))
    return machine


def current_placement(profiler: Profiler, offloader: ActivationOffloader) -> FixedPlacement:
    """Returns the tiers of model states, and the host memory that remains for activations."""
    # One half of staging memory is for reads ahead, the other one for writes behind.
    staging = _staging_bytes(offloader) // 2
    return replace(profiler.settled(), staging_bytes=staging, host_room=int(HOST_FILL * _capacity(offloader, "host")))


def limit_hardware(
    machine: HardwareProfile,
    profile: ModelProfile,
    placement: FixedPlacement,
    offloader: ActivationOffloader,
    *,
    gpu_bytes: int,
    ssd_bytes_per_day: int | None,
) -> HardwareProfile:
    """Returns the machine with the bytes of each tier that a training may take.

    Args:
        machine: as measured.
        profile: of the model.
        placement: of model states, which have their memory already.
        offloader: has the tiers for activations.
        gpu_bytes: of the GPU, in all.
        ssd_bytes_per_day: that may be written; `None`: as the machine says.
    """
    kept = simulate(profile, machine, default_plan(profile, placement, {}, 0))
    return replace(
        machine,
        gpu_bytes=gpu_bytes,
        host_bytes=kept.host_peak_bytes + _capacity(offloader, "host") + _staging_bytes(offloader),
        ssd_bytes=kept.ssd_peak_bytes + _capacity(offloader, "ssd"),
        ssd_bytes_per_day=machine.ssd_bytes_per_day if ssd_bytes_per_day is None else ssd_bytes_per_day,
    )


def add_unseen_memory(
    profile: ModelProfile,
    hardware: HardwareProfile,
    placement: FixedPlacement,
    profiler: Profiler,
    offloader: ActivationOffloader,
    *,
    automatic_optimization: bool,
) -> ModelProfile:
    """Returns the profile with the measured GPU memory that no recorded operator accounts for (CUDA).

    Args:
        profile: of the model.
        hardware: of the machine.
        placement: of model states.
        profiler: measured steps in which all saved tensors were offloaded.
        offloader: of these steps.
        automatic_optimization: whether Lightning calls the optimizers, so that no step is part of a timed backward.
    """
    if offloader.device.type != "cuda":
        return profile
    tiers: dict[InputChoice, int] = {name: tier.capacity for name, tier in offloader.tiers.items()}
    plan = default_plan(profile, placement, tiers, offloader.policy.window_bytes)
    resident = resident_bytes(profile, plan)[0]
    # At least 0: late steps may have had less in flight than is possible.
    other = max(0, profiler.peak_bytes - simulate(profile, hardware, plan).gpu_peak_bytes)
    # Between steps nothing is in flight, and everything was evicted.
    if set(placement.weights) == {"gpu"} and automatic_optimization:
        other = min(other, profiler.resting_bytes - resident)
    between = max(0, profiler.between_bytes - resident - other)
    return replace(profile, other_gpu_bytes=other, between_gpu_bytes=between)


def _capacity(offloader: ActivationOffloader, tier: OffloadTierName) -> int:
    """Returns the bytes of a tier for activations; 0 without that tier."""
    return offloader.tiers[tier].capacity if tier in offloader.tiers else 0


def _staging_bytes(offloader: ActivationOffloader) -> int:
    """Returns the bytes of host memory that data passes on its way to and from the SSDs."""
    ssd = offloader.tiers.get("ssd")
    return ssd.staging.budget if isinstance(ssd, SSDTier) else 0
