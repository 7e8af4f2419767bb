"""The store of one flat parameter: versions, staging, prefetch, tiers, and failing drives."""

import contextlib
import weakref
from errno import EIO
from itertools import product
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine
from lightning_ssd.futures import Future
from lightning_ssd.model_states.placement.state_storage import make_buffer, make_store
from lightning_ssd.model_states.stores import buffers
from lightning_ssd.model_states.stores.buffers import SpareMemory, SSDBuffer, StateStaging
from lightning_ssd.model_states.stores.layout import StagedState
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.weights.prefetcher import ParamPrefetcher
from lightning_ssd.storage import BlobStore, StorageError, StorageFullError, Urgency
from lightning_ssd.storage.slab import Slab
from lightning_ssd.waits import wait_for
from tests.support.compare import same
from tests.support.faults import FaultyBackend, GatedBackend
from tests.support.state_stores import Tiers, arrays_of, make_layout, masters_of, open_store, scratch_space, weights_of

TIERS: list[Tiers] = [("host", "host"), ("host", "ssd"), ("ssd", "host"), ("ssd", "ssd")]
FORMATS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
pytestmark = pytest.mark.timeout(60)


def step(store: StateStore, weights: list[Tensor]) -> None:
    """Makes a step whose new master weights are `weights`, and does not commit it."""
    step_staged(store, store.stage(step=True).result(timeout=60), weights)


def step_staged(store: StateStore, staged: StagedState, weights: list[Tensor]) -> None:
    """Makes the same step with values that are staged for it."""
    masters = torch.zeros(store.flat.numel)
    for item, values in zip(store.flat.param_views, weights, strict=True):
        item.of(masters).copy_(values)
    staged.out.set_masters(masters)
    store.unstage(staged, changed=True, step=True)


@pytest.mark.parametrize(
    ("tiers", "dtype", "split"),
    [*((tiers, *FORMATS[0]) for tiers in TIERS), *((("ssd", "ssd"), *kind) for kind in FORMATS[1:])],
)
def test_a_step_counts_from_its_commit_and_can_be_reverted(
    tmp_path: Path, tiers: Tiers, dtype: torch.dtype, split: bool
) -> None:
    layout = make_layout(2, dtype, split=split)
    old, new = weights_of(layout), weights_of(layout, seed=1)
    with open_store(tmp_path, tiers, layout) as (store, _):
        assert same(masters_of(store), old)
        assert store.buffers.add_second()
        step(store, new)
        assert same(masters_of(store), old)
        store.commit()
        assert same(masters_of(store), new) and store.steps == 1 and store.buffers.revertible
        store.revert()
        assert same(masters_of(store), old) and store.steps == 0


@pytest.mark.parametrize("tiers", TIERS)
def test_a_step_of_one_version_is_made_in_place(tmp_path: Path, tiers: Tiers) -> None:
    layout = make_layout(1)
    new = weights_of(layout, seed=1)
    with open_store(tmp_path, tiers, layout) as (store, _):
        step(store, new)
        assert same(masters_of(store), new)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_step_is_made_in_place_where_the_second_version_is_not_allocated(tmp_path: Path, tiers: Tiers) -> None:
    """This holds only if all values are in host memory: if a drive fails, a step must be rolled back."""
    layout = make_layout(2)
    old, new, newer = (weights_of(layout, seed=seed) for seed in range(3))
    in_memory = tiers == ("host", "host")
    with open_store(tmp_path, tiers, layout) as (store, _):
        for values in (new, newer):
            step(store, values)
            assert same(masters_of(store), values) == in_memory
            store.commit()
            assert same(masters_of(store), values) and store.buffers.revertible != in_memory
        assert store.buffers.add_second()
        step(store, old)
        store.commit()
        step(store, new)  # is not committed
        store.buffers.drop_second()
        assert same(masters_of(store), old) and store.buffers.revertible != in_memory
        step(store, newer)
        assert same(masters_of(store), newer) == in_memory


def test_freed_memory_is_not_referenced(tmp_path: Path) -> None:
    with open_store(tmp_path, ("host", "host"), make_layout(1)) as (store, _):
        staged = weakref.ref(store.stage().result())
        store.buffers.free()
        assert staged() is None


def test_second_versions_use_spare_memory_and_free_it(tmp_path: Path) -> None:
    layout = make_layout(2)
    nbytes = layout.flat.nbytes + layout.opt_state_bytes
    with open_store(tmp_path, ("host", "host"), layout) as (store, _):
        store.buffers.spare = SpareMemory(nbytes - 1)
        assert not store.buffers.add_second() and store.buffers.spare.reserved == 0
        store.buffers.spare = SpareMemory(nbytes)
        for _ in range(3):
            assert store.buffers.add_second() and store.buffers.add_second() and store.buffers.spare.reserved == nbytes
            store.buffers.drop_second()
            store.buffers.drop_second()
            assert store.buffers.spare.reserved == 0


