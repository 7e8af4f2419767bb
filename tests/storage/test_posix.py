"""The POSIX backend: aligned or not, with O_DIRECT or without."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.storage import PinnedPool, PosixBackend, choice, choose_backend
from tests.support.faults import DeviceBackend
from tests.support.storage import CPU, noise

PAGE = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    return path


def pages(count: int, seed: int = 0) -> torch.Tensor:
    """Page-aligned memory with noise in it."""
    buffer = PinnedPool(count * PAGE, pin=False).acquire(count * PAGE).tensor
    return buffer.copy_(noise(count * PAGE, seed))


def refusing(call: Any, refused: Any) -> Any:
    """Returns `call` of a filesystem without O_DIRECT: it raises EINVAL where `refused` is true."""

    def answer(*arguments: Any) -> Any:
        if refused(*arguments):
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(*arguments)

    return answer


@pytest.mark.parametrize(("start", "nbytes", "offset"), [(0, 8 * PAGE, PAGE), (0, 8 * PAGE - 5, 0), (3, 5 * PAGE, 7)])
def test_any_alignment_round_trips(file: Path, start: int, nbytes: int, offset: int) -> None:
    opened = PosixBackend().open(file)
    data = pages(10)[start : start + nbytes]
    assert opened.write(data, offset) == nbytes
    assert file.read_bytes()[offset : offset + nbytes] == data.numpy().tobytes()
    back = pages(10, seed=1)[start : start + nbytes]
    assert opened.read(back, offset) == nbytes
    assert torch.equal(back, data)
    opened.close()


def test_the_end_of_the_file_shows_in_the_count(file: Path) -> None:
    opened = PosixBackend().open(file)
    assert opened.read(pages(8), 60 * PAGE) == 4 * PAGE
    assert opened.read(pages(8), 64 * PAGE) == 0
    opened.close()


def test_a_partial_transfer_is_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: real(fd, [views[0][:PAGE]], offset))
    opened = PosixBackend().open(file)
    data = pages(8)
    assert opened.write(data, 0) == 8 * PAGE
    assert file.read_bytes()[: 8 * PAGE] == data.numpy().tobytes()
    opened.close()


@pytest.mark.parametrize("refused_by", ["open", "transfer"])
def test_a_filesystem_without_o_direct_is_served_with_one_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused_by: str
) -> None:
    if refused_by == "open":
        monkeypatch.setattr(os, "open", refusing(os.open, lambda path, flags, *rest: flags & os.O_DIRECT))
    else:
        direct: set[int] = set()

        def remembering(path: Any, flags: int, *rest: Any) -> int:
            fd = real_open(path, flags, *rest)
            if flags & os.O_DIRECT:
                direct.add(fd)
            return fd

        real_open = os.open
        monkeypatch.setattr(os, "open", remembering)
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name), lambda fd, *rest: fd in direct))
    opened = PosixBackend().open(file)
    data, back = pages(8), pages(8, seed=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert opened.write(data, 0) == 8 * PAGE
            assert opened.read(back, 0) == 8 * PAGE
    assert torch.equal(back, data)
    opened.close()
    (warning,) = [record for record in caplog.records if "O_DIRECT" in record.message]
    assert str(file) in warning.message


def test_memory_filesystems_work(caplog: pytest.LogCaptureFixture) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm")
    path = shared / f"lightning_ssd-test-{os.getpid()}"
    path.write_bytes(bytes(8 * PAGE))
    try:
        opened = PosixBackend().open(path)
        data, back = pages(8), pages(8, seed=1)
        for _ in range(2):
            assert opened.write(data, 0) == opened.read(back, 0) == 8 * PAGE
        assert torch.equal(back, data)
        opened.close()
    finally:
        path.unlink()
    # Old kernels refuse O_DIRECT on tmpfs, newer ones take it.
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) <= 1


def test_auto_selects_posix_without_a_gpu_and_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_ssd"):
        assert choose_backend("auto", CPU, checksum=False).name == "posix"
    assert "storage backend: posix (through host memory" in caplog.text
    assert "not on a CUDA device" in caplog.text


def test_a_given_backend_is_used_and_an_unknown_name_refused() -> None:
    backend = PosixBackend()
    assert choose_backend(backend, CPU, checksum=True) is backend
    with pytest.raises(ValueError, match="'auto', 'posix', 'kvikio'"):
        choose_backend("io_uring", CPU, checksum=True)  # type: ignore[arg-type]


def test_checksums_have_priority_over_gpudirect_storage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Device buffers can't be hashed: `auto` uses them with `checksum=False` only, and logs that."""
    monkeypatch.setattr(choice, "why_no_gds", lambda device: None)
    monkeypatch.setattr(choice, "KvikioBackend", DeviceBackend)
    with caplog.at_level(logging.INFO, logger="lightning_ssd"):
        assert choose_backend("auto", CPU, checksum=True).name == "posix"
        assert "checksum=False would use it" in caplog.text
        assert choose_backend("auto", CPU, checksum=False).name == "device"
        choose_backend("kvikio", CPU, checksum=True)
    assert "through host memory, where checksum=True hashes bytes" in caplog.text
