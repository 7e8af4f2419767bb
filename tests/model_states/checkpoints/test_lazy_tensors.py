"""Lazy tensors of checkpoints and of optimizer states on SSDs: a function reads their values, or raises an error."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.model_states.checkpoints.lazy import LazyTensor
from tests.support.compare import same
from tests.support.models import Model, adamw
from tests.support.states import host, loader, ssd
from tests.support.trainings import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")

VALUES = torch.randn(4, 6).t()


def make() -> LazyTensor:
    return LazyTensor.make(VALUES, VALUES.clone)


def _without_torch_functions(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def run(value: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(value)

    return run


def _assigned(value: Tensor) -> Any:
    layer = nn.Linear(4, 6, bias=False)
    layer.load_state_dict({"weight": value}, assign=True)
    assert isinstance(layer.weight, nn.Parameter)
    layer(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert layer.weight.grad is not None
    return layer.weight.grad, layer.weight.detach(), pickle.loads(pickle.dumps(layer)).half().weight.detach()


def _parameter(value: Tensor, **arguments: Any) -> Any:
    parameter = nn.Parameter(value, **arguments)
    copied = copy.deepcopy(parameter)
    assert isinstance(parameter, nn.Parameter) and isinstance(copied, nn.Parameter)
    return parameter.requires_grad, parameter.is_leaf, parameter.detach(), copied.detach()


def _in_place(value: Tensor) -> Any:
    value.add_(1)
    return value[0] + 0, value


def _shared(value: Tensor) -> Any:
    with torch.no_grad():
        torch.Tensor(value).mul_(2)
        value.as_subclass(Tensor).add_(1)
    return value + 0


READERS: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": torch.tensor,
    "torch.as_tensor": lambda value: torch.as_tensor(value) + 0,
    "torch.Tensor": torch.Tensor,
    "torch.FloatTensor": torch.FloatTensor,
    "new_tensor": torch.zeros(1).new_tensor,
    "set_": lambda value: torch.zeros(1).set_(value),  # type: ignore[call-overload]
    "as_subclass": lambda value: value.as_subclass(Tensor),
    "_make_subclass": lambda value: torch.Tensor._make_subclass(Tensor, value),
    "data of a lazy tensor": lambda value: value.data,
    "copy_": lambda value: torch.zeros(6, 4).copy_(value),
    "__setitem__": lambda value: torch.zeros(2, 6, 4).__setitem__(0, value),
    "stack": lambda value: torch.stack([torch.ones(6, 4), value]),
    "an operator without torch functions": _without_torch_functions(lambda value: value * 2),
    "torch.tensor without torch functions": _without_torch_functions(torch.tensor),
    "numpy": lambda value: value.numpy(),
    "np.asarray": np.asarray,
    "from_dlpack": torch.from_dlpack,
    "tolist": lambda value: value.tolist(),
    "repr": repr,
    "items": lambda value: [float(row.sum()) for row in value],
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "storage": lambda value: torch.zeros(1).set_(value.untyped_storage())[:24],  # type: ignore[call-overload]
    "share_memory_": lambda value: value.share_memory_(),
    "requires_grad_": lambda value: torch.autograd.grad((value.requires_grad_() ** 2).sum(), value),
    "detach": lambda value: value.detach(),
    "nn.Parameter": _parameter,
    "nn.Parameter, frozen": lambda value: _parameter(value, requires_grad=False),
    "load_state_dict(assign=True)": _assigned,
    "in place": _in_place,
    "shared memory": _shared,
    "metadata": lambda value: (value.device, value.is_cpu, value.is_meta, value.shape, value.stride(), value.dtype),
}
"""Functions that use a tensor; the first ones read it in C++."""


@pytest.mark.parametrize("reader", READERS)
def test_every_function_reads_the_values(reader: str) -> None:
    """Once, and a later function finds what the first one has written."""
    reads: list[Tensor] = []

    def read() -> Tensor:
        reads.append(VALUES)
        return VALUES

    lazy, plain = LazyTensor.make(VALUES, read), VALUES.clone()
    assert same(READERS[reader](lazy), READERS[reader](plain))
    assert same(lazy.detach() * 2, plain.detach() * 2) and type(lazy) is Tensor
    assert len(reads) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda value: setattr(nn.Parameter(torch.zeros(6, 4)), "data", value),
        lambda value: setattr(torch.zeros(6, 4), "data", value),
        torch.utils.dlpack.to_dlpack,
    ],
    ids=["data of a parameter", "data of a tensor", "to_dlpack"],
)
def test_functions_that_call_no_hook_raise_an_error_until_the_values_are_read(use: Callable[[Tensor], Any]) -> None:
    lazy = make()
    with pytest.raises(RuntimeError, match=r"set_data|data pointer"):
        use(lazy)
    use(lazy.detach())
    use(lazy)
    assert same(lazy + 0, VALUES)


def test_the_error_of_an_assignment_to_data_names_the_remedy(tmp_path: Path) -> None:
    class Assigning(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name, value in checkpoint["state_dict"].items():
                nn.Parameter(torch.zeros_like(self.get_parameter(name), device="cpu")).data = value

    with pytest.raises(RuntimeError, match=r"set_data") as raised:
        make_trainer(tmp_path, host(), max_epochs=1, enable_checkpointing=True).fit(Assigning(), loader())
    assert any("Assign `value.detach()`" in note for note in raised.value.__notes__)


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "to(device)": lambda value: value.to("cpu"),
    "to(device=)": lambda value: value.to(device=torch.device("cpu")),
    "to(device, non_blocking=)": lambda value: value.to("cpu", non_blocking=True),
    "to(dtype)": lambda value: value.to(torch.float16),
    "to(dtype=)": lambda value: value.to(dtype=torch.float16),
    "to(dtype, non_blocking, copy)": lambda value: value.to(torch.float32, False, True),
    "to(device, dtype)": lambda value: value.to("cpu", torch.float16),
    "to(device, same dtype)": lambda value: value.to("cpu", torch.float32),
    "to(device, dtype=)": lambda value: value.to("cpu", dtype=torch.bfloat16),
    "to(device, dtype, non_blocking)": lambda value: value.to(torch.device("cpu"), torch.float32, True),
    "to(device, dtype, non_blocking, copy)": lambda value: value.to("cpu", torch.float32, False, True),
    "to(device, None, True)": lambda value: value.to("cpu", None, True),
    "to(device, non_blocking)": lambda value: value.to("cpu", True),  # type: ignore[call-overload]
    "to(device, copy=)": lambda value: value.to("cpu", copy=True),
    "to(memory_format=)": lambda value: value.to(memory_format=torch.contiguous_format),
    "to(tensor)": lambda value: value.to(torch.zeros(1, dtype=torch.float16)),
    "to(lazy)": lambda value: torch.zeros(1, dtype=torch.float16).to(value),
    "cpu": lambda value: value.cpu(),
    "cpu(memory_format)": lambda value: value.cpu(torch.contiguous_format),
    "cpu(memory_format=)": lambda value: value.cpu(memory_format=torch.contiguous_format),
    "float": lambda value: value.float(),
    "half": lambda value: value.half(),
    "half(memory_format)": lambda value: value.half(torch.contiguous_format),
    "bfloat16": lambda value: value.bfloat16(),
    "double": lambda value: value.double(),
    "type": lambda value: value.type(),
    "type(dtype)": lambda value: value.type(torch.float16),
    "type(name)": lambda value: value.type("torch.HalfTensor"),
    "type(dtype, non_blocking)": lambda value: value.type(torch.float64, True),
    "type_as": lambda value: value.type_as(torch.zeros(1, dtype=torch.float16)),
}
"""All forms of the functions that convert tensors."""


def _outcome(function: Callable[[Tensor], Any], value: Tensor) -> Any:
    try:
        result = function(value)
    except TypeError as error:
        return str(error).splitlines()[0]
    return (result + 0, result.stride(), result is value) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_have_the_results_of_ordinary_tensors(conversion: str) -> None:
    assert same(_outcome(CONVERSIONS[conversion], make()), _outcome(CONVERSIONS[conversion], VALUES.clone()))


def test_tensors_are_freed_after_every_use() -> None:
    tensors = [make() for _ in range(3)]
    references = [weakref.ref(tensor) for tensor in tensors]
    torch.tensor(tensors[1])
    tensors[2].add_(1)
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def _read_all(tensors: list[Tensor]) -> list[Tensor]:
    """Reads each tensor by another function that calls no torch function of it, or by one that makes a parameter."""
    readers: list[Callable[[Tensor], Tensor]] = [
        torch.tensor,
        torch.Tensor,
        lambda value: value.new_tensor(value),
        lambda value: torch.zeros(1).set_(value),  # type: ignore[call-overload]
        lambda value: value.as_subclass(Tensor),
        lambda value: nn.Parameter(value).detach(),
        lambda value: value.to("cpu", torch.float16),
    ]
    return [readers[index % len(readers)](value).clone() for index, value in enumerate(tensors)]


def _matrices(states: dict[Any, Any]) -> list[Tensor]:
    return [value for state in states.values() for value in state.values() if value.dim()]


class Reading(Model):
    """Reads the checkpoint in `on_save_checkpoint`."""

    exported: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        other = copy.deepcopy(checkpoint["hyper_parameters"]["make"])()
        self.exported = _read_all(list(weights.values()))
        self.exported += _read_all(_matrices(checkpoint["optimizer_states"][0]["state"]))
        other.load_state_dict(weights, assign=True)
        self.exported += [parameter.detach().clone() for parameter in other.parameters()]


@pytest.mark.parametrize("make_strategy", [host, ssd])
def test_user_code_reads_plain_lightnings_values(tmp_path: Path, make_strategy: Any) -> None:
    """In `on_save_checkpoint`, and in the optimizer after training."""

    def run(strategy: Any) -> Any:
        model = Reading(adamw)
        model.save_hyperparameters({"make": Model})
        trainer = make_trainer(tmp_path, strategy, max_epochs=1)
        trainer.fit(model, loader())
        states = _read_all(_matrices(dict(trainer.optimizers[0].state)))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return states, model.exported, torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"]

    assert same(run(make_strategy()), run("auto"))
