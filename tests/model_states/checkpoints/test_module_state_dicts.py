"""State dicts of modules keep the values that user code puts there in place of a weight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.model_states import build
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.states import offloading, train


def scale(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].detach() * 2


def remove(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    del state[prefix + "weight"]


def transpose(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def round_off(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].bfloat16()


class Saves(nn.Linear):
    """Saves another value than its weight, without a hook."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() - 1


def hooked(hook: Callable[..., None], public: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Linear(16, 16)
        (layer.register_state_dict_post_hook if public else layer._register_state_dict_hook)(hook)
        return layer

    return make


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "scaled": hooked(scale, True),
    "removed": hooked(remove, True),
    "transposed": hooked(transpose, True),
    "rounded": hooked(round_off, False),
    "its own save": lambda: Saves(16, 16),
}


class Layered(Model):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = layer()
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.blocks[0](self.embed(tokens))))


class Reads(pl.Callback):
    """Reads a state dict and a checkpoint between two steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            path = Path(trainer.default_root_dir) / "read.ckpt"
            trainer.save_checkpoint(path)
            saved = torch.load(path, weights_only=False)["state_dict"]
            for state in (pl_module.layer.state_dict(), saved):
                pl_module.seen.append({name: torch.clone(value) for name, value in state.items() if "layer" in name})
            pl_module.seen.append({name: value.clone() for name, value in pl_module.layer.state_dict().items()})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layer", LAYERS)
def test_computed_values_stay(tmp_path: Path, layer: str) -> None:
    def run(strategy: Any) -> Any:
        return train(tmp_path, strategy, Layered(LAYERS[layer]), callbacks=[Reads()], max_epochs=1)

    assert_same(run(offloading()), run("auto"))


@pytest.mark.parametrize("states", ["host", "ssd", "auto"])
def test_computed_values_stay_beside_master_weights(tmp_path: Path, states: str) -> None:
    """In `bf16-true`, weights on the device have master weights, too, which plain Lightning lacks."""

    class Zeros(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            state = pl_module.state_dict()
            found.append(int(state["layer.weight"].count_nonzero()))
            assert all(value.any() for name, value in state.items() if name != "layer.weight" and value.dim() > 1)

    def zero(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[prefix + "weight"] = torch.zeros(16, 16)

    found: list[int] = []
    model = Layered(hooked(zero, True))
    strategy = offloading(states, **({"gpu_memory": "30kB"} if states == "auto" else {}))
    train(tmp_path, strategy, model, callbacks=[Zeros()], max_epochs=1, precision="bf16-true")
    assert found and not any(found)


class Recurrent(Model):
    """Its GRU owns eight large weights itself, of two parameter groups. (torch has no bf16 LSTM on some CPUs.)"""

    def __init__(self) -> None:
        super().__init__(groups=True)
        self.gru = nn.GRU(16, 16, num_layers=4, batch_first=True)
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.blocks[0](self.embed(tokens)))[0])


@pytest.mark.quick_cases(1)
@pytest.mark.timeout(100)
@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_owns_more_flat_parameters_than_staging_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, states: str
) -> None:
    """Checkpoints and state dicts are made and loaded amid a training, also after a load that has failed."""
    monkeypatch.setattr(build, "STAGED_FLAT_ELEMENTS", 1000)

    class Halves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            path = Path(trainer.default_root_dir) / "read.ckpt"
            trainer.save_checkpoint(path)
            state = torch.load(path, weights_only=False)["state_dict"]
            pl_module.seen.append(state)
            halves = {name: value.clone() * 0.5 for name, value in pl_module.state_dict().items()}
            if trainer.global_step == 2:
                with pytest.raises(RuntimeError, match="size mismatch for gru.weight_hh_l3"):
                    pl_module.load_state_dict(halves | {"gru.weight_hh_l3": torch.ones(3)})
            elif trainer.global_step == 4:
                pl_module.load_state_dict(halves)

    def run(strategy: Any) -> Any:
        how: Any = {"max_epochs": 1, "precision": precision}
        return train(tmp_path, strategy, Recurrent(), callbacks=[Halves()], **how)

    expected = run("auto")
    assert_same(run(offloading(states)), expected)
