"""Unit calls that keep all saved tensors run as in plain training: without dispatch mode and saved-tensor hooks."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_ssd.activations import SavedWeight, mark_offloaded
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


def directed_blocks(
    offloader: Any, model: Blocks, run: Callable[[], Tensor] | None = None, *, save_weights: bool = False
) -> tuple[Directed, dict[int, Choice]]:
    directed = Directed(offloader, list(model.blocks), save_weights=save_weights)
    with directed.record():
        loss = (run or (lambda: model(VALUE)))()
    model.gradients(loss)
    saved = directed.end_record()
    return directed, choices_of(directed, saved)


def gradients_under(
    directed: Directed, choices: dict[int, Choice], model: Blocks, run: Callable[[], Tensor]
) -> list[Tensor]:
    """Returns the gradients of a forward under the plan."""
    with directed.direct(choices):
        loss = run()
    gradients = model.gradients(loss)
    directed.end_direct()
    return gradients


def assert_same_under_plan(
    tmp_path: Path, model: Blocks, intercepted: Sequence[bool], run: Callable[[], Tensor] | None = None
) -> None:
    """Asserts that a forward under the plan has plain autograd's gradients, and which blocks are intercepted."""
    run = run or (lambda: model(VALUE))
    expected = model.gradients(run())
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, run)
        assert_same(gradients_under(directed, choices, model, run), expected)
    assert [block.intercepted for block in model.blocks] == intercepted


def test_only_units_that_free_memory_are_intercepted(tmp_path: Path) -> None:
    model = Blocks()
    expected = model.gradients(model(VALUE))
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        for _ in range(2):
            assert_same(gradients_under(directed, choices, model, lambda: model(VALUE)), expected)
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
        assert_same(gradients_under(directed, choices, model, lambda: model(VALUE)), expected)


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
        assert_same(gradients_under(directed, choices, model, run), expected)
    assert [block.intercepted for block in model.blocks] == [True, True, True]
    assert packed == seen
    assert (counting.count > 0) == (kind == "mode")


def test_a_unit_that_changes_a_tensor_in_place_is_intercepted(tmp_path: Path) -> None:
    """Values of other units may be recomputed from that tensor."""
    model = Blocks()
    model.middle.inside = lambda value: (value * 1).mul_(2)
    assert_same_under_plan(tmp_path, model, [True, True, True])


class Abort(BaseException):
    """An error that is no `Exception`, for which torch calls no hook."""


@pytest.mark.parametrize("error", [ValueError, Abort])
def test_a_unit_after_a_failed_plain_call_is_intercepted(tmp_path: Path, error: type[BaseException]) -> None:
    """The model catches the error, and computes something else."""
    model = Blocks()
    middle = model.middle

    def run() -> Tensor:
        value = model.blocks[0](VALUE)
        try:
            value = middle(value)
        except (ValueError, Abort):
            value = middle.layers[1](middle.layers[0](value))
        loss: Tensor = model.blocks[2](value).square().sum()
        return loss

    def fail(value: Tensor) -> Tensor:
        raise error

    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, run)
        model.middle.inside = fail
        expected = model.gradients(run())
        assert_same(gradients_under(directed, choices, model, run), expected)
    assert [block.intercepted for block in model.blocks] == [True, False, True]


def test_a_unit_that_a_plain_call_calls_is_intercepted(tmp_path: Path) -> None:
    model = Blocks()
    model.middle.inside = lambda value: model.blocks[2](value)  # which does not register the block as a module

    def run() -> Tensor:
        loss: Tensor = model.middle(model.blocks[0](VALUE)).square().sum()
        return loss

    assert_same_under_plan(tmp_path, model, [True, False, True], run)


@pytest.mark.parametrize("kind", ["hooks", "mode"])
def test_a_unit_that_a_plain_call_calls_inside_of_the_users_hooks_is_a_part_of_it(tmp_path: Path, kind: str) -> None:
    """They are left in the order in which they were entered, and see what they see in plain training."""
    model = Blocks()
    seen: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(f"{list(tensor.shape)}")
        return tensor

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def inside(value: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor) if kind == "hooks" else Noting():
            result: Tensor = model.blocks[2](value)
        return result

    model.middle.inside = inside

    def run() -> Tensor:
        loss: Tensor = model.middle(model.blocks[0](VALUE)).square().sum()
        return loss

    expected = model.gradients(run())
    plain = list(seen)
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, run)
        seen.clear()
        assert_same(gradients_under(directed, choices, model, run), expected)
    assert seen == plain
    assert [block.intercepted for block in model.blocks] == [True, False, kind == "mode"]
    assert _get_current_dispatch_mode() is None
    saved = offloader.stats().saved
    model.gradients(run())
    assert offloader.stats().saved == saved  # no hook is left


