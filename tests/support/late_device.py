"""A CPU "device" whose copies are made late, like those of a GPU that is far behind the host."""

import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine
from lightning_ssd.futures import Future

IDLE_SECONDS = 0.005
"""Host time without a call after which the device catches up. Longer times only make tests slower."""


def _uses(tensor: Tensor) -> int:
    """Returns the number of owners of a tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_USES_OF_ONE_TENSOR = _uses(torch.empty(1))


class _Mark(float):
    """A copy of one direction, by its number. The value is the time when it was issued, which the clock reads."""

    direction: str
    number: int


@dataclass
class _Copy:
    """A copy that the host has issued.

    Attributes:
        number: number of the copy, in the order of issue.
        src: its source; if `passed`, the bytes that it had when the compute stream waited.
        dst: its destination.
        after: number of the last copy to the host that precedes a copy to the device.
        passed: whether the compute stream has waited for this copy to the host.
    """

    number: int
    src: Tensor
    dst: Tensor
    after: int
    passed: bool = False


class LateCopies(CPUCopyEngine):
    """Copies of a device that is behind the host.

    A copy is made when the future of a mark completes: one more call of the engine later, or when the host has made no
    call for `IDLE_SECONDS`. If the compute stream waits for the mark before, a copy to the device is made then, and a
    copy to the host reads its source then, but the host has it later. Until then the destination is undefined: a
    missing wait, a source that is overwritten too early, and a buffer that is given to another owner too early change
    numbers. `violations` names device buffers that were released before their copy was made.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.violations: list[str] = []
        self._condition = threading.Condition(threading.RLock())
        """Guards all fields below. Copies are made while it is held; futures are completed without it."""
        self._issued = {"d2h": deque[_Copy](), "h2d": deque[_Copy]()}
        self._count = 0
        self._passed = 0
        """Number of the last copy to the host that the compute stream has waited for."""
        self._futures: deque[tuple[str, int, int, Future[None]]] = deque()
        self._calls = 0
        self._completing = False
        self._closed = False
        self._thread = threading.Thread(target=self._catch_up, name="late-device", daemon=True)
        self._thread.start()

    def d2h(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        return self._issue("d2h", src, dst[: src.numel()])

    def h2d(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        return self._issue("h2d", src[: dst.numel()], dst)

    def reached(self, mark: Any) -> bool:
        with self._condition:
            self._call()
            issued = () if mark is None else self._issued[mark.direction]
            return not issued or issued[0].number > mark.number

    def wait(self, mark: Any) -> None:
        with self._condition:
            self._call()
            if mark is not None and mark.direction == "h2d":
                self._make("h2d", mark.number)
            elif mark is not None:
                self._pass(mark.number)

    def on_d2h(self, mark: Any) -> "Future[None]":
        return self._future("d2h", mark)

    def on_h2d(self, mark: Any) -> "Future[None]":
        return self._future("h2d", mark)

    def drain(self) -> None:
        with self._condition:
            for direction in self._issued:
                self._make(direction, self._count)
            self._calls += 2
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._futures and not self._completing)

    def close(self) -> None:
        self.drain()
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _call(self) -> None:
        self._calls += 1
        self._condition.notify_all()

    def _issue(self, direction: str, src: Tensor, dst: Tensor) -> Any:
        with self._condition, torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
            self._call()
            self._count += 1
            src, dst = src.detach(), dst.detach()
            dst.fill_(0xFF)
            self._issued[direction].append(_Copy(self._count, src, dst, self._passed))
            mark = _Mark(perf_counter())
            mark.direction, mark.number = direction, self._count
            return mark

    def _pass(self, number: int) -> None:
        """Orders the compute stream after copies to the host."""
        self._passed = max(self._passed, number)
        for copy in self._issued["d2h"]:
            if copy.number <= number and not copy.passed:
                self._check(copy.src, "d2h", copy.number)
                with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
                    copy.src, copy.passed = copy.src.clone(), True

    def _make(self, direction: str, number: int) -> None:
        issued = self._issued[direction]
        while issued and issued[0].number <= number:
            copy = issued.popleft()
            if direction == "h2d":
                self._make("d2h", copy.after)
            with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
                copy.dst.copy_(copy.src)
            if not copy.passed:
                self._check(copy.src if direction == "d2h" else copy.dst, direction, copy.number)

    def _check(self, on_device: Tensor, direction: str, number: int) -> None:
        if _uses(on_device) <= _USES_OF_ONE_TENSOR:
            self.violations.append(f"the device memory of {direction} copy {number} was released before the copy")

    def _future(self, direction: str, mark: Any) -> "Future[None]":
        done: Future[None] = Future()
        with self._condition:
            self._call()
            self._futures.append((direction, 0 if mark is None else mark.number, self._calls, done))
        return done

    def _catch_up(self) -> None:
        while True:
            with self._condition:
                while not self._futures:
                    if self._closed:
                        return
                    self._condition.wait()
                direction, number, call, done = self._futures[0]
                seen = self._calls
                while self._calls <= call:
                    if not self._condition.wait(IDLE_SECONDS) and self._calls == seen:
                        break
                    seen = self._calls
                self._futures.popleft()
                self._make(direction, number)
                self._completing = True
            done.set_result(None)
            with self._condition:
                self._completing = False
                self._condition.notify_all()


class LateEngines(LateCopies):
    """Copies of a device that is behind the host; all engines of a test are listed in `made`, which it sets to []."""

    made: list["LateEngines"] = []  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.made.append(self)

    @classmethod
    def all_violations(cls) -> list[str]:
        return [violation for engine in cls.made for violation in engine.violations]
