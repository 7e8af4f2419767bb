"""Steps of flat parameters whose values several ranks share: the owner sums the gradients and steps, others follow.

A step of one flat parameter, between backward and the next forward (`T`: topics of messages):

1. All ranks: the gradient is copied to the rank's part of shared memory, and `T.GRADIENT` posted to the owner.
2. Owner, on the worker's thread: norms of the mean, if they are needed. `T.SUM` tells the others which parameters have
   a gradient, and the norms, from which all ranks compute the same coefficient.
3. Owner, on the worker's thread: the step, which computes the mean in the order of ranks, in fp32, as it reads the
   gradients. `T.WEIGHTS` and `T.STEP` tell that it is written. With values on SSDs, `T.STEP` passes on their hashes, by
   which the other ranks check what they read.
4. Other ranks: the futures that a prefetch, or a reader of the values, waits for are done when these arrive.

No rank waits for a message in forward or backward except for the weights of the last step. So branches that differ
between ranks, and repeated micro-batches, need no order that ranks agree on.

The mean has no memory of its own: written and read again, its 8 bytes a parameter would cross the memory besides the
ranks' gradients. A clipped step reads these twice, which is less traffic for two or three ranks, and the same for four.

With several hosts, the owner writes the mean of its host to memory, and sums it with those of the same flat parameter's
owners on the other hosts (`HostSums`), before norms and step. Every host steps alike, and has the same values.

If user code may read gradients between backward and step, all ranks copy the mean when backward ends (`reduce`). It may
read weights, too, until each rank posts `T.EVICTED` when it begins the step, and the owner's step waits for these.

User code writes weights on all ranks, each of which changes a copy of its own (`write`). When a rank needs the values
again, it posts a checksum of its copy as `T.GRADIENT`, in the turn of a step. Once the owner has equal ones of all
ranks, it writes its copy to the shared memory, and posts `T.WRITTEN`, which the next readers wait for. A rank that has
not written posts a gradient in this turn, which differs.
"""

import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_ssd.device import CopyEngine, Worker
from lightning_ssd.futures import Future, all_of, finished, then
from lightning_ssd.model_states.gradients import GradientOffloader
from lightning_ssd.model_states.optimizers import FlatOptimizer, Options, RankMean
from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.steps.host_sums import HostSums
from lightning_ssd.model_states.stores import StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import RankError, Topic
from lightning_ssd.waits import wait_for, wait_for_all


