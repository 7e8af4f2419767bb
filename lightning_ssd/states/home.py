"""Where a flat lives between its uses: its compute weights, master weights and optimizer states, in host memory."""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.activations.copies import Copies, Mark
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.futures import finished
from lightning_ssd.storage.slab import Slab


@dataclass
class Opened:
    """A flat's values on the host, for one optimizer step or to be read. One-dimensional, `flat.numel` elements each.

    Attributes:
        weights: compute weights, in the flat's dtype.
        master: fp32 master weights; `weights` itself where those are fp32.
        states: fp32 optimizer states by name, zero before the first step.
    """

    weights: Tensor
    master: Tensor
    states: dict[str, Tensor]

    def round(self) -> None:
        """Rounds the master weights to the compute weights."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)


class Home(ABC):
    """Keeps one flat. Who has it open may read and write it until `close`; one at a time.

    A step that was announced by `reserve` comes before every `copy_in` that follows the call.

    Args:
        flat: the device's side.
    """

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._stepped: Future[Any] = finished(None)

    def reserve(self, stepped: "Future[Any]") -> None:
        """The flat will be opened, changed and closed before `stepped` is done."""
        self._stepped = stepped

    def copy_in(self, target: Tensor, after: Mark) -> "Future[Mark]":
        """Fills device bytes `target` with the compute weights once `after` is reached.

        The future is done when the copy was issued; the target is the copy's until the mark is reached.
        """
        issued: Future[Mark] = Future()

        def go(stepped: "Future[Any]") -> None:
            if (error := stepped.exception()) is not None:
                issued.set_exception(error)
                return
            try:
                self._copy_in(target, after, issued)
            except BaseException as error:
                issued.set_exception(error)

        self._stepped.add_done_callback(go)
        return issued

    @abstractmethod
    def _copy_in(self, target: Tensor, after: Mark, issued: "Future[Mark]") -> None: ...

    @abstractmethod
    def open(self) -> "Future[Opened]":
        """Brings the values to the host."""

    @abstractmethod
    def close(self, opened: Opened, *, changed: bool) -> None:
        """Takes the values back."""

    def drain(self) -> None:
        """Returns when the step that was announced is made and its result is where it belongs.

        Raises:
            StorageError: it could not be written.
        """
        self._stepped.result()

    def free(self) -> None:
        """Gives its place back."""
        return None


class HostHome(Home):
    """In host memory: the compute weights page-locked, the rest not.

    Why the compute weights may be overwritten while the device computes: a step begins when the last gradient has
    landed, which the compute stream produced after its last read of the weights on the device, and that came after
    their copy-in.

    Args:
        flat: the device's side.
        state_names: of the optimizer's states that have an element for each weight.
        copies: copies of the device.
    """

    def __init__(self, flat: Flat, state_names: tuple[str, ...], copies: Copies) -> None:
        super().__init__(flat)
        self._copies = copies
        self._slab = Slab(flat.nbytes, pin=copies.device.type == "cuda")
        weights = self._slab.tensor.view(flat.dtype)
        master = weights if flat.dtype == torch.float32 else _zeros(flat.numel)
        self._opened = Opened(weights, master, {name: _zeros(flat.numel) for name in state_names})

    def _copy_in(self, target: Tensor, after: Mark, issued: "Future[Mark]") -> None:
        issued.set_result(self._copies.into(self._slab.tensor, target, after))

    def open(self) -> "Future[Opened]":
        return finished(self._opened)

    def close(self, opened: Opened, *, changed: bool) -> None:
        return None

    def free(self) -> None:
        self._slab.close()


def _zeros(numel: int) -> Tensor:
    """Returns fp32 zeros on huge pages, which are taken now."""
    return Slab(4 * numel, pin=False).tensor.view(torch.float32).zero_()
