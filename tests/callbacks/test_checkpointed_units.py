"""Trainings under plans with checkpointed units have plain Lightning's numbers, and memory of the plan."""

import copy
import gc
import io
import pickle
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.t5.modeling_t5 import T5LayerFF

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.planning import HardwareProfile, ModelProfile, Plan, offload_inputs, simulate
from tests.support.compare import assert_same
from tests.support.garbage import collect
from tests.support.plans import BOTH, MACHINE, draw, pinned, planner
from tests.support.trainings import make_trainer, nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(240)

STEPS = 9


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def t5() -> Any:
    """Its blocks share masks, a position bias and the encoder's result, and fill a cache."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


class Trained(pl.LightningModule):
    """A model with dropout that predicts its own input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = make().train()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(module: Trained, strategy: Any, *callbacks: pl.Callback, path: Path, **settings: Any) -> Trained:
    tokens = torch.randint(64, (4 * 12, 12), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(tokens, batch_size=4)
    trainer = make_trainer(
        path,
        strategy,
        **{"max_epochs": None, "max_steps": STEPS, "callbacks": list(callbacks), "num_sanity_val_steps": 0} | settings,
    )
    torch.manual_seed(3)
    trainer.fit(module, loader, DataLoader(tokens[:4], batch_size=2))
    return module


class Calls:
    """A number of calls."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts the forwards inside of blocks of GPT-2 and T5 that run in a backward."""
    calls = Calls()
    for layer in (GPT2MLP, T5LayerFF):
        forward = layer.forward

        def counted(self: nn.Module, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            calls.count += torch._C._current_graph_task_id() != -1
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(layer, "forward", counted)
    return calls


def plan_and_profile(make: Any, path: Path, how: dict[str, Any] = BOTH, **settings: Any) -> tuple[Plan, ModelProfile]:
    """Returns a plan that a training has made, and its profile; `how`: arguments of the strategy."""
    first = planner()
    train(Trained(make), SSDOffloadStrategy(**how), first, path=path, **settings)
    assert first.cycle.plan is not None
    return first.cycle.plan, first.cycle.runner.profile


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("make", "states", "settings"),
    [
        (gpt2, "gpu", {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
        (t5, "gpu", {"val_check_interval": 4, "gradient_clip_val": 1.0}),
        (t5, "host", {"precision": "bf16-mixed"}),
    ],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path, reruns: Calls, make: Any, states: str, settings: dict[str, Any]
) -> None:
    expected = train(Trained(make), "auto", path=tmp_path, **settings)
    how = BOTH if states == "gpu" else BOTH | {"states": states, "gpu_memory": "1B"}
    plan, profile = plan_and_profile(make, tmp_path, how, **settings)
    for seed, share in ((0, 1.0), (1, 0.5)):
        reruns.count = 0
        chosen = draw(plan, profile, seed, checkpoint=share)
        assert any(unit.checkpoint for unit in chosen.units.values())
        strategy = SSDOffloadStrategy(**how)
        actual = train(Trained(make), strategy, pinned(chosen), path=tmp_path, **settings)
        assert_same(actual, expected)
        assert reruns.count


def all_checkpointed(plan: Plan, profile: ModelProfile) -> Plan:
    """Returns the plan that checkpoints all units that may be, and keeps all saved tensors of the others."""
    chosen = draw(plan, profile, 0, checkpoint=1.0)
    units = {
        name: replace(unit, input="keep", operators=dict.fromkeys(unit.operators, "keep"))
        for name, unit in chosen.units.items()
    }
    return replace(chosen, units=units)


@pytest.mark.parametrize("make", [gpt2, t5])
def test_inputs_alone_are_offloaded(tmp_path: Path, make: Any) -> None:
    """The first block of T5 also returns the position bias, which all blocks are given: the plan keeps it."""
    stored: list[int] = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            offloader = find_offloader(trainer)
            assert offloader is not None
            stored.append(offloader.stats().stored)

    plan, profile = plan_and_profile(make, tmp_path)
    chosen = replace(offload_inputs(all_checkpointed(plan, profile)), window_bytes=0)
    train(Trained(make), SSDOffloadStrategy(**BOTH), pinned(chosen), Count(), path=tmp_path)
    offloading = [unit for unit in profile.units if chosen.units[unit.name].input == "host"]
    planned = sum(unit.input_bytes + unit.argument_bytes for unit in offloading)
    assert stored[-1] - stored[-2] == planned > 0


def test_a_training_whose_units_were_changed_is_profiled_again(tmp_path: Path, reruns: Calls) -> None:
    """Until then, changed units are not checkpointed."""
    settings = {"max_steps": 16}

    class Changing(Trained):
        def __init__(self, make: Any) -> None:
            super().__init__(make)
            self.reruns: list[int] = []
            """Forwards of blocks that ran again before each step."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.reruns.append(reruns.count)
            if self.trainer.global_step == 5:
                for block in self.model.transformer.h:
                    block.mlp.dropout.p = 0.25
            return super().training_step(batch, batch_idx)

    plan, profile = plan_and_profile(gpt2, tmp_path)
    expected = train(Changing(gpt2), "auto", path=tmp_path, **settings)
    chosen = pinned(all_checkpointed(plan, profile))
    reruns.count = 0
    actual = train(Changing(gpt2), SSDOffloadStrategy(**BOTH), chosen, path=tmp_path, **settings)
    assert_same(actual, expected)
    assert actual.reruns[4:6] == [0, 3] and actual.reruns[9] == 3 and actual.reruns[-1] > 3


def test_a_training_that_changes_its_units_in_each_step_says_that_they_are_not_checkpointed(
    tmp_path: Path, reruns: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """It is profiled again only a few times."""

    class Changing(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for block in self.model.transformer.h:
                block.mlp.dropout.p = 0.5 / (1 + self.trainer.global_step)
            return super().training_step(batch, batch_idx)

    plan, profile = plan_and_profile(gpt2, tmp_path)
    expected = train(Changing(gpt2), "auto", path=tmp_path, max_steps=40)
    chosen = pinned(all_checkpointed(plan, profile))
    reruns.count = 0
    caplog.set_level("INFO")
    actual = train(Changing(gpt2), SSDOffloadStrategy(**BOTH), chosen, path=tmp_path, max_steps=40)
    assert_same(actual, expected)
    assert not reruns.count and caplog.text.count("the training is profiled again") == 3
    assert caplog.text.count("Units that are changed again are not checkpointed") == 1


def test_a_given_plan_that_no_longer_matches_changed_units_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training has begun, and the same numbers are computed under another plan."""
    settings = {"max_steps": 16}

    class Changing(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 5:
                for block in self.model.transformer.h:
                    block.mlp.act = nn.ReLU()
            return super().training_step(batch, batch_idx)

    plan, profile = plan_and_profile(gpt2, tmp_path)
    expected = train(Changing(gpt2), "auto", path=tmp_path, **settings)
    chosen = pinned(all_checkpointed(plan, profile))
    actual = train(Changing(gpt2), SSDOffloadStrategy(**BOTH), chosen, path=tmp_path, **settings)
    assert_same(actual, expected)
    assert "does not match the units as they were changed" in caplog.text
    assert chosen.cycle.plan is not None and chosen.cycle.plan.units.keys() == plan.units.keys()


def test_units_that_were_changed_before_a_plan_that_keeps_all_do_not_matter(tmp_path: Path) -> None:
    """For one step, the last one under a plan that checkpoints them: the training is not profiled again."""

    class Changing(Trained):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for block in self.model.transformer.h:
                block.mlp.dropout.p = 0.25 if self.trainer.global_step == 5 else 0.1
            return super().training_step(batch, batch_idx)

    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                chosen.cycle.runner.apply(keeping)
            phases.append(chosen.cycle.phase)

    plan, profile = plan_and_profile(gpt2, tmp_path)
    checkpointing = all_checkpointed(plan, profile)
    kept = {name: replace(unit, checkpoint=False) for name, unit in checkpointing.units.items()}
    chosen, keeping = pinned(checkpointing), replace(checkpointing, units=kept)
    phases: list[str] = []
    train(Changing(gpt2), SSDOffloadStrategy(**BOTH), chosen, Keeps(), path=tmp_path, max_steps=14)
    assert set(phases[4:]) == {"idle"}


class Copying(pl.Callback):
    """Copies the module and writes it to memory, while a plan is in force."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEPS - 1:
            saved = io.BytesIO()
            torch.save(pl_module.model, saved)
            saved.seek(0)
            self.copies = [
                copy.deepcopy(pl_module.model),
                pickle.loads(pickle.dumps(pl_module.model)),
                torch.load(saved, weights_only=False),
            ]


def attributes(model: nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()]


def test_copies_of_a_model_in_training_are_plain(tmp_path: Path, reruns: Calls) -> None:
    """They run their forward once, and after the training the model does, too."""
    plan, profile = plan_and_profile(gpt2, tmp_path)
    copying = Copying()
    module = train(
        Trained(gpt2), SSDOffloadStrategy(**BOTH), pinned(all_checkpointed(plan, profile)), copying, path=tmp_path
    )
    assert reruns.count and len(copying.copies) == 3
    tokens = torch.ones(1, 8, dtype=torch.long)
    for model in (*copying.copies, module.model):
        assert attributes(model) == attributes(gpt2())
        reruns.count = 0
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert not reruns.count


def test_a_forward_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    plan, profile = plan_and_profile(gpt2, tmp_path)
    module = Trained(gpt2)
    dropout = module.model.transformer.h[1].mlp.dropout
    forward, runs = dropout.forward, []

    def failing(self: nn.Module, value: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > 12:
            raise ValueError("an error of the user")
        result: Tensor = forward(value)
        return result

    dropout.forward = types.MethodType(failing, dropout)  # a wrapper that is no method would run once only
    with pytest.raises(ValueError, match="an error of the user"):
        train(module, SSDOffloadStrategy(**BOTH), pinned(all_checkpointed(plan, profile)), path=tmp_path)
    del dropout.forward
    assert attributes(module.model) == attributes(gpt2())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [gpt2, t5])
def test_no_argument_of_a_checkpointed_unit_outlives_its_backward(tmp_path: Path, make: Any) -> None:
    """Later steps would find less memory than those that the plan was made for."""
    alive: dict[bool, list[int]] = {}

    class Count(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            # Nested tensors, which another test may have left, have no shape.
            tensors = [one for one in gc.get_objects() if type(one) is Tensor and not one.is_nested]
            alive.setdefault(self.checkpoints, []).append(sum(one.shape == (4, 12, 32) for one in tensors))

        def __init__(self, checkpoints: bool) -> None:
            self.checkpoints = checkpoints

    plan, profile = plan_and_profile(make, tmp_path)
    collect()
    gc.disable()
    try:
        for share in (0.0, 1.0):
            drawn = draw(plan, profile, 1, recompute=0.0, checkpoint=share)
            assert share == any(unit.checkpoint for unit in drawn.units.values())
            callbacks = [pinned(drawn), Count(bool(share))]
            train(Trained(make), SSDOffloadStrategy(**BOTH), *callbacks, path=tmp_path, limit_val_batches=0)
    finally:
        gc.enable()
    assert alive[True][-3:] == alive[False][-3:]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 2), ("32-true", 0)])
def test_casts_of_weights_are_freed_with_the_saved_tensors(tmp_path: Path, precision: str, itemsize: int) -> None:
    """Autograd saves autocast's casts of weights, which Lightning's autocast does not cache."""
    plan, profile = plan_and_profile(gpt2, tmp_path, precision=precision)
    matrices = 32 * 96 + 32 * 32 + 2 * 32 * 128
    layers = [unit for unit in profile.units if ".h." in unit.name]
    assert [unit.cast_bytes for unit in layers] == [itemsize * matrices] * 3
    machine = HardwareProfile.from_json(MACHINE)
    kept = {name: replace(unit, operators=dict.fromkeys(unit.operators, "keep")) for name, unit in plan.units.items()}
    first = replace(kept[layers[0].name], input="keep", checkpoint=True)
    checkpointed = replace(plan, units=kept | {layers[0].name: first})
    without = replace(profile, units=tuple(replace(unit, cast_bytes=0) for unit in profile.units))
    peaks = [simulate(one, machine, checkpointed).gpu_peak_bytes for one in (without, profile)]
    assert peaks[0] - peaks[1] == itemsize * matrices
