"""Several GPUs of one host, a process each, with NCCL."""

import re

import pytest
import torch

from tests.ranks.failures import ENDS
from tests.ranks.processes import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_sums_on_devices_have_the_bits_of_those_in_host_memory() -> None:
    """They don't change with the timing either: with delays in every copy, and with little room on each GPU."""
    for status, output in launch("sums.py", arguments=["gpu"]):
        assert status == 0 and output.endswith("equal\n"), output


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_rank_ends_the_other_with_its_cause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKS_ACCELERATOR", "gpu")
    _, rank, error = ENDS[name]
    status, output = launch("failures.py", arguments=[name])[rank]
    assert status != 0
    # NCCL's collectives can be aborted, so that the training thread may raise the error; gloo's end with the process.
    assert re.search(error.removeprefix("lightning_ssd: "), output), output
