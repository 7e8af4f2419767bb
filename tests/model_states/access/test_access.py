"""User code that reads and writes offloaded weights, against plain Lightning."""

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.access import ACTIONS, PLACES, Action, Toy, _frozen, _graph, _prune, compare, fit
from tests.support.compare import assert_same, same
from tests.support.models import BlocksModel, Model
from tests.support.products import thorough
from tests.support.states import loader, offloading
from tests.support.trainings import rows, train

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
    """Returns methods with the numbers of arguments, at most `limit` for each, that they accept or refuse by value."""
    found: list[tuple[str, int]] = []
    for name in methods():
        accepted = []
        for number in range(18):
            first, second = torch.rand(8, 8), torch.rand(8, 8)
            try:
                getattr(first, name)(*list(arguments(first, second))[number])
            except Exception:  # any error of a method for arguments of other types
                continue
            accepted.append((name, number))
        found += accepted[:limit]
    return found


def outcomes(module: Any, *, grad: bool, data: bool, limit: int) -> dict[str, Any]:
    """Applies every method to two parameters of two units, and returns the outcomes and the weights."""
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


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1, pytest.param(18, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("states", "grad", "data"), [("host", False, False), ("ssd", True, False), thorough("host", False, True)]
)
def test_every_method_of_tensors(tmp_path: Path, states: str, grad: bool, data: bool, limit: int) -> None:
    """Results, weights after each method, and weights after the next step are plain Lightning's."""
    runs: list[dict[str, Any]] = []

    def act(module: Any) -> None:
        if len(runs) < 2 and module.trainer.global_step == 1:
            runs.append(outcomes(module, grad=grad, data=data, limit=limit))

    actual, expected = (fit(tmp_path, Toy("on_train_batch_end", act), kind) for kind in (states, None))
    ours, plain = runs
    assert {key for key, value in plain.items() if not same(ours[key], value)} == set()
    assert len(plain) > 300
    assert_same(actual, expected)


def test_forward_mode_over_a_module(tmp_path: Path) -> None:
    """The unit's weights are copied to the device while `torch.func` transforms the forward that needs them."""

    class Derivative(BlocksModel):
        def loss(self, batch: Tensor) -> Tensor:
            value, derivative = torch.func.jvp(self, (batch,), (torch.ones_like(batch),))
            return (value - derivative).square().mean()  # type: ignore[no-any-return]

    expected = train(tmp_path, "auto", Derivative(), rows(3))
    assert_same(train(tmp_path, offloading(), Derivative(), rows(3)), expected)


def test_operators_on_weights_inside_of_a_transform_name_a_remedy(tmp_path: Path) -> None:
    class Scaled(BlocksModel):
        cloned = False

        def loss(self, batch: Tensor) -> Tensor:
            weight: Any = self.blocks[0].norm.weight
            scale = (weight.clone() if self.cloned else weight).view(-1)
            total = torch.func.vmap(lambda row: (row * scale).sum())(self(batch))
            return total.square().mean()  # type: ignore[no-any-return]

    class Remedied(Scaled):
        cloned = True

    with pytest.raises(RuntimeError) as caught:
        train(tmp_path, offloading(), Scaled(), rows(3))
    assert any("Clone the weights before the transform" in note for note in caught.value.__notes__)
    assert_same(train(tmp_path, offloading(), Remedied(), rows(3)), train(tmp_path, "auto", Remedied(), rows(3)))


@pytest.mark.parametrize(("precision", "states"), [("32-true", "ssd"), ("bf16-mixed", "host")])
def test_modules_and_weights_inside_of_vmap(tmp_path: Path, precision: Any, states: str) -> None:
    """Autocast casts the arguments of products, but not of the operators that `vmap` divides a linear layer into."""

    class Mapped(BlocksModel):
        def loss(self, batch: Tensor) -> Tensor:
            weight, bias = self.blocks[1].up.weight, self.blocks[0].norm.weight
            outputs = torch.func.vmap(self)(batch)
            products = torch.func.vmap(lambda row: nn.functional.linear(row * bias, weight))(batch)
            return outputs.float().square().mean() + products.float().square().mean()

    expected = train(tmp_path, "auto", Mapped(), rows(3), precision=precision)
    assert_same(train(tmp_path, offloading(states), Mapped(), rows(3), precision=precision), expected)


