"""The gradient of one flat on the host: as it lands from the device, and summed over micro-batches in fp32."""

from concurrent.futures import Future

import torch
from torch import Tensor

from lightning_ssd.activations.copies import Mark
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.futures import finished
from lightning_ssd.storage.slab import Slab


class Gradient:
    """Host memory for the gradient of one flat.

    Who owns what until when: `landing` belongs to the copies out until their marks are reached, then to whoever makes
    `settled` (a sum or a step, on the worker), and after that to the next copies out. `total` is the worker's alone.

    Args:
        flat: whose gradient it is.
        pin: page-lock the memory that it lands in.
    """

    def __init__(self, flat: Flat, *, pin: bool) -> None:
        self._flat = flat
        self._slab = Slab(flat.nbytes, pin=pin)
        # Anonymous memory is zero: what lies between parameters is stepped like a weight without gradient.
        self.landing = self._slab.tensor.view(flat.dtype)
        self.total: Tensor | None = None
        self.settled: Future[None] = finished(None)
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

    def target(self, index: int) -> Tensor:
        """Returns the bytes of `landing` that parameter `index` lands in."""
        item = self._flat.slices[index]
        size = self._flat.dtype.itemsize
        return self._slab.tensor[item.start * size : (item.start + item.numel) * size]

    def add(self, landed: list[bool]) -> None:
        """Adds what has landed to the total, in fp32: on the worker."""
        if self.total is None:
            self.total = torch.zeros(self._flat.numel, dtype=torch.float32)  # bf16-true changes the default
        for index, item in enumerate(self._flat.slices):
            if landed[index]:
                total, gradient = item.of(self.total), item.of(self.landing)
                if self.summed[index]:
                    total.add_(gradient)
                else:
                    total.copy_(gradient)
                self.summed[index] = True

    def forget(self) -> None:
        """Drops what has landed and what was summed up, if its step has not begun."""
        if self.summing or any(self.landed):
            self.settled.result()
            self.landed = [False] * len(self.landed)
            self.summed = [False] * len(self.summed)
            self.summing = False

    def free(self) -> None:
        """Gives the memory back."""
        self._slab.close()
        self.landing, self.total = self.landing[:0].clone(), None
