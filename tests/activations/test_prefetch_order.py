"""The next storages are prefetched once one has left the window, before backward goes on."""

from pathlib import Path

import pytest
import torch

from lightning_ssd.activations import config
from tests.support.numbered import SIZE, NotingEngine, Saving, noted
from tests.support.offloader import change_policy, open_offloader

NUM_REGIONS = 6


@pytest.mark.parametrize("window_bytes", [4 * SIZE, 8 * SIZE])
def test_a_window_of_one_storage_is_refilled_before_backward_goes_on(
    window_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "make_copy_engine", NotingEngine)
    with open_offloader(tmp_path, tier="host") as offloader:
        change_policy(offloader, window_bytes=window_bytes)
        for _ in range(2):  # the first one shows the order
            offloader.begin_micro_batch()
            loss = torch.ones(SIZE, requires_grad=True)
            with offloader.hooks():
                for number in range(NUM_REGIONS):
                    loss = Saving.apply(loss, number)  # type: ignore[no-untyped-call]
            noted.clear()
            loss.sum().backward()
            offloader.end_backward()
    loaded = [number for event, number in noted if event == "load"]
    assert len(loaded) >= NUM_REGIONS - 3
    for number in loaded[1:]:  # the first one may be needed at once
        assert noted.index(("load", number)) < noted.index(("backward", number + 1))
