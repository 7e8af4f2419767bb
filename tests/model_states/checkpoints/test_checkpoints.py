"""Checkpoints of offloaded states: ordinary files, written and read without memory for all states."""

import array
import collections
import contextlib
import copy
import dataclasses
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import load_lazy, load_sharded, save_sharded
from lightning_ssd.model_states.checkpoints.lazy import LazyTensor, LazyTensors, save
from tests.support.compare import assert_same, same
from tests.support.models import Block, Model, ToyModel
from tests.support.states import Large, host, loader, memory, ssd, train
from tests.support.trainings import make_trainer, rows


def saved(path: Path, strategy: Any, model: Any = None, **arguments: Any) -> dict[str, Any]:
    """Trains, and returns the content of the last checkpoint."""
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=path / "saved", save_last=True, save_weights_only=arguments.pop("save_weights_only", False)
    )
    callbacks = [checkpoint, *arguments.pop("callbacks", [])]
    train(path, strategy, model or Model(), enable_checkpointing=True, callbacks=callbacks, **arguments)
    content: dict[str, Any] = torch.load(path / "saved" / "last.ckpt", weights_only=False)
    assert not list((path / "saved").glob(".*"))
    return content


@pytest.mark.parametrize(("states", "weights_only"), [("host", True), ("ssd", False)])
def test_files_are_plain_lightnings(tmp_path: Path, states: str, weights_only: bool) -> None:
    plain = saved(tmp_path / "plain", "auto", save_weights_only=weights_only)
    ours = saved(tmp_path / "ours", ssd(states=states), save_weights_only=weights_only)
    assert list(ours) == list(plain)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        if part in plain:
            assert same(ours[part], plain[part]), part


