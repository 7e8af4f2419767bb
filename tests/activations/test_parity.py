"""Whole trainings: an epoch and a part of the next with offload equal plain Lightning's, bit for bit."""

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import ActivationOffload, SSDOffloadStrategy
from lightning_ssd.callbacks.offloader import find_offloader
from tests.support.compare import assert_same
from tests.support.offloader import KIB
from tests.support.parity import Checkpointing, Model, Run, SharedStorages, TinyGPT, train

pytestmark = pytest.mark.timeout(120)

STEPS = {1: 14, 3: 8}
"""Steps by micro-batches a step: 13 batches are an epoch, whose last window of three has one."""

MODELS: dict[str, Model] = {"gpt": TinyGPT, "shared": SharedStorages}


class Moved(pl.Callback):
    """Statistics of the activation offloader at the end of training.

    Args:
        host_left: bytes that are left of the host tier, so that a tiny model fills it; `None`: all.
    """

    def __init__(self, host_left: int | None = None) -> None:
        self._host_left = host_left
        self.out: dict[str, int] = {}
        self.back: dict[str, int] = {}
        self.stored = self.saved = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._host_left is not None:
            offloader = find_offloader(trainer)
            assert offloader is not None
            pool = offloader.tiers["host"].pool  # type: ignore[attr-defined]
            pool.acquire(pool.budget - self._host_left)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.out = {name: tier.bytes_out for name, tier in offloader.tiers.items()}
        self.back = {name: tier.bytes_in for name, tier in offloader.tiers.items()}
        stats = offloader.stats()
        self.stored, self.saved = stats.stored, stats.saved


@cache
def plain(model: str, precision: str, accumulate: int, checkpointing: Checkpointing) -> Run:
    """Plain Lightning's numbers."""
    return train(
        "auto",
        precision=precision,
        accumulate=accumulate,
        checkpointing=checkpointing,
        model=MODELS[model],
        steps=STEPS[accumulate],
    )


def offloaded(
    model: str, precision: str, accumulate: int, checkpointing: Checkpointing, moved: Moved, **arguments: Any
) -> Run:
    defaults = {"min_bytes": 256, "offload": 1.0, "ssd_capacity": "8MiB", "staging_memory": "32MiB"}
    return train(
        SSDOffloadStrategy(**{**defaults, **arguments}),
        precision=precision,
        accumulate=accumulate,
        checkpointing=checkpointing,
        model=MODELS[model],
        callbacks=[moved],
        steps=STEPS[accumulate],
    )


HOST = {"tier": "host", "host_memory": "64MiB"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("precision", "accumulate", "checkpointing", "arguments"),
    [
        ("32-true", 1, "none", {"checksum": True}),
        ("32-true", 1, "none", HOST),
        ("32-true", 3, "non_reentrant", {"checksum": True}),
        ("32-true", 1, "reentrant", {"checksum": True}),
        ("bf16-mixed", 3, "none", {"checksum": True}),
        ("bf16-mixed", 1, "non_reentrant", {"checksum": True}),
        ("bf16-mixed", 3, "reentrant", {"checksum": True}),
        ("bf16-mixed", 1, "non_reentrant", HOST),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_one_tier(
    model: str, precision: str, accumulate: int, checkpointing: Checkpointing, arguments: dict[str, Any]
) -> None:
    """Everything to real files or pinned memory and back: precisions, ragged accumulation, checkpointing."""
    moved = Moved()
    run = offloaded(model, precision, accumulate, checkpointing, moved, **arguments)
    assert_same(plain(model, precision, accumulate, checkpointing), run)
    (out,), (back,) = moved.out.values(), moved.back.values()
    assert out == moved.stored > 0 and back > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "precision", "accumulate", "arguments", "host_left"),
    [
        ("gpt", "32-true", 1, {}, 64 * KIB),
        ("shared", "bf16-mixed", 3, {"checksum": True}, 32 * KIB),
        ("gpt", "bf16-mixed", 3, {"spill": "ssd_first", "ssd_capacity": "128KiB"}, None),
        ("shared", "32-true", 1, {"spill": "ssd_first", "ssd_capacity": "64KiB"}, None),
    ],
)
def test_spill(model: str, precision: str, accumulate: int, arguments: dict[str, Any], host_left: int | None) -> None:
    """Two tiers, where the first is too small: both are used."""
    moved = Moved(host_left)
    run = offloaded(model, precision, accumulate, "none", moved, host_memory="64MiB", **arguments)
    assert_same(plain(model, precision, accumulate, "none"), run)
    assert set(moved.out) == {"host", "ssd"}
    assert min(moved.out.values()) > 0 and min(moved.back.values()) > 0
    assert sum(moved.out.values()) == moved.stored


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "precision", "accumulate", "arguments"),
    [
        ("gpt", "32-true", 1, {"offload": "ssdtrain"}),
        ("shared", "bf16-mixed", 3, {"offload": "ssdtrain", "host_memory": "64MiB"}),
        ("gpt", "bf16-mixed", 3, {"offload": 0.5}),
        ("shared", "32-true", 1, {"offload": 0.5, "tier": "host", "host_memory": "64MiB"}),
        ("gpt", "32-true", 1, {"offload": "50kB"}),
        ("shared", "bf16-mixed", 3, {"offload": "30KiB", "checksum": True}),
    ],
)
def test_amounts_of_offloaded_bytes_do_not_change_numbers(
    model: str, precision: str, accumulate: int, arguments: dict[str, Any]
) -> None:
    """A part of the saved bytes is offloaded: `ssdtrain`, a share, a number of bytes."""
    moved = Moved()
    run = offloaded(model, precision, accumulate, "none", moved, **arguments)
    assert_same(plain(model, precision, accumulate, "none"), run)
    assert 0 < moved.stored < moved.saved
    assert sum(moved.back.values()) > 0


def test_none() -> None:
    """`offload="none"` makes no file, offloads nothing and adds no saved-tensor hooks."""
    moved = Moved()
    run = offloaded("gpt", "32-true", 1, "none", moved, offload="none")
    assert_same(plain("gpt", "32-true", 1, "none"), run)
    assert moved.out == {} and moved.stored == moved.saved == 0


def test_callback() -> None:
    """`ActivationOffload` under Lightning's own strategy computes the same."""
    moved = Moved()
    offload = ActivationOffload(min_bytes=256, offload=1.0, ssd_capacity="8MiB", staging_memory="32MiB")
    run = train("auto", precision="bf16-mixed", accumulate=3, callbacks=[offload, moved], steps=STEPS[3])
    assert_same(plain("gpt", "bf16-mixed", 3, "none"), run)
    assert moved.out["ssd"] > 0 and moved.back["ssd"] > 0


def test_runs_differ_where_they_should() -> None:
    """The comparison can fail: it does with another precision, and with another accumulation window."""
    for other in (plain("gpt", "bf16-mixed", 1, "none"), plain("gpt", "32-true", 3, "none")):
        with pytest.raises(AssertionError):
            assert_same(plain("gpt", "32-true", 1, "none"), other)
