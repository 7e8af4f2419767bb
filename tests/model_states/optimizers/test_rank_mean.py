"""The mean of several ranks' gradients has the bits of torch's operators, in one pass, and in a step's pass."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.device import c_library
from lightning_ssd.model_states.optimizers import RankMean, StepInput, make_flat_optimizer
from lightning_ssd.model_states.optimizers.adam import ITEM, exact_kernel
from lightning_ssd.model_states.optimizers.adam_c import adam_library, load_library
from lightning_ssd.model_states.optimizers.rank_mean import CHUNK, LEAST_OWN_NORM, LEAST_PAST_CACHES
from lightning_ssd.model_states.stores import Layout, MomentFormat, StagedState
from lightning_ssd.model_states.units import FlatParameter

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SPECIALS = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-149, -(2.0**-140), 2.0**-126, 3e38, -3e38]


@pytest.fixture(params=["this processor", "AVX2", "no compiler"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles the kernel for this processor or for AVX2, whose source differs; without a compiler torch sums."""
    if request.param == "AVX2":
        if not torch.cpu._is_avx2_supported():
            pytest.skip("there is no AVX2")
        monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-march=x86-64-v3"))
    elif request.param == "no compiler":
        monkeypatch.setenv("PATH", "/nowhere")
    load_library.cache_clear()
    exact_kernel.cache_clear()
    yield
    load_library.cache_clear()
    exact_kernel.cache_clear()


