"""Runs a function of a module in several processes, as `torchrun` would."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Sequence

from tests.support import forks
from tests.support.forks import ROOT


def launch(
    script: str, size: int = 2, arguments: Sequence[str] = (), timeout: float = 240, hosts: int = 1
) -> list[tuple[int, str]]:
    """Runs `python tests/ranks/SCRIPT ARGUMENTS` as each rank; `size` ranks on as many hosts, which this machine plays.

    Returns:
        Exit status and output of each rank.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # a killed rank leaves scratch files
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)]
        started = []
        for rank, output in enumerate(outputs):
            own = {
                "RANK": rank, "LOCAL_RANK": rank % (size // hosts), "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size // hosts, "GROUP_RANK": rank // (size // hosts),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            process = forks.start(
                [ROOT / "tests/ranks" / script, *arguments],
                env={**os.environ, **{name: str(value) for name, value in own.items()}},
                stdout=output,
                stderr=output,
                cwd=folder,
            )
            stack.callback(process.kill)
            started.append(process)
        results = []
        for process, output in zip(started, outputs, strict=True):
            status = process.wait(timeout)
            output.seek(0)
            results.append((status, output.read()))
    return results
