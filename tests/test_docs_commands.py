"""Commands in the documentation exist, and accept the documented options."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from lightning_ssd import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = r"(?:python -m benchmarks\.|lightning-ssd (?:plan|profile|export) )"
# A command of a code block ends with its line. One within a sentence ends with its backtick, and may be wrapped.
COMMAND = re.compile(rf"^({NAMES}.+)$|`({NAMES}[^`]+)`", re.M)
COMMANDS = sorted({" ".join("".join(found).split()) for page in PAGES for found in COMMAND.findall(page.read_text())})
# Names in the documentation that stand for the reader's files.
STAND_INS = {"DIR": "folder", "RECIPE.yaml": "recipe.yaml", "last.ckpt": "file.ckpt", "epoch1.ckpt": "file.ckpt"}
STAND_INS |= {"HF_FOLDER": "folder", "configs/machines/h100.json": str(ROOT / "configs/machines/h100.json")}


class Parsed(Exception):
    """The command has parsed its arguments."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_parses(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("recipe.yaml", "file.ckpt", "lifetimes.json"):
        (tmp_path / name).touch()
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: object) -> None:
        parse_args(parser, *args)  # type: ignore[arg-type]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    with pytest.raises(Parsed):
        if words[0] == "python":
            monkeypatch.setattr("sys.argv", words[2:])
            importlib.import_module(words[2]).main()
        else:
            cli.main(words[1:])


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 15
