"""The activation offloader against plain autograd: same numbers, same errors, and no bytes left in the tiers."""

import errno
import gc
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.activations import ActivationOffloader, BudgetError, mark_weights
from lightning_ssd.activations.placement import KeepAll, OffloadAll
from lightning_ssd.activations.record import SavedStorage, find_saved_storage
from lightning_ssd.activations.tier import TRIM_EVERY
from lightning_ssd.futures import Future
from lightning_ssd.storage import Blob, ChecksumError, StorageError, StorageFullError
from lightning_ssd.types import OffloadTierName
from lightning_ssd.waits import wait_for
from tests.support.faults import FaultyBackend, GatedBackend
from tests.support.forwards import FORWARDS
from tests.support.garbage import collect
from tests.support.offloader import (
    KIB,
    MIB,
    Forward,
    assert_same_gradients,
    change_policy,
    eventually,
    gradients,
    open_offloader,
    ssd,
    wait_for_writes,
)

pytestmark = pytest.mark.timeout(60)  # a deadlock fails fast


def randn(*size: int, seed: int = 0, **arguments: Any) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), **arguments)


def allocated(offloader: ActivationOffloader) -> int:
    return ssd(offloader).blobs.stats().allocated_bytes


# ---- restored numbers ----


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_are_plain_autograds(offloader: ActivationOffloader, forward: Forward) -> None:
    """Every kind of saved tensor is restored exactly, in a first micro-batch and in one with a known order."""
    for _ in range(3):
        assert assert_same_gradients(offloader, forward, randn(32, 32) / 4, randn(32, 32, seed=1) / 4) > 0
    assert offloader.stats().loaded > 0


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_empty_storages_are_kept(tmp_path: Path, tier: str) -> None:
    """With `min_bytes=0` all storages are offloaded except those without bytes."""
    with open_offloader(tmp_path, min_bytes=0, tier=tier, host_memory="64MiB") as offloader:
        offloader.begin_micro_batch()
        x = torch.zeros(0, 4, requires_grad=True)
        with offloader.hooks():
            loss = (x.exp() * x).sum()
        offloader.end_backward()  # storages in flight are evicted now
        loss.backward()
        assert x.grad is not None and x.grad.shape == (0, 4)
        assert offloader.stats().saved == 0


def test_memory_that_is_not_torchs_is_kept(offloader: ActivationOffloader) -> None:
    """NumPy may write to its memory at any time, and backward sees it, as in plain autograd."""
    weight = torch.ones(64, 64, requires_grad=True)
    array = randn(64, 64).numpy()
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = (torch.from_numpy(array) * weight).sum()
    array[:] = 3
    loss.backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((64, 64), 3.0))


def test_a_storage_that_grew_is_saved_again(offloader: ActivationOffloader) -> None:
    """Resizing changes no version counter: a view beyond the stored bytes needs a record of its own."""
    weight = torch.ones(64, requires_grad=True)
    x = randn(16)
    expected = torch.cat((x, x, x, x)) + torch.cat((x, torch.zeros(48)))
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = (x * weight[:16]).sum()
        x.untyped_storage().resize_(64 * 4)
        grown = x.as_strided((64,), (1,))
        grown.data[16:] = x.repeat(3)
        loss = loss + (grown * weight).sum()
    loss.backward()
    assert weight.grad is not None and torch.equal(weight.grad, expected)


def test_a_storage_that_is_changed_between_two_saves_is_stored_once(offloader: ActivationOffloader) -> None:
    """The last bytes are stored: a backward that needs earlier ones fails, as in plain autograd."""
    alive = []

    def forward(x: Tensor) -> Tensor:
        hidden = x * 1
        alive.append(hidden.sin())
        return hidden.add_(1).cos().sum()

    assert assert_same_gradients(offloader, forward, randn(32, 32)) == 32 * 32 * 4


def test_a_storage_that_its_owner_has_freed_is_an_error(offloader: ActivationOffloader) -> None:
    """Plain autograd would read freed memory. A storage that is refilled before backward (FSDP) is restored."""
    weight = torch.ones(64, requires_grad=True)
    x = randn(64)
    expected = x.clone()
    for refilled in (False, True):
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = (x * weight).sum()
        x.untyped_storage().resize_(0)
        if refilled:
            x.untyped_storage().resize_(expected.nbytes)
            x.data.copy_(expected)
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="was resized to 0 bytes"):
                loss.backward()
            x = expected.clone()
    assert weight.grad is not None and torch.equal(weight.grad, expected)


# ---- micro-batches that repeat an earlier one ----


def _product_chain(*leaves: Tensor) -> Tensor:
    value = leaves[0]
    for leaf in leaves[1:]:
        value = (value * leaf).sin()
    return value.sum()


def test_storages_that_are_kept_again_have_no_record(tmp_path: Path) -> None:
    """A repeated micro-batch stores the same storages as the first one, and makes no other records."""
    leaves = [randn(64, 64, seed=seed) for seed in range(40)]
    with open_offloader(tmp_path, offload=0.1) as offloader:
        stored, records = [], []
        for _ in range(4):
            offloader.begin_micro_batch()
            before = offloader.stats()
            expected = gradients(_product_chain, leaves)
            fresh = [leaf.clone().requires_grad_() for leaf in leaves]
            with offloader.hooks():
                loss = _product_chain(*fresh)
            records.append(sum(type(item) is SavedStorage for item in gc.get_objects()))
            loss.backward()
            offloader.end_backward()
            for leaf, gradient in zip(fresh, expected, strict=True):
                assert torch.equal(leaf.grad, gradient)  # type: ignore[arg-type]
            stored.append(offloader.stats().stored - before.stored)
            assert offloader.stats().saved - before.saved == 39 * 3 * 64 * 64 * 4
            del loss
        assert len(set(stored[1:])) == 1 and stored[1] > 0
        assert len(set(records[1:])) == 1 and records[1] < records[0] / 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=2, max_size=8),
    st.floats(0.0, 1.0),
    st.sampled_from([0, 256, 2**20]),
)
def test_micro_batches_in_any_sequence_of_shapes(
    tmp_path: Path, shapes: list[list[int]], sequence: list[int], share: float, window: int
) -> None:
    """Gradients are plain autograd's, whichever earlier micro-batch the next one begins like."""
    with open_offloader(tmp_path, offload=share) as offloader:
        change_policy(offloader, window_bytes=window)
        for number in sequence:
            sizes = shapes[number % len(shapes)]

            def forward(*leaves: Tensor) -> Tensor:
                return torch.stack([(leaf * leaf.sigmoid()).exp().sum() for leaf in leaves]).prod()

            assert_same_gradients(offloader, forward, *(randn(size, seed=size) * 0.1 for size in sizes))


