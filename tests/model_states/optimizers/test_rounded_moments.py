"""Moments of Adam in fewer bytes than fp32: the kernels against torch operators, bit for bit, and the roundings."""

import ctypes
import math
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.device import c_library
from lightning_ssd.model_states.optimizers import adam_c, optimizers
from lightning_ssd.model_states.optimizers.adam import AdamKernel, StoreTrial, any_kernel, torchs_step
from lightning_ssd.model_states.optimizers.optimizers import AdamOptimizer, StepHalf, StepInput
from lightning_ssd.model_states.optimizers.rounding import random_bits, round_stochastically, step_keys
from lightning_ssd.model_states.stores import dynamic_code
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.units.flat import FlatParameter
from tests.support.state_stores import arrays_of

CPU = torch.device("cpu")
NAMES = ("exp_avg", "exp_avg_sq")
FORMATS = st.sampled_from(["bf16", "8bit"])
LENGTHS = st.one_of(st.integers(1, 70), st.integers(250, 260), st.sampled_from([1000, 1024, 4099, 70_001]))


def options_of(optimizer: Any, **arguments: Any) -> dict[str, Any]:
    made = optimizer([nn.Parameter(torch.zeros(1))], **arguments)
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def make_flat(parts: dict[str, int], dtype: torch.dtype) -> FlatParameter:
    parameters = [(name, nn.Parameter(torch.empty(size))) for name, size in parts.items()]
    return FlatParameter("flat", parameters, dtype, CPU, dynamic_code.BLOCK)


def make_values(flat: FlatParameter, moments: Any, *, split: bool = True, versions: int = 1) -> StagedState:
    """Returns zeros in one version or two."""
    layout = Layout(flat, split and flat.dtype == torch.bfloat16, NAMES, True, versions, moments)

    def zeros() -> StagedState:
        return layout.views(*(torch.zeros(size, dtype=torch.uint8) for size in (flat.nbytes, layout.opt_state_bytes)))

    staged = zeros()
    staged.uncommitted = zeros() if versions == 2 else None
    return staged


def numbers(name: str, numel: int, step: int) -> Tensor:
    """Returns random numbers of many magnitudes, the same for a name and a step."""
    generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
    values = torch.randn(numel, generator=generator)
    return values * torch.exp2(torch.randint(-30, 4, (numel,), generator=generator).float())


def filled(flat: FlatParameter, step: int) -> Tensor:
    values = torch.zeros(flat.numel)
    for item in flat.param_views:
        item.of(values).copy_(numbers(item.name, item.numel, step))
    return values


def run(
    flat: FlatParameter,
    options: dict[str, Any],
    moments: Any,
    *,
    compiled: bool = True,
    split: bool = True,
    versions: int = 1,
    steps: int = 3,
    fp32_gradient: bool = False,
    scale: float = 1.0,
    halves: tuple[str, ...] = ("whole",),
) -> StagedState:
    """Returns the values of a flat parameter after some steps."""
    staged = make_values(flat, moments, split=split, versions=versions)
    staged.set_masters(filled(flat, 0))
    flat_optimizer = AdamOptimizer(flat, compiled=compiled)
    has_grad = [True] * len(flat.param_views)
    for step in range(1, steps + 1):
        gradient = filled(flat, step).to(torch.float32 if fp32_gradient else flat.dtype)
        for half in halves:
            flat_optimizer.step(StepInput(options, gradient, has_grad, scale), staged, cast(StepHalf, half))
        flat_optimizer.commit(has_grad, options)
        if (out := staged.out) is not staged:
            staged.uncommitted, out.uncommitted = None, staged
            staged = out
    return staged


def same_values(one: StagedState, other: StagedState, flat: FlatParameter) -> bool:
    """Returns whether the parameters have the same bits in both."""
    ranges = [(item.start, item.start + item.numel) for item in flat.param_views]
    return all(same_bits(one.elements(*part), other.elements(*part)) for part in ranges)


