"""`decide`: the treatment of each tensor that autograd saves. No other code chooses it.

A tensor is kept, referenced (an offloaded weight), recomputed, or offloaded with its whole storage. In the order of the
checks, a tensor is

1. kept if no bytes and strides describe it, or if the process was forked;
2. referenced if it is an offloaded weight;
3. kept without a record if the plan keeps it; if it is small, a weight, or of another device or class; if its storage
   was kept before in this micro-batch; if backward runs; if nothing is offloaded now; or if code outside of torch may
   write to its memory;
4. recomputed if a plan has tagged it;
5. treated as the tensors of its storage before it;
6. kept or offloaded as the plan says, for operators of compiled units, too;
7. kept with a record if backward needs it early;
8. kept or offloaded as the placement says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ssd import forks
from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.micro_batch import MicroBatch
from lightning_ssd.activations.placement import PlacementPolicy
from lightning_ssd.activations.recompute import Recomputed, recomputed_of
from lightning_ssd.activations.record import SavedStorage, State, find_saved_storage
from lightning_ssd.activations.unit_dispatch_mode import in_backward
from lightning_ssd.activations.weights import OffloadedWeights, is_weight
from lightning_ssd.activations.wrappers import is_wrapper
from lightning_ssd.storage_tags import CHOICE, KEPT_IN, OFFLOADED_WEIGHTS
from lightning_ssd.types import OFFLOAD_TIERS, Choice, OffloadTierName

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that bytes, shape and strides describe completely."""

Tiers = tuple[OffloadTierName, ...]

Decision = OffloadedWeights | Recomputed | SavedStorage | Tiers | None
"""The treatment of a saved tensor:

- None: it is kept, and its storage needs no record.
- `OffloadedWeights`: autograd saves the reference that they return.
- `Recomputed`: it is dropped, and recomputed in backward.
- `SavedStorage`: its storage has this record already, with which it is kept or offloaded.
- tiers: its storage needs a record, and is offloaded to the first tier that has room; to none, if there are none.
"""


@dataclass(slots=True)
class Rules:
    """The rules in force, which the offloader changes between forwards.

    Attributes:
        device: device of the tensors that may be offloaded.
        min_bytes: bytes of the smallest storage that may be offloaded.
        process: `forks.process` of the training.
        tiers: names of the tiers, in the order in which they are tried.
        placement: chooses the tiers of storages without a choice of a plan.
        planned: whether storages may have a choice of a plan.
        keeps_all: whether nothing can be offloaded or recomputed, and no record is needed.
        records_all: whether each storage that may be offloaded has a record.
        batch: the running micro-batch; None before the first one.
        of_call: choices for the storages that the running call of a compiled unit saves; `None`: no such call runs.
    """

    device: torch.device
    min_bytes: int
    process: object
    tiers: Tiers
    placement: PlacementPolicy
    planned: bool = False
    keeps_all: bool = False
    records_all: bool = False
    batch: MicroBatch | None = None
    batch_number: int = 0
    of_call: "ChoicesOfCall | None" = None


class ChoicesOfCall:
    """A plan's choices for the storages that a call of compiled code makes and saves, in the order of saving.

    Args:
        choices: the choices. The placement decides about storages beyond them.
        inputs: storages that exist before the call, which have choices of their own.
    """

    def __init__(self, choices: Sequence[Choice], inputs: Iterable[torch.UntypedStorage]) -> None:
        self._choices = iter(choices)
        self._inputs = {internals.storage_key(storage) for storage in inputs}

    def next(self, storage: torch.UntypedStorage) -> Choice | None:
        """Returns the choice for a storage that is saved for the first time."""
        return None if internals.storage_key(storage) in self._inputs else next(self._choices, None)


def decide(tensor: Tensor, rules: Rules) -> Decision:
    """Returns the treatment of a tensor that autograd saves. Runs for each one, without modes.

    The bytes of a storage are counted in the micro-batch the first time that one of its tensors is saved.
    """
    # A process that was forked in the forward lacks the threads and the staging memory.
    if tensor.layout is not torch.strided or tensor.is_nested or rules.process != forks.process:
        return None
    storage = tensor.untyped_storage()
    weights: OffloadedWeights | None = getattr(storage, OFFLOADED_WEIGHTS, None)
    if weights is not None:
        return weights
    # A recorded or checked micro-batch has no plan: the placement decides, as keeping all may take too much memory, and
    # choices for tensors that live longer are those of an earlier plan.
    choice: Choice | None = getattr(storage, CHOICE, None) if rules.planned and not rules.records_all else None
    nbytes = storage.nbytes()
    if (
        choice == "keep"
        or getattr(storage, KEPT_IN, 0) == rules.batch_number
        or not is_activation(tensor, storage, rules.device, rules.min_bytes)
        or in_backward()  # recomputed, or made by a double backward: needed at once
    ):
        return None
    batch = rules.batch
    assert batch is not None, "call begin_micro_batch before a forward"
    if rules.keeps_all:
        batch.kept_bytes += nbytes
        setattr(storage, KEPT_IN, rules.batch_number)
        return None
    if not storage.resizable():
        return None  # memory of NumPy, DLPack or CUDA graphs, which may write to it at any time
    recomputed = recomputed_of(tensor, storage)
    if recomputed is not None and recomputed.nbytes == nbytes:
        return recomputed
    record = find_saved_storage(storage)
    if record is not None and record.batch is batch and record.state is State.RESIDENT and record.nbytes == nbytes:
        return record
    if choice is None and rules.of_call is not None:
        choice = rules.of_call.next(storage)
        if choice == "keep":
            setattr(storage, KEPT_IN, rules.batch_number)
            return None
    if choice in OFFLOAD_TIERS:
        return tuple(sorted(rules.tiers, key=lambda name: name != choice))  # the planned tier may have no room
    needs_record = rules.records_all or not batch.needs_no_record(nbytes)
    if needs_record and batch.is_early(nbytes):
        return ()
    tiers = tuple(rules.placement.tiers_for(nbytes))
    if tiers or needs_record:
        return tiers
    batch.add_without_record(nbytes)
    setattr(storage, KEPT_IN, rules.batch_number)
    return None


def is_activation(tensor: Tensor, storage: torch.UntypedStorage, device: torch.device, min_bytes: int) -> bool:
    """Returns whether a saved tensor may be offloaded: it is large, no weight, and of the device and a plain class."""
    return not (
        storage.nbytes() < min_bytes
        or is_weight(tensor, storage)
        or tensor.device != device
        or type(tensor) not in PLAIN
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
        or internals.is_zero_tensor(tensor)
    )


def is_unwrapped(tensor: Tensor, rules: Rules) -> bool:
    """Returns whether the tensors that a subclass wraps are saved in its place, each with a treatment of its own.

    In a forward under a mode, wrapped tensors are not the ones that operators were seen to make.
    """
    if rules.planned or in_backward() or is_weight(tensor, tensor.untyped_storage()):
        return False
    return is_wrapper(tensor)