def test_a_second_version_that_can_not_be_allocated_leaves_no_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two buffers, the first gets its memory and the second does not."""
    layout = make_layout(2)
    with open_store(tmp_path, ("host", "host"), layout) as (store, _):
        store.buffers.spare = SpareMemory(2**20)

        def refuse(nbytes: int, *, pin: bool) -> Slab:
            if nbytes == layout.opt_state_bytes:
                raise StorageFullError("no memory")
            return Slab(nbytes, pin=pin)

        monkeypatch.setattr(buffers, "Slab", refuse)
        assert not store.buffers.add_second() and store.buffers.spare.reserved == 0
        step(store, weights_of(layout, seed=1))
        store.commit()
        assert same(masters_of(store), weights_of(layout, seed=1))


@pytest.mark.parametrize("tiers", TIERS)
def test_a_prefetch_waits_for_the_announced_step(tmp_path: Path, tiers: Tiers) -> None:
    layout = make_layout(2, torch.bfloat16)
    new = weights_of(layout, seed=1)
    target = torch.zeros(layout.flat.nbytes, dtype=torch.uint8)
    with open_store(tmp_path, tiers, layout) as (store, _):
        stepped: Future[None] = Future()
        store.announce_step(stepped, stepped)
        issued = store.prefetch_to(target, None)
        step(store, new)
        store.commit()
        assert not issued.done() and not target.any()
        stepped.set_result(None)
        issued.result(timeout=60)
        weights = target.view(torch.bfloat16)
        assert same([item.of(weights) for item in layout.flat.param_views], [values.bfloat16() for values in new])


@pytest.mark.parametrize("tiers", TIERS)
def test_a_prefetch_after_a_failed_step_raises_its_error(tmp_path: Path, tiers: Tiers) -> None:
    layout = make_layout(1)
    with open_store(tmp_path, tiers, layout) as (store, _):
        failed: Future[None] = Future()
        store.announce_step(failed, failed)
        issued = store.prefetch_to(torch.zeros(layout.flat.nbytes, dtype=torch.uint8), None)
        failed.set_exception(ArithmeticError("a job failed"))
        with pytest.raises(ArithmeticError, match="a job failed"):
            issued.result(timeout=60)


MOVES = [(before, after) for before, after in product(TIERS, TIERS) if before != after]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_values_are_the_same_in_other_tiers(tmp_path: Path, before: Tiers, after: Tiers) -> None:
    """Optimizer states among them; a step in the new tiers can be rolled back unless it was made in place."""
    layout = make_layout(2, torch.bfloat16)
    with open_store(tmp_path, before, layout) as (store, scratch):
        staged = store.stage().result(timeout=60)
        staged.states["exp_avg"].fill_(0.25)
        store.unstage(staged, changed=True)
        sizes = (layout.flat.nbytes, layout.opt_state_bytes)
        made = [
            None if old == new else make_buffer(nbytes, new, scratch, contextlib.ExitStack(), versions=2)
            for nbytes, old, new in zip(sizes, before, after, strict=True)
        ]
        store.move(*made)
        assert store.buffers.tiers == after
        assert same(masters_of(store), weights_of(layout))
        staged = store.stage().result(timeout=60)
        assert (staged.states["exp_avg"] == 0.25).all()
        store.unstage(staged, changed=False)
        step(store, weights_of(layout, seed=1))
        store.commit()
        assert same(masters_of(store), weights_of(layout, seed=1)) and store.buffers.revertible == (
            after != ("host", "host")
        )


@pytest.mark.parametrize("before", [("ssd", "ssd"), ("host", "ssd")])
def test_values_are_moved_after_they_are_written(tmp_path: Path, before: Tiers) -> None:
    """A write that fails is the error of the move, which would read the values before it otherwise."""
    backend, layout = FaultyBackend(), make_layout(2, torch.bfloat16)
    with open_store(tmp_path, before, layout, backend) as (store, scratch):
        staged = store.stage().result(timeout=60)
        backend.error["write"] = OSError(EIO, "Input/output error")
        store.unstage(staged, changed=True)
        new = make_buffer(layout.opt_state_bytes, "host", scratch, contextlib.ExitStack(), versions=2)
        with pytest.raises(StorageError, match="Input/output error"):
            store.move(None, new)
        backend.error.clear()


@pytest.mark.parametrize("tiers", TIERS)
def test_master_weights_are_checked_out_and_in(tmp_path: Path, tiers: Tiers) -> None:
    layout = make_layout(1, torch.bfloat16, split=True)
    with open_store(tmp_path, tiers, layout) as (store, _):
        masters = store.checkout()
        assert store.is_unchanged(masters)
        masters += 1
        assert not store.is_unchanged(masters)
        store.checkin(masters)
        assert same(masters_of(store), [values + 1 for values in weights_of(layout)])


def test_a_failed_read_is_the_stagings_error_and_returns_its_memory(tmp_path: Path) -> None:
    """Staging memory has room for one flat parameter: a second request would wait forever."""
    backend, layout = FaultyBackend(), make_layout(1)
    with open_store(tmp_path, ("ssd", "ssd"), layout, backend) as (store, _):
        store.drain()
        backend.error["read"] = OSError(EIO, "Input/output error")
        for _ in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                store.stage().result(timeout=60)
        with pytest.raises(StorageError, match="Input/output error"):
            store.prefetch_to(torch.zeros(layout.flat.nbytes, dtype=torch.uint8), None).result(timeout=60)
        backend.error.clear()
        assert same(masters_of(store), weights_of(layout))


def test_a_failed_write_is_the_error_of_every_later_use(tmp_path: Path) -> None:
    backend, layout = FaultyBackend(), make_layout(1)
    with open_store(tmp_path, ("ssd", "ssd"), layout, backend) as (store, _):
        store.drain()
        backend.error["write"] = OSError(EIO, "Input/output error")
        step(store, weights_of(layout, seed=1))
        for use in (store.drain, store.stage().result, store.written().result):
            with pytest.raises(StorageError, match="Input/output error"):
                use()


def test_values_are_read_after_they_were_written(tmp_path: Path) -> None:
    """The write of a step is blocked: the next stage reads nothing before it ends, and then the new values."""
    backend, layout = GatedBackend(), make_layout(1)
    new = weights_of(layout, seed=1)
    with open_store(tmp_path, ("ssd", "ssd"), layout, backend) as (store, _):
        store.drain()
        backend.hold()
        staged = store.stage(step=True)
        backend.wait_for_arrival()
        backend.release()
        values = staged.result(timeout=60)
        backend.hold()
        step_staged(store, values, new)
        backend.wait_for_arrival()  # the write waits at the gate
        again = store.stage()
        assert not again.done() and backend.served == []
        backend.release()
        read = again.result(timeout=60)
        store.unstage(read, changed=False)
        assert same(masters_of(store), new)
        operations = [operation for operation, _ in backend.served]
        assert operations.index("read") > operations.index("write")


def test_a_write_overtakes_others_once_a_thread_waits_for_the_prefetch_of_its_weights(tmp_path: Path) -> None:
    """The drive has one thread, which is busy; a write of other data is queued before those of the step."""
    backend, layout, urgency = GatedBackend(), make_layout(1), Urgency()
    new, copies = weights_of(layout, seed=1), CPUCopyEngine(torch.device("cpu"))
    blobs = BlobStore([tmp_path], device=torch.device("cpu"), backend=backend, threads=1)
    scratch = StateStaging.make(blobs, 4096, 8192, pin=False)
    with contextlib.closing(scratch), contextlib.ExitStack() as undo:
        store = make_store(layout, ("ssd", "ssd"), scratch, copies, undo)
        store.assign(weights_of(layout))
        store.drain()
        others = [blobs.allocate(4096).pieces[0] for _ in range(2)]
        values = store.stage(step=True).result(timeout=60)
        backend.hold()
        writes = [blobs.write(others[0], torch.zeros(4096, dtype=torch.uint8))]
        backend.wait_for_arrival()
        writes.append(blobs.write(others[1], torch.zeros(4096, dtype=torch.uint8)))
        step_staged(store, values, new)
        target = torch.zeros(layout.flat.nbytes, dtype=torch.uint8)
        issued = store.prefetch_to(target, None, urgency)
        urgency.begin_wait()
        backend.release()
        copies.wait(issued.result(timeout=60))
        for write in writes:
            write.result(timeout=60)
        store.drain()
    (read,) = (offset for operation, offset in backend.served if operation == "read")
    assert backend.served[:2] == [("write", others[0].offset), ("write", read)]


def test_a_prefetch_overtakes_others_once_its_unit_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit is read and one waits for staging memory; the last one of the others is used."""
    backend, layouts, copies = GatedBackend(), [make_layout(1) for _ in range(5)], CPUCopyEngine(torch.device("cpu"))
    with scratch_space(tmp_path, backend) as scratch, contextlib.ExitStack() as undo:
        stores = {layout.flat: make_store(layout, ("ssd", "ssd"), scratch, copies, undo) for layout in layouts}
        for store, layout in zip(stores.values(), layouts, strict=True):
            store.assign(weights_of(layout))
            store.drain()
        units = [[layout.flat] for layout in layouts]
        prefetcher = ParamPrefetcher(units, stores, copies, 2**20, unstage=lambda flat: None, pull=lambda flat: None)
        prefetcher.begin("train")
        backend.hold()
        begun = Begun(monkeypatch)
        prefetcher.prefetch()
        backend.wait_for_arrival()

        def release_and_wait(future: "Future[Any]", work: str) -> Any:
            backend.release()
            return wait_for(future, work)

        monkeypatch.setattr("lightning_ssd.model_states.weights.prefetcher.wait_for", release_and_wait)
        prefetcher.pre_forward(4)
        prefetcher.post_forward(4)
        prefetcher.evict_all()
        weights = [store.buffers.weights for store in stores.values()]
        assert [weights.index(buffer) for buffer in begun.buffers] in ([0, 1, 4, 2, 3], [0, 4, 1, 2, 3])


