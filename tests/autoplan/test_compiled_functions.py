"""Compiled functions that the model does not show, whose single operations no plan can follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_ssd import ModelProfiler, SSDOffloadStrategy
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH, planner, quiet_trainer

STEPS = 16
COMPILES_UNDER_MODES = hasattr(TorchDispatchMode, "ignore_compile_internals")
NEEDS_COMPILATION_UNDER_MODES = pytest.mark.skipif(not COMPILES_UNDER_MODES, reason="Dynamo skips code under modes")


class Augmented(pl.LightningModule):
    """Calls a compiled function of tensors from some step on, without gradients."""

    def __init__(self, begin: int, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)))
        self.begin = begin
        self.num_compiled_calls = 0
        self.losses: list[Tensor] = []
        noisy = torch.compile(lambda x: x.sin() * 1.1, backend=self._count, **how)
        self.functions = [noisy]  # not an attribute, by which it would be found

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.num_compiled_calls += 1
            return graph.forward(*args)

        return run

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step >= self.begin:
            with torch.no_grad():
                batch = self.functions[0](batch)
        loss: Tensor = self.net(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Augmented, path: Path, strategy: Any, **how: Any) -> list[Tensor]:
    """Returns the losses of a training, and the weights after it."""
    data: Any = torch.randn(16 * STEPS, 32, generator=torch.Generator().manual_seed(1))
    module.losses.clear()
    quiet_trainer(path, strategy=strategy, max_steps=STEPS, **how).fit(module, DataLoader(data, batch_size=16))
    return [*module.losses, *(parameter.detach().clone() for parameter in module.parameters())]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_second_training_under_the_default_compiles_what_the_first_one_has_compiled(
    fullgraph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, other = Augmented(0, fullgraph=fullgraph), Augmented(0, fullgraph=fullgraph)
    use(Meter(1e6, 980_000), monkeypatch)
    for num_trainings in (1, 2):
        plain = fit(other, tmp_path, "auto")
        assert_same(fit(module, tmp_path, SSDOffloadStrategy(**BOTH)), plain)
        assert module.num_compiled_calls == other.num_compiled_calls == num_trainings * STEPS


@pytest.mark.parametrize("begin", [3, *(pytest.param(step, marks=pytest.mark.thorough) for step in (5, 8))])
def test_code_that_is_compiled_late_runs_compiled(
    begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends plans of operators, while units are recorded or intercepted: the third step is.

    Older torch, in which Dynamo compiles nothing under a dispatch mode, runs it uncompiled in one step.
    """
    plain = fit(Augmented(begin), tmp_path, "auto")
    torch._dynamo.reset()
    use(Meter(1e6, 980_000), monkeypatch)
    module = Augmented(begin)
    with caplog.at_level("INFO"):
        assert_same(fit(module, tmp_path, SSDOffloadStrategy(**BOTH)), plain)
    ended = "no block of the model was called" in caplog.text
    assert ended or begin != 3
    assert module.num_compiled_calls == STEPS - begin - (ended and not COMPILES_UNDER_MODES)


@NEEDS_COMPILATION_UNDER_MODES
@pytest.mark.parametrize("case", ["fullgraph", "compiled before", "cond"])
def test_late_code_that_must_be_compiled(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps plain Lightning's numbers, and ends plans of operators also if an earlier training has compiled it."""

    class Chooses(Augmented):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step >= 4:
                loss = torch.cond(loss > 0.05, lambda loss: loss.sin(), lambda loss: loss.cos(), (loss,))
            return loss

    module, other = (
        Chooses(STEPS) if case == "cond" else Augmented(4, fullgraph=case == "fullgraph") for _ in range(2)
    )
    plain = fit(other, tmp_path, "auto")
    if case == "compiled before":
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        fit(module, tmp_path, "auto")
        module.load_state_dict(weights)
    use(Meter(1e6, 980_000), monkeypatch)
    with caplog.at_level("INFO"):
        assert_same(fit(module, tmp_path, SSDOffloadStrategy(**BOTH)), plain)
    assert "no block of the model was called" in caplog.text


@pytest.mark.parametrize("profiles", ["SwapPlanner", "ModelProfiler"])
@pytest.mark.parametrize("begin", [0, 2])
def test_callbacks_that_follow_operators_refuse_code_that_was_compiled_before(
    profiles: str, begin: int, tmp_path: Path
) -> None:
    """Later trainings without the callback run it compiled."""
    module = Augmented(0)
    fit(module, tmp_path, "auto")
    module.begin, before = begin, module.num_compiled_calls
    callback = planner() if profiles == "SwapPlanner" else ModelProfiler(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=f"single operations {profiles} can't follow. Remove `torch.compile`"):
        fit(module, tmp_path, SSDOffloadStrategy(**BOTH), callbacks=[callback])
    module.begin, before = 0, module.num_compiled_calls
    fit(module, tmp_path, "auto")
    assert module.num_compiled_calls == before + STEPS
