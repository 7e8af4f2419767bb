"""The gradient of one flat parameter: as backward has computed it, on the device or in host memory, and summed in fp32.

A parameter's gradient has one of the states of `GradientState`, which are those of `Tensor.grad` in plain training, and
is in one of these places, besides `assigned`:

| place | state | flags |
|---|---|---|
| nowhere | NONE | |
| `on_device`, until others are copied with it | PRESENT | `arrived` |
| `host_grad`, as the running backward has copied it | PRESENT | `arrived` |
| `accum`, in fp32 | PRESENT | `has_accum`, and `accumulating` of the flat parameter |
| in use by a step, or kept by it | STEPPED | `retained` of the flat parameter if it is kept; `used` reads it |

Only methods of `Gradient` change states and flags:

| event | method | moves a gradient |
|---|---|---|
| backward has accumulated it | `arrive` | to `on_device` |
| it is copied to the host | `GradientOffloader.offload` | from `on_device` to `host_grad` |
| a job adds it to those of earlier ones | `begin_accumulation`, and `add` in the job | from `host_grad` to `accum` |
| a step uses it | `begin_step`, `mark_stepped`, `submit_step`, `end_step` | to a step, which may `retain` it |
| a step is skipped | `begin_step`, `skip_step` | as if a step had used and kept it |
| it is added to, or stepped again, without `zero_grad` | `resume` | from a step to `accum` |
| user code assigns or changes it | `assign`, `replace_accumulated`, `set_accumulated` | to `assigned` or `accum` |
| all gradients are needed in one place | `fold` | from `assigned` to `accum` |
| a micro-batch is run again | `undo_backward` | from `host_grad` to the state before |
| `zero_grad` | `drop` | to nowhere |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.futures import Future, ended, finished, then
from lightning_ssd.model_states.optimizers import RankMean
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.storage import PinnedPool, Slab, commit
from lightning_ssd.types import Tier
from lightning_ssd.waits import wait_for, wait_for_first


def clip(gradient: Tensor, scale: float | None, limit: float | None) -> None:
    """Multiplies a gradient by `scale` in place, and clamps it to [-limit, limit] then. None: does not."""
    if scale not in (None, 1.0):
        gradient.mul_(scale)
    if limit is not None:
        gradient.clamp_(-limit, limit)


class GradientPool:
    """Host memory that gradients are copied to until their optimizer step, less than all flat parameters need at once.

    If the pool is exhausted, the caller waits for submitted steps, which release memory. If no step is running, because
    many flat parameters have a part of their gradient each, no memory would ever be released: the pool allocates more.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self._pool = PinnedPool(nbytes, pin=pin, name="gradients")
        self._pin = pin

    def allocate(
        self, nbytes: int, under_way: Callable[[], Sequence["Future[None]"]]
    ) -> "tuple[Tensor, Callable[[], None]]":
        """Returns memory, and the function that releases it.

        Args:
            under_way: returns futures that are done when steps have released their memory; called if the pool is
                exhausted.
        """
        while (buffer := self._pool.try_acquire(nbytes)) is None:
            if running := [step for step in under_way() if not step.done()]:
                wait_for_first(running, "a step")
            elif (buffer := self._pool.try_acquire(nbytes)) is not None:  # released between the two calls
                break
            else:
                slab = Slab(nbytes, pin=self._pin)
                return slab.tensor, slab.close
        return buffer.tensor[:nbytes], buffer.release

    def close(self) -> None:
        """Frees the memory."""
        self._pool.close()


@dataclass(frozen=True)
class SharedGradient:
    """Memory of one flat parameter's gradients that all ranks map, a part for each rank.

    Ownership: a rank writes its parts until it posts its gradient to the owner of the flat parameter, and again from
    the owner's message about the step on. In between they belong to the owner. If user code may read gradients, they
    belong to the owner until its message about the sum, and the step reads each rank's own. If devices sum gradients, a
    rank frees the pages of its parts at the owner's message about the sum, and the mean is in the owner's of `sums`.

    Attributes:
        copies: gradients as backward has computed them, in the dtype of the compute weights.
        sums: gradients of several micro-batches in fp32; if user code may read gradients, if devices sum gradients, or
            with several hosts: the mean of all ranks, in the owner's part.
    """

    rank: int
    copies: Sequence[Slab]
    sums: Sequence[Tensor]


