"""The state of a Lightning training that `recover=True` records besides the model states on SSDs, and its restoration.

This state is the Trainer's own checkpoint without offloaded weights, the states of all random number generators, and
the position in the data. A loader without a `state_dict` is read again from the beginning of the epoch, with the random
numbers that the killed run had there.

A record is made when the next batch is fetched: all hooks of the batch before, and validation, have run by then.

A record belongs to one `fit`: to a model, settings, data, and the number of the `fit` in its script, or among those
with the same `path`. Another `fit` does not resume from it, and raises an error with the reason. When a script is run
again, it may repeat its first `fit` calls or skip them, and the package can't distinguish both. So the first `fit`
neither resumes from a record of the second one nor keeps that record: several `fit` calls need different paths.
"""

import inspect
import logging
import os
import platform
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.model_states import (
    CommitRecord,
    ModelStates,
    NotPlainError,
    PlainData,
    RunFingerprint,
    describe,
    differences,
    encode,
    model_settings,
    show,
    type_name,
)
from lightning_ssd.recover.replay_loader import (
    DataPosition,
    ReplayLoader,
    StatefulReplayLoader,
    loader_settings,
)
from lightning_ssd.retry import random_states, set_random_states
from lightning_ssd.storage import StorageError
from lightning_ssd.uncopied import Uncopied

log = logging.getLogger(__name__)

_KEY = "lightning_ssd.recovery"
_GRADIENTS = "lightning_ssd.gradients"

_FIXED = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "limit_train_batches",
          "overfit_batches", "reload_dataloaders_every_n_epochs")  # fmt: skip
_NOTED = ("max_epochs", "max_steps", "min_epochs", "min_steps", "limit_val_batches", "val_check_interval",
          "check_val_every_n_epoch")  # fmt: skip
"""Settings of a Trainer: `_FIXED` affect results; `_NOTED` affect the length of training, and validation."""

_NUMBERS = ("number of this `fit` in its script", "number of this `fit` among those with its `path`")
"""Settings that identify a `fit` in its script. One equal setting is enough: a script may be run again without `fit`
calls of other paths, or with other paths for those of the same path."""

_ended: Counter[Path] = Counter()
"""Number of trainings with `recover=True` that have ended without an error in this process, by the path of their
record. Used on the training thread only."""


