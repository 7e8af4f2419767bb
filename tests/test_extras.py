"""The package without its extras: trainings of own modules run, and what needs an extra names it."""

import subprocess
import sys
from pathlib import Path

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


def run(program: str, folder: Path) -> str:
    """Runs a program in an interpreter that finds no package of an extra, and returns what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + program],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_an_own_module_trains_and_is_planned_without_extras(tmp_path: Path) -> None:
    run(
        """
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
""".replace("MACHINE", repr(str(ROOT / "configs/machines/h100.json"))),
        tmp_path,
    )


def test_what_needs_an_extra_names_it(tmp_path: Path) -> None:
    printed = run(
        f"""
from lightning_ssd import cli

for argv in (["run", {str(ROOT / "recipes/gpt.yaml")!r}], ["run", {str(ROOT / "recipes/bert.yaml")!r}]):
    try:
        cli.main(argv)
    except SystemExit as stopped:
        assert stopped.code == 2
    else:
        raise AssertionError(argv)
""",
        tmp_path,
    )
    assert printed.count("needs transformers, which is not installed: pip install 'lightning-ssd[recipes]'") == 2
