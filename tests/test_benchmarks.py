"""Benchmarks run end to end on a CPU with a tiny model."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bounds, default, people, pipeline, planning_cost, saved_shares, teraio
from benchmarks.default_models import FAMILIES
from benchmarks.people_training import take_share
from benchmarks.processes import run_all, run_alone
from lightning_ssd.autoplan import plan_cycle
from lightning_ssd.autoplan.recompilation import SAVED_SHARES
from lightning_ssd.planning import HardwareProfile
from tests.support.plans import MACHINE


def test_teraios_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: Sequence[str], limit: float) -> dict[str, Any]:
        return teraio.train(json.loads(command[-1]))

    monkeypatch.setattr(teraio, "run_alone", run_here)
    monkeypatch.setattr(plan_cycle, "measure_training_machine", lambda *_: HardwareProfile.from_json(MACHINE))
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


STARTER = """
import sys
from benchmarks import people, several_gpus
from benchmarks.processes import exit_on_sigterm, run_alone

assert "torch" not in sys.modules
exit_on_sigterm()
try:
    case = "print('{broken}'); print('{\\"step\\": 2}', flush=True); import signal; signal.pause()"
    run_alone([sys.executable, "-c", case], tell=lambda run: print(run["step"], flush=True))
finally:
    print("table")
"""


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_caller_that_is_ended_has_had_all_results_and_its_process_ends(ended_by: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"2\n"
        caller.send_signal(ended_by)
        printed, errors = caller.communicate(timeout=60)  # the process inherits stderr, which is open until it ends
    assert printed == (b"table\n" if ended_by == signal.SIGTERM else b"") and not errors


def test_a_process_without_a_result_has_an_error() -> None:
    assert run_alone([sys.executable, "-c", "import signal; signal.pause()"], 0.0) == {"error": "no result in 0 s"}
    assert run_alone([sys.executable, "-c", "raise SystemExit(3)"]) == {"error": "exit code 3"}


def test_cases_run_at_once_each_in_its_place_and_the_next_one_in_a_place_that_is_free() -> None:
    both_run = multiprocessing.get_context("fork").Barrier(2)

    def wait(place: int) -> None:
        both_run.wait(60)
        take_share(place, 2)
        cores = sorted(os.sched_getaffinity(0))
        print(json.dumps({"place": place, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "cores": cores}))

    def fail(place: int) -> None:
        raise SystemExit(place + 2)

    before, cores = dict(os.environ), os.sched_getaffinity(0)
    results = {name: run for name, run, ended in run_all([("a", wait), ("b", wait), ("c", fail)], places=2) if ended}
    assert [results[name]["place"] for name in "ab"] == [0, 1]
    assert [results[name]["gpu"] for name in "ab"] == ["0", "1"]
    assert {core for name in "ab" for core in results[name]["cores"]} <= cores
    assert len(cores) == 1 or not set(results["a"]["cores"]) & set(results["b"]["cores"])
    assert results["c"]["error"] in ("exit code 2", "exit code 3")
    assert dict(os.environ) == before and os.sched_getaffinity(0) == cores


ROWS = """
import sys
from benchmarks import people

