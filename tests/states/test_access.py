"""Weights and gradients of offloaded parameters in the hands of user code, against plain Lightning."""

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
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


# ---- every method of tensors ----

REFUSED = {"set_", "resize_", "resize_as_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_",
           "as_strided_", "detach_", "resize", "resize_as", "resize_as_sparse_", "storage", "data_ptr", "rename_",
           "_typed_storage"}  # fmt: skip
"""They change what a parameter is, or return an address: an error by name."""

SKIPPED = {"share_memory_", "pin_memory", "backward", "cuda", "xpu", "ipu", "mtia", "hpu", "apply_", "map_", "map2_",
           "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "untyped_storage",
           "storage_offset", "new", "numpy", "module_load", "reinforce", "storage_type", "record_stream", "empty_like",
           "new_empty", "new_empty_strided", "is_shared", "has_names", "share_memory", "align_to", "align_as",
           "refine_names", "rename", "is_set_to", "_is_view", "_clear_non_serializable_cached_data",
           "slice_inverse", "dequantize", "_use_count", "const_data_ptr", "mutable_data_ptr"}  # fmt: skip
"""They read no element, or what they return is undefined or another one each time."""


def methods() -> list[str]:
    """Returns the names of all methods of tensors."""
    names = [name for name in dir(Tensor) if not name.startswith("_") and callable(getattr(Tensor, name))]
    dunders = [f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "iadd", "isub", "imul",
               "itruediv", "radd", "rmul", "neg", "getitem", "bool", "float", "len", "contains", "eq", "lt", "reversed",
               "format")]  # fmt: skip
    return [name for name in (*names, *dunders) if name not in SKIPPED and name not in REFUSED]


def arguments(one: Tensor, other: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields arguments that many methods take."""
    index = torch.tensor([1, 0])
    mask = torch.arange(64).view(8, 8) % 3 == 0
    yield ()
    yield (0,)
    yield (0.5,)
    yield (other,)
    yield (other.detach(), 0.25)
    yield (0, 1)
    yield (2, 0)
    yield (0, index)
    yield (mask, 0.5)
    yield (mask, other)
    yield (0, index, other[:2])
    yield (0, index, 0.5)
    yield (one, other)
    yield (torch.float64,)
    yield ((4, 16),)
    yield (torch.ones(8), torch.ones(8))
    yield ((index, index), torch.ones(2))
    yield ((8, 8), (8, 1))


def calls(limit: int) -> list[tuple[str, int]]:
    """Returns methods with the numbers of arguments, at most `limit` for each, that they take or refuse by value."""
    found: list[tuple[str, int]] = []
    for name in methods():
        accepted = []
        for number in range(18):
            first, second = torch.rand(8, 8), torch.rand(8, 8)
            try:
                getattr(first, name)(*list(arguments(first, second))[number])
            except Exception:  # whatever a method raises for arguments of other types
                continue
            accepted.append((name, number))
        found += accepted[:limit]
    return found


def outcomes(module: Any, *, grad: bool, data: bool, limit: int) -> dict[str, Any]:
    """Applies every method to two parameters of two units, and returns what came of it and of the weights."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        one, other = module.blocks[0].up.weight, module.blocks[1].down.weight
        before = one.clone(), other.clone()
    for name, number in calls(limit):
        with torch.set_grad_enabled(grad):
            first, second = (one.data, other.data) if data else (one, other)
            args = list(arguments(first, second))[number]
            torch.manual_seed(number)
            try:
                result = getattr(first, name)(*args)
                kept = _frozen(list(result) if inspect.isgenerator(result) else result)
            except (RuntimeError, NotImplementedError) as error:
                kept = "refused" if "offloaded" in str(error) else type(error).__name__
        with torch.no_grad():
            found[f"{name} {number}"] = [kept, one.clone(), other.clone()]
            one.copy_(before[0])
            other.copy_(before[1])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1, pytest.param(18, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("states", "grad", "data"), [("host", False, False), ("ssd", True, False), ("host", False, True)]
)
def test_every_method_of_tensors(tmp_path: Path, states: str, grad: bool, data: bool, limit: int) -> None:
    """Results, weights after each, and weights after the next step are plain Lightning's."""
    runs: list[dict[str, Any]] = []

    def act(module: Any) -> None:
        if len(runs) < 2 and module.trainer.global_step == 1:
            runs.append(outcomes(module, grad=grad, data=data, limit=limit))

    actual, expected = (fit(tmp_path, Toy("on_train_batch_end", act), kind) for kind in (states, None))
    ours, plain = runs
    assert {key for key, value in plain.items() if not _same(ours[key], value)} == set()
    assert len(plain) > 300
    assert_same(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_methods_that_would_change_what_a_parameter_is_are_refused_by_its_name(tmp_path: Path) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        "set_": (), "t_": (), "squeeze_": (), "unsqueeze_": (0,), "swapaxes_": (0, 1),
        "transpose_": (0, 1), "swapdims_": (0, 1), "as_strided_": ((2,), (1,)), "storage": (), "data_ptr": (),
    }  # fmt: skip

    def act(module: Any) -> None:
        weight = module.blocks[0].up.weight
        for name, args in calls.items():
            if name != "squeeze_":  # it changes nothing of this shape
                with pytest.raises(RuntimeError, match="which is offloaded"), torch.no_grad():
                    getattr(weight, name)(*args)
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*whole_weights"):
            weight.data = torch.zeros(3)
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*strides"):
            weight.data = weight.data.clone().t()
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*strides"):
            weight.data = torch.zeros(()).expand(8, 8)
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(8, 8)))
        with pytest.raises(RuntimeError, match=r"`\.clone\(\)`"):
            weight.detach().requires_grad_()
        with pytest.raises(ValueError, match="read-only"):
            weight.detach().numpy()[0] = 1

    assert_same(
        fit(tmp_path, Toy("on_train_batch_end", act), "host"),
        fit(tmp_path, Toy("on_train_batch_end", lambda _: None), None),
    )


