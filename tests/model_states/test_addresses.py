"""Addresses and storages of offloaded weights: memory that has the values of plain training, or refused by name."""

import ctypes
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.access import PLACES, Toy, fit
from tests.support.compare import same


def _at(address: int, tensor: Tensor) -> Tensor:
    """Returns a copy of the elements that are addressed like those of `tensor` from `address` on."""
    assert tensor.dtype == torch.float32
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    elements = torch.tensor((ctypes.c_float * reach).from_address(address)[:])
    return elements.as_strided(tensor.size(), tensor.stride()).clone()


def _over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    return torch.empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _write(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        shared = _over(tensor.untyped_storage(), tensor).mul_(0.5)
        seen = tensor.detach().clone()
        shared.mul_(2)
    return seen


ADDRESSES: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": lambda p: _at(p.data_ptr(), p),
    "const_data_ptr": lambda p: _at(p.const_data_ptr(), p),  # type: ignore[attr-defined]
    "untyped_storage": lambda p: (_over(p.untyped_storage(), p), p.untyped_storage().nbytes()),
    "storage": lambda p: ([p.storage()[index] for index in range(4)], p.storage().size()),
    "_typed_storage": lambda p: _over(p._typed_storage()._untyped_storage, p),
    "storage_offset": lambda p: p.storage_offset(),
    "__array__": lambda p: np.asarray(p.detach()).copy(),
    "numpy": lambda p: p.detach().numpy().copy(),
    "__dlpack__": lambda p: torch.from_dlpack(p.detach()).clone(),
    "a write to the storage": _write,
}
"""Functions that give the memory of a tensor, and what can be read there."""

READ_ONLY = {"__array__", "numpy", "__dlpack__"}
"""They get a copy."""

TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "weight": lambda p: p,
    "detached": lambda p: p.detach(),
    "part": lambda p: p.data.view(-1)[3:7],
    "transposed": lambda p: p.detach().t() if p.dim() == 2 else p.detach(),
    "part of a view": lambda p: p.view(-1)[5:],
}


def test_all_functions_that_give_addresses_are_known() -> None:
    """A method of tensors whose name speaks of memory is in the table, or gives no address."""
    words = ("ptr", "storage", "address", "dlpack", "array")
    harmless = {"__array_priority__", "__array_wrap__", "__dlpack_device__", "__dlpack_c_exchange_api__",
                "storage_type", "_nested_tensor_storage_offsets", "__cuda_array_interface__"}  # fmt: skip
    names = {name for name, _ in inspect.getmembers_static(Tensor) if any(word in name for word in words)}
    assert names - harmless <= set(ADDRESSES)


def _seen(module: nn.Module) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, parameter in module.named_parameters(recurse=False):
        for view, make in TENSORS.items():
            for access, read in ADDRESSES.items():
                try:
                    result = read(make(parameter))
                except RuntimeError as error:
                    assert "which is offloaded" in str(error) and "whole_weights" in str(error)
                    result = "refused"
                results[f"{access} of {view} of {name}"] = result
    return results


class Addressed(nn.Linear):
    seen: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(_seen(self))
        return super().forward(x)


def train(path: Path, states: str | None, where: str, precision: Any, **how: Any) -> tuple[list[Any], Any]:
    module = Toy()
    block = Addressed(8, 8)
    block.seen = []
    if where == "forward":
        module.blocks.append(block)
    else:
        module.at(where, lambda module: _seen(module.blocks[0].up))
    fit(path, module, states, precision=precision, **how)
    return block.seen if where == "forward" else module.seen[1::2], module


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("where", ["forward", "on_train_batch_end"])
def test_memory_has_the_values_of_plain_training_or_is_refused(
    tmp_path: Path, states: str, precision: str, where: str
) -> None:
    (ours, trained), (plain, expected) = (train(tmp_path, kind, where, precision) for kind in (states, None))
    assert len(ours) == len(plain) == 3
    refused = {key for mine in ours for key, value in mine.items() if type(value) is str}
    if where == "forward":
        assert not refused
    else:  # the weights are evicted
        assert {key.split(" of ")[0] for key in ours[0].keys() - refused} == {*READ_ONLY, "storage_offset"}
    for mine, theirs in zip(ours, plain, strict=True):
        assert {key for key in mine.keys() - refused if not same(mine[key], theirs[key])} == set()
    assert same(dict(trained.state_dict()), dict(expected.state_dict()))


def test_addresses_are_valid_after_forwards_that_could_not_begin(tmp_path: Path) -> None:
    """A hook of user code that runs first raises an error, and the trace of a module is refused."""

    def fail(*_: Any) -> None:
        raise KeyError("of the user")

    def attempt(module: Any) -> None:
        block, row = module.blocks[0], torch.ones(1, 8)
        with block.register_forward_pre_hook(fail, prepend=True), pytest.raises(KeyError, match="of the user"):
            block(row)
        with pytest.raises(RuntimeError, match="`torch.jit.trace` of Block"):
            torch.jit.trace(block, row)

    module = Toy("on_train_batch_start", attempt)
    valid: list[bool] = []
    module.blocks[0].up.register_forward_pre_hook(
        lambda owner, _: valid.append(same(_at(owner.weight.data_ptr(), owner.weight), owner.weight.detach().clone()))
    )
    fit(tmp_path, module, "host")
    assert len(valid) >= 3 and all(valid)
