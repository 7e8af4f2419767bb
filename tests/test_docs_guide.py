"""The bytes a parameter that `docs/guide.md` states are those of trainings."""

import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.trainings import fit, nothing_left, rows

__all__ = ["nothing_left"]

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
WIDTH = 1024  # 2**20 parameters: bytes a parameter are MiB


class Product(pl.LightningModule):
    """A matrix of 2**20 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.matrix(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _table() -> list[tuple[str, str, int, int]]:
    """Returns the rows of the guide's first table whose weights are trained: precision, state format, bytes.

    The bytes are those in RAM with the gradient, and those on SSDs. Only a GPU has `16-mixed`.
    """
    found = []
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and all(re.fullmatch(r"\d+ \+ \d+", cell) for cell in cells[3:]):
            host, ssd = (list(map(int, cell.split(" + "))) for cell in cells[3:])
            for precision in re.findall(r"[\w-]+", cells[0]):
                if precision != "16-mixed":
                    found.append((precision, cells[1].partition(" ")[0].strip('`"') or "fp32", sum(host), ssd[0]))
    return found


TABLE = _table()


def _state_line(path: Path, caplog: pytest.LogCaptureFixture, precision: Any, how: Any, **arguments: Any) -> str:
    """Trains `Product`, and returns the log lines that have the bytes of its model states."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        strategy = SSDOffloadStrategy(offload="none", min_bytes=1024, **how)
        fit(path, strategy, Product(), rows(2, WIDTH), precision=precision, **arguments)
    (line,) = [line for line in caplog.messages if "totals: " in line]
    return line


@pytest.mark.parametrize(("precision", "state_format", "host", "ssd"), TABLE)
def test_bytes_a_parameter(
    precision: str, state_format: str, host: int, ssd: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On SSDs, they are doubled if steps whose gradients are clipped can be rolled back."""
    how = {"state_format": state_format, "states": "host"}
    assert f"totals: host memory {host}.00 MiB" in _state_line(tmp_path, caplog, precision, how)
    for clip, versions in (("deferred", 1), ("auto", 2)):
        how |= {"states": "ssd", "clip": clip}
        line = _state_line(tmp_path, caplog, precision, how, gradient_clip_val=1.0)
        assert f"SSD {versions * ssd}.00 MiB" in line


def test_rows_are_found() -> None:
    assert len(TABLE) >= 5
