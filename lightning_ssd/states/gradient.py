"""The gradient of one flat on the host: as it lands from the device, and summed over micro-batches in fp32."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from enum import Enum, auto

import torch
from torch import Tensor

from lightning_ssd.device import Mark, ended, finished, then
from lightning_ssd.spans import WAIT, span, wait_for
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.storage import PinnedPool
from lightning_ssd.storage.slab import Slab


class GradientPool:
    """Host memory that the gradients of flats land in until they are stepped, less than all of them need at once.

    Who finds none waits for steps that have begun. If none has, as when each of many flats has a part of its gradient,
    nobody would ever give memory back: then some is taken beside.

    Args:
        nbytes: bytes to share.
        pin: page-lock them.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self._pool = PinnedPool(nbytes, pin=pin, name="gradients")
        self._pin = pin

    def take(
        self, nbytes: int, under_way: Callable[[], Sequence["Future[None]"]]
    ) -> "tuple[Tensor, Callable[[], None]]":
        """Returns memory, and what gives it back.

        Args:
            nbytes: bytes wanted.
            under_way: returns futures that are done when steps have given theirs back; asked if there is none.
        """
        while (buffer := self._pool.try_acquire(nbytes)) is None:
            if running := [step for step in under_way() if not step.done()]:
                with span(WAIT + "a step"):
                    wait(running, return_when=FIRST_COMPLETED)
            elif (buffer := self._pool.try_acquire(nbytes)) is not None:  # given back before the look
                break
            else:
                slab = Slab(nbytes, pin=self._pin)
                return slab.tensor, slab.close
        return buffer.tensor[:nbytes], buffer.release

    def close(self) -> None:
        """Lets go of the memory."""
        self._pool.close()


class GradientState(Enum):
    """Of one parameter, on the training thread: what `Tensor.grad` shows in plain training."""

    NONE = auto()
    """No gradient."""
    PRESENT = auto()
    """A gradient that no step has used."""
    STEPPED = auto()
    """A gradient that a step has used, and that `zero_grad` has not dropped."""


class Gradient:
    """Host memory for the gradient of one flat.

    Who owns what until when: `landing` belongs to the copies out until their marks are reached, then to whoever makes
    `settled` (a sum or a step, on the worker), and after that to the next copies out; or, with shared memory, to
    nobody. `total` is the worker's alone.

    Args:
        flat: whose gradient it is.
        pin: page-lock the memory that it lands in.
        memory: what others share that memory with; None: it is this flat's for good.
    """

    def __init__(self, flat: FlatParameter, *, pin: bool, memory: GradientPool | None) -> None:
        self._flat = flat
        self._memory = memory
        self._give_back: Callable[[], None] | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.landing = self._bytes.view(flat.dtype)
        """As it lands; what lies between parameters is undefined."""
        if memory is None:
            slab = Slab(flat.nbytes, pin=pin)
            self._has(slab.tensor, slab.close)
        self.total: Tensor | None = None
        self.settled: Future[None] = finished(None)
        """Done when what has left is summed up, or stepped, and its memory is free again."""
        self.landed = [False] * len(flat.slices)
        """Of each parameter, whether its gradient of the running backward is in `landing`."""
        self.landings = 0
        """Gradients that have landed in the running backward."""
        self.summed = [False] * len(flat.slices)
        """Of each parameter, whether gradients of earlier micro-batches are in `total`.

        The worker's until `settled`.
        """
        self.summing = False
        """Whether anything is, or will be, in `total`. The training thread's."""
        self.mark: Mark = None
        """Of the last copy out."""
        self.states = [GradientState.NONE] * len(flat.slices)
        """Of each parameter."""
        self.kept = False
        """Whether `total` still has the gradients that a step has used, as plain training leaves them."""
        self.assigned: dict[int, Tensor] = {}
        """Gradients that other code has assigned, by parameter; they are not in `total` yet."""

    def begin(self, under_way: Callable[[], Sequence["Future[None]"]]) -> None:
        """Something is about to land, and nothing has: returns when there is memory for it.

        Args:
            under_way: returns `settled` of the flats that memory is shared with.
        """
        wait_for(self.settled, "the step before")
        if self._memory is not None and self._give_back is None:
            self._has(*self._memory.take(self._flat.nbytes, under_way))

    def accumulated(self) -> Tensor:
        """Returns `total`, which is made if it is missing. The caller has waited for `settled`."""
        if self.total is None:
            with torch.inference_mode(False):
                self.total = torch.zeros(self._flat.numel, dtype=torch.float32)  # bf16-true changes the default
        return self.total

    def fold(self) -> None:
        """Takes the gradients that were assigned into `total`: they are the parameters' gradients so far."""
        if self.assigned:
            self.settled.result()
            for index, gradient in self.assigned.items():
                self._flat.slices[index].of(self.accumulated()).copy_(gradient.detach())
                self.summed[index] = True
            self.assigned.clear()
            self.summing = True

    def settle(self, done: "Future[None]") -> None:
        """What has landed is used until `done`."""
        if self._memory is None:
            self.settled = done
            return

        def give_back(_: None) -> "Future[None]":
            self._release()
            return done

        self.settled = then(ended(done), give_back)

    def target(self, index: int) -> Tensor:
        """Returns the bytes of `landing` that parameter `index` lands in."""
        item = self._flat.slices[index]
        size = self._flat.dtype.itemsize
        return self._bytes[item.start * size : (item.start + item.numel) * size]

    def add(self, landed: list[bool]) -> None:
        """Adds what has landed to the total, in fp32: on the worker."""
        whole = self.accumulated()
        for index, item in enumerate(self._flat.slices):
            if landed[index]:
                total, gradient = item.of(whole), item.of(self.landing)
                if self.summed[index]:
                    total.add_(gradient)
                else:
                    total.copy_(gradient)
                self.summed[index] = True

    def forget(self) -> None:
        """Drops what has landed and what was summed up, if its step has not begun."""
        self.assigned.clear()
        self.states = [GradientState.NONE] * len(self.states)
        if self.summing or any(self.landed):
            self.settled.result()
            self.landed = [False] * len(self.landed)
            self.summed = [False] * len(self.summed)
            self.summing = False

    def free(self) -> None:
        """Gives the memory back."""
        self._release()
        self.total = None

    def _has(self, memory: Tensor, give_back: Callable[[], None]) -> None:
        self._bytes, self._give_back = memory, give_back
        self.landing = memory.view(self._flat.dtype)

    def _release(self) -> None:
        """Gives the memory back, if there is any; nobody uses it."""
        give_back, self._give_back = self._give_back, None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.landing = self._bytes.view(self._flat.dtype)
        if give_back is not None:
            give_back()
