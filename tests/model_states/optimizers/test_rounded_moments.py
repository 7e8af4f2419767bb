"""Moments of Adam in fewer bytes than fp32: the kernels against torch operators, bit for bit, and the roundings."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.model_states.optimizers.adam import ElementSpan, any_kernel, torchs_step
from lightning_ssd.model_states.optimizers.optimizers import AdamOptimizer, StepHalf, StepInput
from lightning_ssd.model_states.optimizers.rounding import random_bits, round_stochastically, step_keys
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.units.flat import FlatParameter

CPU = torch.device("cpu")
NAMES = ("exp_avg", "exp_avg_sq")
LENGTHS = st.one_of(st.integers(1, 70), st.integers(250, 260), st.sampled_from([1000, 1024, 4099, 70_001]))


def options_of(optimizer: Any, **arguments: Any) -> dict[str, Any]:
    made = optimizer([nn.Parameter(torch.zeros(1))], **arguments)
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def make_flat(parts: dict[str, int], dtype: torch.dtype) -> FlatParameter:
    return FlatParameter("flat", [(name, nn.Parameter(torch.empty(size))) for name, size in parts.items()], dtype, CPU)


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
    return all(
        torch.equal(item.of(values).view(torch.uint8), item.of(other.by_key()[key]).view(torch.uint8))
        for key, values in one.by_key().items()
        for item in flat.param_views
    )


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
)
@settings(max_examples=60, deadline=None)
def test_steps_have_the_bits_of_torch_operators(
    parts: list[int], optimizer: Any, arguments: dict[str, Any], dtype: torch.dtype, threads: int, **how: Any
) -> None:
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    flat = make_flat({str(index): size for index, size in enumerate(parts)}, dtype)
    options = options_of(optimizer, **arguments)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = run(flat, options, "bf16", **how)
    finally:
        torch.set_num_threads(before)
    assert same_values(found, run(flat, options, "bf16", compiled=False, **how), flat)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_is_torchs_except_for_the_rounding_of_moments(compiled: bool) -> None:
    """Weights of a step are those of torch's fused kernel from the same moments, which are rounded up or down."""
    flat = make_flat({"weight": 4096}, torch.float32)
    options = options_of(torch.optim.AdamW, lr=0.1, weight_decay=0.1, fused=True)
    before, staged = (run(flat, options, "bf16", compiled=compiled, steps=steps) for steps in (3, 4))
    weights, moments = before.weights.clone(), {name: before.states[name].float() for name in NAMES}
    torchs_step(options, weights, filled(flat, 4), moments, 4)
    torch.testing.assert_close(staged.weights, weights, rtol=1e-6, atol=1e-7)
    for name, exact in moments.items():
        rounded = staged.states[name].float()
        assert bool((rounded != exact).any())
        assert bool(((rounded - exact).abs() <= exact.abs() * 2.0**-7 + 2.0**-133).all())


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


@pytest.mark.parametrize("compiled", [True, False])
def test_a_gradient_that_is_not_finite_stays_visible(compiled: bool) -> None:
    flat = make_flat({"weight": 1000}, torch.bfloat16)
    staged = make_values(flat, "bf16")
    flat_optimizer, options = AdamOptimizer(flat, compiled=compiled), options_of(torch.optim.AdamW)
    gradient = torch.ones(flat.numel, dtype=torch.bfloat16)
    gradient[3], gradient[5] = math.nan, math.inf
    for _ in range(2):
        flat_optimizer.step(StepInput(options, gradient, [True], 1.0), staged)
        flat_optimizer.commit([True], options)
    (item,) = flat.param_views
    state = flat_optimizer.state_of(0, staged)
    for values in (item.of(staged.weights), state["exp_avg"], state["exp_avg_sq"]):
        assert values.float()[[3, 5]].isfinite().sum() == 0 and values.float().isfinite().sum() == 998


def test_the_division_into_flat_parameters_and_pieces_does_not_change_bits() -> None:
    sizes = {"a": 70_001, "b": 300, "c": 5000}
    options = options_of(torch.optim.AdamW, lr=0.1)
    together = make_flat(sizes, torch.bfloat16)
    whole = run(together, options, "bf16", steps=1)
    for index, (name, size) in enumerate(sizes.items()):
        alone = make_flat({name: size}, torch.bfloat16)
        found = run(alone, options, "bf16", steps=1)
        for key, values in found.by_key().items():
            assert torch.equal(alone.param_views[0].of(values), together.param_views[index].of(whole.by_key()[key]))
    in_pieces = make_values(together, "bf16")
    in_pieces.set_masters(filled(together, 0))
    flat_optimizer, gradient = AdamOptimizer(together), filled(together, 1).bfloat16()
    for low in range(0, together.numel, 2048):
        high = min(low + 2048, together.numel)
        spans = []
        for view in together.param_views:
            start, end = max(low, view.start), min(high, view.start + view.numel)
            if start < end:
                spans.append(ElementSpan(start - low, end - start, start - view.start, view.random_key))
        piece = StagedState(
            in_pieces.weights[low:high],
            None,
            cast(Tensor, in_pieces.low)[low:high],
            {name: values[low:high] for name, values in in_pieces.states.items()},
            "bf16",
        )
        flat_optimizer.step_piece(StepInput(options, gradient[low:high], [True] * 3, 1.0), piece, spans)
    assert same_values(in_pieces, whole, together)


@pytest.mark.parametrize("split", [True, False])
def test_a_step_in_two_halves_has_the_bits_of_a_whole_one(split: bool) -> None:
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    flat, options = make_flat({"a": 70, "b": 5000}, torch.bfloat16), options_of(torch.optim.AdamW, lr=0.1)
    whole = run(flat, options, "bf16", split=split)
    assert same_values(run(flat, options, "bf16", split=split, halves=("weights", "opt_state")), whole, flat)
