"""The installed package: editable and as a wheel, in a virtual environment of its own.

The environments see this one's packages through a `.pth` file, so that torch is not installed again.
"""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.products import thorough

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=[thorough("editable"), "wheel"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the package installed."""
    source = ["--editable", ROOT] if request.param == "editable" else [ROOT]
    return _environment(tmp_path_factory.mktemp(request.param), source)


def _environment(venv: Path, source: Sequence[str | Path]) -> Path:
    """Returns the interpreter of a new environment in which `source` is installed."""
    _check([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin" / "python"
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "parent.pth").write_text(sysconfig.get_paths()["purelib"])
    # The parent may have the package, too; `--ignore-installed` does not change it.
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    _check([sys.executable, "-m", "pip", "--python", python, "install", *offline, *source])
    return python


# For what cannot differ between the two ways to install.
wheel_only = pytest.mark.parametrize("python", ["wheel"], indirect=True)


def _check(command: Sequence[str | Path]) -> str:
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture
def run(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs a program in the environment, away from the repository, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return lambda program: _check([python, "-c", program])


TRAINERS_BY_NAME = """
import {tree} as pl
import sys
assert "lightning_ssd.strategy" not in sys.modules

for name, tier in [("ssd_offload", "ssd"), ("SSD_Offload", "ssd"), ("cpu_offload", "host")]:
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy).__name__ == "SSDOffloadStrategy"
    assert isinstance(trainer.strategy, pl.strategies.Strategy)
    assert trainer.strategy.config.tier == tier
    assert trainer.strategy.root_device.type == "cpu"

assert not {other!r} in sys.modules
"""


@pytest.mark.thorough
@wheel_only
def test_a_broken_strategy_affects_only_trainers_that_use_it(run: Callable[[str], str]) -> None:
    """And only while it is broken: later Trainers find the strategies by name, without an import."""
    run(
        """
import sys
sys.modules["lightning_ssd.strategy"] = None  # what makes `import` fail
import lightning.pytorch as pl
pl.Trainer(strategy="auto", accelerator="cpu", devices=1, logger=False)
try:
    pl.Trainer(strategy="ssd_offload", accelerator="cpu", devices=1)
except ImportError as error:
    assert "lightning_ssd.strategy" in str(error)
else:
    raise AssertionError
del sys.modules["lightning_ssd.strategy"]
"""
        + TRAINERS_BY_NAME.format(tree="lightning.pytorch", other="pytorch_lightning")
    )


@pytest.mark.thorough
@wheel_only
def test_with_both_trees_imported_the_asking_trainer_decides(run: Callable[[str], str]) -> None:
    """Also where the strategies were found by name in the other tree, before this one was imported."""
    run(
        TRAINERS_BY_NAME.format(tree="pytorch_lightning", other="lightning.pytorch")
        + """
import lightning.pytorch
import pytorch_lightning
trainer = pytorch_lightning.Trainer(strategy="ssd_offload", accelerator="cpu", devices=1, logger=False)
assert isinstance(trainer.strategy, pytorch_lightning.strategies.Strategy)
try:
    lightning.pytorch.Trainer(strategy="ssd_offload", accelerator="cpu", devices=1)
except RuntimeError as error:
    assert "`lightning.pytorch`" in str(error) and "`pytorch_lightning`" in str(error), error
else:
    raise AssertionError
"""
    )


@pytest.mark.thorough
@wheel_only
def test_importing_registers_without_the_automatic_registration(
    run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every public name can be imported."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    run("""
import sys
from lightning.pytorch.strategies import StrategyRegistry
assert "lightning_ssd" not in sys.modules and "ssd_offload" not in StrategyRegistry
import lightning_ssd
assert "ssd_offload" in StrategyRegistry and "cpu_offload" in StrategyRegistry
lightning_ssd._autoload.register()
assert sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path) == 1
for name in lightning_ssd.__all__:
    assert getattr(lightning_ssd, name).__name__ == name
assert not hasattr(lightning_ssd, "nonsense")
""")


@wheel_only
def test_importing_the_package_imports_no_torch(run: Callable[[str], str]) -> None:
    run("import lightning_ssd, sys; assert 'torch' not in sys.modules")


def test_import_torch_needs_no_lightning(run: Callable[[str], str]) -> None:
    run("""
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None  # as if they were not installed
import torch
assert "lightning_ssd._autoload" in sys.modules and "lightning_ssd._lightning" not in sys.modules
""")


@pytest.mark.thorough
def test_import_torch_outlives_the_clone_of_an_editable_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategies are registered as long as the clone is there."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "lightning_ssd", clone / "lightning_ssd")
    for name in ("pyproject.toml", "README.md", "lightning_ssd_autoload.py"):
        shutil.copy(ROOT / name, clone / name)
    python = _environment(tmp_path / "venv", ["--editable", clone])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    registered = "import torch, lightning.pytorch.strategies as s; assert ('ssd_offload' in s.StrategyRegistry) is {}"
    _check([python, "-c", registered.format(True)])
    clone.rename(tmp_path / "moved")
    _check([python, "-c", registered.format(False)])


@wheel_only
def test_import_torch_outlives_a_hook_that_cannot_be_set(run: Callable[[str], str]) -> None:
    run("import sys; sys.meta_path = tuple(sys.meta_path); import torch; torch.ones(1)")


def test_installed_files(run: Callable[[str], str], python: Path) -> None:
    printed = run("""
import lightning_ssd
from importlib.metadata import version
assert version("lightning-ssd") == lightning_ssd.__version__
print(lightning_ssd.__path__[0], lightning_ssd.__version__)
""")
    folder, version = Path(printed.split()[0]), printed.split()[1]
    environment = python.parent.parent
    assert folder == ROOT / "lightning_ssd" or environment in folder.parents
    assert (folder / "py.typed").is_file()
    files = folder / "files" if environment in folder.parents else ROOT
    for name in ("recipes/gpt.yaml", "recipes/defaults.yaml", "configs/models/gpt-tiny.yaml"):
        assert (files / name).read_text() == (ROOT / name).read_text()
    assert _check([python.parent / "lightning-ssd", "--version"]).strip() == version
    assert (python.parent / "lightning").is_file()
    printed = _check([python.parent / "lightning", "run", "gpt", "-c", "gpt-tiny", "--print_config"])
    assert "class_path: lightning_ssd.recipes.models.GPT" in printed
