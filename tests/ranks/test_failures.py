"""An error or the death of one rank ends all ranks, with its cause; ranks that train differently are refused."""

import functools
import re

import pytest

from tests.ranks.failures import CAUGHT, ENDS, ENDS_ON_HOSTS
from tests.ranks.processes import launch


@functools.cache
def caught() -> list[str]:
    """Output of each rank of one launch with all errors that ranks can catch."""
    return [output for _, output in launch("failures.py")]


@pytest.mark.parametrize("name", CAUGHT)
def test_ranks_raise_an_error_with_its_cause(name: str) -> None:
    for output in caught():
        found = re.search(f"^{name}: .*$", output, re.MULTILINE)
        assert found is not None and re.search(CAUGHT[name][1], found[0]), output


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_rank_ends_the_other_with_its_cause(name: str) -> None:
    _, rank, error = ENDS[name]
    status, output = launch("failures.py", arguments=[name])[rank]
    assert status != 0
    assert re.search(error, output), output


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENDS_ON_HOSTS)
def test_the_end_of_a_process_ends_those_of_other_hosts(name: str) -> None:
    (status, output), _ = launch("failures.py", arguments=[name], hosts=2)
    assert status != 0
    assert "RankError: a process of another host has ended" in output, output
