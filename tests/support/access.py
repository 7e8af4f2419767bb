"""User code that reads and writes weights of offloaded parameters, and trainings with and without offloading."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy

STEPS = 3


PLACES = ("host", "ssd")


Action = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Toy(pl.LightningModule):
    """Two blocks that are trained, and one that is not; what `action` returns at a hook is kept in `seen`.

    Args:
        hook: the name of the hook.
        action: called with the module at every call of the hook.
        optimizer: makes the optimizer.
    """

    def __init__(
        self, hook: str = "", action: Action | None = None, optimizer: Any = torch.optim.SGD, **settings: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.target = Block().requires_grad_(False)
        self.optimizer = optimizer
        self.settings = {"lr": 0.1} | settings
        self.seen: list[Any] = []
        if action is not None:
            self.at(hook, action)

    def at(self, hook: str, action: Action) -> None:
        """Has `action` called at a hook, after what Lightning does there."""
        before = getattr(self, hook)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs)
            self.seen.append(_frozen(action(self)))
            return result

        cls = type(self)
        self.__class__ = type(cls.__name__, (cls,), {hook: lambda self, *args, **kwargs: run(*args, **kwargs)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.target(batch)
        return (self(batch) - goal).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return self.optimizer(parameters, **self.settings)


def loader(count: int = STEPS) -> Any:
    rows = torch.randn(count * 4, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def fit(path: Path, module: Any, states: str | None, *, strategy: Any = None, **arguments: Any) -> Any:
    """Trains `module`, plain (`states` is None) or with states that have left, and returns it."""
    chosen: Any = "auto"
    if states is not None:
        small = {"ssd_capacity": "1MiB", "staging_memory": "16MiB"} if states == "ssd" else {}
        chosen = SSDOffloadStrategy(states=states, min_bytes=1, gpu_memory="1B", **small, **(strategy or {}))  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", strategy=chosen, default_root_dir=path, max_epochs=1, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **arguments
    )  # fmt: skip
    trainer.fit(module, loader())
    return module


def assert_same(actual: Any, expected: Any) -> None:
    assert _same(actual.seen, expected.seen), (actual.seen, expected.seen)
    weights = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(weights[name], value), name


def compare(path: Path, make: Callable[[], Any], states: str, *, strategy: Any = None, **arguments: Any) -> None:
    """Trains plain and with states that have left, and compares what was seen and the weights, bit for bit."""
    assert_same(fit(path, make(), states, strategy=strategy, **arguments), fit(path, make(), None, **arguments))


def _frozen(value: Any) -> Any:
    """Returns a copy of what user code has seen, with ordinary tensors."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()) if value.numel() else value.shape
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(_bits(one), _bits(other))
    if isinstance(one, list):
        return (
            isinstance(other, list)
            and len(one) == len(other)
            and all(_same(a, b) for a, b in zip(one, other, strict=True))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return bool(one == other) or one != one


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().nan_to_num(nan=12345.0) if real.is_floating_point() else real


def _ema(module: Any) -> None:
    with torch.no_grad():
        for old, new in zip(module.target.parameters(), module.blocks[0].parameters(), strict=True):
            old.lerp_(new, 0.1)


def _dqn(module: Any) -> None:
    module.target.load_state_dict(module.blocks[1].state_dict())


def _mean_teacher(module: Any) -> None:
    for old, new in zip(module.target.parameters(), module.blocks[0].parameters(), strict=True):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


def _assign(module: Any) -> None:
    for old, new in zip(module.target.parameters(), module.blocks[0].parameters(), strict=True):
        old.data = old.data * 0.5 + new.data * 0.5


def _wgan(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def _foreach(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(module.target.parameters()), list(module.blocks[1].parameters()), 0.25)


def _elements(module: Any) -> Any:
    weight = module.blocks[0].up.weight
    with torch.no_grad():
        weight[0].zero_()
        weight[:, 1] += 1
        weight.view(-1)[5:9] = 3
        weight.T[2].fill_(0.5)
        first, second = weight.chunk(2)
        first.add_(second)
    return weight.detach().norm(), weight.detach().cpu().numpy().copy().tolist()


def _init(module: Any) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(module.blocks[0].up.weight)
    nn.init.constant_(module.blocks[0].up.bias, 0.25)
    module.blocks[1].down.reset_parameters()


def _flatten(module: Any) -> None:
    parameters = list(module.blocks.parameters())
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector * 0.5, parameters)


def _norms(module: Any) -> Any:
    weights = [parameter.detach() for parameter in module.parameters()]
    difference = module.blocks[0].up.weight - module.blocks[1].up.weight
    return torch.cat([weight.flatten() for weight in weights]), torch._foreach_norm(weights), difference


def _prune(module: Any) -> Any:
    if not hasattr(module.blocks[0].up, "weight_orig"):
        nn.utils.prune.l1_unstructured(module.blocks[0].up, "weight", amount=0.5)
    return (module.blocks[0].up.weight == 0).sum()


def _copies(module: Any) -> Any:
    copied = copy.deepcopy(module.blocks)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    buffer = io.BytesIO()
    torch.save(module.blocks, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    rows = torch.ones(2, 8, device=module.device)
    return list(copied.parameters()), list(loaded.parameters()), copied[0](rows), loaded[1](rows)


def _state_dicts(module: Any) -> Any:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _graph(module: Any) -> Any:
    weight = module.blocks[0].up.weight
    loss = (weight * weight).sum() + (weight @ module.blocks[1].up.weight).square().sum()
    return torch.autograd.grad(loss, [weight, module.blocks[1].up.weight])


ACTIONS = [_ema, _dqn, _mean_teacher, _assign, _wgan, _foreach, _elements, _init, _flatten, _norms, _prune, _copies,
           _state_dicts, _graph]  # fmt: skip
