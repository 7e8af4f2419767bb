"""Model states that several ranks share, as they are built. The ranks are threads of one process."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.model_states import MetaTensors, Setup, StatesConfig, build, make_model_states, model_states
from lightning_ssd.model_states.units import units
from lightning_ssd.ranks import RankMemory, Ranks
from lightning_ssd.ranks.rank_memory import make_files
from tests.support.ranks import connect
from tests.support.trainings import package_threads

WIDTH = 64
UNITS = 8


def make_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def flats_of_ranks(path: Path, host_memory: Sequence[str], **settings: Any) -> list[list[int]]:
    """Returns the elements of flat parameters that each rank makes, of a model of equal units."""
    size = len(host_memory)
    messages, descriptors = connect(size), make_files(size)

    def make(rank: int) -> list[int]:
        model = nn.Sequential(*(make_block() for _ in range(UNITS)))
        setup = Setup(
            config=StatesConfig("auto", "auto", None, "optimized", "fp32", "auto", False),
            storage=OffloadConfig(path, host_memory=host_memory[rank], offload="none"),
            default_path=path,
            autocast=None,
            clip_norm=lambda: False,
            clip_value=lambda: None,
            defer_to_user_hooks=False,
            world_size=size,
            **settings,
        )
        states = make_model_states(
            model,
            [torch.optim.AdamW(model.parameters())],
            set(model.parameters()),
            MetaTensors(set(), set()),
            torch.device("cpu"),
            setup,
            connected=Ranks(messages[rank], [RankMemory(descriptor) for descriptor in descriptors]),
        )
        states.close()
        return [flat.numel for flat in states.stores]

    try:
        with ThreadPoolExecutor(size) as executor:
            return list(executor.map(make, range(size)))
    finally:
        for one in messages:
            one.close()
        for descriptor in descriptors:
            os.close(descriptor)


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
    assert flats_of_ranks(tmp_path, host_memory) == [expected] * 2


@pytest.mark.usefixtures("small")
def test_plans_place_parts_of_units(tmp_path: Path) -> None:
    assert flats_of_ranks(tmp_path, ["1MiB"] * 2, planned=True) == [[WIDTH**2] * 4 * UNITS] * 2


def test_no_thread_is_left_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of gradients have threads of their own."""

    def fail(*args: Any, **named: Any) -> None:
        raise KeyError("deliberate")

    monkeypatch.setattr(model_states, "StateDicts", fail)
    with pytest.raises(KeyError, match="deliberate"):
        flats_of_ranks(tmp_path, ["1MiB"] * 2)
    assert not package_threads()
