"""Printed lines of a recipe's training: one about the model, one of progress, and its files at the end."""

import os
import shlex
import shutil
import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks import SaveFolder, trainer_callbacks
from lightning_ssd.sizes import format_count

_COLUMNS = 80
"""Most columns of the progress line."""

_BATCHES = 20
"""Last micro-batches whose rate is shown."""


class ModelLine(pl.Callback):
    """Prints the model's class and numbers of parameters, in place of Lightning's table of submodules."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = [one for one in pl_module.parameters() if not isinstance(one, nn.parameter.UninitializedParameter)]
        # DeepSpeed's parameters are empty between their uses.
        counts = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in known]
        total, trained = sum(count for count, _ in counts), sum(count for count, trains in counts if trains)
        pl.utilities.rank_zero_info(
            f"{type(pl_module).__name__}: {format_count(total)} parameters, {format_count(trained)} of them trained"
        )


class ProgressLine(pl.callbacks.ProgressBar):
    """Shows step, loss, rate and stall in one line of 80 columns, and the metrics of each validation in another.

    The line is rewritten in a terminal. In a file there is one every `log_every_n_steps` steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._open = False
        """Whether the terminal's last line has no end yet."""
        self._batches: deque[tuple[float, int]] = deque(maxlen=_BATCHES + 1)
        """End of the last micro-batches, seconds, and units that were trained on until then."""

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        self._end_line()
        print(*args, **kwargs)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches.clear()
        self._batches.append((perf_counter(), _seen(trainer, pl_module)))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches.append((perf_counter(), _seen(trainer, pl_module)))
        rewrites = sys.stdout.isatty()
        ends = trainer.global_step == trainer.max_steps
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not self._enabled or not (rewrites or ends or trainer.global_step % interval == 0):
            return  # metrics of a GPU are not read
        if not rewrites and trainer.fit_loop._should_accumulate():
            return
        line = self._line(trainer, pl_module)[: min(_COLUMNS, shutil.get_terminal_size().columns) - 1]
        self._open = rewrites and not ends
        # The cursor returns to the first column, where messages of others begin.
        sys.stdout.write((f"{line}\x1b[K" if rewrites else line) + ("\r" if self._open else "\n"))
        sys.stdout.flush()

    def _line(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        metrics = self.get_metrics(trainer, pl_module)
        (began, before), (now, seen) = self._batches[0], self._batches[-1]
        steps = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        parts = [f"step {trainer.global_step}{steps}"]
        loss = next((value for name, value in metrics.items() if "loss" in name and "val" not in name), None)
        if isinstance(loss, float):
            parts.append(f"loss {loss:.3f}")
        if now > began:
            parts.append(f"{format_count((seen - before) / (now - began))} {_unit(pl_module)}/s")
        stall = metrics.get("stall_s", 0.0)
        if isinstance(stall, float):
            parts.append(f"stall {stall:.2f} s")
        return "  ".join(parts)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled or trainer.sanity_checking:
            return
        metrics = self.get_metrics(trainer, pl_module)
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if "val" in name and isinstance(value, float)]
        if shown:
            self.print(f"step {trainer.global_step}: {', '.join(shown)}"[: _COLUMNS - 1])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_line()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_line()

    def _end_line(self) -> None:
        if self._open:
            sys.stdout.write("\n")
        self._open = False


def _seen(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """Returns the tokens or images that were trained on so far, or the micro-batches of other modules than recipes'."""
    return int(getattr(pl_module, "seen", trainer.fit_loop.epoch_loop.total_batch_idx))


def _unit(pl_module: pl.LightningModule) -> str:
    return str(pl_module.unit) if hasattr(pl_module, "seen") and hasattr(pl_module, "unit") else "batches"


def with_terminal_lines(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a Trainer's arguments with the lines of this module, unless the recipe chose others or none."""
    callbacks = list(arguments["callbacks"])
    if arguments.get("enable_progress_bar") is not False:
        if not any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks):
            callbacks.append(ProgressLine())
    if arguments.get("enable_model_summary") is not False:
        if not any(isinstance(callback, pl.callbacks.ModelSummary) for callback in callbacks):
            callbacks.append(ModelLine())
            arguments = arguments | {"enable_model_summary": False}
    return arguments | {"callbacks": callbacks}


def describe_files(trainer: pl.Trainer, recipe: str) -> list[str]:
    """Returns lines with the files that a training has written, and with the commands that use them."""
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    checkpoints = [callback for callback in trainer.checkpoint_callbacks if callback is not None]
    saved = [str(getattr(one, "last_model_path", "") or getattr(one, "best_model_path", "")) for one in checkpoints]
    checkpoint = next((os.path.relpath(path) for path in saved if path), None)
    folders = [callback.path(trainer) for callback in trainer_callbacks(trainer) if isinstance(callback, SaveFolder)]
    files = {"metrics": folder / "metrics.csv", "config": folder / "config.yaml"}
    lines = [f"checkpoint: {checkpoint}"] if checkpoint is not None else []
    lines += [f"model: {os.path.relpath(saved_folder)}" for saved_folder in folders]
    lines += [f"{name}: {os.path.relpath(file)}" for name, file in files.items() if file.is_file()]
    if checkpoint is not None:
        more = f" --trainer.max_steps={2 * trainer.max_steps}" if trainer.max_steps > 0 else ""
        # The saved configuration has the values of `-c` and of all options; it is not written by `fast_dev_run`.
        again = os.path.relpath(files["config"]) if files["config"].is_file() else recipe
        run = f"lightning-ssd run {shlex.quote(again)} --ckpt_path={shlex.quote(checkpoint)}{more}"
        lines.append(f"to continue: {run}")
        if not folders:
            lines.append(f"to export: lightning-ssd export {shlex.quote(checkpoint)} FOLDER")
    return lines
