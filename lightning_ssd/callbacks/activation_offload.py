"""`ActivationOffload`: activation offload alone, for any strategy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, OffloadConfig, make_offloader, mark_weights
from lightning_ssd.callbacks.defaults import add_default_callbacks
from lightning_ssd.storage import Backend
from lightning_ssd.summary import describe_activations, describe_drives


class ActivationOffload(pl.Callback):
    """Offloads activations under the Trainer's own strategy: single device, DDP, FSDP, tensor parallelism.

    Activations are a process's own business, so every process has its own scratch files and its own budgets, and
    several may share a path. The arguments are those of `SSDOffloadStrategy`.

    Args:
        path: directories for scratch files, one for each SSD. Default: the Trainer's `default_root_dir`.
        tier: `"ssd"`, or `"host"` for host memory alone.
        offload: how much of each micro-batch is offloaded: `"auto"`, `"none"`, a share (`0.5`, `"50%"`), or bytes.
        host_memory: bytes of pinned memory for activations, a share of what is free (`"50%"`, divided by the processes
            of the machine), or `"auto"`.
        ssd_capacity: bytes of scratch space, taken at the start; `None`: as needed.
        spill: which tier is filled first.
        min_bytes: smaller saved tensors stay on the device.
        staging_memory: bytes of pinned memory on the way to and from the SSD.
        backend: how scratch files are read and written.
        checksum: hash every byte on its way to the SSDs and compare it on its way back, on the I/O threads. Bytes pass
            through host memory then; `False` is for GPUDirect Storage.

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
        backend: Literal["auto", "posix", "kvikio"] | Backend = "auto",
        checksum: bool = True,
    ) -> None:
        self.config = OffloadConfig(
            path, tier, offload, host_memory, ssd_capacity, spill, min_bytes, staging_memory, backend, checksum
        )
        self.offloader: ActivationOffloader | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(trainer.strategy, "offloader"):
            raise ValueError(
                f"`{type(trainer.strategy).__name__}` offloads activations already. "
                "Drop the ActivationOffload callback, or choose another strategy."
            )
        add_default_callbacks(trainer)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer)  # what an earlier fit left, whose end was cut short by an error in another callback
        strategy = trainer.strategy
        assert strategy.model is not None
        mark_weights(strategy.model)
        offloader = make_offloader(
            self.config,
            strategy.root_device,
            default_path=trainer.default_root_dir,
            rank=trainer.global_rank,
            processes=trainer.num_devices,
        )
        self.offloader = offloader
        parts = (
            describe_activations(offloader, self.config),
            describe_drives(offloader, None, self.config, trainer.default_root_dir),
        )
        pl.utilities.rank_zero_info(f"ActivationOffload: {'; '.join(part for part in parts if part is not None)}.")
        training_step = strategy.training_step

        def offloaded_training_step(*args: Any, **kwargs: Any) -> Any:
            with offloader.hooks():
                return training_step(*args, **kwargs)

        strategy.training_step = offloaded_training_step  # type: ignore[method-assign]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close(trainer)

    def _close(self, trainer: pl.Trainer) -> None:
        vars(trainer.strategy).pop("training_step", None)
        offloader, self.offloader = self.offloader, None
        if offloader is not None:
            offloader.close()
