"""`OffloadMonitor`: names, times and values of its metrics, which agree with the transferred bytes."""

import copy
import csv
import json
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_ssd import OffloadMonitor, PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.storage import smart
from tests.support.storage import answer
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

COUNTS = {"saved_bytes", "kept_bytes", "forwarded_bytes", "store_stall_s", "load_stall_s"}
MOVED = {"host_bytes_out", "host_bytes_in", "ssd_bytes_out", "ssd_bytes_in"}
SPEEDS = {"copy_out_bytes_per_s", "copy_in_bytes_per_s", "ssd_write_bytes_per_s", "ssd_read_bytes_per_s"}
LEVELS = {"peak_pinned_bytes", "ssd_bytes_written", "ssd_bytes_written_per_day"}


@pytest.fixture(autouse=True)
def nobody_asks_real_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: None)


class MemoryLogger(Logger):
    """Records the monitor's metrics: (step, metrics), names without their prefix."""

    name = "memory"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        prefix = "OffloadMonitor/"
        ours = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        if ours:
            assert len(ours) == len(metrics)
            self.rows.append((step or 0, ours))

    def total(self, name: str) -> float:
        """Returns the sum of a metric over all rows."""
        return sum(row[name] for _, row in self.rows)


def _train(
    root: Path,
    logger: Any,
    *,
    strategy: Any = None,
    monitor: OffloadMonitor | None = None,
    depth: int = 3,
    **arguments: Any,
) -> tuple[pl.Trainer, Watch]:
    watch = Watch()
    callbacks = [monitor or OffloadMonitor(), watch]
    trainer = make_trainer(root, strategy or offloading(), logger=logger, callbacks=callbacks, **arguments)
    trainer.fit(small_model(kind=partial(SmallModel, depth)), batches())
    return trainer, watch


def test_every_documented_key_is_logged_and_no_other(tmp_path: Path) -> None:
    """With both tiers in use: the SSD holds eight storages, and the host takes the others."""
    logger = MemoryLogger()
    strategy = offloading(host_memory="64MiB", spill="ssd_first", ssd_capacity="32KiB")
    _train(tmp_path, logger, strategy=strategy, depth=8, log_every_n_steps=1)
    assert all(logger.total(name) > 0 for name in MOVED)
    # Bandwidths are logged for directions with transfers; forwarded bytes are not read.
    assert all(row.keys() - SPEEDS == COUNTS | MOVED | LEVELS for _, row in logger.rows)
    assert set().union(*(row for _, row in logger.rows)) == COUNTS | MOVED | LEVELS | SPEEDS
    documented = OffloadMonitor.__doc__ or ""
    assert all(f"`{name}`" in documented for name in COUNTS | MOVED | SPEEDS | LEVELS)


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_values_agree_with_the_bytes_of_the_tiers(tmp_path: Path, tier: str) -> None:
    logger = MemoryLogger()
    _, watch = _train(tmp_path, logger, strategy=offloading(tier=tier), log_every_n_steps=2)
    assert watch.moved > 0
    assert logger.total(f"{tier}_bytes_out") == watch.bytes_out[tier]
    assert logger.total(f"{tier}_bytes_in") == watch.bytes_in[tier]
    for _, row in logger.rows:
        assert row["saved_bytes"] - row["kept_bytes"] == row[f"{tier}_bytes_out"] > 0
        assert row["peak_pinned_bytes"] > 0
    if tier == "ssd":
        assert logger.rows[-1][1]["ssd_bytes_written"] == watch.bytes_out["ssd"]
    else:
        assert not any(name.startswith("ssd") for _, row in logger.rows for name in row)


@pytest.mark.parametrize(("interval", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3]), (50, [])])
def test_it_logs_every_n_steps(tmp_path: Path, interval: int, steps: list[int]) -> None:
    logger = MemoryLogger()
    _train(tmp_path, logger, log_every_n_steps=interval)
    assert [step for step, _ in logger.rows] == steps


def test_it_logs_a_step_of_several_micro_batches_once_and_whole(tmp_path: Path) -> None:
    logger = MemoryLogger()
    _, watch = _train(tmp_path, logger, log_every_n_steps=1, accumulate_grad_batches=3)
    assert [step for step, _ in logger.rows] == [0, 1]
    assert logger.total("ssd_bytes_out") == watch.bytes_out["ssd"]
    # The first interval has the batch without a known order, which offloads everything.
    assert logger.rows[0][1]["ssd_bytes_out"] > logger.rows[1][1]["ssd_bytes_out"] > 0


