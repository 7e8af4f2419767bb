"""`docs/usage.md` documents each argument of the strategy and of the callbacks that a user adds."""

import inspect
import re

import pytest

import lightning_ssd
from tests.support.pages import ROOT

USAGE = (ROOT / "docs" / "usage.md").read_text()
CLASSES = [name for name in lightning_ssd.__all__ if name[0].isupper()]
STRATEGY = "SSDOffloadStrategy"


def _arguments(name: str) -> str:
    """Returns the cells of arguments of a class, and for the strategy the line of Lightning's own."""
    heading = "Arguments of the strategy" if name == STRATEGY else "Arguments of the callbacks"
    section = USAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"\s*\|\s*", line)[1:] for line in section.splitlines() if line.startswith("| ")]
    if name == STRATEGY:
        (lightnings,) = re.findall(r"^(.*) are Lightning's own", section, re.M)
        cells = [lightnings, *(row[0] for row in rows)]
    else:
        start = next(index for index, row in enumerate(rows) if row[0] == f"`{name}`")
        end = next((index for index in range(start + 1, len(rows)) if rows[index][0]), len(rows))
        cells = [row[1] for row in rows[start:end]]
    return " ".join(cells)


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_are_documented(name: str) -> None:
    arguments = set(inspect.signature(getattr(lightning_ssd, name)).parameters)
    assert set(re.findall(r"`(\w+)", _arguments(name))) == arguments


@pytest.mark.parametrize("name", [name for name in CLASSES if name != STRATEGY])
def test_stated_defaults_are_those_of_the_code(name: str) -> None:
    parameters = inspect.signature(getattr(lightning_ssd, name)).parameters
    stated = dict(re.findall(r"`(\w+)=([^`]+)`", _arguments(name)))
    assert {argument: repr(parameters[argument].default).replace("'", '"') for argument in stated} == stated
