"""The number of the present process, for code that runs often: a system call each time would take longer."""

import os

process = os.getpid()
"""Another one in each forked process, which lacks the threads and the memory of the process that it was forked from."""


def _note_fork() -> None:
    global process
    process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)
