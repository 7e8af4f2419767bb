"""The I/O benchmark: its bandwidths, its table, its errors, and that it leaves no files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import io
from benchmarks.io import bench_io, format_table
from lightning_ssd.storage import StorageError
from tests.support.storage import CPU, MIB

SIZE = 16 * MIB


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_BLOCK", 2 * MIB)


def test_every_pass_moves_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which every pass lasts one second, all bandwidths are the benchmark's bytes per second."""
    transfers: list[int] = []
    totals: list[int] = []
    """Bytes that had been moved when the clock was read: at the begin and at the end of every pass."""

    def read_clock() -> float:
        totals.append(sum(transfers))
        return float(len(totals))

    def counted(call: Any) -> Any:
        def run(*arguments: Any) -> int:
            nbytes: int = call(*arguments)
            transfers.append(nbytes)
            return nbytes

        return run

    monkeypatch.setattr(io, "perf_counter", read_clock)
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    rows = bench_io(paths, SIZE, CPU)
    assert [(row.backend, row.memory, row.direction) for row in rows] == [
        ("posix", "host", "write"),
        ("posix", "host", "read"),
    ]
    passes = [end - begin for begin, end in zip(totals[::2], totals[1::2], strict=True)]
    assert len(passes) >= 2 * 2 * io._REPETITIONS and set(passes) == {SIZE}
    for row in rows:
        assert row.raw == row.engine == row.engine_low == row.engine_high == SIZE
        assert row.ratio == 1.0
    title, *lines = format_table(rows).splitlines()
    assert "ratio" in title and len(lines) == 2
    assert all(line.endswith("100.0%  slow") and f"{SIZE / 1e9:.2f}" in line for line in lines)
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_ratio_is_of_the_raw_loop() -> None:
    row = io.IOBenchRow("posix", "host", "write", 4e9, 8, 3e9, 2e9, 3.5e9)
    assert row.ratio == 0.75
    assert "(x8)" in format_table([row]) and " 75.0%  good" in format_table([row])


def test_a_short_transfer_is_an_error_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: len(buffers[0]) // 2)
    with pytest.raises(StorageError, match=f"raw write moved {MIB} of {2 * MIB} bytes in {tmp_path}"):
        bench_io([tmp_path], SIZE, CPU)
    assert list(tmp_path.iterdir()) == []
