"""Each call of a function to the filesystem fails once, or is the last one of its process.

The calls are those that Python announces to audit hooks, and `os.fsync`. Calls that libraries in other languages make
themselves are not among them.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")

Fault = Literal["fail", "kill"]


class Disturbed:
    """Disturbs this process's calls to the filesystem in a directory, once this object is made.

    Args:
        root: the directory.
        at: number of the call to disturb, from 0.
        fault: "fail": the call raises EIO. "kill": the process is killed before the call.
    """

    def __init__(self, root: Path, at: int, fault: Fault) -> None:
        self._root = str(root)
        self._left = at
        self._fault = fault
        self.reached = False
        sys.addaudithook(self._hook)
        self._fsync, os.fsync = os.fsync, self._call_fsync

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and any(str(argument).startswith(self._root) for argument in arguments):
            self._count(event)

    def _call_fsync(self, descriptor: int) -> None:
        self._count("os.fsync")
        self._fsync(descriptor)

    def _count(self, event: str) -> None:
        self._left -= 1
        if self._left == -1:
            self.reached = True
            if self._fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, f"Input/output error injected in {event}")


def disturb(action: Callable[[], object], root: Path, at: int, fault: Fault) -> bool:
    """Runs `action` in a child of this process, with one call to the filesystem below `root` disturbed.

    Returns:
        Whether the call was reached; else the action ended undisturbed.
    """
    child = os.fork()
    if child == 0:
        disturbed = Disturbed(root, at, fault)
        try:
            action()
        except OSError:
            os._exit(3 if disturbed.reached else 4)
        finally:
            os._exit(2 if disturbed.reached else 0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and fault == "kill":
        return True
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 2, 3), f"the child ended with {code}"
    return code != 0
