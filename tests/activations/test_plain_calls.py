"""Unit calls that keep all saved tensors run as in plain training: without dispatch mode and saved-tensor hooks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_ssd.types import Choice
from tests.support.compare import assert_same
from tests.support.offloader import Directed, open_offloader


class Block(nn.Module):
    """Two layers, between which `inside` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.intercepted: bool | None = None
        self.inside: Any = lambda value: value

    def forward(self, value: Tensor) -> Tensor:
        self.intercepted = _get_current_dispatch_mode() is not None
        hidden = self.inside(torch.tanh(self.layers[0](value)))
        return value + torch.sigmoid(self.layers[1](hidden))


class Blocks(nn.Module):
    """Three blocks of which the first and the last free their saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.middle = self.blocks[1]

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value.square().sum()

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.parameters())))


VALUE = torch.linspace(-1, 1, 32).reshape(4, 8)


def choices_of(directed: Directed, saved: list[Any]) -> dict[int, Choice]:
    """Returns a plan that recomputes, or offloads, what the first and the last block save, and keeps the rest."""
    calls = directed.graph.unit_calls()
    return {
        item.buffer: "keep"
        if item.unit_call == calls[1] or item.is_unit_input
        else ("recompute" if item.recomputable else "host")
        for item in saved
    }


def directed_blocks(offloader: Any, model: Blocks) -> tuple[Directed, dict[int, Choice]]:
    directed = Directed(offloader, list(model.blocks))
    with directed.record():
        loss = model(VALUE)
    model.gradients(loss)
    saved = directed.end_record()
    return directed, choices_of(directed, saved)


def test_only_units_that_free_memory_are_intercepted(tmp_path: Path) -> None:
    model = Blocks()
    expected = model.gradients(model(VALUE))
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        for _ in range(2):
            with directed.direct(choices):
                loss = model(VALUE)
            assert_same(model.gradients(loss), expected)
            directed.end_direct()
            assert [block.intercepted for block in model.blocks] == [True, False, True]
        assert offloader.stats().recomputed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_plain_call_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    model = Blocks()
    expected = model.gradients(model(VALUE))

    def fail(value: Tensor) -> Tensor:
        raise error

    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        model.middle.inside = fail
        with pytest.raises(error), directed.direct(choices):
            model(VALUE)
        assert _get_current_dispatch_mode() is None
        before = offloader.stats()
        model.middle.inside = lambda value: value
        assert_same(model.gradients(model(VALUE)), expected)
        assert offloader.stats().saved == before.saved  # no hook is left
        directed.end_direct()
        with directed.direct(choices):
            loss = model(VALUE)
        assert_same(model.gradients(loss), expected)
        directed.end_direct()


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["hooks", "mode"])
def test_hooks_and_modes_of_the_user_see_all_units(tmp_path: Path, kind: str) -> None:
    """Those that are entered inside of ours can't stay while ours are removed: all units are intercepted."""
    model = Blocks()
    packed: list[int] = []
    counting = Counting()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    def run() -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor) if kind == "hooks" else counting:
            loss: Tensor = model(VALUE)
        return loss

    expected = model.gradients(run())
    seen = list(packed)
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        packed.clear()
        counting.count = 0
        with directed.direct(choices):
            loss = run()
        assert_same(model.gradients(loss), expected)
        directed.end_direct()
    assert [block.intercepted for block in model.blocks] == [True, True, True]
    assert packed == seen
    assert (counting.count > 0) == (kind == "mode")


def test_a_unit_that_changes_a_tensor_in_place_is_intercepted(tmp_path: Path) -> None:
    """Values of other units may be recomputed from that tensor."""
    model = Blocks()
    model.middle.inside = lambda value: (value * 1).mul_(2)
    expected = model.gradients(model(VALUE))
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        with directed.direct(choices):
            loss = model(VALUE)
        assert_same(model.gradients(loss), expected)
        directed.end_direct()
    assert [block.intercepted for block in model.blocks] == [True, True, True]
