"""The host memory that log lines say is the memory that the process takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.profiling import machine, measure_training_machine
from lightning_ssd.storage import Slab
from tests.support.offloader import MIB, open_offloader, ssd, wait_for_writes
from tests.support.trainings import script_environment

DEVICE = 32 * 2**20
"""Most bytes that the device has between two steps, which are in the process's memory on a CPU: prefetched weights
(`gpu_memory` of the program), and what Python and Lightning allocate."""


def measured(gpu_memory: str, depth: int, **heap: int) -> list[dict[str, int]]:
    """Returns what the program has measured.

    Args:
        gpu_memory: argument of `SwapPlanner`.
        depth: number of blocks, of 8 MiB of weights each.
        heap: options of the C library's heap: MMAP_THRESHOLD, from which on memory of tensors on a CPU is not its own,
            and TRIM_THRESHOLD, from which on its free end is returned.
    """
    environment = script_environment() | {f"MALLOC_{name}_": str(nbytes) for name, nbytes in heap.items()}
    command = [sys.executable, "-m", "tests.support.measured_memory", gpu_memory, str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("gpu_memory", "offloads"), [("1GiB", False), ("40MiB", True)])
def test_a_training_takes_the_memory_that_is_counted(gpu_memory: str, offloads: bool) -> None:
    """At the start, while it is profiled, under a plan that offloads activations or keeps all, and at the end."""
    rows = measured(gpu_memory, 8, MMAP_THRESHOLD=2**16)  # else the heap would keep memory of the device
    for row in rows:
        assert 0.95 * row["counted"] <= row["taken"] <= 1.05 * row["counted"] + DEVICE, rows
        assert row["counted"] <= row["limit"], rows
    assert (rows[-1]["activations"] > 0) == offloads, rows
    assert rows[-1]["counted"] < max(row["counted"] for row in rows), "the plan needs less than profiled steps"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_training_begins_without_the_memory_of_the_model_as_the_user_made_it() -> None:
    """glibc's heap keeps the memory of freed tensors before anything that is in use; with this threshold, all of it."""
    begin = measured("1GiB", 24, MMAP_THRESHOLD=2**25, TRIM_THRESHOLD=2**30)[0]
    assert begin["taken"] <= begin["counted"] + DEVICE, begin  # the heap kept five times `DEVICE`


@given(st.integers(1, 4000), st.integers(0, 4000), st.integers(16, 2000))
def test_states_tiers_and_staging_share_the_budget(budget: int, states: int, staging: int) -> None:
    """Sizes in MiB. Where model states leave less than a tier needs, no activations go there."""
    config = OffloadConfig(host_memory=budget * MIB, staging_memory=staging * MIB)
    states = min(states, (budget * MIB - config.staging_bytes()) // MIB)  # as many as the model states may take
    left = config.without(states * MIB, 0)
    staged = left.staging_bytes() if left.tier == "ssd" else 0
    assert states * MIB + int(left.host_memory) + staged <= budget * MIB


def test_staging_memory_is_allocated_when_ssds_are_used_and_freed_when_they_are_not(tmp_path: Path) -> None:
    with open_offloader(tmp_path, host_memory=0) as offloader:
        tier = ssd(offloader)
        assert tier.host_bytes == 0
        copy = tier.store(torch.ones(MIB, dtype=torch.uint8), may_wait=True)
        assert copy is not None and tier.host_bytes > 0
        wait_for_writes(offloader)
        tier.trim()
        assert tier.host_bytes > 0  # since the last call, a copy has needed it
        tier.trim()
        assert tier.host_bytes == 0
        copy.free()


def test_a_machine_is_measured_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Counted(Slab):
        def __init__(self, nbytes: int, **arguments: Any) -> None:
            taken.append(nbytes)
            super().__init__(nbytes, **arguments)

    monkeypatch.setattr(machine, "Slab", Counted)
    with open_offloader(tmp_path, tier="host", host_memory="64MiB") as offloader:
        measured = measure_training_machine(offloader, "fp32")
        assert 0 < sum(taken) <= 64 * MIB
        assert measured.cpu_step_rate > 0 and measured.copy_in > 0
        taken.clear()
        measure_training_machine(offloader, None)
    assert len(taken) == 2, "without offloaded states, only copies are measured"
