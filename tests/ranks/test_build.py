"""Model states that several ranks share, as they are built. The ranks are threads of one process."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from lightning_ssd.activations import OffloadConfig, make_offloader
from lightning_ssd.model_states import (
    MetaTensors,
    ModelStates,
    Setup,
    StatesConfig,
    build,
    make_model_states,
    model_states,
)
from lightning_ssd.model_states.units import units
from lightning_ssd.ranks import RankMemory, Ranks
from lightning_ssd.ranks.rank_memory import make_files
from lightning_ssd.summary import describe_totals
from tests.support.ranks import connect
from tests.support.trainings import package_threads

T = TypeVar("T")

WIDTH = 64
UNITS = 8


def make_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def build_on_ranks(
    path: Path, host_memory: Sequence[str], look: Callable[[ModelStates], T], **settings: Any
) -> list[T]:
    """Has each rank build the states of a model of equal units, and returns what `look` returns of them."""
    size = len(host_memory)
    messages, descriptors = connect(size), make_files(size)

    def make(rank: int) -> T:
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
        try:
            return look(states)
        finally:
            states.close()

    try:
        with ThreadPoolExecutor(size) as executor:
            return list(executor.map(make, range(size)))
    finally:
        for one in messages:
            one.close()
        for descriptor in descriptors:
            os.close(descriptor)


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
