"""Tensors in arguments and results of operations."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from lightning_ssd.activations import tensors_of


class _Pair(NamedTuple):
    first: Any
    second: Any


class _List(list[Any]):
    """A subclass, in which pytree looks for no tensors."""


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text(max_size=2)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(_List),
        st.dictionaries(names, children, max_size=3),
        st.dictionaries(names, children, max_size=3).map(OrderedDict),
        st.builds(_Pair, children, children),
        st.dictionaries(names, children, max_size=3).map(lambda found: ModelOutput({"a": found, "b": [found]})),
    )


@given(
    st.recursive(
        st.one_of(
            st.integers(0, 2).map(torch.zeros),
            st.builds(torch.nn.Parameter, st.just(torch.ones(1))),
            st.sampled_from([None, True, 1, 2.5, 1j, "x", b"x", torch.float32, torch.Size([2]), torch.strided, print]),
        ),
        _containers,
        max_leaves=12,
    )
)
def test_the_tensors_of_any_arguments_are_those_that_pytree_finds(tree: Any) -> None:
    found = tensors_of(tree)
    expected = [value for value in tree_leaves(tree) if isinstance(value, Tensor)]
    assert [id(value) for value in found] == [id(value) for value in expected]
