"""`OffloadMonitor`: what offloading does, in the user's loggers and progress bar."""

import weakref
from collections.abc import Mapping
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.callbacks.offloader import find_offloader, offload_config
from lightning_ssd.model_states import ModelStates
from lightning_ssd.planning.endurance import YEAR, bytes_per_day, lifetime_seconds
from lightning_ssd.sizes import parse_bytes
from lightning_ssd.storage.smart import read_wear

ASK_SECONDS = 600.0
"""Between two questions to the drives."""


class OffloadMonitor(pl.Callback):
    """Logs what moved since the last time it logged, every `log_every_n_steps`, as `OffloadMonitor/...`:

    - `saved_bytes`, `kept_bytes`, `forwarded_bytes`: what autograd saved, what stayed on the device, and what was
      wanted back before it had left;
    - `host_bytes_out`, `host_bytes_in`, `ssd_bytes_out`, `ssd_bytes_in`: what went to and came from each tier;
    - `copy_out_bytes_per_s`, `copy_in_bytes_per_s`, `ssd_write_bytes_per_s`, `ssd_read_bytes_per_s`: bandwidth reached,
      while there was something to move;
    - `store_stall_s`, `load_stall_s`: how long the compute stream waited;
    - `states_ssd_bytes_written`, `states_ssd_bytes_read`: the same of weights and optimizer states on SSDs;
    - `peak_device_bytes` (CUDA), `peak_pinned_bytes`, `ssd_bytes_written` (of both, since the start);
    - `ssd_bytes_written_per_day`, `ssd_years`: how much a day of this training writes, and how long the drives last;
    - `drive_bytes_written`, `drive_endurance_used`: what the drives of `path` say themselves (SMART), of all that was
      ever written to them, and of the share of their endurance that the most worn one has used up. Where `smartctl` is
      installed and may ask; at most every ten minutes.

    The one that a strategy adds by itself writes to no logger: loggers get what they get from plain Lightning, until
    the user adds `OffloadMonitor()`. Neither adds to the Trainer's metrics (`callback_metrics` and the like).

    Args:
        progress_bar: show bytes offloaded (`out_gb`) and stalls (`stall_s`) of the last interval in the progress bar,
            from the first that is not 0 on, and `ssd_years` if it is logged.
        endurance: bytes that the drives of `path` are rated for, all together ("600TB"; their data sheets say TBW).
            Ratings are for small random writes, which wear more than ours: the drives last longer (SSDTrain III-D).
            `None`: `ssd_years` is not logged.
        loggers: log to the Trainer's loggers.

    Raises:
        ValueError: `endurance` is no number of bytes.

    Inert without an offloading strategy.
    """

    def __init__(self, progress_bar: bool = True, endurance: int | str | None = None, *, loggers: bool = True) -> None:
        self._progress_bar = progress_bar
        self._loggers = loggers
        self._shown: dict[str, float] = {}
        """Metrics in the progress bar."""
        self._bar: pl.callbacks.ProgressBar | None = None
        """Where they are shown, during a training."""
        self._endurance = None if endurance is None else parse_bytes(endurance, "endurance")
        self._offloaders = _Counts()
        self._stores = _Counts()
        self._last: dict[str, float] = {}
        self._begun = 0.0
        self._asked = float("-inf")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._offloaders, self._stores = _Counts(), _Counts()
        self._last = {}
        self._begun = perf_counter()
        self._asked = float("-inf")
        self._shown = {}
        if self._progress_bar and find_offloader(trainer) is not None:
            self._show_in(trainer.progress_bar_callback)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave_progress_bar()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave_progress_bar()

    def _show_in(self, bar: "pl.callbacks.ProgressBar | None") -> None:
        """Adds metrics to those that `bar` shows. (What is logged for a progress bar is in `callback_metrics`, too.)"""
        self._leave_progress_bar()
        if bar is None:
            return
        get_metrics = bar.get_metrics

        @wraps(get_metrics)
        def get_all(*args: Any, **kwargs: Any) -> Any:
            return {**get_metrics(*args, **kwargs), **self._shown}

        bar.get_metrics = get_all  # type: ignore[method-assign]
        self._bar = bar

    def _leave_progress_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            del bar.get_metrics

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        offloader = find_offloader(trainer)
        if offloader is None or not trainer._logger_connector.should_update_logs:
            return
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return  # as Lightning's own metrics: once a step, at its end
        metrics = self._metrics(offloader, getattr(trainer.strategy, "model_states", None))
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

    def _drives(self, trainer: pl.Trainer, offloader: ActivationOffloader) -> dict[str, float]:
        states = getattr(trainer.strategy, "model_states", None)
        on_ssds = "ssd" in offloader.tiers or (states is not None and states.ssd_bytes)
        if not on_ssds or perf_counter() - self._asked < ASK_SECONDS:
            return {}
        self._asked = perf_counter()
        found = (read_wear(path) for path in offload_config(trainer).paths(trainer.default_root_dir))
        wear = list({drive.device: drive for drive in found if drive is not None}.values())
        written = [drive.bytes_written for drive in wear if drive.bytes_written is not None]
        used = [drive.endurance_used for drive in wear if drive.endurance_used is not None]
        metrics: dict[str, float] = {}
        if written:
            metrics["drive_bytes_written"] = sum(written)
        if used:
            metrics["drive_endurance_used"] = max(used)
        return metrics

    def _metrics(self, offloader: ActivationOffloader, states: ModelStates | None) -> dict[str, float]:
        totals = self._offloaders.add(offloader, _totals(offloader))
        if states is not None and states.scratch is not None and (io := states.io_stats()) is not None:
            of_states = {"states_ssd_bytes_written": io.bytes_written, "states_ssd_bytes_read": io.bytes_read}
            self._stores.add(states.scratch.store, of_states)
        totals |= self._stores.totals
        delta = {name: total - self._last.get(name, 0.0) for name, total in totals.items()}
        self._last = totals
        metrics = {name: value for name, value in delta.items() if not name.endswith("_busy_s")}
        for lane in ("copy_out", "copy_in", "ssd_write", "ssd_read"):
            moved = metrics.pop(f"{lane}_busy_bytes", 0.0)
            if seconds := delta.get(f"{lane}_busy_s"):
                metrics[f"{lane}_bytes_per_s"] = moved / seconds
        return metrics | _levels(offloader) | self._wear(totals)

    def _wear(self, totals: dict[str, float]) -> dict[str, float]:
        written = totals.get("ssd_write_busy_bytes", 0.0) + totals.get("states_ssd_bytes_written", 0.0)
        if not written:
            return {}
        seconds = perf_counter() - self._begun
        wear = {"ssd_bytes_written": written, "ssd_bytes_written_per_day": bytes_per_day(written, seconds)}
        if self._endurance is not None:
            wear["ssd_years"] = lifetime_seconds(self._endurance, written, seconds) / YEAR
        return wear