class RankSteps:
    """Sums the gradients of flat parameters over ranks, and passes on which steps their owners have made.

    Threads: `sum`, `follow`, `announce`, `reduce`, `evicted` and `write` run on the training thread, or on autograd's
    while that waits. `_mean` runs on the worker's thread. Futures of messages complete on the thread `ranks`, which
    runs their callbacks: these count steps and post messages, and wait for nothing.

    Ownership: see `SharedGradient` and `RankStates`.

    Args:
        states: what the ranks share.
        stores: values of each flat parameter.
        flat_optimizers: how each flat parameter is stepped.
        gradients: gradients of this rank.
        copies: copies of the device.
        worker: sums gradients.
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
        self._stores = stores
        self._flat_optimizers = flat_optimizers
        self._gradients = gradients
        self._copies = copies
        self._worker = worker
        sums = states.ranks.sums
        self._hosts = None if sums is None else HostSums(sums, [flat for flat in flat_optimizers if states.owns(flat)])
        """Sums over hosts. None: there is one host."""
        self._written: dict[FlatParameter, int] = {}
        """Checksums of weights that user code has written since the last sum, which other hosts compare at the next."""
        self._turns = dict.fromkeys(stores, 0)
        """Sums of each flat parameter's gradients so far, and writes of its weights by user code."""
        self._steps = dict.fromkeys(flat_optimizers, 0)
        """Steps that were submitted."""
        self._evictions = dict.fromkeys(flat_optimizers, 0)
        """Calls of `evicted`."""
        self._has_grad: dict[FlatParameter, Sequence[bool]] = {}
        """For each parameter, whether a rank has had a gradient of it in the last sum."""
        self._not_finite: set[FlatParameter] = set()
        """Flat parameters whose last sum is not finite."""

    def owns(self, flat: FlatParameter) -> bool:
        """Whether this rank steps `flat`."""
        return self._states.owns(flat)

    # ---- sums ----

    def sum(
        self,
        flat: FlatParameter,
        on_host: "Future[None]",
        arrived: Sequence[bool] | None,
        options: Options,
        priority: int,
    ) -> "Future[None]":
        """Passes this rank's gradient of `flat`, or none, to the owner's next step. The weights were evicted.

        Args:
            flat: the flat parameter.
            on_host: done when the gradient is in shared memory.
            arrived: as in `OptimizerStep`.
            options: options of the step, which have to be the same on all ranks.
            priority: priority of the owner's job.

        Returns:
            A future that is done when the owner has all gradients, `Gradient.mean`, and norms of the mean are known.
        """
        gradient, number, turn = self._gradients[flat], self._states.numbers[flat], self._next(self._turns, flat)
        messages = self._messages
        owner, norms = self._states.owner_of(flat), self._gradients.norms.to_sum(flat)
        # Copies of the weights to the device precede the mark: the compute stream waited for them when it evicted.
        read = self._copies.on_d2h(self._copies.mark(awaited=True))
        own: list[bytes] = []

        def post(_: None) -> "Future[None]":  # on the thread that completes the last of both
            own.append(_describe(gradient.has_accum if arrived is None else arrived, arrived is None, options))
            if not self.owns(flat):
                gradient.end_step()
                messages.post(Topic.GRADIENT, number, turn, own[0], [owner])
            return finished(None)

        def note(contents: Mapping[int, bytes]) -> "Future[None]":  # on the thread `ranks`
            self._has_grad[flat] = _read_flags(contents[owner], flat)
            self._note_finite(flat, bool(contents[owner][0]))
            if norms is not None:
                norms.clear()
                norms.update(_read_norms(contents[owner], flat, self._has_grad[flat]))
            return finished(None)

        posted = then(all_of([on_host, read]), post)
        posted.add_done_callback(messages.fail_with)  # the owner waits for the gradient, and other ranks for its step
        if not self.owns(flat):
            summed = messages.collect(Topic.SUM, number, turn, [owner])
            gradient.summed = then(posted, lambda _: then(summed, note))
            return gradient.summed
        others = messages.collect(Topic.GRADIENT, number, turn, messages.others)

        def compute() -> None:  # on the worker's thread
            gradient.mean = self._mean(flat, {**others.result(), messages.rank: own[0]})
            if self._hosts is not None:  # whose sum needs memory
                gradient.mean.write(gradient.accumulated())
                gradient.mean = RankMean([gradient.accumulated()], 1.0)

        def tell() -> None:  # on the same, or on that of sums over hosts
            mean, finite = gradient.mean, True
            assert mean is not None
            if norms is not None:
                present = [item for item, has in zip(flat.param_views, gradient.has_accum, strict=True) if has]
                spans = [slice(item.start, item.start + item.numel) for item in present]
                values = [mean.norm(span) for span in spans]
                norms.clear()
                norms.update({item.parameter: value for item, value in zip(present, values, strict=True)})
                # A norm of finite gradients may be infinite.
                finite = all(norm.isfinite() or mean.is_finite(span) for norm, span in zip(values, spans, strict=True))
            self._note_finite(flat, finite)
            content = _write_sum(gradient.has_accum, flat, norms, finite=finite)
            messages.post(Topic.SUM, number, turn, content, messages.others)

        last = self._stores[flat].stepped  # which uses the last mean, or writes weights

        def run() -> None:
            compute()
            if self._hosts is None:
                tell()

        computed = gradient.summed = self._worker.submit(run, [posted, others, last], priority=priority)
        if self._hosts is not None:
            written = self._written.pop(flat, 0)
            gradient.summed = self._hosts.submit(flat, gradient, lambda: written ^ _digest(own[0]), [computed], tell)
        return gradient.summed

    def reduce(self) -> None:
        """Makes the gradients of all flat parameters, of all micro-batches, their mean over ranks, on all ranks.

        Raises:
            RankError: another rank has failed, or trains differently.
        """
        messages, own, turns = self._messages, {}, {}
        self._gradients.accumulate_all()
        wait_for_all(self._gradients.consumed(), "gradients")
        for flat, gradient in self._gradients.items():
            # Gradients that no `zero_grad` has dropped count, also of parameters that this rank has not used since.
            self._gradients.resume_stepped(flat)
            gradient.fold()
            turns[flat] = self._next(self._turns, flat)
            own[flat] = _describe(gradient.has_accum, True, None)
            if not self.owns(flat):
                to = [self._states.owner_of(flat)]
                messages.post(Topic.GRADIENT, self._states.numbers[flat], turns[flat], own[flat], to)
        summed: dict[FlatParameter, Future[None]] = {}
        for flat, gradient in self._gradients.items():
            if self.owns(flat):
                number, turn = self._states.numbers[flat], turns[flat]
                contents = wait_for(messages.collect(Topic.GRADIENT, number, turn, messages.others), "other ranks")
                self._mean(flat, {**contents, messages.rank: own[flat]}).write(gradient.accumulated())
                summed[flat] = finished(None)
                if self._hosts is not None:
                    digest = self._written.pop(flat, 0) ^ _digest(own[flat])
                    summed[flat] = self._hosts.submit(flat, gradient, partial(int, digest), [], lambda: None)
        for flat, done in summed.items():
            wait_for(done, "other hosts")
            content = _write_sum(self._gradients[flat].has_accum, flat, None, finite=True)  # all ranks check themselves
            messages.post(Topic.SUM, self._states.numbers[flat], turns[flat], content, messages.others)
        for flat, gradient in self._gradients.items():
            owner, number, turn = self._states.owner_of(flat), self._states.numbers[flat], turns[flat]
            if self.owns(flat):
                wait_for(messages.collect(Topic.COPIED, number, turn, messages.others), "other ranks")
            else:
                content = wait_for(messages.collect(Topic.SUM, number, turn, [owner]), "other ranks")[owner]
                gradient.has_accum = _read_flags(content, flat)
                gradient.accumulated().copy_(self._states.gradients[flat].sums[owner])
                messages.post(Topic.COPIED, number, turn, b"", [owner])
            present = [index for index, has_gradient in enumerate(gradient.has_accum) if has_gradient]
            for index in present:
                gradient.set_accumulated(index)
            self._gradients.norms.remeasure(flat, present)

    def evicted(self, flat: FlatParameter, options: Options | None) -> "Future[None]":
        """Tells the owner that this rank, which has the mean by `reduce`, reads the weights of `flat` no more.

        Args:
            flat: the flat parameter, whose step begins.
            options: options of the step, which have to be the same on all ranks; None: there is no step of it.

        Returns:
            A future that the step of `flat` waits for: on the owner, it is done when no rank reads the weights.
        """
        own = _describe((), True, options)
        number, turn, messages = self._states.numbers[flat], self._next(self._evictions, flat), self._messages
        read = self._copies.on_d2h(self._copies.mark(awaited=True))  # as in `sum`
        if not self.owns(flat):
            messages.post_after(read, Topic.EVICTED, number, turn, lambda: own, [self._states.owner_of(flat)])
            return read

        def check(contents: Mapping[int, bytes]) -> "Future[None]":  # on the thread `ranks`, or the caller's
            self._check_alike(flat, {**contents, messages.rank: own})
            return finished(None)

        checked = then(messages.collect(Topic.EVICTED, number, turn, messages.others), check)
        checked.add_done_callback(messages.fail_with)
        return all_of([read, checked])

    def _mean(self, flat: FlatParameter, contents: Mapping[int, bytes]) -> RankMean:
        """Returns the mean of all ranks' gradients, which belong to this rank.

        Parameters without a gradient on some ranks get zeros there, as in torch's DDP.

        Raises:
            RankError: ranks step with different options.
        """
        gradient, shared = self._gradients[flat], self._states.gradients[flat]
        self._check_alike(flat, contents)
        flags = [_read_flags(contents[rank], flat) for rank in range(self._messages.size)]
        sources = [
            shared.sums[rank] if contents[rank][0] else shared.copies[rank].tensor.view(flat.dtype)
            for rank in range(self._messages.size)
        ]
        gradient.has_accum = [any(of_index) for of_index in zip(*flags, strict=True)]
        for source, of_rank in zip(sources, flags, strict=True):
            for item, has, on_any in zip(flat.param_views, of_rank, gradient.has_accum, strict=True):
                if on_any and not has:
                    source[item.start : item.start + item.numel].zero_()
        return RankMean(sources, 1.0 / self._states.ranks.world_size)

    def _check_alike(self, flat: FlatParameter, contents: Mapping[int, bytes]) -> None:
        own = self._messages.rank
        for rank, content in contents.items():
            if content[1:_FLAGS] == contents[own][1:_FLAGS]:
                continue
            if _WRITES in (content[1], contents[own][1]):
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
        return self._not_finite.isdisjoint(flat_params)

    def _note_finite(self, flat: FlatParameter, finite: bool) -> None:
        (self._not_finite.discard if finite else self._not_finite.add)(flat)

    def end_failed_sums(self) -> None:
        """After a failure, ends sums over hosts: they may wait for others, which are not submitted any more."""
        if self._messages.failed.done():
            self.close()

    def close(self) -> None:
        """Ends sums over hosts. Idempotent."""
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
        """Tells other ranks of a step of `flat` that this rank makes.

        Args:
            flat: a flat parameter that this rank owns.
            weights: done when the compute weights have their new values.
            done: done when all values have.
            scale: scale of the gradients, done before; None: the step is skipped.
        """
        number, turn, store = self._states.numbers[flat], self._next(self._steps, flat), self._stores[flat]
        messages = self._messages

        def steps() -> bytes:
            return bytes((scale.result() is not None,))

        messages.post_after(weights, Topic.WEIGHTS, number, turn, steps, messages.others)
        stored = then(done, store.written)
        messages.post_after(stored, Topic.STEP, number, turn, lambda: steps() + store.hashes(), messages.others)

    def follow(self, flat: FlatParameter, options: Options, *, reduced: bool) -> "tuple[Future[None], Future[None]]":
        """Returns futures of a step of `flat` that another rank makes: of its weights, and of all values.

        Args:
            flat: the flat parameter.
            options: options of the step.
            reduced: whether this rank has the mean gradient, by `reduce`.
        """
        number, turn, owner = self._states.numbers[flat], self._next(self._steps, flat), self._states.owner_of(flat)
        gradient, store = self._gradients[flat], self._stores[flat]
        has_grad = list(gradient.has_accum) if reduced else None

        stepped = self._messages.collect(Topic.STEP, number, turn, [owner])

        def count(_: None) -> "Future[None]":  # on the thread that completes the last of both, mostly `ranks`
            if stepped.result()[owner][0]:
                self._flat_optimizers[flat].commit(self._has_grad[flat] if has_grad is None else has_grad, options)
                store.commit()
                store.adopt_hashes(stepped.result()[owner][1:])
            if reduced:
                gradient.end_step()
            return finished(None)

        written = self._messages.collect(Topic.WEIGHTS, number, turn, [owner])
        done = then(all_of([stepped, gradient.summed]), count)  # which has noted the parameters with a gradient
        # Until the commit, the weights are those of the version before; on SSDs, their hashes are, too.
        if store.layout.versions == 2 or store.buffers.weights.tier == "ssd":
            return done, done
        return then(written, lambda _: finished(None)), done

    # ---- writes of user code ----

    def write(self, flat: FlatParameter, masters: Tensor) -> None:
        """Has the owner store master weights of `flat`, unless user code has not changed them.

        Args:
            flat: the flat parameter, whose last step or write is done.
            masters: its master weights, this rank's copy; they belong to the write.
        """
        store, messages = self._stores[flat], self._messages
        if store.is_unchanged(masters):
            return
        number, turn, owner = self._states.numbers[flat], self._next(self._turns, flat), self._states.owner_of(flat)
        read = self._copies.on_d2h(self._copies.mark(awaited=True))  # as in `sum`
        own = _describe_write(masters)
        self._written[flat] = zlib.crc32(own, self._written.get(flat, 0))
        if self.owns(flat):
            others = messages.collect(Topic.GRADIENT, number, turn, messages.others)

            def run() -> None:  # on the worker's thread
                self._check_alike(flat, {**others.result(), messages.rank: own})
                store.checkin(masters, apart=True)

            written = then(self._worker.submit(run, [read, others], priority=0), store.written)
            messages.post_after(written, Topic.WRITTEN, number, turn, store.hashes, messages.others)
        else:
            messages.post_after(read, Topic.GRADIENT, number, turn, lambda: own, [owner])

            def adopt(contents: Mapping[int, bytes]) -> "Future[None]":  # on the thread `ranks`
                store.adopt_hashes(contents[owner])
                return finished(None)

            written = then(messages.collect(Topic.WRITTEN, number, turn, [owner]), adopt)
        store.announce_step(written, written)

    def begin_load(self) -> None:
        """Prepares optimizer states to be loaded: all ranks load them, once none reads those before any more.

        Raises:
            RankError: another rank has failed.
        """
        self._messages.exchange(b"load")

    @staticmethod
    def _next(counts: dict[FlatParameter, int], flat: FlatParameter) -> int:
        counts[flat] += 1
        return counts[flat]


