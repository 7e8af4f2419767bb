"""Reads and writes of offloaded weights by user code, with a GPU and late copies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import build
from lightning_ssd.model_states.access.parameter import OffloadedParameter
from tests.support import trainings
from tests.support.access import ACTIONS, Toy, _graph, _prune, loader
from tests.support.compare import assert_same
from tests.support.delays import SlowCopies

pytestmark = pytest.mark.gpu


def fit(path: Path, module: Any, strategy: Any, precision: Any) -> Any:
    return trainings.fit(path, strategy, module, loader(), accelerator="gpu", precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_user_code_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: Any, precision: str) -> None:
    """Values that user code reads, and weights after its writes, are plain Lightning's; aliases see later values."""

    def act(module: Any) -> Any:
        if not hasattr(module, "aliases"):
            with torch.no_grad():
                module.aliases = [module.blocks[0].up.weight.data, module.blocks[1].down.weight.t()]
        with torch.no_grad():
            module.aliases[0][1] += 1
        refused = [_prune, _graph] if precision == "bf16-mixed" else [_prune]
        actions = [action for action in ACTIONS if action not in refused]
        return [action(module) for action in actions], [alias.detach().clone() for alias in module.aliases]

    def make() -> Toy:
        return Toy("on_train_batch_end", act, lr=2**-5)

    expected = fit(tmp_path, make(), "auto", precision)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, gpu_memory="1B", offload="none")
    assert_same(fit(tmp_path, make(), strategy, precision), expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_tensors_that_are_assigned_share_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: Any, precision: str
) -> None:
    """After `p.data = t`, writes to either, and optimizer steps, change both; swapped weights are independent."""

    def act(module: Any) -> Any:
        weight, one, other = module.blocks[0].up.weight, module.target.up.weight, module.blocks[1].down.weight
        if not hasattr(module, "kept"):
            module.kept = torch.eye(8, device=weight.device)
            weight.data = module.kept
        one.data, other.data = other.data, one.data
        with torch.no_grad():
            module.kept[1] += 0.5
            weight[0] -= 0.25
            other.mul_(0.5)
        return [tensor.detach().clone() for tensor in (module.kept, weight, one, other)]

    def make() -> Toy:
        module = Toy("on_train_batch_end", act, lr=2**-5)
        module.at("on_before_backward", lambda module: module.kept.mul_(0.5).clone() if hasattr(module, "kept") else 0)
        return module

    expected = fit(tmp_path, make(), "auto", precision)
    monkeypatch.setattr(build, "make_copy_engine", SlowCopies)
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, gpu_memory="1B", offload="none")
    assert_same(fit(tmp_path, make(), strategy, precision), expected)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": torch.tensor,
    "new_tensor": lambda p: torch.empty(0, device=p.device).new_tensor(p),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "assigned data": lambda p: _assigned(p) + 1,
}
"""Functions that read memory in C++ and call no hook."""


def _assigned(parameter: torch.Tensor) -> torch.Tensor:
    x = torch.empty_like(parameter, requires_grad=False)
    x.data = parameter.data
    return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    not hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"),
    reason="this torch can't refuse access to a storage",
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_reads_of_evicted_weights_without_a_hook_are_refused(tmp_path: Path, precision: str) -> None:
    """They would end the process, or read memory of other tensors. Training continues after the error."""

    def act(module: Any) -> None:
        offloaded = [parameter for parameter in module.parameters() if isinstance(parameter, OffloadedParameter)]
        evicted = [parameter for parameter in offloaded if not parameter.flat.resident]
        assert bool(evicted) == bool(offloaded)  # none under plain Lightning
        for function in FUNCTIONS.values() if evicted else ():
            with pytest.raises(RuntimeError, match="which is offloaded.*whole_weights"):
                function(evicted[0])

    def make() -> Toy:
        return Toy("on_train_batch_end", act, lr=2**-5)

    strategy = SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B", offload="none")
    assert_same(fit(tmp_path, make(), strategy, precision), fit(tmp_path, make(), "auto", precision))
