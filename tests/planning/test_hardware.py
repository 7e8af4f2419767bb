"""Profiles of machines."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from lightning_ssd.planning import HardwareProfile
from tests.support.profiles import H100, machines


@given(machines())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, machine: HardwareProfile) -> None:
    """A loaded profile equals the saved one."""
    path = tmp_path_factory.mktemp("profile") / "machine.json"
    machine.to_json(path)
    assert HardwareProfile.from_json(path) == machine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssd_read": 0.0}, "`ssd_read=0.0` must be a finite number above 0. Measure it"),
        ({"gpu_flops": float("nan")}, "gpu_flops"),
        ({"host_memory_bandwidth": 0.0}, "`host_memory_bandwidth=0.0` must be a finite number above 0"),
        ({"host_bytes": -1}, "`host_bytes=-1` must be a finite number, and not below 0"),
        ({"copy_in_both": 60e9}, "`copy_in_both=60000000000.0` is more than `copy_in=53900000000.0`"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, float], message: str) -> None:
    """The message names the field."""
    with pytest.raises(ValueError) as error:
        replace(H100, **changes)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 1, "name": "lifetimes"}', "is no file that `lightning-ssd plan --save-machine` has written"),
        (json.dumps(asdict(H100) | {"gpu_attention_flops": 0.0}), "`gpu_attention_flops=0.0` must be"),
        (json.dumps(asdict(H100) | {"host_overhead": {"dispatch": "fast"}}), "`dispatch='fast'` of `host_overhead`"),
        (json.dumps(asdict(H100) | {"host_overhead": {"offload": -1.0}}), "`host_overhead.offload=-1.0` must be"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    """The message names the error."""
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        HardwareProfile.from_json(path)
    assert message in str(error.value)


def test_a_description_has_rates_with_units() -> None:
    """The description is readable."""
    text = H100.describe()
    assert "600 TFLOP/s, 72.00 GiB" in text
    assert "600 TFLOP/s, 300 in attention, 72.00 GiB" in replace(H100, gpu_attention_flops=3e14).describe()
    assert "read 3.4 GB/s, write 3.1 GB/s" in text
