"""With offloaded model states, units that keep or checkpoint all saved tensors run without a dispatch mode."""

from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import PlanMode
from lightning_ssd.model_states.access import Access
from lightning_ssd.model_states.access.torch_functions import Kind
from lightning_ssd.planning import ModelProfile, Plan
from tests.support.compare import assert_same
from tests.support.plans import BOTH, KEEP_CHECKPOINT_OFFLOAD, in_turn, pinned, planner
from tests.support.trainings import make_trainer, nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(240)

STEPS = 9


class GPT(pl.LightningModule):
    """A GPT with dropout, whose head is tied to its embedding."""

    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rates: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
        sizes: Any = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 6, "n_head": 2}
        config = GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **rates)
        self.model = GPT2LMHeadModel(config).train()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Layer(GradientCheckpointingLayer):
    """A layer that computes by its own weight and by one that layers share."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.linear(value) @ self.shared)


class Plain(GPT):
    """The same without dropout, which changes tensors in place on a CPU: calls that do are intercepted."""

    dropout = 0.0


class Tied(GPT):
    """Layers that share a weight, of which one is called twice, with hooks of the user on others."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        torch.manual_seed(0)
        shared = nn.Parameter(torch.randn(8, 8))
        self.embedding, self.layers = nn.Embedding(64, 8), nn.ModuleList(Layer(shared) for _ in range(5))
        self.layers[1].register_forward_hook(lambda module, args, output: 1.5 * output)
        self.layers[2].register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
        self.losses = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = self.embedding(batch)
        for layer in (*self.layers, self.layers[0]):
            value = layer(value)
        loss = value.square().mean()
        self.losses.append(loss.detach().clone())
        return loss


def train(path: Path, strategy: Any, *callbacks: pl.Callback, make: Any = GPT, ragged: bool = False, **how: Any) -> GPT:
    generator = torch.Generator().manual_seed(1)
    lengths = cycle((12, 7, 12, 4) if ragged else (12,))
    batches = [torch.randint(64, (4, next(lengths)), generator=generator) for _ in range(2 * STEPS)]
    module: GPT = make()
    torch.manual_seed(2)
    trainer = make_trainer(path, strategy, max_epochs=None, max_steps=STEPS, callbacks=list(callbacks), **how)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


def strategy(states: str) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(**(BOTH | {"states": states, "gpu_memory": "1B"}))


def plan_of(path: Path, states: str, **how: Any) -> tuple[Plan, ModelProfile]:
    """Returns a plan that a training has made, and its profile."""
    first = planner()
    train(path, strategy(states), first, **how)
    assert first.cycle.plan is not None
    return first.cycle.plan, first.cycle.runner.profile


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "states", "how"),
    [
        (GPT, "host", {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (Tied, "ssd", {"gradient_clip_val": 1.0}),
        (GPT, "host", {"ragged": True}),
        (GPT, "ssd", {"precision": "bf16-mixed", "ragged": True}),
        (Tied, "host", {"precision": "bf16-mixed"}),
        (Tied, "host", {"precision": "bf16-true", "accumulate_grad_batches": 2}),
    ],
)
def test_numbers_are_plain_lightnings(tmp_path: Path, make: Any, states: str, how: dict[str, Any]) -> None:
    # Under bf16-true, offloaded weights have master weights, which plain Lightning's have not.
    reference: Any = strategy(states) if how.get("precision") == "bf16-true" else "auto"
    expected = train(tmp_path, reference, make=make, **how)
    plan, profile = plan_of(tmp_path, states, make=make, **how)
    turns = (KEEP_CHECKPOINT_OFFLOAD, ("checkpoint",), ("keep",), ("host", "keep"))
    for kinds in turns:
        chosen = in_turn(plan, profile, kinds)
        actual = train(tmp_path, strategy(states), pinned(chosen), make=make, **how)
        assert_same(actual, expected)


@pytest.fixture
def intercepted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Counts the operations that plans intercept inside of each unit, by index."""
    counts: Counter[int] = Counter()
    operation = PlanMode.operation

    def counted(self: PlanMode, *args: Any) -> Any:
        if self._open and not self.checking:
            counts[self.unit_call.unit] += 1
        return operation(self, *args)

    monkeypatch.setattr(PlanMode, "operation", counted)
    return counts


@pytest.mark.parametrize(("states", "precision"), [("host", "32-true"), ("ssd", "bf16-mixed")])
def test_only_units_that_offload_are_intercepted(
    tmp_path: Path, intercepted: Counter[int], states: str, precision: Any
) -> None:
    """The unit before an offloading one is, too, if it is not checkpointed: it makes the input that is offloaded."""
    plan, profile = plan_of(tmp_path, states, make=Plain, precision=precision)
    names = [unit.name for unit in profile.units]
    chosen = in_turn(plan, profile, KEEP_CHECKPOINT_OFFLOAD)
    intercepted.clear()
    train(tmp_path, strategy(states), pinned(chosen), make=Plain, precision=precision)
    blocks = {f"model.transformer.h.{index}" for index in range(6)}
    assert blocks & {names[index] for index in intercepted} == {"model.transformer.h.2", "model.transformer.h.5"}
    assert [name for name, needed in zip(names, chosen.intercepted, strict=True) if needed and name in blocks] == [
        "model.transformer.h.2",
        "model.transformer.h.5",
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_rerun_uses_weights_as_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    """In backward, products of checkpointed units are given the resident weights, and not values of each one."""
    plan, profile = plan_of(tmp_path, "host", precision=precision)
    accessed: list[Any] = []
    run = Access.run

    def noted(self: Access, kind: Kind, *args: Any) -> Any:
        if kind is Kind.MATMUL and torch._C._current_graph_task_id() != -1:
            accessed.append(args)
        return run(self, kind, *args)

    monkeypatch.setattr(Access, "run", noted)
    train(tmp_path, strategy("host"), pinned(in_turn(plan, profile, ("checkpoint",))), precision=precision)
    assert not accessed


class Changing(Plain):
    """Changes a weight of a block in place between the last forward and its backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == STEPS - 1:
            with torch.no_grad():
                self.model.transformer.h[0].mlp.c_fc.weight.mul_(2)


def test_a_weight_that_is_changed_before_backward_is_refused(tmp_path: Path) -> None:
    """As in plain training, whether its unit keeps its saved tensors or is checkpointed."""
    plan, profile = plan_of(tmp_path, "host", make=Plain)
    for how in ("auto", *(in_turn(plan, profile, kinds) for kinds in (("checkpoint",), ("keep", "host")))):
        given = (how,) if isinstance(how, str) else (strategy("host"), pinned(how))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(tmp_path, *given, make=Changing)
