"""Records the lifetimes of all tensors of a training step: forward, backward and optimizer step (Teraio, 3.1)."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import tensors_of
from lightning_ssd.device import Clock
from lightning_ssd.model_states import Unit, state_tensors, states_in_memory
from lightning_ssd.replay import LifetimeProfile, OperatorSpan, Phase, TensorClass, TensorLifetime
from lightning_ssd.storage_tags import LIFETIME

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
"""Namespaces of operators that communicate, or copy to and from communication buffers."""


@dataclass
class _Lifetime:
    """A storage under observation.

    Attributes:
        name: name of its parameter, or of the operator that has allocated it.
        kind: class; None: it follows from the uses.
        unit: name of the unit of its parameter.
        allocated: operator that allocated it; None: it existed before the first.
        freed: the last operator before it was freed; None: it is alive.
        communicates: whether a collective operator uses it.
        itemsize: bytes of an element of a registered tensor.
    """

    name: str
    nbytes: int
    kind: TensorClass | None = None
    unit: str = ""
    uses: list[int] = field(default_factory=list)
    allocated: int | None = None
    freed: int | None = None
    communicates: bool = False
    itemsize: int = 4


class LifetimeRecorder:
    """Records each operator of a step with the storages that it reads and writes.

    A storage is alive as long as its Python object (see `storage_tags.py`). Storages may be freed on any thread;
    operators are recorded by the thread that runs them, one at a time.

    Attributes:
        phase: part of the step that runs.
        closed: whether the recording has ended.
    """

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self._operators: list[tuple[str, Phase, Any]] = []
        self._lifetimes: list[_Lifetime] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._operators)

    def register(self, tensor: Tensor, kind: TensorClass, name: str, unit: str = "") -> None:
        """Sets the class of a tensor, which exists before the step unless an operator has allocated it."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a `DTensor`, whose operators are recorded with its shard
        if tensor.layout is torch.strided:
            lifetime = self._lifetimes[self._number(tensor.untyped_storage(), name, allocated=False)]
            if lifetime.kind is None:
                lifetime.kind, lifetime.unit, lifetime.name = kind, unit, name
                lifetime.itemsize = tensor.itemsize

    def register_model(
        self, units: Sequence[Unit], module: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Registers the weights and buffers of a model, their gradients, and the optimizers' states."""
        for name, buffer in () if module is None else module.named_buffers():
            self.register(buffer, "weight", name)
        states = states_in_memory(optimizers)
        for unit in units:
            for name, parameter in unit.parameters:
                self.register(parameter, "weight", name, unit.name)
                for kind, of_tensor, tensor in state_tensors(name, parameter, states):
                    self.register(tensor, kind, of_tensor, unit.name)

    def ran(self, func: Any, given: Any, result: Any, span: tuple[Any, Any]) -> None:
        """Records a dispatched operator; `span`: its begin and end on the device's clock."""
        index = len(self._operators)
        self._operators.append((internals.schema_of(func).name.removeprefix("aten::"), self.phase, span))
        for tree, allocated in ((given, False), (result, True)):
            for value in tensors_of(tree):
                if value.layout is not torch.strided or value.is_quantized:
                    continue
                storage = value.untyped_storage()
                lifetime = self._lifetimes[self._number(storage, internals.schema_of(func).name, allocated=allocated)]
                lifetime.communicates |= func.namespace in COLLECTIVES
                if not lifetime.uses or lifetime.uses[-1] != index:
                    lifetime.uses.append(index)

    def _number(self, storage: torch.UntypedStorage, name: str, *, allocated: bool) -> int:
        owner, number = getattr(storage, LIFETIME, (None, 0))
        if owner is self:
            return int(number)
        number = len(self._lifetimes)
        made_by = len(self._operators) - 1 if allocated else None
        self._lifetimes.append(_Lifetime(name.removeprefix("aten::"), storage.nbytes(), allocated=made_by))
        setattr(storage, LIFETIME, (self, number))
        self._alive[number] = weakref.ref(storage, lambda _: self._free(number))
        return number

    def _free(self, number: int) -> None:
        if not self.closed:
            self._lifetimes[number].freed = len(self._operators) - 1

    def close(self) -> None:
        """Ends the recording: storages that are alive now were not freed in the step."""
        self.closed = True
        self._alive.clear()

    def profile(self, name: str, clock: Clock) -> LifetimeProfile:
        """Returns the profile, once, after `close`. The device must have executed all operators.

        A gradient that is alive at the end is counted as freed after its last use: `zero_grad` frees it before it is
        written again. Gradients of the step before, which are alive at the begin, are left out.
        """
        operators = []
        now = 0.0
        for func, phase, span in self._operators:
            begin, now = now, now + (clock.elapsed(*span) or 0.0)
            operators.append(OperatorSpan(func, phase, begin, now))
        backward_start = next((index for index, one in enumerate(operators) if one.phase != "forward"), len(operators))
        found = {
            number: _tensor(number, lifetime, backward_start, len(operators) - 1)
            for number, lifetime in enumerate(self._lifetimes)
            if lifetime.nbytes
            and not (lifetime.freed is not None and lifetime.freed < (lifetime.allocated or 0))
            and (lifetime.uses or lifetime.kind != "gradient")
        }
        # The tags of weights reference this recorder as long as the weights live.
        self._operators.clear()
        self._lifetimes.clear()
        return LifetimeProfile(name, tuple(operators), tuple(found.values()))


def _tensor(number: int, lifetime: _Lifetime, backward_start: int, last: int) -> TensorLifetime:
    """Returns the record of a lifetime in a step that ends with operator `last`."""
    kind, freed = lifetime.kind, lifetime.freed
    if kind is None:
        # Constants of later phases are seen first as arguments, so that no operator seems to have allocated them.
        saved = bool(lifetime.uses) and lifetime.uses[0] < backward_start <= lifetime.uses[-1]
        kind = "communication buffer" if lifetime.communicates else "saved tensor" if saved else "transient"
    if freed is None and kind not in ("weight", "optimizer state"):
        freed = lifetime.uses[-1] if kind == "gradient" and lifetime.uses else last
    if freed is not None and lifetime.uses:
        freed = max(freed, lifetime.uses[-1])
    allocated = None if kind in ("weight", "optimizer state") and freed is None else lifetime.allocated
    return TensorLifetime(
        number,
        lifetime.name,
        kind,
        lifetime.nbytes,
        tuple(lifetime.uses),
        allocated,
        freed,
        lifetime.unit,
        itemsize=lifetime.itemsize,
    )
