"""Flipped bits, torn, lost and misdirected writes raise an error before a wrong number is used."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.storage import BlobStore, ChecksumError
from tests.support.faults import CorruptingBackend
from tests.support.storage import CPU, KIB, noise, open_store, read, write
from tests.support.trainings import batches, quiet, small_model

PAGE = 4096


@st.composite
def faults(draw: st.DrawFn) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Draws the effect of a failing write: `fault(given, old)` returns the bytes in the file."""
    kind = draw(st.sampled_from(["flip", "torn", "lost", "zeros", "shifted"]))
    where, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
    length = draw(st.sampled_from([1, 8, 512, PAGE, 10 * PAGE]))

    def fault(given: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        start = int(where * given.numel())
        if kind == "flip":
            given[start] ^= 1 << bit
        elif kind == "torn":  # the drive lost power: the rest has the old bytes
            given[start:] = old[start:]
        elif kind == "lost":
            given = old
        elif kind == "zeros":
            given[start : start + length] = 0
        else:  # the right bytes at the wrong offset
            given = given.roll(512)
        return given

    return fault


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fault=faults(), number=st.integers(0, 12), sizes=st.lists(st.integers(1, 60 * KIB), min_size=1, max_size=4))
def test_a_store_never_returns_wrong_bytes(
    tmp_path_factory: pytest.TempPathFactory, fault: Any, number: int, sizes: list[int]
) -> None:
    """Blobs are written twice, so that old bytes are whole blobs, too. Reads return the written bytes or an error."""
    path = tmp_path_factory.mktemp("ssd")
    backend = CorruptingBackend(None, fault)
    with open_store(path, backend=backend, capacity=512 * KIB, piece_bytes=16 * KIB) as store:
        blobs = [store.allocate(size) for size in sizes]
        for blob in blobs:
            write(store, blob, noise(blob.nbytes, seed=100))
        backend._number = backend.writes + number
        for seed, blob in enumerate(blobs):
            write(store, blob, noise(blob.nbytes, seed))
        for seed, blob in enumerate(blobs):
            try:
                data = read(store, blob)
            except ChecksumError as error:
                assert "scratch.bin" in str(error) and "are not what was written" in str(error)
            else:
                assert torch.equal(data, noise(blob.nbytes, seed))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_kept_blobs_are_checked_by_the_next_run(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Bytes that change between two runs raise an error in the second one."""
    path = tmp_path_factory.mktemp("ssd")
    first = BlobStore([path], device=CPU, capacity=64 * KIB, keep=True)
    blob = first.allocate(5 * PAGE + 100)
    write(first, blob, noise(blob.nbytes))
    kept = first.manifest([blob])
    first.close(remove=False)
    (file,) = path.glob("*/scratch.bin")
    piece = blob.pieces[0]
    where = piece.offset + data.draw(st.integers(0, piece.nbytes - 1))
    content = bytearray(file.read_bytes())
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    second = BlobStore([path], device=CPU, keep=True, find_manifest=lambda directory: kept)
    try:
        with pytest.raises(ChecksumError):
            read(second, blob)
    finally:
        second.close()


# ---- trainings with all bytes on such a drive ----


def fit(root: Path, strategy: Any) -> dict[str, torch.Tensor]:
    model = small_model()
    trainer = pl.Trainer(strategy=strategy, **quiet(root))
    trainer.fit(model, batches(4))
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_ssd(backend: CorruptingBackend, **arguments: Any) -> SSDOffloadStrategy:
    """Between two uses, activations, weights and optimizer states are on SSDs only."""
    everything = {"states": "ssd", "gpu_memory": "1B", "offload": 1.0, "min_bytes": 1}
    return SSDOffloadStrategy(**(everything | {"backend": backend, "ssd_capacity": "4MiB"} | arguments))


def check_training(root: Path, number: int, fault: Any, expected: dict[str, torch.Tensor], recover: bool) -> bool:
    """Returns whether the fault was found; if not, it has changed no number."""
    root.mkdir()
    try:
        found = fit(root, on_ssd(CorruptingBackend(number, fault), recover=recover))
    except ChecksumError:
        return True
    assert all(torch.equal(found[name], value) for name, value in expected.items()), number
    return False


def flip(given: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    given[0] ^= 16
    return given


def lose(given: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return old


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return fit(tmp_path_factory.mktemp("plain"), "auto")


def count_writes(root: Path, expected: dict[str, torch.Tensor], recover: bool) -> int:
    root.mkdir()
    backend = CorruptingBackend(None, flip)
    found = fit(root, on_ssd(backend, recover=recover))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return backend.writes


def test_a_training_uses_no_wrong_number(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """The faulty writes are a few of activations, weights and optimizer states; without checksums losses differ."""
    writes = count_writes(tmp_path / "whole", expected, recover=False)
    numbers = random.Random(0).sample(range(writes // 3, writes), 6)
    found = [
        check_training(tmp_path / str(number), number, (flip, lose)[index % 2], expected, False)
        for index, number in enumerate(numbers)
    ]
    assert any(found)


@pytest.mark.thorough
@pytest.mark.parametrize("recover", [False, True])
def test_a_training_uses_no_wrong_number_at_any_write(
    tmp_path: Path, expected: dict[str, torch.Tensor], recover: bool
) -> None:
    writes = count_writes(tmp_path / "whole", expected, recover)
    found = [
        check_training(tmp_path / str(number), number, (flip, lose)[number % 2], expected, recover)
        for number in range(0, writes, max(1, writes // 60))
    ]
    assert sum(found) > len(found) // 4