def test_a_second_fit_counts_from_zero(tmp_path: Path) -> None:
    logger = MemoryLogger()
    watch = Watch()
    # With a fixed window, the same bytes are offloaded in every step.
    callbacks = [PrefetchScheduler(window_bytes=0), OffloadMonitor(), watch]
    trainer = make_trainer(tmp_path, offloading(), logger=logger, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(small_model(), batches())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(small_model(), batches())
    assert len(logger.rows) == 12
    assert logger.total("ssd_bytes_out") == watch.bytes_out["ssd"]
    moved = [(row["saved_bytes"], row["ssd_bytes_out"], row["ssd_bytes_written"]) for _, row in logger.rows]
    assert moved[:6] == moved[6:]
    assert all(out > 0 for _, out, _ in moved)


def test_it_logs_to_every_logger_of_the_trainer(tmp_path: Path) -> None:
    memory, file = MemoryLogger(), CSVLogger(tmp_path)
    _train(tmp_path, [memory, file], log_every_n_steps=3)
    with open(Path(file.log_dir) / "metrics.csv") as lines:
        written = [row for row in csv.DictReader(lines) if row.get("OffloadMonitor/ssd_bytes_out")]
    assert [int(row["step"]) for row in written] == [2, 5]
    for row, (_, metrics) in zip(written, memory.rows, strict=True):
        assert {name: float(row[f"OffloadMonitor/{name}"]) for name in metrics} == pytest.approx(metrics)


class Bar(pl.callbacks.TQDMProgressBar):
    """Records the shown metrics, and draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.seen.append(dict(self.get_metrics(trainer, pl_module)))


def _shown(root: Path, strategy: Any, *callbacks: pl.Callback, **arguments: Any) -> tuple[list[dict[str, Any]], Any]:
    bar = Bar()
    trainer = make_trainer(
        root, strategy, callbacks=[bar, *callbacks], enable_progress_bar=True, log_every_n_steps=1, **arguments
    )
    trainer.fit(small_model(), batches())
    assert "get_metrics" not in vars(bar)
    return bar.seen, trainer


@pytest.mark.parametrize("monitors", [[], [OffloadMonitor()]], ids=["default", "the user's"])
def test_the_progress_bar_shows_two_metrics_where_something_moves(tmp_path: Path, monitors: list[Any]) -> None:
    seen, trainer = _shown(tmp_path, offloading(), *monitors)
    assert set(seen[-1]) == {"out_gb", "stall_s"} and seen[-1]["out_gb"] > 0
    for strategy in ("auto", offloading(offload="none")):
        still, _ = _shown(tmp_path, strategy, *monitors)
        assert all("out_gb" not in metrics for metrics in still)
    hidden, _ = _shown(tmp_path, offloading(), OffloadMonitor(progress_bar=False))
    assert all("out_gb" not in metrics for metrics in hidden)


def test_an_attribute_of_the_progress_bar_is_called_and_restored(tmp_path: Path) -> None:
    """It is the user's own `get_metrics` of that object."""

    class Own(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.progress_bar_callback.get_metrics = self.get_metrics

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            return {"own": 1}

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            restored.append(trainer.progress_bar_callback.get_metrics == self.get_metrics)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            restored.append(trainer.progress_bar_callback.get_metrics == self.get_metrics)
            del trainer.progress_bar_callback.get_metrics

    restored: list[bool] = []
    seen, _ = _shown(tmp_path, offloading(), OffloadMonitor(), Own())
    assert set(seen[-1]) == {"own", "out_gb", "stall_s"} and restored == [False, True]


def test_the_progress_bar_can_be_copied_amid_a_training(tmp_path: Path) -> None:
    """A copy shows the metrics of Lightning, also where the monitor is copied with it."""
    copies: list[dict[str, Any]] = []

    class Duplicate(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            bar, monitor = (
                trainer.progress_bar_callback,
                next(x for x in trainer.callbacks if type(x) is OffloadMonitor),
            )
            bar._trainer, trainer = None, bar._trainer  # which has more than callbacks
            both = pickle.loads(pickle.dumps((bar, monitor))), copy.deepcopy((monitor, bar))[::-1]
            bar._trainer = trainer
            for other, monitor in both:
                copies.append(other.get_metrics(trainer, pl_module))
                monitor.teardown(trainer, pl_module, "fit")
                assert "get_metrics" not in vars(other)

    seen, _ = _shown(tmp_path, offloading(), Duplicate())
    assert copies and all("out_gb" not in metrics for metrics in copies) and "out_gb" in seen[-1]


def test_the_trainers_metrics_and_loggers_get_the_same_as_from_plain_lightning(tmp_path: Path) -> None:
    """A monitor that the user adds logs to the loggers only."""

    def metrics(strategy: Any, *callbacks: pl.Callback) -> Any:
        logger = MemoryLogger()
        _, trainer = _shown(tmp_path, strategy, *callbacks, logger=logger)
        names = [sorted(of) for of in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)]
        return names, len(logger.rows)

    expected = metrics("auto")
    assert metrics(offloading()) == expected and expected[1] == 0
    assert metrics(offloading(), OffloadMonitor()) == (expected[0], 6)


def test_a_step_that_fetches_its_own_batches_is_monitored(tmp_path: Path) -> None:
    """Lightning needs a batch size for logged values then, which only the step knows."""

    class Fetching(SmallModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    trainer = make_trainer(tmp_path, offloading(), callbacks=[Bar()], enable_progress_bar=True, log_every_n_steps=1)
    trainer.fit(Fetching(), batches())
    assert trainer.global_step == 6


def test_it_is_inert_without_an_offloading_strategy(tmp_path: Path) -> None:
    logger = MemoryLogger()
    trainer, _ = _train(tmp_path, logger, strategy="auto", monitor=OffloadMonitor(), log_every_n_steps=1)
    assert logger.rows == []


def test_wear_of_the_drives_by_states_and_activations(tmp_path: Path) -> None:
    logger = MemoryLogger()
    strategy = SSDOffloadStrategy(tmp_path, states="ssd", min_bytes=MIN_BYTES, offload=1.0)
    monitor = OffloadMonitor(endurance="600TB")
    _train(tmp_path, logger, strategy=strategy, monitor=monitor, log_every_n_steps=1)
    last = logger.rows[-1][1]
    by_states, by_activations = logger.total("states_ssd_bytes_written"), logger.total("ssd_bytes_out")
    assert by_states > 0 and by_activations > 0 and logger.total("states_ssd_bytes_read") > 0
    assert last["ssd_bytes_written"] == pytest.approx(by_states + by_activations, rel=0.2)  # one waits to be written
    years = 600e12 / last["ssd_bytes_written_per_day"] / 365
    assert last["ssd_years"] == pytest.approx(years)


WORN = {"nvme_smart_health_information_log": {"data_units_written": 2_000_000, "percentage_used": 7}}
COUNTED = (
    r"SSDs get \S+ TB a day; /dev/nvme7n1 counts 1.02 TB in its life and 7% of its rated endurance; at this rate, "
)


def _train_on_ssd(tmp_path: Path, steps: int, *callbacks: pl.Callback, **arguments: Any) -> None:
    strategy = SSDOffloadStrategy(tmp_path, min_bytes=MIN_BYTES, **{"states": "ssd", "offload": 1.0} | arguments)
    make_trainer(tmp_path, strategy, callbacks=list(callbacks), max_epochs=1).fit(small_model(), batches(steps))


def test_wear_is_said_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")
    answer(tmp_path, monkeypatch, json.dumps(WORN))
    caplog.set_level("INFO")
    _train_on_ssd(tmp_path, 3)
    assert re.search(f"{COUNTED}drives rated for 600 TB .* last .* (years|days)$", caplog.text, re.M)
    caplog.clear()
    _train_on_ssd(tmp_path, 24, OffloadMonitor(endurance=4 * 10**18))
    assert caplog.text.count("SSDs get") == len(re.findall(COUNTED, caplog.text)) == 1
    with pytest.warns(UserWarning, match=f"{COUNTED}drives rated for 1 TB last 0 days. Model states"):
        _train_on_ssd(tmp_path, 24, OffloadMonitor(endurance="1TB"))


def test_nothing_is_said_of_wear_without_ssds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _train_on_ssd(tmp_path, 24, states="host", offload="none")
    assert "SSDs get" not in caplog.text


def test_endurance_is_a_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="`endurance='long'` is not a number of bytes"):
        OffloadMonitor(endurance="long")


def test_the_drives_wear_is_logged_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart, "device_of", lambda path: "/dev/nvme7n1")
    said = {"nvme_smart_health_information_log": {"data_units_written": 3, "percentage_used": 12}}
    answer(tmp_path, monkeypatch, json.dumps(said))
    logger = MemoryLogger()
    _train(tmp_path, logger, log_every_n_steps=2)
    assert len(logger.rows) > 1
    assert logger.rows[0][1]["drive_bytes_written"] == 3 * 512_000
    assert logger.rows[0][1]["drive_endurance_used"] == 0.12
    assert not any("drive_endurance_used" in row for _, row in logger.rows[1:])
