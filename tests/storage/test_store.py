"""Blobs are read as written, occupy the expected space, and leave no files."""

from __future__ import annotations

import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.throttled_backend import ThrottledBackend
from lightning_ssd.storage import Backend, BackendFile, BlobStore, StorageError, StorageFullError, timed_transfers
from tests.support.faults import FaultyBackend, Move, Operation, WrappingBackend
from tests.support.storage import CPU, KIB, noise, open_store, read, write

PAGE = 4096


@pytest.fixture(scope="module")
def striped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlobStore]:
    paths = [tmp_path_factory.mktemp("ssd") for _ in range(3)]
    with open_store(paths, checksum=True, piece_bytes=16 * KIB) as store:
        yield store


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 200 * KIB), min_size=1, max_size=6))
def test_blobs_are_read_as_written(striped: BlobStore, sizes: list[int]) -> None:
    blobs = [striped.allocate(size) for size in sizes]
    for number, blob in enumerate(blobs):
        assert blob.nbytes == sizes[number]
        starts = [piece.start for piece in blob.pieces]
        assert starts == [sum(piece.nbytes for piece in blob.pieces[:index]) for index in range(len(starts))]
        assert sum(piece.nbytes for piece in blob.pieces) == blob.nbytes
        assert all(0 < piece.nbytes <= striped.piece_bytes for piece in blob.pieces)
        assert all(piece.offset % PAGE == piece.start % PAGE == 0 for piece in blob.pieces)
        write(striped, blob, noise(blob.nbytes, seed=number))
    for number, blob in enumerate(blobs):
        assert torch.equal(read(striped, blob), noise(blob.nbytes, seed=number))
        striped.free(blob)
    assert striped.stats().allocated_bytes == 0


