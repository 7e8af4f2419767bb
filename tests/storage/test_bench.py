"""The benchmark measures, prints, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

from lightning_ssd.storage.bench import bench_io, format_table
from tests.support.storage import CPU


def test_it_compares_raw_and_engine_and_removes_its_files(tmp_path: Path) -> None:
    rows = bench_io([tmp_path, tmp_path], 64 * 2**20, CPU)
    assert [(row.backend, row.memory, row.direction) for row in rows] == [
        ("posix", "host", "write"),
        ("posix", "host", "read"),
    ]
    assert all(0 < row.engine_low <= row.engine <= row.engine_high for row in rows)
    assert all(row.ratio == row.engine / max(row.raw, row.raw_best) for row in rows)
    lines = format_table(rows).splitlines()
    assert len(lines) == 3
    assert "ratio" in lines[0]
    assert list(tmp_path.iterdir()) == []
