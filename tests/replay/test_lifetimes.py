"""`lightning-ssd profile`: the lifetimes of a step's tensors are those of the model, traced without memory."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ssd import cli, dry_run
from lightning_ssd.planning import HardwareProfile
from lightning_ssd.recipes import read_recipe
from lightning_ssd.replay import LifetimeProfile, active_share, describe_lifetimes, migratable_share

ROOT = Path(__file__).parents[2]
MACHINE = str(ROOT / "configs/machines/h100.json")
H100 = HardwareProfile.from_json(MACHINE)
BATCH = "input_ids=4x256:int64"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def gpt() -> LifetimeProfile:
    config = read_recipe(str(ROOT / "recipes/gpt.yaml"), ["--trainer.precision=32-true"], run=False)
    return dry_run.profile_lifetimes(config, H100, [BATCH])


def test_weights_gradients_and_states_have_the_models_bytes(gpt: LifetimeProfile) -> None:
    config = read_recipe(str(ROOT / "recipes/gpt.yaml"), [], run=False)
    parameters = dry_run.profile_recipe(config, H100, [BATCH]).parameters
    nbytes = {kind: sum(one.nbytes for one in gpt.tensors if one.kind == kind) for kind in gpt.memory}
    assert nbytes["weight"] == pytest.approx(4 * parameters, rel=0.01)
    assert nbytes["gradient"] == 4 * parameters
    states = [one for one in gpt.tensors if one.kind == "optimizer state" and one.nbytes > 4]
    assert sum(one.nbytes for one in states) == 8 * parameters  # two moments in fp32
    assert all(one.is_global and one.unit for one in states)
    phases = {gpt.operators[use].phase for one in states for use in one.uses}
    assert phases == {"optimizer"}


def test_weights_of_16_bits_have_as_many_elements(gpt: LifetimeProfile) -> None:
    config = read_recipe(str(ROOT / "recipes/gpt.yaml"), ["--trainer.precision=bf16-true"], run=False)
    found = dry_run.profile_lifetimes(config, H100, [BATCH])
    nbytes, numel = (
        [sum(one.nbytes // size(one) for one in profile.tensors if one.kind == "weight") for profile in (gpt, found)]
        for size in (lambda one: 1, lambda one: one.itemsize)
    )
    assert nbytes[0] > 1.9 * nbytes[1] and numel[0] == numel[1]


def test_lifetimes_follow_the_step(gpt: LifetimeProfile) -> None:
    """Gradients are allocated in backward, saved tensors in forward; a weight is used in all three phases."""
    phase = [one.phase for one in gpt.operators]
    assert phase == sorted(phase, key=["forward", "backward", "optimizer"].index)
    for one in gpt.tensors:
        uses = {phase[use] for use in one.uses}
        if one.kind == "gradient":
            assert one.allocated is not None and phase[one.allocated] == "backward" and "optimizer" in uses
        if one.kind == "saved tensor":
            assert one.allocated is None or phase[one.allocated] == "forward"
            assert "backward" in uses and not one.is_global
    matrices = [one for one in gpt.tensors if one.kind == "weight" and one.name.endswith("c_fc.weight")]
    assert len(matrices) == 4
    assert all({phase[use] for use in one.uses} == {"forward", "backward", "optimizer"} for one in matrices)
    # The first block's weight is used early in forward and late in backward.
    after, before = matrices[0].uses[0], matrices[0].uses[1]
    last = matrices[-1].uses[0], matrices[-1].uses[1]
    assert after < last[0] < last[1] < before


def test_the_inactive_periods_of_global_tensors_wrap_round_the_step(gpt: LifetimeProfile) -> None:
    for index, one in enumerate(gpt.tensors):
        if one.is_global and one.uses:
            waits = sum(period.seconds for period in gpt.periods if period.tensor == index)
            used = sum(gpt.operators[use].end - gpt.operators[use].start for use in one.uses)
            neighbours = sum(
                gpt.operators[before].start - gpt.operators[after].end
                for after, before in zip(one.uses, one.uses[1:], strict=False)
                if before == after + 1
            )
            assert waits + used + neighbours == pytest.approx(gpt.step_seconds)


def test_the_command_prints_a_summary_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes/gpt.yaml")
    assert cli.main(["profile", recipe, "--machine", MACHINE, "--batch", BATCH, "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"active tensors +\d+\.\d\d% of", printed) and "inactive periods" in printed
    for name in ("active.png", "inactive.png", "memory.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    loaded = LifetimeProfile.from_json(tmp_path / "out" / "lifetimes.json")
    mean, most = active_share(loaded, H100.gpu_bytes)
    assert 0 < mean < most < 1 and 0 <= migratable_share(loaded) <= 1


def test_the_summary_describes_tensors_of_the_papers_sizes_if_there_are_any(gpt: LifetimeProfile) -> None:
    assert "no tensor of 10 MB to 1 GB has one" in describe_lifetimes(gpt, H100)
    large = replace(gpt, tensors=tuple(replace(one, nbytes=1000 * one.nbytes) for one in gpt.tensors))
    described = describe_lifetimes(large, H100)
    assert re.search(r"of tensors of 10 MB to 1 GB, \d+% are longer than a migration at 6.5 GB/s", described)


def test_a_missing_recipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", "absent.yaml", "--machine", MACHINE])
    assert "there is no recipe file 'absent.yaml'" in capsys.readouterr().err