class TimedBackend(WrappingBackend):
    """A drive on whose clock transfers take the time of a rate, in bytes per second."""

    name = "timed"

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.seconds = rate, 0.0

    def transfer(self, operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
        self.seconds += buffer.numel() / self.rate
        return call(buffer, offset)


def test_a_large_blob_lies_on_all_volumes_by_their_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    drives = {slow: TimedBackend(50e6), fast: TimedBackend(200e6)}
    monkeypatch.setattr(timed_transfers, "perf_counter", lambda: sum(drive.seconds for drive in drives.values()))
    for path in drives:
        path.mkdir()

    class Drives(Backend):
        name = "drives"
        device_buffers = False

        def open(self, path: Path) -> BackendFile:
            return drives[path.resolve().parent.parent].open(path)

    with open_store(list(drives), backend=Drives(), threads=1) as store:
        volumes = [piece.volume for piece in store.allocate(200 * 64 * KIB).pieces]
    assert 0 < volumes.count(0) < volumes.count(1)


def test_only_the_pieces_bytes_and_their_padding_are_touched(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        blob = store.allocate(5000)
        (piece,) = blob.pieces
        data = noise(5000)
        store.write(piece, data).result()
        exact = torch.zeros(5001, dtype=torch.uint8)
        store.read(piece, exact[:5000]).result()
        assert torch.equal(exact[:5000], data)
        assert exact[5000] == 0
        store.write(piece, noise(3 * PAGE, seed=1)).result()  # longer than padded
        padded = torch.zeros(3 * PAGE, dtype=torch.uint8)
        store.read(piece, padded).result()
        assert torch.equal(padded[:5000], noise(3 * PAGE, seed=1)[:5000])
        assert not padded[2 * PAGE :].any()


def test_the_drive_is_measured_when_a_store_is_made(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.write_bandwidth > 0
        assert store.read_bandwidth > 0
        assert store.backend_name == "posix"
        assert not store.device_buffers
        assert store.stats().bytes_written == store.stats().bytes_read == 0


def test_paths_on_one_slow_drive_are_not_counted_twice(tmp_path: Path) -> None:
    drive = ThrottledBackend(100e6)
    with open_store([tmp_path, tmp_path], backend=drive) as store:
        assert store.write_bandwidth < 110e6
        assert store.read_bandwidth < 110e6


def test_statistics_count_completed_transfers(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        blob = store.allocate(100 * KIB)
        write(store, blob, noise(blob.nbytes))
        read(store, blob)
        read(store, blob)
        store.free(blob)
        stats = store.stats()
        assert (stats.bytes_written, stats.bytes_read) == (100 * KIB, 200 * KIB)
        assert stats.write_seconds > 0
        assert stats.read_seconds > 0
        assert stats.allocated_bytes == 0


def test_a_capacity_is_used_to_its_last_page_and_not_beyond(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    capacity = 50 * PAGE
    with open_store(paths, capacity=capacity) as store:  # pieces of 16 pages, 25 pages on each volume
        blobs = [store.allocate(10 * PAGE) for _ in range(5)]
        with pytest.raises(StorageFullError, match=r"allocate 1 bytes .*capacity .*0 bytes available"):
            store.allocate(1)
        for number, blob in enumerate(blobs):
            write(store, blob, noise(blob.nbytes, seed=number))
        for number, blob in enumerate(blobs):
            assert torch.equal(read(store, blob), noise(blob.nbytes, seed=number))
        for blob in blobs[::2]:
            store.free(blob)
        whole = store.allocate(30 * PAGE)  # in the holes
        write(store, whole, noise(whole.nbytes))
        assert torch.equal(read(store, whole), noise(whole.nbytes))
        with pytest.raises(StorageFullError):
            store.allocate(PAGE)
        assert store.stats().allocated_bytes == capacity  # the failed allocation used no space
        files = sum((next(path.iterdir()) / "scratch.bin").stat().st_size for path in paths)
        assert files == capacity


def test_the_smallest_capacity(tmp_path: Path) -> None:
    with open_store(tmp_path, capacity=PAGE) as store:
        blob = store.allocate(17)
        write(store, blob, noise(17))
        assert torch.equal(read(store, blob), noise(17))


def test_reserving_allocates_the_space_now(tmp_path: Path) -> None:
    with open_store([tmp_path, tmp_path]) as store:
        store.reserve(300 * 2**20)
        files = [directory / "scratch.bin" for directory in tmp_path.iterdir()]
        assert sum(file.stat().st_size for file in files) == 300 * 2**20
        assert sum(file.stat().st_blocks for file in files) * 512 >= 300 * 2**20
        store.reserve(100)
        assert sum(file.stat().st_size for file in files) == 300 * 2**20


def test_more_than_the_disk_has_is_refused_with_figures(tmp_path: Path) -> None:
    too_much = shutil.disk_usage(tmp_path).free + 2**40
    with pytest.raises(StorageFullError, match=r"TiB|GiB.*available.*Free space"):
        BlobStore([tmp_path], device=CPU, capacity=too_much)
    assert list(tmp_path.iterdir()) == []
    # Two directories on one disk share its free space.
    with pytest.raises(StorageFullError):
        BlobStore([tmp_path, tmp_path], device=CPU, capacity=int(shutil.disk_usage(tmp_path).free * 1.5))
    assert list(tmp_path.iterdir()) == []
    with open_store(tmp_path) as store:
        with pytest.raises(StorageFullError, match="reserve"):
            store.reserve(too_much)
        (directory,) = tmp_path.iterdir()
        before = (directory / "scratch.bin").stat().st_size
        with pytest.raises(StorageFullError, match="allocate"):
            store.allocate(too_much)
        assert (directory / "scratch.bin").stat().st_size == before  # the attempt did not fill the disk


def test_a_file_size_limit_counts_as_full(tmp_path: Path, file_size_limit: int) -> None:
    with open_store(tmp_path, capacity=file_size_limit) as store:
        store.reserve(file_size_limit)
        store.allocate(file_size_limit)
    with pytest.raises(StorageFullError, match=r"scratch\.bin.*EFBIG.*ulimit"), open_store(tmp_path) as store:
        store.reserve(2 * file_size_limit)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """Simulates a full disk by a limit of the operating system, without a mount, and for root, too."""
    limit = 64 * 2**20
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_store_that_cannot_be_made_leaves_no_files(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(StorageError, match="missing"):
        BlobStore([tmp_path, tmp_path / "missing"], device=CPU)
    failing = FaultyBackend()
    failing.error["read"] = OSError(5, "Input/output error")
    with pytest.raises(StorageError, match="EIO"):
        BlobStore([tmp_path, tmp_path], device=CPU, backend=failing)
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "arguments",
    [{"piece_bytes": 1000}, {"piece_bytes": 0}, {"threads": 0}, {"capacity": 0}, {"backend": "floppy"}],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BlobStore([tmp_path], device=CPU, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="paths"):
        BlobStore([], device=CPU)
    with pytest.raises(ValueError, match="paths"):
        BlobStore(str(tmp_path), device=CPU)
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        (piece,) = store.allocate(100).pieces
        for buffer in (noise(99), torch.zeros(100), noise(200)[::2], noise(200).view(2, 100)):
            with pytest.raises(ValueError, match="buffer"):
                store.write(piece, buffer)
        with pytest.raises(ValueError, match="negative|cannot have"):
            store.allocate(-1)


def test_a_blob_is_freed_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        blob = store.allocate(100)
        store.free(blob)
        with pytest.raises(ValueError, match="freed before"):
            store.free(blob)


def test_many_threads_use_one_store(striped: BlobStore) -> None:
    def work(number: int) -> None:
        for round in range(20):
            data = noise(1 + (number * 7919 + round * 104729) % (100 * KIB), seed=number)
            blob = striped.allocate(data.numel())
            write(striped, blob, data)
            assert torch.equal(read(striped, blob), data)
            striped.free(blob)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, number) for number in range(4)]:
            future.result(timeout=60)
    assert striped.stats().allocated_bytes == 0


def test_another_store_resumes_with_kept_blobs(tmp_path: Path) -> None:
    """It has the blobs and checksums. Blobs that were not named are free, and the last store removes the files."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = BlobStore(paths, device=CPU, checksum=True, piece_bytes=16 * KIB, keep=True)
    blobs = [first.allocate(size) for size in (100 * KIB, 1, 50 * KIB)]
    contents = [noise(blob.nbytes, seed) for seed, blob in enumerate(blobs)]
    for blob, content in zip(blobs, contents, strict=True):
        write(first, blob, content)
    with pytest.raises(StorageError, match="another run, which is alive, keeps its states in"):
        BlobStore(paths, device=CPU, keep=True)
    first.sync()
    kept = pickle.loads(pickle.dumps(first.manifest(blobs[:2])))
    first.close(remove=False)
    BlobStore(paths, device=CPU).close()  # does not sweep it
    second = BlobStore(
        paths, device=CPU, checksum=True, piece_bytes=16 * KIB, keep=True, find_manifest=lambda directory: kept
    )
    assert second.stats().allocated_bytes == sum(-(-blob.nbytes // PAGE) * PAGE for blob in blobs[:2])
    other = second.allocate(200 * KIB)
    write(second, other, noise(200 * KIB))
    for blob, content in zip(kept.blobs, contents, strict=False):
        assert torch.equal(read(second, blob), content)
    second.close()
    assert not any(list(path.iterdir()) for path in paths)


def test_kept_files_without_a_record_are_replaced(tmp_path: Path) -> None:
    first = BlobStore([tmp_path], device=CPU, keep=True)
    first.allocate(2**20)
    first.close(remove=False)
    (file,) = tmp_path.glob("*/scratch.bin")
    size = file.stat().st_size
    second = BlobStore([tmp_path], device=CPU, keep=True)
    assert second.stats().allocated_bytes == 0 and file.stat().st_size <= size
    second.close()
    assert not list(tmp_path.iterdir())


def test_stores_of_several_processes_share_files(tmp_path: Path) -> None:
    """One store writes, the other reads what it has hashes of, also when the first one has removed the files."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = BlobStore(paths, device=CPU)
    blob = first.allocate(100 * KIB)
    second = BlobStore(paths, device=CPU, join=first.share([blob]))
    write(first, blob, noise(blob.nbytes))
    with pytest.raises(StorageError, match="never written"):
        read(second, blob)
    second.adopt_hashes(first.hashes_of([blob]))
    assert torch.equal(read(second, blob), noise(blob.nbytes))
    first.close()
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert torch.equal(read(second, blob), noise(blob.nbytes))
    assert torch.equal(second.detach().read(blob, 0, blob.nbytes), noise(blob.nbytes))


def test_preferred_paths_are_used_while_they_have_room(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    with open_store(paths, piece_bytes=4 * KIB, capacity=3 * 2**20) as store:
        for own in (0, 1, 2):
            assert {piece.volume for piece in store.allocate(64 * KIB, [own]).pieces} == {own}
        most = store.allocate(store.room - 64 * KIB, [1])
        assert {piece.volume for piece in most.pieces} == {0, 1, 2}
