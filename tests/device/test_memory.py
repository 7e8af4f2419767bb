"""Host memory that a process may use, by fake files of the kernel, and GPU memory, on a fake device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ssd.device import (
    CUDAMemory,
    allocator_memory,
    available_memory,
    count_evictable,
    process_gpu_memory,
    process_ram,
    usable_gpu_memory,
)
from lightning_ssd.device.memory import FRAGMENTS
from lightning_ssd.model_states import StatesConfig
from lightning_ssd.sizes import GPU_USABLE
from tests.support.files import write_files

GIB = 2**30
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB; 2 GiB of it belong to other programs, and 6 GiB are reserved by this process."""
    fake = SimpleNamespace(free=72 * GIB, reserved=6 * GIB, fraction=1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: fake.reserved)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def get_fraction(device: Any) -> float:
        assert device == 0, "torch takes no device without an index"
        return fake.fraction

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", get_fraction)
    return fake


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, 78),  # free, or reserved by this process
        ({"fraction": 0.3}, 24),  # a capped process
        ({"fraction": 0.3, "free": 10 * GIB}, 16),  # other programs use more than the cap allows
        ({"fraction": 0.99}, 78),
        ({"fraction": 0.0125}, 1),  # a budget below `FRAGMENTS`
        ({"free": 0, "reserved": 0}, 0),
    ],
)
def test_the_least_of_free_memory_and_the_fraction_counts(gpu: Any, state: dict[str, Any], expected: int) -> None:
    vars(gpu).update(state)
    assert process_gpu_memory(GPU) == pytest.approx(expected * GIB, abs=1)
    usable = min(GPU_USABLE * expected * GIB, expected * GIB - FRAGMENTS)
    assert usable_gpu_memory(GPU) == pytest.approx(max(0, usable), abs=2)


def test_a_device_without_an_index_is_the_current_one(gpu: Any) -> None:
    gpu.fraction = 0.3
    assert process_gpu_memory(torch.device("cuda")) == process_gpu_memory(GPU)


def test_every_automatic_budget_follows_the_fraction(gpu: Any) -> None:
    """Budgets of states, of their prefetches, of the planner and of kept activations."""
    config = StatesConfig("auto", "auto", None, "optimized", "fp32", "auto", False)
    share = StatesConfig("auto", "50%", None, "optimized", "fp32", "auto", False)

    def budgets() -> list[float]:
        resident = config.resident_budget(GPU)
        assert resident is not None
        return [resident, config.budget(GPU), share.budget(GPU), CUDAMemory(GPU).limit()]

    whole = budgets()
    gpu.fraction = 0.3
    assert budgets() == pytest.approx([value * 24 / 78 for value in whole], rel=1e-6)


