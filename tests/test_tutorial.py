"""The tutorial's code blocks run unchanged, one after the other, and its commands after the blocks above them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd import cli

TUTORIAL = Path(__file__).parent.parent / "docs" / "from-oom-to-training.md"


@pytest.mark.thorough
def test_every_block_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", TUTORIAL.read_text(), re.M | re.S)
    assert {kind for kind, _ in blocks} == {"python", "bash"}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, str(TUTORIAL), "exec"), names)
        else:
            for command in block.splitlines():
                program, *arguments = shlex.split(command)
                assert program == "lightning-ssd"
                assert cli.main(arguments) == 0
    assert {"plan.yaml", "step10.json", "step10.png", "epoch1.ckpt", "exported"} <= {p.name for p in tmp_path.iterdir()}
