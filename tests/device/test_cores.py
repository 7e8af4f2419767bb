"""Cores and threads: of containers with a quota, and beside the thread that launches kernels."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.device import available_cores, cores, kernel_threads
from lightning_ssd.model_states.optimizers.adam import CHECKED_OPTIONS, settings_of
from tests.support.files import write_files


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (None, 16),
        ("max 100000\n", 16),
        ("800000 100000\n", 8),
        ("250000 100000\n", 3),  # a part of a core is used, too
        ("6400000 100000\n", 16),  # more than the affinity allows
        ("5000 100000\n", 1),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    write_files(tmp_path, {} if quota is None else {"cgroup/cpu.max": quota})
    assert available_cores(tmp_path / "proc", tmp_path / "cgroup") == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/slurm/job\n", "cgroup/slurm/job/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/slurm/job\n", "cgroup/slurm/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n0::/\n",
                "cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
                "cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
    ids=["own", "ancestor", "version 1"],
)
def test_a_job_has_the_cores_of_its_cgroups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    write_files(tmp_path, files)
    assert available_cores(tmp_path / "proc", tmp_path / "cgroup") == expected


@pytest.mark.parametrize(
    ("cores", "most", "expected"),
    [(1, 1, 1), (2, 2, 2), (3, 3, 2), (4, 4, 3), (8, 8, 7), (16, 16, 15), (64, 64, 60)]
    + [(16, 4, 4), (8, 64, 7), (1, 64, 1)],  # fewer by OMP_NUM_THREADS; more than a container's quota
)
def test_a_kernel_leaves_a_core_for_launches(cores: int, most: int, expected: int) -> None:
    assert kernel_threads(cores, most) == expected


def test_the_cpu_optimizer_leaves_a_core_for_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.model_states.optimizers.adam.available_cores", lambda: 16)
    monkeypatch.setattr("torch.get_num_threads", lambda: 16)
    settings = settings_of(CHECKED_OPTIONS | {"decoupled_weight_decay": True}, "fused", 1, 1.0)
    assert settings is not None and settings.threads == 15


@pytest.mark.parametrize(
    ("affinities", "expected"),
    [([16, 16], 7), ([(0, 8), (8, 16)], 7), ([(0, 5), (5, 10), (10, 16)], 4)],
    ids=["the same cores", "cores of their own", "the least share"],
)
def test_processes_share_the_cores_that_they_have_together(
    affinities: list[Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_process = [set(range(*one) if isinstance(one, tuple) else range(one)) for one in affinities]
    monkeypatch.setattr(cores, "available_cores", lambda: len(of_process[0]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as `torchrun` sets it
    before = torch.get_num_threads()
    restore = cores.share_cores(of_process)
    assert torch.get_num_threads() == expected
    restore()
    assert torch.get_num_threads() == before
