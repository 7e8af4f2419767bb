"""Steps of values in host memory cost few Python calls: each delays the thread that launches kernels."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lightning_ssd
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import in_backward
from lightning_ssd.model_states.access import Access
from lightning_ssd.model_states.access.torch_functions import Kind
from tests.support.compare import assert_same
from tests.support.models import BlocksModel
from tests.support.trainings import fit, nothing_left, rows  # noqa: F401

pytestmark = pytest.mark.timeout(60)

COUNTED = (
    str(Path(lightning_ssd.__file__).parent),
    threading.__file__,
)


def count(path: Path, depth: int, steps: int, clip: float | None) -> int:
    """Trains blocks with two linear layers each, and returns the Python calls of this package and of threads."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(COUNTED)

    strategy = SSDOffloadStrategy(states="host", offload="none", min_bytes=1)
    model = BlocksModel(torch.optim.AdamW, depth=depth, norm=False)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        fit(path, strategy, model, rows(steps), precision="bf16-mixed", gradient_clip_val=clip)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("clip", "limit"), [(None, 470), (1.0, 570)])
def test_a_block_costs_few_python_calls_in_each_step(tmp_path: Path, clip: float | None, limit: int) -> None:
    """The limits are above the present numbers, 380 to 440 and 530 to 545. Waits add calls: the fewest of 3 count."""

    def a_block() -> float:
        few, many = (count(tmp_path, depth, 12, clip) - count(tmp_path, depth, 4, clip) for depth in (2, 6))
        return (many - few) / (8 * 4)

    assert min(a_block() for _ in range(3)) <= limit


class Recomputed(BlocksModel):
    """Forwards of blocks are recomputed without a call of the blocks, and so without their hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_first_operator_of_a_recomputation_looks_up_the_weights_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    """A block has a norm and two products. Forwards call no hooks, either, and each operator there looks weights up."""
    forward: list[bool] = []
    run = Access.run

    def noted(access: Access, kind: Kind, *args: Any) -> Any:
        if kind in (Kind.MATMUL, Kind.KERNEL):
            forward.append(not in_backward())
        return run(access, kind, *args)

    how: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.1}
    expected = fit(tmp_path, "auto", Recomputed(torch.optim.AdamW, depth=4), rows(3), **how)
    monkeypatch.setattr(Access, "run", noted)
    strategy = SSDOffloadStrategy(states="host", offload="none", min_bytes=1, gpu_memory="1B")
    found = fit(tmp_path, strategy, Recomputed(torch.optim.AdamW, depth=4), rows(3), **how)
    assert_same(found, expected)
    assert (forward.count(True), forward.count(False)) == (3 * 4 * 3, 3 * 4)