def same_bits(one: StagedState, other: StagedState) -> bool:
    pairs = zip(arrays_of(one), arrays_of(other), strict=True)
    return all(torch.equal(values.view(torch.uint8), others.view(torch.uint8)) for values, others in pairs)


@given(
    parts=st.lists(LENGTHS, min_size=1, max_size=3),
    optimizer=st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
    arguments=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([1e-3, 0.1]),
            "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.5, 0.5)]),
            "eps": st.sampled_from([1e-8, 1e-5]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "maximize": st.booleans(),
        }
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    split=st.booleans(),
    fp32_gradient=st.booleans(),
    versions=st.sampled_from([1, 2]),
    scale=st.sampled_from([1.0, 0.3]),
    threads=st.sampled_from([1, 2, 3]),
    past_caches=st.booleans(),
    moments=FORMATS,
)
@settings(max_examples=100, deadline=None)
def test_steps_have_the_bits_of_torch_operators(
    parts: list[int],
    optimizer: Any,
    arguments: dict[str, Any],
    dtype: torch.dtype,
    threads: int,
    past_caches: bool,
    moments: Any,
    **how: Any,
) -> None:
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    flat = make_flat({str(index): size for index, size in enumerate(parts)}, dtype)
    options = options_of(optimizer, **arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            mock.patch.object(StoreTrial, "LEAST", 1),
            mock.patch.object(StoreTrial, "choose", lambda _: past_caches),
        ):
            found = run(flat, options, moments, **how)
    finally:
        torch.set_num_threads(before)
    assert same_values(found, run(flat, options, moments, compiled=False, **how), flat)


@pytest.mark.parametrize("flag", ["-march=x86-64-v3", "-mno-avx512vbmi"])
def test_other_processors_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """adam.c for AVX2, and for the first processors with AVX-512: their source differs."""
    if any_kernel() is None or not torch.cpu._is_avx2_supported():
        pytest.skip("there is no C compiler, or no AVX2")
    flat, options = make_flat({"a": 70, "b": 5000}, torch.bfloat16), options_of(torch.optim.AdamW, lr=0.1)
    expected = {moments: run(flat, options, moments) for moments in ("bf16", "8bit")}
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, flag))
    narrow = AdamKernel(ctypes.CDLL(str(c_library.compile_library(adam_c.SOURCE, "cc"))), None, 1)
    monkeypatch.setattr(optimizers, "any_kernel", lambda: narrow)
    for moments, values in expected.items():
        assert same_values(run(flat, options, moments), values, flat)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_is_torchs_except_for_the_rounding_of_moments(compiled: bool, moments: Any) -> None:
    """Weights of a step are those of torch's fused kernel from the same moments, which are rounded afterwards."""
    flat = make_flat({"weight": 4096}, torch.float32)
    options = options_of(torch.optim.AdamW, lr=0.1, weight_decay=0.1, fused=True)
    before, staged = (run(flat, options, moments, compiled=compiled, steps=steps) for steps in (3, 4))
    weights, values = before.weights.clone(), {name: before.decode(name).clone() for name in NAMES}
    torchs_step(options, weights, filled(flat, 4), values, 4)
    torch.testing.assert_close(staged.weights, weights, rtol=1e-6, atol=1e-7)
    for name, exact in values.items():
        rounded = staged.decode(name)
        assert bool((rounded != exact).any())
        if moments == "bf16":
            bound = exact.abs() * 2.0**-7 + 2.0**-133
        else:
            bound = exact.abs().view(-1, dynamic_code.BLOCK).amax(1).repeat_interleave(dynamic_code.BLOCK) * 0.008
        assert bool(((rounded - exact).abs() <= bound).all())