class GradientState(Enum):
    """State of one parameter's gradient as `Tensor.grad` shows it in plain training. The training thread's."""

    NONE = auto()
    """No gradient."""
    PRESENT = auto()
    """A gradient that no step has used."""
    STEPPED = auto()
    """A gradient that a step has used and `zero_grad` has not dropped."""


class Gradient:
    """The gradient of one flat parameter, on the device until it is copied to host memory.

    Life of a parameter's gradient, in the terms of the module's docstring: it stays `on_device` until it is copied to
    `host_grad`, together with others. If there are several micro-batches, or if user code may read it, it is added to
    `accum`. A step uses it, and may keep it. `zero_grad` drops it. Without `zero_grad`, the next backward adds to it,
    and the next step uses it again. A gradient that user code assigns is in `assigned` until `fold` copies it to
    `accum`.

    Ownership: `host_grad` belongs to the copies from the device until their marks are reached, then to the worker's job
    (an accumulation or a step) until `consumed` is done, and then to the next copies; if the memory is from a pool, it
    returns to the pool instead. After a step, `used` reads a parameter's gradient there, before its next copy is made.
    `accumulated()`, `mean` and `has_accum` belong to the worker until `consumed` is done, then to the training thread.
    All other fields belong to the training thread.

    Args:
        memory: host memory of its own, of `flat.nbytes` bytes, which it closes; or that which it shares with others.
        shared: memory of all ranks' gradients, of which `memory` is this one's part; None: there is one rank.

    Attributes:
        host_grad: gradients as copied from the device, in the flat's dtype; undefined between the parameters.
        is_shared: whether several ranks compute gradients, of which the step uses the mean.
        committed: whether the pages of `host_grad` are committed, if ranks share it and it is not page-locked.
        accum: sum of earlier micro-batches in fp32, `flat.numel` elements; None before the first accumulation, unless
            ranks share it.
        consumed: done when the copied gradients were accumulated, or stepped, and `host_grad` is free again.
        summed: done when the last accumulation is, and the norms of its sums are known.
        arrived: for each parameter, whether `host_grad` or `on_device` has its gradient of the running backward.
        on_device: those of them that are on the device, by parameter index; their memory in `host_grad` is unused.
        num_arrived: gradients that the running backward has accumulated, repeated ones included.
        has_accum: for each parameter, whether `accum` has a gradient of it.
        mean: the mean of all ranks' gradients, on the owner of the flat parameter, until its step has ended; None:
            there is one rank, or `accum` has the mean.
        accumulating: whether `accum` has gradients that no step has used, or a submitted job accumulates some.
        mark: mark of the last copy from the device.
        states: for each parameter, its gradient's state.
        is_sum: whether a backward has added to gradients that no step has used.
        was_sum: whether that held for the gradients of the last step.
        retained: whether the gradients that the last step used are kept, as `Tensor.grad` has them in plain training.
        assigned: gradients that user code has assigned to `Tensor.grad`, by parameter index; not in `accum` yet.
        followed: indices of parameters whose gradient autograd can differentiate in plain training (`create_graph`).
    """

    def __init__(self, flat: FlatParameter, memory: Slab | GradientPool, shared: SharedGradient | None = None) -> None:
        self._flat = flat
        self._pool = memory if isinstance(memory, GradientPool) else None
        self._slab = memory if isinstance(memory, Slab) else None
        self._release_memory: Callable[[], None] | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.host_grad = self._bytes.view(flat.dtype)
        if self._slab is not None:
            self._use(self._slab.tensor, self._slab.close)
        self.is_shared = shared is not None
        self.committed = False
        self.accum: Tensor | None = None if shared is None else shared.sums[shared.rank]
        self.mean: RankMean | None = None
        self.consumed: Future[None] = finished(None)
        self.summed: Future[Any] = finished(None)
        self.arrived = [False] * len(flat.param_views)
        self.on_device: dict[int, Tensor] = {}
        self.num_arrived = 0
        self.has_accum = [False] * len(flat.param_views)
        self.accumulating = False
        self.mark: Mark = None
        self.states = [GradientState.NONE] * len(flat.param_views)
        self.is_sum = False
        self.was_sum = False
        self.retained = False
        self._used: tuple[Sequence[bool] | None, Future[float | None], float | None] | None = None
        """How the last step has used the gradients: see `retain`. None: as they are in `accum`."""
        self.assigned: dict[int, Tensor] = {}
        self.followed: set[int] = set()

    def allocate(self, under_way: Callable[[], Sequence["Future[None]"]]) -> None:
        """Makes `host_grad` ready for the first copy of a backward; waits until its last use is over.

        Args:
            under_way: returns `consumed` of the gradients that the pool is shared with.
        """
        wait_for(self.consumed, "the step before")
        if self._pool is not None and self._release_memory is None:
            self._use(*self._pool.allocate(self._flat.nbytes, under_way))

    def accumulated(self) -> Tensor:
        """Returns `accum`, allocated if it is missing. The caller has waited for `consumed`."""
        if self.accum is None:
            with torch.inference_mode(False):
                self.accum = torch.zeros(self._flat.numel, dtype=torch.float32)  # bf16-true changes the default
        return self.accum

    def held(self, index: int) -> tuple[Tensor, Tier] | None:
        """Returns the gradient of parameter `index` that no step uses at present, and its tier; None: there is none.

        The caller has waited for `consumed`.
        """
        item = self._flat.param_views[index]
        for on_device in (self.assigned, self.on_device):
            if index in on_device:
                return on_device[index], "gpu"
        if self.retained and self.states[index] is GradientState.STEPPED:
            return item.of(self.used()), "host"
        if self.has_accum[index]:
            return item.of(self.accumulated()), "host"
        return (item.of(self.host_grad), "host") if self.arrived[index] else None

    # ---- a backward ----

    def arrive(self, index: int, grad: Tensor, *, is_sum: bool) -> None:
        """Registers a gradient of parameter `index`, which is in `on_device` from now on.

        Args:
            grad: the gradient, which autograd does not follow.
            is_sum: whether it is added to one that no step has used.
        """
        self.is_sum |= is_sum
        self.states[index] = GradientState.PRESENT
        self.arrived[index] = True
        self.on_device[index] = grad
        self.num_arrived += 1

    def end_backward(self) -> int:
        """Backward has ended. Returns the number of gradients that it has accumulated."""
        num_arrived, self.num_arrived = self.num_arrived, 0
        return num_arrived

    def undo_backward(self, states: list[GradientState]) -> None:
        """Drops the gradients of a failed backward, which were not accumulated; `states` are those before it."""
        self.num_arrived = 0
        self.arrived = [False] * len(self.arrived)
        self.on_device.clear()
        self.states = states

    def begin_accumulation(self) -> list[bool]:
        """A job accumulates the gradients in `host_grad`, where all are now.

        Returns:
            `arrived` for the job, whose future is given to `set_consumed`.
        """
        self.accumulating = True
        arrived, self.arrived = self.arrived, [False] * len(self.arrived)
        return arrived

    def resume(self, index: int) -> None:
        """Makes a gradient that the last step has used and kept an unused one."""
        wait_for(self.consumed, "gradients")
        self.used()
        self.set_accumulated(index)

    # ---- user code ----

    def set_accumulated(self, index: int) -> None:
        """The values of parameter `index` in `accum` are a gradient that no step has used."""
        self.has_accum[index] = self.accumulating = True
        self.states[index] = GradientState.PRESENT

    def replace_accumulated(self, index: int, *, present: bool) -> None:
        """User code has had the accumulated gradient as `.grad`, and has changed, or dropped it (not `present`)."""
        if present or self.has_accum[index]:
            self.states[index] = GradientState.PRESENT if present else GradientState.NONE
        self.has_accum[index] = present
        self.accumulating = any(self.has_accum)

    def assign(self, index: int, values: Tensor | None) -> None:
        """User code has assigned `values` to `Tensor.grad`; None: it has dropped the gradient.

        A copied gradient of the parameter was accumulated.
        """
        if self.states[index] is GradientState.PRESENT and index not in self.assigned:
            self.has_accum[index] = False
        self.assigned.pop(index, None)
        self.followed.discard(index)
        self.states[index] = GradientState.NONE
        if values is not None:
            self.assigned[index] = values
            self.states[index] = GradientState.PRESENT
        if self.accumulating:  # else `has_accum` belongs to the last step
            wait_for(self.consumed, "gradients")
            self.accumulating = any(self.has_accum)
        self.accumulating |= bool(self.assigned)

    # ---- a step ----

    def begin_step(self) -> list[bool] | None:
        """A step is about to use all present gradients. It keeps them if `retain` is called.

        Returns:
            For each parameter, whether its gradient is in `host_grad`; None: gradients are in `accum`, and those in
            `host_grad` are accumulated before the step.
        """
        self.was_sum, self.is_sum, self.retained = self.is_sum, False, False
        if self.accumulating:
            return None
        arrived, self.arrived = self.arrived, [False] * len(self.arrived)
        return arrived

    def mark_stepped(self) -> list[int]:
        """A step uses all present gradients. Returns the indices of their parameters."""
        present = [index for index, state in enumerate(self.states) if state is GradientState.PRESENT]
        for index in present:
            self.states[index] = GradientState.STEPPED
        return present

    def submit_step(self, done: "Future[None]") -> None:
        """Passes the gradients to a submitted step. It owns them until `done`."""
        self.accumulating = False
        self.set_consumed(done)

    def end_step(self) -> None:
        """A step has ended. Runs on the thread that ends it."""
        self.mean = None
        self.has_accum = [False] * len(self.has_accum)

    def skip_step(self, arrived: Sequence[bool] | None, scale: "Future[float | None]", limit: float | None) -> None:
        """A step is skipped, after `begin_step`: all present gradients are as if it had used and kept them.

        Arguments as those of `retain`.
        """
        self.retain(arrived, scale, limit)
        self.mark_stepped()
        self.end_step()
        self.accumulating = False

    def restore_used(self, values: Mapping[int, Tensor | None]) -> None:
        """The last step has used gradients, which are restored before the first backward.

        Args:
            values: gradients by parameter index; None: the step has not kept it.
        """
        self.retained = bool(values) and all([value is not None for value in values.values()])
        for index, value in values.items():
            self.states[index] = GradientState.STEPPED
            if value is not None:
                self._flat.param_views[index].of(self.accumulated()).copy_(value)

    def retain(self, arrived: Sequence[bool] | None, scale: "Future[float | None]", limit: float | None) -> None:
        """Keeps the gradients that a step is given until they are dropped, or replaced by those of the next backward.

        Args:
            arrived: for each parameter, whether the step uses its gradient in `host_grad`, which belongs to no pool;
                None: it uses `accum`.
            scale: future of the factor by which the step scales them, done when `consumed` is.
            limit: absolute value at which the step clamps their elements then; None: it does not.
        """
        self.retained = True
        self._used = arrived, scale, limit

    def used(self) -> Tensor:
        """Returns `accum` with the gradients that the last step has used, if they are retained.

        The caller has waited for `consumed`.
        """
        whole = self.accumulated()
        if self._used is None:
            return whole
        (arrived, future, limit), self._used = self._used, None
        scale = future.result()
        for index, item in enumerate(self._flat.param_views):
            if self.states[index] is GradientState.STEPPED:
                if arrived is not None and arrived[index]:
                    item.of(whole).copy_(item.of(self.host_grad))
                clip(item.of(whole), scale, limit)
        return whole

    @property
    def kept(self) -> bool:
        """Whether unused gradients of earlier micro-batches or of user code exist."""
        return self.accumulating or bool(self.assigned)

    @property
    def may_stay(self) -> bool:
        """Whether copied gradients may stay in `host_grad` until their step: nothing is likely to be added to them.

        Sums are made between two backwards, because the second one would wait for them.
        """
        return self._pool is None and not self.kept and not self.was_sum

    def fold(self) -> None:
        """Copies the gradients that user code has assigned to `accum`."""
        if self.assigned:
            wait_for(self.consumed, "gradients")
            for index, gradient in self.assigned.items():
                self._flat.param_views[index].of(self.accumulated()).copy_(gradient.detach())
                self.has_accum[index] = True
            self.assigned.clear()
            self.accumulating = True

    def set_consumed(self, done: "Future[None]") -> None:
        """Passes the ownership of `host_grad` to a job that ends with `done`."""
        if self._pool is None:
            self.consumed = done
            return

        def release(_: None) -> "Future[None]":
            self._release()
            return done

        self.consumed = then(ended(done), release)

    def copy(self, values: Mapping[int, Tensor], copies: CopyEngine, *, awaited: bool) -> Mark:
        """Issues copies of gradients on the device to `host_grad`, and returns their mark.

        Args:
            values: gradients by parameter index, at least one, with the order of elements that the parameters have.
            awaited: whether a thread waits for the mark.
        """
        size, views = self._flat.dtype.itemsize, self._flat.param_views
        starts = [views[index].start * size for index in values]
        if not self.is_shared or self._slab is None or self._slab.pinned:
            return copies.d2h_each(list(values.values()), self._bytes, starts, awaited=awaited)
        if not self.committed:
            self.committed = True
            commit([Slab.over(self._bytes)], pin=False)  # a copy would have one core do it
        for value, start in zip(values.values(), starts, strict=True):
            copies.copy(self._bytes[start:].data_ptr(), value.data_ptr(), value.nbytes)
        return copies.mark(awaited=awaited)

    def add(self, arrived: list[bool]) -> None:
        """Adds copied gradients to `accum` in fp32. Runs on the worker's thread."""
        whole = self.accumulated()
        for index, item in enumerate(self._flat.param_views):
            if arrived[index]:
                accum, gradient = item.of(whole), item.of(self.host_grad)
                if self.has_accum[index]:
                    accum.add_(gradient)
                else:
                    accum.copy_(gradient)
                self.has_accum[index] = True

    def drop(self) -> None:
        """Drops copied and accumulated gradients whose step has not begun."""
        self.assigned.clear()
        self.followed.clear()
        self.num_arrived = 0  # user code may have called `loss.backward` before, whose end was not announced
        self.states = [GradientState.NONE] * len(self.states)
        self._used = None
        if self.accumulating or any(self.arrived):
            wait_for(self.consumed, "gradients")
            self.arrived = [False] * len(self.arrived)
            self.on_device.clear()
            self.has_accum = [False] * len(self.has_accum)
            self.accumulating = False

    def free(self) -> None:
        """Frees the memory; no job uses it."""
        self._release()
        self.accum = None

    def _use(self, memory: Tensor, release: Callable[[], None]) -> None:
        self._bytes, self._release_memory = memory, release
        self.host_grad = memory.view(self._flat.dtype)

    def _release(self) -> None:
        """Releases the memory of `host_grad`, if it has any. No job uses it."""
        release, self._release_memory = self._release_memory, None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.host_grad = self._bytes.view(self._flat.dtype)
        if release is not None:
            release()
