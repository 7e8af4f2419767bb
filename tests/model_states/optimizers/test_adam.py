"""The kernel in adam.c: the bits of a step do not depend on how its new values are stored."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.model_states.optimizers.adam import (
    AdamKernel,
    ElementSpan,
    StoreTrial,
    any_kernel,
    exact_kernel,
    make_calls,
    settings_of,
)
from lightning_ssd.model_states.optimizers.optimizers import AdamOptimizer, StepHalf, StepInput
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.units.flat import FlatParameter

OPTIONS: dict[str, Any] = {
    "betas": (0.9, 0.999), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    "capturable": False, "differentiable": False,
}  # fmt: skip
FUNCTIONS = {
    "adam_fp32": (torch.float32, None, torch.float32),
    "adam_whole_bf16": (torch.bfloat16, torch.float32, torch.bfloat16),
    "adam_whole_fp32": (torch.bfloat16, torch.float32, torch.float32),
    "adam_split_bf16": (torch.bfloat16, torch.int16, torch.bfloat16),
    "adam_split_fp32": (torch.bfloat16, torch.int16, torch.float32),
}
LENGTHS = (1, 7, 63, 64, 65, 1000, 1024, 1025, 5000, 40000)


def arrays_of(dtype: torch.dtype, kept: torch.dtype | None, numel: int, *, zero: bool) -> list[Tensor]:
    """Returns weights, the rest of the masters (the weights themselves if `kept` is None), and both moments."""
    weights = torch.zeros(numel, dtype=dtype) if zero else torch.randn(numel).to(dtype)
    rest = weights if kept is None else torch.zeros(numel, dtype=kept)
    if kept == torch.float32 and not zero:
        rest = torch.randn(numel)
    return [weights, rest, torch.zeros(numel), torch.zeros(numel) if zero else torch.rand(numel)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_stores_past_the_caches_store_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, function: str, implementation: Any, decoupled: bool
) -> None:
    """Parameters have many lengths, at aligned and other addresses; no byte beside them is written."""
    kernel = exact_kernel(implementation) or any_kernel()
    if kernel is None:
        pytest.skip("there is no C compiler")
    dtype, kept, of_gradient = FUNCTIONS[function]
    torch.manual_seed(0)
    parameters, start = [], 3
    for length in LENGTHS:
        start = start + 5 if length % 2 else -(-start // 64) * 64
        parameters.append(ElementSpan(start, length))
        start += length
    numel = start + 9
    before = arrays_of(dtype, kept, numel, zero=False)
    gradient = torch.randn(numel).to(of_gradient)
    monkeypatch.setattr(StoreTrial, "LEAST", 0)
    results: dict[bool, list[Tensor]] = {}
    for past in (False, True):
        monkeypatch.setattr(StoreTrial, "choose", lambda self, past=past: past)
        after = arrays_of(dtype, kept, numel, zero=True)
        settings = settings_of(OPTIONS | {"decoupled_weight_decay": decoupled}, implementation, 3, 0.5)
        assert settings is not None
        make_calls([kernel.call(function, kernel.items(parameters), (*before, *after, gradient), settings)])
        results[past] = after
    assert any(bool(values.any()) for values in results[True])
    assert all(torch.equal(one, other) for one, other in zip(results[False], results[True], strict=True))


def stepped_by_ieee_operations(moment: Tensor, second: Tensor, settings: Any) -> Tensor:
    """Returns weights of 0 after a step with a gradient of 0 and a beta1 of 0.75, by IEEE operations.

    numpy rounds square roots to the nearest number, which torch's operators do not.
    """
    first = (0.75 * moment.double()).float().numpy()  # rounded once
    beta2, correction, eps, size = (
        np.float32(getattr(settings, name)) for name in ("beta2", "correction", "eps", "step_size")
    )
    with np.errstate(all="ignore"):
        denominator = np.sqrt(second.numpy() * beta2) / correction + eps
        return torch.from_numpy(np.float32(0) + size * first / denominator)


@pytest.mark.parametrize(
    ("beta2", "step"), [(0.0, 1), (0.9, 3), (0.95, 1), (0.99, 7), (0.999, 1), (0.999, 2000), (1 - 2**-53, 1)]
)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_a_step_has_the_bits_of_ieee_operations(beta2: float, step: int, eps: float) -> None:
    """Second moments are bit patterns of all classes: zeros, denormals, all exponents, infinities, NaNs."""
    if (kernel := any_kernel()) is None:
        pytest.skip("there is no C compiler")
    numel = 2**18
    generator = torch.Generator().manual_seed(step)

    def patterns() -> Tensor:
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
        special = torch.tensor([0.0, 1e-45, 1e-40, 2.0**-126, 3.4e38, math.inf, math.nan, 1.0], dtype=torch.float32)
        values = bits.view(torch.float32)
        values[: special.numel()] = special
        return values

    second, moment = patterns().abs(), patterns()
    moment[:8], moment[8:16], second[8:16] = 1.0, 0.0, second[:8]
    options = OPTIONS | {"betas": (0.75, beta2), "eps": eps, "weight_decay": 0.0, "decoupled_weight_decay": True}
    settings = settings_of(options, "fused", step, 1.0)
    assert settings is not None
    weights = torch.zeros(numel)
    arrays = (weights.clone(), weights, moment.clone(), second.clone())
    make_calls(
        [
            kernel.call(
                "adam_fp32", kernel.items([ElementSpan(0, numel)]), (*arrays, *arrays, torch.zeros(numel)), settings
            )
        ]
    )
    expected = stepped_by_ieee_operations(moment, second, settings)
    torch.testing.assert_close(arrays[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["fp32", "whole", "split"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_in_two_parts_has_the_bits_of_a_whole_one(kind: str, optimizer: Any, fused: bool) -> None:
    """The compute weights are final after the first part."""
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    parameters = [(str(size), nn.Parameter(torch.zeros(size))) for size in (70, 5000)]
    flat = FlatParameter("flat", parameters, dtype, torch.device("cpu"))
    made = optimizer([parameter for _, parameter in parameters], lr=0.1, weight_decay=0.1, fused=fused)
    options = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    layout = Layout(flat, kind == "split", ("exp_avg", "exp_avg_sq"), steps=True, versions=1)
    found: list[StagedState] = []
    for parts in (("whole",), ("weights", "opt_state")):
        flat_optimizer = AdamOptimizer(flat)
        opt_state = torch.zeros(layout.opt_state_bytes, dtype=torch.uint8)
        staged = layout.views(torch.zeros(flat.nbytes, dtype=torch.uint8), opt_state)
        torch.manual_seed(0)
        staged.set_masters(torch.randn(flat.numel))
        for _ in range(3):
            given = StepInput(options, torch.randn(flat.numel).to(dtype), [True, True], 0.5)
            if len(parts) == 2 and not flat_optimizer.has_halves(given, staged):
                assert optimizer is torch.optim.Adam and kind != "whole"  # the decay needs the old weights
                return
            for half in parts:
                flat_optimizer.step(given, staged, cast(StepHalf, half))
                if half == "weights":
                    weights = staged.weights.clone()
            flat_optimizer.commit([True, True], options)
            assert len(parts) == 1 or torch.equal(weights, staged.weights)
        found.append(staged)
    whole, in_parts = found
    assert torch.equal(whole.weights, in_parts.weights) and torch.equal(whole.masters(), in_parts.masters())
    assert all(torch.equal(values, in_parts.states[name]) for name, values in whole.states.items())


def test_stores_are_those_that_are_faster() -> None:
    """The first stores to each array are slower, as its memory is mapped, and do not count."""
    for faster in (False, True):
        stores, mapped = StoreTrial(), set[int]()
        tried = []
        for number in range(2 * StoreTrial.TRIALS + 6):
            arrays = [number % 4, 4 + number % 6]
            tried.append(stores.choose())
            rate = 2.0 if tried[-1] == faster else 1.0
            stores.note(tried[-1], rate if mapped.issuperset(arrays) else 0.1 * (2 - tried[-1]), arrays)
            mapped.update(arrays)
        assert tried[:7] == [False] * 7
        assert sorted(tried[6:]) == [False] * StoreTrial.TRIALS + [True] * StoreTrial.TRIALS
        assert stores.choose() == faster


def test_steps_in_place_try_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if (kernel := any_kernel()) is None:
        pytest.skip("there is no C compiler")
    assert isinstance(kernel, AdamKernel)
    monkeypatch.setattr(StoreTrial, "LEAST", 0)
    monkeypatch.setattr(StoreTrial, "choose", lambda self: pytest.fail("the step is made in place"))
    values = arrays_of(torch.float32, None, 64, zero=False)
    settings = settings_of(OPTIONS | {"decoupled_weight_decay": True}, "fused", 1, 1.0)
    assert settings is not None
    make_calls(
        [kernel.call("adam_fp32", kernel.items([ElementSpan(0, 64)]), (*values, *values, torch.ones(64)), settings)]
    )
