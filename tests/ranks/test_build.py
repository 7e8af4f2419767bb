"""Model states that several ranks share, as they are built. The ranks are threads of one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.activations import OffloadConfig, make_offloader
from lightning_ssd.model_states import (
    ModelStates,
    build,
    model_states,
)
from lightning_ssd.model_states.units import units
from lightning_ssd.summary import describe_totals
from tests.support.ranks import UNITS, WIDTH, build_on_ranks
from tests.support.trainings import package_threads


def flats(states: ModelStates) -> list[int]:
    return [flat.numel for flat in states.stores]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat parameter has two parameters, if it may be on SSDs; a part of a unit has one."""
    monkeypatch.setattr(build, "STAGED_FLAT_ELEMENTS", 2 * WIDTH**2)
    monkeypatch.setattr(units, "PART_ELEMENTS", WIDTH**2)


# 4 bytes of weights, 8 of optimizer states and 4 of the mean gradient a parameter are 2 MiB.
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("host_memory", "in_memory"), [(("2MiB", "1MiB"), True), (("2MiB", "1000KiB"), False)])
def test_a_unit_is_one_flat_parameter_if_all_states_are_in_memory(
    host_memory: Sequence[str], in_memory: bool, tmp_path: Path
) -> None:
    """The least budget of a rank determines the size on all ranks."""
    expected = [4 * WIDTH**2] * UNITS if in_memory else [2 * WIDTH**2] * 2 * UNITS
    assert build_on_ranks(tmp_path, host_memory, flats) == [expected] * 2


@pytest.mark.usefixtures("small")
def test_plans_place_parts_of_units(tmp_path: Path) -> None:
    assert build_on_ranks(tmp_path, ["1MiB"] * 2, flats, planned=True) == [[WIDTH**2] * 4 * UNITS] * 2


def test_no_thread_is_left_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of gradients have threads of their own."""

    def fail(*args: Any, **named: Any) -> None:
        raise KeyError("deliberate")

    monkeypatch.setattr(model_states, "StateDicts", fail)
    with pytest.raises(KeyError, match="deliberate"):
        build_on_ranks(tmp_path, ["1MiB"] * 2, flats)
    assert not package_threads()


def test_totals_have_the_memory_of_devices_for_gradients(tmp_path: Path) -> None:
    """Slots for all 512 KiB of gradients, as much for those that are not complete, and three buffers for a sum."""

    def describe(states: ModelStates) -> str:
        config = OffloadConfig(tmp_path, offload="none")
        offloader = make_offloader(config, torch.device("cpu"), default_path=tmp_path)
        try:
            return describe_totals(offloader, states, config, str(tmp_path))[0]
        finally:
            offloader.close()

    for line in build_on_ranks(tmp_path, ["1MiB"] * 2, describe):
        assert line.startswith("totals: CPU 1.19 MiB for gradients, host memory ")