class Begun:
    """Records the buffers that were staged on a reader thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[bool] = []
        self.buffers: list[SSDBuffer] = []
        stage = SSDBuffer.stage

        def told(buffer: SSDBuffer, memory: Tensor | None, *, read: bool, urgency: Any = None) -> Any:
            self.reads.append(read)
            self.buffers.append(buffer)
            return stage(buffer, memory, read=read, urgency=urgency)

        monkeypatch.setattr(SSDBuffer, "stage", told)


def test_a_prefetch_reads_weights_after_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is made, and its write is blocked: no read is requested before the write ends."""
    backend, layout = GatedBackend(), make_layout(1)
    new = weights_of(layout, seed=1)
    target = torch.zeros(layout.flat.nbytes, dtype=torch.uint8)
    with open_store(tmp_path, ("ssd", "ssd"), layout, backend) as (store, scratch):
        values = store.stage(step=True).result(timeout=60)
        backend.hold()
        step_staged(store, values, new)
        begun = Begun(monkeypatch)
        issued = store.prefetch_to(target, None)
        scratch.params._worker.submit(lambda: None).result(timeout=60)  # jobs that are ready have run
        assert begun.reads == []
        backend.release()
        issued.result(timeout=60)
        assert same([item.of(target.view(torch.float32)) for item in layout.flat.param_views], new)


