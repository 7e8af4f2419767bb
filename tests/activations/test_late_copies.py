"""Saved tensors on a device behind the host: copies are in flight when their bytes are needed or freed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd.activations import ActivationOffloader, config
from lightning_ssd.activations.host import HostTier
from lightning_ssd.activations.in_flight import InFlight
from tests.support.late_device import LateCopies
from tests.support.offloader import MIB, change_policy, eventually, open_offloader

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["host", "ssd"])
def offloader(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ActivationOffloader]:
    """An offloader with late copies; afterwards, no buffer was released before its copy was done."""
    monkeypatch.setattr(config, "make_copy_engine", LateCopies)
    with open_offloader(tmp_path, tier=request.param) as made:
        yield made
    assert isinstance(made.copies, LateCopies) and made.copies.violations == []


def used_bytes(offloader: ActivationOffloader) -> int:
    """Returns the bytes of the tiers that copies hold, without those whose owners are dead."""
    offloader.end_backward()
    host, stats = offloader.tiers.get("host"), offloader.io_stats()
    return (host.pool.used_bytes if isinstance(host, HostTier) else 0) + (stats.allocated_bytes if stats else 0)


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.full((64, 64), 0.1 * seed, requires_grad=True) for seed in range(count)]


def test_storages_that_are_still_copied_out_are_kept_by_backward(
    offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded, and the copies' memory in the tier is freed at once, or when a running write has ended."""
    monkeypatch.setattr(InFlight, "evict_copied", lambda self: None)  # a device that is far behind
    change_policy(offloader, window_bytes=MIB)
    offloader.begin_micro_batch()
    inputs = leaves(5)
    with offloader.hooks():
        loss = sum(leaf.exp().sum() for leaf in inputs)
    stored = offloader.stats().stored
    loss.backward()
    offloader.end_backward()
    for leaf in inputs:
        assert leaf.grad is not None and torch.equal(leaf.grad, leaf.exp())
    stats = offloader.stats()
    assert stored >= 4 * 64 * 64 * 4 and stats.forwarded == stored and stats.loaded == 0
    assert sum(tier.bytes_in for tier in offloader.tiers.values()) == 0
    eventually(lambda: used_bytes(offloader) == 0)


def test_loads_of_dropped_graphs_keep_their_memory_until_they_end(offloader: ActivationOffloader) -> None:
    """A graph is dropped while its storages are prefetched: the device still writes to their memory."""
    offloader.begin_micro_batch()
    inputs = leaves(4)
    with offloader.hooks():
        losses = [leaf.exp().sum() for leaf in inputs]
    change_policy(offloader, window_bytes=MIB)
    losses.pop().backward()  # also prefetches the storages of the others
    assert offloader.stats().loaded < sum(tier.bytes_in for tier in offloader.tiers.values())
    del losses
    eventually(lambda: used_bytes(offloader) == 0)


def test_tensors_that_a_double_backward_saves_are_not_offloaded(offloader: ActivationOffloader) -> None:
    """Backward needs them at once."""
    offloader.begin_micro_batch()
    (leaf,) = leaves(1)
    with offloader.hooks():
        loss = (leaf * 2).exp().sin().sum()
        saved = offloader.stats().saved
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        assert gradient.requires_grad and saved > 0
        assert offloader.stats().saved == saved


def test_a_window_that_is_set_in_a_micro_batch_is_its_own(tmp_path: Path) -> None:
    """Storages that the last backward unpacked within the window's first bytes are kept on the device."""
    with open_offloader(tmp_path, tier="host") as offloader:
        stored = []
        for window_bytes in (0, 0, MIB, MIB):
            offloader.begin_micro_batch()
            change_policy(offloader, window_bytes=window_bytes)
            before = offloader.stats().stored
            with offloader.hooks():
                loss = sum(leaf.exp().sum() for leaf in leaves(6))
            loss.backward()
            offloader.end_backward()
            stored.append(offloader.stats().stored - before)
        assert stored[1] >= 5 * 64 * 64 * 4 and stored[2] == stored[3] == 0
