"""`RankFetches`: brings values of flat parameters from the devices of their owners to host memory, for any rank."""

from collections.abc import Callable, Mapping
from functools import partial

from lightning_ssd.futures import Future, finished, then
from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import Topic
from lightning_ssd.waits import wait_for_all


class RankFetches:
    """Knows which values in host memory are old, since the last step was made on the device of their owner.

    A rank that needs them (user code, a checkpoint) sends the owner `Topic.FETCH`, which answers `Topic.FETCHED` when
    they are in host memory, on threads that do not wait for its training. No step changes them meanwhile: it waits for
    that rank's next `Topic.READY`. When training ends, owners send `Topic.FETCHED` unasked.

    Threads: `fetch` is called on the training thread, or the worker's while it stores a change; `note` on the thread
    that ends a step, before its future is done. So `_away` is not changed for one flat parameter by two threads.

    Args:
        states: what the ranks share.
        stores: values of all flat parameters, which call `fetch` before they are read.
        key: returns number and turn of messages about the last turn of a flat parameter.
        on_device: states on this rank's device.
    """

    def __init__(
        self,
        states: RankStates,
        stores: Mapping[FlatParameter, StateStore],
        key: Callable[[FlatParameter], tuple[int, int]],
        on_device: DeviceStates | None,
    ) -> None:
        self._states = states
        self._messages = states.ranks.messages
        self._key = key
        self._on_device = on_device
        self._away: set[FlatParameter] = set()
        """Flat parameters whose last step was made on a device, this rank's too, and that this rank has not fetched."""
        self._flat_of = {number: flat for flat, number in states.numbers.items()}
        for flat, store in stores.items():
            store.fetch = partial(self.fetch, flat)
        self._messages.listen(Topic.FETCH, self._serve)

    def note(self, flat: FlatParameter, *, on_device: bool) -> None:
        """Notes where the values of `flat` are after a step."""
        if on_device:
            self._away.add(flat)
        else:
            self._away.discard(flat)

    def fetch(self, flat: FlatParameter) -> "Future[None]":
        """Brings all values of `flat`, of which no step runs, to host memory, if they are old there."""
        if self._states.owns(flat):
            return finished(None) if self._on_device is None else self._on_device.bring_home(flat)
        if flat not in self._away:
            return finished(None)
        self._messages.post(Topic.FETCH, 0, 0, self._key(flat), [self._states.owners[flat]])
        return self._fetched(flat)

    def _fetched(self, flat: FlatParameter) -> "Future[None]":
        """Returns a future of the owner's message that all values of `flat` are in host memory."""
        self._away.discard(flat)
        collected: Future[dict[int, None]]
        collected = self._messages.collect(Topic.FETCHED, *self._key(flat), [self._states.owners[flat]])
        return then(collected, lambda _: finished(None))

    def _serve(self, rank: int, key: tuple[int, int]) -> None:
        """Brings values to host memory for another rank. On the thread `ranks`."""
        home = self.fetch(self._flat_of[key[0]])
        self._messages.post_after(home, Topic.FETCHED, *key, lambda: None, [rank])

    def end(self) -> None:
        """Returns when all values are in host memory. All ranks call, when all steps are made."""
        if self._on_device is not None:
            self._on_device.use(0)
        away = list(self._away)
        for flat in away:
            if self._states.owns(flat):
                self._messages.post(Topic.FETCHED, *self._key(flat), None, self._messages.others)
        fetched = [self._fetched(flat) for flat in away if not self._states.owns(flat)]
        wait_for_all(fetched, "optimizer states of other ranks")
