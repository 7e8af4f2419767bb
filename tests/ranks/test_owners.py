"""The owners of flat parameters."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.model_states.placement.rank_states import choose_owners


@given(numels=st.lists(st.integers(1, 10**9), max_size=30), size=st.integers(1, 8))
def test_no_rank_has_more_than_its_share_and_the_largest_flat_parameter(numels: list[int], size: int) -> None:
    owners = choose_owners(numels, size)
    loads = [sum(numel for numel, owner in zip(numels, owners, strict=True) if owner == rank) for rank in range(size)]
    assert len(owners) == len(numels) and set(owners) <= set(range(size))
    assert max(loads) <= sum(numels) / size + max(numels, default=0)


def test_equal_flat_parameters_are_dealt_evenly() -> None:
    owners = choose_owners([64] * 6 + [128], 2)
    assert owners.count(0) == 3 and owners.count(1) == 4
