"""The host memory that log lines say is the memory that the process takes."""

import json
import subprocess
import sys

import pytest

from tests.support.trainings import script_environment

DEVICE = 32 * 2**20
"""Most bytes that the device has between two steps, which are in the process's memory on a CPU: prefetched weights
(`gpu_memory` of the program), and what Python and Lightning allocate."""


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_training_takes_the_memory_that_is_counted() -> None:
    """At the start, while it is profiled, under a plan, and at the end."""
    # Torch's allocator on a CPU would keep the memory of freed tensors, such as weights before they are offloaded.
    environment = script_environment() | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    command = [sys.executable, "-m", "tests.support.measured_memory"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        assert row["taken"] <= 1.05 * row["counted"] + DEVICE and row["counted"] <= row["limit"], rows
    for row in rows[1:]:  # memory that is not page-locked is committed by the first step
        assert row["taken"] >= 0.95 * row["counted"], rows
    assert rows[-1]["counted"] < rows[0]["counted"], "the plan keeps all activations, whose memory is freed"
