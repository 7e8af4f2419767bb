"""An error or the death of one rank ends all ranks, with its cause; ranks that train differently are refused."""

import functools
import os
import re
import sys
import threading

import pytest

from lightning_ssd.futures import failed
from lightning_ssd.ranks import RankError, ranks
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


def test_values_that_another_rank_has_written_are_no_corruption() -> None:
    for output in caught():
        assert "corrupts data" not in output


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_rank_ends_the_other_with_its_cause(name: str) -> None:
    _, rank, error = ENDS[name]
    status, output = launch("failures.py", arguments=[name])[rank]
    assert status != 0
    assert re.search(error, output), output
    shown = re.findall(r'futures.py", line \d+, in result', output)  # all flat parameters fail with the same error
    assert len(shown) <= 1 and "During handling" not in output, output


def test_a_process_ends_after_a_failure_although_nobody_reads_its_output() -> None:
    child = os.fork()
    if child == 0:
        try:
            reader, writer = os.pipe()
            os.close(reader)
            sys.stderr = open(writer, "w")
            ranks._END_SECONDS = 0.0
            ranks._begin_end(threading.Event(), failed(RankError("rank 1 has died")))
            threading.Event().wait(20)  # as a training thread that waits for the other rank
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENDS_ON_HOSTS)
def test_the_end_of_a_process_ends_those_of_other_hosts(name: str) -> None:
    (status, output), _ = launch("failures.py", arguments=[name], hosts=2)
    assert status != 0
    assert "RankError: a process of another host has ended" in output, output
