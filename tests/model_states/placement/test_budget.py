"""Tiers of flat parameters within a budget."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from lightning_ssd.model_states.placement.budget import AHEAD, describe_smaller_formats, plan_memory
from lightning_ssd.model_states.stores.layout import Layout
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.shared_gradients import shared_gradient_bytes

sizes = st.lists(st.integers(1, 2000), min_size=1, max_size=12)


def layouts(numels: list[int], slots: int, halves: bool) -> list[Layout]:
    made = []
    for numel in numels:
        parameter = nn.Parameter(torch.empty(()).expand(numel))
        flat = FlatParameter(str(numel), [("weight", parameter)], torch.bfloat16, torch.device("cpu"))
        made.append(Layout(flat, halves, ("exp_avg", "exp_avg_sq"), steps=True, versions=slots))
    return made


@given(
    numels=sizes,
    slots=st.sampled_from([1, 2]),
    halves=st.booleans(),
    budget=st.integers(1, 10**6),
    shared=st.booleans(),
)
@example(numels=[1, 641, 833, 1473, 1013, 641], slots=2, halves=False, budget=159734, shared=False)
def test_auto_keeps_its_budget_and_wastes_little(
    numels: list[int], slots: int, halves: bool, budget: int, shared: bool
) -> None:
    made = layouts(numels, slots, halves)
    host, ssd = plan_memory(made, "host", None, shared=shared), plan_memory(made, "ssd", None, shared=shared)
    assert host.ssd == host.param_staging == host.staging == 0
    try:
        places = plan_memory(made, "auto", budget, shared=shared)
    except ValueError as error:
        assert min(host.host, ssd.host) > budget and "`host_memory`" in str(error)
        return
    assert places.host <= budget
    if host.host <= budget:
        assert places == host
        return
    for index, (weights, rest) in enumerate(zip(places.weights, places.opt_state, strict=True)):
        assert (weights, rest) != ("ssd", "host")
        if weights == "host" and rest == "ssd":  # there was no room for it
            moved = [*places.opt_state[:index], "host", *places.opt_state[index + 1 :]]
            tiers = list(zip(places.weights, moved, strict=True))
            assert plan_memory(made, "auto", None, shared=shared, tiers=tiers).host > budget


@given(numels=sizes, slots=st.sampled_from([1, 2]))
def test_staging_memory_holds_the_largest_flats(numels: list[int], slots: int) -> None:
    made = layouts(numels, slots, False)
    places = plan_memory(made, "ssd", None, shared=False)
    opened = sorted(
        -(-layout.flat.nbytes // 4096) * 4096 + -(-layout.opt_state_bytes // 4096) * 4096 for layout in made
    )
    assert places.staging == sum(opened[-AHEAD:])
    assert places.ssd == slots * sum(opened)


@given(numels=st.lists(st.integers(1, 2**23), min_size=1, max_size=40))
def test_a_prediction_knows_the_memory_that_gradients_share(numels: list[int]) -> None:
    made = layouts(numels, 1, False)
    gradients = [layout.gradient_bytes for layout in made]
    rounded = 4096 * len(made)  # to pages
    for shared in (False, True):
        found = plan_memory(made, "ssd", None, shared=shared).gradients
        predicted = shared_gradient_bytes(gradients) if shared else sum(gradients)
        assert predicted <= found <= predicted + rounded


@given(numels=sizes, states=st.sampled_from(["host", "ssd"]), shared=st.booleans())
def test_summed_gradients_have_memory_of_their_own(
    numels: list[int], states: Literal["host", "ssd"], shared: bool
) -> None:
    made = layouts(numels, 1, False)
    alone, summed = (plan_memory(made, states, None, shared=shared, summed=one) for one in (False, True))
    assert summed == replace(alone, host=alone.host + 4 * sum(layout.flat.numel for layout in made))


def test_a_needed_budget_is_named() -> None:
    with pytest.raises(ValueError, match="`host_memory` of 1000 B is too small: with `states='host'` .*'auto'"):
        plan_memory(layouts([1000], 1, False), "host", 1000, shared=False)


def test_the_memory_that_other_formats_of_states_save_is_named() -> None:
    """Two moments of 8 bytes take 4 rounded to bf16, and 2 in blocks of 8 bits, with a scale for each block."""
    made = layouts([2**20, 2**21], 2, False)
    saved = "12.00 MiB by `state_format='bf16'`, 17.91 MiB by `state_format='8bit'`"
    assert describe_smaller_formats(made) == saved
    with pytest.raises(ValueError, match=f"Rounded moments would save {saved}"):
        plan_memory(made, "host", 1000, shared=False)
    assert describe_smaller_formats([replace(layout, moments="bf16") for layout in made]) is None
    assert describe_smaller_formats([replace(layout, state_names=("momentum_buffer",)) for layout in made]) is None


def test_several_ranks_have_gradients_of_their_own() -> None:
    """A bf16 parameter takes 12 bytes of states, 2 of weights, 2 of each rank's gradient, and 4 of each rank's sum."""
    made = layouts([2**20], 1, halves=False)
    one = plan_memory(made, "host", None, shared=False).host
    assert one == 16 * 2**20
    assert plan_memory(made, "host", None, shared=False, ranks=2).host == one + 2 * 2**20
    assert plan_memory(made, "host", None, shared=False, ranks=2, summed=True).host == one + (2 + 2 * 4) * 2**20


def test_weights_of_several_ranks_are_in_memory_where_they_fit() -> None:
    made = layouts([2**20, 2**20, 2**20, 2**20, 2**20], 1, halves=False)
    for room in (0, 3, 5):
        budget = plan_memory(made, "ssd", None, shared=False, ranks=2).host + room * made[0].flat.nbytes
        places = plan_memory(made, "ssd", budget, shared=False, ranks=2, weights_in_memory=True)
        assert places.host <= budget and set(places.opt_state) == {"ssd"}
        assert places.weights.count("host") >= room
