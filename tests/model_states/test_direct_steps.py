"""Steps on the device of values on SSDs, between device memory and SSDs, by a backend that takes device buffers.

On a CPU "device", the device's kernels are those of the CPU.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.device import CPUCopyEngine, Worker, ended, finished
from lightning_ssd.model_states.journal.journal import identity_of
from lightning_ssd.model_states.placement.state_storage import make_store
from lightning_ssd.model_states.steps.device_stepper import DeviceStepper
from lightning_ssd.model_states.steps.piece_transfers import CUT, pieces
from lightning_ssd.model_states.stores.buffers import StateStaging
from lightning_ssd.model_states.stores.layout import PAGED_ELEMENTS, WEIGHT, Layout
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.storage import PAGE, Backend, BlobStore, PinnedPool, Slab, StorageError, Urgency
from tests.support.compare import same
from tests.support.device_steps import SMALL_PIECE
from tests.support.direct import DirectBackend
from tests.support.faults import FailingAtBackend, Move, Operation
from tests.support.held_copies import HeldCopies
from tests.support.products import combinations, thorough
from tests.support.state_stores import CPU, STATES, Tiers, masters_of, weights_of
from tests.support.steps import Stepped

pytestmark = pytest.mark.timeout(120)

TIERS: list[Tiers] = [("ssd", "ssd"), ("host", "ssd"), ("ssd", "host")]
FORMATS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
SHAPES = [(70, 200), (7,), (5000,)]
PIECES = 10
"""Pieces of these parameters."""
DIVIDED = 12288
"""Bytes of the pieces of a blob that end amid pieces of a step."""


def make_flat(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> FlatParameter:
    return FlatParameter("flat", [(str(i), nn.Parameter(torch.zeros(of))) for i, of in enumerate(shapes)], dtype, CPU)


@dataclass
class Case:
    """A step of values in a store of blobs of its own."""

    made: Stepped
    pool: PinnedPool
    blobs: BlobStore
    before: dict[str, Tensor]

    @property
    def store(self) -> Any:
        return self.made.step.store

    def values(self) -> dict[str, Tensor]:
        """Returns the elements of parameters of all stored arrays, as the CPU and as a forward read them."""
        target = torch.zeros(self.store.flat.nbytes, dtype=torch.uint8)
        self.store.prefetch_to(target, None).result(timeout=60)
        staged = self.store.stage().result(timeout=60)
        arrays = staged.by_key() | {WEIGHT: target.view(self.store.flat.dtype)}
        views = self.store.flat.param_views
        found = {key: torch.cat([view.of(array).flatten() for view in views]) for key, array in arrays.items()}
        self.store.unstage(staged, changed=False)
        return found

    def step(self, stepper: DeviceStepper) -> "Future[None]":
        """Submits the step on the device."""
        weights, done = self.made.step.on_device(stepper, [])
        self.store.announce_step(weights, done)
        return done


@contextlib.contextmanager
def opened(
    path: Path,
    worker: Worker,
    backend: Backend,
    *,
    tiers: Tiers = ("ssd", "ssd"),
    versions: int = 2,
    dtype: torch.dtype = torch.float32,
    split: bool = False,
    scale: "Future[float | None] | None" = None,
    paths: int = 1,
    piece_bytes: int = 2**20,
    threads: int = 32,
) -> Iterator[Case]:
    """Yields a step of three parameters."""
    layout = Layout(make_flat(dtype=dtype), split, STATES, steps=True, versions=versions)
    folders = [path / f"{backend.name}{index}" for index in range(paths)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    blobs = BlobStore(
        folders, device=CPU, backend=backend, checksum=False, capacity=2**21, piece_bytes=piece_bytes, threads=threads
    )
    with (
        contextlib.closing(StateStaging.make(blobs, 2**19, 2**19, pin=False)) as staging,
        contextlib.ExitStack() as undo,
    ):
        store = make_store(layout, tiers, staging, CPUCopyEngine(CPU), undo)
        store.assign(weights_of(layout))
        store.drain()
        made = Stepped(store, worker, finished(0.5) if scale is None else scale, arrived=[True] * 3)
        case = Case(made, staging.states.pool, blobs, {})
        case.before = case.values()
        case.pool.reset_peak()
        yield case


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", SMALL_PIECE)


@pytest.fixture
def copies() -> HeldCopies:
    return HeldCopies()


@pytest.fixture
def stepper(copies: HeldCopies) -> Iterator[DeviceStepper]:
    made = DeviceStepper(copies)
    yield made
    made.close()


def expected(path: Path, worker: Worker, **how: Any) -> dict[str, Tensor]:
    """Returns the values after the CPU's step of values in host memory."""
    with opened(path / "expected", worker, DirectBackend(), **how | {"tiers": ("host", "host")}) as case:
        case.made.step.deferred([])[1].result(timeout=60)
        return case.values()


