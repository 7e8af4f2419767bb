"""Parameters that are frozen, thawed, added to groups and removed from groups during whole trainings."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import trainings
from tests.support.compare import assert_same
from tests.support.models import Block, ToyModel
from tests.support.optimizers import Program
from tests.support.products import combinations
from tests.support.states import offloading
from tests.support.trainings import rows


class Model(ToyModel):
    """A frozen backbone and a head; the optimizer has the parameters that are not frozen."""

    def __init__(self, make_optimizer: Callable[[Any], Any] = torch.optim.AdamW) -> None:
        super().__init__(make_optimizer)
        self.backbone = nn.Sequential(*(Block(8, 8) for _ in range(3)))
        self.head = Block(8, 8)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.head(self.backbone(batch)) - 1).square().mean()


def train(
    path: Path, strategy: Any, model: Model, callbacks: list[pl.Callback], ckpt_path: Any = None, **arguments: Any
) -> Model:
    """Trains a copy of `model`, two steps an epoch."""
    arguments = {"max_epochs": 3, "callbacks": copy.deepcopy(callbacks)} | arguments
    trained: Model = trainings.train(path, strategy, model, rows(2), ckpt_path=ckpt_path, **arguments)
    return trained


def compare(
    path: Path, strategy: Any, callbacks: list[pl.Callback], model: Model | None = None, **arguments: Any
) -> None:
    model = model or Model()
    expected = train(path, "auto", model, callbacks, **arguments)
    assert_same(train(path, strategy, model, callbacks, **arguments), expected)


class OneByOne(pl.callbacks.BaseFinetuning):
    """Thaws a block of the backbone in every epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.backbone[2 - epoch], optimizer, lr=1e-2)


def coupled(parameters: Any) -> Program:
    return Program([{"params": parameters}], ["clipped", "momentum"])


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def test_resumes_where_blocks_were_thawed(tmp_path: Path) -> None:
    """It equals plain Lightning, from a checkpoint of either strategy, under either."""
    resumed: list[Model] = []
    for number, names in enumerate((("auto", "auto"), ("auto", "host"), ("ssd", "auto"), ("host", "host"))):
        first, second = (name if name == "auto" else offloading(name) for name in names)
        saved = tmp_path / f"{number}.ckpt"
        begun = train(tmp_path, first, Model(), [OneByOne(), Save(saved)], max_epochs=2)
        resumed.append(train(tmp_path, second, Model(), [OneByOne()], ckpt_path=saved))
        resumed[-1].losses = begun.losses + resumed[-1].losses
        assert_same(resumed[-1], resumed[0])


class Changes(pl.Callback):
    """Makes a change before each batch: freezes, thaws, adds to a group, or removes from one."""

    def __init__(self, changes: list[tuple[str, int]]) -> None:
        self.changes = changes

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for kind, number in self.changes[trainer.global_step :: 6]:
            parameters = list(pl_module.parameters())
            parameter = parameters[number % len(parameters)]
            groups = trainer.optimizers[0].param_groups
            owners = [group for group in groups if any(parameter is member for member in group["params"])]
            if kind == "freeze":
                parameter.requires_grad_(False)
                parameter.grad = None
            elif kind == "thaw":
                parameter.requires_grad_(True)
            elif kind == "add" and not owners:
                parameter.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": [parameter], "lr": 3e-3})
            elif kind == "join" and not owners:
                parameter.requires_grad_(True)
                groups[0]["params"].append(parameter)
            elif kind == "take" and owners:
                owners[0]["params"] = [member for member in owners[0]["params"] if member is not parameter]


class HalfFrozen(Model):
    def __init__(self, make: Callable[[Any], Any] = torch.optim.AdamW) -> None:
        super().__init__(make)
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(number % 3 > 0)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["freeze", "thaw", "add", "add", "join", "take"]), st.integers(0, 15)),
    min_size=3,
    max_size=12,
)


def check_changes(path: Path, changes: list[tuple[str, int]], states: str, make: Callable[[Any], Any]) -> None:
    compare(path, offloading(states), [Changes(changes)], HalfFrozen(make))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changes")


@pytest.mark.thorough
@given(CHANGES, st.sampled_from(["host", "ssd"]), st.sampled_from([torch.optim.AdamW, torch.optim.RMSprop, coupled]))
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_random_changes(path: Path, changes: Any, states: str, make: Callable[[Any], Any]) -> None:
    check_changes(path, changes, states, make)


