"""`RankWeights`: compute weights that the devices of all ranks read from the device of their owner."""

from collections.abc import Mapping
from functools import partial

from lightning_ssd.device import CopyEngine
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.steps.peer_sums import PeerSums
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter


class RankWeights:
    """Publishes compute weights on the devices of their owners, as many as have room there, the first units first.

    All ranks read all weights twice in a step. From host memory, n ranks read 4n bytes a parameter in bf16, whose
    bandwidth bounds steps of several ranks; from their owner's device, which reads them from there once, 2 bytes.

    Host memory has the weights, too, for all other reads. They are published after each step and each change, before
    the message about it: so a rank may read them there when it might read them in host memory (`RankStates`).

    Threads: `publish` is called on the training thread, or autograd's while that waits; copies run on the thread
    `sums`.

    Args:
        states: what the ranks share.
        stores: values of all flat parameters, which prefetch from there from now on.
        copies: copies of the device.
        sums: the thread, and its stream.

    Attributes:
        addresses: addresses of the weights that this rank owns and publishes.
    """

    def __init__(
        self, states: RankStates, stores: Mapping[FlatParameter, StateStore], copies: CopyEngine, sums: PeerSums | None
    ) -> None:
        self.addresses: dict[FlatParameter, int] = {}
        self._stores = stores
        self._copies = copies
        self._sums = sums
        peers = states.peers
        if peers is None:
            return
        for flat, offset in states.published.items():
            if stores[flat].buffers.weights.tier == "host":
                stores[flat].peer_weights = address = peers.address(states.owners[flat], peers.nbytes + offset)
                if states.owns(flat):
                    self.addresses[flat] = address
        for flat in self.addresses:
            self.publish(flat).result()
        states.ranks.messages.exchange("published")

    def publish(self, flat: FlatParameter) -> "Future[None]":
        """Publishes weights that this rank owns, if there is room for them, as they are in host memory now."""
        if flat not in self.addresses or self._sums is None:
            return finished(None)
        return self._sums.submit(partial(self._copy, flat, self._sums), [])

    def _copy(self, flat: FlatParameter, sums: PeerSums) -> None:
        weights, _ = self._stores[flat].buffers.weights.stage(None, read=True)
        sums.begin()
        self._copies.copy(self.addresses[flat], weights.data_ptr(), weights.nbytes)
        sums.end()
