"""Runs a function of a module in several processes, as `torchrun` would."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
    started = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as kill:  # a killed rank leaves scratch files
        for rank in range(size):
            own = {
                "RANK": rank, "LOCAL_RANK": rank % (size // hosts), "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size // hosts, "GROUP_RANK": rank // (size // hosts),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
                "PYTHONPATH": ROOT,
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/ranks" / script), *arguments],
                env={**os.environ, **{name: str(value) for name, value in own.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
            )
            kill.callback(process.kill)
            started.append(process)
        outputs = [one.communicate(timeout=timeout)[0] for one in started]
    return [(one.returncode, output) for one, output in zip(started, outputs, strict=True)]
