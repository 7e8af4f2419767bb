"""Whole trainings with weights, gradients and optimizer states in host memory, against plain Lightning."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import ModelProfiler, SSDOffloadStrategy
from lightning_ssd.activations import OffloadConfig
from lightning_ssd.activations.weights import storage_of
from lightning_ssd.model_states import MetaTensors, Setup, StatesConfig, UnitTiers, find_units, make_model_states
from tests.support.access import Toy, compare
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.products import combinations, thorough
from tests.support.states import host, train


@combinations(
    "accumulate, clip, overlap, gpu_memory",
    [1, 3],
    [None, 0.5],
    ["optimized", "none"],
    ["1B", "auto"],
    quick=[(1, None, "optimized", "1B"), (3, 0.5, "none", "auto")],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path, accumulate: int, clip: float | None, overlap: Any, gpu_memory: str
) -> None:
    """Bit for bit in 32-true: losses, validation, weights; ragged windows, clipping, one unit on the device or all."""
    arguments = dict(accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    model = Model()
    expected = train(tmp_path, "auto", model, **arguments)
    actual = train(tmp_path, host(overlap=overlap, gpu_memory=gpu_memory), model, **arguments)
    assert_same(actual, expected)
    assert expected.losses[-1] < expected.losses[0]  # type: ignore[operator, index]


def test_a_callback_of_ours_that_is_extended_is_still_ours(tmp_path: Path) -> None:
    """Units are stepped during backward: no step waits for the callback."""
    holds: list[bool] = []

    class Extended(ModelProfiler):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.model = pl_module

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            holds.append(self.model.trainer.strategy.model_states.running.defer_to_user_hooks)
            super().on_train_batch_end(trainer, *args)

    train(tmp_path, host(), Model(), callbacks=[Extended(tmp_path / "profile.json")])
    assert holds and not any(holds)


class Uses(nn.Module):
    """Uses a weight otherwise than in one product under autocast; subclasses have one of the methods as `forward`."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.__class__ = type(use, (Uses,), {"forward": getattr(Uses, use)})
        self.linear = nn.Linear(8, 8)
        if use == "tied":
            self.other = nn.Linear(8, 8)
            self.other.weight = self.linear.weight

    def read(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.linear.weight.mean()

    def without_autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())

    def tied(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.linear(x)))

    def hooked(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def called_twice(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))

    def given_away(self, x: Tensor) -> Tensor:
        return self.linear(x) * nn.utils.parameters_to_vector(self.linear.parameters()).norm()


class CompiledUses(Toy):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uses(use) for _ in range(2))
        for block in self.blocks:
            if use == "hooked":
                block.linear.register_forward_hook(lambda linear, inputs, result: result * linear.weight.mean())  # type: ignore[union-attr, arg-type]
            block.compile(backend="aot_eager")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("use", ["read", "without_autocast", "tied", "hooked", "called_twice", "given_away"])
def test_compiled_blocks_that_use_a_weight_in_fp32(tmp_path: Path, use: str) -> None:
    """In mixed precision, compiled code has the whole weights where plain training computes with them."""
    torch._dynamo.reset()
    compare(tmp_path, lambda: CompiledUses(use), "host", precision="bf16-mixed")


class OtherAutocast(Toy):
    """Calls compiled blocks under the training's autocast, and under another one or none."""

    def __init__(self, **autocast: Any) -> None:
        super().__init__()
        self.autocast = autocast
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", **self.autocast):
            other = self(batch).float().square().mean()
        return super().loss(batch) + other


@pytest.mark.parametrize(
    ("autocast", "states"), [({"enabled": False}, "host"), thorough({"dtype": torch.float16}, "ssd")]
)
def test_compiled_blocks_under_another_autocast(tmp_path: Path, autocast: dict[str, Any], states: str) -> None:
    """Compiled code has the whole weights where autocast does not cast them to the dtype on the device."""
    torch._dynamo.reset()
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    compare(tmp_path, lambda: OtherAutocast(**autocast), states, precision="bf16-mixed", **arguments)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("hook", ["on_train_start", "on_before_optimizer_step", "on_train_epoch_end"])
def test_compiled_blocks_in_hooks(tmp_path: Path, hook: str) -> None:
    """Lightning calls hooks under no autocast."""

    def sample(module: Any) -> Any:
        with torch.no_grad():
            return module(torch.linspace(-1, 1, 16, device=module.device).view(2, 8))

    def make() -> Toy:
        module = Toy(hook, sample)
        for block in module.blocks:
            block.compile(backend="aot_eager")
        return module

    torch._dynamo.reset()
    compare(tmp_path, make, "host", precision="bf16-mixed")


