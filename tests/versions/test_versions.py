"""What must hold with each version of Python, torch and Lightning: `.ci/versions` runs all of this with several.

Trainings of each placement of model states equal plain Lightning's bit for bit, eager and compiled, and resume from
checkpoints.
"""

import gc
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import SSDOffloadStrategy, versions
from lightning_ssd import torch_internals as internals
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.models import Block, Model
from tests.support.states import train
from tests.support.trainings import offloading

ROOT = Path(__file__).parents[2]

PLACES = ("ssd", "host", "gpu")


def strategy(states: str, **arguments: Any) -> SSDOffloadStrategy:
    """Returns a strategy that offloads all activations and the states to `states`."""
    return offloading(**{"states": states, "min_bytes": 1, "ssd_capacity": "8MiB"} | arguments)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", PLACES)
def test_trainings_equal_plain_ones(tmp_path: Path, states: str, precision: str) -> None:
    arguments: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2}
    if precision == "32-true":  # Lightning refuses to clip for the model's fused optimizer in mixed precision
        arguments["gradient_clip_val"] = 0.5
    assert_same(train(tmp_path, strategy(states), Model(), **arguments), train(tmp_path, "auto", Model(), **arguments))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", PLACES)
def test_trainings_resume_from_checkpoints(tmp_path: Path, states: str) -> None:
    def resumed(kind: Any) -> Any:
        path = tmp_path / str(kind)
        train(path, strategy(kind) if kind else "auto", Model(), enable_checkpointing=True)
        (saved,) = path.rglob("*.ckpt")
        gc.collect()
        return train(path, strategy(kind) if kind else "auto", Model(), max_epochs=3, ckpt_path=saved)

    assert_same(resumed(states), resumed(None))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("states", PLACES)
def test_compiled_trainings_equal_plain_ones(
    tmp_path: Path,
    states: str,
    backend: str,
    fresh_dynamo: None,  # noqa: F811
) -> None:
    def compiled() -> Model:
        model = Model()
        for block in model.blocks:
            assert isinstance(block, Block)
            block.compile(backend=backend)
        return model

    assert_same(train(tmp_path, strategy(states), compiled()), train(tmp_path, "auto", compiled()))


def test_versions_beyond_the_tested_ones_are_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions.TESTED, "torch", ("2.0", "2.1"))
    monkeypatch.setattr(torch, "__version__", "2.2.0+cpu")
    with pytest.warns(UserWarning, match=r"not tested with torch 2\.2\.0\+cpu \(tested: 2\.0 to 2\.1\)\. "):
        train(tmp_path, strategy("gpu"), Model())
    monkeypatch.setattr(torch, "__version__", "2.1.9")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lightning_ssd was not tested")
        train(tmp_path, strategy("gpu"), Model())


def test_tested_versions_are_those_of_the_requirements_and_of_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = {name: f">={tested[0]}" for name, tested in versions.TESTED.items()}
    assert project["requires-python"] == oldest["Python"]
    assert "torch" + oldest["torch"] in project["dependencies"]
    assert any(item.startswith("lightning" + oldest["Lightning"]) for item in project["dependencies"])
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name, tested in versions.TESTED.items():
        assert f"{name} {' to '.join(dict.fromkeys(tested))}" in readme


@pytest.mark.parametrize("name", sorted(internals._INTERFACES))
def test_this_torch_has_each_private_interface(name: str) -> None:
    assert getattr(internals, name) is not None


@pytest.mark.thorough
def test_imports_look_up_no_private_interface_of_torch() -> None:
    """So a torch without one of them imports the package: all but the base class of dispatch modes, and no other."""
    modules = sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "lightning_ssd").rglob("*.py")
        if file.name not in ("__init__.py", "__main__.py") and "recipes" not in file.parts  # they need an extra
    )
    code = (
        f"import importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "import lightning_ssd.torch_internals as internals\n"
        "print(*(name for name in internals._INTERFACES if name in vars(internals)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["TorchDispatchMode"]