def test_units_on_other_threads_do_not_end_a_plain_call(tmp_path: Path) -> None:
    model = Blocks()
    begun, may_end = threading.Event(), threading.Event()
    made: list[Tensor] = []

    def wait(value: Tensor) -> Tensor:
        begun.set()
        assert may_end.wait(10)
        return value

    def run() -> Tensor:
        value = model.blocks[0](VALUE)
        thread = threading.Thread(target=lambda: made.append(model.blocks[2](value)))

        def start_thread(value: Tensor) -> Tensor:
            thread.start()
            assert begun.wait(10)
            return value

        model.blocks[2].inside, model.middle.inside = wait, start_thread
        result = model.middle(value)
        may_end.set()
        thread.join()
        loss: Tensor = (result * made.pop()).square().sum()
        begun.clear()
        may_end.clear()
        return loss

    expected = model.gradients(run())
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, run)
        with directed.direct(choices):
            loss = run()
            assert _get_current_dispatch_mode() is directed.plan_mode
        assert_same(model.gradients(loss), expected)
        directed.end_direct()


class Scaled(Block):
    """A block without matrix products, which `torch.vmap` computes without changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, value: Tensor) -> Tensor:
        self.intercepted = _get_current_dispatch_mode() is not None
        return value + torch.tanh(value * self.scale)


def test_a_plain_call_inside_of_vmap(tmp_path: Path) -> None:
    model = Blocks()
    model.middle = model.blocks[1] = Scaled()

    def run() -> Tensor:
        loss: Tensor = model.blocks[2](torch.vmap(model.middle)(model.blocks[0](VALUE))).square().sum()
        return loss

    assert_same_under_plan(tmp_path, model, [True, False, True], run)


def test_an_error_of_a_tier_before_a_plain_call_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the first block has saved is stored when the plain call begins."""
    model = Blocks()
    held: list[Tensor] = []
    fails = False

    def hold(value: Tensor) -> Tensor:
        held.append(value)
        return value

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise OSError("drive failed")

    def release(*arguments: object) -> None:
        held.clear()
        if fails:
            monkeypatch.setattr(offloader.tiers["host"], "store", fail)

    model.blocks[0].inside = hold
    model.blocks[0].register_forward_hook(release)
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model)
        choices |= {number: "host" for number, choice in choices.items() if choice == "recompute"}
        fails = True
        with pytest.raises(OSError, match="drive failed"), directed.direct(choices):
            model(VALUE)
        assert _get_current_dispatch_mode() is None
        directed.end_direct()


class Reference(SavedWeight):
    """A reference to a weight that notes its loads."""

    def __init__(self, tensor: Tensor, loads: list[int]) -> None:
        self._tensor, self._loads = tensor.detach(), loads

    def load(self) -> Tensor:
        self._loads.append(self._tensor.numel())
        return self._tensor


class Evictable:
    """Marks the weights of a module as offloaded. They stay in memory, and notes say which are saved and loaded."""

    def __init__(self, module: nn.Module) -> None:
        self.saved: list[int] = []
        self.loaded: list[int] = []
        for parameter in module.parameters():
            mark_offloaded(parameter.untyped_storage(), self)

    def save(self, tensor: Tensor) -> SavedWeight:
        self.saved.append(tensor.numel())
        return Reference(tensor, self.loaded)


@pytest.mark.parametrize("kind", ["plain", "function mode", "dispatch mode"])
def test_a_plain_call_saves_references_to_offloaded_weights(tmp_path: Path, kind: str) -> None:
    """The hook that does so hides its operators from modes of the user, as the others do."""
    model = Blocks()
    counting = Counting()

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counting.count += 1
            return func(*args, **(kwargs or {}))

    def inside(value: Tensor) -> Tensor:
        with {"plain": nullcontext(), "function mode": Functions(), "dispatch mode": counting}[kind]:
            result: Tensor = model.middle.layers[0](value).sin()
        return result

    model.middle.inside = inside
    expected = model.gradients(model(VALUE))
    weights = Evictable(model.middle)
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, save_weights=True)
        weights.saved.clear()
        weights.loaded.clear()
        before, counting.count = offloader.stats(), 0
        with directed.direct(choices):
            loss = model(VALUE)
        assert weights.saved == 3 * [64] and not weights.loaded
        assert counting.count == {"plain": 0, "function mode": 2, "dispatch mode": 3}[kind]
        assert_same(model.gradients(loss), expected)
        assert weights.loaded == 3 * [64]
        directed.end_direct()
    assert [block.intercepted for block in model.blocks] == [True, False, True]
    assert offloader.stats().saved > before.saved


def test_a_plain_call_that_saves_references_checks_versions(tmp_path: Path) -> None:
    """Torch checks no version of a tensor that a hook packs."""
    model = Blocks()
    made: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        made.append(value.sin())
        return made[-1].cos()

    model.middle.inside = note
    with open_offloader(tmp_path, tier="host") as offloader:
        directed, choices = directed_blocks(offloader, model, save_weights=True)
        with directed.direct(choices):
            loss = model(VALUE)
        assert model.middle.intercepted is False
        with torch.no_grad():
            made[-1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model.gradients(loss)
        directed.end_direct()
