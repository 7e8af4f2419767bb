"""Runs Python programs in forks of one process that has imported torch, Lightning and the package.

A new interpreter needs 7 seconds of CPU time for these imports, more than most programs of tests. The process of the
forks has one thread, and is started by the first program of a pytest process. It ends with the pytest process.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class Program:
    """A running program."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        number, (self._process,), _, _ = socket.recv_fds(status, 32, 1)
        self.pid = int(number)
        self.returncode: int | None = None
        """Exit status, or minus the number of the signal that has ended the program; None while it runs."""

    def wait(self, timeout: float) -> int:
        """Returns the exit status.

        Raises:
            TimeoutError: the program runs for longer.
        """
        if self.returncode is None:
            self._status.settimeout(timeout)
            self.returncode = int(self._status.recv(32))
            self._status.close()
            os.close(self._process)
        return self.returncode

    def kill(self) -> None:
        """Kills the program, unless it has ended, and waits for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)


def start(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | str = ROOT,
    stdin: IO[Any] | int = subprocess.DEVNULL,
    stdout: IO[Any] | int,
    stderr: IO[Any] | int,
) -> Program:
    """Starts a program, as `subprocess.Popen([sys.executable, *arguments], ...)` does.

    Args:
        arguments: "-m" and a module, "-c" and a text, or a file; and arguments of the program.
        env: environment variables. Imported modules have seen those of pytest.
        cwd: working directory.
        stdin: file.
        stdout: file.
        stderr: file.
    """
    ours, theirs = socket.socketpair()
    request = {"arguments": [str(one) for one in arguments], "env": dict(env), "cwd": str(cwd)}
    with theirs, open(os.devnull) as null:
        files = [null if stdin == subprocess.DEVNULL else stdin, stdout, stderr, theirs]
        descriptors = [one if isinstance(one, int) else one.fileno() for one in files]
        socket.send_fds(_server()[0], [json.dumps(request).encode()], descriptors)
    return Program(ours)


def run(
    arguments: Sequence[str | Path], *, env: Mapping[str, str] = os.environ, cwd: Path | str = ROOT, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Runs a program until it and all processes that write to its pipes have ended, as `subprocess.run` does.

    Raises:
        TimeoutError: they run for longer than `timeout` seconds, after which the program is killed.
    """
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as reading:
        pipes = [os.pipe() for _ in range(2)]
        program = start(arguments, env=env, cwd=cwd, stdout=pipes[0][1], stderr=pipes[1][1])
        stack.callback(program.kill)
        printed = {read: b"" for read, _ in pipes}
        for read, write in pipes:
            os.close(write)
            stack.callback(os.close, read)
            reading.register(read, selectors.EVENT_READ)
        until = time.monotonic() + timeout
        while reading.get_map():
            ready = reading.select(until - time.monotonic())
            if not ready:
                raise TimeoutError(f"{arguments} has not ended after {timeout} s")
            for key, _ in ready:
                printed[key.fd] += (data := os.read(key.fd, 1 << 16))
                if not data:
                    reading.unregister(key.fd)
        status = program.wait(60)
    return subprocess.CompletedProcess(arguments, status, *(text.decode() for text in printed.values()))


@functools.cache
def _server() -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Returns the connection to the process of the forks, with which it ends, and this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=ROOT, env=env)
    return ours, process


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks for each request. Returns the request in a fork, and None when pytest has ended."""
    watched = selectors.DefaultSelector()
    watched.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}
    """By the descriptor of a program's process, its number, and the connection that is told its exit status."""
    while True:
        ready = [key.fd for key, _ in watched.select()]
        for process in running.keys() & ready:
            pid, status = running.pop(process)
            watched.unregister(process)
            os.close(process)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with status, contextlib.suppress(ConnectionError):  # the test has failed, and waits no longer
                status.send(str(code).encode())
        if requests.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            for number, file in enumerate(files[:3]):
                os.dup2(file, number)
            for descriptor in [*files, *running]:
                os.close(descriptor)
            for _, status in running.values():
                status.close()
            watched.close()
            requests.close()
            request: dict[str, Any] = json.loads(message)
            return request
        for file in files[:3]:
            os.close(file)
        process, status = os.pidfd_open(pid), socket.socket(fileno=files[3])
        socket.send_fds(status, [str(pid).encode()], [process])
        running[process] = pid, status
        watched.register(process, selectors.EVENT_READ)


def _execute(arguments: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Does what Python does with its arguments."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def _main() -> None:
    status = 0

    def end() -> None:
        """The last exit handler of a program: modules are not cleared, which would copy the memory of all imports."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    requests = socket.socket(fileno=int(sys.argv[1]))
    atexit.register(end)
    import lightning_ssd

    for name in lightning_ssd.__all__:
        getattr(lightning_ssd, name)
    request = _serve(requests)
    if request is None:
        return
    status = 1
    try:
        _execute(**request)
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            status = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())


if __name__ == "__main__":
    _main()
