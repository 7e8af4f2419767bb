"""Files and tests that `docs/mechanisms.md` names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/mechanisms.md"
NUM_CELLS = 6
"""Cells in a row of a mechanism: name, files, lines, user, gain, tests."""


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [row for row in rows if len(row) == NUM_CELLS and row[0] != "mechanism"]


ROWS = _rows()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_files_and_tests_of_a_mechanism_exist(row: list[str]) -> None:
    files, tests = re.findall("`([^`]+)`", row[1]), re.findall("`([^`]+)::([^`]+)`", row[-1])
    assert files and tests
    for file in files:
        path = ROOT / "lightning_ssd" / file
        assert path.exists() or path.with_suffix(".py").exists(), file
    for module, name in tests:
        path = ROOT / "tests" / f"{module}.py"
        assert path.exists(), module
        assert f"def {name}(" in path.read_text(), f"{module}::{name}"


def test_mechanisms_are_found() -> None:
    assert len(ROWS) > 50