# ---- how often, and in what order, backward runs ----


def test_retain_graph(offloader: ActivationOffloader) -> None:
    """Backward runs twice over one graph, which restores the bytes twice. A third one gets PyTorch's own error."""
    x = randn(32, 32).requires_grad_()
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = x.exp().sin().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    first, x.grad, loaded = x.grad, None, offloader.stats().loaded
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, first)
    assert torch.equal(first, gradients(lambda x: x.exp().sin().sum(), [x])[0])
    assert offloader.stats().loaded == 2 * loaded > 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_out_of_order_backwards(offloader: ActivationOffloader) -> None:
    """Backwards of several losses run in another order in each micro-batch: each predicted order is wrong once."""
    x = randn(4, 64)
    change_policy(offloader, window_bytes=300)  # keeps one row, and fetches one ahead
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [1, 3, 2, 0], [1, 3, 2, 0]):
        offloader.begin_micro_batch()
        leaves = [row.clone().requires_grad_() for row in x]
        with offloader.hooks():
            losses = [leaf.exp().sin().sum() for leaf in leaves]
        for index in order:
            losses[index].backward()
        for leaf, row in zip(leaves, x, strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, gradients(lambda x: x.exp().sin().sum(), [row])[0])


def test_graph_of_an_earlier_micro_batch(offloader: ActivationOffloader) -> None:
    """Backward of a loss runs in a later micro-batch (truncated BPTT, manual optimization)."""
    early = randn(32, 32).requires_grad_()
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = early.exp().sin().sum()
    assert assert_same_gradients(offloader, lambda x: x.exp().sin().sum(), randn(32, 32, seed=1)) > 0
    with offloader.hooks():
        loss = loss + early.cos().sum()
    loss.backward()
    expected = gradients(lambda x: x.exp().sin().sum() + x.cos().sum(), [early])[0]
    assert early.grad is not None and torch.equal(early.grad, expected)


# ---- freed memory ----


def test_graph_never_run_backward_gives_its_slots_back(offloader: ActivationOffloader) -> None:
    """A dropped graph frees its slots on the SSD, without a garbage collection."""
    gc.disable()
    try:
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = randn(32, 32).requires_grad_().exp().sin().sum()
        assert allocated(offloader) > 0
        del loss
        wait_for_writes(offloader)
        offloader.begin_micro_batch()
        eventually(lambda: allocated(offloader) == 0)
    finally:
        gc.enable()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("min_bytes", [1, MIB], ids=["offloaded", "kept"])
@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.tanh, lambda x: x.softmax(-1)])
def test_no_reference_cycles(tmp_path: Path, function: Any, min_bytes: int) -> None:
    """A node that saves its own output does not own itself: the graph is freed with its last reference."""
    with open_offloader(tmp_path, min_bytes=min_bytes) as offloader:
        collect()
        gc.disable()
        try:
            offloader.begin_micro_batch()
            leaf = randn(8, 8).requires_grad_()
            with offloader.hooks():
                out = function(leaf)
            record = find_saved_storage(out.untyped_storage())
            assert (record is None) == (min_bytes == MIB)
            died: list[Any] = [weakref.ref(leaf), weakref.ref(out)]  # the graph owns the leaf
            if record is not None:
                died.append(weakref.ref(record))
            del leaf, out, record
            assert [reference() for reference in died] == [None] * len(died)
        finally:
            gc.enable()


def test_device_memory_is_freed(offloader: ActivationOffloader) -> None:
    """Stored bytes have no device memory between forward and backward, nor after the last view was unpacked."""
    x = randn(64, 64).requires_grad_()
    offloader.begin_micro_batch()
    with offloader.hooks():
        hidden = x.exp()
        storage = weakref.ref(hidden.untyped_storage())
        record = find_saved_storage(hidden.untyped_storage())
        loss = hidden.sin().sum()
        assert record is not None and record.data is not None  # `hidden` may still be changed
        del hidden
    assert record.data is None and storage() is None
    loss.backward(retain_graph=True)
    assert record.data is None
    assert x.grad is not None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("used", [True, False], ids=["unpacked", "dropped"])
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_memory_of_loads_is_freed_without_a_garbage_collection(tmp_path: Path, tier: str, used: bool) -> None:
    """Loads that have ended before a thread waits for them, and loads for which no thread waits; and their slots."""
    host_memory = "64MiB" if tier == "host" else 0
    with open_offloader(tmp_path, host_memory=host_memory) as offloader, pytest.MonkeyPatch.context() as patch:
        destinations: list[weakref.ref[torch.UntypedStorage]] = []
        empty = offloader.copies.empty

        def told(nbytes: int) -> Tensor:
            data = empty(nbytes)
            destinations.append(weakref.ref(data.untyped_storage()))
            return data

        patch.setattr(offloader.copies, "empty", told)
        offloader.begin_micro_batch()
        leaves = [randn(64, 64, seed=seed).requires_grad_() for seed in range(4)]
        with offloader.hooks():
            losses = [leaf.exp().sum() for leaf in leaves]
        if tier == "ssd":
            wait_for_writes(offloader)
        change_policy(offloader, window_bytes=MIB)
        collect()
        gc.disable()
        try:
            losses.pop().backward()  # also prefetches the bytes of the others
            if tier == "ssd":
                wait_for_writes(offloader)  # reads take the same memory
            assert len(destinations) == 4
            while losses and used:
                losses.pop().backward()
            losses.clear()
            offloader.end_backward()
            offloader.free_discarded()
            eventually(lambda: all(reference() is None for reference in destinations))

            def is_empty() -> bool:
                offloader.end_backward()
                return allocated(offloader) == 0

            eventually(is_empty)
        finally:
            gc.enable()


