"""Benchmarks run end to end on a CPU with a tiny model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import teraio
from lightning_ssd.callbacks import swap_planner
from lightning_ssd.planning import HardwareProfile
from tests.support.plans import MACHINE


def test_teraios_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: Sequence[str], limit: float) -> dict[str, Any]:
        return teraio.train(json.loads(command[-1]))

    monkeypatch.setattr(teraio, "run_alone", run_here)
    monkeypatch.setattr(swap_planner, "measure_training_machine", lambda _: HardwareProfile.from_json(MACHINE))
    out = tmp_path / "teraio.json"
    command = ["teraio", "--models", "tiny", "--gpu", "0.01", "--path", str(tmp_path), "--out", str(out)]
    for case in ("ideal", "teraio-16gbs"):  # results are added to those in the file
        monkeypatch.setattr(sys, "argv", [*command, "--cases", case])
        teraio.main()
    results = json.loads(out.read_text())
    assert list(results) == ["Llama tiny 32 ideal", "Llama tiny 32 teraio-16gbs"]
    ideal, planned = results.values()
    assert planned["loss"] == pytest.approx(ideal["loss"], rel=0.05)
    assert len(planned["comparisons"]) >= 2 and planned["step"] > 0
    assert planned["placement"]["saved"].keys() <= {"keep", "host", "ssd", "recompute"}
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split(" | ")[1] for row in rows] == ["ideal", "teraio-16gbs"]
