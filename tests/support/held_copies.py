"""Copies of a CPU "device" that a test completes or fails, for steps on the device."""

import threading
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine
from lightning_ssd.futures import Future, finished
from tests.support.state_stores import CPU


class HeldCopies(CPUCopyEngine):
    """Copies of which the test completes the futures, or one of which fails."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.held: list[Future[None]] | None = None
        self.held_in: list[Future[None]] | None = None
        self.fail_at = -1
        self.calls: list[str] = []
        self.sources: list[Tensor] = []
        self._called = threading.Condition()

    def sibling(self) -> "HeldCopies":
        return self

    def _call(self, name: str) -> None:
        with self._called:
            self.calls.append(name)
            self._called.notify_all()
        if len(self.calls) == self.fail_at:
            raise RuntimeError("the device is lost")

    def until(self, name: str, times: int) -> None:
        """Returns when `name` was called as often as that; it was not called more often."""
        with self._called:
            assert self._called.wait_for(lambda: self.calls.count(name) >= times, 60)
            assert self.calls.count(name) == times

    def mark(self, *, awaited: bool = False) -> Any:
        self._call("mark")

    def h2d(self, src: Tensor, *arguments: Any, **named: Any) -> Any:
        self.sources.append(src)
        self._call("h2d")
        return super().h2d(src, *arguments, **named)

    def d2h(self, *arguments: Any, **named: Any) -> Any:
        self._call("d2h")
        return super().d2h(*arguments, **named)

    def on_d2h(self, mark: Any) -> "Future[None]":
        if self.held is None:
            self._call("on_d2h")
            return finished(None)
        self.held.append(future := Future[None]())
        self._call("on_d2h")
        return future

    def on_h2d(self, mark: Any) -> "Future[None]":
        if self.held_in is None:
            return finished(None)
        self.held_in.append(future := Future[None]())
        self._call("on_h2d")
        return future
