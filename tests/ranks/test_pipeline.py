"""Two processes train the stages of a pipeline with offloaded activations; one launch for all cases but failures."""

import subprocess
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.pipeline import CASES
from tests.support.trainings import scratch_directories, script_environment


def run(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the program of the first process, which launches the second one, to the end of both."""
    command = ["-m", "tests.support.pipeline", root, *arguments]
    return forks.run(command, env=script_environment(), timeout=240)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory with the results of all cases in both processes, and the end of what they print."""
    root = tmp_path_factory.mktemp("pipeline")
    return root, run(root, *CASES).stderr[-5000:]


@pytest.mark.parametrize("name", CASES)
def test_two_stages(results: tuple[Path, str], name: str) -> None:
    root, output = results
    for rank in (0, 1):
        file = root / f"{name}.{rank}"
        assert file.exists(), output
        assert file.read_text() == ""


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 0])
def test_an_error_of_one_stage_ends_both(tmp_path: Path, rank: int) -> None:
    done = run(tmp_path, "failing", str(rank))
    assert done.returncode != 0 and "KeyError: 'deliberate'" in done.stderr
    assert f"[rank{1 - rank}]: RuntimeError" in done.stderr  # it could not go on alone
    assert scratch_directories(tmp_path) == []