# ---- what people do ----


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


@pytest.mark.parametrize("hook", ["on_train_batch_end", pytest.param("on_fit_start", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("states", ["host", pytest.param("ssd", marks=pytest.mark.thorough)])
def test_weights(tmp_path: Path, states: str, hook: str, action: Action) -> None:
    compare(tmp_path, lambda: Toy(hook, action), states)


def test_all_that_people_do_with_states_on_ssd(tmp_path: Path) -> None:
    def act(module: Any) -> Any:
        return [action(module) for action in ACTIONS if action is not _prune]

    compare(tmp_path, lambda: Toy("on_train_batch_end", act, torch.optim.AdamW, lr=0.01), "ssd")


def _set_rows(x: Tensor, p: Tensor) -> Tensor:
    x[:2] = p
    return x


IN_PLACE = {
    "__iadd__": lambda x, p: x.__iadd__(p),
    "__imul__": lambda x, p: x.__imul__(p),
    "__setitem__": _set_rows,
    "add_": lambda x, p: x.add_(p, alpha=2.0),
    "sub_": lambda x, p: x.sub_(p),
    "mul_": lambda x, p: x.mul_(p),
    "div_": lambda x, p: x.div_(p + 3),
    "copy_": lambda x, p: x.copy_(p),
    "lerp_": lambda x, p: x.lerp_(p.expand_as(x), 0.5),
    "addcmul_": lambda x, p: x.addcmul_(p, p),
    "addcdiv_": lambda x, p: x.addcdiv_(p, p.abs() + 1),
    "masked_scatter_": lambda x, p: x.masked_scatter_(torch.ones_like(x[:1], dtype=torch.bool), p.repeat(len(x))),
    "index_copy_": lambda x, p: x.index_copy_(0, torch.tensor([0]), p[None]),
    "index_add_": lambda x, p: x.index_add_(0, torch.tensor([1]), p[None]),
    "addr_": lambda x, p: x.addr_(torch.ones(len(x)), p),
    "hypot_": lambda x, p: x.hypot_(p),
    "_foreach_add_": lambda x, p: (torch._foreach_add_([x], [p]), x)[1],
    "out": lambda x, p: torch.mul(x.detach(), p.detach(), out=torch.empty_like(x)) + x,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_that_write_a_parameter_into_another_tensor(tmp_path: Path, name: str) -> None:
    """`x += p`: the tensor is the user's, and the parameter has a gradient, in its unit's forward and outside of it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.linspace(0.5, 1.5, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = IN_PLACE[name](self.linear(x).clone(), self.shift)
            return result

    class Shifting(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(Shifted())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = IN_PLACE[name](super().forward(x).clone(), self.blocks[2].shift)
            return result

    for states in PLACES:
        compare(tmp_path, Shifting, states)


def test_gradients_of_weights_in_16_bits_are_refused(tmp_path: Path) -> None:
    """`torch.autograd.grad` would return another gradient than in plain training."""
    with pytest.raises(RuntimeError, match=r"`torch.autograd.grad`.*blocks.0.up.weight.*states='gpu'"):
        fit(tmp_path, Toy("on_train_batch_end", _graph), "host", precision="bf16-mixed")


@pytest.mark.parametrize("states", PLACES)
def test_an_alias_keeps_values_that_are_replaced(tmp_path: Path, states: str) -> None:
    """Aliases from before `.data` is set keep the old values, and have no effect; later ones are live."""

    def act(module: Any) -> Any:
        weight = module.blocks[0].up.weight
        aliases = module.__dict__.setdefault("aliases", [])
        with torch.no_grad():
            aliases += [weight.data, weight.t()]
            weight.data = weight.data * 0.5
            aliases += [weight.data]
            for number, alias in enumerate(aliases):
                alias[number % 8] += number + 1
        return [alias.detach().clone() for alias in aliases]

    compare(tmp_path, lambda: Toy("on_train_batch_end", act), states)


def test_an_alias_is_live(tmp_path: Path) -> None:
    """It shows the weights of the moment, and what is written to it counts, as long as it is kept."""

    def act(module: Any) -> Any:
        if not hasattr(module, "aliases"):
            weight = module.blocks[0].up.weight
            with torch.no_grad():
                module.aliases = [weight.data, weight.detach().view(-1)[3:], weight.t(), weight[1]]
        with torch.no_grad():
            module.aliases[1][0] += 1
            module.aliases[3].mul_(0.5)
        return [alias.detach().clone() for alias in module.aliases]

    compare(tmp_path, lambda: Toy("on_train_batch_end", act), "host")
    compare(tmp_path, lambda: Toy("on_train_batch_end", act), "ssd")
