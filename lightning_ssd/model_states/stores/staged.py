"""Flat parameters staged on the host for code outside of a forward: state dicts, and operators on weights."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.stores.layout import StagedState
from lightning_ssd.model_states.stores.split import write_changed
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.stores.summoned import SummonedWeights
from lightning_ssd.model_states.units import FlatParameter, same_bits
from lightning_ssd.waits import wait_for


@dataclass
class StagedFlat:
    """Values of one flat parameter on the host.

    Attributes:
        masters: fp32 master weights, `flat.numel` elements; stored by `unstage` if `changed`. If other ranks share the
            values, changed ones are a copy.
        changed: whether master weights were written.
        loaded: whether optimizer states were written, in `values`.
    """

    values: StagedState
    masters: Tensor
    changed: bool = False
    loaded: bool = False


class StagedFlats:
    """Flat parameters that are staged for user code: the two of its last accesses, which the next one may need again.

    Two, because the parameters of one module, or a weight and its moving average, are often in two. Changed ones that
    other ranks share are staged until the next micro-batch, step, or fetch of one of them.

    Duty: stages master weights and optimizer states for an access, and keeps memory that user code shares with
    parameters (`.data`) in agreement with the master weights: `pull` from that memory, `push` to it.

    Threads: the training thread, or autograd's while the training thread waits in `backward`. `stage` and `summon`
    refuse others, such as one that reads a lazy tensor of a checkpoint.

    Ownership: staged values belong to the caller from `stage` until `unstage`, which is called before weights are
    fetched and before a step begins, so that these read changed values. They hold no staging memory meanwhile: user
    code runs between two calls, and steps that it waits for need that memory (see `StateStore`).

    Args:
        check_caller: raises RuntimeError if another thread than that of `fit` calls.
        drain: returns when the submitted step of a flat parameter is made; raises RuntimeError if the caller can't
            wait for it.
        begin_change: called before weights change; raises RuntimeError if they may not.
        arrived: orders the compute stream after the prefetch of a flat parameter, if it is resident.
        checkin: stores changed master weights, and, if ranks share the values, loaded ones; they belong to it.
        on_ranks: whether other ranks share the values. All ranks change a copy of their own then.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        check_caller: Callable[[], None],
        drain: Callable[[FlatParameter], None],
        begin_change: Callable[[FlatParameter], None],
        arrived: Callable[[FlatParameter], None],
        release: Callable[[FlatParameter], None],
        checkin: Callable[[FlatParameter, Tensor, StagedState | None], None],
        *,
        on_ranks: bool,
    ) -> None:
        self._stores = stores
        self._check_caller = check_caller
        self._drain = drain
        self._begin_change = begin_change
        self._arrived = arrived
        self._release = release
        self._checkin = checkin
        self._on_ranks = on_ranks
        self._staged: dict[FlatParameter, StagedFlat] = {}
        self._summoned: dict[FlatParameter, SummonedWeights] = {}
        """Master weights for `load_state_dict`, which `unstage` stores."""
        self._pulling = False

    def stage(self, flat: FlatParameter) -> StagedFlat:
        """Returns the values of `flat`, which later calls for other flat parameters may unstage."""
        self._check_caller()
        self.pull(flat)
        return self._stage(flat)

    def change(self, flat: FlatParameter) -> StagedFlat:
        """Returns the values of `flat` as `stage` does, to be changed; `unstage` stores them."""
        self._check_caller()
        self.pull(flat)
        return self._change(flat)

    def summon(self, flat: FlatParameter, *, keep: Collection[FlatParameter] = ()) -> None:
        """Makes the parameters of `flat` views of its master weights, which may be changed until `restore`.

        Unstages all other flat parameters but those in `keep`.
        """
        self._check_caller()
        self.pull(flat)
        self.unstage(keep={*keep, flat} if flat in self._summoned else {*keep} - {flat})
        if flat not in self._summoned:
            self._drain(flat)
            self._release(flat)
            self._summoned[flat] = SummonedWeights(flat, self._stores[flat].checkout())
        self._summoned[flat].summon()

    def restore(self, flat: FlatParameter) -> None:
        """Makes the parameters of `flat` views of it again, unless it was unstaged since `summon`."""
        if flat.summoned:
            self._summoned[flat].restore()

    def pull(self, flat: FlatParameter) -> None:
        """Copies memory that user code shares with parameters of `flat`, and has changed, to the master weights.

        Raises:
            RuntimeError: the weights may not change now.
        """
        if self._pulling or flat.summoned or not flat.shared:
            return
        last = [index for index, memory in flat.shared.items() if not (memory.referenced or memory.foreign)]
        """Parameters whose memory user code no longer references; its earlier writes count."""
        self._pulling = True
        try:
            if changed := self.differing(flat):
                self._adopt_changes(flat, changed)
        finally:
            self._pulling = False
        for index in last:
            del flat.shared[index]

    def pull_all(self) -> None:
        """Calls `pull` for all flat parameters."""
        for flat in self._stores:
            self.pull(flat)

    def _adopt_changes(self, flat: FlatParameter, changed: Mapping[int, Tensor]) -> None:
        self._begin_change(flat)
        self._arrived(flat)  # a copy to the device reads the host memory that is written now
        staged = self._change(flat)
        with _plain_operators():
            for index, tensor in changed.items():
                masters = flat.param_views[index].of(staged.masters)
                write_changed(masters, tensor.to("cpu"))
                flat.refresh(index, masters)
                if flat.mixed:  # a later backward would need the overwritten values, which the forward has cast
                    torch.autograd.graph.increment_version(flat.param_views[index].parameter)

    def differing(self, flat: FlatParameter) -> dict[int, Tensor]:
        """Returns, by parameter index, memory shared with user code whose values differ from the master weights."""
        masters = self._stage(flat).masters
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

    def _stage(self, flat: FlatParameter) -> StagedFlat:
        staged = self._staged.pop(flat, None)
        if staged is None:
            self.unstage(keep={*list(self._staged)[-1:], *self._changed_on_ranks()} - {flat})
            self._drain(flat)
            with torch.inference_mode(False):  # user code may write to the values after an evaluation
                values = wait_for(self._stores[flat].stage(apart=True), f"the values of {flat.name}")
                staged = StagedFlat(values, values.masters())
        self._staged[flat] = staged  # behind those of earlier accesses
        return staged

    def _changed_on_ranks(self) -> list[FlatParameter]:
        """Returns the changed flat parameters that other ranks share.

        Other ranks change them in the same way, and may read other ones meanwhile: the changes are stored once for all
        ranks, not when this rank happens to read.
        """
        changed = [flat for flat, staged in self._staged.items() if staged.changed]
        return [*changed, *self._summoned] if self._on_ranks else []

    def _change(self, flat: FlatParameter) -> StagedFlat:
        staged = self._stage(flat)
        if self._on_ranks and not staged.changed:
            staged.masters = staged.masters.clone()
        staged.changed = True
        return staged

    def unstage_for(self, flat: FlatParameter) -> None:
        """Unstages values before weights of `flat` are fetched."""
        if not self._on_ranks or flat in self._changed_on_ranks():
            self.unstage()

    def unstage(self, *, keep: Collection[FlatParameter] = ()) -> None:
        """Unstages all flat parameters but those in `keep`, and stores changed values."""
        if not (self._staged or self._summoned):  # most calls: one before each use of weights, and for each gradient
            return
        for flat in [flat for flat in self._staged if flat not in keep]:
            staged = self._staged.pop(flat)
            changed = staged.changed or staged.loaded
            if changed and self._on_ranks:
                self._checkin(flat, staged.masters, staged.values if staged.loaded else None)
                continue
            if changed:  # compute weights, too, which are not read from SSDs
                staged.values.set_masters(staged.masters)
            self._stores[flat].unstage(staged.values, changed=changed)
        for flat in [flat for flat in self._summoned if flat not in keep]:
            weights = self._summoned.pop(flat)
            if flat.summoned:  # a `load_state_dict` that failed
                weights.restore()
            self._checkin(flat, weights.masters, None)


@contextlib.contextmanager
def _plain_operators() -> Iterator[None]:
    """Disables autograd, and dispatch modes of user code, within the context."""
    with torch.inference_mode(False), torch.no_grad(), internals.without_dispatch():
        yield
