"""Fixtures of the tests of the activation offloader."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd.activations import ActivationOffloader
from tests.support.offloader import open_offloader


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: torch's threads would only spin against the I/O threads that are tested."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[ActivationOffloader]:
    """An offloader over real files, with checksums."""
    with open_offloader(tmp_path, checksum=True) as offloader:
        yield offloader
