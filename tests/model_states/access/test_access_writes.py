"""Functions that write to offloaded weights, and user code in random order, in every precision."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.access import PLACES, Block, Toy, compare, fit, loader
from tests.support.compare import assert_same, same
from tests.support.garbage import collect
from tests.support.trainings import make_trainer

INDEX = torch.tensor([0, 3, 3])
ROWS = torch.linspace(-2, 2, 64).view(8, 8)


def _embedding(weight: Tensor) -> Tensor:
    return F.embedding(INDEX, weight, max_norm=0.1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.kaiming_uniform_ by name": lambda p: nn.init.kaiming_uniform_(tensor=p, a=1.0),
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.uniform_": nn.init.uniform_,
    "init.normal_ by name": lambda p: nn.init.normal_(tensor=p, std=0.1),
    "init.constant_": lambda p: nn.init.constant_(p, 0.5),
    "init.constant_ by name": lambda p: nn.init.constant_(val=0.5, tensor=p),
    "init.zeros_": nn.init.zeros_,
    "init.eye_": nn.init.eye_,
    "init.orthogonal_": nn.init.orthogonal_,
    "init.sparse_": lambda p: nn.init.sparse_(p, 0.5),
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "embedding": _embedding,
    "embedding_bag": lambda p: F.embedding_bag(INDEX[None], p, max_norm=0.1),
    "embedding_renorm_": lambda p: torch.embedding_renorm_(p, INDEX, 0.1, 2.0),
    "F.relu": lambda p: F.relu(p, inplace=True),
    "F.dropout": lambda p: F.dropout(p, 0.5, inplace=True),
    "F.hardtanh_": lambda p: F.hardtanh_(p, -0.1, 0.1),
    "relu_ by name": lambda p: torch.relu_(input=p),
    "clamp_ by name": lambda p: torch.clamp_(min=-0.1, input=p),
    "mul_": lambda p: p.mul_(0.5),
    "add_ to itself": lambda p: p.add_(p),
    "add_ to its transpose": lambda p: p.add_(p.t()),
    "addmm_": lambda p: p.addmm_(ROWS, ROWS),
    "add, out": lambda p: torch.add(ROWS, 1, out=p),
    "mm, out": lambda p: torch.mm(ROWS, ROWS, out=p),
    "matmul, out": lambda p: torch.matmul(ROWS, p.t(), out=p),
    "_foreach_add_": lambda p: torch._foreach_add_([p, torch.ones(2)], 1),
    "_foreach_mul_ by name": lambda p: torch._foreach_mul_(scalar=0.5, self=[p]),
    "batch_norm": lambda p: F.batch_norm(ROWS, p.detach()[0], p.detach()[1], training=True),
    "view": lambda p: p.view(-1).mul_(0.5),
    "view, no_grad": lambda p: _no_grad(p.view(-1)).mul_(0.5),
    "index": lambda p: p.__setitem__(0, 1.0),
    "index of view": lambda p: p.t().__setitem__((slice(None), 2), ROWS[1]),
    "two views": lambda p: p[0].copy_(p[1]),
    "module.reset_parameters": lambda p: _linear(p).reset_parameters(),
    "out of einsum": lambda p: p.copy_(torch.einsum("ij,kj->ik", p, p)),
    "data": lambda p: p.data.addmm_(p.data, p.data),
    "_fused_adamw_": lambda p: _fused(p),
}


def _no_grad(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _linear(weight: Any) -> nn.Linear:
    linear = nn.Linear(8, 8, bias=False)
    linear.weight = weight
    return linear


def _fused(weight: Tensor) -> None:
    torch._fused_adamw_(
        [weight.detach()], [ROWS], [ROWS.abs()], [ROWS.abs()], [], [torch.tensor(2.0)], lr=0.1, beta1=0.9, beta2=0.9,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def outcome(module: Any, write: Callable[[Tensor], Any], alias: Tensor, grad: bool, autocast: bool) -> Any:
    """Returns the outcome of `write`: its result or error, and the weight and an alias of it afterwards."""
    weight, others = module.blocks[1].up.weight, [module.blocks[0].up.weight, module.target.up.weight]
    with torch.no_grad():
        before = weight.clone()
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            result = write(weight)
            result = result.detach().clone() if isinstance(result, Tensor) else None
        except (RuntimeError, ValueError) as error:
            result = type(error).__name__
    with torch.no_grad():
        found = [result, weight.clone(), alias.clone()]
    found += [(other * 1).detach() for other in others]  # the weight is evicted for them
    with torch.no_grad():
        found.append(weight.clone())
        weight.copy_(before)
    return result if isinstance(result, str) else found


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("states", PLACES)
def test_functions_that_write(tmp_path: Path, states: str, precision: Any) -> None:
    """Result, error, weight and aliases are plain Lightning's, however the weight is passed."""
    runs: list[dict[str, Any]] = []

    def act(module: Any) -> None:
        if module.trainer.global_step > 1:
            return
        weight = module.blocks[1].up.weight
        with torch.no_grad():
            alias = weight.t()
        runs.append(
            {
                f"{name}, grad={grad}, autocast={autocast}": outcome(module, write, alias, grad, autocast)
                for grad, autocast in itertools.product((True, False), repeat=2)
                for name, write in WRITES.items()
            }
        )

    for kind in (states, None):
        # In bf16-true, plain Lightning has no master weights, so that weights differ from the first step on.
        hook = "on_fit_start" if precision == "bf16-true" else "on_train_batch_end"
        fit(tmp_path, Toy(hook, act), kind, precision=precision)
    ours, plain = runs
    assert {key for key, value in plain.items() if not same(ours[key], value)} == set()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_operators_leave_no_cycle_of_references(tmp_path: Path, precision: Any) -> None:
    """A cycle would keep the weights on the device until the garbage collector runs."""
    operators = (torch.norm, torch.clone, torch.t, lambda p: p.chunk(2), lambda p: F.embedding(INDEX, p), Tensor.tolist)
    found: list[Any] = []

    def act(module: Any) -> None:
        if module.trainer.global_step > 1:
            return
        while collect():  # finalizers of earlier tests' objects leave further garbage
            pass
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for operator, grad in itertools.product(operators, (True, False)):
                with torch.set_grad_enabled(grad):
                    operator(module.blocks[1].up.weight)
            collect()
            found.append([type(item) for item in gc.garbage if issubclass(type(item), Tensor)])
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    fit(tmp_path, Toy("on_train_batch_end", act), "host", precision=precision)
    assert found == [[]]