def gradients(numel: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Returns random numbers of many magnitudes, and all pairs of special numbers, as far as there is room."""
    generator = torch.Generator().manual_seed(numel)
    made = []
    for number, dtype in enumerate(dtypes):
        values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 5, (numel,), generator=generator)
        specials = torch.tensor(SPECIALS)
        pairs = specials.repeat(len(SPECIALS)) if number % 2 else specials.repeat_interleave(len(SPECIALS))
        room = min(numel // 2, len(pairs))
        values[:room] = pairs[:room]
        made.append(values.to(dtype))
    return made


def torchs_mean(sources: Sequence[Tensor], share: float) -> Tensor:
    return functools.reduce(lambda total, one: total.add_(one, alpha=share), sources[1:], sources[0].float() * share)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether both are NaN in the same places, and have the same bits in all others."""
    nan = one.isnan()
    bits = (torch.where(nan, 0.0, values).view(torch.int32) for values in (one, other))
    return torch.equal(nan, other.isnan()) and torch.equal(*bits)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtypes", [[FP32, FP32], [BF16, BF16, BF16], [FP16, FP16, FP16], [FP32, BF16, FP32]])
@pytest.mark.parametrize("numel", [1, 67, 1024, 200_003, LEAST_PAST_CACHES + 77])
def test_bits_are_those_of_torch(numel: int, dtypes: list[torch.dtype]) -> None:
    """In memory of its own, in that of one of the ranks, and in a part of an array without alignment."""
    sources, share = gradients(numel, dtypes), 1.0 / len(dtypes)
    expected = torchs_mean(sources, share)
    total = torch.full((numel + 3,), 7.0)
    RankMean(sources, share).write(total[:numel])
    assert same_bits(total[:numel], expected) and total[numel:].tolist() == [7.0] * 3
    RankMean(sources, share).write(total[3:])
    assert same_bits(total[3:], expected)
    for rank, source in enumerate(sources):
        if source.dtype == FP32:
            own = source.clone()
            RankMean([*sources[:rank], own, *sources[rank + 1 :]], share).write(own)
            assert same_bits(own, expected)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_numbers_of_16_bits(dtype: torch.dtype) -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    total = torch.empty(2**16)
    RankMean([numbers], 1.0).write(total)
    assert same_bits(total, numbers.float())


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_one_call_sums_all_ranks_and_a_step_of_adam_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator of torch would be a meeting of all its threads, which other processes' threads delay."""
    if (library := adam_library()) is None:
        pytest.skip("no C compiler")
    calls: list[int] = []

    def counted(count: int, *arguments: Any) -> None:
        calls.append(count)
        kernel(count, *arguments)

    kernel = library.rank_mean
    monkeypatch.setattr(library, "rank_mean", counted)
    sources, total = gradients(2**21, [BF16, BF16, BF16]), torch.empty(2**21)
    with Operators() as operators:
        RankMean(sources, 1 / 3).write(total)
    assert (operators.count, calls) == (0, [2**21])
    parameter = nn.Parameter(total)
    flat = FlatParameter("flat", [("weight", parameter)], FP32, torch.device("cpu"))
    made = torch.optim.AdamW([parameter], lr=0.1)
    options = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    layout = Layout(flat, False, ("exp_avg", "exp_avg_sq"), steps=True, versions=1)
    values = torch.zeros(layout.opt_state_bytes, dtype=torch.uint8)
    staged = layout.views(torch.zeros(flat.nbytes, dtype=torch.uint8), values)
    flat_optimizer = make_flat_optimizer(made, flat)
    flat_optimizer.step(StepInput(options, torch.zeros(2**21), [True], 1.0), staged)  # makes the list of its work
    counts = []
    for gradient in (torch.zeros(2**21), RankMean(sources, 1 / 3)):
        with Operators() as operators:
            flat_optimizer.step(StepInput(options, gradient, [True], 1.0), staged)
        counts.append(operators.count)
    assert counts[0] == counts[1] and len(calls) == 1


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["fp32", "whole", "split", "8bit"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_with_the_mean_has_the_bits_of_one_with_its_values(
    kind: str, implementation: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    """In items of a thread and in the tail of a parameter, with a parameter that no rank has a gradient of."""
    dtype = FP32 if kind == "fp32" else BF16
    parameters = [(str(size), nn.Parameter(torch.zeros(size))) for size in (70, 40, ITEM + 5001)]
    chosen = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    made: Any = optimizer([parameter for _, parameter in parameters], lr=0.1, weight_decay=0.1, **chosen)
    flat = FlatParameter("flat", parameters, dtype, torch.device("cpu"))
    options = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    names = ("exp_avg", "exp_avg_sq") if optimizer is torch.optim.AdamW else ()
    moments: MomentFormat = "8bit" if kind == "8bit" and names else "fp32"
    layout = Layout(flat, kind == "split", names, steps=True, versions=1, moments=moments)
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(flat.numel, generator=generator).to(dtype) for _ in range(3)]
    mean, has_grad = RankMean(sources, 1 / 3), [True, False, True]
    found: list[StagedState] = []
    for gradient in (mean, torchs_mean(sources, 1 / 3)):
        flat_optimizer = make_flat_optimizer(made, flat)
        staged = layout.views(
            torch.zeros(flat.nbytes, dtype=torch.uint8), torch.zeros(layout.opt_state_bytes, dtype=torch.uint8)
        )
        staged.set_masters(torch.linspace(-1, 1, flat.numel))
        for _ in range(2):
            flat_optimizer.step(StepInput(options, gradient, has_grad, 0.5), staged)
            flat_optimizer.commit(has_grad, options)
        found.append(staged)
    ours, expected = found
    assert not torch.equal(ours.masters(), torch.linspace(-1, 1, flat.numel))
    assert torch.equal(ours.masters(), expected.masters()) and torch.equal(ours.weights, expected.weights)
    assert all(torch.equal(values, expected.states[name]) for name, values in ours.states.items())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("numel", [1, LEAST_OWN_NORM - 1, LEAST_OWN_NORM, 200_003, CHUNK + 77])
def test_the_norm_of_the_mean(numel: int) -> None:
    """Torch's bits for few elements; for all, the same number whatever the number of threads."""
    generator = torch.Generator().manual_seed(numel)
    sources = [torch.randn(numel + 5, generator=generator).to(BF16) for _ in range(3)]
    mean, elements = RankMean(sources, 1 / 3), slice(3, numel + 3)
    expected = torchs_mean(sources, 1 / 3)[elements]
    norm = mean.norm(elements)
    if numel < LEAST_OWN_NORM:
        assert torch.equal(norm, torch.linalg.vector_norm(expected))
    # Torch's norm of 200,000 elements is off by 7e-6.
    tolerance = 1e-7 if numel >= LEAST_OWN_NORM and adam_library() is not None else 1e-4
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(expected.double()), rtol=tolerance, atol=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(mean.norm(elements), norm) or adam_library() is None
    torch.set_num_threads(threads)
    assert mean.is_finite(elements)
    sources[1][numel + 2] = float("inf")
    assert not mean.is_finite(elements) and not mean.norm(elements).isfinite()
    assert mean.is_finite(slice(0, numel + 2))