@pytest.mark.filterwarnings("ignore")
def test_methods_that_would_replace_a_parameters_memory_are_refused_by_its_name(tmp_path: Path) -> None:
    calls: dict[str, tuple[Any, ...]] = {
        "set_": (), "t_": (), "squeeze_": (), "unsqueeze_": (0,), "swapaxes_": (0, 1),
        "transpose_": (0, 1), "swapdims_": (0, 1), "as_strided_": ((2,), (1,)), "storage": (), "data_ptr": (),
    }  # fmt: skip

    def act(module: Any) -> None:
        weight = module.blocks[0].up.weight
        for name, args in calls.items():
            if name != "squeeze_":  # it changes nothing for this shape
                with pytest.raises(RuntimeError, match="which is offloaded"), torch.no_grad():
                    getattr(weight, name)(*args)
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*before `fit`, in `configure_model`"):
            weight.data = torch.zeros(3)
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*strides"):
            weight.data = weight.data.clone().t()
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.*strides"):
            weight.data = torch.zeros(()).expand(8, 8)
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(8, 8)))
        with pytest.raises(RuntimeError, match=r"`\.clone\(\)`"):
            weight.detach().requires_grad_()

    assert_same(
        fit(tmp_path, Toy("on_train_batch_end", act), "host"),
        fit(tmp_path, Toy("on_train_batch_end", lambda _: None), None),
    )


def test_blocks_may_be_compiled_until_training_begins(tmp_path: Path) -> None:
    class Compiled(Toy):
        hook = "setup"

        def compile_blocks(self, hook: str) -> None:
            if hook == self.hook:
                for block in self.blocks:
                    block.compile(backend="aot_eager")

        def setup(self, stage: str) -> None:
            self.compile_blocks("setup")

        def on_fit_start(self) -> None:
            self.compile_blocks("on_fit_start")

    compare(tmp_path, Compiled, "host")
    late = Compiled()
    late.hook = "on_fit_start"
    with pytest.raises(RuntimeError, match="in `setup` at the latest"):
        fit(tmp_path, late, "host")


# ---- typical user code ----


