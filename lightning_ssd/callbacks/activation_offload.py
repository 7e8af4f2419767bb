"""`ActivationOffload`: activation offload alone, for any strategy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, OffloadConfig, make_offloader, mark_weights
from lightning_ssd.callbacks.defaults import (
    add_default_callbacks,
    find_offload_callbacks,
    remove_default_callbacks,
    restore_offload_callbacks,
)
from lightning_ssd.storage import Backend
from lightning_ssd.summary import describe_activations, describe_totals, join_lines
from lightning_ssd.types import BackendName
from lightning_ssd.versions import warn_of_untested


class ActivationOffload(pl.Callback):
    """Offloads activations under any strategy of the Trainer: single device, DDP, FSDP, tensor parallelism.

    Every process has scratch files and budgets of its own; several processes may share a path. Weights, gradients and
    optimizer states are the strategy's and are not offloaded. `SSDOffloadStrategy` describes the arguments in more
    detail.

    Example:
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[ActivationOffload(path="/nvme0")])

    Args:
        path: directories for scratch files, one for each SSD. Default: the Trainer's `default_root_dir`.
        tier: `"ssd"` (host memory and SSDs), or `"host"` (host memory only).
        offload: activations of each micro-batch to offload: `"auto"` (planned if processes have all weights, as under
            DDP), `"ssdtrain"`, `"none"`, a share (`0.5`, `"50%"`), or bytes.
        host_memory: bytes of pinned memory for activations in each process, a share of the free memory (`"50%"`,
            divided by the processes of the machine), or `"auto"`.
        ssd_capacity: bytes of scratch space, preallocated at the start; `None`: allocated as needed.
        spill: tier that is filled first if there are two: `"host_first"` or `"ssd_first"`.
        min_bytes: saved tensors with a smaller storage are kept on the device.
        staging_memory: most bytes of pinned memory through which data are transferred to and from the SSDs. If
            `host_memory` is given, it is a part of that, and an eighth of it at most.
        backend: I/O backend of scratch files: `"posix"`, `"kvikio"` or `"auto"`.
        checksum: hash written bytes and compare the hashes at reads, on the I/O threads. Transfers pass through host
            memory then; GPUDirect Storage needs `False`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] | None = None,
        tier: Literal["ssd", "host"] = "ssd",
        offload: int | float | str = "auto",
        host_memory: int | str = "auto",
        ssd_capacity: int | str | None = None,
        spill: Literal["host_first", "ssd_first"] = "host_first",
        min_bytes: int | str = 2**20,
        staging_memory: int | str = "1GiB",
        backend: BackendName | Backend = "auto",
        checksum: bool = True,
    ) -> None:
        self.config = OffloadConfig(
            path, tier, offload, host_memory, ssd_capacity, spill, min_bytes, staging_memory, backend, checksum
        )
        self.offloader: ActivationOffloader | None = None
        self._added: list[pl.Callback] = []
        """Callbacks that the present run has beside those of the user."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(trainer.strategy, "offloader"):
            raise ValueError(
                f"`{type(trainer.strategy).__name__}` offloads activations already. "
                "Drop the ActivationOffload callback, or choose another strategy."
            )
        if stage == "fit":
            warn_of_untested()
        if self._added:  # an earlier run has ended without teardown
            self._end(trainer)
        self._added = add_default_callbacks(trainer)
        callbacks = [self, *find_offload_callbacks(trainer)]
        strategy = trainer.strategy
        on_train_start = strategy.on_train_start

        def restore_and_start() -> None:
            """Lightning's Tuner searches before `on_fit_start` of this callback, and without any callback."""
            on_train_start()
            if self.offloader is None:
                self.on_fit_start(trainer, pl_module)
            restore_offload_callbacks(trainer, callbacks)

        strategy.on_train_start = restore_and_start  # type: ignore[method-assign]

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer)  # a search for a batch size or a learning rate may have begun
        strategy = trainer.strategy
        assert strategy.model is not None
        mark_weights(strategy.model)
        default_path, processes = trainer.default_root_dir, trainer.num_devices
        offloader = make_offloader(
            self.config.resolve(default_path, processes).without(0, 0),
            strategy.root_device,
            default_path=default_path,
            rank=trainer.global_rank,
            processes=processes,
        )
        self.offloader = offloader
        totals = describe_totals(offloader, None, self.config, trainer.default_root_dir)
        lines = [describe_activations(offloader, self.config), *totals]
        pl.utilities.rank_zero_info(join_lines("ActivationOffload", lines))
        training_step = strategy.training_step

        def offloaded_training_step(*args: Any, **kwargs: Any) -> Any:
            with offloader.hooks():
                return training_step(*args, **kwargs)

        strategy.training_step = offloaded_training_step  # type: ignore[method-assign]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        self._close(trainer)
        vars(trainer.strategy).pop("on_train_start", None)
        added, self._added = self._added, []
        remove_default_callbacks(trainer, added)

    def _close(self, trainer: pl.Trainer) -> None:
        vars(trainer.strategy).pop("training_step", None)
        offloader, self.offloader = self.offloader, None
        if offloader is not None:
            offloader.close()
