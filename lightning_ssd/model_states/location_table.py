"""The location table: tier and address of every tensor of the model states, read from the objects that own them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.optimizers import resident_states
from lightning_ssd.model_states.stores import MASTER, WEIGHT, StateStore
from lightning_ssd.model_states.units import Unit
from lightning_ssd.storage import FileRange
from lightning_ssd.types import Tier

StateClass = Literal["weight", "gradient", "optimizer state"]
"""Class of a tensor of the model states in plain training."""

LocationClass = StateClass | Literal["master weight"]
"""Class of a tensor of the model states. Master weights are those that are apart from the compute weights."""

TensorStates = Mapping[Tensor, Mapping[str, Any]]
"""States that optimizers keep of the tensors that they step, as `Optimizer.state` has them."""


@dataclass(frozen=True)
class TensorLocation:
    """Tier and address of a tensor of the model states.

    Class and name identify the tensor. They are those of a `LifetimeProfile` of the same model, which has no master
    weights; unit and part are those of a plan.

    Attributes:
        kind: class of the tensor.
        name: qualified name of the parameter, followed by `.grad`, `.master` or the name of an optimizer state.
        unit: name of the parameter's unit.
        part: name of the parameter's part of the unit; "": the unit is not divided.
        tier: tier of the tensor; "gpu" is the training device.
        dtype: dtype of its elements. An int16 master weight is the low half; its high half is the compute weight.
        nbytes: bytes of its elements; those of this process if the tensor is sharded.
        files: ranges of the files that have the elements, in order; none unless the tier is "ssd".
    """

    kind: LocationClass
    name: str
    unit: str
    part: str
    tier: Tier
    dtype: torch.dtype
    nbytes: int
    files: tuple[FileRange, ...] = ()


def states_in_memory(optimizers: Iterable[Optimizer]) -> TensorStates:
    """Returns the states of the tensors that optimizers step themselves."""
    return {stepped: state for optimizer in optimizers for stepped, state in resident_states(optimizer).items()}


def state_tensors(name: str, stepped: Tensor, states: TensorStates) -> Iterator[tuple[StateClass, str, Tensor]]:
    """Yields class, name and tensor of a parameter's gradient and optimizer states that exist now.

    Args:
        stepped: the tensor that an optimizer steps: the parameter, or its master weight on the device.
    """
    if stepped.grad is not None:
        yield "gradient", f"{name}.grad", stepped.grad
    for key, value in states.get(stepped, {}).items():
        if isinstance(value, Tensor):
            yield "optimizer state", f"{name}.{key}", value


def locate_tensors(
    units: Sequence[Unit], optimizers: Iterable[Optimizer], device: torch.device, states: ModelStates | None
) -> list[TensorLocation]:
    """Returns the location table, in the order of the units' parameters.

    Args:
        states: the offloaded model states; None: there are none.
    """
    in_memory = states_in_memory(optimizers)
    where: dict[nn.Parameter, tuple[StateStore, int]] = {}
    masters: Mapping[nn.Parameter, nn.Parameter] = {}
    if states is not None:
        masters = states.masters
        for flat, store in states.stores.items():
            where |= {item.parameter: (store, index) for index, item in enumerate(flat.param_views)}
    rows: list[TensorLocation] = []
    with internals.without_torch_function():  # reads of an offloaded parameter's attributes could prefetch it
        for unit in units:
            for part in unit.parts if states is None else states.parts_of(unit):
                row = partial(TensorLocation, unit=unit.name, part=part.name)
                for name, parameter in part.parameters:
                    if states is not None and parameter in where:
                        rows += _offloaded(row, states, *where[parameter], in_memory)
                    else:
                        rows += _resident(row, name, parameter, masters.get(parameter), in_memory, device)
    return rows


def _offloaded(
    row: Callable[..., TensorLocation], states: ModelStates, store: StateStore, index: int, in_memory: TensorStates
) -> Iterator[TensorLocation]:
    """Yields the locations of an offloaded parameter's tensors."""
    item = store.flat.param_views[index]
    for array in store.layout.arrays:
        kind: LocationClass = "optimizer state"
        name = f"{item.name}.{array.key}"
        if array.key == WEIGHT:
            kind, name = "weight", item.name
        elif array.key == MASTER:
            kind = "master weight"
        tier, files = store.buffers.locate(array, index)
        _, nbytes = array.range_of(item)
        yield row(kind=kind, name=name, tier=tier, dtype=array.dtype, nbytes=nbytes, files=files)
    flat_optimizer = states.offloaded.flat_optimizers.get(store.flat)
    if flat_optimizer is None:  # backward leaves the gradient on the device, for user code
        if item.parameter.grad is not None:
            yield _in_memory(row, "gradient", f"{item.name}.grad", item.parameter.grad, "gpu")
        return
    if (held := states.gradients[store.flat].held(index)) is not None:
        yield _in_memory(row, "gradient", f"{item.name}.grad", *held)
    for key, value in {**in_memory.get(item.parameter, {}), **flat_optimizer.states_in_memory(index)}.items():
        if isinstance(value, Tensor):
            yield _in_memory(row, "optimizer state", f"{item.name}.{key}", value, "host")


def _resident(
    row: Callable[..., TensorLocation],
    name: str,
    parameter: Tensor,
    master: Tensor | None,
    in_memory: TensorStates,
    device: torch.device,
) -> Iterator[TensorLocation]:
    """Yields the locations of the tensors of a parameter that is not offloaded."""
    tensors: list[tuple[LocationClass, str, Tensor]] = [("weight", name, parameter)]
    if master is not None:
        tensors.append(("master weight", f"{name}.{MASTER}", master))
    tensors += state_tensors(name, parameter if master is None else master, in_memory)
    for kind, of_tensor, tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a `DTensor`
        yield _in_memory(row, kind, of_tensor, local, "gpu" if local.device.type == device.type else "host")


def _in_memory(
    row: Callable[..., TensorLocation], kind: LocationClass, name: str, tensor: Tensor, tier: Tier
) -> TensorLocation:
    return row(kind=kind, name=name, tier=tier, dtype=tensor.dtype, nbytes=count_stored_bytes(tensor))


def count_stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the elements of `tensor`, and of their indices if it is sparse, as some states are."""
    if not tensor.is_sparse:
        return tensor.nbytes
    return internals.indices_of(tensor).nbytes + internals.values_of(tensor).nbytes
