"""Two ranks with offloaded states train with the bits of torch's DDP."""

import functools
import re

import pytest

from tests.ranks.processes import launch
from tests.ranks.train_parity import CASES


@functools.cache
def outputs() -> list[str]:
    """Output of each rank of one launch, which trains all models."""
    return [output for _, output in launch("train_parity.py")]


@pytest.mark.parametrize("name", ["hand-overs", *CASES])
def test_bits_are_those_of_ddp(name: str) -> None:
    for output in outputs():
        assert re.search(f"^{re.escape(name)}: equal$", output, re.MULTILINE), output
