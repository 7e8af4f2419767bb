"""The mean of several ranks' gradients has the bits of torch's operators, in one pass."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.device import c_library
from lightning_ssd.model_states.gradients import mean_library, write_mean
from lightning_ssd.model_states.gradients.rank_mean import LEAST_PAST_CACHES

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
    mean_library.cache_clear()
    yield
    mean_library.cache_clear()


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
    write_mean(total[:numel], sources, share)
    assert same_bits(total[:numel], expected) and total[numel:].tolist() == [7.0] * 3
    write_mean(total[3:], sources, share)
    assert same_bits(total[3:], expected)
    for rank, source in enumerate(sources):
        if source.dtype == FP32:
            own = source.clone()
            write_mean(own, [*sources[:rank], own, *sources[rank + 1 :]], share)
            assert same_bits(own, expected)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_numbers_of_16_bits(dtype: torch.dtype) -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    total = torch.empty(2**16)
    write_mean(total, [numbers], 1.0)
    assert same_bits(total, numbers.float())


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_one_call_sums_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator of torch would be a meeting of all its threads, which other processes' threads delay."""
    if (library := mean_library()) is None:
        pytest.skip("no C compiler")
    calls: list[int] = []

    def counted(count: int, *arguments: Any) -> None:
        calls.append(count)
        kernel(count, *arguments)

    kernel = library.rank_mean
    monkeypatch.setattr(library, "rank_mean", counted)
    sources, total = gradients(2**21, [BF16, BF16, BF16]), torch.empty(2**21)
    with Operators() as operators:
        write_mean(total, sources, 1 / 3)
    assert (operators.count, calls) == (0, [2**21])
