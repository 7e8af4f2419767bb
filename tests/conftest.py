"""What all tests share: those marked `gpu` are skipped where there is no CUDA device."""

import os

# Where several tests run at once, threads that have nothing to do leave the cores to others. Read as torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

# Without it cuBLAS may split sums differently from call to call, and bit for bit means nothing. Read at CUDA's start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
