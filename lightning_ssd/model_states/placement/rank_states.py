"""What the ranks of a host share of a model: owners of flat parameters, and memory of their values and gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.device import CopyEngine
from lightning_ssd.model_states.gradients import SharedGradient
from lightning_ssd.model_states.placement.states_config import Setup
from lightning_ssd.model_states.stores import Layout
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import PeerMemory, Ranks
from lightning_ssd.storage import Slab, align_up, commit, page_lock


class RankStates:
    """Shares the memory of flat parameters among ranks, which allocate it in the same order.

    Ownership: all values of a flat parameter are written by its owner, in a step or a change by user code, and read by
    all ranks. Any rank may read them from `Topic.STEP` of a turn until its `Topic.READY` of the next one (`RankSteps`).
    Rank 0 writes the initial values, those of the first host on all hosts: after owners have committed the pages, and
    before the first message that `build` broadcasts. A rank frees the memory of its own gradients when the last step of
    each flat parameter has ended.

    Args:
        ranks: memory and messages of this rank.
        layouts: layouts of the flat parameters, in the same order on all ranks.
        pin: whether host memory that the device copies to is page-locked.
        peers: device memory that all ranks read; owned. None: complete gradients are copied to host memory.

    Attributes:
        ranks, peers: as the arguments.
        numbers: number of each flat parameter, in messages.
        owners: number of the rank that sums the gradients of each flat parameter and steps it.
        gradients: memory of the gradients of each flat parameter that is stepped.
        values: memory of all values.
    """

    def __init__(self, ranks: Ranks, layouts: Sequence[Layout], *, pin: bool, peers: PeerMemory | None = None) -> None:
        self.ranks = ranks
        self.peers = peers
        self.values: list[Slab] = []
        self._uncommitted: list[Slab] = []
        """In this rank's file. A page is allocated on the NUMA node of the process that first writes to it."""
        self._unpinned: list[Slab] = []
        self._own_gradients: list[Tensor] = []
        self._means: list[Slab] = []
        """Where this rank's device writes the means that it computes."""
        self.numbers = {layout.flat: number for number, layout in enumerate(layouts)}
        owners = choose_owners([layout.flat.numel for layout in layouts], ranks.size)
        self.owners = dict(zip(self.numbers, owners, strict=True))
        self.gradients = {layout.flat: self._share_gradient(layout.flat, pin=pin) for layout in layouts if layout.steps}

    def owns(self, flat: FlatParameter) -> bool:
        """Whether this rank sums the gradients of a flat parameter and steps it."""
        return self.owners[flat] == self.ranks.rank

    def allocate(self, flat: FlatParameter, nbytes: int, *, pin: bool) -> Slab:
        """Returns memory for values of a flat parameter, whose pages its owner commits; see `commit`."""
        slab = self.ranks.memory[self.owners[flat]].allocate(nbytes)
        self.values.append(slab)
        if self.owns(flat):
            self._uncommitted.append(slab)
        if pin:
            self._unpinned.append(slab)
        return slab

    def commit(self) -> None:
        """Commits the pages of flat parameters that this rank owns, and of its gradients, which no rank writes.

        Too little memory ends the training here, and not at its first step.
        """
        commit(self._uncommitted, pin=False)

    def begin_fill(self) -> None:
        """Prepares initial values, whose pages are committed: rank 0 maps them, and other ranks page-lock meanwhile.

        Both use several cores. Page faults of rank 0's training thread take longer than its writes otherwise, and ranks
        that page-lock at once wait for each other in the driver.
        """
        if self.ranks.rank == 0:
            commit(self.values, pin=False)
        else:
            self.pin()

    def pin(self) -> None:
        """Page-locks compute weights and this rank's gradients, unless that is done.

        Raises:
            StorageError: they can't be page-locked.
        """
        unpinned, self._unpinned = self._unpinned, []
        page_lock(unpinned)

    def close_peers(self) -> None:
        """Unmaps other ranks' device memory, which this rank's device does not read any more. Idempotent."""
        for mean in self._means:
            mean.unpin()
        if self.peers is not None:
            self.peers.close()

    def release(self, flat: FlatParameter) -> None:
        """Frees the pages of this rank's gradient of `flat` in host memory, which the owner has summed.

        With `peers`, few gradients are there. The next one commits pages again. Any thread may call.
        """
        own, shared = self.ranks.rank, self.gradients[flat]
        self.ranks.memory[own].release(shared.copies[own].tensor)
        if not self.owns(flat):
            self.ranks.memory[own].release(shared.sums[own])

    def free_gradients(self) -> None:
        """Frees the memory of this rank's gradients. All owners have summed them, and nothing is page-locked."""
        own, self._own_gradients = self._own_gradients, []
        for gradient in own:
            self.ranks.memory[self.ranks.rank].release(gradient)

    def _share_gradient(self, flat: FlatParameter, *, pin: bool) -> SharedGradient:
        own = self.ranks.rank
        copies = [memory.allocate(flat.nbytes) for memory in self.ranks.memory]
        sums = [memory.floats(flat.numel) for memory in self.ranks.memory]
        self._own_gradients += [copies[own].tensor, sums[own]]
        # Memory to which the device copies is page-locked. The rest takes pages when it is used.
        written = [copies[own]]
        if self.peers is not None:
            written = [Slab.over(sums[own].view(torch.uint8))] if self.owns(flat) else []
            self._means += written
        self._uncommitted += written
        if pin:
            self._unpinned += written
        return SharedGradient(own, copies, sums)


