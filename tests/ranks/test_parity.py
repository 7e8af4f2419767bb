"""Two ranks with offloaded states train with the bits of torch's DDP."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.ranks.processes import launch
from tests.ranks.train_parity import CASES

ON_HOSTS = [
    "clipped by norm", "ragged accumulation", "branches", "gradients are read", "optimizer couples parameters",
    "weights are written", "16-mixed", "speculation",
]  # fmt: skip
"""Cases of two hosts of one rank."""


def check(names: Sequence[str], **how: Any) -> None:
    """Trains the models of cases in one launch, and asserts that each rank has found no difference."""
    for _, output in launch("train_parity.py", arguments=names, **how):
        different = [name for name in names if not re.search(f"^{re.escape(name)}: equal$", output, re.MULTILINE)]
        assert not different, output


@pytest.mark.parametrize("part", [0, 1])
def test_bits_are_those_of_ddp(part: int) -> None:
    check(["hand-overs", *CASES][part::2])


def test_bits_of_sums_in_host_memory_are_those_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    check(["fused", "clipped by norm", "speculation", "branches", "16-mixed", "SSD, clipped by norm"])


def test_bits_of_two_hosts_are_those_of_ddp() -> None:
    check(ON_HOSTS, hosts=2)


@pytest.mark.thorough
def test_two_hosts_of_two_ranks_agree() -> None:
    check(["sgd with momentum", "branches, gradients are read", "reversed order"], size=4, hosts=2)