sizes = people._decoder(64, 2, 2, 2, 128, 256)
people.SHAPES["tiny"] = people.Shape("LlamaForCausalLM", "LlamaConfig", sizes, batch=2, tokens=16)
modes = ["plain", "default", "checkpoint"]
people.main(["--shapes", "tiny", "--steps", "12", "--warm-up", "4", *sys.argv[1:], "--modes", *modes])
"""


@pytest.mark.thorough
def test_rows_of_what_people_train(tmp_path: Path) -> None:
    out = tmp_path / "people.json"
    for options in ["--gpus=2"], ["--budget=0"]:
        command = [sys.executable, "-c", ROWS, "--out", str(out), *options]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        trained = json.loads(out.read_text())
        assert trained.keys() == {"tiny plain", "tiny default 24 GiB", "tiny checkpoint 24 GiB"}
        assert len({run["loss"] for run in trained.values()}) == 1
        assert printed.count("| tiny ") == (6 if options == ["--gpus=2"] else 0)  # when a row ends, and in the table


@pytest.mark.thorough
@pytest.mark.parametrize("model", FAMILIES)
def test_the_defaults_of_each_family(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: Sequence[str]) -> dict[str, Any]:
        return default.fit(default.parse(command[command.index("benchmarks.default") + 1 :]))

    monkeypatch.setattr(default, "run_alone", run_here)
    out, figure = tmp_path / "default.json", tmp_path / "default.png"
    modes = ["plain-eager", "recompute-eager", "ours-eager"]
    sizes = ["--hidden", "64", "--layers", "2", "--batch", "2", "--tokens", "16", "--warm-up", "2", "--steps", "2"]
    command = ["default", "--model", model, "--rounds", "1", "--modes", *modes, *sizes, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    default.main()
    measured = capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    plain, recomputed, ours = (runs[mode][0]["loss"] for mode in modes)
    assert ours == plain == pytest.approx(recomputed, rel=1e-3)
    assert all(runs[mode][0]["step"] > 0 for mode in modes)
    monkeypatch.setattr(sys, "argv", ["default", "--report", str(out), "--draw", str(figure)])
    default.main()
    assert measured.endswith(capsys.readouterr().out) and figure.stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama-1536", "gpt2-xl", "vit-l"])
def test_compiled_layers_save_no_more_than_the_share_of_a_budget(name: str) -> None:
    shape = people.SHAPES[name]
    for saved in saved_shares.saved_bytes(replace(shape, batch=8 * shape.batch)):
        shares = {budget: nbytes / saved[0] for budget, nbytes in zip(saved_shares.BUDGETS, saved, strict=True)}
        assert shares[1.0] == 1
        assert all(shares[budget] <= share for budget, share in SAVED_SHARES.items())


@pytest.mark.parametrize("error", ["out of memory", "exit code 1"])
def test_a_training_without_a_result_has_its_error_in_the_table(error: str) -> None:
    assert default.table({"ours": [{"error": error}]}).splitlines()[-1].startswith(f"| ours | {error} |")


def test_the_cost_of_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    sizes = ["--hidden", "64", "--layers", "1", "--batch", "1", "--tokens", "8", "--precision", "32-true"]
    command = ["planning_cost", "--rounds", "1", "--steps", "4", *sizes, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    planning_cost.main()
    found = json.loads(out.read_text())
    assert len(found["plain"]) == len(found["ours"]) == 4 and min(found["ours"]) > 0
    assert found["in_force_from"] == 0 and found["extra_seconds"] == 0  # a CPU has no limit of memory
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "before: 0.00 s more than plain Lightning in all, one step at most 1.00 times as long"


def test_the_cost_of_planning_is_that_of_steps_before_the_plan_is_in_force() -> None:
    plain, ours = [[5.0, 1.0, 1.0, 1.0], [7.0, 1.0, 1.0, 1.0]], [[9.0, 1.5, 1.25, 1.0], [9.0, 2.0, 1.5, 1.0]]
    found = planning_cost.compare(plain, ours, in_force_from=2)
    assert found["plain"] == [6.0, 1.0, 1.0, 1.0] and found["ours"] == [9.0, 1.75, 1.375, 1.0]
    assert found["extra_seconds"] == 3.75 and found["worst_ratio"] == 1.75
    assert found["plain_step"] == 1.0 and found["later_ratio"] == 1.1875


@pytest.mark.thorough
def test_the_bounds_of_a_planned_training_and_of_one_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: Sequence[str], limit: float) -> dict[str, Any]:
        case, *options = command[command.index("--one") + 1 :]
        given = dict(option.split("=", 1) for option in options)
        return bounds.train(bounds.parse(case), Path(given["--path"]), int(given["--steps"]), given.get("--gpu-memory"))

    monkeypatch.setattr(bounds, "run_alone", run_here)
    monkeypatch.setattr(plan_cycle, "measure_training_machine", lambda *_: HardwareProfile.from_json(MACHINE))
    out, traces = tmp_path / "bounds.json", tmp_path / "traces"
    case = "llama:64x2,batch=2,tokens=16,states=host"
    command = ["bounds", "--out", str(out), "--path", str(tmp_path), "--traces", str(traces), "--steps", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--cases", case, "--gpu-memory", "200MB"])
    bounds.main()
    monkeypatch.setattr(sys, "argv", [*command, "--cases", f"{case},plain"])
    bounds.main()
    planned, plain = json.loads(out.read_text()).values()
    rounding = 1 - 1e-9
    assert planned["deferred"] and planned["ordered_bound"] >= rounding * bounds.bounds(planned)[1] > 0
    assert planned["predicted"] >= rounding * planned["ordered_bound"]
    assert set(planned["predicted_busy"]) == {"compute", "copy_in", "copy_out", "ssd", "cpu", "launch"}
    assert planned["busy"]["copy in"] > 0 and planned["busy"]["CPU optimizer"] > 0
    assert "predicted" not in plain and not plain["deferred"] and not plain["busy"]["copy in"]
    assert bounds.bounds(plain)[1] == max(plain["busy"].values())
    assert {trace.name for trace in traces.iterdir()} == {
        "llama-64x2-batch-2-tokens-16-states-host.json.gz",
        "llama-64x2-batch-2-tokens-16-states-host-plain.json.gz",
    }
    measured = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--report"])
    bounds.main()
    assert measured.endswith(capsys.readouterr().out)


@pytest.mark.thorough
def test_the_memory_of_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pipeline.json"
    sizes = ["--hidden", "64", "--layers", "2", "--chunks", "2", "--batch", "1", "--tokens", "16", "--warm-up", "1"]
    command = ["pipeline", "--cases", "none", "1.0", "--path", str(tmp_path), "--steps", "1", "--out", str(out), *sizes]
    monkeypatch.setattr(sys, "argv", command)
    pipeline.main()
    results = json.loads(out.read_text())
    assert list(results) == ["none", "1.0"] and all(len(run["peaks"]) == 2 for run in results.values())
    assert capsys.readouterr().out.count("GiB") == 4