# ---- pieces ----


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(CUT, 4 * CUT))
def test_pieces_have_all_elements_once_and_begin_at_pages(sizes: list[int], elements: int) -> None:
    flat = make_flat([(size,) for size in sizes])
    made = list(pieces(flat, elements))
    starts = [piece.start for piece in made]
    assert [0, *(piece.end for piece in made)] == [*starts, flat.numel]
    assert all(start * size % PAGE == 0 for start in starts for size in (2, 4))
    assert all(0 < piece.end - piece.start <= elements for piece in made)
    assert all(piece.start <= start < start + numel <= piece.end for piece in made for start, numel in piece.spans)
    stepped = [element for piece in made for start, numel in piece.spans for element in range(start, start + numel)]
    assert stepped == [view.start + index for view in flat.param_views for index in range(view.numel)]


@pytest.mark.parametrize("dtype, split", FORMATS)
@pytest.mark.parametrize("numel", [PAGED_ELEMENTS - 64, PAGED_ELEMENTS, PAGED_ELEMENTS + 64])
def test_arrays_of_large_flat_parameters_begin_at_pages(numel: int, dtype: torch.dtype, split: bool) -> None:
    """Those of small ones lie one after the other."""
    layout = Layout(make_flat([(numel,)], dtype), split, STATES, steps=True, versions=1)
    others = [array for array in layout.arrays if array.buffer]
    ends = [array.start + numel * array.dtype.itemsize for array in others]
    assert layout.opt_state_bytes == ends[-1]
    if layout.paged:
        assert all(array.start % PAGE == 0 for array in others)
        gaps = [array.start - end for array, end in zip(others[1:], ends, strict=False)]
        assert all(0 <= gap < PAGE for gap in gaps)
    else:
        assert [array.start for array in others] == [0, *ends[:-1]]


def test_a_record_of_arrays_at_other_offsets_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(PAGED_ELEMENTS + 64,)]
    ours = Layout(make_flat(shapes), False, STATES, steps=True, versions=2)
    theirs = Layout(make_flat(shapes), False, STATES, steps=True, versions=2)
    assert identity_of([ours]) == identity_of([theirs])
    with monkeypatch.context() as patch:
        patch.setattr("lightning_ssd.model_states.stores.layout.PAGED_ELEMENTS", 2**40)
        theirs = Layout(make_flat(shapes), False, STATES, steps=True, versions=2)
        assert identity_of([ours]) != identity_of([theirs])


# ---- one step ----


@combinations(
    "tiers, values, versions, paths",
    TIERS,
    FORMATS,
    [1, 2],
    [1, 2],
    quick=[(TIERS[0], FORMATS[1], 2, 2), (TIERS[1], FORMATS[0], 2, 1), (TIERS[2], FORMATS[2], 1, 1)],
)
def test_values_are_those_of_the_cpu_without_staging_memory(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, tiers: Tiers, values: Any, versions: int, paths: int
) -> None:
    """Only arrays that the step uses are read. With two versions, the one before is whole."""
    how = dict(versions=versions, dtype=values[0], split=values[1])
    right = expected(tmp_path, worker, **how)
    backend = DirectBackend()
    with opened(tmp_path, worker, backend, tiers=tiers, paths=paths, piece_bytes=DIVIDED, **how) as case:
        layout, stats = case.store.layout, case.blobs.stats()
        backend.clear()
        case.step(stepper).result(timeout=60)
        case.store.drain()
        assert case.pool.peak_bytes == 0 and case.store.steps == 1
        nbytes = [buffer.nbytes if buffer.tier == "ssd" else 0 for buffer in case.store.buffers]
        now = case.blobs.stats()
        assert now.bytes_written - stats.bytes_written == sum(nbytes)
        assert now.bytes_read - stats.bytes_read == sum(nbytes[1:] if layout.whole_master else nbytes)
        assert same(case.values(), right) and not same(right, case.before)
        if versions == 2:
            case.store.revert()
            assert same(case.values(), case.before)


