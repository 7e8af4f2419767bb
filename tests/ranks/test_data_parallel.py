"""Two processes train as with Lightning's `ddp`, bit for bit, and offload activations; one launch for all cases."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_parallel import CASES
from tests.support.pages import ROOT
from tests.support.trainings import script_environment


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of all cases in both processes."""
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.support.data_parallel", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=script_environment(), cwd=ROOT, timeout=240)
    (root / "output").write_text(done.stdout + done.stderr)
    return root


@pytest.mark.parametrize("name", [*CASES, "planned", "refusals", "offloaded"])
def test_two_processes(results: Path, name: str) -> None:
    for rank in (0, 1):
        file = results / f"{name}.{rank}"
        assert file.exists(), (results / "output").read_text()[-5000:]
        assert file.read_text() == ""
