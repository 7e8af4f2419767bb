"""What `lightning-ssd run` prints: lines of at most 80 columns, and files and commands that exist."""

import io
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lightning_ssd import cli
from tests.support.recipes import RECIPES, no_arguments  # noqa: F401

QUICK = ["--trainer.accelerator=cpu", "--trainer.max_steps=4", "--trainer.log_every_n_steps=2", "--model.n_layer=1"]
QUICK += ["--trainer.val_check_interval=4", "--trainer.limit_val_batches=1", "--data.block_size=64"]
QUICK += ["--data.max_bytes=100000", "--model.warmup_steps=1"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_lines_of_a_first_run(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cli.main(["run", str(RECIPES / "gpt.yaml"), *QUICK])
    text = capsys.readouterr().out
    assert re.search(r"GPT: \S+ parameters, \S+ of them trained", caplog.text)
    assert not re.search("Epoch|FLOPs|Perplexity", text + caplog.text)
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert all(len(line) < 80 for line in steps)
    assert [line.split()[1] for line in steps if "tokens/s" in line] == ["2/4", "4/4"]
    assert all(re.search(r"loss \d\.\d{3}  \S+ tokens/s", line) for line in steps if "tokens/s" in line)
    assert re.search(r"^step 4: val/loss \d\.\d{3}, val/perplexity ", text, re.M)

    files = dict(line.split(": ", 1) for line in text.splitlines() if re.match("(checkpoint|metrics|config|to )", line))
    assert all(Path(files[name]).is_file() for name in ("checkpoint", "metrics", "config"))
    export = shlex.split(files["to export"])
    assert cli.main([word.replace("FOLDER", "exported") for word in export[1:]]) == 0
    assert AutoModelForCausalLM.from_pretrained("exported", local_files_only=True).config.n_layer == 1
    cli.main(shlex.split(files["to continue"])[1:])  # with the options of the first run
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if "tokens/s" in line] == ["6/8", "8/8"]
    cli.main([*shlex.split(files["to continue"])[1:], "--trainer.enable_progress_bar=false"])
    assert "8/8" not in capsys.readouterr().out


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    cli.main(["run", str(RECIPES / "gpt.yaml"), *QUICK])
    rewritten = re.findall(r"([^\r\n]*)\x1b\[K(.)", terminal.getvalue(), re.S)
    assert [line.split("  ")[0] for line, _ in rewritten] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert all(len(line) < 40 for line, _ in rewritten)
    assert [end for _, end in rewritten] == ["\r", "\r", "\r", "\n"], "messages of others begin in the first column"
    assert "\x1b[K\nstep 4: val/loss" in terminal.getvalue()