def test_steps_follow_each_other(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """Each reads what the one before has written, also those of the CPU in between."""
    backends = DirectBackend(), DirectBackend(name="cpu")
    found: list[dict[str, Tensor]] = []
    for backend in backends:
        with opened(tmp_path, worker, backend) as case:
            for number in range(5):
                if backend is backends[0] and number != 2:
                    case.step(stepper).result(timeout=60)
                else:
                    case.made.step.deferred([])[1].result(timeout=60)
            assert case.store.steps == 5
            found.append(case.values())
    assert same(*found)


@pytest.mark.parametrize("why", ["small", "checksum"])
def test_other_values_are_staged(tmp_path: Path, worker: Worker, stepper: DeviceStepper, why: str) -> None:
    """Small flat parameters, whose arrays share pages, and stores with checksums."""
    with contextlib.ExitStack() as undo:
        blobs = BlobStore([tmp_path], device=CPU, backend=DirectBackend(), checksum=why == "checksum")
        staging = StateStaging.make(blobs, 2**19, 2**19, pin=False)
        undo.callback(staging.close)
        flat = make_flat([(3000,)] * 3 if why == "small" else SHAPES)
        layout = Layout(flat, False, STATES, steps=True, versions=2)
        store = make_store(layout, ("ssd", "ssd"), staging, CPUCopyEngine(CPU), undo)
        store.assign(weights_of(layout))
        before = masters_of(store)
        staging.states.pool.reset_peak()
        made = Stepped(store, worker, finished(0.5), arrived=[True] * 3)
        assert not store.steps_directly
        made.step.on_device(stepper, [])[1].result(timeout=60)
        assert staging.states.pool.peak_bytes > 0 and store.steps == 1
        assert not any(torch.equal(*both) for both in zip(before, masters_of(store), strict=True))


def test_a_skipped_step_transfers_nothing(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    backend = DirectBackend()
    with opened(tmp_path, worker, backend, scale=finished_none()) as case:
        backend.clear()
        case.step(stepper).result(timeout=60)
        assert backend.log == [] and case.store.steps == 0


def finished_none() -> "Future[float | None]":
    scale: Future[float | None] = Future()
    scale.set_result(None)
    return scale


def test_the_cpu_steps_values_if_the_device_can_not(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """They are read once, to staging memory."""
    with opened(tmp_path, worker, DirectBackend()) as case:
        read = case.blobs.stats().bytes_read
        case.made.step = replace(case.made.step, arrived=[True, False, True])
        case.step(stepper).result(timeout=60)
        staged = sum(buffer.staging_bytes for buffer in case.store.buffers)
        assert case.blobs.stats().bytes_read - read <= staged and case.pool.peak_bytes == staged
        assert case.store.steps == 1


# ---- faults ----


@pytest.fixture
def larger_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of pieces: there are fewer positions of faults."""
    monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2 * SMALL_PIECE)
    return PIECES // 2


@pytest.mark.parametrize(
    ("number", "operation", "versions"),
    [(EIO, "read", 1), (EIO, "write", 2), thorough(None, "read", 2), thorough(None, "write", 1)],
)
def test_a_transfer_that_fails(
    tmp_path: Path, worker: Worker, larger_pieces: int, versions: int, operation: Any, number: int | None
) -> None:
    """At every position. A failed read fails its step alone, and a failed write is that of the new version. With two
    versions the values before are whole; else they are lost if some may be overwritten."""
    outcomes: list[str] = []
    right = expected(tmp_path, worker, versions=versions)
    for at in itertools.count():
        backend = FailingAtBackend(at, operation, armed=False, number=number)
        backend.device_buffers = True
        backend.name = f"{at}-"
        stepper = DeviceStepper(HeldCopies())
        with opened(tmp_path, worker, backend, versions=versions) as case:
            backend.arm()
            done = case.step(stepper)
            ended(done).result(timeout=60)
            ended(case.store.written()).result(timeout=60)
            ended(case.store.buffers.opt_state.write_done(uncommitted=True)).result(timeout=60)
            backend.disarm()
            assert not stepper.failed and case.pool.peak_bytes == 0
            if backend.failed == 0:
                assert same(case.values(), right)
                outcomes.append("made")
            elif operation == "read":
                assert isinstance(done.exception(), StorageError) and case.store.steps == 0
                if case.store.lost:
                    with pytest.raises(StorageError):
                        case.store.stage().result(timeout=60)
                    outcomes.append("lost")
                else:
                    case.store.announce_step(finished(None), finished(None))  # else prefetches raise its error
                    assert same(case.values(), case.before)
                    outcomes.append("whole")
                    if versions == 2:  # the next step is made
                        case.step(stepper).result(timeout=60)
                        assert same(case.values(), right)
            else:
                assert done.exception() is None and case.store.steps == 1
                assert isinstance(case.store.written().exception(), StorageError)
                if versions == 2:
                    case.store.revert()
                    assert same(case.values(), case.before)
                else:
                    with pytest.raises(StorageError):
                        case.store.stage().result(timeout=60)
                outcomes.append("whole" if versions == 2 else "lost")
        stepper.close()
        if backend.failed == 0:
            break
    assert len(outcomes) > 3 * larger_pieces
    assert ("lost" in outcomes) == (versions == 1)


def test_steps_whose_reads_fail_return_their_memory(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """One after the other, more than there are pieces."""
    backend = FailingAtBackend(0, "read", dead=True, armed=False)
    backend.device_buffers = True
    with opened(tmp_path, worker, backend) as case:
        backend.arm()
        for _ in range(DeviceStepper.PIECES + 1):
            with pytest.raises(StorageError):
                case.step(stepper).result(timeout=60)
        backend.disarm()
        case.step(stepper).result(timeout=60)
        assert case.store.steps == 1


class FirstFails(DirectBackend):
    """The first read fails once `fail` is set, the next two are made, and others wait at the gate. Its drive has one
    thread."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = threading.Event()
        self.left: int | None = None

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        if operation == "read" and self.left is not None:
            self.left -= 1
            if self.left == 2:
                assert self.fail.wait(60)
                raise OSError(EIO, "failed")
            if self.left >= 0:
                return call(buffer, offset)
        return super().transfer(operation, call, buffer, offset)


def test_memory_belongs_to_reads_of_a_failed_step_until_they_have_ended(
    tmp_path: Path, worker: Worker, copies: HeldCopies, stepper: DeviceStepper
) -> None:
    """The next step, of values in host memory, has the other pieces. The failed one has its values until then."""
    backend = FirstFails()
    with (
        opened(tmp_path, worker, backend, threads=1) as failed,
        opened(tmp_path, worker, DirectBackend(name="next"), tiers=("host", "host")) as other,
    ):
        backend.hold("read")
        backend.left = 3
        reading = failed.step(stepper)
        handle_events(stepper)  # two pieces are being read
        backend.fail.set()
        copies.held, free = [], 2 * (DeviceStepper.PIECES - 1)
        done = other.step(stepper)
        copies.until("on_d2h", free)
        handle_events(stepper)
        assert copies.calls.count("on_d2h") == free and not reading.done()
        backend.release("read")
        with pytest.raises(StorageError):
            reading.result(timeout=60)
        copies.until("on_d2h", free + 2)
        release, copies.held = copies.held, None
        for future in release:
            future.set_result(None)
        done.result(timeout=60)
        assert other.store.steps == 1


def test_staging_memory_is_not_page_locked(tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the device do not use it."""
    locked: list[int] = []
    monkeypatch.setattr(Slab, "pin", lambda slab: locked.append(slab.tensor.numel()))
    with opened(tmp_path, worker, DirectBackend(), tiers=("host", "ssd"), versions=1) as case:
        case.store.pin()
        assert locked == [case.store.flat.nbytes]


@pytest.mark.thorough
@pytest.mark.parametrize(("tiers", "versions"), [(TIERS[0], 2), (TIERS[1], 1), (TIERS[2], 2)])
def test_a_failure_of_the_device_leaves_the_step_to_the_cpu(
    tmp_path: Path, worker: Worker, larger_pieces: int, tiers: Tiers, versions: int
) -> None:
    """At every call. Values are lost if some may be overwritten in place."""
    right = expected(tmp_path, worker, versions=versions)
    outcomes: list[str] = []
    for fail_at in itertools.count(2):  # the first call orders the memory of the pieces
        copies = HeldCopies()
        copies.fail_at = fail_at
        stepper = DeviceStepper(copies)
        with opened(tmp_path, worker, DirectBackend(name=f"{fail_at}-"), tiers=tiers, versions=versions) as case:
            done = case.step(stepper)
            ended(done).result(timeout=60)
            if case.store.lost:
                with pytest.raises(RuntimeError, match="the device is lost"):
                    case.store.stage().result(timeout=60)
                assert case.store.steps == 0
                outcomes.append("lost")
            else:
                assert done.exception() is None and case.store.steps == 1 and same(case.values(), right)
                outcomes.append("made")
            assert case.pool.used_bytes == 0
        stepper.close()
        if not stepper.failed:
            break
    assert len(outcomes) > 2 * larger_pieces and ("lost" in outcomes) == (versions == 1)


# ---- the order of events ----


def handle_events(stepper: DeviceStepper) -> None:
    """Returns when the stepper has handled the events that were posted before."""
    stepper._post(lambda: None).result(timeout=60)


def test_values_are_not_read_before_their_memory_is_free(tmp_path: Path, worker: Worker, copies: HeldCopies) -> None:
    """The compute stream may use the memory when the stepper is made."""
    copies.held_in = []
    with (
        contextlib.closing(DeviceStepper(copies)) as stepper,
        opened(tmp_path, worker, backend := DirectBackend()) as case,
    ):
        backend.clear()
        done = case.step(stepper)
        handle_events(stepper)
        assert backend.log == []
        release, copies.held_in = copies.held_in, None
        for future in release:
            future.set_result(None)
        done.result(timeout=60)
        assert case.store.steps == 1


def test_values_are_written_when_the_device_has_computed_them(
    tmp_path: Path, worker: Worker, copies: HeldCopies, stepper: DeviceStepper
) -> None:
    """The step is committed when the last ones are computed, and its values can be read when they are written."""
    copies.held = []
    backend = DirectBackend()
    right = expected(tmp_path, worker)
    with opened(tmp_path, worker, backend) as case:
        backend.clear()
        done = case.step(stepper)
        for piece in range(PIECES):
            # One transfer for the weights and one for the states of each piece.
            copies.until("on_d2h", 2 * min(PIECES, piece + DeviceStepper.PIECES))
            assert len(backend.addresses["write"]) == 0 or piece > 0
            if piece == PIECES - 1:
                backend.hold("write")
            before = len(backend.addresses["write"])
            for future in copies.held[2 * piece : 2 * piece + 2]:
                assert not done.done()
                future.set_result(None)
            backend.until("write", before + 3)
        done.result(timeout=60)
        assert case.store.steps == 1 and not case.store.written().done()
        backend.release("write")
        assert same(case.values(), right)


def test_values_are_not_read_before_they_are_written(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before is committed, and the drive could serve the reads before its writes."""
    monkeypatch.setattr(DeviceStepper, "PIECES", 2 * PIECES)
    backend = DirectBackend()
    with (
        contextlib.closing(DeviceStepper(HeldCopies())) as stepper,
        opened(tmp_path, worker, backend) as case,
    ):
        backend.clear()
        backend.hold("write")
        case.step(stepper).result(timeout=60)
        second = case.step(stepper)
        handle_events(stepper)
        assert len(backend.addresses["read"]) == 3 * PIECES and not second.done()
        backend.release("write")
        second.result(timeout=60)
        found = case.values()
    with opened(tmp_path / "expected", worker, DirectBackend()) as case:
        for _ in range(2):
            case.made.step.deferred([])[1].result(timeout=60)
        assert same(found, case.values())


def test_writes_of_weights_overtake_others_once_a_thread_waits_for_them(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceStepper, "PIECES", PIECES)
    backend, copies = DirectBackend(), HeldCopies()
    with (
        contextlib.closing(DeviceStepper(copies)) as stepper,
        opened(tmp_path, worker, backend, threads=1) as case,
    ):
        (weights,) = case.store.buffers.weights.blobs[1].pieces
        backend.clear()
        backend.hold("write")
        copies.held = []
        done = case.step(stepper)
        copies.until("on_d2h", 2 * PIECES)  # all is read, by the drive's only thread
        for future in copies.held:
            future.set_result(None)
        done.result(timeout=60)
        backend.until("write", 1)
        target = torch.zeros(case.store.flat.nbytes, dtype=torch.uint8)
        prefetched = case.store.prefetch_to(target, None, Urgency(urgent=True))
        backend.release("write")
        prefetched.result(timeout=60)
        case.store.drain()
        of_weights = [weights.offset <= offset < weights.offset + weights.nbytes for offset in backend.offsets["write"]]
        assert len(of_weights) == 3 * PIECES and all(of_weights[1:PIECES])
        assert not any(of_weights[PIECES + 1 :])


@pytest.mark.parametrize("fails_after", [1, PIECES - 1])
def test_the_cpu_makes_a_failed_step_after_its_writes(tmp_path: Path, worker: Worker, fails_after: int) -> None:
    """They belong to the uncommitted version, to which the CPU's step is written, too."""
    copies, backend, right = Failing(fails_after), DirectBackend(), expected(tmp_path, worker)
    with contextlib.closing(DeviceStepper(copies)) as stepper, opened(tmp_path, worker, backend) as case:
        backend.clear()
        backend.hold("write")
        done = case.step(stepper)
        backend.until("write", 3)
        if fails_after > DeviceStepper.PIECES:
            backend.release("write")
        else:
            assert copies.failed.wait(60)
            handle_events(stepper)
            assert case.pool.used_bytes == 0 and not done.done()
            backend.release("write")
        done.result(timeout=60)
        assert stepper.failed and case.store.steps == 1 and case.pool.peak_bytes > 0
        assert same(case.values(), right)


class Failing(CPUCopyEngine):
    """A device that fails after the steps of some pieces."""

    def __init__(self, left: int) -> None:
        super().__init__(CPU)
        self.failed = threading.Event()
        self._left = left

    def sibling(self) -> "Failing":
        return self

    def h2d(self, *arguments: Any, **named: Any) -> Any:  # of a gradient
        self._left -= 1
        if self._left < 0:
            self.failed.set()
            raise RuntimeError("the device is lost")
        return super().h2d(*arguments, **named)


def test_memory_belongs_to_the_writes_until_they_have_ended(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper
) -> None:
    backend = DirectBackend()
    with opened(tmp_path, worker, backend) as case:
        backend.clear()
        backend.hold("write")
        done = case.step(stepper)
        backend.until("write", 3 * DeviceStepper.PIECES)
        handle_events(stepper)
        used = set(backend.addresses["read"])
        requests = len(backend.addresses["read"])
        assert len(used) == requests and not done.done()  # no memory was read to twice
        backend.release("write")
        done.result(timeout=60)
        case.store.drain()
        assert len(backend.addresses["read"]) > requests


@pytest.mark.parametrize("urgent", [False, True], ids=["less urgent", "more urgent"])
def test_reads_that_are_held_do_not_block_other_steps(
    tmp_path: Path, worker: Worker, stepper: DeviceStepper, urgent: bool
) -> None:
    """Those of values in host memory, whether they were to be made before or after."""
    slow = DirectBackend(name="slow")
    with (
        opened(tmp_path, worker, slow) as held,
        opened(tmp_path, worker, DirectBackend(name="other"), tiers=("host", "host")) as other,
    ):
        slow.clear()
        slow.hold("read")
        held.made.step = replace(held.made.step, priority=1)
        other.made.step = replace(other.made.step, priority=0 if urgent else 2)
        done = held.step(stepper)
        slow.until("read", 3)
        other.step(stepper).result(timeout=60)
        assert other.store.steps == 1 and not done.done()
        slow.release("read")
        done.result(timeout=60)
        assert same(held.values(), other.values())


def test_urgent_values_overtake_others_at_the_drives(tmp_path: Path, worker: Worker, stepper: DeviceStepper) -> None:
    """They wait for the pieces that are being read, and not for those that were submitted before."""
    log: list[Any] = []
    late, urgent = DirectBackend(log=log, name="late"), DirectBackend(log=log, name="urgent")
    with opened(tmp_path, worker, late) as first, opened(tmp_path, worker, urgent) as second:
        first.made.step = replace(first.made.step, priority=1)
        second.made.step = replace(second.made.step, priority=0)
        late.clear()
        late.hold("read")
        done = [first.step(stepper)]
        late.until("read", 3 * DeviceStepper.AHEAD)
        done.append(second.step(stepper))
        handle_events(stepper)
        late.release("read")
        for future in done:
            future.result(timeout=60)
        reads = [name for operation, name in log if operation == "read"]
        begun = reads[: 3 * DeviceStepper.AHEAD]
        assert set(begun) == {"late"}
        next_late = reads.index("late", len(begun))
        assert reads[:next_late].count("urgent") >= 3 * (PIECES - DeviceStepper.AHEAD)
        assert same(first.values(), second.values())