def test_a_view_that_an_evaluation_keeps(tmp_path: Path) -> None:
    """Eviction gives the weights new memory, which the training after the evaluation uses."""

    class Keeping(Toy):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.kept = self.blocks[0].kept
            return result

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.append(self.loss(batch[0]).item())

    class KeepingView(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up.weight[1]
            return super().forward(x)

    def run(kind: str | None) -> Any:
        module = Keeping()
        module.blocks[0].__class__ = KeepingView
        chosen: Any = "auto" if kind is None else SSDOffloadStrategy(states=kind, min_bytes=1, gpu_memory="1B")  # type: ignore[arg-type]
        trainer = make_trainer(tmp_path, chosen)
        trainer.fit(module, loader(), loader())
        return module

    assert_same(run("host"), run(None))


def backward_through_aliases(module: Any) -> Any:
    """Gives new gradients, through new views."""
    module.zero_grad()
    loss = module.blocks[0].up.weight.view(-1).square().sum() + module.blocks[1].down.weight.T[2].sum()
    loss.backward()
    return module.blocks[0].up.weight.grad.clone(), module.blocks[1].down.weight.grad.clone()


@pytest.mark.parametrize(("hook", "states"), [("on_fit_start", "host"), ("on_train_batch_start", "ssd")])
def test_a_backward_before_that_of_a_micro_batch(tmp_path: Path, states: str, hook: str) -> None:
    """It reaches some of the parameters, and its gradients are not counted among those of the micro-batch."""
    compare(tmp_path, lambda: Toy(hook, backward_through_aliases, lr=2**-5), states)


def _merge(module: Any) -> None:
    """As `merge_adapter` of peft does: autograd would follow the new values, and not the weight."""
    for parameter in module.target.parameters():
        parameter.data += 0.1 * module.blocks[0].up.bias
    module.blocks[1].up.weight.data[:, 1].mul_(module.blocks[0].up.bias)
    torch._foreach_add_([parameter.data for parameter in module.blocks.parameters()], module.blocks[1].up.bias.sum())


def _merge_and_read(module: Any) -> Any:
    values = module.blocks[1].up.weight.data
    values.t().add_(module.blocks[0].up.weight)
    values.mul_(0.5)
    return [values.detach() + 1, values.sum(), values[0] * 2]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("action", [_merge, _merge_and_read])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad"])
def test_tensors_that_require_a_gradient_are_written_to_data(
    tmp_path: Path, hook: str, action: Any, states: str, precision: Any
) -> None:
    if hook == "on_before_zero_grad" and precision == "bf16-mixed":
        hook = "on_train_batch_end"  # offloaded weights can't be changed between their forward and backward there
    compare(tmp_path, lambda: Toy(hook, action), states, precision=precision)


def _earlier_view(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    row = values[1].view(2, 4)
    values += bias
    return row


def _view_of_a_view(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    values[0].view(2, 4).add_(bias.view(2, 4))
    return values


def _written_before_data_was_set(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    values += bias
    weight.data = weight.data.detach() * 0.5
    return values


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def _in_a_function(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    values += bias
    result: Tensor = _Identity.apply(values)
    return result


@pytest.mark.parametrize("write", [_earlier_view, _view_of_a_view, _written_before_data_was_set, _in_a_function])
def test_data_to_which_a_graph_was_written_is_not_differentiated(tmp_path: Path, write: Any) -> None:
    """A gradient of the written tensor would be lost."""

    class Written(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) + write(self.target.up.weight, self.blocks[0].up.bias).square().sum()

    fit(tmp_path, Written(), None)
    with pytest.raises(RuntimeError, match="target.up.weight.*were written.*`.clone\\(\\)`"):
        fit(tmp_path, Written(), "host")


def _data_of_before(weight: nn.Parameter, bias: Tensor) -> Tensor:
    before = weight.data
    weight.data += 0.1 * bias
    return before


def _detached_before(weight: nn.Parameter, bias: Tensor) -> Tensor:
    before = weight.detach()
    weight.data += 0.1 * bias
    return before


def _rows_of_before(weight: nn.Parameter, bias: Tensor) -> Tensor:
    rows = weight[:4]
    weight.data += 0.1 * bias
    return rows[1:]


def _written_after_data_was_set(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    weight.data = weight.data * 0.5
    values += 0.1 * bias
    return values


def _detached_in_place(weight: nn.Parameter, bias: Tensor) -> Tensor:
    values = weight.data
    values += 0.1 * bias
    return values.detach_()


@pytest.mark.parametrize(
    "write",
    [
        _data_of_before,
        _detached_before,
        _rows_of_before,
        _written_after_data_was_set,
        _detached_in_place,
    ],
)
def test_aliases_without_the_written_graph_are_used_in_differentiated_operators(tmp_path: Path, write: Any) -> None:
    """Only the tensor to which a graph was written has it in plain training, and views of that tensor."""

    class Written(Toy):
        def loss(self, batch: Tensor) -> Tensor:
            aliases = [write(block.up.weight, self.blocks[0].up.bias) for block in (self.target, self.blocks[1])]
            difference = self.blocks[1].up.weight[: len(aliases[0])] - aliases[0]
            return super().loss(batch) + difference.square().sum() + aliases[1].sum() * self.blocks[0].up.bias.sum()

    compare(tmp_path, Written, "host")


def _write_to_a_detached_weight(module: Any) -> None:
    module.blocks[1].up.weight.detach().mul_(module.blocks[0].up.bias)


def _write_and_continue(module: Any) -> None:
    with contextlib.suppress(RuntimeError):
        _write_to_a_detached_weight(module)


@pytest.mark.parametrize("states", PLACES)
def test_weights_are_whole_after_a_refused_write(tmp_path: Path, states: str) -> None:
    """Where user code catches the error, computing and stored weights are plain Lightning's."""
    compare(tmp_path, lambda: Toy("on_train_batch_start", _write_and_continue), states)
    with pytest.raises(RuntimeError, match=r"blocks.1.up.weight.*`.data`, or within `torch.no_grad\(\)`"):
        fit(tmp_path, Toy("on_train_batch_start", _write_to_a_detached_weight), states)
