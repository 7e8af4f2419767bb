"""The next storages are prefetched once one has left the window, before backward goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.activations import config
from lightning_ssd.device import CPUCopyEngine
from tests.support.offloader import change_policy, open_offloader

SIZE = 64
NUM_REGIONS = 6


class LoadRecorder(CPUCopyEngine):
    """A copy engine that notes the copies to the device by their values."""

    noted: list[tuple[str, int]]

    def h2d(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        mark = super().h2d(src, dst, after, awaited=awaited)
        first = dst.view(torch.float32)[0]
        if first.isfinite():  # the copies whose speed is measured have any values
            self.noted.append(("load", int(first)))
        return mark


class Region(torch.autograd.Function):
    """Saves one tensor, whose values are a number, and notes the backward that needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(torch.full((SIZE,), float(number)))
        return tensor + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        LoadRecorder.noted.append(("backward", int(saved[0])))
        return gradient, None


@pytest.mark.parametrize("window_bytes", [4 * SIZE, 8 * SIZE])
def test_a_window_of_one_storage_is_refilled_before_backward_goes_on(
    window_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadRecorder, "noted", [], raising=False)
    monkeypatch.setattr(config, "make_copy_engine", LoadRecorder)
    with open_offloader(tmp_path, tier="host") as offloader:
        change_policy(offloader, window_bytes=window_bytes)
        for _ in range(2):  # the first one shows the order
            offloader.begin_micro_batch()
            loss = torch.ones(SIZE, requires_grad=True)
            with offloader.hooks():
                for number in range(NUM_REGIONS):
                    loss = Region.apply(loss, number)  # type: ignore[no-untyped-call]
            LoadRecorder.noted.clear()
            loss.sum().backward()
            offloader.end_backward()
    loaded = [number for event, number in LoadRecorder.noted if event == "load"]
    assert len(loaded) >= NUM_REGIONS - 3
    for number in loaded[1:]:  # the first one may be needed at once
        assert LoadRecorder.noted.index(("load", number)) < LoadRecorder.noted.index(("backward", number + 1))
