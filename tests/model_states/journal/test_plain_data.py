"""Plain data in bytes: written data is read back, and other bytes are refused."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.model_states.journal.plain_data import (
    MAGIC,
    DamagedError,
    NotPlainError,
    decode,
    encode,
    from_bytes,
    to_bytes,
)
from tests.support.compare import same

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8,
          torch.bool, torch.complex64, torch.complex128]  # fmt: skip


def there_and_back(value: Any) -> Any:
    return decode(from_bytes(to_bytes({"value": encode(value, "value")}))["value"])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    content = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    values = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
    return values.clone().view(dtype).reshape(shape)


arrays = st.builds(
    lambda values, dtype: np.array(values).astype(dtype),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(["<f4", ">f8", "<u4", "?", "<c8", "<U3", "S2"]),
)
keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.text(max_size=3).map(np.str_), st.binary(max_size=3).map(np.bytes_),
    st.tuples(st.integers(), st.text()), st.frozensets(st.integers()),
)  # fmt: skip
leaves = st.one_of(
    keys, st.floats(), st.complex_numbers(), tensors(), arrays, arrays.filter(len).map(lambda array: array[0]),
    st.sampled_from([Path("a/b"), torch.bfloat16, torch.device("cuda", 1), torch.Size([1, 2]), Counter("ab"),
                     np.float64("nan"), np.random.RandomState(3).get_state()]),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: deque(items, 9)),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda content: defaultdict(list, content)),
        st.sets(keys, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_all_written_bytes_are_read_back(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.thorough
@settings(max_examples=1000, deadline=None)
@given(values)
def test_all_written_bytes_are_read_back_thoroughly(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("text", [np.str_, np.bytes_])
@pytest.mark.parametrize("content", ["", "a", "a\0", "\0", "\0a"])
def test_numpy_strings_of_every_length(text: Any, content: str) -> None:
    """Null characters at the end belong to them; NumPy's comparisons and its arrays ignore these."""
    value = text(content if text is np.str_ else content.encode())
    read = there_and_back({"value": value, value: 1})
    assert [type(one) for one in (read["value"], *read)] == [text, str, text]
    assert all(list(one) == list(value) for one in (read["value"], list(read)[1]))


@pytest.mark.parametrize("dtype", ["U0", "S0", "U3", "S3", "f4"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_numpy_arrays_without_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    """NumPy makes arrays of strings of length 0 only as fields of other arrays."""
    array = np.zeros(shape, dtype=[("field", dtype)])["field"]
    read = there_and_back(array)
    assert read.shape == shape and read.dtype.kind == array.dtype.kind and np.array_equal(read, array)


def test_encoded_data_does_not_change_with_the_value() -> None:
    value = {"list": [1], "tensor": torch.zeros(3), "array": np.zeros(3)}
    encoded = encode(value, "value")
    value["list"].append(2)
    value["tensor"] += 1
    value["array"] += 1
    assert same(decode(encoded), {"list": [1], "tensor": torch.zeros(3), "array": np.zeros(3)})


class Own:
    pass


class OwnTensor(Tensor):
    pass


class OwnDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [Own(), Own, lambda: 0, OwnDict(a=1), nn.Linear(1, 1), torch.Generator(), torch.ones(2).to_sparse(),
     torch.ones(2).as_subclass(OwnTensor), np.array([Own()]), np.zeros(2, dtype=[("a", "i4")]), slice(3),
     defaultdict(lambda: 3)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_are_not_plain_are_refused_by_name(value: Any) -> None:
    with pytest.raises(NotPlainError, match=r"checkpoint\['callbacks'\]\[2\]\['mine'\] is a .* not plain data"):
        encode({"callbacks": [0, 1, {"mine": value}]}, "checkpoint")


def test_values_that_contain_themselves_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotPlainError, match="contains itself"):
        encode(value, "checkpoint")


SMALL = {"steps": [1, 2.5, float("inf")], "rng": torch.arange(3), ("a", 1): b"x"}


def is_damaged(content: bytes) -> bool:
    try:
        from_bytes(content)
    except DamagedError:
        return True
    return False


def test_every_flipped_bit_is_found() -> None:
    content = to_bytes({"value": encode(SMALL, "value")})
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_damaged(bytes(flipped)), bit


def test_every_truncation_and_appended_byte_is_detected() -> None:
    content = to_bytes({"value": encode(SMALL, "value")})
    assert all(is_damaged(content[:length]) for length in range(len(content)))
    assert is_damaged(content + b"\0")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_bytes_of_anybody_else_are_refused(content: bytes, magic: bool) -> None:
    """For example pickles."""
    assert is_damaged(MAGIC + content if magic else content)


def test_a_tree_that_was_never_written_is_refused() -> None:
    for tree in ({"eval": "1"}, {"dtype": "load"}, {"tensor": ["float32", [2], 7]}, {"a": 1, "b": 2}, {"int": []}):
        with pytest.raises(DamagedError):
            decode(type(encode(0, ""))(tree, []))
