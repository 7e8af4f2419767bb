"""Hooks run in plain Lightning's order and read the same weights, and user code in them has the same results."""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.trainings import make_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: "auto",
    "activations": lambda: SSDOffloadStrategy(offload=1.0, min_bytes=1),
    "host": lambda: SSDOffloadStrategy(states="host", min_bytes=1),
    "ssd": lambda: SSDOffloadStrategy(states="ssd", min_bytes=1, offload=1.0, host_memory="64MiB"),
}
SEES_GRADIENTS = {"on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"}
"""Hooks whose override makes the strategy keep every gradient until they have run."""

NOT_HOOKS = {"state_key", "configure_sharded_model"}


def hooks_of(*classes: type) -> list[str]:
    """Returns the names of the methods that `classes` declare for users to override."""
    names = {name for kind in classes for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_HOOKS)


MODULE_HOOKS = [name for name in hooks_of(ModelHooks, DataHooks, CheckpointHooks) if "dataloader" not in name] + [
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers",
    "load_state_dict", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "predict_step", "test_step",
    "training_step", "validation_step", "forward",
]  # fmt: skip
DATA_HOOKS = [name for name in hooks_of(DataHooks) if "dataloader" in name] + [
    "load_state_dict", "prepare_data", "setup", "state_dict", "teardown", "transfer_batch_to_device",
]  # fmt: skip


class Log:
    """Records the hooks in order, with the weights that each one read."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.act: Callable[[str, Any], None] = lambda event, module: None
        self._inside = False

    def add(self, event: str, module: Any) -> None:
        if self._inside:  # a hook that an entry of this log has caused
            return
        self._inside = True
        try:
            trainer = module._trainer
            at = () if trainer is None else (trainer.state.fn, trainer.state.stage, trainer.global_step)
            self.events.append((event, *at, fingerprint(module)))
            self.act(event, module)
        finally:
            self._inside = False


def fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha1()
    for name, value in nn.Module.state_dict(module).items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def recording(kind: type, names: list[str], owner: str, log: Log, module: Callable[[Any], Any]) -> type:
    """Returns a subclass of `kind` that adds to `log` whenever one of the methods `names` runs."""

    def wrap(name: str) -> Any:
        original = getattr(kind, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.add(f"{owner}.{name}", module(self))
            return original(self, *args, **kwargs)

        run.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Lightning looks at it
        return run

    return type(f"Recording{kind.__name__}", (kind,), {name: wrap(name) for name in names})


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self(batch[0]) - 1).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    # Lightning calls these only if a subclass overrides them.
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.global_step


class Data(pl.LightningDataModule):
    def _loader(self) -> Any:
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


class Watching(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"b": 2}


def run(path: Path, strategy: Any, act: Any = None, *, sees_gradients: bool = True, clip: float | None = None) -> Log:
    """Fits, resumes, validates, tests and predicts, each with a new Trainer and module."""
    log = Log()
    if act is not None:
        log.act = act
    skipped = set() if sees_gradients else SEES_GRADIENTS
    names = [name for name in MODULE_HOOKS if name not in skipped]
    net: Any = recording(Net, names, "module", log, lambda module: module)
    watching: Any = recording(
        Watching, [name for name in hooks_of(pl.Callback) if name not in skipped], "callback", log,
        lambda callback: watched[0],
    )  # fmt: skip
    data: Any = recording(Data, DATA_HOOKS, "data", log, lambda module: watched[0])
    watched: list[Any] = []

    def trainer(**arguments: Any) -> tuple[pl.Trainer, Any]:
        module = net()
        watched[:] = [module]
        return make_trainer(
            path,
            strategy(),
            enable_checkpointing=True,
            gradient_clip_val=clip,
            num_sanity_val_steps=1,
            callbacks=[watching(), pl.callbacks.ModelCheckpoint(path, "{epoch}", save_top_k=-1)],
            **arguments,
        ), module

    fitting, module = trainer(max_epochs=2)
    fitting.fit(module, data())
    first = str(path / "epoch=0.ckpt")
    resuming, module = trainer(max_epochs=2)
    resuming.fit(module, data(), ckpt_path=first)
    evaluating, module = trainer()
    for name in ("validate", "test", "predict"):
        getattr(evaluating, name)(module, datamodule=data(), ckpt_path=first)
    return log


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Log]:
    yield run(tmp_path / "plain", STRATEGIES["plain"], **getattr(request, "param", {}))


def assert_same_events(found: Log, expected: Log) -> None:
    for index, (mine, theirs) in enumerate(zip(found.events, expected.events, strict=False)):
        assert mine == theirs, (
            f"event {index}, after {[event[0] for event in expected.events[max(0, index - 5) : index]]}"
        )
    assert len(found.events) == len(expected.events)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "how",
    [{"sees_gradients": False, "clip": 0.1}, {"sees_gradients": False}, {"sees_gradients": True}],
    ids=["clipped", "gradients are not looked at", "gradients are looked at"],
)
def test_hooks_run_in_plain_lightnings_order(tmp_path: Path, how: Any) -> None:
    expected = run(tmp_path / "plain", STRATEGIES["plain"], **how)
    ran = {event[0] for event in expected.events}
    assert {"module.on_load_checkpoint", "data.load_state_dict", "callback.load_state_dict"} <= ran and len(ran) > 90
    # Where only activations are offloaded, hooks that see gradients make no difference.
    for name in ("activations", "host", "ssd") if how["sees_gradients"] else ("host", "ssd"):
        assert_same_events(run(tmp_path / name, STRATEGIES[name], **how), expected)


class Growing(Net):
    """Replaces a layer by one of the checkpoint's shape before its values are loaded."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.grow(width)

    def grow(self, width: int) -> None:
        torch.manual_seed(width)
        self.blocks[1] = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["width"] = self.width

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.grow(checkpoint["width"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["activations", "host", "ssd"])
def test_a_layer_that_on_load_checkpoint_replaces_is_trained(tmp_path: Path, name: str) -> None:
    def resumed(strategy: Any, root: Path) -> Any:
        def trainer(epochs: int) -> pl.Trainer:
            return make_trainer(
                root,
                strategy(),
                enable_checkpointing=True,
                max_epochs=epochs,
                callbacks=[pl.callbacks.ModelCheckpoint(root, "saved")],
            )

        trainer(1).fit(Growing(24), Data())
        module = Growing(8)
        trainer(3).fit(module, Data(), ckpt_path=str(root / "saved.ckpt"))
        return module.state_dict()

    expected = resumed(STRATEGIES["plain"], tmp_path / "plain")
    found = resumed(STRATEGIES[name], tmp_path / name)
    assert found["blocks.1.0.weight"].shape == (24, 8)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