def test_rounding_is_unbiased() -> None:
    """The mean over 2^16 elements and some steps is the number itself, of both signs, and of denormals."""
    values = torch.tensor([1.0, 1.001, -1.003, 3.1e-5, -2.9e30, 1.17e-40, 255.6])
    count = 2**16
    for steps in (1, 8):
        mean = torch.zeros(len(values), dtype=torch.float64)
        for step in range(1, steps + 1):
            random = random_bits(7, count, step_keys(12345, step), CPU)
            for half in (random & 0xFFFF, random >> 16):
                rounded = [round_stochastically(value.expand(count).contiguous(), half) for value in values]
                mean += torch.stack(rounded).double().mean(1) / (2 * steps)
        ulp = torch.exp2(torch.floor(torch.log2(values.abs().double())).clamp(min=-126) - 7)
        assert bool(((mean - values.double()).abs() < 4 * 0.5 * ulp / math.sqrt(2 * steps * count)).all())
        assert mean[0] == 1.0


def test_random_numbers_are_independent() -> None:
    """Those of neighbours, of both moments, of two steps, and of two parameters do not correlate."""
    count = 2**16

    def halves(key: int, step: int) -> tuple[Tensor, Tensor]:
        random = random_bits(0, count, step_keys(key, step), CPU)
        return tuple(half.double() / 65535 - 0.5 for half in (random & 0xFFFF, random >> 16))  # type: ignore[return-value]

    one, other = halves(1, 1)
    series = [one, other, *halves(1, 2), *halves(2, 1), *halves(-(2**63), 1), one.roll(1), other.roll(1), one.roll(256)]
    correlations = torch.corrcoef(torch.stack(series)) - torch.eye(len(series))
    assert float(correlations.abs().max()) < 5 / math.sqrt(count)


def test_values_of_bf16_and_not_finite_ones_remain() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    for random in (0, 1, 0x8000, 0xFFFF):
        rounded = round_stochastically(values, torch.full((2**16,), random))
        torch.testing.assert_close(rounded.float(), values, rtol=0, atol=0, equal_nan=True)
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nans, torch.full((4,), 0xFFFF)).isnan().all()


