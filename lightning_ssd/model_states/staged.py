"""Flat parameters staged on the host for code outside of a forward: state dicts, and operators on weights."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.layout import StagedState
from lightning_ssd.model_states.shared_memory import same_bits
from lightning_ssd.model_states.split import write_changed
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.model_states.summoned import SummonedWeights


@dataclass
class StagedFlat:
    """Values of one flat parameter on the host.

    Attributes:
        values: weights and optimizer states.
        masters: fp32 master weights, `flat.numel` elements; stored by `unstage` if `changed`.
        changed: whether master weights or optimizer states were written.
        summoned: set while the parameters are views of the master weights.
    """

    values: StagedState
    masters: Tensor
    changed: bool = False
    summoned: SummonedWeights | None = None


class StagedFlats:
    """Flat parameters that are staged for user code: those of its last access, which the next one may need again.

    Duty: stages master weights and optimizer states for an access, and keeps memory that user code shares with
    parameters (`.data`) in agreement with the master weights: `pull` from that memory, `push` to it.

    Threads: the training thread, or autograd's while the training thread waits in `backward`.

    Ownership: staged values belong to the caller from `stage` until `unstage`. Staging memory is held until then, so
    `unstage` is called before anything waits for a step, and before weights are fetched.

    Args:
        stores: where the values are stored.
        drain: returns when the submitted step of a flat parameter is made; raises RuntimeError if the caller can't
            wait for it.
        begin_change: called before weights change; raises RuntimeError if they may not.
        arrived: orders the compute stream after the prefetch of a flat parameter, if it is resident.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        drain: Callable[[FlatParameter], None],
        begin_change: Callable[[FlatParameter], None],
        arrived: Callable[[FlatParameter], None],
    ) -> None:
        self._stores = stores
        self._drain = drain
        self._begin_change = begin_change
        self._arrived = arrived
        self._staged: dict[FlatParameter, StagedFlat] = {}
        self._pulling = False

    def stage(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> StagedFlat:
        """Returns the values of `flat`; unstages all other flat parameters but those in `keep`."""
        self.pull(flat, keep=keep)
        return self._stage(flat, keep=keep)

    def summon(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> None:
        """Makes the parameters of `flat` views of its staged master weights, which may be changed until `restore`."""
        staged = self.stage(flat, keep=keep)
        staged.changed = True
        staged.summoned = SummonedWeights(flat, staged.masters)
        staged.summoned.summon()

    def restore(self, flat: FlatParameter) -> None:
        """Makes the parameters of `flat` views of it again, unless it was unstaged since `summon`."""
        if (staged := self._staged.get(flat)) is not None and staged.summoned is not None:
            summoned, staged.summoned = staged.summoned, None
            summoned.restore()

    def pull(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> None:
        """Copies memory that user code shares with parameters of `flat`, and has changed, to the master weights.

        Raises:
            RuntimeError: the weights may not change now.
        """
        if self._pulling or flat.summoned:
            return
        if not flat.shared:
            return
        last = [index for index, memory in flat.shared.items() if not (memory.referenced or memory.foreign)]
        """Parameters whose memory user code no longer references; its earlier writes count."""
        self._pulling = True
        try:
            if changed := self.differing(flat, keep=keep):
                self._adopt_changes(flat, changed, keep)
        finally:
            self._pulling = False
        for index in last:
            del flat.shared[index]

    def pull_all(self) -> None:
        """Calls `pull` for all flat parameters."""
        for flat in self._stores:
            self.pull(flat)

    def _adopt_changes(
        self, flat: FlatParameter, changed: Mapping[int, Tensor], keep: Collection[FlatParameter]
    ) -> None:
        self._begin_change(flat)
        self._arrived(flat)  # a copy to the device reads the host memory that is written now
        staged = self._stage(flat, keep=keep)
        staged.changed = True
        with _plain_operators():
            for index, tensor in changed.items():
                masters = flat.param_views[index].of(staged.masters)
                write_changed(masters, tensor.to("cpu"))
                flat.refresh(index, masters)
                if flat.mixed:  # a later backward would need the overwritten values, which the forward has cast
                    torch.autograd.graph.increment_version(flat.param_views[index].parameter)

    def differing(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> dict[int, Tensor]:
        """Returns, by parameter index, memory shared with user code whose values differ from the master weights."""
        masters = self._stage(flat, keep=keep).masters
        found: dict[int, Tensor] = {}
        with _plain_operators():
            for index in flat.shared:
                tensor, item = flat.memory(index), flat.param_views[index]
                if tensor is not None and not same_bits(tensor.to("cpu"), item.of(masters).to(tensor.dtype)):
                    found[index] = tensor
        return found

    def push(self, flat: FlatParameter) -> None:
        """Copies the weights of `flat`, which have changed, to memory that user code shares with parameters."""
        if not flat.shared:
            return
        masters = self._stage(flat).masters
        with _plain_operators():
            for index, item in enumerate(flat.param_views):
                if (tensor := flat.memory(index)) is not None:
                    tensor.copy_(item.of(masters))

    def _stage(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> StagedFlat:
        self.unstage(keep={flat, *keep})
        if flat not in self._staged:
            self._drain(flat)
            values = self._stores[flat].stage().result()
            with torch.inference_mode(False):
                self._staged[flat] = StagedFlat(values, values.masters())
        return self._staged[flat]

    def unstage(self, *, keep: Collection[FlatParameter] = ()) -> None:
        """Unstages all flat parameters but those in `keep`, and stores changed values."""
        if not self._staged:  # most calls: one before each use of weights, and for each gradient
            return
        for flat in [flat for flat in self._staged if flat not in keep]:
            staged = self._staged.pop(flat)
            if staged.summoned is not None:  # a `load_state_dict` that failed
                staged.summoned.restore()
            if staged.changed:
                staged.values.set_masters(staged.masters)
            self._stores[flat].unstage(staged.values, changed=staged.changed)


@contextlib.contextmanager
def _plain_operators() -> Iterator[None]:
    """Disables autograd, and dispatch modes of user code, within the context."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
        yield
