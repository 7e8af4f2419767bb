"""Recipes as LightningCLI reads them. For the tests of recipes and of the files that go on top of them."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
# Files for several recipes, named after none, have tests of their own: test_llama_configs.py.
MODELS = [
    file
    for file in sorted((ROOT / "configs" / "models").glob("*.yaml"))
    if (RECIPES / f"{file.stem.partition('-')[0]}.yaml").is_file()
]
MACHINES = sorted((ROOT / "configs" / "machines").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps the arguments of pytest from LightningCLI, and puts what a run writes into the test's own folder."""
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)


def read(recipe: str, *files: Path, options: tuple[str, ...] = (), run: bool = False) -> LightningCLI:
    """Returns the recipe `recipe` over the defaults and under `files` and `options`; `run`: after its training."""
    read = (RECIPES / "defaults.yaml", RECIPES / f"{recipe}.yaml", *files)
    configs = [argument for file in read for argument in ("--config", str(file))]
    return LightningCLI(args=[*(["fit"] if run else []), *configs, *options], run=run)


def recipe_of(file: Path) -> str:
    """Returns the name of the recipe that a file of `configs/models` is for."""
    return file.stem.partition("-")[0]


def trained(config: Any) -> dict[str, Any]:
    """Returns the arguments of the model and the data."""
    return {**config.model.init_args.as_dict(), **config.data.init_args.as_dict()}


def logged(folder: Path, column: str) -> list[float]:
    """Returns the values of a column in the one file of metrics below `folder`."""
    (file,) = folder.glob("**/metrics.csv")
    with file.open() as stream:
        return [float(row[column]) for row in csv.DictReader(stream) if row[column]]
