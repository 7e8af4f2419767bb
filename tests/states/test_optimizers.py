"""Our kernel against torch's, bit for bit; and the formats that it reads and writes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.states import compiled
from lightning_ssd.states.flat import Flat
from lightning_ssd.states.home import Layout, Opened
from lightning_ssd.states.optimizers import AdamRule
from lightning_ssd.states.split import join, split

NAMES = ("exp_avg", "exp_avg_sq")

# Every sign and exponent, and what lies at the ends and in the middle of the bits above and below the cut.
BITS = [
    sign << 31 | exponent << 23 | upper << 16 | lower
    for sign in (0, 1)
    for exponent in range(256)
    for upper in (0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F)
    for lower in (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)
]


def as_floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_round_trip(master: Tensor) -> None:
    weights, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master, weights, low)
    joined = join(weights, low)
    number = ~master.isnan()
    assert torch.equal(joined.view(torch.int32)[number], master.view(torch.int32)[number])
    assert joined[~number].isnan().all() and weights[~number].isnan().all()
    compared = number & ((master.view(torch.int32) & 0xFFFF) != 0x8000)  # ties go elsewhere
    assert torch.equal(weights[compared], master.bfloat16()[compared])


def test_split_is_exact_for_every_class_of_bits() -> None:
    assert_round_trip(as_floats(BITS))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_split_is_exact(bits: list[int]) -> None:
    assert_round_trip(as_floats(bits))


def make(parts: list[int], dtype: torch.dtype, halves: bool, slots: int) -> tuple[Flat, Opened]:
    """A flat of parameters of these sizes, and values for it, with a second slot or without."""
    generator = torch.Generator().manual_seed(0)
    parameters = [(str(index), nn.Parameter(torch.empty(size))) for index, size in enumerate(parts)]
    flat = Flat("flat", parameters, dtype, torch.device("cpu"))
    layout = Layout(flat, halves, NAMES, steps=True, slots=slots)

    def values() -> Opened:
        sizes = (flat.nbytes, max(layout.rest_bytes, 1))
        return layout.opened(*(torch.zeros(size, dtype=torch.uint8) for size in sizes))

    opened = values()
    opened.take(torch.randn(flat.numel, generator=generator))
    if slots == 2:
        opened.out = values()
    return flat, opened


def options(**changed: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **changed)
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


@given(
    parts=st.lists(st.integers(1, 40).map(lambda size: 64 * size), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    halves=st.booleans(),
    fp32_gradient=st.booleans(),
    slots=st.sampled_from([1, 2]),
    scale=st.sampled_from([1.0, 0.3, 2.0**-16]),
    decay=st.sampled_from([0.0, 0.1]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    beta1=st.sampled_from([0.9, 0.4, 0.0]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_our_kernel_gives_torchs_bits(
    parts: list[int], dtype: torch.dtype, halves: bool, fp32_gradient: bool, slots: int, scale: float, decay: float,
    decoupled: bool, maximize: bool, beta1: float, data: Any,
) -> None:  # fmt: skip
    """Over several steps, with parameters that have no gradient, in every format."""
    if compiled.adam_library() is None:
        pytest.skip("no C compiler")
    halves = halves and dtype == torch.bfloat16
    how = options(lr=1e-2, betas=(beta1, 0.99), weight_decay=decay, maximize=maximize)
    how["decoupled_weight_decay"] = decoupled
    results = []
    all_has = [data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts))) for _ in range(3)]
    for ours in (True, False):
        flat, opened = make(parts, dtype, halves, slots)
        rule = AdamRule(flat, compiled=ours)
        generator = torch.Generator().manual_seed(1)
        for has in all_has:
            gradient = torch.randn(flat.numel, generator=generator).to(torch.float32 if fp32_gradient else dtype)
            before = [tensor.clone() for tensor in (opened.masters(), *opened.states.values())]
            rule.step(how, opened, gradient, has, scale)
            rule.commit(has)
            out = opened.out
            if out is not opened:  # what was is there until the step counts
                after = (opened.masters(), *opened.states.values())
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                opened, out.out = out, opened
        results.append([opened.weights, opened.masters(), *opened.states.values()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_parameters_without_gradient_stay(tmp_path: Any) -> None:
    flat, opened = make([64, 128], torch.bfloat16, False, 2)
    before = opened.masters().clone()
    AdamRule(flat).step(options(), opened, torch.ones(flat.numel), [False, True], 1.0)
    assert torch.equal(opened.out.masters()[:64], before[:64])
    assert not torch.equal(opened.out.masters()[64:], before[64:])
    assert torch.equal(opened.out.weights, opened.out.masters().bfloat16())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    compiled.adam_library.cache_clear()
    with caplog.at_level("INFO", "lightning_ssd"):
        assert compiled.adam_library() is None
    assert "no C compiler" in caplog.text
    compiled.adam_library.cache_clear()


def test_a_compiler_that_fails(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.adam_library.cache_clear()
    assert compiled.adam_library() is None
    assert "could not compile adam.c" in caplog.text and "broken" in caplog.text
    assert list((tmp_path / "cache" / "lightning_ssd").iterdir()) == []
    compiled.adam_library.cache_clear()
