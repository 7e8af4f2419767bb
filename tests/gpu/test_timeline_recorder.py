"""`TimelineRecorder` on a CUDA device: it has kernels and copies, and phases on the device's clock."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import SSDOffloadStrategy, TimelineRecorder
from lightning_ssd.timeline import TimelineProfile
from tests.support.compare import assert_same
from tests.support.parity import TinyGPT, train
from tests.support.traces import labels, spans

pytestmark = pytest.mark.gpu

COPIES = {"copy in", "copy out"}


@pytest.mark.parametrize(
    ("arguments", "busy"),
    [
        (None, set()),
        ({"states": "gpu", "offload": 1.0}, COPIES),  # host memory is filled first
        # Backward takes storages whose write has not ended from memory, so that the SSD may have no reads.
        ({"states": "gpu", "offload": 1.0, "host_memory": 0}, COPIES | {"SSD write"}),
        ({"states": "host", "offload": "none", "gpu_memory": "1B"}, COPIES | {"CPU optimizer"}),
        ({"states": "ssd", "offload": 1.0, "gpu_memory": "1B"}, COPIES | {"CPU optimizer", "SSD read", "SSD write"}),
    ],
)
def test_records_every_resource_and_does_not_change_results(
    tmp_path: Path, arguments: dict[str, Any] | None, busy: set[str]
) -> None:
    def strategy() -> Any:
        return "auto" if arguments is None else SSDOffloadStrategy(min_bytes=1, **arguments)

    how: dict[str, Any] = {"device": "cuda", "model": TinyGPT, "steps": 8, "recorded": False}
    callbacks = [TimelineRecorder(4, tmp_path / "timeline", steps=2)]
    assert_same(train(strategy(), callbacks=callbacks, **how), train(strategy(), **how))
    rows = spans(tmp_path / "timeline.json")
    assert labels(rows, "phases") == ["forward", "backward", "optimizer"] * 2
    assert busy <= {row for row in rows if rows[row]}
    kernels, phases = rows["compute"], sorted(rows["phases"], key=lambda event: event["ts"])
    assert len(kernels) > 50
    forward = [kernel for kernel in kernels if kernel["ts"] < phases[1]["ts"]]
    assert 0 < len(forward) < len(kernels) / 2  # of two steps
    assert all(one["args"]["bytes"] > 0 for row in COPIES for one in rows[row] if "Memcpy" in one["name"])
    assert (tmp_path / "timeline.png").exists()


def test_kernels_lie_in_their_phases_on_a_late_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes that share the GPU delay its first work. Here, a long kernel does."""
    device, values = torch.device("cuda", torch.cuda.current_device()), torch.ones(1024, device="cuda")
    profile, synchronize = TimelineProfile(device), torch.cuda.synchronize

    def synchronize_then_delay(device: torch.device) -> None:
        synchronize(device)
        torch.cuda._sleep(100_000_000)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize_then_delay)
    profile.start()
    monkeypatch.undo()
    for phase, operator in (("forward", torch.cos), ("backward", torch.exp), ("optimizer", torch.tanh)):
        profile.mark(phase)
        operator(values)
    profile.mark("end")
    profile.stop()
    timeline = profile.timeline(tmp_path)
    assert [phase.label for phase in timeline.phases] == ["forward", "backward", "optimizer"]
    (cos, exp, tanh), phases = timeline.rows["compute"], timeline.phases
    assert "cos" in cos.label and "exp" in exp.label and "tanh" in tanh.label
    assert all(
        phase.start <= kernel.start and kernel.end <= phase.end
        for kernel, phase in zip((cos, exp, tanh), phases, strict=True)
    )