def test_hooks_see_values_and_may_change_them(tmp_path: Path) -> None:
    class Editing(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["mean"] = {name: value.mean() for name, value in weights.items()}
            weights["blocks.0.up.weight"] = weights["blocks.0.up.weight"] * 2
            weights["blocks.1.up.bias"] = weights["blocks.1.up.bias"] + 1
            del weights["head.weight"]

    plain = saved(tmp_path / "plain", "auto", Editing())
    ours = saved(tmp_path / "ours", ssd(), Editing())
    for part in ("state_dict", "mean", "optimizer_states"):
        assert same(ours[part], plain[part]), part


def _change_data(module: Any, checkpoint: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


def _change_in_place(module: Any, checkpoint: Any) -> None:
    with torch.no_grad():
        module.blocks[0].up.weight.add_(1.0)


def _load_weights(module: Any, checkpoint: Any) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def _load_states(module: Any, checkpoint: Any) -> None:
    (optimizer,) = module.trainer.optimizers
    state = optimizer.state_dict()
    halved = {
        number: {name: value * 0.5 if value.dim() else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": halved})


def _change_whole_weights(module: Any, checkpoint: Any) -> None:
    whole = getattr(module.trainer.strategy, "whole_weights", contextlib.nullcontext)
    with whole(), torch.no_grad():
        module.blocks[0].up.weight.add_(1.0)
        checkpoint["sum"] = checkpoint["state_dict"]["blocks.0.up.weight"].sum()
        module.blocks[1].up.weight.add_(1.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("change", [_change_data, _change_in_place, _load_weights, _load_states, _change_whole_weights])
def test_values_that_change_while_a_checkpoint_is_made(tmp_path: Path, change: Any, states: str) -> None:
    """Weights in a checkpoint are the module's until the file is written, and states of an optimizer are copies."""

    class Changing(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            change(self, checkpoint)

    plain = saved(tmp_path / "plain", "auto", Changing())
    ours = saved(tmp_path / "ours", ssd(states=states), Changing())
    for part in ("state_dict", "optimizer_states", "sum"):
        assert same(ours.get(part), plain.get(part)), part


def test_a_state_dict_that_is_kept_keeps_its_values(tmp_path: Path) -> None:
    """Its tensors load their values before the next step changes them."""

    class Keeping(pl.Callback):
        def __init__(self) -> None:
            self.kept: list[Any] = []
            self.lazy: list[LazyTensor] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            state = {"weights": strategy.lightning_module_state_dict()}
            state["optimizer"] = strategy.optimizer_state(trainer.optimizers[0])["state"]
            self.lazy = [value for value in state["weights"].values() if isinstance(value, LazyTensor)]
            if strategy.strategy_name != "ssd_offload":  # which are the model's own
                state = torch.utils._pytree.tree_map_only(Tensor, torch.clone, state)
            self.kept.append(state)

    plain, ours = Keeping(), Keeping()
    train(tmp_path, "auto", Model(), callbacks=[plain])
    train(tmp_path, ssd(), Model(), callbacks=[ours])
    assert ours.lazy and all(type(value) is Tensor for value in ours.kept[0]["weights"].values())
    for a, b in zip(ours.kept, plain.kept, strict=True):
        for name, value in b["weights"].items():
            assert torch.equal(a["weights"][name], value), name
        for number, state in b["optimizer"].items():
            assert all(torch.equal(a["optimizer"][number][name], value) for name, value in state.items())


def test_state_dicts_around_a_step_by_hand(tmp_path: Path) -> None:
    """Values that were read before a step are not returned after it."""

    class ByHand(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[dict[str, Tensor]] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            loss = self.loss(batch[0])
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.see()
            lazily = self.trainer.strategy.lightning_module_state_dict()
            optimizer.step()
            self.see()
            self.seen.append({name: value + 0 for name, value in lazily.items()})

        def see(self) -> None:
            self.seen.append({name: value.clone() for name, value in self.state_dict().items()})

    plain: Any = train(tmp_path, "auto", ByHand())
    ours: Any = train(tmp_path, ssd(), ByHand())
    assert len(ours.seen) == len(plain.seen) > 30
    for index, (a, b) in enumerate(zip(ours.seen, plain.seen, strict=True)):
        # Plain Lightning's are the parameters themselves.
        expected = plain.seen[index - 2] if index % 3 == 2 else b
        assert same(a, expected), index


def test_saving_in_the_background(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", "auto")
    ours = saved(tmp_path / "ours", SSDOffloadStrategy(states="ssd", min_bytes=1, checkpoint_io=AsyncCheckpointIO()))
    assert same(ours["state_dict"], plain["state_dict"])


PATCHED: dict[str, tuple[Any, str]] = {
    "torch.save": (torch, "save"),
    "TorchCheckpointIO.save_checkpoint": (TorchCheckpointIO, "save_checkpoint"),
    "of the strategy's": (None, "save_checkpoint"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("patched", PATCHED)
@pytest.mark.parametrize("writes", [False, True])
def test_functions_that_save_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: str, writes: bool
) -> None:
    """They get ordinary tensors."""
    seen: list[Any] = []

    def patch(strategy: Any) -> None:
        owner, name = PATCHED[patched]
        owner = strategy.checkpoint_io if owner is None else owner
        original = getattr(owner, name)

        def other(*args: Any, **kwargs: Any) -> Any:
            kept = next(value for value in args if isinstance(value, dict))
            seen[-1].append(copy.deepcopy(kept))
            if writes:
                kept["more"] = 1
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, other)

    class Patching(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            patch(trainer.strategy)

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            monkeypatch.undo()

    files = []
    how: Any = dict(max_epochs=1, limit_train_batches=4)
    for name, strategy in (("plain", "auto"), ("ours", ssd())):
        seen.append([])
        checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        train(tmp_path, strategy, Model(), enable_checkpointing=True, callbacks=[checkpoint, Patching()], **how)
        files.append({file.name: load(file) for file in (tmp_path / name).glob("*")})
    plain, ours = seen
    assert len(plain) == 2
    for mine, theirs in zip(ours, plain, strict=True):
        assert same(mine["state_dict"], theirs["state_dict"])
        assert same(mine["optimizer_states"], theirs["optimizer_states"])
    assert files[1].keys() == files[0].keys()
    for name, content in files[0].items():
        assert (files[1][name] is None) == (content is None)
        if content is not None:
            assert same(files[1][name]["state_dict"], content["state_dict"])
            assert files[1][name].keys() == content.keys()


def load(file: Path) -> Any:
    return torch.load(file, weights_only=False) if file.stat().st_size else None


@pytest.mark.parametrize("second", ["auto", "host", "ssd"])
def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path, second: str) -> None:
    """It equals plain Lightning, with pending accumulation, and with another format of the states."""
    strategies: dict[str, Any] = {
        "auto": lambda: "auto",
        "host": host,
        "ssd": lambda: ssd(state_format="split", gpu_memory="1B"),
    }
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    how: Any = dict(accumulate_grad_batches=3, max_epochs=3, limit_train_batches=11)
    train(tmp_path, host(), Model(), enable_checkpointing=True, callbacks=[checkpoint], **how)
    middle = sorted((tmp_path / "saved").glob("*.ckpt"))[2]
    expected = train(tmp_path, "auto", Model(), ckpt_path=str(middle), **how)
    assert_same(train(tmp_path, strategies[second](), Model(), ckpt_path=str(middle), **how), expected)


@pytest.mark.parametrize("weights_only", [False, True])
def test_sharded_checkpoints(tmp_path: Path, weights_only: bool) -> None:
    """The content is the same as in one file, nothing but tensors and plain containers is unpickled, and tied weights
    are written once."""
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "saved", save_last=True, save_weights_only=weights_only, save_top_k=1
    )
    strategy = ssd(checkpoints="sharded")
    train(tmp_path, strategy, Model(), enable_checkpointing=True, callbacks=[checkpoint])
    directory = tmp_path / "saved" / "last.ckpt"
    assert {file.name for file in directory.iterdir()} == {"__0_0.distcp", ".metadata", "meta.pt", "lightning_ssd.pt"}
    assert len(list((tmp_path / "saved").iterdir())) == 2
    plain = saved(tmp_path / "plain", "auto", save_weights_only=weights_only)
    (directory / ".metadata").write_bytes(b"")
    ours = load_sharded(directory, weights_only=True)
    assert ours.keys() == plain.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        if part in plain:
            assert same(ours[part], plain[part]), part
    weights = ours["state_dict"]
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()


@pytest.mark.parametrize("second", ["sharded", "file", "consolidated"])
def test_resuming_from_a_sharded_checkpoint(
    tmp_path: Path, second: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain Lightning resumes from what its own utility makes of it, by the command that the log names."""
    expected = train(tmp_path, "auto", Model())
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    how: Any = dict(max_epochs=1, enable_checkpointing=True, callbacks=[checkpoint])
    with caplog.at_level("INFO"):
        begun: Any = train(tmp_path, ssd(checkpoints="sharded"), Model(), **how)
    path = str(tmp_path / "saved" / "last.ckpt")
    if second == "consolidated":
        (command,) = re.findall(r"python -m ([\w.]+) \S+\.ckpt", caplog.text)
        monkeypatch.setattr(sys, "argv", [command, path])
        runpy.run_module(command, run_name="__main__", alter_sys=True)
        path += ".consolidated"
        assert same(Model.load_from_checkpoint(path).state_dict(), begun.state_dict())
    again: Any = "auto" if second == "consolidated" else ssd(states="host", checkpoints=second)
    resumed: Any = train(tmp_path, again, Model(), ckpt_path=path)
    resumed.losses = begun.losses + resumed.losses
    assert_same(resumed, expected)


def test_a_directory_of_another_strategy(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "meta.pt").touch()
    with pytest.raises(ValueError, match=r"has not written.*utilities\.consolidate_checkpoint \S+a\.ckpt"):
        train(tmp_path, ssd(), Model(), ckpt_path=str(tmp_path / "a.ckpt"))


def test_a_sharded_checkpoint_of_a_sparse_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model/a is a sparse tensor.*checkpoints='file'"):
        save_sharded({"state_dict": {"a": torch.eye(3).to_sparse()}}, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_sharded_checkpoint_that_was_cut_off(tmp_path: Path) -> None:
    save_sharded({"state_dict": {"a": torch.ones(100)}}, tmp_path / "a.ckpt")
    for nbytes in (200, 0):
        os.truncate(tmp_path / "a.ckpt" / "__0_0.distcp", nbytes)
        with pytest.raises(ValueError, match=r"__0_0\.distcp is shorter than when it was written"):
            load_sharded(tmp_path / "a.ckpt")


class Strided(ToyModel):
    """Two parameters that are dense and not contiguous, under a fused optimizer; saves a checkpoint after two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.randn(4, 3).t())

    def loss(self, batch: Tensor) -> Tensor:
        return (self.images(batch.view(-1, 2, 2, 2)).flatten(1) @ self.transposed.t()).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/amid")


@pytest.mark.parametrize("checkpoints", ["file", "sharded"])
def test_optimizer_states_have_the_strides_of_their_parameters(tmp_path: Path, checkpoints: Any) -> None:
    """Fused optimizers step states in the order of memory. States on SSDs are read lazily after `fit`."""
    contents: dict[str, list[Any]] = {}
    for kind, strategy in (("plain", "auto"), ("ours", ssd(checkpoints=checkpoints))):
        (tmp_path / kind).mkdir()
        trainer = make_trainer(tmp_path / kind, strategy)
        trainer.fit(Strided(), rows(3))
        trainer.save_checkpoint(tmp_path / kind / "after")
        for name in ("amid", "after"):
            path = tmp_path / kind / name
            content = load_sharded(path, weights_only=False) if path.is_dir() else torch.load(path, weights_only=False)
            states = content["optimizer_states"][0]["state"]
            strides = [value.stride() for state in states.values() for value in state.values()]
            contents.setdefault(kind, []).extend([states, strides, content["state_dict"]])
    assert same(contents["ours"], contents["plain"])


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.ckpt"):
        train(tmp_path, ssd(), Model(), ckpt_path=str(tmp_path / "nowhere.ckpt"))


def test_assigning_a_state_dict(tmp_path: Path) -> None:
    class Assigning(Model):
        def on_train_start(self) -> None:
            self.load_state_dict(Model().state_dict(), assign=True)

    with pytest.raises(ValueError, match=r"leave `assign` out"):
        train(tmp_path, host(), Assigning())


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Hyperparameters of a user, with a tensor of a state dict."""

    rate: float
    weight: Tensor


class Point(NamedTuple):
    x: Tensor
    y: int


class Names(list[Any]):
    """A list with an attribute."""


def _containers(weight: Tensor) -> dict[str, Any]:
    """Returns a checkpoint with values of many types, and with `weight` in those that are searched for tensors."""
    state = collections.OrderedDict({"weight": weight})
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    names = Names([weight, "a"])
    names.note = "kept"  # type: ignore[attr-defined]
    shared = [weight]
    return {
        "state_dict": state,
        "frozen": Frozen(0.1, weight),
        "values": (range(3), array.array("d", [1.0]), b"bytes", bytearray(b"bytes"), collections.Counter("aab")),
        "queue": collections.deque([1, 2], maxlen=2),
        "default": collections.defaultdict(list, {"a": [weight]}),
        "names": names,
        "tuples": [Point(weight, 1), (weight, 2), torch.Size([1, 2])],
        "keys": {1: torch.zeros(9), "1": torch.ones(9)},
        "shared": [shared, shared],
    }


@pytest.mark.parametrize("kind", ["file", "plugin", "sharded"])
def test_containers_of_every_type_are_saved_unchanged(tmp_path: Path, kind: str) -> None:
    """As in plain Lightning: with their types, attributes and options."""
    plain = torch.arange(100.0)
    tensors = LazyTensors()
    with tensors.making():
        lazy = tensors.make("weight", plain, lambda: plain, copied=False)
    checkpoint = _containers(lazy)
    if kind == "sharded":
        save_sharded(checkpoint, tmp_path / "a.ckpt")
        loaded = load_sharded(tmp_path / "a.ckpt", weights_only=False)
    else:
        if kind == "file":
            save(checkpoint, tmp_path / "a.ckpt")
        else:
            torch.save(load_lazy(checkpoint), tmp_path / "a.ckpt")
        loaded = torch.load(tmp_path / "a.ckpt", weights_only=False)
    expected = _containers(plain)
    for name, value in expected.items():
        assert same(loaded[name], value), name
    assert loaded["state_dict"]._metadata == {"": {"version": 2}}
    assert loaded["queue"].maxlen == 2 and loaded["default"].default_factory is list
    assert loaded["names"].note == "kept" and type(loaded["tuples"][0]) is Point
    assert loaded["shared"][0] is loaded["shared"][1]
    assert checkpoint["tuples"][0].x is lazy and checkpoint["state_dict"]["weight"] is lazy


def test_values_that_contain_themselves_are_saved(tmp_path: Path) -> None:
    ring: list[Any] = [torch.ones(2)]
    ring.append(ring)
    save({"ring": ring}, tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt")["ring"]
    assert loaded[1] is loaded


class Wide(ToyModel):
    """A parameter of 1.4 MiB, whose optimizer states are as large, a buffer, and a tensor that it saves by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(600, 600)
        self.register_buffer("offset", torch.ones(600))
        self.best = torch.ones(())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["best"]

    def loss(self, batch: Tensor) -> Tensor:
        return (self.layer(batch.repeat(1, 75)) - self.offset).square().mean()


class Stateful(pl.Callback):
    """Keeps a small and a large tensor of its state by reference."""

    def __init__(self) -> None:
        self.state = {"small": torch.ones(3), "large": torch.ones(2**19)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize(("checkpoints", "resident"), [("file", False), ("sharded", True)])
def test_a_checkpoint_that_is_overwritten_after_it_was_loaded(tmp_path: Path, resident: bool, checkpoints: Any) -> None:
    """Files of checkpoints are mapped while they are loaded, and no value depends on them afterwards."""

    class Overwriting(Wide):
        def on_train_start(self) -> None:
            for file in [path] if path.is_file() else path.iterdir():
                with open(file, "r+b") as opened:
                    opened.write(bytes(file.stat().st_size))

    def strategy() -> SSDOffloadStrategy:
        memory: dict[str, Any] = {"states": "auto", "gpu_memory": "1GiB"} if resident else {"states": "host"}
        return SSDOffloadStrategy(**memory, min_bytes=1, offload="none", checkpoints=checkpoints)

    path = tmp_path / "begun.ckpt"
    begun = make_trainer(tmp_path, strategy(), callbacks=[Stateful()], max_epochs=1)
    begun.fit(Wide(), rows(3))
    begun.save_checkpoint(path)
    resumed: list[Any] = []
    for model in (Wide(), Overwriting()):
        callback = Stateful()
        trainer = make_trainer(tmp_path, strategy(), callbacks=[callback], max_epochs=2)
        trainer.fit(model, rows(3), ckpt_path=str(path), weights_only=False)
        resumed.append(copy.deepcopy([model.losses, model.best, dict(model.state_dict()), callback.state]))
    assert same(resumed[1], resumed[0])


@pytest.mark.parametrize(("states", "checkpoints"), [("host", "file"), ("ssd", "sharded")])
def test_a_checkpoint_is_saved_in_the_memory_of_a_few_units(tmp_path: Path, states: str, checkpoints: str) -> None:
    """A sharded one is also loaded in it."""
    model, strategy = Large(), ssd(states=states, checkpoints=checkpoints)
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_steps=2, default_root_dir=tmp_path,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    trainer.fit(model, loader())
    saved = tmp_path / "large.ckpt"
    size = sum(file.stat().st_size for file in (saved.iterdir() if checkpoints == "sharded" else [saved]))
    assert size > 192 * 2**20
    assert model.extra < size / 3
    if checkpoints == "sharded":
        before = memory()
        loaded = load_sharded(saved)
        assert sum(value.nbytes for value in loaded["state_dict"].values()) > 64 * 2**20
        assert memory() - before < size / 3


class OnMeta(Model):
    """Builds its blocks on `meta`, in `configure_model`; plain Lightning builds them on the CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.built_on = device
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device(self.built_on):
                self.blocks = nn.ModuleList(Block() for _ in range(4))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["host", "ssd", "gpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_is_loaded_exactly_before_optimizers_are_made(tmp_path: Path, states: Any, precision: Any) -> None:
    """It is loaded into parameters on meta, which have no memory, and into 16-bit ones, which round master weights."""
    found: dict[str, Any] = {}

    class Resumed(OnMeta):
        def on_fit_start(self) -> None:
            found["weights"] = {name: value.clone() for name, value in self.state_dict().items()}

    def strategy() -> SSDOffloadStrategy:
        return SSDOffloadStrategy(states=states, min_bytes=1)

    content = saved(tmp_path, strategy(), OnMeta("cpu"), precision=precision)
    last = str(tmp_path / "saved" / "last.ckpt")
    train(tmp_path, strategy(), Resumed("meta"), precision=precision, ckpt_path=last, max_epochs=3)
    kept = content["state_dict"]
    if states != "gpu" and precision == "bf16-true":
        assert all(value.dtype == torch.float32 for value in kept.values())
    assert same(found["weights"], dict(kept))


def test_the_scaler_of_mixed_precision_is_saved_and_loaded_as_plain_lightnings(tmp_path: Path) -> None:
    def scaler_after(strategy: Any, name: str, resume: str | None = None) -> Any:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=5))
        callback = pl.callbacks.ModelCheckpoint(tmp_path / name, save_last=True)
        train(
            tmp_path, strategy, Model(), plugins=[plugin], enable_checkpointing=True, callbacks=[callback],
            max_epochs=2 if resume is None else 3,
            ckpt_path=None if resume is None else str(tmp_path / resume / "last.ckpt"),
        )  # fmt: skip
        return torch.load(tmp_path / name / "last.ckpt", weights_only=False)["MixedPrecision"]

    first = scaler_after("auto", "plain")
    assert scaler_after(host(), "ours") == first and first["growth_interval"] == 5
    assert scaler_after(host(), "a", "plain") == scaler_after("auto", "b", "ours") == scaler_after("auto", "c", "plain")
