"""`SSDOffloadStrategy`: the only file that knows Lightning's Strategy contract."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.activations import OffloadConfig, TensorCache, make_tensor_cache, mark_weights
from lightning_ssd.callbacks import add_default_callbacks
from lightning_ssd.storage import Backend


class SSDOffloadStrategy(pl.strategies.ParallelStrategy):
    """Trains on one device with activations in host memory and on SSDs, with the numbers of ordinary training.

    `Trainer(strategy="ssd_offload")` is this strategy with its defaults, `strategy="cpu_offload"` with `tier="host"`.

    What autograd saves for backward (activations, inputs, masks; not weights) leaves the device while forward computes,
    and is back when backward wants it (SSDTrain). Bytes are moved, never changed: losses, gradients and weights are
    equal, bit for bit, to those of the same training without offload.

    Args:
        path: directory for scratch files, or several, one for each SSD: they are striped. Default: the Trainer's
            `default_root_dir`. Files live in a directory of their own, which goes away with the training.
        tier: `"ssd"`, or `"host"` for host memory alone.
        offload: how much goes out of each micro-batch. `"auto"`: as much as the bandwidth carries while the device
            computes, measured in the first steps (SSDTrain's rule). A `float`: that share of the bytes, 0.0 to 1.0. An
            `int`, or a string like `"8GiB"`: that many bytes (but 1 is everything, like 1.0). `"none"`: nothing.
        host_memory: bytes of pinned memory (or `"32GiB"`) that activations may take. `"auto"`: half of what is free
            when training starts; on a CPU device, where they are in host memory already, none (with `tier="ssd"`).
        ssd_capacity: bytes of scratch space (or `"500GB"`), taken before the first step; `None`: taken as needed.
        spill: with both tiers, which one is filled first: `"host_first"` or `"ssd_first"`.
        min_bytes: saved tensors whose storage is smaller stay on the device.
        staging_memory: bytes of pinned memory that pass data to and from the SSDs.
        backend: `"posix"` (O_DIRECT through pinned memory), `"kvikio"` (GPUDirect Storage), or `"auto"`, which takes
            kvikio where GPUDirect Storage really works and says in the log what it took.
        checksum: check every byte that comes back from the SSDs.
        accelerator: as in Lightning's strategies, like the four that follow.
        parallel_devices: the one device.
        cluster_environment: who this process is.
        checkpoint_io: how checkpoints are written and read.
        precision_plugin: the Trainer's `precision`.

    Raises:
        ValueError: an argument is out of range; the message names it and the remedy.
    """

    strategy_name = "ssd_offload"

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
        checksum: bool = False,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: fabric.plugins.environments.ClusterEnvironment | None = None,
        checkpoint_io: fabric.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.config = OffloadConfig(
            path, tier, offload, host_memory, ssd_capacity, spill, min_bytes, staging_memory, backend, checksum
        )
        self.tensor_cache: TensorCache | None = None
        self.num_nodes = 1  # the Trainer sets it

    # ---- the device ----

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        return self.parallel_devices[0]

    def setup_environment(self) -> None:
        devices = self.num_nodes * max(1, len(self.parallel_devices or ()))
        if devices > 1:
            raise ValueError(
                f"`{self.strategy_name}` trains on one device, and the Trainer was given {devices}. "
                "Set `devices=1` and `num_nodes=1`; or, for activation offload on several, take `strategy='ddp'` or "
                "`'fsdp'` with `callbacks=[lightning_ssd.ActivationOffload()]`."
            )
        super().setup_environment()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ---- a training, from start to end ----

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        add_default_callbacks(model.trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
            assert self.model is not None
            mark_weights(self.model)
            self.tensor_cache = make_tensor_cache(
                self.config,
                self.root_device,
                default_path=trainer.default_root_dir,
                rank=self.global_rank,
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.tensor_cache is not None
        with self.tensor_cache.hooks():
            return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        cache, self.tensor_cache = self.tensor_cache, None
        try:
            if cache is not None:
                cache.close()
        finally:
            super().teardown()

    # ---- one process: what collectives come to ----

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        return None

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj
