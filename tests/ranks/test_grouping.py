"""Sizes of the flat parameters that ranks share. The ranks are threads of one process."""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.model_states import MetaTensors, Setup, StatesConfig, build, make_model_states
from lightning_ssd.model_states.units import units
from lightning_ssd.ranks import RankMemory, Ranks
from lightning_ssd.ranks.rank_memory import make_files
from tests.support.ranks import connect

WIDTH = 64
UNITS = 8


def make_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def flats_of_units(path: Path, host_memory: Sequence[str], *, planned: bool = False) -> list[list[int]]:
    """Returns the elements of flat parameters that each rank makes, of a model of equal units."""
    messages, descriptors = connect(len(host_memory)), make_files(len(host_memory))
    found: list[list[int]] = [[] for _ in host_memory]

    def make(rank: int) -> None:
        model = nn.Sequential(*(make_block() for _ in range(UNITS)))
        setup = Setup(
            config=StatesConfig("auto", "auto", None, "optimized", "fp32", "auto", False),
            storage=OffloadConfig(path, host_memory=host_memory[rank], offload="none"),
            default_path=path,
            autocast=None,
            clip_norm=lambda: False,
            clip_value=lambda: None,
            defer_to_user_hooks=False,
            world_size=len(host_memory),
            planned=planned,
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
        with contextlib.closing(states):
            found[rank] = [flat.numel for flat in states.stores]

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(len(host_memory))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one in messages:
        one.close()
    return found


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
    assert flats_of_units(tmp_path, host_memory) == [expected] * 2


@pytest.mark.usefixtures("small")
def test_plans_place_parts_of_units(tmp_path: Path) -> None:
    assert flats_of_units(tmp_path, ["1MiB"] * 2, planned=True) == [[WIDTH**2] * 4 * UNITS] * 2
