"""Two processes train as with Lightning's `ddp`, bit for bit, and offload activations; one launch for all cases."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.support import forks
from tests.support.data_parallel import CASES, OTHERS
from tests.support.trainings import scratch_directories, script_environment

PROGRAM = ["-m", "tests.support.data_parallel"]


def launch(root: Path, *programs: tuple[Sequence[str], dict[str, str]]) -> None:
    """Runs programs at once, each with its environment variables, to their ends, and collects what they print."""
    with (root / "output").open("w") as output:
        running = [
            forks.start(program, stdout=output, stderr=output, env=script_environment() | variables)
            for program, variables in programs
        ]
        for process in running:
            process.wait(timeout=240)


def check(root: Path, name: str) -> None:
    """Asserts that a case has succeeded in both processes."""
    for rank in (0, 1):
        file = root / f"{name}.{rank}"
        assert file.exists(), (root / "output").read_text()[-5000:]
        assert file.read_text() == ""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of all cases in both processes."""
    root = tmp_path_factory.mktemp("ranks")
    launch(root, ([*PROGRAM, str(root)], {}))
    return root


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_two_processes(results: Path, name: str) -> None:
    check(results, name)


@pytest.mark.thorough
def test_an_error_of_one_process_ends_both(tmp_path: Path) -> None:
    """Each process shows its error, that of rank 0 names the cause, and no file is left."""
    command = [*PROGRAM, str(tmp_path), "2", "1", "failing"]
    done = forks.run(command, env=script_environment(), timeout=120)
    assert done.returncode != 0
    assert "KeyError: 'deliberate'" in done.stderr and "rank 1 has failed: KeyError" in done.stderr
    assert scratch_directories(tmp_path) == []


@pytest.mark.thorough
def test_a_recipe_trains_on_two_devices(tmp_path: Path) -> None:
    command = ["-m", "lightning_ssd", "run", "gpt", "-c", "laptop-cpu", "--trainer.devices=2"]
    command += ["--trainer.strategy=ssd_offload", "--trainer.max_steps=2", f"--trainer.default_root_dir={tmp_path}"]
    done = forks.run(command, env=script_environment(), cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Starting with 2 processes" in done.stderr
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1 and scratch_directories(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "hosts"])
def test_launchers(tmp_path: Path, launcher: str) -> None:
    """Processes that other programs have launched; the last case has one on each of two hosts."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    devices, num_nodes = ("1", "2") if launcher == "hosts" else ("2", "1")
    names = ["evaluation", "clipping_by_norm", "offloaded"] + ["refusals"] * (launcher == "hosts")
    program = [*PROGRAM, str(tmp_path), devices, num_nodes, *names]
    if launcher == "torchrun":
        launch(tmp_path, (["-m", "torch.distributed.run", "--nproc-per-node=2", *program], address))
    else:
        variables = [
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
             "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
            if launcher == "slurm"
            else {"NODE_RANK": rank}
            for rank in ("0", "1")
        ]  # fmt: skip
        launch(tmp_path, *((program, address | one) for one in variables))
    for name in names:
        check(tmp_path, name)
