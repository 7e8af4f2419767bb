"""The commands `lightning-ssd` and `lightning`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import lightning_ssd
from lightning_ssd import cli
from lightning_ssd.planning import plan_for_least_memory
from tests.support.profiles import H100, make_model

ROOT = Path(__file__).parent.parent
MACHINE = str(ROOT / "configs/machines/h100.json")
GPT = str(ROOT / "recipes/gpt.yaml")
RECIPE = """
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: lightning.pytorch.demos.boring_classes.BoringDataModule
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_ssd.SSDOffloadStrategy
    init_args:
      offload: 0.25
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def _exit(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as exited:
        cli.main(argv)
    return exited.value.code


def _lightning(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning", *argv])
    return cli.lightning_main()


class TestRun:
    def test_trains_and_trains_again_in_the_same_place(self, recipe: str) -> None:
        assert cli.main(["run", recipe]) == 0
        saved = yaml.safe_load(Path("config.yaml").read_text())
        assert saved["trainer"]["max_steps"] == 2
        assert saved["seed_everything"] == 0
        assert [path.name for path in Path("checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]

        assert cli.main(["run", recipe, "--trainer.max_steps=3"]) == 0
        assert yaml.safe_load(Path("config.yaml").read_text())["trainer"]["max_steps"] == 3
        assert cli.main(["run", "config.yaml"]) == 0

    def test_error_of_a_constructor_is_the_last_one_shown(
        self, recipe: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _exit(["run", recipe, "--data=lightning_ssd.recipes.data.TextDataModule", "--data.batch_size=0"]) == 2
        shown = capsys.readouterr().err.splitlines()[-1]
        assert shown == "lightning-ssd run: error: data.batch_size=0 is out of range: set it to 1 or more"
        assert _exit(["run", recipe, "--trainer.strategy.min_bytes=-1"]) == 2
        assert "`min_bytes=-1` is not a number of bytes" in capsys.readouterr().err

    @pytest.mark.parametrize("where", ["__init__", "setup", "training_step"])
    def test_error_of_the_users_module_keeps_its_traceback(
        self, recipe: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        boring = "from lightning.pytorch.demos.boring_classes import BoringModel"
        failing = f"    def {where}(self, *args, **settings):\n        raise ValueError('mine')"
        Path(f"mine_{where}.py").write_text(f"{boring}\n\n\nclass Mine(BoringModel):\n{failing}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ValueError, match="mine"):
            cli.main(["run", recipe, f"--model=mine_{where}.Mine"])

    def test_copy_of_a_recipe_without_its_defaults_is_refused_with_the_remedy(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("copy.yaml").write_text((ROOT / "recipes" / "gpt.yaml").read_text())
        assert _exit(["run", "copy.yaml"]) == 2
        assert "needs a copy of recipes/defaults.yaml beside it" in capsys.readouterr().err.splitlines()[-1]

    def test_resumes_from_a_checkpoint(self, recipe: str) -> None:
        cli.main(["run", recipe])
        checkpoint = "checkpoints/epoch=0-step=2.ckpt"
        cli.main(["run", recipe, "--trainer.max_steps", "5", "--ckpt_path", checkpoint])
        assert torch.load("checkpoints/epoch=0-step=5.ckpt", weights_only=True)["global_step"] == 5

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize(
        ("overrides", "strategy"),
        [
            (["--trainer.strategy=auto"], "auto"),
            (["--trainer.strategy", "ssd_offload"], "ssd_offload"),
            (["--trainer.strategy.offload=0.5"], 0.5),
            (["--trainer.strategy.init_args.offload", "0.5"], 0.5),
            (["--trainer.strategy=SSDOffloadStrategy", "--trainer.strategy.offload=0.5"], 0.5),
            (["--trainer.strategy=ssd_offload", "--trainer.strategy.offload=0.5"], 0.5),
            (["--trainer.strategy", "cpu_offload", "--trainer.strategy.offload", "0.5"], 0.5),
            (["--trainer.strategy=ssd_offload", "--trainer.strategy.init_args.offload=0.5"], 0.5),
            (["-c", "named.yaml", "--trainer.strategy.offload=0.5"], 0.5),
            (["--config=named.yaml", "-c", "more.yaml"], 0.75),
            (["-c", "named.yaml", "-c", "whole.yaml"], 0.125),
            (["-c", "more.yaml", "--trainer.strategy=cpu_offload"], "cpu_offload"),
            (["-c", "more.yaml"], 0.75),
            (["-c", "more.yaml", "--trainer.strategy.offload=0.5"], 0.5),
        ],
    )
    def test_overrides_the_strategy(
        self, recipe: str, overrides: list[str], strategy: str | float, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("more.yaml").write_text("trainer: {strategy: {init_args: {offload: 0.75}}}")
        Path("named.yaml").write_text("trainer: {strategy: ssd_offload}")
        whole = "{class_path: lightning_ssd.SSDOffloadStrategy, init_args: {offload: 0.125}}"
        Path("whole.yaml").write_text(f"trainer: {{strategy: {whole}}}")
        assert _exit(["run", recipe, *overrides, "--print_config"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
        if isinstance(strategy, str):
            assert printed == strategy
        else:
            assert printed["class_path"] == "lightning_ssd.SSDOffloadStrategy"
            assert printed["init_args"]["offload"] == strategy
            assert printed["init_args"]["tier"] == ("host" if "cpu_offload" in overrides else "ssd")

    @pytest.mark.parametrize("strategy", ["auto", "cpu_offload"])
    def test_trains_with_a_strategy_by_name(self, recipe: str, strategy: str) -> None:
        assert cli.main(["run", recipe, f"--trainer.strategy={strategy}"]) == 0

    @pytest.mark.quick_cases(1)
    @pytest.mark.parametrize(
        "path",
        [path for path in sorted(ROOT.glob("recipes/*.yaml")) if path.name != "defaults.yaml"],
        ids=lambda path: path.name,
    )
    def test_accepts_the_recipes_that_we_ship(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _exit(["run", str(path), "--print_config"]) == 0
        assert f"name: {path.stem}" in capsys.readouterr().out  # of its logs

    def test_a_recipe_changes_single_keys_of_the_defaults_beside_it(
        self, recipe: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """For example strategies by name, and items that are appended to a list."""
        Path("defaults.yaml").write_text(
            "trainer:\n  strategy: ssd_offload\n  max_steps: 70\n  log_every_n_steps: 7\n"
            "  callbacks:\n    - class_path: lightning.pytorch.callbacks.LearningRateMonitor\n"
        )
        Path("more.yaml").write_text(
            "trainer:\n  max_steps: 7\n  callbacks+:\n    - class_path: lightning.pytorch.callbacks.RichModelSummary\n"
        )
        assert _exit(["run", recipe, "-c", "more.yaml", "--trainer.strategy.offload=0.5", "--print_config"]) == 0
        trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
        assert trainer["strategy"]["init_args"]["offload"] == 0.5
        assert (trainer["max_steps"], trainer["log_every_n_steps"]) == (7, 7)
        assert [callback["class_path"].rsplit(".")[-1] for callback in trainer["callbacks"]] == [
            "LearningRateMonitor", "RichModelSummary",
        ]  # fmt: skip

    def test_help(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert _exit(["run", "--help"]) == 0
        assert "RECIPE [-c MORE.yaml ...] [--KEY VALUE ...]" in capsys.readouterr().out
        assert _exit(["run", recipe, "--help"]) == 0
        assert "--trainer.max_steps" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ([], "required: COMMAND"),
            (["run"], "lightning-ssd run: error: the following arguments are required: RECIPE"),
            (["plan"], "lightning-ssd plan: error: the following arguments are required: RECIPE"),
            (["profile", GPT, "--out"], "lightning-ssd profile: error: argument --out: expected one argument"),
            (["plan", GPT, "--machine", MACHINE, "--none"], "lightning-ssd plan: error: .*no key 'none'"),
            (["run", "none.yaml"], "there is no recipe file 'none.yaml'"),
            (["run", "gtp"], "no recipe of the package has that name: bert, .* Did you mean 'gpt'?"),
            (["run", "recipe.yaml", "-c", "none.yaml"], "none.yaml"),
            (
                ["run", "recipe.yaml", "--trainer.max_stepz=3"],
                "no key 'trainer.max_stepz'. Did you mean 'trainer.max_steps'",
            ),
            (["run", "wrong.yaml"], "no key 'trainer.max_stepz'. Did you mean 'trainer.max_steps'"),
            (
                ["run", "recipe.yaml", "--trainer.strategy.offlod=3"],
                "Strategy has no argument 'offlod'. Did you mean 'offload'",
            ),
            (["run", "recipe.yaml", "--trainer.strategy=ssd_ofload"], "no strategy .* Did you mean 'ssd_offload'"),
            (["run", "recipe.yaml", "--trainer.max_steps=many"], "trainer.max_steps=many is not an integer"),
            (
                ["run", "recipe.yaml", "--trainer.strategy.states=gpuu"],
                "strategy.states=gpuu is not 'auto', .* mean 'gpu'",
            ),
            (["run", "recipe.yaml", "--trainer.strategy.offload=many"], "`offload='many'` is not a number of bytes"),
            (["run", "recipe.yaml", "--model=GTP"], "model=GTP: there is no class of that name"),
            (["run", "recipe.yaml", "--model=nomod.X"], "model: nomod.X: No module named 'nomod'"),
            (["init", "mine", "gtp"], "argument RECIPE: invalid choice: 'gtp' .* Did you mean 'gpt'"),
            (["pln", "gpt"], "argument COMMAND: invalid choice: 'pln' .* Did you mean 'plan'"),
            (["init", "."], "gpt.yaml exists"),
        ],
    )
    def test_refuses_in_one_line(self, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Without types of Python, and without the options of a command."""
        Path("wrong.yaml").write_text(RECIPE.replace("max_steps", "max_stepz"))
        Path("gpt.yaml").touch()
        assert _exit(argv) == 2
        shown = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set to")]
        assert len(shown) == 1 and re.search("lightning-ssd.*: error: .", shown[0]), shown
        assert re.search(message, shown[0])

    def test_a_recipe_of_the_package_is_found_by_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        """And configurations; a file of that name comes first."""
        assert _exit(["run", "gpt", "-c", "gpt-1.3b", "--config=laptop-cpu", "--print_config"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["model"]["init_args"]["n_embd"] == 2048 and printed["trainer"]["logger"]
        assert printed["trainer"]["strategy"]["init_args"]["states"] == "ssd"
        Path("gpt").write_text(RECIPE)
        assert _exit(["run", "gpt", "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_steps"] == 2

    def test_a_copied_recipe_is_the_packages(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["init", "new/mine", "bert"]) == 0
        assert "lightning-ssd run new/mine/bert.yaml" in capsys.readouterr().out
        assert sorted(file.name for file in Path("new/mine").iterdir()) == ["bert.yaml", "defaults.yaml"]
        assert _exit(["run", "new/mine/bert.yaml", "--print_config"]) == 0
        copied = capsys.readouterr().out
        assert _exit(["run", "bert", "--print_config"]) == 0
        assert capsys.readouterr().out == copied
        Path("new/mine/bert.yaml").unlink()
        assert _exit(["init", "new/mine", "bert"]) == 2  # nothing is overwritten, not even the defaults alone
        assert "defaults.yaml exists" in capsys.readouterr().err
        assert not Path("new/mine/bert.yaml").exists()


@pytest.mark.parametrize("module", ["lightning_ssd", "lightning_ssd.cli"])
def test_python_runs_the_package_as_the_command(module: str) -> None:
    """Also with its exit code."""
    command = [sys.executable, "-m", module]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=240)
    assert (shown.returncode, shown.stdout.strip()) == (0, lightning_ssd.__version__)
    refused = subprocess.run([*command, "export"], capture_output=True, text=True, timeout=240)
    assert refused.returncode == 2
    assert "lightning-ssd export: error" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["init", "folder"], [141]),
        (["plan", "show", "plan.yaml"], [141]),
        (["init", "--help"], [0, 141]),  # argparse ignores the error from Python 3.11.3 on
    ],
)
def test_a_reader_that_has_ended_ends_the_command_quietly(arguments: list[str], codes: list[int]) -> None:
    plan_for_least_memory(make_model(2), H100).save("plan.yaml")
    reading, writing = os.pipe()
    os.close(reading)
    # Without a buffer, `plan show` fails while it prints, where other errors of the system are one line.
    command = [sys.executable, *["-u"] * ("show" in arguments), "-m", "lightning_ssd", *arguments]
    with open(writing, "wb"):
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=240)
    assert ended.returncode in codes and not ended.stderr


class TestLightning:
    @pytest.fixture
    def sdk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Installs a stand-in for lightning-sdk, whose command prints its arguments."""
        site_packages = tmp_path / "site-packages"
        info = site_packages / "lightning_sdk-2026.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning_sdk\nVersion: 2026.1\n")
        (info / "entry_points.txt").write_text("[console_scripts]\nlightning = stand_in_sdk:main_cli\n")
        (site_packages / "stand_in_sdk.py").write_text("import sys\ndef main_cli():\n    print('sdk:', sys.argv[1:])\n")
        monkeypatch.syspath_prepend(site_packages)

    @pytest.mark.usefixtures("sdk")
    def test_run_recipe_is_ours(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert _lightning(["run", recipe, "--trainer.strategy=auto"], monkeypatch) == 0
        # Lightning's launcher starts the other ranks with this process's command line.
        assert sys.argv == ["lightning", "run", recipe, "--trainer.strategy=auto"]
        Path(recipe).rename("no_suffix")
        assert _lightning(["run", "no_suffix", "--trainer.strategy=auto"], monkeypatch) == 0
        with pytest.raises(SystemExit, match="0"):
            _lightning(["run", "gpt", "--print_config"], monkeypatch)

    @pytest.mark.usefixtures("sdk")
    @pytest.mark.parametrize("argv", [["run"], ["run", "--help"], ["run", "none.yml"]])
    def test_run_without_a_job_is_ours(
        self, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            _lightning(argv, monkeypatch)
        assert "lightning-ssd run" in "".join(capsys.readouterr())

    @pytest.mark.usefixtures("sdk")
    @pytest.mark.parametrize("argv", [[], ["--help"], ["login"], ["run", "job", "--name", "x"], ["run", "mmt"]])
    def test_the_rest_is_the_sdks(
        self, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _lightning(argv, monkeypatch) == 0
        assert capsys.readouterr().out == f"sdk: {argv}\n"

    def test_names_the_package_to_install_without_the_sdk(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _lightning(["run", "job"], monkeypatch) == 2
        message = capsys.readouterr().err
        assert "`lightning run job`" in message and "pip install lightning-sdk" in message


class TestPlan:
    LARGE = str(ROOT / "configs/models/gpt-h12288-l3.yaml")

    def test_a_replay_varies_bandwidth_host_memory_and_drives(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", GPT, "--machine", MACHINE, "--replay"]) == 0
        printed = capsys.readouterr().out
        for said in ("128 GB/s", "Teraio", "this plan", "number of this machine's drives"):
            assert said in printed
        # All fits on the GPU: Teraio's plan never waits.
        assert re.search(r"4 GB/s +1\.000", printed)

    @pytest.mark.thorough
    def test_a_replay_takes_lifetimes_of_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The operators of the file take 10,000 times as long as traced ones, and save 1,000 times as many bytes."""
        shape = ["--machine", MACHINE, "--batch", "input_ids=2x64:int64"]
        assert cli.main(["profile", GPT, *shape, "--out", "traced"]) == 0
        content = json.loads((tmp_path / "traced/lifetimes.json").read_text())
        for one in content["operators"]:
            one["start"], one["end"] = 1e4 * one["start"], 1e4 * one["end"]
        for one in content["tensors"]:
            one["nbytes"] *= 1000 if one["kind"] == "saved tensor" else 1
        (tmp_path / "measured.json").write_text(json.dumps(content))
        capsys.readouterr()
        smaller = json.loads(Path(MACHINE).read_text()) | {"gpu_bytes": 3 * 10**9}
        (tmp_path / "smaller.json").write_text(json.dumps(smaller))
        small = ["plan", GPT, *shape, "--machine", "smaller.json"]
        assert cli.main([*small, "--replay", "--lifetimes", "measured.json"]) == 0
        found = re.search(r" 4 GB/s +(0\.\d+) +(\S+)\n", capsys.readouterr().out)
        assert found is not None and 0.1 < float(found[1]) < float(found[2]) == 1  # what is traced has room
        wrong = {"tokens": 64, "name": "Other"}
        for field, value in wrong.items():
            (tmp_path / "wrong.json").write_text(json.dumps(content | {field: value}))
            assert _exit(["plan", GPT, *shape, "--replay", "--lifetimes", "wrong.json"]) == 2
            assert "Measure both with the same recipe and options" in capsys.readouterr().err

    def test_plan_predicts_the_memory_and_time_of_a_recipe(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["plan", GPT, "-c", self.LARGE, "--machine", MACHINE, "--save", "plan.yaml"]
        assert cli.main([*argv, "--verbose", "--tbw", "600", "--trainer.accumulate_grad_batches", "4"]) == 0
        printed = capsys.readouterr().out
        for said in (
            "6.07B parameters",
            "It fits.",
            "bound by",
            "largest micro-batch",
            "SSD writes",
        ):
            assert said in printed
        assert cli.main(["plan", "show", "plan.yaml"]) == 0
        assert capsys.readouterr().out.strip() in printed

    def test_the_answer_is_of_the_training_as_configured(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Model states that exceed `gpu_memory` are in host memory, and details are printed on demand only."""
        command = ["plan", "gpt", "--machine", "h100", "--trainer.strategy=ssd_offload"]
        assert cli.main(command) == 0
        kept = capsys.readouterr().out
        assert cli.main([*command, "--trainer.strategy.gpu_memory=2MiB"]) == 0
        offloaded = capsys.readouterr().out
        assert "RAM 0 B of" in kept and "RAM 0 B of" not in offloaded
        for printed in (kept, offloaded):
            assert printed.startswith("It fits.\nmemory      GPU ")
            for said in ("tokens/s", "SSD writes  none", "bound by", "would help", "without SwapPlanner"):
                assert said in printed
            assert "swap coefficient" not in printed and len(printed.splitlines()) < 16
        assert max(map(len, printed.splitlines())) <= 80
        assert "`gpu_memory` bounds model states alone" in offloaded and "`gpu_memory`" not in kept
        assert cli.main([*command, "--gpu-memory=4GiB"]) == 0
        assert "of 4.00 GiB, RAM" in capsys.readouterr().out

    def test_more_host_memory_is_no_remedy_where_the_user_wants_states_on_ssds(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They are read from drives however large the host memory is."""
        assert cli.main(["plan", "gpt", "--machine", "h100", "--trainer.strategy.states=ssd"]) == 0
        printed = capsys.readouterr().out
        assert "bound by    ssd" in printed and "would help" in printed and "twice the RAM" not in printed

    def test_measures_this_machine(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", "--save-machine", "here.json", GPT]) == 0
        assert cli.main(["plan", "--machine", "here.json", GPT, "--planner", "lohan"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("It fits.") == 2 and "by a plan of SwapPlanner" in printed
        assert {path.name for path in tmp_path.iterdir()} == {"here.json", "recipe.yaml"}


BAD: dict[str, tuple[list[str], str]] = {
    "run: a directory": (["run", "folder"], "there is no recipe file 'folder'"),
    "run: no text": (["run", "binary"], "binary"),
    "run: an empty file": (["run", "empty"], "empty has no keys"),
    "run: a list": (["run", "list.yaml"], "list.yaml"),
    "run: no YAML": (["run", "broken.yaml"], "broken.yaml"),
    "run: -c of a directory": (["run", "recipe.yaml", "-c", "folder"], "folder"),
    "run: -c of no text": (["run", "recipe.yaml", "-c", "binary"], "binary"),
    "run: -c of nothing": (["run", "recipe.yaml", "-c"], "expected one argument"),
    "plan: a directory": (["plan", "folder", "--machine", MACHINE], "there is no recipe file 'folder'"),
    "plan: no text": (["plan", "binary", "--machine", MACHINE], "binary"),
    "plan: an empty file": (["plan", "empty", "--machine", MACHINE], "empty has no keys"),
    "plan: no YAML": (["plan", "broken.yaml", "--machine", MACHINE], "broken.yaml"),
    "plan: machine is a directory": (["plan", GPT, "--machine", "folder"], "there is no file 'folder'"),
    "plan: machine is no text": (["plan", GPT, "--machine", "binary"], "binary is not UTF-8"),
    "plan: measures a file": (["plan", GPT, "--measure", "empty"], "'empty' is not a directory"),
    "plan: measures what cannot be written": (["plan", GPT, "--measure", "/proc"], "scratch directory .* in /proc"),
    "plan: path cannot be written": (
        ["plan", GPT, "--trainer.default_root_dir=/proc"], "scratch directory .* in /proc"
    ),
    "plan: profile is no text": (["plan", GPT, "--machine", MACHINE, "--profile", "binary"], "binary is not UTF-8"),
    "plan: machine saved nowhere": (
        ["plan", GPT, "--save-machine", "none/here.json"], "--save-machine: there is no folder 'none' for"
    ),
    "plan: plan saved nowhere": (
        ["plan", GPT, "--machine", MACHINE, "--save", "none/plan.yaml"], "--save: there is no folder 'none' for"
    ),
    "plan: saved as a directory": (["plan", GPT, "--machine", MACHINE, "--save", "folder"], "'folder' is a directory"),
    "plan: tbw is no number": (["plan", GPT, "--machine", MACHINE, "--tbw", "lots"], "--tbw"),
    "plan: tbw is NaN": (["plan", GPT, "--machine", MACHINE, "--tbw", "nan"], "--tbw.*finite number"),
    "plan: tbw is 0": (["plan", GPT, "--machine", MACHINE, "--tbw", "0"], "--tbw.*finite number greater than 0"),
    "plan: tbw is negative": (["plan", GPT, "--machine", MACHINE, "--tbw=-1"], "--tbw.*finite number greater than 0"),
    "plan: another file as profile": (
        ["plan", GPT, "--machine", MACHINE, "--profile", MACHINE], "has no `units`: it is no file that ModelProfiler"
    ),
    "plan: a missing file": (["plan", "missing.yaml"], "there is no recipe file 'missing.yaml'"),
    "plan: two machines": (["plan", GPT, "--machine", MACHINE, "--measure", "."], "exclude each other"),
    "plan: path is missing": (
        ["plan", GPT, "--trainer.default_root_dir=missing"], "'missing' is not a directory.*--measure DIR"
    ),
    "plan: another planner": (
        ["plan", GPT, "--machine", MACHINE, "--planner", "guess"], "--planner: invalid choice: 'guess'"
    ),
    "plan: machine is a recipe": (
        ["plan", GPT, "--machine", GPT], "is YAML, and a machine file is JSON: .*--save-machine"
    ),
    "plan: another machine": (
        ["plan", GPT, "--machine", "rtx-409"], "no machine of the package .* Did you mean 'rtx-4090'"
    ),
    "plan: lifetimes without a replay": (
        ["plan", GPT, "--machine", MACHINE, "--lifetimes", MACHINE], "--lifetimes is for --replay"
    ),
    "plan: another file as lifetimes": (
        ["plan", GPT, "--machine", MACHINE, "--replay", "--lifetimes", MACHINE], "has no `version`"
    ),
    "plan show: a missing file": (
        ["plan", "show", "missing.yaml"], "`plan show` takes one file.*: there is no file 'missing.yaml'"
    ),
    "plan show: a recipe": (["plan", "show", GPT], "unknown entry|lacks the entry"),
    "plan: a batch without a dtype": (
        ["plan", GPT, "--machine", MACHINE, "--batch", "input_ids=2x64"], "`--batch input_ids=2x64` is no .* float32"
    ),
    "plan: bytes a day": (["plan", GPT, "--machine", MACHINE, "--ssd-per-day", "much"], "--ssd-per-day"),
    "plan: negative bytes a day": (["plan", GPT, "--machine", MACHINE, "--ssd-per-day=-1"], "--ssd-per-day"),
    "profile: out is a file": (["profile", GPT, "--machine", MACHINE, "--out", "empty"], "--out: 'empty' is a file"),
    "plan show: a directory": (["plan", "show", "folder"], "takes one file"),
    "plan show: no text": (["plan", "show", "binary"], "binary"),
    "plan show: an empty file": (["plan", "show", "empty"], "empty"),
    "plan: bytes a day without a unit": (["plan", GPT, "--machine", MACHINE, "--ssd-per-day", "1"], "would be 1 bytes"),
    "export: no file": (["export", "none.ckpt", "out"], "there is no file 'none.ckpt'"),
    "export: no checkpoint": (["export", "binary", "out"], "binary is no checkpoint: name one"),
    "export: an empty file": (["export", "empty", "out"], "empty is no checkpoint: name one"),
    "export: a directory without one": (["export", "folder", "out"], "folder is no checkpoint: name one"),
    "export: a tensor": (["export", "tensor.ckpt", "out"], "tensor.ckpt has no state dict"),
    "export: half a file": (["export", "half.ckpt", "out"], "half.ckpt is no checkpoint: name one"),
    "export: into a file": (["export", "good.ckpt", "empty"], "empty.*(not a directory|File exists|Not a directory)"),
    "export: where nothing can be written": (["export", "good.ckpt", "/proc/out"], "/proc/out"),
    "export: another prefix": (["export", "good.ckpt", "out", "--prefix", "x."], "begins with 'x.'"),
    "export: shards of nothing": (["export", "good.ckpt", "out", "--shard", "0"], "--shard"),
    "export: like a file": (["export", "good.ckpt", "out", "--like", "empty"], "'empty' is not a directory"),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command prints the error without usage and traceback, and leaves no files."""
    Path("folder").mkdir()
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(128, 256)) * 9)
    Path("list.yaml").write_text("- 1\n- 2\n")
    Path("broken.yaml").write_text("model: [1, {")
    torch.save({"state_dict": {"weight": torch.ones(3)}}, "good.ckpt")
    torch.save(torch.ones(3), "tensor.ckpt")
    Path("half.ckpt").write_bytes(Path("good.ckpt").read_bytes()[:400])
    before = {path.name for path in tmp_path.iterdir()}
    argv, message = BAD[name]
    assert _exit(argv) == 2
    error = capsys.readouterr().err
    assert re.search(f"(?s)error: .*{message}", error), error[-600:]
    assert "usage:" not in error and "Union" not in error
    assert {path.name for path in tmp_path.iterdir()} - {"out"} == before


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", GPT, "--profile", "binary"],
        ["plan", GPT, "--batch", "wide"],
        ["plan", GPT, "--planner", "guess"],
        ["plan", GPT, "--save", "."],
        ["plan", GPT, "--save-machine", "."],
        ["profile", "--profile", "binary"],
        ["profile", GPT, "--batch", "wide"],
    ],
    ids=lambda argv: f"{argv[0]} {argv[-2]}",
)
def test_a_bad_input_is_found_before_this_machine_is_measured(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr("lightning_ssd.profiling.measure_machine", lambda *given, **_: measured.append(given))
    Path("binary").write_bytes(bytes(range(128, 256)))
    assert _exit(argv) == 2
    assert argv[-1] in capsys.readouterr().err
    assert not measured


def test_help_is_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    assert _exit(["--help"]) == 0
    assert "run " in capsys.readouterr().out
