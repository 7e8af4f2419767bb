"""`PrefetchScheduler`: the window that it sets, and the effect of the window."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from benchmarks.throttled_backend import ThrottledBackend
from lightning_ssd import MicroBatchSwitch, PrefetchScheduler
from lightning_ssd.callbacks.find import find_offloader
from tests.support.trainings import (  # noqa: F401
    MIN_BYTES,
    SmallModel,
    Watch,
    batches,
    make_trainer,
    nothing_left,
    offloading,
    small_model,
)


class WindowRecorder(pl.Callback):
    """Records the offloader's window and depth at every batch, and the offloaded bytes so far."""

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.depths: list[int | None] = []
        self.bytes_out: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.windows.append(offloader.policy.window_bytes)
        self.depths.append(offloader.policy.window_depth)
        self.bytes_out.append(sum(tier.bytes_out for tier in offloader.tiers.values()))


def _record(root: Path, scheduler: PrefetchScheduler, **offload: Any) -> WindowRecorder:
    recorder = WindowRecorder()
    trainer = make_trainer(root, offloading(**offload), callbacks=[scheduler, recorder])
    trainer.fit(small_model(), batches())
    return recorder


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"window_bytes": "many"}, "window_bytes"),
        ({"window_bytes": -1}, "window_bytes"),
        ({"max_window_bytes": "lots"}, "max_window_bytes"),
        ({"max_window_bytes": "auto"}, "max_window_bytes"),
        ({"depth": 0}, "depth"),
        ({"depth": -3}, "depth"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}="):
        PrefetchScheduler(**arguments)


def test_a_fixed_window_and_depth_hold_from_the_first_batch_on(tmp_path: Path) -> None:
    recorder = _record(tmp_path, PrefetchScheduler(window_bytes="6KiB", depth=2))
    assert recorder.windows == [6 * 1024] * 6
    assert recorder.depths == [2] * 6


def test_storages_that_backward_needs_first_are_never_offloaded(tmp_path: Path) -> None:
    """In the first batch, whose order is unknown, all is offloaded except the input, which the training references."""
    for window, kept in ((0, MIN_BYTES), (2 * MIN_BYTES, 3 * MIN_BYTES), ("1GiB", 6 * MIN_BYTES)):
        out = _record(tmp_path, PrefetchScheduler(window_bytes=window)).bytes_out
        saved = out[0]
        assert saved == 6 * MIN_BYTES
        assert out == [saved + (saved - kept) * batch for batch in range(6)]


@pytest.mark.parametrize("given_first", [True, False])
@pytest.mark.parametrize(("depth", "share"), [(3, 0), (32, 16)])
def test_auto_begins_with_one_and_a_half_storages_or_a_sixteenth(
    tmp_path: Path, depth: int, share: int, given_first: bool
) -> None:
    """Holds from the second batch on, at any position among the callbacks. Nothing is offloaded, so nothing stalls."""
    recorder = WindowRecorder()
    ours = [PrefetchScheduler(), MicroBatchSwitch()]
    trainer = make_trainer(
        tmp_path, offloading(offload=0.0), callbacks=[*(ours if given_first else ours[::-1]), recorder]
    )
    trainer.fit(small_model(kind=partial(SmallModel, depth)), batches(14))
    saved = (2 * depth + 1) * MIN_BYTES
    assert set(recorder.windows[1:]) == {saved // share if share else 3 * MIN_BYTES // 2}


@pytest.mark.parametrize("most", [5000, 2**20])
def test_auto_grows_where_loads_stall_and_not_above_its_maximum(tmp_path: Path, most: int) -> None:
    """The drive is so slow that backward has to wait."""
    scheduler = PrefetchScheduler(max_window_bytes=most)
    recorder = WindowRecorder()
    strategy = offloading(backend=ThrottledBackend(4e6))
    trainer = make_trainer(tmp_path, strategy, callbacks=[scheduler, recorder, Watch()])
    trainer.fit(small_model(kind=partial(SmallModel, 8)), batches(3 * PrefetchScheduler.PATIENCE))
    windows = recorder.windows[1:]
    assert windows[0] == 3 * MIN_BYTES // 2
    assert min(most, 3 * MIN_BYTES) in windows
    assert max(windows) <= most


def test_auto_obeys_a_maximum_below_where_it_would_begin(tmp_path: Path) -> None:
    recorder = _record(tmp_path, PrefetchScheduler(max_window_bytes=100), offload=0.0)
    assert set(recorder.windows[1:]) == {100}


def test_a_second_fit_measures_afresh(tmp_path: Path) -> None:
    """Measurements of the first fit do not affect the second one, whose counters begin at zero."""
    recorder = WindowRecorder()
    trainer = make_trainer(tmp_path, offloading(offload=0.0), callbacks=[PrefetchScheduler(), recorder])
    trainer.fit(small_model(), batches(12))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(small_model(), batches(12))
    assert len(recorder.windows) == 24
    assert set(recorder.windows[13:]) == {3 * MIN_BYTES // 2}


def test_it_is_inert_without_an_offloading_strategy(tmp_path: Path) -> None:
    watch = Watch()
    model = small_model()
    make_trainer(tmp_path, "auto", callbacks=[PrefetchScheduler(), watch]).fit(model, batches())
    assert len(model.losses) == 6
    assert watch.bytes_out == {}
