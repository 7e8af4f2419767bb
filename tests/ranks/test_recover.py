"""Two ranks with `recover=True`, of which one or both are killed, resume as if they had not been."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [3, pytest.param(5, marks=pytest.mark.thorough)])
def test_killed_ranks_resume(tmp_path: Path, kills: int) -> None:
    """In a batch, within a write, and before the record of a step that all ranks have made has its name."""
    command = [sys.executable, "-m", "tests.ranks.recover", str(tmp_path), str(kills)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stderr.count("resuming after step") == 2 * kills
