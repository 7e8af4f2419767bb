"""Flats whose values are staged on the host for code outside of a forward: state dicts, and operators on weights."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.home import Home, Opened
from lightning_ssd.states.lent_weights import LentWeights
from lightning_ssd.states.shared_memory import same_bits
from lightning_ssd.states.split import write_changed


@dataclass
class StagedFlat:
    """The values of one flat on the host.

    Attributes:
        values: all of them.
        masters: fp32 master weights, `flat.numel` of them; what is written there counts if `changed`.
        changed: whether master weights or optimizer states were written.
        lent: makes the parameters the master weights, while they are.
    """

    values: Opened
    masters: Tensor
    changed: bool = False
    lent: LentWeights | None = None


class StagedFlats:
    """The flats that are staged at present: those of one access, and of the next one if it wants the same.

    Staging memory is held until `unstage`, which is therefore called before anything waits for a step, and before
    weights are fetched. The values are the caller's from `stage` until then.

    Threads: the training thread, and autograd's while the training thread waits in `backward`.

    Args:
        homes: where the flats live.
        drain: returns when the step of a flat that has begun is made; raises RuntimeError if it can't be waited for.
        begin_change: called before weights of a flat change; raises RuntimeError if they may not.
        arrived: orders the compute stream after the arrival of a flat's weights, if they are resident.
    """

    def __init__(
        self,
        homes: Mapping[FlatParameter, Home],
        drain: Callable[[FlatParameter], None],
        begin_change: Callable[[FlatParameter], None],
        arrived: Callable[[FlatParameter], None],
    ) -> None:
        self._homes = homes
        self._drain = drain
        self._begin_change = begin_change
        self._arrived = arrived
        self._staged: dict[FlatParameter, StagedFlat] = {}
        self._pulling = False

    def stage(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> StagedFlat:
        """Returns the values of `flat`; other flats are given back, but those in `keep`."""
        self.pull(flat, keep=keep)
        return self._stage(flat, keep=keep)

    def lend(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> None:
        """Makes the parameters of `flat` its staged master weights, to be changed until `take_back`."""
        staged = self.stage(flat, keep=keep)
        staged.changed = True
        staged.lent = LentWeights(flat, staged.masters)
        staged.lent.lend()

    def take_back(self, flat: FlatParameter) -> None:
        """Evicts the parameters of `flat`, which were lent, unless it was given back since."""
        if (staged := self._staged.get(flat)) is not None and staged.lent is not None:
            lent, staged.lent = staged.lent, None
            lent.take_back()

    def pull(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> None:
        """Takes over what user code has written to memory that it shares with parameters of `flat`.

        Raises:
            RuntimeError: the weights may not change now.
        """
        if self._pulling or flat.summoned:
            return
        if not flat.shared:
            return
        last = [index for index, memory in flat.shared.items() if not (memory.referenced or memory.foreign)]
        """Parameters whose memory no other has any more: what was written to it before counts."""
        self._pulling = True
        try:
            if changed := self.differing(flat, keep=keep):
                self._take_over(flat, changed, keep)
        finally:
            self._pulling = False
        for index in last:
            del flat.shared[index]

    def _take_over(self, flat: FlatParameter, changed: Mapping[int, Tensor], keep: Collection[FlatParameter]) -> None:
        self._begin_change(flat)
        self._arrived(flat)  # a copy to the device reads the host memory that is written now
        staged = self._stage(flat, keep=keep)
        staged.changed = True
        with _plain_operators():
            for index, tensor in changed.items():
                masters = flat.slices[index].of(staged.masters)
                write_changed(masters, tensor.to("cpu"))
                if flat.resident:
                    flat.view(index).copy_(masters)
                if flat.mixed:  # a backward to come wants the values that the forward has cast, which are gone
                    torch.autograd.graph.increment_version(flat.slices[index].parameter)

    def differing(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> dict[int, Tensor]:
        """Returns, by parameter, the memory that user code shares with those of `flat`, where it has other values."""
        masters = self._stage(flat, keep=keep).masters
        found: dict[int, Tensor] = {}
        with _plain_operators():
            for index in flat.shared:
                tensor, item = flat.memory(index), flat.slices[index]
                if tensor is not None and not same_bits(tensor.to("cpu"), item.of(masters).to(item.dtype)):
                    found[index] = tensor
        return found

    def push(self, flat: FlatParameter) -> None:
        """Writes the weights of `flat`, which have changed, to memory that user code shares with parameters."""
        if not flat.shared:
            return
        masters = self._stage(flat).masters
        with _plain_operators():
            for index, item in enumerate(flat.slices):
                if (tensor := flat.memory(index)) is not None:
                    tensor.copy_(item.of(masters))

    def _stage(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> StagedFlat:
        self.unstage(keep={flat, *keep})
        if flat not in self._staged:
            self._drain(flat)
            values = self._homes[flat].open().result()
            with torch.inference_mode(False):
                self._staged[flat] = StagedFlat(values, values.masters())
        return self._staged[flat]

    def unstage(self, *, keep: Collection[FlatParameter] = ()) -> None:
        """Gives staged flats back; what was changed there counts."""
        for flat in [flat for flat in self._staged if flat not in keep]:
            staged = self._staged.pop(flat)
            if staged.lent is not None:  # a `load_state_dict` that failed
                staged.lent.take_back()
            if staged.changed:
                staged.values.take(staged.masters)
            self._homes[flat].close(staged.values, changed=staged.changed)


@contextlib.contextmanager
def _plain_operators() -> Iterator[None]:
    """While it lasts, neither autograd nor modes of user code follow operators."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
        yield
