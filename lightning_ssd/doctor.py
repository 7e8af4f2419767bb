"""The command `lightning-ssd doctor`: whether a machine has what a training needs, line by line, with remedies."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lightning_ssd.device import CGROUPS, PROC, available_memory
from lightning_ssd.profiling import copy_bandwidths, memory_bandwidth
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import BlobStore, StorageError, read_wear, why_no_gds
from lightning_ssd.versions import TESTED, installed_versions, is_tested

Verdict = Literal["good", "slow", "wrong"]

LEAST_PCIE = 10e9
"""Bytes/s of a copy to or from the GPU below which the link is called slow: half of PCIe 4.0 x16."""

LEAST_DRAM = 20e9
"""Bytes/s, read and written, below which host memory is called slow: that of one DDR4 channel."""

LEAST_DRIVE = 1e9
"""Bytes/s below which a drive is called slow: SATA drives have 0.5 GB/s, NVMe drives 2 GB/s or more."""

MOST_WORN = 0.8
"""Used share of a drive's rated endurance from which on the drive is called wrong."""

_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "virtiofs", "overlay")


@dataclass(frozen=True)
class Finding:
    """A line of the command.

    Attributes:
        subject: the examined part of the machine.
        verdict: "slow": trainings work, and are slower or smaller than they could be; "wrong": they may fail.
        found: result of the examination, with units.
        remedy: what to do; empty if nothing.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:5}  {self.subject}: {self.found}" + (
            f"\n         -> {self.remedy}" if self.remedy else ""
        )


def examine(paths: Sequence[Path]) -> Iterator[Finding]:
    """Yields the findings about this machine, in a few seconds each.

    Args:
        paths: directories for scratch files, one for each drive to examine. Each gets a file of up to 64 MiB for the
            measurement, which is removed.
    """
    yield from _versions()
    yield from _gpu(PROC)
    yield from _memory(PROC)
    for path in paths:
        yield from _drive(path, PROC)
    yield _compiler()
    yield _gds()


def _versions() -> Iterator[Finding]:
    for name, version in installed_versions().items():
        oldest, newest = TESTED[name]
        if is_tested(name, version):
            yield Finding(name, "good", version)
        else:
            remedy = "install a tested version, or compare the first losses with plain Lightning's"
            yield Finding(name, "wrong", f"{version} (tested: {oldest} to {newest})", remedy)


def _gpu(proc: Path) -> Iterator[Finding]:
    driver = proc / "driver" / "nvidia" / "version"
    if not torch.cuda.is_available():
        remedy = "install NVIDIA's driver; in a container, start it with --gpus all"
        if torch.version.cuda is None:
            remedy = "this torch is built without CUDA: install one of pytorch.org's with CUDA if there is a GPU"
        elif driver.exists():
            remedy = "the driver is older than this torch needs, or CUDA_VISIBLE_DEVICES hides the GPU"
        yield Finding("GPU", "slow", "none is usable: models train on the CPU", remedy)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    busy = free < 0.9 * total
    remedy = "end other processes that use the GPU (`nvidia-smi` lists them)" if busy else ""
    memory = f"{format_bytes(free)} of {format_bytes(total)} free"
    yield Finding("GPU", "slow" if busy else "good", f"{torch.cuda.get_device_name(device)}, {memory}", remedy)
    lines = driver.read_text().splitlines() if driver.exists() else []
    yield Finding("driver", "good", lines[0].strip() if lines else f"one that CUDA {torch.version.cuda} accepts")
    into, out, _ = copy_bandwidths(device)
    slow = min(into, out) < LEAST_PCIE
    remedy = "put the GPU in an x16 slot, and look for a lower link width in `nvidia-smi -q`" if slow else ""
    found = f"{into / 1e9:.1f} GB/s to the GPU, {out / 1e9:.1f} GB/s from it"
    yield Finding("PCIe", "slow" if slow else "good", found, remedy)


def _memory(proc: Path) -> Iterator[Finding]:
    rate = memory_bandwidth(torch.device("cpu"))
    remedy = "fill all channels with memory modules, and end other processes" if rate < LEAST_DRAM else ""
    threads = f"with {torch.get_num_threads()} threads"
    yield Finding("DRAM", "slow" if remedy else "good", f"{rate / 1e9:.1f} GB/s read and written {threads}", remedy)
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, usable = int(fields["MemTotal"].split()[0]) * 1024, available_memory(proc, CGROUPS)
    remedy = "" if usable > total / 2 else "end other processes, or raise the container's limit (`docker run --memory`)"
    found = f"{format_bytes(usable)} of {format_bytes(total)} usable"
    yield Finding("host memory", "slow" if remedy else "good", found, remedy)
    kernel = proc / "sys" / "kernel" / "osrelease"
    if kernel.exists() and "microsoft" in kernel.read_text().lower():
        remedy = "raise `memory=` in .wslconfig; keep scratch files on the Linux drive, not in /mnt/c"
        yield Finding("WSL2", "slow", "Windows limits pinned memory to about half of the RAM", remedy)
    yield _pinned()


def _pinned() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    found = f"`ulimit -l` is {'unlimited' if unlimited else format_bytes(limit)}"
    if torch.cuda.is_available():
        try:
            torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            remedy = "`ulimit -l unlimited`; in a container `docker run --ulimit memlock=-1`"
            return Finding("pinned memory", "wrong", f"256 MiB can't be pinned ({error}); {found}", remedy)
        return Finding("pinned memory", "good", f"256 MiB could be pinned; {found}")
    remedy = "" if unlimited else "if pinning fails: `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`"
    return Finding("pinned memory", "good", f"not tried without a GPU; {found}", remedy)


def _drive(path: Path, proc: Path) -> Iterator[Finding]:
    subject = f"drive of {path}"
    filesystem = filesystem_of(path, proc)
    if filesystem in _IN_MEMORY:
        remedy = "give a directory on an SSD, because this one is in host memory"
        yield Finding(subject, "wrong", f"filesystem {filesystem}", remedy)
        return
    remote = filesystem.split(".")[0] in _REMOTE
    remedy = (
        "give a directory on a local ext4 or XFS drive; in a container, mount one (`docker run -v`)" if remote else ""
    )
    yield Finding(subject, "slow" if remote else "good", f"filesystem {filesystem}", remedy)
    try:
        direct = accepts_direct_io(path)
        store = BlobStore([path], device=torch.device("cpu"), backend="posix")
        store.close()
    except (OSError, StorageError) as error:
        yield Finding(subject, "wrong", str(error), "give a writable directory with free space")
        return
    remedy = "" if direct else "give a directory on a local ext4 or XFS drive: I/O uses host memory otherwise"
    yield Finding(subject, "good" if direct else "slow", f"O_DIRECT {'works' if direct else 'is refused'}", remedy)
    write, read = store.write_bandwidth, store.read_bandwidth
    remedy = "use an NVMe drive, or several (`path=[...]`)" if min(write, read) < LEAST_DRIVE else ""
    found = f"{write / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read"
    yield Finding(subject, "slow" if remedy else "good", found, remedy)
    yield _wear(subject, path)


def _wear(subject: str, path: Path) -> Finding:
    wear = read_wear(path)
    if wear is None:
        remedy = "install smartmontools, and run as root to see the drive's own counters"
        return Finding(subject, "good", "wear unknown", remedy)
    parts = [] if wear.bytes_written is None else [f"{wear.bytes_written / 1e12:.1f} TB written in its life"]
    parts += [] if wear.endurance_used is None else [f"{wear.endurance_used:.0%} of its rated endurance used"]
    worn = (wear.endurance_used or 0) >= MOST_WORN
    remedy = "replace the drive before a training that writes much; keep a backup" if worn else ""
    return Finding(subject, "wrong" if worn else "good", f"{wear.device}: {', '.join(parts)}", remedy)


def _compiler() -> Finding:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        remedy = "install gcc or clang: without one, torch's kernels step AdamW, which take more passes"
        return Finding("C compiler", "slow", "none", remedy)
    return Finding("C compiler", "good", compiler)


def _gds() -> Finding:
    reason = why_no_gds(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is None:
        return Finding("GPUDirect Storage", "good", "kvikio and its driver work (used with `checksum=False`)")
    return Finding("GPUDirect Storage", "good", f"not used, and not needed: {reason}")


def filesystem_of(path: Path, proc: Path) -> str:
    """Returns the name of the filesystem that holds `path`, such as `ext4`; "unknown" if the kernel names none.

    Args:
        path: an existing file or directory.
        proc: folder of the kernel's files about processes.
    """
    number = os.stat(path).st_dev
    device, found = f"{os.major(number)}:{os.minor(number)}", "unknown"
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == device:
            found = source.split()[0]
    return found


def accepts_direct_io(path: Path) -> bool:
    """Returns whether a file in the directory `path` can be opened with O_DIRECT.

    Raises:
        OSError: no file can be made there.
    """
    with tempfile.NamedTemporaryFile(dir=path) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
    return True