def test_the_allocators_state_equals_torchs_report(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CUDAMemory` reads the statistics that `memory_allocated` and `max_memory_allocated` flatten."""
    pools = {pool: {"current": 3 * n, "peak": 7 * n} for n, pool in enumerate(("all", "small_pool", "large_pool"), 1)}
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional: 0)
    statistics = {"allocated_bytes": pools, "reserved_bytes": {"all": {"current": 5}}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda index: statistics, raising=False)
    memory = CUDAMemory(GPU)
    assert (memory.allocated(), memory.peak(), memory.reserved()) == (3, 7, 5)
    assert (torch.cuda.memory_allocated(GPU), torch.cuda.max_memory_allocated(GPU)) == (3, 7)
    meter = allocator_memory(GPU)
    assert meter is not None
    before = meter.unreserved()

    def allocate(nbytes: int) -> None:
        every = pools["all"]
        every["current"] += nbytes
        every["peak"] = max(every.values())

    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: pools["all"].update(peak=pools["all"]["current"])
    )
    count_evictable(GPU, 2)
    allocate(2)
    assert (meter.allocated(), meter.peak(), meter.reserved(), meter.unreserved() - before) == (3, 7, 5, 2)
    assert memory.allocated() == 5, "copies count evictable bytes, as they are in use"
    allocate(6)
    allocate(-6)
    assert meter.peak() == 9
    allocate(-2)
    count_evictable(GPU, -2)
    assert (meter.allocated(), meter.peak()) == (3, 9), "a peak has no bytes that were evictable then"
    meter.reset_peak()
    assert meter.peak() == 3


def _version_2(folder: str, limit: int | str, used: int) -> dict[str, str]:
    """Returns the files of a cgroup with a page cache of 3 GiB."""
    stat = f"anon {used - 3 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n"
    names = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {f"cgroup{folder}/{name}": text for name, text in names.items()}


def _version_1(folder: str, limit: int, used: int) -> dict[str, str]:
    """Returns the files of a cgroup with a page cache of 3 GiB, all of it in descendants."""
    stat = f"active_file 0\ninactive_file 0\ntotal_active_file {GIB}\ntotal_inactive_file {2 * GIB}\n"
    names = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}
    return {f"cgroup/memory{folder}/{name}": text for name, text in names.items()}


UNLIMITED = 9223372036854771712
"""In place of "max", in version 1."""


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", _version_2("", 16 * GIB, 10 * GIB), 9),
        ("0::/\n", _version_2("", "max", 10 * GIB), 64),
        ("0::/slurm/job\n", _version_2("/slurm/job", 16 * GIB, 10 * GIB), 9),
        ("0::/slurm/job\n", _version_2("/slurm/job", "max", 9 * GIB) | _version_2("/slurm", 16 * GIB, 12 * GIB), 7),
        ("0::/slurm/job\n", _version_2("/slurm/job", 16 * GIB, 8 * GIB) | _version_2("/slurm", 40 * GIB, 35 * GIB), 8),
        ("0::/slurm/job\n", _version_2("/other", 16 * GIB, 10 * GIB), 64),
        ("0::/docker/1\n", _version_2("", 16 * GIB, 10 * GIB), 9),
        ("0::/../other\n", _version_2("", 16 * GIB, 10 * GIB), 9),
        ("0::/\n", _version_2("", 8 * GIB, 12 * GIB), 0),
        ("0::/\n", {"cgroup/memory.max": f"{16 * GIB}\n", "cgroup/memory.current": f"{10 * GIB}\n"}, 6),
        ("9:memory:/job\n0::/\n", _version_1("/job", 16 * GIB, 10 * GIB) | _version_1("", UNLIMITED, 90 * GIB), 9),
        ("9:memory:/a/job\n", _version_1("/a/job", UNLIMITED, 9 * GIB) | _version_1("/a", 16 * GIB, 10 * GIB), 9),
        ("9:memory:/docker/1\n", _version_1("", 16 * GIB, 10 * GIB), 9),
        ("9:memory:/job\n", {}, 64),
        (None, _version_2("", 16 * GIB, 10 * GIB), 9),
        (None, {}, 64),
    ],
    ids=["root", "root without limit", "nested", "ancestor", "fuller ancestor", "other job", "container"]
    + ["outside of the container", "exceeded", "no statistics", "version 1", "ancestor of version 1"]
    + ["container of version 1", "no cgroup", "root, unknown path", "nothing"],
)
def test_the_least_of_free_memory_and_the_cgroups_limits_counts(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], expected: int
) -> None:
    write_files(tmp_path, {"proc/meminfo": f"MemTotal: {2**27} kB\nMemAvailable: {2**26} kB\n"} | files)
    if cgroup is not None:
        write_files(tmp_path, {"proc/self/cgroup": cgroup})
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == expected * GIB


@pytest.mark.parametrize(
    ("files", "kib"),
    [
        (
            {
                "smaps_rollup": "7f00-7fff ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss: 7 kB\n",
                "status": "VmRSS: 9 kB",
            },
            7,
        ),
        ({"status": "Name:\tpython\n\nVmRSS:\t9 kB\n"}, 9),
        ({}, 0),
    ],
)
def test_the_memory_of_a_process_is_known_where_the_kernel_has_fewer_files(
    files: dict[str, str], kib: int, tmp_path: Path
) -> None:
    """The log lines before a training name it: they must not end one."""
    write_files(tmp_path / "self", files)
    assert process_ram(tmp_path) == kib * 1024
