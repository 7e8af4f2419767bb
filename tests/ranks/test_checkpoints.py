"""Trainings resume from checkpoints of any number of ranks, and of plain Lightning, and evaluate as on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.checkpoints import CHECKPOINT, ours, train, twice
from tests.ranks.processes import launch


def run(root: Path, size: int) -> None:
    results = launch("checkpoints.py", size, [str(root)])
    assert [status for status, _ in results] == [0] * size, "\n".join(output for _, output in results)


@pytest.mark.thorough
def test_checkpoints_of_all_numbers_of_ranks(tmp_path: Path) -> None:
    expected = train(tmp_path / "plain").state_dict()

    def check(found: dict[str, Any], **tolerance: float) -> None:
        torch.testing.assert_close(found, expected, **{"rtol": 0, "atol": 0} | tolerance)

    run(tmp_path, 2)
    for name in ("file", "file-resumed", "sharded", "sharded-resumed", "plain"):
        for rank in range(2):
            check(torch.load(tmp_path / f"{name}.2.{rank}"))
    for name in ("file", "sharded"):
        check(train(tmp_path / f"1-{name}", ours(), ckpt_path=tmp_path / name / CHECKPOINT).state_dict())
    check(train(tmp_path / "2-plain", ckpt_path=tmp_path / "file" / CHECKPOINT).state_dict())
    # A checkpoint after `fit` has the optimizer states, too.
    plain, after = (torch.load(tmp_path / name / "after.ckpt") for name in ("plain", "file"))
    torch.testing.assert_close(after["optimizer_states"], plain["optimizer_states"], rtol=0, atol=0)

    again, evaluations = twice()  # whose second `fit` begins with other optimizer states
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"twice.2.{rank}"), again.state_dict(), rtol=0, atol=0)
        assert torch.load(tmp_path / f"evaluations.{rank}") == evaluations

    run(tmp_path, 3)  # the mean of three equal gradients is rounded
    for name in ("file-resumed", "sharded-resumed"):
        for rank in range(3):
            check(torch.load(tmp_path / f"{name}.3.{rank}"), rtol=1e-4, atol=1e-6)
