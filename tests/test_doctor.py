"""`lightning-ssd doctor`: every line says good, slow or wrong, and names the remedy."""

import json
import os
import re
from pathlib import Path

import pytest

from lightning_ssd import cli, doctor
from lightning_ssd.profiling import machine
from lightning_ssd.storage import smart
from tests.support.storage import answer

SUBJECTS = ["Python", "torch", "Lightning", "GPU", "DRAM", "host memory", "pinned memory", "C compiler"]


@pytest.fixture(autouse=True)
def short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COPY_BYTES", 2**20)
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of a machine with 64 GiB, whose directory for scratch files is on ext4."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "sys" / "kernel").mkdir(parents=True)
    (folder / "self" / "cgroup").write_text("0::/\n")
    _mount(folder, "ext4")
    _memory(folder, 60)
    (folder / "sys" / "kernel" / "osrelease").write_text("6.8.0-generic\n")
    monkeypatch.setattr(doctor, "PROC", folder)
    monkeypatch.setattr(doctor, "CGROUPS", tmp_path / "no cgroups")
    return folder


def _mount(proc: Path, filesystem: str) -> None:
    number = os.stat(proc).st_dev
    line = f"36 35 {os.major(number)}:{os.minor(number)} / /mnt rw - {filesystem} /dev/nvme7n1 rw\n"
    (proc / "self" / "mountinfo").write_text(line)


def _memory(proc: Path, available: int) -> None:
    (proc / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {available * 2**20} kB\n")


def _lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, str]:
    """Runs the command. Returns its findings, each with verdict and remedy, by their subjects and first words."""
    try:
        assert cli.main(["doctor", str(tmp_path)]) == code
    except SystemExit as exited:
        assert exited.code == code
    text = capsys.readouterr().out
    found = re.findall(r"^(?:good |slow |wrong)  .*(?:\n         -> .+)?$", text, re.M)
    assert "\n".join(found) + "\n" == text
    drive = re.escape(f"drive of {tmp_path}: ")
    keys = [re.match(rf"\w+ +(?:{drive})?([A-Za-z0-9_ ]+)", line) for line in found]
    return {key[1].strip(): line for key, line in zip(keys, found, strict=True) if key is not None}


def test_it_examines_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cli.main(["doctor", str(tmp_path)])
    except SystemExit as exited:
        assert exited.code == 1
    text = capsys.readouterr().out
    assert all(re.search(rf"^(good |slow |wrong)  {subject}: ", text, re.M) for subject in SUBJECTS), text
    assert not list(tmp_path.iterdir())


def test_a_slow_machine(
    tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "LEAST_DRIVE", 0)
    monkeypatch.setattr(doctor, "LEAST_DRAM", 0)
    said = {"nvme_smart_health_information_log": {"data_units_written": 2_000_000, "percentage_used": 7}}
    answer(tmp_path, monkeypatch, json.dumps(said))
    (tmp_path / "bin" / "cc").symlink_to("/bin/true")
    lines = _lines(tmp_path, capsys)
    good = ("DRAM", "host memory", "pinned memory", "C compiler", "filesystem ext4", "O_DIRECT works")
    assert all(lines[subject].startswith("good ") for subject in good), lines
    assert "WSL2" not in lines
    assert "1.0 TB written in its life, 7% of its rated endurance used" in "".join(lines.values())

    monkeypatch.setattr(doctor, "LEAST_DRIVE", 1e15)
    monkeypatch.setattr(doctor, "LEAST_DRAM", 1e15)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    _mount(proc, "fuse.sshfs")
    _memory(proc, 20)
    (proc / "sys" / "kernel" / "osrelease").write_text("5.15.0-microsoft-standard-WSL2\n")
    lines = _lines(tmp_path, capsys)
    slow = ("DRAM", "host memory", "WSL2", "C compiler", "filesystem fuse")
    assert all(lines[subject].startswith("slow ") and "->" in lines[subject] for subject in slow), lines
    assert sum("use an NVMe drive" in line for line in lines.values()) == 1
    assert "20.00 GiB of 64.00 GiB usable" in lines["host memory"]


@pytest.mark.parametrize("problem", ["host memory", "worn", "untested"])
def test_what_is_wrong_makes_the_command_fail(
    tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str
) -> None:
    remedy = "replace the drive"
    if problem == "host memory":
        _mount(proc, "tmpfs")
        remedy = "give a directory on an SSD"
    elif problem == "worn":
        said = {"nvme_smart_health_information_log": {"percentage_used": 93}}
        answer(tmp_path, monkeypatch, json.dumps(said))
    else:
        monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
        remedy = "install a tested version"
    lines = _lines(tmp_path, capsys, code=1)
    (wrong,) = [line for line in lines.values() if line.startswith("wrong")]
    assert remedy in wrong
