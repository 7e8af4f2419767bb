"""`RankFetches`: brings values of flat parameters from the devices of their owners to host memory, for any rank."""

from collections.abc import Mapping
from functools import partial

from lightning_ssd.futures import Future, finished, then
from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import Topic


class RankFetches:
    """Knows which values in host memory are old, since the last step was made on the device of their owner.

    A rank that needs them (user code, a checkpoint) sends the owner `Topic.FETCH`, which answers `Topic.FETCHED` when
    they are in host memory, on threads that do not wait for its training, also after a failure. No step changes them
    meanwhile: it waits for that rank's next `Topic.READY`. When training ends, owners send `Topic.FETCHED` unasked.

    Threads: `fetch` is called on the training thread, or the worker's while it stores a change; `note` on the thread
    that ends a step, before its future is done, except on the owner, where `end` waits for that thread. So fields are
    not changed for one flat parameter by two threads.

    Args:
        states: what the ranks share.
        stores: values of all flat parameters, which call `fetch` before they are read.
        device_states: states on this rank's device; None: there are none.
    """

    def __init__(
        self,
        states: RankStates,
        stores: Mapping[FlatParameter, StateStore],
        device_states: DeviceStates | None,
    ) -> None:
        self._states = states
        self._messages = states.ranks.messages
        self._device_states = device_states
        self._on_devices: dict[FlatParameter, tuple[int, int]] = {}
        """Number and turn of the last step of flat parameters that a device has made, this rank's too."""
        self._fetched: dict[FlatParameter, Future[None]] = {}
        """Futures of those of other ranks that this rank has fetched since."""
        self._flat_of = {number: flat for flat, number in states.numbers.items()}
        for flat, store in stores.items():
            store.fetch = partial(self.fetch, flat)
        self._messages.listen(Topic.FETCH, self._serve)

    def note(self, flat: FlatParameter, key: tuple[int, int], *, on_device: bool) -> None:
        """Notes where the values of `flat` are after a step; `key` are number and turn of its messages."""
        self._fetched.pop(flat, None)
        if on_device:
            self._on_devices[flat] = key
        else:
            self._on_devices.pop(flat, None)

    def fetch(self, flat: FlatParameter) -> "Future[None]":
        """Brings all values of `flat`, of which no step runs, to host memory, if they are old there."""
        if self._states.owns(flat):
            return finished(None) if self._device_states is None else self._device_states.offload(flat)
        if flat not in self._on_devices:
            return finished(None)
        if flat not in self._fetched:
            key, owner = self._on_devices[flat], [self._states.owners[flat]]
            self._messages.post(Topic.FETCH, 0, 0, key, owner)
            collected: Future[dict[int, None]] = self._messages.collect(Topic.FETCHED, *key, owner)
            self._fetched[flat] = then(collected, lambda _: finished(None))
        return self._fetched[flat]

    def _serve(self, rank: int, key: tuple[int, int]) -> None:
        """Brings values to host memory for another rank. On the thread `ranks`."""
        offloaded = self.fetch(self._flat_of[key[0]])
        self._messages.post_after(offloaded, Topic.FETCHED, *key, lambda: None, [rank])

    def end(self) -> None:
        """Brings the values that this rank owns to host memory at the end of training, and tells the other ranks.

        They may read them after this rank has ended.
        """
        if self._device_states is None:
            return
        self._device_states.use(0)
        for flat, key in list(self._on_devices.items()):
            if self._states.owns(flat):
                self._messages.post(Topic.FETCHED, *key, None, self._messages.others)
