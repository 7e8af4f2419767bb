"""Recipes with `recover=True` resume after a SIGKILL, and end with the weights of a run that was not killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killed_recipes import TINY
from tests.support.recipes import ROOT


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", TINY)
def test_killed_recipes_end_with_the_same_weights(tmp_path: Path, recipe: str) -> None:
    command = [sys.executable, "-m", "tests.support.killed_recipes", str(tmp_path), recipe]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("the same weights after 2 kills") == 1
    assert run.stderr.count("resuming after step") == 2
