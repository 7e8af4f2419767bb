"""An error or the death of one rank ends all ranks, with its cause; ranks that train differently are refused."""

import functools
import re

import pytest

from tests.ranks.failures import CAUGHT, ENDS
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