@pytest.mark.parametrize("hook", ["on_train_batch_end", pytest.param("on_fit_start", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("states", ["host", pytest.param("ssd", marks=pytest.mark.thorough)])
def test_weights(tmp_path: Path, states: str, hook: str, action: Action) -> None:
    compare(tmp_path, lambda: Toy(hook, action), states)


@pytest.mark.parametrize("precision", ["32-true", thorough("bf16-mixed")])
def test_all_that_people_do_with_states_on_ssd(tmp_path: Path, precision: Any) -> None:
    # In bf16-mixed, gradients that `torch.autograd.grad` returns are those of 16-bit weights.
    left_out = {_prune, _graph} if precision == "bf16-mixed" else {_prune}

    def act(module: Any) -> Any:
        return [action(module) for action in ACTIONS if action not in left_out]

    make = functools.partial(Toy, "on_train_batch_end", act, torch.optim.AdamW, lr=0.01)
    compare(tmp_path, make, "ssd", precision=precision)


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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_that_write_a_parameter_into_another_tensor(tmp_path: Path, name: str) -> None:
    """`x += p`: the user's tensor is changed, and the parameter gets a gradient, in its unit's forward and outside."""

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


STRIDED = {
    "as_strided": lambda p, offset: torch.as_strided(p, (2, 2), (2, 1), offset),
    "method": lambda p, offset: p.as_strided((4,), (1,), storage_offset=offset),
    "copy": lambda p, offset: torch.as_strided_copy(p, (4,), (1,), offset),
    "scatter": lambda p, offset: torch.as_strided_scatter(p, torch.ones(4), (4,), (1,), offset),
    "of a view": lambda p, offset: p.view(-1)[1:].as_strided((4,), (1,), offset),
    "of an alias": lambda p, offset: p.data.as_strided((4,), (1,), offset),
    "empty": lambda p, offset: p.as_strided((0,), (1,), offset),
}
"""Functions that address elements by their offset in the storage, which a weight shares with others of its unit."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("where", ["on_train_batch_end", "forward"])
def test_offsets_in_a_storage_address_the_weight_itself(tmp_path: Path, states: str, where: str) -> None:
    def act(module: Any) -> Any:
        results = []
        for parameter in module.parameters():
            for function in STRIDED.values():
                for offset in (None, 0, 1, 3, parameter.numel() - 4, parameter.numel() - 3, -1):
                    try:
                        results.append(function(parameter, offset).detach().clone())
                    except RuntimeError:  # outside of the storage
                        results.append(None)
        return results

    class Strided(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(act(self))
            return super().forward(x)

    def run(kind: str | None) -> list[Any]:
        nonlocal seen
        seen = []
        toy = Toy(where, act) if where != "forward" else Toy()
        if where == "forward":
            toy.blocks.append(Strided(8, 8))
        fit(tmp_path, toy, kind)
        return [result for results in (toy.seen[1::2] if where != "forward" else seen) for result in results]

    seen: list[Any] = []
    ours, plain = run(states), run(None)
    assert len(plain) > 30
    assert same(ours, plain)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start"])
def test_gradients_of_weights_that_have_16_bits_on_the_device(tmp_path: Path, hook: str) -> None:
    """`torch.autograd.grad` returns fp32."""

    def act(module: Any) -> Any:
        one, other = module.blocks[0].up.weight, module.blocks[1].up.weight
        loss = one.square().sum() + (one @ other).square().sum()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss + (one @ other).float().sum() + module(torch.ones(2, 8)).sum()
        return torch.autograd.grad(loss, [one, other])

    compare(tmp_path, lambda: Toy(hook, act), "host", precision="bf16-mixed")


class InFp32(torch.autograd.Function):
    """A linear layer in fp32 under autocast, whose gradients are in fp32, too."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class LinearInFp32(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return InFp32.apply(x, self.weight)


class WithFunction(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up = LinearInFp32(8, 8)
        self.blocks[1].down = LinearInFp32(8, 8)


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}])
def test_gradients_of_an_autograd_function_in_fp32(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Weights that are on the device in 16 bits get gradients that a user's function computes in fp32 unrounded."""
    compare(tmp_path, WithFunction, "host", precision="bf16-mixed", **arguments)


class OfShape(torch.autograd.Function):
    """Reads only the shape of a weight in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.linspace(0, 1, 64, device=gradient.device).view(ctx.shape) * gradient.sum() / 3


class OfRows(torch.autograd.Function):
    """Gives weights to an operator in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        rows = torch.cat(weights)
        ctx.save_for_backward(x, rows)
        return x @ rows.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, rows = ctx.saved_tensors
        return gradient.float() @ rows, *(gradient.float().T @ x / 3).split(8)


class OfContext(torch.autograd.Function):
    """Has a forward without a context, and a decorator, and renames its arguments."""

    @staticmethod
    @torch.no_grad()
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        renamed, weight = weight, x
        return weight @ renamed.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.float(), gradient.float().t() @ x.float() / 3


@pytest.mark.parametrize(("function", "states"), [(OfShape, "host"), (OfRows, "ssd"), (OfContext, "host")])
def test_gradients_of_an_autograd_function_that_multiplies_by_no_weight(
    tmp_path: Path, function: Any, states: str
) -> None:
    class Applied(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            weights = [block.up.weight for block in self.blocks][: 2 if function is OfRows else 1]
            return super().loss(batch) + function.apply(batch, *weights).float().square().mean()

    compare(tmp_path, Applied, states, precision="bf16-mixed")


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda weight, _: torch.mm(weight, weight),
    "linear": lambda weight, _: nn.functional.linear(weight, weight),
    "addmm": lambda weight, _: torch.addmm(weight, weight, mat2=weight),
    "mv": lambda weight, x: torch.mv(weight, x[0]),
    "mv_method": lambda weight, x: weight.mv(x[0]),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_weight_elsewhere(tmp_path: Path, name: str, states: str) -> None:
    """Autocast casts each argument of a product, so that gradients of a weight given twice are summed in fp32.

    On a CPU it casts nothing for `mv`.
    """

    class Multiplied(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(8, 8)

        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + PRODUCTS[name](self.square.weight, batch).float().square().mean()

    compare(tmp_path, Multiplied, states, precision="bf16-mixed")


def _of_a_parameter(module: Any) -> None:
    nn.Parameter(module.blocks[0].up.weight)


def _of_its_alias(module: Any) -> None:
    nn.Parameter(module.blocks[0].up.weight.detach())


def _with_weight_norm(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.blocks[0].up)


def _of_another_dtype(module: Any) -> None:
    module.blocks[0].up.weight.data = torch.zeros(8, 8, dtype=torch.float64)


@pytest.mark.parametrize("change", [_of_a_parameter, _of_its_alias, _with_weight_norm, _of_another_dtype])
def test_a_change_that_no_training_allows_names_the_time_before_it(tmp_path: Path, change: Any) -> None:
    with pytest.raises(RuntimeError, match="blocks.0.up.weight.*before `fit`, in `configure_model`"):
        fit(tmp_path, Toy("on_train_epoch_start", change), "host")


class Tagged(Model):
    """Has parameters with attributes, and records those of copies and pickles amid the training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def setup(self, stage: str) -> None:
        for index, (name, parameter) in enumerate(self.named_parameters()):
            vars(parameter).update(number=index, scale=torch.full((2,), index), groups={"names": [name]})

    def on_train_batch_end(self, *_: Any) -> None:
        pickled = pickle.loads(pickle.dumps(self.blocks))
        saved = io.BytesIO()
        torch.save(self.blocks[0].up.weight, saved)
        saved.seek(0)
        parameters = [
            *(copied for parameter in self.parameters() for copied in (copy.copy(parameter), copy.deepcopy(parameter))),
            *pickled.parameters(),
            torch.load(saved, weights_only=False),
        ]
        self.seen.append([(type(one), one.requires_grad, vars(one)) for one in parameters])


@pytest.mark.parametrize(("states", "precision"), [("host", "32-true"), ("ssd", "bf16-mixed"), ("auto", "bf16-true")])
def test_copies_and_pickles_have_the_attributes_of_parameters(tmp_path: Path, states: str, precision: Any) -> None:
    def run(strategy: Any) -> Any:
        return train(tmp_path, strategy, Tagged(), loader(2), max_epochs=1, precision=precision).seen

    limits = {"gpu_memory": "90kB"} if states == "auto" else {}
    assert same(run(offloading(states, **limits)), run("auto"))
