"""What all tests share: those marked `gpu` are skipped without a CUDA device; drives are measured on few bytes."""

import os

# Where several tests run at once, threads that have nothing to do leave the cores to others. Read as torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

# Without it cuBLAS may split sums differently from call to call, and bit for bit means nothing. Read at CUDA's start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


from lightning_ssd.storage import calibration  # noqa: E402


@pytest.fixture(autouse=True)
def quick_calibration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures a drive on one piece, where bandwidth is not tested: else every store begins by writing 192 MiB."""
    if "storage" not in request.path.parts and "gpu" not in request.path.parts:
        monkeypatch.setattr(calibration, "_MOST_BYTES", 16 * 2**20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