class _Counts:
    """Counts of something that may be replaced by another one, which counts from zero.

    Attributes:
        totals: of all of them, as far as they were added.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._of: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_of": None}  # a weak reference, which can't be pickled

    def add(self, of: object, counts: Mapping[str, float]) -> dict[str, float]:
        """Takes the counts of the present one, and returns the totals."""
        if self._of is None or self._of() is not of:
            self._of, self._before = weakref.ref(of), self.totals
        self.totals = self._before | {name: count + self._before.get(name, 0.0) for name, count in counts.items()}
        return dict(self.totals)


def _totals(offloader: ActivationOffloader) -> dict[str, float]:
    """Counts that only grow."""
    stats = offloader.stats()
    totals = {
        "saved_bytes": stats.saved,
        "kept_bytes": stats.saved - stats.stored,
        "forwarded_bytes": stats.forwarded,
        "store_stall_s": stats.store_stall,
        "load_stall_s": stats.load_stall,
    }
    for lane, busy in zip(("copy_out", "copy_in"), offloader.copies.busy(), strict=True):
        totals |= {f"{lane}_busy_bytes": busy.amount, f"{lane}_busy_s": busy.seconds}
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


def _levels(offloader: ActivationOffloader) -> dict[str, float]:
    """Heights, which are logged as they are."""
    levels: dict[str, float] = {"peak_pinned_bytes": offloader.peak_pinned_bytes()}
    if offloader.device.type == "cuda":
        levels["peak_device_bytes"] = torch.cuda.max_memory_allocated(offloader.device)
    return levels