@pytest.mark.parametrize(("moments", "lost"), [("bf16", 2), ("8bit", 256)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_gradient_that_is_not_finite_stays_visible(compiled: bool, moments: Any, lost: int) -> None:
    """In 8 bits, all weights of its block are lost in the next step."""
    flat = make_flat({"weight": 1000}, torch.bfloat16)
    staged = make_values(flat, moments)
    flat_optimizer, options = AdamOptimizer(flat, compiled=compiled), options_of(torch.optim.AdamW)
    gradient = torch.ones(flat.numel, dtype=torch.bfloat16)
    gradient[3], gradient[5] = math.nan, math.inf
    for _ in range(2):
        flat_optimizer.step(StepInput(options, gradient, [True], 1.0), staged)
        flat_optimizer.commit([True], options)
    (item,) = flat.param_views
    state = flat_optimizer.state_of(0, staged)
    for values in (item.of(staged.weights), state["exp_avg"], state["exp_avg_sq"]):
        assert values.float()[[3, 5]].isfinite().sum() == 0 and values.float().isfinite().sum() == 1000 - lost


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_the_division_into_flat_parameters_does_not_change_bits(moments: Any) -> None:
    sizes = {"a": 70_001, "b": 300, "c": 5000}
    options = options_of(torch.optim.AdamW, lr=0.1)
    together = make_flat(sizes, torch.bfloat16)
    whole = run(together, options, moments, steps=1)
    for index, (name, size) in enumerate(sizes.items()):
        alone = make_flat({name: size}, torch.bfloat16)
        found, item = run(alone, options, moments, steps=1), together.param_views[index]
        assert same_bits(found.elements(0, size), whole.elements(item.start, item.start + size))


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
@pytest.mark.parametrize("split", [True, False])
def test_a_step_in_two_halves_has_the_bits_of_a_whole_one(split: bool, moments: Any) -> None:
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    flat, options = make_flat({"a": 70, "b": 5000}, torch.bfloat16), options_of(torch.optim.AdamW, lr=0.1)
    whole = run(flat, options, moments, split=split)
    assert same_values(run(flat, options, moments, split=split, halves=("weights", "opt_state")), whole, flat)


# ---- 8 bits ----


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_that_of_bitsandbytes(signed: bool) -> None:
    """256 ascending numbers, which its documentation constructs by decades of evenly spaced fractions."""
    numbers = dynamic_code.code_numbers(signed=signed)
    assert len(numbers) == 256 and bool((numbers[1:] > numbers[:-1]).all())
    assert numbers[-1] == 1 and (numbers == 0).sum() == 1
    positive = numbers[numbers > 0][:-1]
    assert positive[0] == pytest.approx(0.55e-6 if signed else 0.325e-6, rel=2**-16)
    assert len(positive) == (127 if signed else 254)
    if signed:
        assert torch.equal(-numbers[:127].flip(0), positive)


def coded(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    codes, scales = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(-(-len(values) // dynamic_code.BLOCK))
    dynamic_code.encode(values, codes, scales, signed=signed)
    return codes, scales


@given(st.integers(1, 700), st.integers(0, 1000), st.booleans(), st.sampled_from([-140, -60, 0, 100]))
@settings(max_examples=60, deadline=None)
def test_values_have_the_number_of_their_interval_and_survive(
    numel: int, seed: int, signed: bool, exponent: int
) -> None:
    """A second encoding of decoded values has the same values, so that a checkpoint keeps them bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(torch.randint(exponent - 25, exponent, (numel,), generator=generator).double())
    values = (torch.randn(numel, generator=generator, dtype=torch.float64) * magnitudes).float()
    values = values if signed else values.abs()
    codes, scales = coded(values, signed=signed)
    decoded = dynamic_code.decode(codes, scales, signed=signed)
    again = dynamic_code.decode(*coded(decoded, signed=signed), signed=signed)
    assert torch.equal(again.view(torch.int32), decoded.view(torch.int32)) or bool((again == decoded).all())
    numbers = dynamic_code.code_numbers(signed=signed).double()
    magnitudes = numbers[numbers > 0]
    decades = torch.floor(torch.log10(magnitudes[:-1]) + 1)
    counts = (decades[:, None] == decades).sum(1)
    farthest = 0.57 * 0.9 * 10**decades / counts  # 0.57 of an interval
    farthest = torch.cat([farthest, torch.full((1,), 2.0**-12, dtype=torch.float64)])
    for block in range(len(scales)):
        part = slice(block * dynamic_code.BLOCK, (block + 1) * dynamic_code.BLOCK)
        if (scale := scales[block].double()) == 0:
            assert values[part].abs().max() < 2.0**-126
            continue
        relative = values[part].double() / scale
        found = numbers[codes[part].int()]
        bound = farthest[torch.searchsorted(magnitudes, found.abs()).clamp(max=len(farthest) - 1)]
        bound = torch.where(found == 0, 1.0001e-7 if signed else 0.0, bound)
        below = (codes[part] == 1) & (relative > 0) if not signed else torch.zeros_like(relative).bool()
        assert bool((((relative - found).abs() <= bound + 1e-6 * relative.abs()) | below).all())


def test_second_moments_do_not_become_zero() -> None:
    values = torch.full((256,), 1e-12)
    values[0], values[1] = 1.0, 0.0
    decoded = dynamic_code.decode(*coded(values, signed=False), signed=False)
    assert decoded[1] == 0 and bool((decoded[2:] > 0).all())
    assert not bool(dynamic_code.decode(*coded(torch.zeros(256), signed=False), signed=False).any())


@pytest.mark.parametrize("signed", [False, True])
def test_tables_of_the_code_are_on_the_cpu_whatever_the_default_device(signed: bool) -> None:
    """`adam.c` gets their addresses."""
    tables = dynamic_code.code_numbers, dynamic_code.code_table
    expected = [table(signed=signed) for table in tables]
    for cached in (dynamic_code._lines, *tables):
        cached.cache_clear()
    with torch.device("meta"):
        made = [table(signed=signed) for table in tables]
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
