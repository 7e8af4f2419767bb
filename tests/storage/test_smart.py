"""Wear of drives, as they report it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.storage import smart
from tests.support.storage import answer


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A /sys in which the directory of the test is on a partition of nvme7n1."""
    root = tmp_path / "sys"
    partition = root / "devices" / "pci" / "nvme7n1" / "nvme7n1p2"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("2")
    number = os.stat(tmp_path).st_dev
    (root / "dev" / "block").mkdir(parents=True)
    (root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    return root


def test_the_drive_of_a_path(tmp_path: Path, sysfs: Path) -> None:
    assert smart.device_of(tmp_path, sysfs) == "/dev/nvme7n1"
    (sysfs / "devices" / "pci" / "nvme7n1" / "nvme7n1p2" / "partition").unlink()
    assert smart.device_of(tmp_path, sysfs) == "/dev/nvme7n1p2"  # a drive of that name without partitions
    assert smart.device_of(tmp_path, tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("said", "written", "used"),
    [
        (
            {"nvme_smart_health_information_log": {"data_units_written": 2_000_000, "percentage_used": 7}},
            1.024e12,
            0.07,
        ),
        ({"nvme_smart_health_information_log": {"data_units_written": 1}}, 512_000, None),
        ({"endurance_used": {"current_percent": 101}}, None, 1.01),
    ],
)
def test_the_wear_is_read_from_smartctl(
    tmp_path: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch, said: Any, written: Any, used: Any
) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")
    answer(tmp_path, monkeypatch, json.dumps(said), code=4)  # some warning
    wear = smart.read_wear(tmp_path)
    assert wear is not None
    assert (wear.device, wear.bytes_written, wear.endurance_used) == ("/dev/nvme7n1", written, used)


@pytest.mark.parametrize("said", ["", "no JSON", "[]", '{"messages": [{"string": "Permission denied"}]}'])
def test_smartctl_without_permission_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")
    answer(tmp_path, monkeypatch, said, code=2)
    assert smart.read_wear(tmp_path) is None


def test_where_there_is_no_smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smart.read_wear(tmp_path) is None