def training_settings(trainer: pl.Trainer, path: Path, own: Mapping[str, object]) -> RunFingerprint:
    """Returns the settings of a training whose optimizers are set up and have not stepped.

    Args:
        trainer: Trainer that is fitting.
        path: first scratch directory, in which the record is.
        own: settings of the strategy that affect results or the layout of states, by name.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    model = model_settings(module, strategy.optimizers)
    fixed = dict(zip(_NUMBERS, map(str, (_ended.total() + 1, _ended[path.absolute()] + 1)), strict=True))
    fixed |= {f"`{name}`": show(value) for name, value in own.items()}
    fixed |= {f"`{name}` of the Trainer": show(getattr(trainer, name, None)) for name in _FIXED}
    fixed |= model.fixed
    for index, config in enumerate(strategy.lr_scheduler_configs):
        of = f"of LR scheduler {index}"
        fixed[f"LR scheduler {index}"] = type_name(type(config.scheduler))
        for name in ("interval", "frequency", "monitor", "reduce_on_plateau"):
            fixed[f"`{name}` {of}"] = show(getattr(config, name))
        fixed |= {f"`{name}` {of}": show(value) for name, value in config.scheduler.state_dict().items()}
    noted = {f"`{name}` of the Trainer": show(getattr(trainer, name, None)) for name in _NOTED}
    noted |= model.noted
    noted |= {f"hyperparameter `{name}`": show(value) for name, value in dict(module.hparams).items()}
    noted["the seed"] = os.environ.get("PL_GLOBAL_SEED", "not set")
    noted["the device"] = _device_name(strategy.root_device)
    noted["the version of torch"], noted["the version of Lightning"] = str(torch.__version__), str(pl.__version__)
    return RunFingerprint(fixed, noted)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


class Recovery(Uncopied):
    """Records one training, and resumes from the record of a killed one.

    Args:
        trainer: Trainer that is fitting, with model states set up, before a checkpoint is restored.
        states: model states with a journal.
        path: first scratch directory, in which the record is.

    Raises:
        ValueError: `training_step` fetches its batches itself.
    """

    def __init__(self, trainer: pl.Trainer, states: ModelStates, path: Path) -> None:
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters:
            raise ValueError(
                "`recover=True` counts the batches of a training, but `training_step(dataloader_iter)` fetches them "
                "itself. Define `training_step(batch, batch_idx)`, or set `recover=False`."
            )
        self._trainer = trainer
        self._states = states
        self._path = path.absolute()
        self._positions: deque[DataPosition] = deque()
        self._resumed: CommitRecord | None = None
        """The record that the Trainer restores."""
        self._kept_gradients: dict[str, Tensor] = {}
        self._ahead = 0
        """Number of batches that the killed run had prefetched, until the training continues; else 0."""
        self.random: dict[str, Any] | None = None
        """States of random number generators to restore when the resumed training continues."""
        self._recorded_step: int | None = None
        """`global_step` of the last record, or of the first batch."""

    def resume(self, record: CommitRecord, settings: RunFingerprint) -> None:
        """Makes the Trainer restore a record, as if it were a checkpoint.

        Raises:
            StorageError: a setting that affects results differs, or another `fit` with this path has ended.
        """
        self._states.state_dicts.protected = True
        if _ended[self._path]:  # a script that is repeated in one process repeats its first `fit`, or the failed one
            raise StorageError(
                f"{record.file} is of a `fit` that has failed, and another `fit` with this `path` has ended in this "
                "process: either of them may be repeated now. If a script has several `fit`s with `recover=True`, give "
                f"each a `path` of its own; to repeat the failed one, begin a new process; or {record.remedy}."
            )
        before, now = dict(record.settings.fixed), dict(settings.fixed)
        if any(before[number] == now[number] for number in _NUMBERS):
            for number in _NUMBERS:
                del before[number], now[number]
        self._refuse(record, differences(before, now))
        checkpoint = dict(record.training_state)
        own = checkpoint.pop(_KEY)
        self._kept_gradients = checkpoint.pop(_GRADIENTS)
        self._positions.extend(DataPosition(**position) for position in own["places"])
        self._ahead, self.random = own["ahead"], own["random"]
        self._resumed = record
        self._trainer._checkpoint_connector._loaded_checkpoint = checkpoint | self._hyper_parameters()
        log.warning("resuming after step %d of a run that was killed", record.training_state["global_step"])
        if changed := differences(record.settings.noted, settings.noted):
            log.warning("settings that have changed since: %s", describe(changed))

    @property
    def restoring(self) -> bool:
        """True while the Trainer restores a record of a killed run, whose offloaded states are restored already."""
        return self._states.state_dicts.protected

    def without_restored(self) -> AbstractContextManager[None]:
        """Returns a context in which state dicts lack the offloaded states, while `restoring`."""
        return self._states.state_dicts.without() if self.restoring else nullcontext()

    def check_nothing_replaced(self) -> None:
        """Raises RuntimeError if user code has replaced parameters that are restored already, while `restoring`."""
        missing = self._states.parameters - set(self._trainer.lightning_module.parameters())
        if missing and self.restoring:
            raise RuntimeError(
                f"`on_load_checkpoint` replaced {len(missing)} parameters of a run that was killed, whose optimizer "
                "had been restored already: the new ones would not be trained. Replace them in `setup` or in "
                "`configure_model`, or set `recover=False`."
            )

    def end_restoring(self) -> None:
        """Called when training starts: all of the record is restored but the position in the data."""
        self._states.state_dicts.protected = False

    @staticmethod
    def _refuse(record: CommitRecord, different: list[str]) -> None:
        if different:
            raise StorageError(
                f"{record.file} is of a run that was killed, and this run can't resume from it: {describe(different)}. "
                f"Restore that setting; or {record.remedy}. If a script has several `fit`s with `recover=True`, give "
                "each a `path` of its own."
            )

    def wrap_dataloader(self, dataloader: Any) -> Any:
        """Wraps a training dataloader, to count its batches, make records, and restore its position.

        Raises:
            ValueError: the dataloader can't be restored to its position.
            StorageError: the dataloader differs from that of the killed run.
        """
        if getattr(dataloader, "persistent_workers", False):
            raise ValueError(
                "`recover=True` reads data again up to its position, but persistent workers can't be reset to theirs. "
                "Set `persistent_workers=False`, or `recover=False`."
            )
        stateful = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
        position = self._positions.popleft() if self._positions else None
        if position is not None and self._resumed is not None:
            self._refuse(self._resumed, differences(position.settings, loader_settings(dataloader)))
        # A loader without a length is prefetched, so that its own state is ahead of the training.
        sized = fabric.utilities.data.sized_len(dataloader) is not None
        return (StatefulReplayLoader if stateful and sized else ReplayLoader)(dataloader, position, self)

    def before_batch(self) -> None:
        """Called before a loader is asked for the next batch. Makes a record if a step was made since the last one."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None and fetcher.fetched < self._ahead:  # the killed run has prefetched this batch
            return
        if self.random is not None:
            self._continue(self.random)
            self.random = None
        if self._recorded_step is None:
            self._recorded_step = self._trainer.global_step
        # `unrecorded` does not count steps of resident parameters, which `global_step` does.
        if self._states.records.pending or self._trainer.global_step != self._recorded_step:
            self._record()

    def end(self) -> None:
        """Called when training has ended without an error: the next one with its path is another `fit`."""
        _ended[self._path] += 1

    def _continue(self, random: dict[str, Any]) -> None:
        if self._positions:
            assert self._resumed is not None
            self._refuse(self._resumed, [f"{len(self._positions)} more training dataloaders were read"])
        self._resumed = None
        self._ahead = 0
        for loader in self._wrapped_loaders():
            loader.fast_forward()
        for name, gradient in self._kept_gradients.items():
            parameter = self._trainer.lightning_module.get_parameter(name)
            parameter.grad = gradient.to(parameter.device)
        self._kept_gradients = {}
        set_random_states(random)

    def _record(self) -> None:
        with self._states.state_dicts.without():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            # Lightning adds one batch when it resumes from the beginning of an epoch.
            checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        fetcher = self._trainer.fit_loop._data_fetcher
        ahead = getattr(fetcher, "prefetch_batches", 0) if fetcher is not None and fetcher.length is None else 0
        ahead = min(ahead, 0 if fetcher is None else fetcher.fetched)  # an epoch may begin
        positions = [vars(loader.position(ahead)) for loader in self._wrapped_loaders()]
        checkpoint[_GRADIENTS] = self._gradients()
        checkpoint[_KEY] = {"places": positions, "ahead": ahead, "random": random_states()}
        for owner in self._with_hyper_parameters():  # which may have any type, and which the script sets again
            for key in (owner.CHECKPOINT_HYPER_PARAMS_NAME, owner.CHECKPOINT_HYPER_PARAMS_KEY, _hparams_type(owner)):
                checkpoint.pop(key, None)
        self._recorded_step = self._trainer.global_step
        try:
            self._states.records.write(_encode_on_cpu(checkpoint))
        except NotPlainError as error:
            raise ValueError(
                f"`recover=True` records the content of Lightning's checkpoints: {error}; or set `recover=False`."
            ) from error

    def _with_hyper_parameters(self) -> "list[Any]":
        owners = (self._trainer.lightning_module, self._trainer.datamodule)  # type: ignore[attr-defined]
        return [owner for owner in owners if owner and owner.hparams]

    def _hyper_parameters(self) -> dict[str, Any]:
        """Returns the hyperparameters in the form of a checkpoint of this script."""
        return {owner.CHECKPOINT_HYPER_PARAMS_KEY: dict(owner.hparams) for owner in self._with_hyper_parameters()}

    def _wrapped_loaders(self) -> "list[ReplayLoader]":
        current = self._trainer.fit_loop._combined_loader
        return [] if current is None else [loader for loader in current.flattened if isinstance(loader, ReplayLoader)]

    def _gradients(self) -> dict[str, Tensor]:
        """Returns the gradients that manual optimization keeps from one batch to the next, by parameter name."""
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return {}
        offloaded = self._states.parameters  # their gradients are refused elsewhere if they are kept
        resident = {name: value for name, value in module.named_parameters() if value not in offloaded}
        return {name: value.grad for name, value in resident.items() if value.grad is not None}


def _hparams_type(owner: Any) -> str:
    return str(owner.CHECKPOINT_HYPER_PARAMS_TYPE)


def _encode_on_cpu(checkpoint: dict[str, Any]) -> Callable[[], PlainData]:
    """Copies a checkpoint, whose tensors training will change, to plain data on the CPU without waiting for the device.

    The returned function waits for the copies and returns the plain data; it is called on another thread.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()

    encoded = encode(checkpoint, "checkpoint", copy)
    copied: torch.cuda.Event | None = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        copied = torch.cuda.Event()
        copied.record()

    def wait() -> PlainData:
        if copied is not None:
            copied.synchronize()
        return encoded

    return wait