def test_a_step_waits_for_writes_of_one_that_was_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same destination."""
    backend, layout = GatedBackend(), make_layout(2)
    with open_store(tmp_path, ("ssd", "ssd"), layout, backend) as (store, scratch):
        store.drain()
        values = store.stage(step=True).result(timeout=60)
        backend.hold()
        store.unstage(values, changed=True, step=True)
        begun = Begun(monkeypatch)
        again = store.stage(step=True)
        scratch.states._worker.submit(lambda: None).result(timeout=60)  # jobs that are ready have run
        assert begun.reads == []
        backend.release()
        store.unstage(again.result(timeout=60), changed=False, step=True)
        assert begun.reads == [True, True]


def test_weights_that_are_rounded_from_whole_masters_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Begun(monkeypatch)
    with open_store(tmp_path, ("ssd", "ssd"), make_layout(1, torch.bfloat16)) as (store, _):
        begun.reads.clear()
        store.unstage(store.stage().result(timeout=60), changed=False)
        assert begun.reads == [False, True]


def test_values_in_host_memory_are_staged_without_operators_and_freed_with_their_version(tmp_path: Path) -> None:
    """Operators release Python's lock, for which the optimizer's thread and the training thread would wait."""
    layout = make_layout(2, torch.bfloat16)
    with open_store(tmp_path, ("host", "host"), layout) as (store, _):
        assert store.buffers.add_second()
        staged, other_staged = (store.stage(step=True).result() for _ in range(2))
        for one, other in ((staged, other_staged), (staged.out, other_staged.out)):
            assert all(map(is_, arrays_of(one), arrays_of(other)))
        new = weights_of(layout, 1)
        step(store, new)
        store.commit()
        assert same(masters_of(store), new)
        assert store.stage().result().weights is staged.out.weights
        dropped, kept = (weakref.ref(one.weights) for one in (staged, staged.out))
        staged = other_staged = one = other = None  # type: ignore[assignment]
        store.buffers.drop_second()
        assert dropped() is None and kept() is not None
    assert kept() is None
