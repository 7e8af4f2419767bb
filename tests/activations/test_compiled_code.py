"""Compiled code: CUDA graphs are refused where weights are offloaded, and calls are noticed."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import GuardHook, check_no_cuda_graphs, count_cuda_graphs, runs_cuda_graphs
from lightning_ssd.run import states as run_states
from tests.support.trainings import SmallModel, batches, make_trainer

GPU = torch.device("cuda")


def compile_part(model: Any, **how: Any) -> None:
    model.net[2].compile(**how)


def wrap_part(model: Any, **how: Any) -> None:
    model.net[2] = torch.compile(model.net[2], **how)


def compile_method(model: Any, **how: Any) -> None:
    model.net[2].forward = torch.compile(model.net[2].forward, **how)


COMPILERS = pytest.mark.parametrize("compiles", [compile_part, wrap_part, compile_method])


@COMPILERS
def test_a_module_with_cuda_graphs_is_named(compiles: Callable[..., None]) -> None:
    model = SmallModel()
    compiles(model, mode="reduce-overhead")
    check_no_cuda_graphs(model, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^net\.2 is compiled with CUDA graphs"):
        check_no_cuda_graphs(model, GPU)


@COMPILERS
@pytest.mark.parametrize("how", [{}, {"backend": "aot_eager"}, {"mode": "max-autotune-no-cudagraphs"}])
def test_other_compiled_modules_are_accepted(compiles: Callable[..., None], how: dict[str, str]) -> None:
    model = SmallModel()
    compiles(model, **how)
    check_no_cuda_graphs(model, GPU)


@pytest.mark.parametrize("states", ["host", "gpu"])
def test_only_trainings_with_offloaded_weights_are_refused(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_states, "check_no_cuda_graphs", lambda model, device: check_no_cuda_graphs(model, GPU))
    model = SmallModel()
    model.net[2].compile(backend="eager")
    vars(model.net[2]._compiled_call_impl)["get_compiler_config"] = lambda: {"triton.cudagraphs": True}
    trainer: pl.Trainer = make_trainer(tmp_path, SSDOffloadStrategy(tmp_path, states=states, min_bytes=1))
    if states == "gpu":
        trainer.fit(model, batches(2))
    else:
        with pytest.raises(ValueError, match="set `states='gpu'`"):
            trainer.fit(model, batches(2))


def test_a_wrapped_module_is_named() -> None:
    wrapped = torch.compile(nn.Linear(2, 2), mode="reduce-overhead")
    with pytest.raises(ValueError, match="CUDA graphs"):
        check_no_cuda_graphs(wrapped, GPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "functions", "awaits_backward", "runs"),
    [
        (None, None, False, False),  # torch has recorded no graph
        (None, 2, True, True),
        (None, 2, False, True),  # the forwards of reentrant checkpoints await no backward
        (2, 2, False, False),  # only another training has graphs
        (2, 2, True, True),  # the model is that of the other training
    ],
)
def test_a_training_runs_cuda_graphs_if_they_are_new_or_await_its_backward(
    before: int | None,
    functions: int | None,
    awaits_backward: bool,
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def see(count: int | None, pending: bool) -> None:
        manager = SimpleNamespace(ids_to_funcs=range(count or 0), running_forwards_with_pending_backwards=pending)
        trees = SimpleNamespace(get_manager=lambda device, create_if_none_exists: None if count is None else manager)
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)

    device = torch.device("cuda", 0)
    see(before, False)
    count = count_cuda_graphs(device)
    see(functions, awaits_backward)
    assert runs_cuda_graphs(device, count) == runs
    assert not runs_cuda_graphs(torch.device("cpu"), 0)


def test_guards_are_noticed_until_each_hook_is_closed_in_any_order() -> None:
    """Hooks of several objects are open at once, and other code may have replaced Dynamo's only hook since."""
    set_hook = torch._C._dynamo.eval_frame.set_guard_complete_hook
    compiled = torch.compile(lambda tensor: tensor + 1, backend="eager")
    compiled(torch.ones(2))
    noticed: list[str] = []
    before = set_hook(None)
    set_hook(before)
    first, second = (GuardHook(partial(noticed.append, name)) for name in ("first", "second"))
    compiled(torch.ones(2))
    first.close()
    compiled(torch.ones(2))
    assert noticed == ["first", "second", "second"]
    second.close()
    second.close()
    compiled(torch.ones(2))
    assert len(noticed) == 3 and set_hook(before) is before

    third = GuardHook(partial(noticed.append, "third"))

    def foreign(found: bool) -> bool:
        return found

    set_hook(foreign)
    third.close()
    assert set_hook(before) is foreign
