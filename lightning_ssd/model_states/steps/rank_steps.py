"""Steps of flat parameters whose values several ranks share: the owner sums the gradients and steps, others follow.

A turn of a flat parameter is a step, a sum of its gradients, or a change of its values by user code. All ranks begin
the same turns of it in the same order, whatever they do with other ones (`T`: topics of messages):

1. All ranks: `T.READY` tells the owner that the rank's gradient is in its part of shared memory, or on its device, and
   that it reads the weights no more. The message describes the turn: the owner compares those of all ranks.
2. Owner, on the worker's thread or its device: norms of the mean, if they are needed. `T.SUM` tells the others which
   parameters have a gradient, and the norms, from which all ranks compute the same coefficient.
3. Owner, on the worker's thread: the step, which computes the mean in the order of ranks, in fp32, as it reads the
   gradients. `T.STEP` tells that it is written, with the hashes of values on SSDs, by which the other ranks check what
   they read. If only optimizer states are there, `T.WEIGHTS` precedes it.
4. Other ranks: the futures that a prefetch, or a reader of the values, waits for are done when these arrive.

In forward and backward, a rank waits for messages about the weights of the last step, and about room on its device for
another gradient, unless that might never end (`PeerMemory`). So branches that differ between ranks, and repeated
micro-batches, need no order that ranks agree on.

If devices read each other's memory, complete gradients stay on them, and that of the owner computes norms and mean
(`PeerSums`). Gradients that are not known to be complete, and those without room (`PeerMemory`), are in host memory;
the owner's device reads them from there, and the bits are the same. A rank frees its gradient's memory at `T.SUM`.

Elsewhere the mean has no memory of its own: written and read again, its 8 bytes a parameter would cross the memory
besides the ranks' gradients. A clipped step reads these twice, which is less traffic for two or three ranks, and the
same for four.

With several hosts, the owner writes the mean of its host to memory, and sums it with those of the same flat parameter's
owners on the other hosts (`HostSums`), before norms and step. Every host steps alike, and has the same values. Ranks
free their gradients' memory before, at `T.READ`: sums over hosts have an order of their own, in which a gradient may
come first that a rank computes only once its device has room.

Where the owner's device has memory to spare, it keeps optimizer states, and makes the step (`DeviceStates`). Host
memory has the new compute weights then, and all other values once a rank asks for them (`RankFetches`).

If user code may read gradients between backward and step, 1 and 2 are a turn, in which all ranks copy the mean when
backward ends (`reduce`). It may read weights, too: `T.READY` begins the turn of the step (`evicted`).

User code writes weights, or loads optimizer states, on all ranks, each of which changes a copy of its own. When a rank
needs the values again, it begins a turn with a checksum of its copy (`write`): the owner stores its own, if all are
alike, and posts `T.STEP`. A rank that has not written begins another turn, which differs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_ssd.device import CopyEngine, Worker
from lightning_ssd.futures import Future, all_of, finished, then
from lightning_ssd.model_states.gradients import GradientOffloader
from lightning_ssd.model_states.optimizers import FlatOptimizer, Options, RankMean
from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.steps.host_sums import HostSums
from lightning_ssd.model_states.steps.peer_sums import PeerSums, Source
from lightning_ssd.model_states.steps.rank_fetches import RankFetches
from lightning_ssd.model_states.stores import StagedState, StateStore
from lightning_ssd.model_states.units import FlatParameter, ParamView
from lightning_ssd.ranks import PeerMemory, RankError, Topic
from lightning_ssd.storage import Hashes
from lightning_ssd.waits import wait_for, wait_for_all


@dataclass(frozen=True)
class _Ready:
    """What a rank tells the owner when a turn begins.

    Attributes:
        alike: compared between ranks, must be equal: a checksum of written weights, or the options of the step. None:
            ranks copy the mean before the step, or there is no step.
        has_grad: for each parameter, whether the rank has a gradient of it.
        from_sums: whether the gradients are in the rank's `SharedGradient.sums`, and not in its `copies`.
        slot: offset of the rank's slot of `PeerMemory`, if that has the gradients.
    """

    alike: int | str | None
    has_grad: Sequence[bool] = ()
    from_sums: bool = True
    slot: int | None = None


@dataclass(frozen=True)
class _Sum:
    """What the owner tells of a mean gradient.

    Attributes:
        has_grad: for each parameter, whether a rank has a gradient of it.
        norms: norms of these parameters' gradients, if they are needed.
        finite: whether the gradients are finite, if norms are needed.
    """

    has_grad: Sequence[bool]
    norms: Sequence[float]
    finite: bool


@dataclass(frozen=True)
class _Step:
    """What the owner tells of a step, or of a change by user code.

    Attributes:
        made: whether the step was made, and not skipped.
        hashes: hashes of the new values on SSDs.
        on_device: whether the owner's device has the new values, and host memory the compute weights alone.
    """

    made: bool
    hashes: Hashes
    on_device: bool = False


@dataclass(frozen=True)
class _Turn:
    """A sum of the gradients of one flat parameter, which this rank takes part in.

    Attributes:
        flat: the flat parameter.
        key: number and turn of its messages.
        begun: what the ranks have told the owner, as the result of `RankSteps._begin`.
        options: options of the step that follows; None: ranks copy the mean before.
        norms: receives norms of the mean; None: they are not needed.
        peers: device memory for complete gradients; None: all gradients are in host memory.
        slot: offset of this rank's gradient in `peers`; None: it is in host memory, or there is none.
    """

    flat: FlatParameter
    key: tuple[int, int]
    begun: "Future[dict[int, _Ready]]"
    options: Options | None
    norms: dict[nn.Parameter, Tensor] | None
    peers: PeerMemory | None
    slot: int | None


class RankSteps:
    """Sums the gradients of flat parameters over ranks, and passes on which steps their owners have made.

    Threads: methods run on the training thread, or on autograd's while that waits, unless they name another thread.
    Futures of messages complete on the thread `ranks`, which runs their callbacks: these compare messages, count steps
    and post messages, and wait for nothing.

    Ownership: see `SharedGradient` and `RankStates`.

    Args:
        states: what the ranks share.
        stores: values of each flat parameter.
        flat_optimizers: how each flat parameter is stepped.
        gradients: gradients of this rank.
        copies: copies of the device.
        worker: sums gradients.

    Attributes:
        device_states: states on this rank's device. None: gradients are summed in host memory, and stepped there.
        fetches: brings values to host memory from the devices of their owners.
    """

    def __init__(
        self,
        states: RankStates,
        stores: Mapping[FlatParameter, StateStore],
        flat_optimizers: Mapping[FlatParameter, FlatOptimizer],
        gradients: GradientOffloader,
        copies: CopyEngine,
        worker: Worker,
    ) -> None:
        self._states = states
        self._messages = states.ranks.messages
        self._share = 1.0 / states.ranks.world_size
        self._stores = stores
        self._flat_optimizers = flat_optimizers
        self._gradients = gradients
        self._copies = copies
        self._worker = worker
        owned = [flat for flat in flat_optimizers if states.owns(flat)]
        largest = max((flat.numel for flat in owned), default=0)
        # First, because the device may have too little memory: no thread is left then.
        self._peer_sums = PeerSums(copies, largest) if states.peers is not None and owned else None
        """Sums on this rank's device. None: steps sum gradients in host memory."""
        self._hosts = None if states.ranks.hosts is None else HostSums(states.ranks, owned)
        """Sums over hosts. None: there is one host."""
        self.device_states: DeviceStates | None = None
        if self._peer_sums is not None:
            self.device_states = DeviceStates(
                {flat: flat_optimizers[flat] for flat in owned}, stores, copies, self._peer_sums
            )
        self.fetches = RankFetches(states, stores, self.device_states)
        self._written: dict[FlatParameter, int] = {}
        """Checksums of weights that user code has written since the last sum, which other hosts compare at the next."""
        self._turns = dict.fromkeys(stores, 0)
        """Number of each flat parameter's last turn."""
        self._sums: dict[FlatParameter, _Sum] = {}
        """The last sum of each flat parameter."""

    @property
    def device_bytes(self) -> int:
        """Most bytes of the device for gradients: in slots, not complete yet, and being summed."""
        in_slots = 0 if self._states.peers is None else self._states.peers.nbytes
        return 2 * in_slots + (0 if self._peer_sums is None else self._peer_sums.nbytes)

    def owns(self, flat: FlatParameter) -> bool:
        """Whether this rank steps `flat`."""
        return self._states.owns(flat)

    # ---- the begin of a turn ----

    def _key(self, flat: FlatParameter) -> tuple[int, int]:
        """Returns number and turn of messages about the last turn of `flat`."""
        return self._states.numbers[flat], self._turns[flat]

    def _begin(
        self, flat: FlatParameter, on_host: "Future[None]", describe: Callable[[], _Ready]
    ) -> "Future[dict[int, _Ready]]":
        """Begins the next turn of `flat`, whose weights this rank does not read any more.

        Args:
            flat: the flat parameter.
            on_host: done when this rank's part of shared memory is written.
            describe: returns what the owner has to know, once `on_host` is done.

        Returns:
            On the owner, the messages of all ranks, which agree; on the others, their own. If it fails, all ranks do.
        """
        self._turns[flat] += 1
        messages, key = self._messages, (Topic.READY, *self._key(flat))
        # Copies of the weights to the device precede the mark: the compute stream waited for them when it evicted.
        read = self._copies.on_d2h(self._copies.mark(awaited=True))
        own = then(all_of([on_host, read]), lambda _: finished({messages.rank: describe()}))
        if not self.owns(flat):
            messages.post_after(own, *key, lambda: own.result()[messages.rank], [self._states.owners[flat]])
            return own
        others: Future[dict[int, _Ready]] = messages.collect(*key, messages.others)

        def compare(_: None) -> "Future[dict[int, _Ready]]":  # on the thread that completes the last of both
            contents = others.result() | own.result()
            self._check_alike(flat, contents)
            return finished(contents)

        begun = then(all_of([own, others]), compare)
        for future in (own, begun):
            future.add_done_callback(messages.fail_with)
        return begun

    # ---- sums ----

    def keep_on_device(self, flat: FlatParameter) -> int | None:
        """Copies the complete gradient of `flat` to a slot that all ranks read, whose offset is passed to `sum`.

        Returns:
            None: it is to be handed over to host memory, or there is none.
        """
        return self._gradients.stay_on_device(flat, self._states.numbers[flat])

    def sum(
        self,
        flat: FlatParameter,
        on_host: "Future[None]",
        arrived: Sequence[bool] | None,
        options: Options | None,
        priority: int,
        slot: int | None = None,
    ) -> "Future[Any]":
        """Passes this rank's gradient of `flat`, or none, to the owner's next step. The weights were evicted.

        Args:
            flat: the flat parameter.
            on_host: done when the gradient is in shared memory.
            arrived: as in `OptimizerStep`.
            options: options of the step, which have to be the same on all ranks; None: it is another turn, before
                which ranks copy the mean.
            priority: priority of the owner's job.
            slot: slot of `PeerMemory` that has the gradient, and belongs to the sum; None: it is in host memory.

        Returns:
            A future that is done when the owner has all gradients, `Gradient.mean`, and norms of the mean are known.
        """
        gradient, messages = self._gradients[flat], self._messages
        norms = None if options is None else self._gradients.norms.to_sum(flat)

        def describe() -> _Ready:
            has_grad = tuple(gradient.has_accum if arrived is None else arrived)
            return _Ready(_show(options), has_grad, arrived is None, slot)

        begun = self._begin(flat, on_host, describe)
        peers = None if options is None else self._states.peers
        turn = _Turn(flat, self._key(flat), begun, options, norms, peers, slot)
        if peers is not None:
            peers.post(*turn.key)
        gradient.summed = self._submit_sum(turn, priority) if self.owns(flat) else self._follow_sum(turn)
        gradient.summed.add_done_callback(messages.fail_with)
        return gradient.summed

    def _submit_sum(self, turn: _Turn, priority: int) -> "Future[None]":
        """Submits the sum of a flat parameter's gradients, which this rank owns."""
        after = [turn.begun, self._stores[turn.flat].stepped]  # which uses the last mean, or writes weights
        if self._peer_sums is not None and turn.peers is not None:
            summed = self._peer_sums.submit(partial(self._sum_on_device, turn, self._peer_sums), after)
        else:
            summed = self._worker.submit(partial(self._sum_on_host, turn), after, priority=priority)
        if self._hosts is None:
            return summed

        def tell(_: None) -> "Future[None]":  # on the thread `hosts`
            self._tell(turn)
            return finished(None)

        alike = self._written.pop(turn.flat, 0), _show(turn.options)
        return then(self._hosts.submit(turn.flat, self._gradients[turn.flat], alike, summed), tell)

    def _follow_sum(self, turn: _Turn) -> "Future[_Sum]":
        """Returns a future of a sum that another rank makes."""
        messages, owner = self._messages, self._states.owners[turn.flat]
        summed: Future[dict[int, _Sum]] = messages.collect(Topic.SUM, *turn.key, [owner])
        read: Future[Any] = summed
        if turn.peers is not None and self._hosts is not None:
            read = messages.collect(Topic.READ, *turn.key, [owner])

        def free(_: object) -> "Future[None]":  # on the thread `ranks`
            self._free(turn)
            return finished(None)

        def note(contents: Mapping[int, _Sum]) -> "Future[_Sum]":  # on the same
            self._gradients[turn.flat].end_step()
            self._keep(turn, contents[owner])
            return finished(contents[owner])

        freed = then(turn.begun, lambda _: then(read, free))
        return then(freed, lambda _: then(summed, note))

    def _sum_on_host(self, turn: _Turn) -> None:
        """Has steps, or the copies of ranks, use the mean of gradients in host memory. On the worker's thread."""
        gradient, contents = self._gradients[turn.flat], turn.begun.result()
        self._note_present(turn.flat, contents)
        sources = [self._host_gradient(turn.flat, rank, contents[rank]) for rank in range(self._messages.size)]
        gradient.mean = RankMean(sources, self._share)
        if self._hosts is not None or turn.options is None:  # whose sum, or copies, need memory
            gradient.mean.write(gradient.accumulated())
            gradient.mean = RankMean([gradient.accumulated()], 1.0)
        if self._hosts is None:
            self._tell(turn)

    def _sum_on_device(self, turn: _Turn, sums: PeerSums) -> None:
        """Has the device write the mean of gradients to host memory. On the thread `sums`."""
        gradient, contents, alone = self._gradients[turn.flat], turn.begun.result(), self._hosts is None
        self._note_present(turn.flat, contents)
        sources = [self._source(turn.flat, rank, contents[rank]) for rank in range(self._messages.size)]
        measured = _present(turn.flat, gradient.has_accum) if turn.norms is not None and alone else []
        norms = sums.write(sources, self._share, gradient.accumulated(), measured)
        gradient.mean = RankMean([gradient.accumulated()], 1.0)
        self._free(turn)
        if alone:
            self._tell(turn, norms)
        else:  # whose sums are in another order: other ranks would wait for room until they compute later gradients
            self._messages.post(Topic.READ, *turn.key, None, self._messages.others)

    def _tell(self, turn: _Turn, norms: Sequence[float] | None = None) -> None:
        """Tells other ranks of the mean. On the thread that has made it, or that of sums over hosts.

        `norms` are those of its parameters; None: they are measured here, if they are needed.
        """
        gradient, finite = self._gradients[turn.flat], True
        mean = gradient.mean
        assert mean is not None
        if turn.norms is not None:
            spans = [slice(item.start, item.start + item.numel) for item in _present(turn.flat, gradient.has_accum)]
            norms = [float(mean.norm(span)) for span in spans] if norms is None else norms
            # A norm of finite gradients may be infinite.
            finite = all(isfinite(norm) or mean.is_finite(span) for norm, span in zip(norms, spans, strict=True))
        found = _Sum(gradient.has_accum, norms or (), finite)
        self._keep(turn, found)
        self._messages.post(Topic.SUM, *turn.key, found, self._messages.others)

    def _keep(self, turn: _Turn, found: _Sum) -> None:
        """Stores the owner's message about the mean. On the thread that has made the mean, or `ranks`."""
        self._sums[turn.flat] = found
        if turn.norms is not None:
            turn.norms.clear()
            for item, value in zip(_present(turn.flat, found.has_grad), found.norms, strict=True):
                turn.norms[item.parameter] = torch.tensor(value, dtype=torch.float32)

    def _free(self, turn: _Turn) -> None:
        """Frees the memory of this rank's gradient, which the owner's device has read. On thread `sums` or `ranks`."""
        if turn.peers is not None:
            turn.peers.free(*turn.key)
            if turn.slot is None:
                self._gradients[turn.flat].committed = False
                self._states.release(turn.flat)

    def reduce(self) -> None:
        """Makes the gradients of all flat parameters, of all micro-batches, their mean over ranks, on all ranks.

        Raises:
            RankError: another rank has failed, or trains differently.
        """
        self._gradients.accumulate_all()
        wait_for_all(self._gradients.consumed(), "gradients")
        for flat, gradient in self._gradients.items():
            # Gradients that no `zero_grad` has dropped count, also of parameters that this rank has not used since.
            self._gradients.resume_stepped(flat)
            gradient.fold()
            self.sum(flat, finished(None), None, None, priority=0)
        for flat, gradient in self._gradients.items():
            wait_for(gradient.summed, "gradients of other ranks")
            gradient.mean = None  # it is in `accum`
            if not self.owns(flat):
                gradient.has_accum = list(self._sums[flat].has_grad)
                gradient.accumulated().copy_(self._states.gradients[flat].sums[self._states.owners[flat]])
            present = [index for index, has_gradient in enumerate(gradient.has_accum) if has_gradient]
            for index in present:
                gradient.set_accumulated(index)
            self._gradients.norms.remeasure(flat, present)
        self._messages.exchange("copied")  # from now on, owners may change the sums

    def evicted(self, flat: FlatParameter, options: Options | None) -> "Future[dict[int, _Ready]]":
        """Begins the turn of the step of `flat`, whose mean this rank has by `reduce`; no `options`: there is no step.

        Returns:
            A future that the step of `flat` waits for: on the owner, it is done when no rank reads the weights.
        """
        return self._begin(flat, finished(None), lambda: _Ready(_show(options)))

    def _note_present(self, flat: FlatParameter, contents: Mapping[int, _Ready]) -> None:
        """Notes which parameters have a gradient on any rank. On the thread that sums them."""
        flags = zip(*[one.has_grad for one in contents.values()], strict=True)
        self._gradients[flat].has_accum = [any(of_index) for of_index in flags]

    def _host_gradient(self, flat: FlatParameter, rank: int, content: _Ready) -> Tensor:
        """Returns a rank's gradients in host memory, which belong to this rank. On the thread that sums them.

        Parameters without a gradient on that rank alone get zeros there, as in torch's DDP.
        """
        shared = self._states.gradients[flat]
        source = shared.sums[rank] if content.from_sums else shared.copies[rank].tensor.view(flat.dtype)
        for item, has, on_any in zip(flat.param_views, content.has_grad, self._gradients[flat].has_accum, strict=True):
            if on_any and not has:
                source[item.start : item.start + item.numel].zero_()
        return source

    def _source(self, flat: FlatParameter, rank: int, content: _Ready) -> Source | None:
        """Returns the address from which the device reads a rank's gradients; None: there are none."""
        if not any(content.has_grad):
            return None
        if content.slot is not None and self._states.peers is not None:
            return Source(self._states.peers.address(rank, content.slot), flat.dtype)
        source = self._host_gradient(flat, rank, content)
        return Source(source.data_ptr(), source.dtype)

    def _check_alike(self, flat: FlatParameter, contents: Mapping[int, _Ready]) -> None:
        own = self._messages.rank
        for rank, content in contents.items():
            if content.alike == contents[own].alike:
                continue
            if isinstance(content.alike, int) or isinstance(contents[own].alike, int):
                raise RankError(
                    f"user code writes weights of {flat.name} on ranks {rank} and {own}, but not the same values, or "
                    "on one of them only. Write the same on all ranks: they share the weights."
                )
            raise RankError(
                f"ranks {rank} and {own} step {flat.name} with different options of the optimizer, or user code reads "
                "or drops gradients on one of them only. Change options, register hooks, and drop gradients on all."
            )

    def are_finite(self, flat_params: Collection[FlatParameter]) -> bool:
        """Returns whether the sums of flat parameters, for which it waits, are finite, if their norms are measured."""
        for flat in flat_params:
            wait_for(self._gradients[flat].summed, "gradients")
        return all([self._sums[flat].finite for flat in flat_params if flat in self._sums])

    def end_failed_sums(self) -> None:
        """After a failure, ends sums over hosts: they may wait for others, which are not submitted any more."""
        if self._messages.failed.done():
            self.close()

    def close(self) -> None:
        """Ends sums over hosts and devices. Idempotent."""
        if self._peer_sums is not None:
            self._peer_sums.close()
        if self._hosts is not None:
            self._hosts.close()

    # ---- steps ----

    def announce(
        self,
        flat: FlatParameter,
        weights: "Future[None]",
        done: "Future[None]",
        scale: "Future[float | None]",
    ) -> None:
        """Tells other ranks of a step of `flat`, if this rank makes it.

        `weights` and `done` are done when the compute weights, and all values, have their new values. `scale` is done
        before; None: the step is skipped.
        """
        if not self.owns(flat):
            return
        messages, store, key = self._messages, self._stores[flat], self._key(flat)
        if self._weights_precede(store):
            messages.post_after(weights, Topic.WEIGHTS, *key, lambda: None, messages.others)
        stored = then(done, store.written)
        made = scale.result

        def describe() -> _Step:
            on_device = self.device_states is not None and self.device_states.holds(flat)
            self.fetches.note(flat, key, on_device=on_device)
            return _Step(made() is not None, store.hashes(), on_device)

        messages.post_after(stored, Topic.STEP, *key, describe, messages.others)

    def follow(self, flat: FlatParameter, options: Options, *, reduced: bool) -> "tuple[Future[None], Future[None]]":
        """Returns futures of a step of `flat` that another rank makes: of its weights, and of all values.

        `reduced`: this rank has the mean gradient, by `reduce`.
        """
        owner, key = self._states.owners[flat], self._key(flat)
        gradient, store = self._gradients[flat], self._stores[flat]
        has_grad, summed = list(gradient.has_accum) if reduced else None, gradient.summed
        stepped: Future[dict[int, _Step]] = self._messages.collect(Topic.STEP, *key, [owner])

        def count(_: None) -> "Future[None]":  # on the thread that completes the last of both, mostly `ranks`
            step = stepped.result()[owner]
            if step.made:
                self._flat_optimizers[flat].commit(has_grad or summed.result().has_grad, options)
                store.commit()
                store.adopt_hashes(step.hashes)
            self.fetches.note(flat, key, on_device=step.on_device)
            if reduced:
                gradient.end_step()
            return finished(None)

        done = then(all_of([stepped, summed]), count)
        if not self._weights_precede(store):
            return done, done
        written: Future[dict[int, None]] = self._messages.collect(Topic.WEIGHTS, *key, [owner])
        return then(written, lambda _: finished(None)), done

    @staticmethod
    def _weights_precede(store: StateStore) -> bool:
        """Whether other ranks may read new weights before the step is committed, and its other values are on SSDs.

        With two versions, the weights are those of the version before until the commit; on SSDs, their hashes are, too.
        """
        buffers = store.buffers
        return not buffers.in_memory and store.layout.versions == 1 and buffers.weights.tier != "ssd"

    # ---- writes of user code ----

    def write(self, flat: FlatParameter, masters: Tensor, loaded: StagedState | None) -> None:
        """Has the owner store values of `flat` that all ranks have changed alike, unless they are as before.

        Args:
            flat: the flat parameter, whose last turn is done.
            masters: its master weights, this rank's copy; they belong to the write.
            loaded: values with optimizer states that were loaded: in shared memory, where they are stored, or from
                SSDs, where the owner stores them with the weights; then they belong to the write. None: there are none.
        """
        store, messages = self._stores[flat], self._messages
        if loaded is not None and loaded.memory is None:
            loaded = None
        if loaded is None and store.is_unchanged(masters):
            return
        checksum = xxhash.xxh3_64_intdigest(masters.numpy().data)
        self._written[flat] = hash((self._written.get(flat, 0), checksum))
        begun = self._begin(flat, finished(None), lambda: _Ready(checksum))
        key = Topic.STEP, *self._key(flat)
        if self.owns(flat):
            made = self._worker.submit(lambda: store.checkin(masters, apart=True, staged=loaded), [begun], priority=0)
            written = then(made, store.written)
            messages.post_after(written, *key, lambda: _Step(True, store.hashes()), messages.others)
        else:
            owner = self._states.owners[flat]

            def adopt(contents: Mapping[int, _Step]) -> "Future[None]":  # on the thread `ranks`
                store.adopt_hashes(contents[owner].hashes)
                return finished(None)

            written = then(messages.collect(*key, [owner]), adopt)
        store.announce_step(written, written)


def _show(options: Options | None) -> str | None:
    """Returns the options of a step as text that ranks compare; None: there are none."""
    if options is None:
        return None
    return repr(sorted((key, one.tolist() if isinstance(one, Tensor) else one) for key, one in options.items()))


def _present(flat: FlatParameter, has_grad: Sequence[bool]) -> list[ParamView]:
    return [item for item, has in zip(flat.param_views, has_grad, strict=True) if has]
