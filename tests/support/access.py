"""User code that reads and writes weights of offloaded parameters, and trainings with and without offloading."""

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support import trainings
from tests.support.compare import assert_same
from tests.support.models import Block, ToyModel

STEPS = 3


PLACES = ("host", "ssd")


Action = Callable[[Any], Any]


class Toy(ToyModel):
    """Two blocks that are trained, and one that is not; `seen` has the losses and the results of `action`.

    Args:
        hook: the name of the hook.
        action: called with the module at every call of the hook.
        optimizer: class of the optimizer.
        **settings: arguments of the optimizer.
    """

    def __init__(
        self, hook: str = "", action: Action | None = None, optimizer: Any = torch.optim.SGD, **settings: Any
    ) -> None:
        super().__init__(functools.partial(optimizer, **{"lr": 0.1} | settings))
        self.blocks = nn.ModuleList(Block(8, 8, norm=False) for _ in range(2))
        self.target = Block(8, 8, norm=False).requires_grad_(False)
        self.seen: list[Any] = []
        if action is not None:
            self.at(hook, action)

    def at(self, hook: str, action: Action) -> None:
        """Calls `action` at a hook, after Lightning's own code."""
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
        loss = super().training_step(batch, batch_idx)
        self.seen.append(self.losses[-1])
        return loss


def loader(count: int = STEPS) -> Any:
    rows = torch.randn(count * 4, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


def fit(path: Path, module: Any, states: str | None, *, strategy: Any = None, **arguments: Any) -> Any:
    """Trains `module`, plain (`states` is None) or with offloaded states, and returns it."""
    chosen: Any = "auto"
    if states is not None:
        small = {"ssd_capacity": "1MiB", "staging_memory": "16MiB"} if states == "ssd" else {}
        arguments_of_states: dict[str, Any] = {"states": states, "min_bytes": 1, "gpu_memory": "1B"}
        chosen = SSDOffloadStrategy(**arguments_of_states | small | (strategy or {}))
    return trainings.fit(path, chosen, module, loader(), num_sanity_val_steps=0, **arguments)


def compare(path: Path, make: Callable[[], Any], states: str, *, strategy: Any = None, **arguments: Any) -> None:
    """Trains plain and with offloaded states, and compares the results of user code and the weights, bit for bit."""
    assert_same(fit(path, make(), states, strategy=strategy, **arguments), fit(path, make(), None, **arguments))


def _frozen(value: Any) -> Any:
    """Returns a copy of user code's results, with ordinary tensors."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()) if value.numel() else value.shape
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


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


def _transposed_rows(module: Any) -> Any:
    """Multiplies inputs that are not contiguous, by a kernel that depends on whether the weight requires gradients."""
    rows = torch.linspace(-1, 1, 6 * 4 * 8, device=module.device).view(6, 4, 8).transpose(0, 1)
    with torch.no_grad():
        product = rows @ module.blocks[0].down.bias
    return product, product.stride()


ACTIONS = [_ema, _dqn, _mean_teacher, _assign, _wgan, _foreach, _elements, _init, _flatten, _norms, _prune, _copies,
           _state_dicts, _graph, _transposed_rows]  # fmt: skip
