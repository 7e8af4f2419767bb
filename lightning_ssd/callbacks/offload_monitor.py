"""`OffloadMonitor` shows offloaded bytes, bandwidths and stalls in the user's loggers and progress bar."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.callbacks.find import find_model_states, find_offloader, offload_config
from lightning_ssd.callbacks.wear_line import WearLine
from lightning_ssd.device import allocator_memory
from lightning_ssd.model_states import ModelStates
from lightning_ssd.planning import YEAR, bytes_per_day, lifetime_seconds
from lightning_ssd.sizes import LEAST_BUDGET, check_flag, parse_bytes
from lightning_ssd.storage import read_wears

WEAR_INTERVAL = 600.0
"""Least seconds between two reads of the drives' wear."""


class OffloadMonitor(pl.Callback):
    """Logs metrics of offloading since its last log, every `log_every_n_steps`, as `OffloadMonitor/...`:

    - `saved_bytes`, `kept_bytes`, `forwarded_bytes`: bytes that autograd saved, that were kept on the device, and that
      backward used before their offload had ended;
    - `host_bytes_out`, `host_bytes_in`, `ssd_bytes_out`, `ssd_bytes_in`: bytes of activations offloaded to and
      prefetched from each tier;
    - `copy_out_bytes_per_s`, `copy_in_bytes_per_s`, `ssd_write_bytes_per_s`, `ssd_read_bytes_per_s`: bandwidth while
      transfers ran;
    - `store_stall_s`, `load_stall_s`: seconds that the compute stream waited for offloads and for prefetches;
    - `states_ssd_bytes_written`, `states_ssd_bytes_read`: bytes of weights and optimizer states written to and read
      from SSDs.

    Logged as they are, and not as differences:

    - `peak_device_bytes` (CUDA), `peak_pinned_bytes`: peaks of device memory and of pinned memory for activations;
    - `ssd_bytes_written`, `ssd_bytes_written_per_day`, `ssd_years`: bytes of activations and model states written since
      the training's start, per day, and years until the drives' rated endurance is used up at this rate;
    - `drive_bytes_written`, `drive_endurance_used`: lifetime bytes written to the drives of `path`, and the used share
      of the rated endurance of the most worn drive, as the drives report them (SMART). They are read at most every ten
      minutes, where `smartctl` is installed and permitted.

    If a training writes to SSDs, one log line has the bytes a day, the drives' own counters and the years that they
    last, after 20 steps or at the training's end. It is a warning if they are worn out within a year.

    The monitor that a strategy adds automatically writes to no logger, so loggers get the same metrics as from plain
    Lightning unless the user adds `OffloadMonitor()`. No monitor changes the Trainer's metrics (`callback_metrics` and
    others). Without an offloading strategy or callback a monitor does nothing.

    Args:
        progress_bar: show offloaded GB (`out_gb`) and seconds of stalls (`stall_s`) of the last interval in the
            progress bar, once one of them is not 0, and `ssd_years` if it is logged.
        endurance: rated endurance of the drives of `path` together, bytes ("600TB"; data sheets call it TBW). Ratings
            are for small random writes. Large sequential writes cause less wear (SSDTrain III-D).
            `None`: `ssd_years` is not logged, and the line about wear assumes 600 TB for each drive.
        loggers: log to the Trainer's loggers.

    Raises:
        ValueError: `endurance` is no number of bytes.
    """

    def __init__(self, progress_bar: bool = True, endurance: int | str | None = None, *, loggers: bool = True) -> None:
        check_flag("progress_bar", progress_bar)
        check_flag("loggers", loggers)
        self._progress_bar = progress_bar
        self._loggers = loggers
        self._shown: dict[str, float] = {}
        """Metrics in the progress bar."""
        self._in_bar: _ShownMetrics | None = None
        """Shows these metrics in the progress bar, during a training."""
        self._endurance = None if endurance is None else parse_bytes(endurance, "endurance", least=LEAST_BUDGET)
        self._offloaders = _Counts()
        self._stores = _Counts()
        self._last: dict[str, float] = {}
        self._begun = 0.0
        self._begun_in = Path()
        """The working directory when the run began, to which relative paths belong."""
        self._wear_read_at = float("-inf")
        self._wear_line = WearLine(self._endurance)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._begun_in = Path.cwd()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._offloaders, self._stores = _Counts(), _Counts()
        self._last = {}
        self._begun = perf_counter()
        self._wear_read_at = float("-inf")
        self._wear_line = WearLine(self._endurance)
        self._shown = {}
        if self._progress_bar and find_offloader(trainer) is not None:
            self._show_in(trainer.progress_bar_callback)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_progress_bar()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore_progress_bar()

    def _show_in(self, bar: "pl.callbacks.ProgressBar | None") -> None:
        """Adds `_shown` to the metrics of `bar`. (Metrics logged for a progress bar would be in `callback_metrics`.)"""
        self._restore_progress_bar()
        if bar is None:
            return
        self._in_bar = _ShownMetrics(bar, vars(bar).get("get_metrics"), self._shown)
        bar.get_metrics = self._in_bar  # type: ignore[method-assign]

    def _restore_progress_bar(self) -> None:
        in_bar, self._in_bar = self._in_bar, None
        if in_bar is not None:
            in_bar.remove()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        offloader = find_offloader(trainer)
        if offloader is None:
            return
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return  # like Lightning's own metrics: at the end of a step
        if self._wear_line.is_due():
            self._log_wear(trainer, offloader, ended=False)
        if not trainer._logger_connector.should_update_logs:
            return
        metrics = self._metrics(offloader, find_model_states(trainer))
        metrics |= self._drives(trainer, offloader)
        for logger in trainer.loggers if self._loggers else ():
            logger.log_metrics(
                {f"OffloadMonitor/{name}": value for name, value in metrics.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )
        if self._progress_bar:
            out = metrics.get("host_bytes_out", 0.0) + metrics.get("ssd_bytes_out", 0.0)
            stall = metrics["store_stall_s"] + metrics["load_stall_s"]
            if out or stall or self._shown:
                self._shown |= {"out_gb": out / 1e9, "stall_s": stall}
            if "ssd_years" in metrics:
                self._shown["ssd_years"] = metrics["ssd_years"]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        offloader = find_offloader(trainer)
        if offloader is not None and not self._wear_line.logged:
            self._log_wear(trainer, offloader, ended=True)

    def _log_wear(self, trainer: pl.Trainer, offloader: ActivationOffloader, *, ended: bool) -> None:
        """Logs the line about wear, once the steps that it is about have ended."""
        written = _written_bytes(self._count(offloader, find_model_states(trainer)))
        # Each process of this machine writes about the same.
        self._wear_line.log(written * trainer.num_devices, lambda: self._directories(trainer), ended=ended)

    def _directories(self, trainer: pl.Trainer) -> list[Path]:
        """Returns the directories of the scratch files, whatever the working directory is now."""
        root = trainer.default_root_dir
        paths = offload_config(trainer).paths(root if "://" in root else self._begun_in / root)
        return [self._begun_in / path for path in paths]

    def _drives(self, trainer: pl.Trainer, offloader: ActivationOffloader) -> dict[str, float]:
        """Returns the drives' own wear counters; empty: they were read less than `WEAR_INTERVAL` ago, or can't be."""
        states = find_model_states(trainer)
        on_ssds = "ssd" in offloader.tiers or (states is not None and states.nbytes.ssd)
        if not on_ssds or perf_counter() - self._wear_read_at < WEAR_INTERVAL:
            return {}
        self._wear_read_at = perf_counter()
        wear = read_wears(self._directories(trainer))
        written = [drive.bytes_written for drive in wear if drive.bytes_written is not None]
        used = [drive.endurance_used for drive in wear if drive.endurance_used is not None]
        metrics: dict[str, float] = {}
        if written:
            metrics["drive_bytes_written"] = sum(written)
        if used:
            metrics["drive_endurance_used"] = max(used)
        return metrics

    def _metrics(self, offloader: ActivationOffloader, states: ModelStates | None) -> dict[str, float]:
        """Returns the metrics since the last call, without those of `_drives`."""
        totals = self._count(offloader, states)
        delta = {name: total - self._last.get(name, 0.0) for name, total in totals.items()}
        self._last = totals
        metrics = {name: value for name, value in delta.items() if not name.endswith("_busy_s")}
        for direction in ("copy_out", "copy_in", "ssd_write", "ssd_read"):
            moved = metrics.pop(f"{direction}_busy_bytes", 0.0)
            if seconds := delta.get(f"{direction}_busy_s"):
                metrics[f"{direction}_bytes_per_s"] = moved / seconds
        return metrics | _peaks(offloader) | self._written(totals)

    def _count(self, offloader: ActivationOffloader, states: ModelStates | None) -> dict[str, float]:
        """Returns the counters of this training so far."""
        totals = self._offloaders.add(offloader, _totals(offloader))
        if states is not None and states.staging is not None:
            io = states.staging.store.stats()
            of_states = {"states_ssd_bytes_written": io.bytes_written, "states_ssd_bytes_read": io.bytes_read}
            self._stores.add(states.staging.store, of_states)
        return totals | self._stores.totals

    def _written(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the bytes written to SSDs since training started, and the life of the drives at this rate."""
        written = _written_bytes(totals)
        if not written:
            return {}
        seconds = perf_counter() - self._begun
        metrics = {"ssd_bytes_written": written, "ssd_bytes_written_per_day": bytes_per_day(written, seconds)}
        if self._endurance is not None:
            metrics["ssd_years"] = lifetime_seconds(self._endurance, written, seconds) / YEAR
        return metrics


class _ShownMetrics:
    """`get_metrics` of a progress bar, with further metrics. A copy, or one that was pickled, shows none of these.

    `former` is the bar's own attribute of that name; None: there is none, and the method of its class is called.
    """

    def __init__(
        self, bar: "pl.callbacks.ProgressBar", former: Callable[..., Any] | None, shown: Mapping[str, float]
    ) -> None:
        self._bar = bar
        self._former = former
        self._shown = shown

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_shown": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        former = self._former or partial(type(self._bar).get_metrics, self._bar)
        return {**former(*args, **kwargs), **self._shown}

    def remove(self) -> None:
        """Restores the bar's own attribute, unless user code has replaced it since."""
        self._shown = {}
        if vars(self._bar).get("get_metrics") is not self:
            return
        if self._former is None:
            del self._bar.get_metrics
        else:
            self._bar.get_metrics = self._former


class _Counts:
    """Sums counters over successive objects, each of which counts from zero.

    Attributes:
        totals: sums of the counters, by name.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._of: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_of": None}  # a weak reference, which can't be pickled

    def add(self, of: object, counts: Mapping[str, float]) -> dict[str, float]:
        """Updates the totals with the present counters of the object `of`, and returns them."""
        if self._of is None or self._of() is not of:
            self._of, self._before = weakref.ref(of), self.totals
        self.totals = self._before | {name: count + self._before.get(name, 0.0) for name, count in counts.items()}
        return dict(self.totals)


def _written_bytes(totals: Mapping[str, float]) -> float:
    """Returns the bytes of activations and model states that were written to SSDs."""
    return totals.get("ssd_write_busy_bytes", 0.0) + totals.get("states_ssd_bytes_written", 0.0)


def _totals(offloader: ActivationOffloader) -> dict[str, float]:
    """Returns the offloader's monotonic counters."""
    stats = offloader.stats()
    totals = {
        "saved_bytes": stats.saved,
        "kept_bytes": stats.saved - stats.stored,
        "forwarded_bytes": stats.forwarded,
        "store_stall_s": stats.store_stall,
        "load_stall_s": stats.load_stall,
    }
    for direction, busy in zip(("copy_out", "copy_in"), offloader.copies.busy(), strict=True):
        totals |= {f"{direction}_busy_bytes": busy.amount, f"{direction}_busy_s": busy.seconds}
    for name, tier in offloader.tiers.items():
        totals |= {f"{name}_bytes_out": tier.bytes_out, f"{name}_bytes_in": tier.bytes_in}
    if (io := offloader.io_stats()) is not None:
        totals |= {
            "ssd_write_busy_bytes": io.bytes_written,
            "ssd_write_busy_s": io.write_seconds,
            "ssd_read_busy_bytes": io.bytes_read,
            "ssd_read_busy_s": io.read_seconds,
        }
    return totals


def _peaks(offloader: ActivationOffloader) -> dict[str, float]:
    """Returns peaks, which are logged as they are, not as differences."""
    peaks: dict[str, float] = {"peak_pinned_bytes": offloader.peak_pinned_bytes()}
    if (memory := allocator_memory(offloader.device)) is not None:
        peaks["peak_device_bytes"] = memory.peak()
    return peaks
