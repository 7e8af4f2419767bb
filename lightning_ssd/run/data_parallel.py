"""`DataParallelStrategy`: one process for each of several devices, with Lightning's launchers and torch's DDP."""

import contextlib
import inspect
import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.ranks import Ranks
from lightning_ssd.run.setup import is_fitting
from lightning_ssd.sizes import show_argument

T = TypeVar("T")


class DataParallelStrategy(pl.strategies.SingleDeviceStrategy):
    """Trains on one device as `SingleDeviceStrategy` does, or on several devices with one process for each.

    Ranks, launcher, process group, collectives and the wrapper of the model are those of a `DDPStrategy`, to which the
    methods delegate. One device has none of them, whatever a cluster's environment says.

    Args:
        accelerator, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's strategies.
        parallel_devices: devices of this host, if the Trainer's are not to be used.
        ddp: further arguments of `DDPStrategy`.

    Raises:
        TypeError: `ddp` is no mapping with strings as keys.
        ValueError: `ddp` has an argument that the strategy or the Trainer determines.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: fabric.plugins.ClusterEnvironment | None,
        checkpoint_io: fabric.plugins.CheckpointIO | None,
        precision_plugin: pl.plugins.precision.Precision | None,
        ddp: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._devices = parallel_devices or []
        self.cluster_environment = cluster_environment  # this and the next two: the Trainer sets them
        self.num_nodes = 1
        self._layer_sync: pl.plugins.LayerSync | None = None
        self.node_rank = 0
        self._ddp_arguments = _checked(ddp)
        self._ddp: pl.strategies.DDPStrategy | None = None
        """Lightning's strategy for several processes; `None`: there is one process."""
        self._reduces_gradients = True
        """Whether torch's DDP reduces gradients of several processes; else offloaded model states do."""
        self.ranks: Ranks | None = None
        """Connections of the processes of this host during a run; `None`: there is one process, or no run."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | dict.fromkeys(("_ddp", "_launcher", "ranks"))

    # ---- devices and ranks, when the Trainer is made ----

    @property
    @override
    def root_device(self) -> torch.device:
        return self._devices[self.local_rank] if len(self._devices) else torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Devices of this host."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._devices = _TrainerDevices(devices)

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer distributes samplers and synchronizes logged values."""
        return self._ddp is not None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the samplers; `None`: there is one process."""
        return None if self._ddp is None else self._ddp.distributed_sampler_kwargs

    @override
    def _configure_launcher(self) -> None:
        # A Trainer's last call when it is made: devices, hosts and the cluster's environment are set.
        self._launcher = self._ddp = None
        if self.num_nodes * max(1, len(self._devices)) > 1:
            self._ddp = pl.strategies.DDPStrategy(
                accelerator=self.accelerator,
                parallel_devices=list(self._devices),
                cluster_environment=self.cluster_environment,
                **self._ddp_arguments,
            )
            self._ddp.num_nodes = self.num_nodes
            self._ddp.set_world_ranks()  # before the launch: ranks above 0 log nothing while a Trainer is made
            self._ddp._configure_launcher()
            self._launcher = self._ddp.launcher
            self._forward_redirection = self._ddp._forward_redirection
        self._update_ranks()

    def _update_ranks(self) -> None:
        ddp = self._ddp
        self.world_size = 1 if ddp is None else ddp.world_size
        self.global_rank = 0 if ddp is None else ddp.global_rank
        self.local_rank = 0 if ddp is None else ddp.local_rank
        self.node_rank = 0 if ddp is None else ddp.node_rank

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._ddp is not None:
            self._ddp.setup_distributed()
            self._update_ranks()
            if self.ranks is None:  # to the end of the run, so that errors of the user's `setup` are named, too
                self.ranks = Ranks.connect(self.node_rank, self._ddp_arguments.get("timeout") or default_pg_timeout)

    # ---- the model ----

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._ddp is not None and self._layer_sync is not None and is_fitting(trainer):
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._ddp is None or not self._reduces_gradients:
            return super()._setup_model(model)
        assert self.lightning_module is not None
        if not is_fitting(self.lightning_module.trainer):  # no gradients to reduce, but all have rank 0's values
            assert self.ranks is not None
            self.ranks.broadcast(itertools.chain(model.parameters(), model.buffers()))
            return model
        self._ddp.connect(self.lightning_module)
        self._ddp.configure_ddp()
        assert self._ddp.model is not None
        return self._ddp.model

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for micro-batches that no step follows, whose gradients are not reduced."""
        return contextlib.nullcontext() if self._ddp is None else self._ddp.block_backward_sync()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._ddp is not None:
            self._ddp.pre_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._ddp is not None:
            self._ddp.post_backward(closure_loss)
        if self.ranks is not None:
            self.ranks.check()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        text = str(exception)
        if "finished reduction in the prior iteration" in text:
            exception.add_note(
                "lightning_ssd: if parameters without a gradient are intended, set "
                "`SSDOffloadStrategy(ddp={'find_unused_parameters': True})`."
            )
        cause = None if self.ranks is None else self.ranks.notice(exception)
        if cause is not None and cause is not exception:
            exception.add_note(f"lightning_ssd: {cause}")

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if self._ddp is not None and module is not None:
            self.model = self._ddp.model = module
            if self._layer_sync is not None and module._trainer is not None and is_fitting(module._trainer):
                self.model = self._layer_sync.revert(module)
        super().teardown()
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None
        if self._ddp is not None:
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()

    # ---- collectives ----

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self._ddp is None else self._ddp.reduce(tensor, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._ddp is None else self._ddp.all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._ddp is None else self._ddp.reduce_boolean_decision(decision, all)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._ddp is not None:
            self._ddp.barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self._ddp is None else self._ddp.broadcast(obj, src)


# Lightning asks strategies of this class for devices, sampler arguments and `block_backward_sync`. A subclass would be
# no `SingleDeviceStrategy`, without which Lightning refuses compiled modules.
pl.strategies.ParallelStrategy.register(DataParallelStrategy)


class _TrainerDevices(list[torch.device]):
    """Devices that a Trainer has set. They are false: a later Trainer would keep devices that are true, not its own."""

    def __bool__(self) -> bool:
        return False


def _checked(ddp: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the argument `ddp` as keyword arguments of `DDPStrategy`."""
    legal = "Give arguments of Lightning's `DDPStrategy` such as {'find_unused_parameters': True}."
    if ddp is None:
        return {}
    if not isinstance(ddp, Mapping) or not all(isinstance(name, str) for name in ddp):
        raise TypeError(f"{show_argument('ddp', ddp)} is no dictionary of arguments. {legal}")
    reserved = {
        "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "start_method",
        "module", "device_ids", "output_device", "kwargs",
    }  # fmt: skip
    if named := sorted(reserved & ddp.keys()):
        raise ValueError(
            f"{show_argument('ddp', ddp)} has {', '.join(named)}, which the strategy or the Trainer determines. {legal}"
        )
    known = {
        name
        for taker in (pl.strategies.DDPStrategy, nn.parallel.DistributedDataParallel)
        for name in inspect.signature(taker).parameters
    }
    if unknown := sorted(ddp.keys() - known):
        raise ValueError(
            f"{show_argument('ddp', ddp)} has {', '.join(unknown)}, which torch's DDP does not take. {legal}"
        )
    return dict(ddp)
