"""Protects code that must not end halfway from Ctrl-C, which Python raises between any two bytecodes.

Code that runs in each micro-batch leaves no generator before its end, as `any` does at the first true value: Python
loses a KeyboardInterrupt that a signal handler raises while such a generator is closed. It makes lists.
"""

import _signal  # type: ignore[import-not-found]
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

_SIGINT = int(signal.SIGINT)
"""For the functions of `_signal`. Those of `signal` convert its arguments to enums, which takes longer than most calls
that are protected."""

_MAIN_THREAD = threading.main_thread().ident

P = ParamSpec("P")
T = TypeVar("T")


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function: a first Ctrl-C during its call takes effect when it returns, a second Ctrl-C at once.

    Callbacks of futures run on the training thread, too. If a callback ended halfway, jobs would never begin, and the
    end of training would wait for them forever. If the end of training ended halfway, parameters would have no memory.

    Threads: any. Python delivers signals to the main thread; on others, the function is called as it is.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != _MAIN_THREAD:
            return function(*args, **kwargs)
        handler = _signal.getsignal(_SIGINT)
        if not callable(handler) or isinstance(handler, _Deferring):
            return function(*args, **kwargs)
        deferring = _Deferring(handler)
        _signal.signal(_SIGINT, deferring)
        try:
            result = function(*args, **kwargs)
        finally:
            deferring.ended = True
            if _signal.getsignal(_SIGINT) is deferring:  # else other code has set its own
                _signal.signal(_SIGINT, handler)
        if deferring.came:
            handler(signal.SIGINT, None)
        return result

    return run


class _Deferring:
    """A handler of SIGINT that notes the first signal in `came`, and passes later ones to another handler.

    When the protected call has `ended`, it passes none, so that the other handler is always put back.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.came = self.ended = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came and not self.ended:
            self._handler(number, frame)
        self.came = True
