"""Runs a function of a module in several processes, as `torchrun` would."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(script: str, size: int = 2, arguments: Sequence[str] = (), timeout: float = 240) -> list[tuple[int, str]]:
    """Runs `python tests/ranks/SCRIPT ARGUMENTS` as each rank.

    Returns:
        Exit status and output of each rank.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    started = []
    for rank in range(size):
        own = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1,
            "PYTHONPATH": ROOT,
        }  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        command = [sys.executable, str(ROOT / "tests/ranks" / script), *arguments]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
        )
    try:
        outputs = [one.communicate(timeout=timeout)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, output) for one, output in zip(started, outputs, strict=True)]
