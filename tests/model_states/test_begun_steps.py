"""User code that reads weights or optimizer states in a backward, in which some units have begun their steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.support.access import PLACES, Toy, _frozen, compare, fit
from tests.support.trainings import package_threads, scratch_directories

BEGUN = "their step had begun, in the same backward.*Set `overlap='none'`"

Read = Callable[[Any], Any]


def _checkpoint(module: Any) -> Any:
    path = Path(module.trainer.default_root_dir) / "amid.ckpt"
    module.trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)["state_dict"]


def _whole(module: Any) -> Any:
    with module.trainer.strategy.whole_weights():
        return list(module.blocks[1].parameters())


READS: dict[str, Read] = {
    "a copy": lambda module: module.blocks[1].up.weight.detach().clone(),
    "a sum of `.data`": lambda module: module.blocks[1].up.weight.data.sum(),
    "a list": lambda module: module.blocks[1].up.weight.tolist(),
    "state_dict": lambda module: module.state_dict(),
    "optimizer.state_dict": lambda module: module.optimizers(use_pl_optimizer=False).state_dict()["state"],
    "a checkpoint": _checkpoint,
}


class Reading(Toy):
    """Reads when the second block's gradients are complete, and those of the first one are not."""

    def __init__(self, read: Read) -> None:
        super().__init__(optimizer=torch.optim.AdamW, lr=0.01)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.register_hook(self.between)
        result: Tensor = self.blocks[1](x)
        return result

    def between(self, grad: Tensor) -> None:
        self.seen.append(_frozen(self.read(self)))


class Failing(Reading):
    """Fails there in its second step."""

    def between(self, grad: Tensor) -> None:
        if self.global_step == 1:
            raise ValueError("the second backward failed")


class ReadsAfterErrors(pl.Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        pl_module.seen.append(_frozen(pl_module.read(pl_module)))


@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("read", [*READS, "whole_weights"])
def test_a_hook_in_backward_reads_no_value_of_a_step_that_has_begun(
    tmp_path: Path, read: str, precision: Any, states: str
) -> None:
    module = Reading((READS | {"whole_weights": _whole})[read])
    with pytest.raises(RuntimeError, match=BEGUN):
        fit(tmp_path, module, states, precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("read", READS)
def test_a_hook_in_backward_reads_plain_values_if_no_step_has_begun(tmp_path: Path, read: str, precision: Any) -> None:
    compare(tmp_path, lambda: Reading(READS[read]), "host", strategy={"overlap": "none"}, precision=precision)


@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("read", READS)
def test_no_value_of_two_steps_is_read_after_a_backward_has_failed(
    tmp_path: Path, read: str, precision: Any, states: str
) -> None:
    """As by OnExceptionCheckpoint, whose file would have weights of which some were stepped once more than others."""
    module = Failing(READS[read])
    with pytest.raises(RuntimeError, match=BEGUN) as raised:
        fit(tmp_path, module, states, precision=precision, callbacks=[ReadsAfterErrors()])
    assert isinstance(raised.value.__context__, ValueError)
    module.trainer.strategy.teardown()  # Lightning does not call it if `on_exception` raises
    assert not package_threads() and not scratch_directories(tmp_path)


@pytest.mark.parametrize("read", READS)
def test_values_after_a_backward_that_failed_are_plain_if_no_step_has_begun(tmp_path: Path, read: str) -> None:
    seen = []
    for states in ("host", None):
        module = Failing(READS[read])
        with pytest.raises(ValueError, match="the second backward failed"):
            fit(tmp_path, module, states, strategy={"overlap": "none"}, callbacks=[ReadsAfterErrors()])
        seen.append(module.seen)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)
