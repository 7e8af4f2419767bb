"""Expandable segments of torch's allocator, on a fake device of 80 GiB."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.device import ExpandableSegments, fixed_segments
from lightning_ssd.device.segments import FIRST_MICRO_BATCHES

GIB = 2**30
GPU = torch.device("cuda", 0)
ON, OFF, FREED = "expandable_segments:True", "expandable_segments:False", "freed"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with its bytes `reserved`, and the `settings` of its allocator in the order in which they were made."""
    fake = SimpleNamespace(reserved=6 * GIB, settings=[])
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - fake.reserved, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: fake.reserved)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device: {"reserved_bytes": {"all": {"current": fake.reserved}}},
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.settings.append(FREED))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.settings.append, raising=False)
    return fake


def run(segments: ExpandableSegments, micro_batches: int) -> None:
    for _ in range(micro_batches):
        segments.begin_micro_batch()


@pytest.mark.parametrize(
    ("variable", "user", "expected"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", [ON, OFF]),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:64",
            [f"max_split_size_mb:64,{ON}", f"max_split_size_mb:64,{OFF}"],
        ),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", []),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:64", []),
    ],
)
def test_segments_expand_unless_the_user_says_otherwise(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, variable: str, user: str, expected: list[str]
) -> None:
    monkeypatch.setenv(variable, user)
    gpu.reserved = 60 * GIB
    segments = ExpandableSegments(GPU)
    run(segments, FIRST_MICRO_BATCHES + 2)
    segments.end()
    assert gpu.settings == expected


def test_another_backend_of_the_allocator_is_left_alone(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    segments = ExpandableSegments(GPU)
    run(segments, FIRST_MICRO_BATCHES + 2)
    segments.end()
    assert gpu.settings == []


def test_segments_expand_no_longer_where_memory_is_not_short(gpu: SimpleNamespace) -> None:
    segments = ExpandableSegments(GPU)
    gpu.reserved = 30 * GIB
    run(segments, FIRST_MICRO_BATCHES)
    assert gpu.settings == [ON]
    run(segments, 3)
    assert gpu.settings == [ON, OFF, FREED]
    segments.end()
    assert gpu.settings == [ON, OFF, FREED]


def test_segments_expand_for_good_once_memory_gets_short(gpu: SimpleNamespace) -> None:
    segments = ExpandableSegments(GPU)
    gpu.reserved = 30 * GIB
    run(segments, FIRST_MICRO_BATCHES + 1)
    gpu.reserved = 60 * GIB
    run(segments, 1)
    gpu.reserved = 30 * GIB
    run(segments, FIRST_MICRO_BATCHES + 1)
    assert gpu.settings == [ON, OFF, FREED, ON]
    segments.end()
    assert gpu.settings == [ON, OFF, FREED, ON, OFF]


@pytest.mark.parametrize(
    ("user", "within", "afterwards"),
    [
        ("", OFF, ON),
        ("max_split_size_mb:64", f"max_split_size_mb:64,{OFF}", f"max_split_size_mb:64,{ON}"),
        (f"{ON},max_split_size_mb:64", f"max_split_size_mb:64,{OFF}", f"{ON},max_split_size_mb:64"),
        (f"max_split_size_mb:64,{ON}", f"max_split_size_mb:64,{OFF}", f"max_split_size_mb:64,{ON}"),
        (OFF, OFF, OFF),
    ],
)
def test_memory_that_other_processes_map_is_in_no_expandable_segment(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, user: str, within: str, afterwards: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", user)
    with fixed_segments():
        assert gpu.settings == [within]
    assert gpu.settings == [within, afterwards]
