"""Sums of gradients on the owner's device have the bits of those in host memory."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import make_copy_engine
from lightning_ssd.model_states.optimizers import RankMean
from lightning_ssd.model_states.steps import peer_sums
from lightning_ssd.model_states.steps.peer_sums import PeerSums, Source
from lightning_ssd.model_states.units import FlatParameter

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (6, 40, 1, 19)
SPECIALS = [0.0, -0.0, 2.0**-149, -(2.0**-140), 3e38, float("inf")]


def gradients(numel: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(numel, generator=generator) for _ in dtypes]
    for number, one in enumerate(made):
        one[: len(SPECIALS)] = torch.tensor(SPECIALS).roll(number)
    return [one.to(dtype) for one, dtype in zip(made, dtypes, strict=True)]


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32, BF16), (FP16, FP16, FP16, FP16)])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_bits_are_those_of_sums_in_host_memory(
    chunk: int, dtypes: Sequence[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sums, "CHUNK", chunk)
    parameters = [(f"{number}", nn.Parameter(torch.zeros(size))) for number, size in enumerate(SIZES)]
    flat = FlatParameter("flat", parameters, FP32, torch.device("cpu"))
    sources, share = gradients(flat.numel, dtypes), 1 / len(dtypes)
    sources[1].zero_()  # this rank has no gradient
    sums = PeerSums(make_copy_engine(torch.device("cpu")), flat.numel)
    total, measured = torch.full((flat.numel,), float("nan")), flat.param_views[1:]
    given = [None if number == 1 else Source(one.data_ptr(), one.dtype) for number, one in enumerate(sources)]
    norms: list[float] = []
    sums.submit(lambda: norms.extend(sums.write(given, share, total, measured)), []).result()
    sums.close()
    expected = torch.empty_like(total)
    RankMean(sources, share).write_by_torch(expected)
    assert torch.equal(total.view(torch.int32), expected.view(torch.int32))
    for norm, item in zip(norms, measured, strict=True):
        values = item.of(expected)
        if chunk > flat.numel:
            assert norm == float(internals.foreach_norm([values])[0])
        assert norm == pytest.approx(float(values.double().norm()), rel=1e-6)


def test_a_norm_of_parts_is_no_number_if_that_of_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is infinite in the other part."""
    monkeypatch.setattr(peer_sums, "CHUNK", 7)
    flat = FlatParameter("flat", [("weight", nn.Parameter(torch.zeros(14)))], FP32, torch.device("cpu"))
    gradient = torch.ones(flat.numel)
    gradient[0], gradient[13] = float("nan"), float("inf")
    sums = PeerSums(make_copy_engine(torch.device("cpu")), flat.numel)
    found = sums.write([Source(gradient.data_ptr(), FP32)], 1.0, torch.empty(flat.numel), flat.param_views)
    sums.close()
    assert math.isnan(found[0])
