"""While torch compiles code, weights of a unit have storages of their own over the memory that they share."""

import torch
from torch import Tensor, nn

from lightning_ssd.activations import offloaded_weights
from lightning_ssd.model_states.units.flat import FlatParameter
from tests.support.state_stores import CPU


def make_resident() -> tuple[FlatParameter, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(70))]
    flat = FlatParameter("flat", [(str(index), each) for index, each in enumerate(parameters)], torch.float32, CPU)
    flat.attach()
    flat.allocate().zero_()
    return flat, parameters


def is_reference(tensor: Tensor) -> bool:
    """Returns whether autograd would save a reference to a weight in place of the tensor."""
    return offloaded_weights(tensor.untyped_storage()) is not None


def test_weights_are_no_aliases_of_each_other_and_share_the_memory_of_the_unit() -> None:
    flat, (first, second) = make_resident()
    flat.use_own_storages()
    assert flat.has_own_storages and first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert first.storage_offset() == second.storage_offset() == 0
    with torch.no_grad():
        second.fill_(2)
    flat.attach()
    assert not flat.has_own_storages and first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert torch.equal(second, torch.full((70,), 2.0)) and torch.equal(first, torch.zeros(5, 3))
    assert is_reference(first) and is_reference(second)


def test_an_alias_that_outlives_the_compiled_call_is_an_ordinary_tensor_after_eviction() -> None:
    flat, (first, _) = make_resident()
    flat.use_own_storages()
    alias = first.detach()
    flat.attach()
    assert is_reference(alias)
    flat.evict()
    assert not is_reference(alias) and torch.equal(alias, torch.zeros(5, 3))
