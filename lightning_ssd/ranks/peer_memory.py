"""`PeerMemory`: memory of each rank's device that all ranks of the host read, without a copy in host memory."""

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, close_memory, export_memory, fixed_segments, open_memory
from lightning_ssd.futures import Future
from lightning_ssd.ranks.messages import RankMessages, Topic
from lightning_ssd.ranks.ranks import Ranks
from lightning_ssd.storage import SlotAllocator, align_up
from lightning_ssd.uncopied import Uncopied
from lightning_ssd.waits import wait_at_most

log = logging.getLogger(__name__)

_CHECKED = 64
"""Bytes that each rank reads of the others' memory when it is shared."""

PATIENCE_SECONDS = 10.0
"""Time without a change after which a rank does not wait for room any more."""


class PeerMemory(Uncopied):
    """Slots of this rank's device memory, and the addresses of all ranks' memory.

    On a CUDA device, other ranks' memory is read by copies between devices. On a CPU it is shared host memory.

    A rank that has no room for another gradient waits until one of its slots is free: when all ranks have posted that
    slot's gradient, and the owner has summed it. If branches of the model differ between ranks, two of them might wait
    for each other. So a rank that begins to wait sends the others a list of the gradients that it has posted
    (`Topic.FULL`), and sends a new list when one of these is summed. It stops waiting, and its caller copies the
    gradient to host memory, if none of its slots can become free: each of their gradients is missing from the list of
    another rank that waits. If all ranks waited, and none stopped, one slot's gradient would be in all lists. That one
    is summed, so that a rank goes on. The message has a list of summed gradients, too: this rank may learn
    of a sum later than the sender.

    A rank may also be in a collective of its backward, such as that of `sync_batchnorm`, which this rank reaches later.
    No message tells that. So a rank stops waiting when nothing has changed for `PATIENCE_SECONDS`, and does not begin
    again before something does.

    Threads: `acquire` and `post` are called on the training thread, or autograd's while that waits; `free` on the
    thread of sums or the thread `ranks`. `_lock` guards the fields below it; futures complete without it.

    Ownership: a slot belongs to its rank until the rank posts the slot's offset to the owner of the flat parameter.
    From then on both may read it. The rank frees it at the owner's message that the gradients are summed.

    Args:
        messages: messages of this rank.
        memory: this rank's memory, bytes on its device.
        addresses: addresses of all ranks' memory, by rank, for copies of this rank's device.
        opened: addresses to close.
        mapped: other ranks' memory, if it is that of the host.

    Attributes:
        nbytes: bytes of each rank's memory.
    """

    def __init__(
        self,
        messages: RankMessages,
        memory: Tensor,
        addresses: list[int],
        opened: list[int],
        mapped: Sequence[Tensor] = (),
    ) -> None:
        self.nbytes = memory.numel()
        self._messages = messages
        self._memory = memory
        self._addresses = addresses
        self._opened = opened
        self._mapped = mapped
        self._lock = threading.Lock()
        self._slots = SlotAllocator(self.nbytes)
        self._held: dict[int, int] = {}
        """Offsets of this rank's slots, by the number of the flat parameter."""
        self._posted: dict[int, int] = {}
        """Flat parameters whose gradients this rank has posted, in slots or not, until they are summed; with turns."""
        self._summed: dict[int, int] = {}
        """Flat parameters with the turns of their last sums."""
        self._waiting: dict[int, tuple[Mapping[int, int], Mapping[int, int]]] = {}
        """`_posted` and `_summed` of other ranks that wait. They wait until one of those that they posted is summed."""
        self._changed: Future[None] = Future()
        """Done when one of the fields above changes, or a rank fails."""
        self._vain: Future[None] | None = None
        """`_changed` when a wait has ended without a change. The thread of `acquire` alone uses it."""
        messages.listen(Topic.FULL, self._note_waiting)
        own = weakref.ref(self)  # `failed` would keep the memory
        messages.failed.add_done_callback(lambda _: None if (memory := own()) is None else memory._notify())

    @classmethod
    def share(cls, ranks: Ranks, copies: CopyEngine, nbytes: int) -> "PeerMemory | None":
        """Shares memory of all ranks' devices; called by all ranks of a host together.

        Args:
            ranks: memory and messages of this rank.
            copies: copies of the device.
            nbytes: bytes of each rank.

        Returns:
            The memory; None: a device has no access to another one, or too little memory, or `NCCL_P2P_DISABLE=1` is
            set, as for NCCL.
        """
        nbytes, own = align_up(nbytes), ranks.rank
        if any(ranks.messages.exchange(os.environ.get("NCCL_P2P_DISABLE") == "1")):
            return None
        if copies.device.type == "cpu":
            parts = [one.allocate(nbytes).tensor for one in ranks.memory]
            return cls(ranks.messages, parts[own], [part.data_ptr() for part in parts], [], parts)
        memory: Tensor | None = None
        exported: tuple[bytes, int] | None = None
        with contextlib.suppress(RuntimeError):  # of which the exchange tells the other ranks
            with fixed_segments():
                memory = torch.full((nbytes,), own, dtype=torch.uint8, device=copies.device)
            exported = export_memory(memory)
        addresses: list[int] = []
        opened: list[int] = []
        works = False
        handles = ranks.messages.exchange(exported)
        with contextlib.suppress(RuntimeError):
            for rank, found in enumerate(handles):
                if found is None or memory is None:
                    break
                if rank != own:
                    opened.append(open_memory(found[0]))
                addresses.append(memory.data_ptr() if rank == own else opened[-1] + found[1])
            right = [_reads(copies, address, rank) for rank, address in enumerate(addresses)]
            works = len(right) == ranks.size and all(right)
        if all(ranks.messages.exchange(works)) and memory is not None:
            return cls(ranks.messages, memory, addresses, opened)
        for address in opened:
            close_memory(address)
        ranks.messages.exchange("unmapped")
        return None

    def acquire(self, number: int, nbytes: int) -> int | None:
        """Allocates a slot for a gradient, for which it may wait.

        Args:
            number: number of the flat parameter, whose gradient of this turn was not posted.
            nbytes: bytes of the slot.

        Returns:
            The slot's offset; None: there is no room, and waiting for it might never end; or a rank has failed.
        """
        told: dict[int, int] | None = None
        while True:
            with self._lock:
                if (offset := self._slots.allocate(nbytes)) is not None:
                    self._held[number] = offset
                    return offset
                posted, summed, changed = dict(self._posted), dict(self._summed), self._changed
                vain = changed is self._vain or not any(map(self._is_awaited, self._held))
                if self._messages.failed.done() or vain:
                    break
            if told != posted:
                told = posted
                self._messages.post(Topic.FULL, 0, 0, (posted, summed), self._messages.others)
            if not wait_at_most(changed, PATIENCE_SECONDS, "gradients of other ranks"):
                if self._vain is None:
                    log.warning(
                        "this rank has waited %g s for gradients of other ranks, and copies its own to host memory. If "
                        "all steps wait, because branches differ between ranks and backward has collectives, set "
                        "NCCL_P2P_DISABLE=1",
                        PATIENCE_SECONDS,
                    )
                self._vain = changed
        if told is not None:
            self._messages.post(Topic.FULL, 0, 0, None, self._messages.others)
        return None

    def _is_awaited(self, number: int) -> bool:
        """Whether the sum of a gradient in a slot needs no other one of a rank that waits. The lock is held."""
        turn = self._posted[number]
        return all(
            [
                max(posted.get(number, 0), summed.get(number, 0)) >= turn
                or any([self._summed.get(one, 0) >= then for one, then in posted.items()])
                for posted, summed in self._waiting.values()
            ]
        )

    def post(self, number: int, turn: int) -> None:
        """Notes that this rank posts its gradient of a flat parameter, in a slot or not, or that it has none."""
        with self._lock:
            self._posted[number] = turn

    def free(self, number: int, turn: int) -> None:
        """Notes that the gradients of a flat parameter are summed, and frees its slot, if it has one."""
        with self._lock:
            self._summed[number] = turn
            del self._posted[number]
            if (offset := self._held.pop(number, None)) is not None:
                self._slots.free(offset)
        self._notify()

    def _note_waiting(self, rank: int, lists: tuple[Mapping[int, int], Mapping[int, int]] | None) -> None:
        """Notes that another rank waits, or that it waits no more although none of its gradients was summed.

        Runs on the thread `ranks`.
        """
        with self._lock:
            self._waiting.pop(rank, None)
            if lists is not None:
                self._waiting[rank] = lists
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, Future()
        changed.set_result(None)

    def slot(self, offset: int, nbytes: int) -> Tensor:
        """Returns bytes of this rank's memory."""
        return self._memory[offset : offset + nbytes]

    def address(self, rank: int, offset: int) -> int:
        """Returns the address of a slot of any rank, for copies of this rank's device."""
        return self._addresses[rank] + offset

    def close(self) -> None:
        """Unmaps other ranks' memory, which no copy reads any more. Idempotent. Waits for no rank.

        This rank's memory is freed when the others have unmapped it, as CUDA requires, or one has failed or ended.
        """
        if not self._memory.numel():
            return
        self._messages.listen(Topic.FULL, None)
        while self._opened:
            close_memory(self._opened.pop())
        kept, self._memory = [self._memory], torch.empty(0, dtype=torch.uint8)
        self._messages.post(Topic.UNMAPPED, 0, 0, None, self._messages.others)
        unmapped: Future[dict[int, None]] = self._messages.collect(Topic.UNMAPPED, 0, 0, self._messages.others)
        unmapped.add_done_callback(lambda _: kept.clear())


def _reads(copies: CopyEngine, address: int, value: int) -> bool:
    """Returns whether the device reads `value` in the first bytes at an address: some platforms copy wrong ones."""
    read = torch.full((_CHECKED,), value ^ 255, dtype=torch.uint8, device=copies.device)
    copies.copy(read.data_ptr(), address, _CHECKED)
    return bool((read == value).all())
