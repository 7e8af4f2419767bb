"""The package without its extras: trainings of own modules run, and what needs an extra names it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {"transformers", "tokenizers", "huggingface_hub", "diffusers", "peft", "sklearn", "matplotlib"}


class Finder(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(context):
        return [] if context.name in EXTRAS else PathFinder.find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch import LightningModule, Trainer

import lightning_ssd

for name in lightning_ssd.__all__:
    getattr(lightning_ssd, name)


class Own(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
data = DataLoader(torch.randn(24, 16), batch_size=2)
quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
for callbacks in ([], [lightning_ssd.SwapPlanner(machine=MACHINE)]):
    strategy = lightning_ssd.SSDOffloadStrategy(states="ssd", path=".", min_bytes=1)
    trainer = Trainer(max_steps=12, accelerator="cpu", devices=1, strategy=strategy, callbacks=callbacks, **quiet)
    trainer.fit(Own(), data)
    assert trainer.global_step == 12
print("trained")

from lightning_ssd import cli

for recipe in ("gpt", "bert"):
    try:
        cli.main(["run", f"{RECIPES}/{recipe}.yaml"])
    except SystemExit as stopped:
        assert stopped.code == 2
    else:
        raise AssertionError(recipe)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a program prints in an interpreter that finds no package of an extra."""
    names = {"MACHINE": str(ROOT / "configs/machines/h100.json"), "RECIPES": str(ROOT / "recipes")}
    program = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + WITHOUT_EXTRAS + PROGRAM
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path_factory.mktemp("extras"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_an_own_module_trains_and_is_planned_without_extras(printed: str) -> None:
    assert "trained" in printed.splitlines()


def test_what_needs_an_extra_names_it(printed: str) -> None:
    assert printed.count("needs transformers, which is not installed: pip install 'lightning-ssd[recipes]'") == 2
