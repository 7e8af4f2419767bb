"""Commands in the documentation exist, accept the documented options, and are run by a test, or say why not."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from lightning_ssd import cli
from tests.support.pages import PAGES, ROOT

NAMES = r"(?:python -m benchmarks\.|lightning-ssd (?:plan|profile|export|doctor) )"
# A command of a code block ends with its line. One within a sentence ends with its backtick, and may be wrapped.
COMMAND = re.compile(rf"^({NAMES}.+)$|`({NAMES}[^`]+)`", re.M)
TEXTS = {page: page.read_text().replace("\\\n", " ") for page in PAGES}
COMMANDS = sorted({" ".join("".join(found).split()) for text in TEXTS.values() for found in COMMAND.findall(text)})
# Names in the documentation that stand for the reader's files.
STAND_INS = {"DIR": "folder", "RECIPE.yaml": "recipe.yaml", "last.ckpt": "file.ckpt", "epoch1.ckpt": "file.ckpt"}
STAND_INS["HF_FOLDER"] = "folder"
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```bash\n(.*?)^```$", re.M | re.S)
"""The line before a block of commands, if it is a mark, and the commands."""
BLOCKS = [(page, mark, block) for page, text in TEXTS.items() for mark, block in BLOCK.findall(text)]
WITH_TINY_MODEL = [line for _, mark, block in BLOCKS if "a tiny model" in mark for line in block.splitlines()]


class Parsed(Exception):
    """The command has parsed its arguments."""


def _words(command: str) -> list[str]:
    """Returns the words of a command, with files of this repository by their whole paths."""
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    return [str(ROOT / word) if word.startswith(("recipes/", "configs/")) else word for word in words]


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
    words = _words(command)
    with pytest.raises(Parsed):
        if words[0] == "python":
            monkeypatch.setattr("sys.argv", words[2:])
            importlib.import_module(words[2]).main()
        else:
            cli.main(words[1:])


@pytest.mark.parametrize(("page", "mark", "block"), BLOCKS)
def test_a_block_of_commands_names_the_test_that_runs_it_or_why_none_does(page: Path, mark: str, block: str) -> None:
    if not mark.startswith("not run: "):
        found = re.match(r"run by (\S+)", mark)
        assert found, f"{page} has commands without a mark `<!-- run by FILE -->` or `<!-- not run: REASON -->`"
        runner = ROOT / found[1]
        assert page.name in runner.read_text() or page in PAGES and runner == Path(__file__)
    named = re.findall(r"(?:recipes|configs)/[\w./-]+\.(?:yaml|json)", block)
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("command", WITH_TINY_MODEL)
def test_a_documented_prediction_runs(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the recipe's own tiny model."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(_words(re.sub(r"-c configs/models/\S+", "", command))[1:]) == 0


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 15
    assert len(BLOCKS) > 8 and len(WITH_TINY_MODEL) > 2
    outside = [re.findall(r"^ {4}(?:lightning|python|pip|hf) .*", BLOCK.sub("", text), re.M) for text in TEXTS.values()]
    assert sum(outside, []) == [], "commands outside of blocks"