_FLAGS = 6
"""Bytes before the flags of parameters in a message about a gradient."""

_WRITES = 2
"""The second byte of a message about weights that user code has written. Messages about gradients have a flag there."""

_ROW = 2**12
"""Elements of a row, of which a checksum is computed."""


def _describe(has_grad: Sequence[bool], from_sums: bool, options: Options | None) -> bytes:
    """Returns the content of a message about a rank's gradient.

    Args:
        has_grad: for each parameter, whether it has a gradient.
        from_sums: whether the gradients are in the rank's `SharedGradient.sums`, and not in its `copies`.
        options: options of the step; None: ranks copy the mean before the step.
    """
    numbers = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in (options or {}).items()}
    digest = zlib.crc32(repr(sorted(numbers.items())).encode())
    return bytes((from_sums, options is None)) + digest.to_bytes(4, "little") + bytes(has_grad)


def _digest(content: bytes) -> int:
    """Returns a number for the fields of a message about a gradient that have to be the same on all ranks."""
    return int.from_bytes(content[1:_FLAGS], "little")


def _describe_write(masters: Tensor) -> bytes:
    """Returns the content of a message about weights that user code has written, with a checksum of their bits.

    That of `zlib` takes one thread and 1 s/GB: it is computed of sums of rows and columns, which all threads compute.
    """
    words = masters.view(torch.int32)
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    checksum = 0
    for part in (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), words[rows.numel() :]):
        checksum = zlib.crc32(part.numpy().data, checksum)
    return bytes((True, _WRITES)) + checksum.to_bytes(_FLAGS - 2, "little")


def _write_sum(
    has_grad: Sequence[bool], flat: FlatParameter, norms: Mapping[nn.Parameter, Tensor] | None, *, finite: bool
) -> bytes:
    """Returns the content of a message about a mean gradient: flags of the parameters, and the norms of those set."""
    chosen = [item.parameter for item, has in zip(flat.param_views, has_grad, strict=True) if has]
    values = [] if norms is None else [float(norms[parameter]) for parameter in chosen]
    return bytes((finite, *(0,) * (_FLAGS - 1))) + bytes(has_grad) + struct.pack(f"<{len(values)}f", *values)


def _read_flags(content: bytes, flat: FlatParameter) -> list[bool]:
    return [bool(flag) for flag in content[_FLAGS : _FLAGS + len(flat.param_views)]]


def _read_norms(content: bytes, flat: FlatParameter, has_grad: Sequence[bool]) -> dict[nn.Parameter, Tensor]:
    chosen = [item.parameter for item, has in zip(flat.param_views, has_grad, strict=True) if has]
    values = struct.unpack_from(f"<{len(chosen)}f", content, _FLAGS + len(flat.param_views))
    return {parameter: torch.tensor(value) for parameter, value in zip(chosen, values, strict=True)}
