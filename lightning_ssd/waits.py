"""Waits of the training thread and of autograd's thread, which end with an error once nothing moves any more.

The waiting thread finds out by itself: every few seconds it compares counters of the objects that work for it.
"""

import math
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_ssd.futures import Future, all_of, first_of
from lightning_ssd.spans import WAIT, span

POLL_SECONDS = 5.0
"""Seconds between two comparisons of the counters."""

LIMIT = 120
"""Comparisons in a row without a change, after which a wait ends, unless an object of `watch` asks for more. No time:
the process may be suspended meanwhile."""

Result = TypeVar("Result")
Counters = dict[int, tuple[int, ...]]
"""What `Watched.progress` has returned, by identity of the object."""


class Watched(Protocol):
    """An object that has threads, or that threads wait for. Its methods are called on any thread."""

    def progress(self) -> tuple[int, ...]:
        """Returns counters that change when work begins or ends."""

    def pending(self) -> str:
        """Returns the name of the object and its pending work, for an error message; "" if there is none."""


_lock = threading.Lock()
"""Guards the next one. Not held while objects are asked, which have locks of their own."""
_watched: "weakref.WeakKeyDictionary[Watched, float]" = weakref.WeakKeyDictionary()
"""Objects, and seconds without a change in which each of them may still be at work."""
_stuck: Counters | None = None
"""Counters when a wait was given up. As long as none changes, later waits end at once, so that training ends."""


def watch(watched: Watched, seconds: float = 0.0) -> None:
    """Has all waits of this process compare the counters of `watched`, as long as it exists.

    Args:
        seconds: time without a change that no wait takes for an end of its work, if it is longer than that of `LIMIT`.
    """
    with _lock:
        _watched[watched] = seconds


def wait_for(future: "Future[Result]", work: str) -> Result:
    """Returns the result of `future`. A span names `work` while the calling thread waits for it.

    Raises:
        RuntimeError: nothing has moved for some minutes.
    """
    if not future.done():
        _wait(future, work)
    return future.result()


def wait_for_all(futures: "Iterable[Future[Result]]", work: str) -> None:
    """Returns when all `futures` are done, with results or errors. Otherwise as `wait_for`."""
    if not (every := all_of(futures)).done():
        _wait(every, work)


def wait_for_first(futures: "Iterable[Future[Result]]", work: str) -> None:
    """Returns when one of `futures` is done, with a result or an error. Otherwise as `wait_for`."""
    _wait(first_of(futures), work)


def wait_at_most(future: "Future[Any]", seconds: float, work: str) -> bool:
    """Returns whether `future` is done within some seconds. A span names `work` meanwhile."""
    with span(WAIT + work):
        return future.wait(seconds)


def _wait(future: "Future[Any]", work: str) -> None:
    global _stuck
    before: Counters = {}
    unchanged, timeout = 0, 0.1 if _stuck is not None and _still_stuck(_counters()) else POLL_SECONDS
    with span(WAIT + work):
        while not future.wait(timeout):
            timeout, counters = POLL_SECONDS, _counters()
            unchanged = unchanged + 1 if counters == before else 0
            before = counters
            if unchanged >= _limit() or _still_stuck(counters):
                _stuck = counters
                raise RuntimeError(
                    f"{threading.current_thread().name} waits for {work}, and no transfer, copy or job of an optimizer "
                    f"has ended for {_limit() * POLL_SECONDS:.0f} seconds. A drive or device does not answer (see "
                    "`dmesg`), or threads of lightning_ssd wait for each other: then report this text, and set "
                    f"`states='host'` meanwhile. {_pending()} Threads: {_threads()}."
                )


def _limit() -> int:
    """Returns the number of comparisons without a change after which a wait ends."""
    with _lock:
        return max([LIMIT, *(math.ceil(seconds / POLL_SECONDS) for seconds in _watched.values())])


def _counters() -> Counters:
    with _lock:
        watched = list(_watched)
    return {id(one): one.progress() for one in watched}


def _still_stuck(counters: Counters) -> bool:
    return _stuck is not None and counters.items() <= _stuck.items()


def _pending() -> str:
    """Returns the pending work of all objects, in sentences."""
    with _lock:
        watched = list(_watched)
    return " ".join(f"{pending[0].upper()}{pending[1:]}." for one in watched if (pending := one.pending()))


def _threads() -> str:
    """Returns the present function of each thread of this package."""
    package, found = Path(__file__).parent, []
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        while frame is not None and package not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        if frame is not None:
            file = Path(frame.f_code.co_filename).relative_to(package)
            found.append(f"{thread.name} in {frame.f_code.co_name} ({file}:{frame.f_lineno})")
    return ", ".join(found)
