"""Two ranks with offloaded states train with the bits of torch's DDP."""

import functools
import re

import pytest

from tests.ranks.processes import launch
from tests.ranks.train_parity import CASES

ON_HOSTS = [
    "clipped by norm", "ragged accumulation", "branches", "gradients are read", "optimizer couples parameters",
    "weights are written", "16-mixed", "speculation",
]  # fmt: skip
"""Cases of two hosts of one rank."""


@functools.cache
def outputs() -> list[str]:
    """Output of each rank of one launch, which trains all models."""
    return [output for _, output in launch("train_parity.py")]


@functools.cache
def outputs_of_hosts() -> list[str]:
    return [output for _, output in launch("train_parity.py", arguments=ON_HOSTS, hosts=2)]


@pytest.mark.parametrize("name", ["hand-overs", *CASES])
def test_bits_are_those_of_ddp(name: str) -> None:
    for output in outputs():
        assert re.search(f"^{re.escape(name)}: equal$", output, re.MULTILINE), output


@pytest.mark.parametrize("name", ON_HOSTS)
def test_bits_of_two_hosts_are_those_of_ddp(name: str) -> None:
    for output in outputs_of_hosts():
        assert re.search(f"^{re.escape(name)}: equal$", output, re.MULTILINE), output


@pytest.mark.thorough
def test_two_hosts_of_two_ranks_agree() -> None:
    names = ["sgd with momentum", "branches, gradients are read"]
    for _, output in launch("train_parity.py", 4, names, hosts=2):
        for name in names:
            assert re.search(f"^{re.escape(name)}: equal$", output, re.MULTILINE), output