class Structure(pl.Callback):
    """Changes modules and parameter groups before one batch.

    Args:
        change: called with the LightningModule and the optimizer.
        batch: number of the batch in the first epoch.
    """

    def __init__(self, change: Callable[[Any, Any], None], batch: int = 1) -> None:
        self.change = change
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.batch:
            torch.manual_seed(5)
            self.change(pl_module, trainer.optimizers[0])


def added(optimizer: Any, module: Any) -> None:
    optimizer.add_param_group({"params": list(module.parameters()), "lr": 3e-2})


def replaced_parameter(module: Any, optimizer: Any) -> None:
    layer = module.backbone[1].up
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    optimizer.add_param_group({"params": [layer.weight]})


def untied_parameter(module: Any, optimizer: Any) -> None:
    layer = module.backbone[2].up
    layer.weight = nn.Parameter(module.backbone[0].up.weight.detach().clone())
    optimizer.add_param_group({"params": [layer.weight]})


def replaced_module(module: Any, optimizer: Any) -> None:
    module.backbone[0] = Block(8, 8)
    added(optimizer, module.backbone[0])


def appended_module(module: Any, optimizer: Any) -> None:
    module.backbone.append(Block(8, 8))
    added(optimizer, module.backbone[3])


def inserted_module(module: Any, optimizer: Any) -> None:
    module.backbone.insert(0, Block(8, 8))
    added(optimizer, module.backbone[0])


def removed_module(module: Any, optimizer: Any) -> None:
    removed = set(module.backbone[1].parameters())
    del module.backbone[1]
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter not in removed]


def reordered_modules(module: Any, optimizer: Any) -> None:
    module.backbone = nn.Sequential(*list(module.backbone)[::-1], nn.Linear(8, 8))
    added(optimizer, module.backbone[3])


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone[2].up.weight = self.backbone[0].up.weight  # type: ignore[union-attr]


STRUCTURES = [
    (replaced_parameter, Model),
    (untied_parameter, Tied),
    (replaced_module, Model),
    (appended_module, Model),
    (inserted_module, Model),
    (removed_module, Model),
    (reordered_modules, Model),
]
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@combinations(
    "change, training, states",
    STRUCTURES,
    TRAININGS,
    ["host", "ssd"],
    quick=[(STRUCTURES[0], "plain", "host"), (STRUCTURES[4], "accumulated and clipped", "ssd")],
)
def test_modules_that_change_with_parameter_groups(
    tmp_path: Path, change: tuple[Callable[[Any, Any], None], Callable[[], Model]], training: str, states: str
) -> None:
    """Parameters that the model had at the start stay in their units; new ones are stepped on the device."""
    structure, model = change
    compare(tmp_path, offloading(states), [Structure(structure)], model(), **TRAININGS[training])


class UsedOnce(Model):
    """The first micro-batch uses all blocks, the others the last ones only; its loss may be infinite."""

    factor = 1.0

    def loss(self, batch: Tensor) -> Tensor:
        if self.losses:
            return self.head(batch).square().mean()
        return super().loss(batch) * self.factor


class Overflows(UsedOnce):
    factor = float("inf")


@pytest.mark.parametrize(("states", "loss_scaled"), [("host", True), ("ssd", False)])
def test_groups_that_change_between_accumulated_gradients(tmp_path: Path, states: str, loss_scaled: bool) -> None:
    """Gradients of before the change count in the norm and in the check of the loss scale."""

    def change(module: Any, optimizer: Any) -> None:
        module.extra = nn.Parameter(torch.zeros(1))
        optimizer.add_param_group({"params": [module.extra]})

    def run(strategy: Any) -> Model:
        how: dict[str, Any] = {"accumulate_grad_batches": 2}
        if loss_scaled:
            how["plugins"] = [pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
        else:
            how["gradient_clip_val"] = 0.01
        return train(tmp_path, strategy, Overflows() if loss_scaled else UsedOnce(), [Structure(change)], **how)

    assert_same(run(offloading(states)), run("auto"))


def test_changed_groups_are_not_recorded(tmp_path: Path) -> None:
    strategy = offloading("ssd", recover=True)
    with pytest.raises(RuntimeError, match="parameter groups.*recover=False"):
        train(tmp_path, strategy, Model(), [OneByOne()])


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(8)  # type: ignore[assignment]


@pytest.mark.parametrize("model", [Model, Lazy])
def test_double_precision_and_lazy_modules_train_with_resident_states(
    tmp_path: Path, model: Callable[[], Model]
) -> None:
    precision: Any = {"precision": "64-true"} if model is Model else {}
    compare(tmp_path, "ssd_offload", [], model(), **precision)
