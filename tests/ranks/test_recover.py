"""Two ranks with `recover=True`, of which one or both are killed, resume as if they had not been."""

from pathlib import Path

import pytest

from tests.support import forks


@pytest.mark.parametrize("kills", [3, pytest.param(5, marks=pytest.mark.thorough)])
def test_killed_ranks_resume(tmp_path: Path, kills: int) -> None:
    """In a batch, within a write, and before the record of a step that all ranks have made has its name."""
    run = forks.run(["-m", "tests.ranks.recover", tmp_path, str(kills)], timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stderr.count("resuming after step") == 2 * kills