LEAST_PEER_BYTES = 2**29
"""Least bytes of each device for gradients that wait for their sums, unless all of them have fewer."""


def share_peer_memory(ranks: Ranks, layouts: Sequence[Layout], copies: CopyEngine) -> PeerMemory | None:
    """Shares device memory for gradients that wait for their sums: two of the largest have room, and several others.

    Ranks compute about the same at a time. The memory covers their differences, and the time that sums take.
    """
    sizes = [align_up(layout.flat.nbytes) for layout in layouts if layout.steps]
    if not sizes:
        return None
    return PeerMemory.share(ranks, copies, max(2 * max(sizes), min(sum(sizes), LEAST_PEER_BYTES)))


def choose_owners(numels: Sequence[int], size: int) -> list[int]:
    """Returns the owner of each flat parameter: the largest first, to the rank with the fewest elements so far."""
    owners, loads = [0] * len(numels), [0] * size
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += numels[index]
    return owners


def describe_training(
    module: nn.Module, optimizers: Sequence[Optimizer], flat_params: Sequence[FlatParameter], setup: Setup
) -> list[str]:
    """Returns what ranks have to agree on, as names with values: parameters, optimizers and settings."""
    items = [
        f"{name}: {one.dtype}, shape {list(one.shape)}, requires_grad={one.requires_grad}"
        for name, one in (*module.named_parameters(), *module.named_buffers())
    ]
    for number, optimizer in enumerate(optimizers):
        items.append(f"optimizer {number}: {type(optimizer).__qualname__}")
        for index, group in enumerate(optimizer.param_groups):
            for name, value in sorted(group.items()):
                if name not in ("params", "param_names"):
                    plain = value.tolist() if isinstance(value, Tensor) else value
                    items.append(f"{name} of parameter group {index} of optimizer {number}: {plain!r}")
    for flat in flat_params:
        items.append(f"{flat.name}: {[(item.name, item.start, item.stride) for item in flat.param_views]}")
    settings = {
        "the arguments of the strategy": setup.config,
        "the dtype of autocast": setup.autocast,
        "hooks that may read gradients": setup.defer_to_user_hooks,
        "gradient accumulation": setup.sums_gradients,
        **setup.trainer_arguments,
    }
    return items + [f"{name}: {value!r}" for name, value in settings.items()]