def test_weights_are_on_the_device_around_their_use_only(tmp_path: Path) -> None:
    """The device never has more weights than the budget, or one unit; shapes can always be read."""
    most: list[int] = []

    class Watching(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
                x.register_hook(self.look) if x.requires_grad else None
                self.look()
            return x @ self.embed.weight.t()

        def look(self, *_: Any) -> None:
            storages = {storage_of(parameter)._cdata: storage_of(parameter) for parameter in self.parameters()}
            most.append(sum(storage.nbytes() for storage in storages.values()))
            assert self.blocks[0].up.weight.shape == (64, 16)  # type: ignore[union-attr]

    one, embedding = 4 * 2240, 4 * 512
    train(tmp_path, host(gpu_memory="1B"), Watching())
    assert 0 < max(most) <= one + embedding
    most.clear()
    train(tmp_path, host(gpu_memory=f"{2 * one}B"), Watching())
    assert one + embedding < max(most) <= 2 * one + embedding


class OwnPrecision(pl.plugins.Precision):
    """A user's own plugin, whose hooks may do anything."""


@pytest.mark.parametrize(
    ("arguments", "trainer", "message"),
    [
        ({"units": ["Blok"]}, {}, "`units` names Blok.*Block"),
        ({}, {"plugins": OwnPrecision()}, "trains with .*the Trainer has `OwnPrecision` with '32-true'.*states='gpu'"),
        (
            {"states": "ssd", "recover": True},
            {"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]},
            "StochasticWeightAveraging changes weights.*recover=False",
        ),
    ],
)
def test_refused_arguments_name_a_remedy(tmp_path: Path, arguments: Any, trainer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, SSDOffloadStrategy(**{"states": "host", "min_bytes": 1} | arguments), Model(), **trainer)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_scaled_step_is_skipped_in_all_units_or_in_none(tmp_path: Path, clipped: bool) -> None:
    """The gradient of a resident parameter is infinite, and those of offloaded ones are finite."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = [unit.name for unit in find_units(model)]
    states = make_model_states(
        model,
        [optimizer],
        set(model.parameters()),
        MetaTensors(set(), set()),
        torch.device("cpu"),
        Setup(
            config=StatesConfig("host", "auto", None, "optimized", "fp32", "deferred", False),
            storage=OffloadConfig(tmp_path),
            default_path=tmp_path,
            autocast=torch.float16,
            clip_norm=lambda: clipped,
            clip_value=lambda: None,
            defer_to_user_hooks=False,
        ),
        plan_tiers={name: UnitTiers(("host", "host") if index else ("gpu", "gpu")) for index, name in enumerate(names)},
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states.begin("train")
    states.begin_step(optimizer)
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(2, 4)).float().square().mean()
    scaler.scale(loss).backward()
    states.end_backward()
    states.unscale(optimizer, scaler)
    if clipped:
        states.clip(optimizer, 1.0, "norm")
    scaler.step(optimizer)
    scaler.update()
    states.end_step(optimizer)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert scaler.get_scale() == 2.0
    states.close()


@pytest.mark.parametrize(("precision", "halves"), [("32-true", False), ("bf16-mixed", True), ("bf16-true", True)])
def test_a_format_without_effect_is_named(
    precision: Any, halves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only bf16 weights can be the upper halves of master weights."""
    train(tmp_path, host(state_format="split"), Model(), batches=1, precision=precision, max_epochs=1)
    assert ("`state_format='split'` has no effect" in caplog.text) == (not halves)


def scheduled(factors: dict[int, int]) -> dict[str, Any]:
    return {"callbacks": [pl.callbacks.GradientAccumulationScheduler(factors)]}


TRAININGS: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "several micro-batches": (Model, {"accumulate_grad_batches": 2}),
    "several micro-batches in a later epoch": (Model, scheduled({1: 2})),
    "one micro-batch": (Model, {}),
    "one micro-batch in a later epoch, too": (Model, scheduled({1: 1})),
}


@pytest.mark.parametrize("how", TRAININGS)
def test_allocated_host_memory_is_within_the_budget(how: str, tmp_path: Path) -> None:
    """Gradients of several micro-batches are summed in fp32, from the start or from a later epoch on."""
    allocated: list[tuple[int, int]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            states: Any = trainer.strategy.model_states  # type: ignore[attr-defined]
            allocated.append((states.nbytes.host, states.nbytes.host_limit))

    make_model, arguments = TRAININGS[how]
    callbacks = [Watch(), *arguments.get("callbacks", [])]
    train(tmp_path, host(gpu_memory="1B", offload="none"), make_model(), **arguments | {"callbacks": callbacks})
    most, limit = max(allocated)
    assert most == limit
    with pytest.raises(ValueError, match="`host_memory` of 1.00 KiB is too small") as raised:
        train(tmp_path, host(host_memory="1KiB", gpu_memory="1B", offload="none"), make_model(), **arguments)
    found = re.search(r"takes ([\d.]+) KiB", str(raised.value))
    assert found is not None and float(found[1]) == pytest.approx(limit / 2**10, abs=0.01)