def test_exception_in_backward(offloader: ActivationOffloader) -> None:
    """After a backward that fails half-way, backward of the same graph runs again, whole."""

    class Fails(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if Fails.armed:
                raise ZeroDivisionError
            return grad

    change_policy(offloader, window_bytes=3 * 32 * 32 * 4)
    x = randn(32, 32).requires_grad_()
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = Fails.apply(x.exp().sin().tanh()).sigmoid().square().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    Fails.armed = False
    assert x.grad is None
    loss.backward()
    expected = gradients(lambda x: x.exp().sin().tanh().sigmoid().square().sum(), [x])[0]
    assert x.grad is not None and torch.equal(x.grad, expected)
    del loss
    change_policy(offloader, window_bytes=0)
    assert assert_same_gradients(offloader, lambda x: x.exp().sin().sum(), randn(32, 32)) > 0


def test_one_offloader_after_another(tmp_path: Path) -> None:
    """Backward of a closed offloader's graph raises a clear error, and a new offloader handles its tensors."""
    x = randn(32, 32).requires_grad_()
    with open_offloader(tmp_path) as first:
        first.begin_micro_batch()
        with first.hooks():
            old = x.exp().sin().sum()
    with open_offloader(tmp_path) as second:
        second.begin_micro_batch()
        with second.hooks():
            new = x.exp().sin().sum()
        with pytest.raises(RuntimeError, match="a graph whose training has ended"):
            old.backward()
        new.backward()
        assert x.grad is not None and torch.equal(x.grad, gradients(lambda x: x.exp().sin().sum(), [x])[0])
    second.close()  # closing twice does no harm
    assert list(tmp_path.iterdir()) == []


# ---- stored and kept storages ----


def test_qkv_chunks_are_one_blob(offloader: ActivationOffloader) -> None:
    """Views of one storage are stored once, with all bytes of the storage."""
    tier, storage = ssd(offloader), 3 * 16 * 32 * 4
    x = randn(16, 96).requires_grad_()
    offloader.begin_micro_batch()

    def attention(x: Tensor) -> Tensor:
        q, k, v = (x * 1).chunk(3, dim=-1)
        return (q * k).sum() + (k * v).sum() + (v.t() @ q).sum() + q[:1, :1].square().sum()

    with offloader.hooks():
        loss = attention(x)
    assert tier.bytes_out == storage
    loss.backward()
    assert tier.bytes_in == storage
    assert x.grad is not None and torch.equal(x.grad, gradients(attention, [x])[0])


def test_the_storage_counts_and_not_the_view(tmp_path: Path) -> None:
    """`min_bytes` and the stored bytes are the storage's: a small view keeps all of a large storage alive."""
    with open_offloader(tmp_path, min_bytes=4 * KIB) as offloader:
        offloader.begin_micro_batch()
        with offloader.hooks():
            x = (randn(64, 64).requires_grad_() * 1)[:1]
            small = randn(16).requires_grad_().exp()
            loss = x.square().sum() + small.sum()
            del x
        assert offloader.stats().saved == ssd(offloader).bytes_out == 64 * 64 * 4
        loss.backward()


def _parameter(weight: Tensor, x: Tensor) -> Tensor:
    return (nn.functional.linear(x, weight) + x @ weight + x @ weight.view(64, 64).t()).sum()


def _tied(weight: Tensor, x: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.embedding(torch.tensor([1, 2, 3]), weight), weight).sum()


def _autocast_cast(weight: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (nn.functional.linear(x, weight) + x @ weight).float().sum()


def _marked(weight: Tensor, x: Tensor) -> Tensor:
    module = nn.Linear(64, 64).requires_grad_(False)
    module.register_buffer("table", randn(64, 64))
    mark_weights(module)
    return (module(x @ weight) @ module.table.t()).sum()


@pytest.mark.parametrize("forward", [_parameter, _tied, _autocast_cast, _marked])
def test_weights_are_never_offloaded_as_activations(tmp_path: Path, forward: Forward) -> None:
    """Parameters, their views and transposes, tied uses and autocast's casts are kept, also if they are not marked.

    Frozen parameters and buffers are kept because they are marked.
    """
    with open_offloader(tmp_path, min_bytes=4 * KIB) as offloader:
        weight = nn.Parameter(randn(64, 64))
        assert_same_gradients(offloader, forward, weight, randn(2, 64))
        assert offloader.stats().saved == 0


@pytest.mark.parametrize(("offload", "stored"), [("none", 0), (0.0, 0), (0.5, 2), ("8KiB", 2), ("8191B", 1), (1.0, 4)])
def test_amount(tmp_path: Path, offload: Any, stored: int) -> None:
    """`offload` bytes of four storages of 4 KiB are stored."""
    with open_offloader(tmp_path, offload=offload) as offloader:
        assert assert_same_gradients(offloader, _chain(4), randn(32, 32)) == stored * 4 * KIB
        assert offloader.stats().saved == 4 * 4 * KIB


def _chain(length: int) -> Forward:
    """Saves `length` storages of the size of `x`, which backward needs in reverse order."""

    def forward(x: Tensor) -> Tensor:
        x = x * 1  # the leaf itself is in use, and would not be offloaded
        for _ in range(length):
            x = x.sin()
        return x.sum()

    return forward


def test_the_storage_that_backward_needs_first_is_kept(offloader: ActivationOffloader) -> None:
    """From the second micro-batch on, the storage that backward needs first is kept, and the window after it."""
    storage = 32 * 32 * 4
    change_policy(offloader, window_bytes=2 * storage)
    stored = [assert_same_gradients(offloader, _chain(6), randn(32, 32)) for _ in range(3)]
    assert stored == [6 * storage, 3 * storage, 3 * storage]
    assert offloader.last_pattern is not None and offloader.last_pattern.order == (5, 4, 3, 2, 1, 0)


def test_kept_storages_follow_the_order_and_not_the_position(offloader: ActivationOffloader) -> None:
    """If backward begins with the first loss, the first storage is kept."""
    records: list[SavedStorage] = []
    change_policy(offloader, on_saved=lambda _, record: records.append(record))
    for micro_batch in range(2):
        records.clear()
        offloader.begin_micro_batch()
        with offloader.hooks():
            losses = [randn(32, 32, seed=seed).requires_grad_().exp().sum() for seed in range(3)]
        kept = [record.data is not None for record in records]
        assert kept == ([False, False, False] if micro_batch == 0 else [True, False, False])
        for index in (0, 2, 1):
            losses[index].backward()
        assert offloader.last_pattern is None or offloader.last_pattern.order == (0, 2, 1)


# ---- in-place changes ----


def _outcome(forward: Forward, leaf: Tensor, offloader: ActivationOffloader | None) -> Tensor | str:
    try:
        if offloader is None:
            return gradients(forward, [leaf])[0]
        offloader.begin_micro_batch()
        return gradients(forward, [leaf], offloader.hooks)[0]
    except RuntimeError as error:
        return "in place" if "modified by an inplace operation" in str(error) else str(error)


def _changed_input(x: Tensor) -> Tensor:
    hidden = x * 1
    out = hidden.sin()
    hidden.add_(1)
    return out.sum()


def _changed_output(x: Tensor) -> Tensor:
    out = x.exp()
    loss = out.sum()
    out.mul_(2)
    return loss


def _changed_through_a_view(x: Tensor) -> Tensor:
    hidden = x * 1
    loss = hidden.sin().sum()
    hidden[0, :1].zero_()
    return loss


def _changed_base(x: Tensor) -> Tensor:
    hidden = x * 1
    loss = hidden[:2].sin().sum()
    hidden.zero_()
    return loss


def _changed_through_detach(x: Tensor) -> Tensor:
    hidden = x * 1
    loss = hidden.sin().sum()
    hidden.detach().zero_()
    return loss


def _changed_between_two_saves(x: Tensor) -> Tensor:
    hidden = x * 1
    loss = hidden.sin().sum()
    return loss + hidden.add_(1).cos().sum()


def _changed_before_it_is_saved(x: Tensor) -> Tensor:
    return (x * 1).add_(1).sin().add_(1).relu_().square().sum()


def _changed_where_nobody_looks(x: Tensor) -> Tensor:
    hidden = x * 2
    total = hidden.sum() + hidden.add_(1).sum()
    return total + hidden.mul_(3).sum()


def _changed_other_chunk(x: Tensor) -> Tensor:
    left, right = (x * 1)[:16], (x * 1)[16:]
    loss = left.sin().sum()
    right.mul_(2)
    return loss + right.cos().sum()


@pytest.mark.parametrize("min_bytes", [1, MIB], ids=["offloaded", "kept"])
@pytest.mark.parametrize(
    ("forward", "fails"),
    [
        (_changed_input, True),
        (_changed_output, True),
        (_changed_through_a_view, True),
        (_changed_base, True),
        (_changed_through_detach, True),
        (_changed_between_two_saves, True),
        (_changed_before_it_is_saved, False),
        (_changed_where_nobody_looks, False),
        (_changed_other_chunk, False),
    ],
)
def test_in_place_changes_fail_where_pytorch_fails(
    tmp_path: Path, forward: Forward, fails: bool, min_bytes: int
) -> None:
    """A saved tensor that was changed raises PyTorch's error; otherwise there is no error, and numbers are the same."""
    with open_offloader(tmp_path, min_bytes=min_bytes) as offloader:
        expected, actual = (_outcome(forward, randn(32, 32), used) for used in (None, offloader))
        assert (expected == "in place") if fails else isinstance(expected, Tensor)
        assert actual == expected if fails else torch.equal(actual, expected)
        assert (offloader.stats().stored > 0) == (min_bytes == 1 and forward is not _changed_where_nobody_looks)


def test_changed_weight_fails(offloader: ActivationOffloader) -> None:
    """A weight that was stepped between forward and backward raises PyTorch's error, although it was kept."""
    weight = nn.Parameter(randn(32, 32))
    for hooks in (None, offloader):
        if hooks is not None:
            hooks.begin_micro_batch()
            with hooks.hooks():
                loss = (randn(4, 32).requires_grad_() @ weight).sum()
        else:
            loss = (randn(4, 32).requires_grad_() @ weight).sum()
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- transfers ----


LARGE = 9 * MIB
"""Bytes of a storage of which staging memory has room for one at a time, so that transfers keep their order."""


def large_losses(offloader: ActivationOffloader, count: int) -> list[Tensor]:
    """Returns losses of a new micro-batch, each of which has saved `LARGE` bytes that are offloaded and written."""
    change_policy(offloader, window_bytes=0)  # nothing is kept
    offloader.begin_micro_batch()
    with offloader.hooks():
        losses = [torch.full((LARGE // 4,), 0.5, requires_grad=True).exp().sum() for _ in range(count)]
    wait_for_writes(offloader)
    return losses


def test_loads_are_issued_in_the_recorded_order(tmp_path: Path) -> None:
    """Storages are prefetched in the recorded order."""
    backend = GatedBackend()
    with open_offloader(tmp_path, backend=backend, ssd_capacity="64MiB") as offloader:
        order = [1, 3, 0, 2]
        losses = large_losses(offloader, 4)
        for index in order:
            losses[index].backward()
        del losses
        backend.hold()
        backend.release()
        losses = large_losses(offloader, 4)
        written = iter(offset for operation, offset in backend.served if operation == "write")
        # The storage that backward needs first was kept.
        offsets = {index: next(written) for index in range(4) if index != order[0]}
        assert next(written, None) is None
        change_policy(offloader, window_bytes=4 * LARGE)
        losses[order[0]].backward()

        def reads() -> list[int]:
            return [offset for operation, offset in backend.served if operation == "read"]

        eventually(lambda: len(reads()) == 3)
        assert reads() == [offsets[index] for index in order[1:]]
        for index in order[1:]:
            losses[index].backward()
        assert len(reads()) == 3


def test_a_prefetch_overtakes_others_once_backward_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward has another order than the recorded one: it unpacks the storage whose read was queued last."""
    backend = GatedBackend()
    with open_offloader(tmp_path, backend=backend, ssd_capacity="64MiB") as offloader:
        losses = large_losses(offloader, 6)
        while losses:
            losses.pop().backward()
        backend.hold()
        backend.release()
        losses = large_losses(offloader, 6)
        offsets = [offset for _, offset in backend.served]  # of all but the last, which is kept
        change_policy(offloader, window_bytes=6 * LARGE)
        backend.hold()
        losses.pop().backward()
        backend.wait_for_arrival()

        def release_and_wait(future: "Future[Any]", work: str) -> Any:
            backend.release()
            return wait_for(future, work)

        monkeypatch.setattr("lightning_ssd.activations.ssd.wait_for", release_and_wait)
        losses.pop(0).backward()
        while losses:
            losses.pop().backward()
        order = [offsets.index(offset) for _, offset in backend.served]
        assert order in ([4, 3, 0, 2, 1], [4, 0, 3, 2, 1])


def saved_losses(offloader: ActivationOffloader, count: int) -> list[Tensor]:
    """Returns losses of a new micro-batch, each of which has saved one storage of 4 KiB."""
    offloader.begin_micro_batch()
    with offloader.hooks():
        return [randn(32, 32).requires_grad_().exp().sum() for _ in range(count)]


@pytest.mark.parametrize(("window", "depth", "ahead"), [(2, None, 2), (0, None, 0), (6, 3, 3), (6, None, 5)])
def test_prefetch_window(tmp_path: Path, window: int, depth: int | None, ahead: int) -> None:
    """The window's bytes, or the depth, limit the storages that are prefetched at once."""
    storage = 32 * 32 * 4
    with open_offloader(tmp_path) as offloader:
        losses = saved_losses(offloader, 6)
        change_policy(offloader, window_bytes=window * storage, window_depth=depth)
        losses.pop().backward()
        assert ssd(offloader).bytes_in == (1 + ahead) * storage


@pytest.mark.parametrize(
    ("order", "loads"), [([5, 4, 3, 2, 1, 0], [3, 4, 5, 6, 6, 6]), ([2, 1, 0], [3, 3, 3])], ids=["whole", "skipping"]
)
def test_the_prefetch_window_moves_on_with_backward(tmp_path: Path, order: list[int], loads: list[int]) -> None:
    """Each storage that has arrived makes room for one more of those that follow in the expected order.

    None is read again that backward has unpacked, and none is prefetched that backward has skipped.
    """
    storage = 32 * 32 * 4
    with open_offloader(tmp_path) as offloader:
        losses = saved_losses(offloader, 6)
        change_policy(offloader, window_bytes=2 * storage)
        for index, loaded in zip(order, loads, strict=True):
            losses[index].backward(retain_graph=True)
            assert ssd(offloader).bytes_in == loaded * storage


def test_storages_kept_for_the_begin_of_backward_count_in_the_window(tmp_path: Path) -> None:
    """As long as backward has not unpacked them, so much less is prefetched."""
    storage, count = 32 * 32 * 4, 8
    with open_offloader(tmp_path) as offloader:
        change_policy(offloader, window_bytes=2 * storage)
        # The second micro-batch keeps the first one and two more: the first has shown the order of backward.
        for expected in ([3, 4, 5, 6, 7, 8, 8, 8], [0, 1, 2, 3, 4, 5, 5, 5]):
            losses = saved_losses(offloader, count)
            wait_for_writes(offloader)
            before = ssd(offloader).bytes_in
            for loaded in expected:
                losses.pop().backward()
                assert ssd(offloader).bytes_in - before == loaded * storage
            offloader.end_backward()


class NoMemoryFor(TorchDispatchMode):
    """Within it, the allocations of the given numbers, of those of `nbytes` bytes, find no memory."""

    def __init__(self, nbytes: int, numbers: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.numbers, self.count = nbytes, numbers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.nbytes == self.nbytes:
            self.count += 1
            if self.count in self.numbers:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return result


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_backward_goes_on_without_prefetches_that_find_no_memory(tmp_path: Path, tier: str) -> None:
    """The bytes are loaded when backward needs them; no memory for them then is an error."""
    storage, count = 32 * 32 * 4, 6
    with open_offloader(tmp_path, tier=tier, host_memory="64MiB") as offloader:
        # The first micro-batch loads all storages, the first one at once, and later ones keep one for that.
        for batch, numbers in enumerate([[1], [], [1], [2], [3], [4], [5], [1, 3], [1, 3, 5]]):
            change_policy(offloader, window_bytes=0)
            leaf, expected = (randn(32, 32).requires_grad_() for _ in range(2))
            offloader.begin_micro_batch()
            with offloader.hooks():
                losses = [(leaf * index).exp().sum() for index in range(count)]
            offloader.end_backward()
            change_policy(offloader, window_bytes=4 * storage)
            with NoMemoryFor(storage, numbers) as memory:
                if batch == 0:
                    with pytest.raises(torch.OutOfMemoryError):
                        losses[-1].backward()
                while losses:
                    losses.pop().backward()
            failed = sum(number in numbers for number in range(memory.count + 1))
            assert memory.count == count - (batch > 0) + failed and failed >= min(len(numbers), 1)
            for index in reversed(range(count)):
                (expected * index).exp().sum().backward()
            assert leaf.grad is not None and expected.grad is not None and torch.equal(leaf.grad, expected.grad)


def test_storages_saved_after_backward_began_are_prefetched(tmp_path: Path) -> None:
    storage = 32 * 32 * 4
    with open_offloader(tmp_path) as offloader:
        first = saved_losses(offloader, 4)
        for _ in range(3):
            first.pop().backward()
        with offloader.hooks():
            second = [randn(32, 32).requires_grad_().exp().sum() for _ in range(4)]
        change_policy(offloader, window_bytes=9 * storage)
        before = ssd(offloader).bytes_in
        second.pop().backward()
        assert ssd(offloader).bytes_in - before == 5 * storage


def test_forwarding_and_cancelling(tmp_path: Path) -> None:
    """While the drive serves no request, backward has its tensors from memory, and needless stores are cancelled."""
    backend, threads = GatedBackend(), 4
    with open_offloader(tmp_path, backend=backend) as offloader:
        x, chain = randn(32, 32), _chain(12)

        @contextmanager
        def hooks() -> Iterator[None]:
            with offloader.hooks():
                yield
            for _ in range(threads):
                backend.wait_for_arrival()  # running requests can't be cancelled

        backend.hold()
        offloader.begin_micro_batch()
        assert torch.equal(gradients(chain, [x], hooks)[0], gradients(chain, [x])[0])
        assert offloader.stats().stored == 12 * x.nbytes
        assert offloader.stats().loaded == 12 * x.nbytes  # nothing was read or written
        assert backend.served == []
        offloader.end_backward()
        assert allocated(offloader) == threads * x.nbytes
        backend.release()
        wait_for_writes(offloader)
        eventually(lambda: allocated(offloader) == 0)
        assert [operation for operation, _ in backend.served] == ["write"] * threads


@pytest.mark.parametrize("sizes", [[20, 1, 33, 16, 2], [16, 16, 16], [1, 40, 1]], ids=str)
def test_smallest_staging_memory(tmp_path: Path, sizes: list[int]) -> None:
    """One piece of staging memory serves larger and smaller storages, with stores and loads mixed."""
    with open_offloader(tmp_path, staging_memory="16MiB", ssd_capacity="256MiB") as offloader:
        # Every size but one, so that pieces are not all full.
        leaves = [torch.arange(mib * MIB // 4 - 5, dtype=torch.float32) for mib in sizes]
        change_policy(offloader, window_bytes=24 * MIB)
        for micro_batch in range(2):
            offloader.begin_micro_batch()
            with offloader.hooks():
                fresh = [leaf.clone().requires_grad_() for leaf in leaves]
                losses = [leaf.square().sum() for leaf in fresh]
                losses[0].backward()  # loads and prefetches during the stores below
                losses[0] = (fresh[0] * 2).square().sum()
            order = (1, 0, 2) if micro_batch else (0, 1, 2)
            for index in (*order, *range(3, len(sizes))):
                losses[index].backward()
            for index, (leaf, value) in enumerate(zip(fresh, leaves, strict=True)):
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, value * (2 if index else 10))
        assert offloader.peak_pinned_bytes() <= 16 * MIB


# ---- errors ----


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_write_error(tmp_path: Path, code: int) -> None:
    """A failed write is raised on the training thread with file and offset; until then every gradient is right."""
    backend = FaultyBackend()
    with open_offloader(tmp_path, backend=backend) as offloader:
        assert_same_gradients(offloader, _chain(3), randn(32, 32))
        wait_for_writes(offloader)
        backend.error["write"] = OSError(code, "injected")
        expected = StorageFullError if code == errno.ENOSPC else StorageError
        with pytest.raises(expected, match=r"write 4096 bytes at offset \d+ in .*lightning_ssd") as caught:
            for _ in range(1000):
                assert_same_gradients(offloader, _chain(3), randn(32, 32))
        assert str(tmp_path) in str(caught.value) and errno.errorcode[code] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bytes_whose_write_failed_are_never_read(tmp_path: Path) -> None:
    """Backward raises the write's error instead of reading the file."""
    backend = FaultyBackend()
    with open_offloader(tmp_path, backend=backend) as offloader:
        backend.error["write"] = OSError(errno.EIO, "injected")
        offloader.begin_micro_batch()
        x = randn(32, 32).requires_grad_()
        with offloader.hooks():
            loss = x.exp().sum()
        wait_for_writes(offloader)
        with pytest.raises(StorageError, match=r"write 4096 bytes at offset \d+"):
            loss.backward()
        assert x.grad is None


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("eio", StorageError, r"read 4096 bytes at offset \d+ in .*injected"),
        ("short", StorageError, r"read only 2048 of 4096 bytes at offset \d+ of"),
        ("flip", ChecksumError, r"4096 bytes at offset \d+ of .* are not what was written"),
    ],
)
def test_read_error(tmp_path: Path, fault: str, error: type[StorageError], message: str, prefetched: bool) -> None:
    """EIO, a short read and a flipped bit stop backward before the bytes are used, and name file and offset."""
    backend = FaultyBackend()
    with open_offloader(tmp_path, backend=backend, checksum=True) as offloader:
        backend.flip = fault == "flip"
        offloader.begin_micro_batch()
        leaves = [randn(32, 32).requires_grad_() for _ in range(2)]
        with offloader.hooks():
            losses = [leaf.exp().sum() for leaf in leaves]
        wait_for_writes(offloader)
        if prefetched:  # the first backward's prefetch fails
            change_policy(offloader, window_bytes=MIB)
        if fault == "eio":
            backend.error["read"] = OSError(errno.EIO, "injected")
        elif fault == "short":
            backend.short.add("read")
        with pytest.raises(error, match=message) as caught:
            losses[1].backward()
        assert str(tmp_path) in str(caught.value)
        with pytest.raises(error, match=message):
            losses[0].backward()
        assert [leaf.grad for leaf in leaves] == [None, None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spill", ["ssd_first", "host_first"])
def test_storages_for_which_the_first_tier_has_no_room_spill(tmp_path: Path, spill: str) -> None:
    first, second = ("ssd", "host") if spill == "ssd_first" else ("host", "ssd")
    capacity = "12KiB" if spill == "ssd_first" else "4MiB"
    with open_offloader(tmp_path, spill=spill, ssd_capacity=capacity, host_memory="64MiB") as offloader:
        pool = offloader.tiers["host"].pool  # type: ignore[attr-defined]
        held = pool.acquire(64 * MIB - 12 * KIB) if first == "host" else None
        assert assert_same_gradients(offloader, _chain(5), randn(32, 32)) == 5 * 4 * KIB
        assert {name: tier.bytes_out for name, tier in offloader.tiers.items()} == {first: 12 * KIB, second: 8 * KIB}
        if held is not None:
            held.release()


def test_full_scratch_space(tmp_path: Path) -> None:
    """If all tiers are full, a fixed amount raises an error that names the path, and `ssdtrain` keeps the rest."""
    with open_offloader(tmp_path, ssd_capacity="12KiB") as offloader:
        with pytest.raises(BudgetError, match=f"{tmp_path}.*ssd_capacity.*offload='auto'"):
            assert_same_gradients(offloader, _chain(5), randn(32, 32))
        wait_for_writes(offloader)
        offloader.end_backward()
        eventually(lambda: allocated(offloader) == 0)
        assert assert_same_gradients(offloader, _chain(3), randn(32, 32)) == 3 * 4 * KIB
    with open_offloader(tmp_path, ssd_capacity="12KiB", offload="ssdtrain") as offloader:
        assert assert_same_gradients(offloader, _chain(5), randn(32, 32)) == 3 * 4 * KIB


def test_room_that_is_still_written_to_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed amount may fill the scratch space exactly, although freed space is usable only after its writes."""
    backend = GatedBackend()
    with open_offloader(tmp_path, backend=backend, ssd_capacity="12KiB") as offloader:
        store = ssd(offloader).blobs
        allocate = store.allocate

        def watched(nbytes: int) -> Blob:
            try:
                return allocate(nbytes)
            except StorageFullError:
                backend.release()
                raise

        monkeypatch.setattr(store, "allocate", watched)
        x, chain = randn(32, 32), _chain(3)

        @contextmanager
        def hooks() -> Iterator[None]:
            with offloader.hooks():
                yield
            for _ in range(3):
                backend.wait_for_arrival()

        backend.hold()
        offloader.begin_micro_batch()
        assert torch.equal(gradients(chain, [x], hooks)[0], gradients(chain, [x])[0])
        assert offloader.stats().stored == 3 * x.nbytes
        offloader.end_backward()
        assert allocated(offloader) == 3 * x.nbytes
        assert (
            assert_same_gradients(offloader, chain, x) == 2 * x.nbytes
        )  # the storage that backward needs first is kept


def test_full_host_memory(tmp_path: Path) -> None:
    """With the host tier alone, a fixed amount that does not fit raises an error with a remedy."""
    with open_offloader(tmp_path, tier="host", host_memory="64MiB") as offloader:
        held = offloader.tiers["host"].pool.acquire(64 * MIB - 12 * KIB)  # type: ignore[attr-defined]
        with pytest.raises(BudgetError, match="host tier: 64.00 MiB of 64.00 MiB in use.*host_memory"):
            assert_same_gradients(offloader, _chain(5), randn(32, 32))
        held.release()
        assert assert_same_gradients(offloader, _chain(5), randn(32, 32)) == 5 * 4 * KIB


def test_a_storage_that_is_larger_than_the_host_tier(tmp_path: Path) -> None:
    """It is offloaded to SSDs, or raises an error that names its size if there are none."""
    large = torch.ones(65 * MIB // 4)
    both: dict[str, Any] = {"host_memory": "64MiB", "ssd_capacity": "128MiB", "staging_memory": "128MiB"}
    with open_offloader(tmp_path, **both) as offloader:
        assert assert_same_gradients(offloader, _chain(1), large) == ssd(offloader).bytes_out == large.nbytes
    with open_offloader(tmp_path, tier="host", host_memory="64MiB") as offloader:
        with pytest.raises(BudgetError, match=r"saved tensor of 65.00 MiB.*host tier.*`host_memory`.*'auto'"):
            assert_same_gradients(offloader, _chain(1), large)


def test_a_backward_inside_a_forward_fetches_nothing_ahead(tmp_path: Path) -> None:
    """It needs few small tensors, which are kept. Offloaded storages are prefetched by the forward's own backward."""
    value, weight = torch.randn(4096, requires_grad=True), torch.randn(4, requires_grad=True)
    with open_offloader(tmp_path, host_memory="64MiB", min_bytes=1024) as offloader:
        change_policy(offloader, window_bytes=4 * value.nbytes)
        host = offloader.tiers["host"]
        for _ in range(3):
            offloader.begin_micro_batch()
            fetched = host.bytes_in
            with offloader.hooks():
                result = value
                for _ in range(10):
                    result = result.sin()
                torch.autograd.grad((weight * weight).sum(), weight)
                for _ in range(10):
                    result = result.sin()
            assert host.bytes_in == fetched
            result.sum().backward()
            offloader.end_backward()
            assert host.bytes_in > fetched


class KeepFirst(OffloadAll):
    """Keeps the first storage of the training."""

    kept = False

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        kept, self.kept = self.kept, True
        return super().tiers_for(nbytes) if kept else ()


def test_kept_storages_are_kept_when_memory_gets_short(tmp_path: Path) -> None:
    """A storage that is saved again while others are offloaded is on the device anyway."""
    value = torch.randn(4096, requires_grad=True)
    with open_offloader(tmp_path, host_memory="64MiB", min_bytes=1024) as offloader:
        change_policy(offloader, placement=KeepFirst(("host",)))
        offloader.begin_micro_batch()
        with offloader.hooks():
            kept = value.exp()  # which saves it
            loss = (kept.sin() * 2).sin().sum()
        assert offloader.tiers["host"].bytes_out == value.nbytes  # of the second sine
        loss.backward()
        expected = torch.autograd.grad((value.exp().sin() * 2).sin().sum(), value)
        assert value.grad is not None and torch.equal(value.grad, expected[0])
        offloader.end_backward()


def test_each_micro_batch_records_its_saved_storages(offloader: ActivationOffloader) -> None:
    """A storage that two live micro-batches save counts in the order of both."""
    x, weight = randn(8, 8), randn(8, 8).requires_grad_()
    losses = []
    for _ in range(2):
        offloader.begin_micro_batch()
        with offloader.hooks():
            losses.append((x * weight).sum())
    assert offloader.stats().saved == 2 * x.nbytes


def test_a_storage_object_can_change_saved_bytes(offloader: ActivationOffloader) -> None:
    """User code that holds only the storage object can still change its bytes."""
    x, weight = randn(8, 8), torch.ones(8, 8, requires_grad=True)
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = (x * weight).sum()
        storage = x.untyped_storage()
        del x
    storage.fill_(0)
    loss.backward()
    assert weight.grad is not None and not weight.grad.any()


def watch_urgencies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which each load from now on adds whether it is urgent."""
    urgencies: list[bool] = []
    prefetch = SavedStorage.prefetch

    def watched(record: SavedStorage, *, urgent: bool) -> None:
        urgencies.append(urgent)
        prefetch(record, urgent=urgent)

    monkeypatch.setattr(SavedStorage, "prefetch", watched)
    return urgencies


def test_loads_are_urgent_where_backward_waits(offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that backward waits for are read before prefetched ones."""
    urgencies = watch_urgencies(monkeypatch)
    offloader.begin_micro_batch()
    with offloader.hooks():
        losses = [randn(8, 8).requires_grad_().exp().sum() for _ in range(3)]
    change_policy(offloader, window_bytes=MIB)
    losses.pop().backward()
    assert urgencies == [True, False, False]


def test_each_backward_of_a_graph_is_prefetched_for(
    offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of several losses does that share a forward, such as those of several tasks."""
    urgencies = watch_urgencies(monkeypatch)
    found = []
    for _ in range(2):  # the first micro-batch records the order
        change_policy(offloader, window_bytes=0)
        offloader.begin_micro_batch()
        with offloader.hooks():
            hidden = randn(64, 64).requires_grad_()
            for _ in range(8):
                hidden = hidden.exp().tanh()
            loss = hidden.sum()
        del hidden
        change_policy(offloader, window_bytes=MIB)
        for _ in range(3):
            urgencies.clear()
            loss.backward(retain_graph=True)
            found.append(sum(urgencies))
            assert len(urgencies) > 8
        del loss
    assert max(found[3:]) <= 1


def test_a_nested_tensor_that_is_alive_in_backward(offloader: ActivationOffloader) -> None:
    weight = randn(8, 8).requires_grad_()
    offloader.begin_micro_batch()
    with offloader.hooks():
        nested = torch.nested.nested_tensor([randn(3, 8), randn(5, 8)], requires_grad=True) * 2
        loss = torch.nested.to_padded_tensor(torch.nn.functional.linear(nested, weight), 0.0).sum()
    loss.backward()
    assert weight.grad is not None and nested.is_nested


@pytest.mark.parametrize("function", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_functions_that_refuse_hooks_name_a_remedy(offloader: ActivationOffloader, function: Any) -> None:
    """Training can continue after the error."""
    with pytest.raises(RuntimeError, match="saved tensor hooks") as failure, offloader.hooks():
        function(torch.sin)(torch.tensor(1.0))
    assert "`offload='none'` and `states='gpu'`" in failure.value.__notes__[0]
    assert assert_same_gradients(offloader, lambda x: x.exp().sum(), randn(4, 4)) > 0


def test_host_memory_of_earlier_micro_batches_is_freed(tmp_path: Path) -> None:
    """Micro-batches that offload everything, such as a second attempt, do not determine it for the others."""
    value = torch.randn(4096, requires_grad=True)
    with open_offloader(tmp_path, host_memory="64MiB", min_bytes=1024) as offloader:
        pool, placements = offloader.tiers["host"].pool, {False: KeepAll(), True: OffloadAll(("host",))}  # type: ignore[attr-defined]

        def run(*, offloads: bool) -> int:
            change_policy(offloader, placement=placements[offloads], window_bytes=4 * value.nbytes)
            offloader.begin_micro_batch()
            with offloader.hooks():
                result = value
                for _ in range(20):
                    result = result.sin()
            result.sum().backward()
            offloader.end_backward()
            return pool.slab_total  # type: ignore[no-any-return]

        assert run(offloads=True) == 32 * MIB
        for _ in range(2 * TRIM_EVERY):
            run(offloads=False)
        assert pool.slab_total == 0
        # Memory that is needed again is freed later each time.
        for times in (2, 4):
            assert run(offloads=True) == 32 * MIB
            for _ in range(times * TRIM_EVERY):
                run(offloads=False)
            assert pool.slab_total == 32 * MIB
            for _ in range(times * TRIM_EVERY):
                run(offloads=False)
            assert pool.slab_total == 0


def test_a_closed_offloader_has_no_host_memory(tmp_path: Path) -> None:
    """Graphs that are alive, or were freed without a backward, own buffers, which nothing releases later."""
    value = torch.randn(4096, requires_grad=True)
    with open_offloader(tmp_path, host_memory="64MiB", min_bytes=1024) as offloader:
        change_policy(offloader, placement=OffloadAll(("host",)))
        offloader.begin_micro_batch()
        with offloader.hooks():
            alive, freed = value.sin().sin().sum(), value.cos().cos().sum()
        del freed
        pool = offloader.tiers["host"].pool  # type: ignore[attr-defined]
        assert pool.used_bytes
        offloader.close()
        assert pool.slab_total == 0
        del alive
