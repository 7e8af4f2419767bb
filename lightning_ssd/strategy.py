"""`SSDOffloadStrategy`: the only file that knows Lightning's Strategy contract.

Lightning calls, in a `fit`: `setup_environment`; `load_checkpoint` and `load_model_state_dict`, if `ckpt_path` is
given; `setup`, which calls `model_to_device`; `on_train_start`; for each micro-batch `training_step` and `backward`,
within `optimizer_step` if optimization is automatic and a step follows; and `teardown`. The sections of the class have
this order; loading is in the one of checkpoints. Two objects do the work of a training: `offloader`, the activation
offloader, and `model_states`, if model states are offloaded.
"""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.activations import (
    ActivationOffloader,
    OffloadConfig,
    check_no_cuda_graphs,
    make_offloader,
    mark_weights,
)
from lightning_ssd.autoplan import MicroBatchPlanner
from lightning_ssd.callbacks import (
    add_default_callbacks,
    average_of,
    averages_weights,
    find_offload_callbacks,
    remove_default_callbacks,
    restore_offload_callbacks,
    summon_full_params,
    trainer_callbacks,
)
from lightning_ssd.checkpoints import can_write, consolidate_command, copy_mapped_states, is_local, read_checkpoint
from lightning_ssd.device import ExpandableSegments
from lightning_ssd.garbage import ShortCollections
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.locations import present_locations
from lightning_ssd.model_states import (
    LoadedValues,
    MetaTensors,
    ModelStates,
    PlanTiers,
    RunFingerprint,
    Setup,
    StatesConfig,
    UnitTiers,
    bytes_on_device,
    check_unit_classes,
    compiled_regions,
    find_blocks,
    find_replaced,
    find_units,
    load_lazy,
    loading_to_meta,
    make_model_states,
    materialize_on,
    meta_to_placeholder,
    move_model_states,
    note_unread,
    offloaded_parameters,
    parameters_of,
    present_tiers,
    regroup_model_states,
    runs_within_step,
    save,
    save_sharded,
    stepped_whole,
    steps_whole,
    zeroes_otherwise,
)
from lightning_ssd.planning import Plan, is_later_call
from lightning_ssd.precision import autocast_dtype, offload_precision, scale, scales_exactly, scales_only
from lightning_ssd.recover import Recovery, training_settings
from lightning_ssd.retry import UNRECORDED, MicroBatchRetry, explain_out_of_memory
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.sizes import check_choice, check_flag, parse_bytes
from lightning_ssd.storage import Backend
from lightning_ssd.summary import describe_activations, describe_drives, describe_resident, describe_states
from lightning_ssd.types import BackendName, StateFormat
from lightning_ssd.user_hooks import user_sees_gradients
from lightning_ssd.versions import warn_of_untested

_FP32_PRECISIONS = (pl.plugins.Precision, pl.plugins.MixedPrecision)
"""Classes of precision plugins whose weights and optimizer states are fp32."""


class SSDOffloadStrategy(pl.strategies.SingleDeviceStrategy):
    """Trains on one device with activations and model states offloaded to host memory and SSDs.

    `Trainer(strategy="ssd_offload")` is this strategy with its defaults, `strategy="cpu_offload"` with `tier="host"`.

    Tensors that autograd saves for backward (activations, inputs, masks; not weights) are offloaded while forward
    computes, and prefetched before backward uses them (SSDTrain); the argument `offload` selects them. Weights,
    gradients and optimizer states are offloaded by the argument `states`.

    Offloading activations never changes their bytes: losses, gradients and weights are equal, bit for bit, to those of
    the same training without it. With offloaded states on a CPU device, every optimizer of `torch.optim` gives the same
    bits as plain Lightning, with all its settings. On a GPU, offloaded states are stepped with the rounding of torch's
    fused CPU kernels, so that the last digits differ. Optimizers of `torch.optim`, and classes given to
    `lightning_ssd.register_optimizer`, step unit by unit. Other classes may couple parameters, and step when backward
    has ended.

    Under `bf16-mixed` and `16-mixed`, offloaded weights of matrix products are in 16 bits on the device, as autocast
    would cast them; code outside of their forward reads fp32 values. If one forward uses such a weight several times,
    its gradients are summed in 16 bits by compiled code, and by torch before 2.10. Offloaded bf16 weights (under
    `bf16-true`, all) compute in bf16 and are stepped in fp32. (Plain Lightning steps them in bf16, which loses changes
    of less than a 256th of a weight.)

    When a training starts, one log line says which tensors are offloaded to which tier, and why others are not. The
    progress bar shows `out_gb` and `stall_s` of `OffloadMonitor`, unless the Trainer has
    `callbacks=[OffloadMonitor(progress_bar=False)]`.

    Sizes in bytes are numbers or texts such as `"32GiB"`: `32GB` and `32G` are powers of 1000, `32GiB` and `32Gi` are
    powers of 1024. In a budget, a bare number below 1 MB is an error, because a unit was probably forgotten (write
    `"24B"` for 24 bytes).

    Example:
        >>> trainer = Trainer(strategy=SSDOffloadStrategy(path=["/nvme0", "/nvme1"], host_memory="64GiB"))

    Args:
        path: directory for scratch files, or several, one for each SSD, over which data are striped. Default: the
            Trainer's `default_root_dir`. Scratch files are in a subdirectory, which is removed when training ends.
        tier: tiers of offloaded activations, and of model states with `states="auto"`: `"ssd"` (host memory and SSDs),
            or `"host"` (host memory only).
        offload: activations of each micro-batch to offload. `"auto"`: those that do not fit on the GPU, according to
            the memory of the first two or three steps. If all fit, they are kept and saved-tensor hooks are disabled.
            Otherwise the training is profiled and planned within 25 steps or 30 seconds: each saved tensor is
            kept, offloaded or recomputed, and with `states="auto"` offloaded states may be moved (see `SwapPlanner`).
            Micro-batches that may need more memory than the measured ones offload all saved tensors. If one of the
            first micro-batches runs out of memory, it is run again with all saved tensors offloaded, and then with
            model states offloaded (`states="auto"`), with the same numbers. In trainings with compiled code, each saved
            tensor is kept or offloaded, and code may be compiled again with a lower `activation_memory_budget` of
            torch. That may change last digits, so that a log line names the budget. On a CPU device all saved tensors
            are kept.
            `"ssdtrain"`: as many bytes as the measured bandwidth transfers while the device computes (SSDTrain's rule),
            and more if the device has no room for the others. A share of the bytes: 0.0 to 1.0, or `"50%"` (1 is
            everything, like 1.0). Bytes: `"8GiB"`. `"none"`: no activations.
        host_memory: budget of host memory, for model states first and then for activations: `"32GiB"`, or `"50%"` of
            the memory that is free when training starts. `"auto"`: half of the memory that is free when training
            starts, for activations; on a CPU device with `tier="ssd"` none, because activations are in host memory
            already. The default for model states is named at `states`.
        ssd_capacity: bytes of scratch space for model states and activations, `"500GB"` or `"50%"` of the free space of
            the drives, preallocated before the first step. `None`: allocated as needed.
        spill: tier that is filled first if there are two: `"host_first"` or `"ssd_first"`.
        min_bytes: saved tensors with a smaller storage are kept on the device, and so are smaller weights, except those
            in bf16.
        staging_memory: bytes of pinned memory through which activations are transferred to and from the SSDs.
        backend: `"posix"` (O_DIRECT through pinned memory), `"kvikio"` (GPUDirect Storage), or `"auto"`: kvikio if
            GPUDirect Storage is available and `checksum=False`, else posix. The log names the backend and the reason.
            GPUDirect Storage transfers saved tensors, prefetched weights, and master weights and optimizer states that
            the GPU steps; all others are staged in host memory, where the CPU uses them.
        checksum: hash written bytes and compare the hashes at reads, on the I/O threads: a flipped bit or a lost write
            raises an error before the value is used. Transfers pass through host memory then. `False`: no comparison,
            and kvikio may transfer directly between the GPU and the SSDs.
        states: tier of weights, gradients and optimizer states. `"gpu"`: the training device. `"host"`: host memory. A
            unit's weights are on the device only around their use, gradients are offloaded as backward computes them,
            and the optimizer steps on the CPU while the device computes. `"ssd"`: like `"host"`, with everything but
            the gradients on the SSDs of `path`. `"auto"`: the device if all states fit. Otherwise `gpu_memory`, if
            given, is filled with units, and with parts of large ones, then `host_memory` (by default 85 % of the free
            memory), and the rest is on SSDs. States fit if they need no more than `gpu_memory`, by default 60 % of the
            GPU memory that this process may use, or 74 % with fp32 weights and automatic optimization, because they can
            be offloaded later if activations need the room. Unless `states="gpu"`, `configure_model` and
            `Trainer.init_module` build models on the CPU.
        gpu_memory: budget of device memory for model states, unless `states="gpu"`: for prefetched weights, and for
            weights, gradients and optimizer states of units, or parts of them, that are kept on the device. `"20GiB"`,
            or `"50%"` of the memory that this process may use (on a CPU, of the free memory). Units in use are on the
            device even if they exceed it. `"auto"`: a tenth of that memory, 1 GiB on a CPU. A limit by
            `torch.cuda.set_per_process_memory_fraction` must be set before training starts.
        units: class names of the modules whose parameters are prefetched and stepped together. `None`: the repeated
            blocks of the model.
        overlap: `"optimized"`: a unit is stepped as soon as its gradient is complete, and reads, steps and writes of
            several units overlap. `"naive"`: reads, steps and writes are serial. `"none"`: all units are stepped when
            backward has ended, and the training step waits for them.
        state_format: `"fp32"`: 16-bit weights besides fp32 master weights. `"split"`: the bf16 weights are the upper
            half of their master weights, which saves 2 bytes per parameter; the master weights are exact, but ties are
            rounded away from zero in the bf16 weights. `"bf16"`: an approximation of Adam and AdamW for host memory
            that is short. Like `"split"`, and offloaded moments are in bf16, which saves 4 bytes more. Steps compute in
            fp32 and round the moments stochastically, by random numbers that depend on parameter, element and step
            alone. `"8bit"`: moments in blocks of 8 bits, which saves 2 bytes more, and is coarser. Checkpoints have the
            moments in fp32; those of other trainings are rounded when they are loaded.
        clip: when to step if gradients are clipped by norm, or scaled (`16-mixed`). `"deferred"`: once the norm is
            known, overlapped with the next forward, in the order in which forward needs the weights. `"speculative"`:
            during backward, unclipped, into a second copy of the states; if gradients had to be clipped, these steps
            are rolled back and made again. The copy is allocated with the first such step (for states on SSDs, at the
            start). `"auto"`: speculative while few steps are clipped and there is memory for the copy, which is freed
            when many steps are clipped.
        recover: resume after the last committed step if training was killed or has failed, when the same script is run
            again. Weights, optimizer states and the position in the data are restored bit for bit, without a
            checkpoint. All offloaded states are on SSDs then, in two versions, in a subdirectory of `path` that is kept
            until a training ends without an error. Trainings that run at once, and several `fit` calls of one script,
            need different paths. A run with other settings or paths is refused; changed code causes a warning. State
            that checkpoints lack, such as sums of logged means, is lost. If `ckpt_path` is given, training starts from
            that checkpoint instead.
        checkpoints: format of checkpoints, unless `states="gpu"`. `"file"`: one file, which plain Lightning loads, too.
            `"sharded"`: a directory of `torch.distributed.checkpoint`, as Lightning's FSDP strategy writes it. Both
            are written and read in the memory of a few units, and training resumes from either. A directory is not
            loaded by `load_from_checkpoint` and plain Lightning, unless its utility `consolidate_checkpoint` has made a
            file of it. `lightning-ssd export` makes a plain folder of weights of both.
        compile: compile the blocks of the model (see `units`) with `torch.compile` while it trains, except blocks that
            are compiled already. This changes the last digits of results, as your own `block.compile()` does.
        accelerator: as in Lightning's strategies.
        parallel_devices: the one device.
        checkpoint_io: as in Lightning's strategies.
        precision_plugin: plugin of the Trainer's `precision`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range; the message names it and the remedy.
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
        backend: BackendName | Backend = "auto",
        checksum: bool = True,
        states: Literal["auto", "gpu", "host", "ssd"] = "auto",
        gpu_memory: int | str = "auto",
        units: Sequence[str] | None = None,
        overlap: Literal["optimized", "naive", "none"] = "optimized",
        state_format: StateFormat = "fp32",
        clip: Literal["auto", "deferred", "speculative"] = "auto",
        recover: bool = False,
        checkpoints: Literal["file", "sharded"] = "file",
        compile: bool = False,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: fabric.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._given_devices = parallel_devices
        self._devices = parallel_devices or []
        """The one device, which the Trainer sets unless it is given."""
        self.config = OffloadConfig(
            path, tier, offload, host_memory, ssd_capacity, spill, min_bytes, staging_memory, backend, checksum
        )
        self.states_config = StatesConfig(states, gpu_memory, units, overlap, state_format, clip, recover)
        check_choice("checkpoints", checkpoints, ("file", "sharded"))
        check_flag("compile", compile)
        self._compile = compile
        self._checkpoints = checkpoints
        self._explained_sharded = False
        """Whether the log has said who loads a sharded checkpoint."""
        self._loaded = LoadedValues()
        self._ever_offloaded = False
        """Whether a training or evaluation with this strategy has offloaded states: checkpoints may have lazy tensors,
        and optimizers of that training may still own SSD space."""
        self.num_nodes = 1  # the Trainer sets it
        self._reset()

    def _reset(self) -> None:
        """Initializes the state of one training or evaluation, which ends with `teardown`."""
        self.offloader: ActivationOffloader | None = None
        """The activation offloader of a training; `None` in evaluations."""
        self.model_states: ModelStates | None = None
        """The offloaded model states; `None`: all states are on the device."""
        self._failure: BaseException | None = None
        """The error that has ended the training."""

        # Set by callbacks: see `autoplan.StatesOwner`.
        self.planner: MicroBatchPlanner | None = None
        self.user_plan: Plan | None = None
        self.planned_by: str | None = None

        # Added to the process, the Trainer, the module and callbacks, and removed by `teardown`.
        self._segments: ExpandableSegments | None = None
        """Settings of torch's CUDA allocator; `None`: nothing is set up on a GPU."""
        self._collections: ShortCollections | None = None
        """Full garbage collections of the training; `None`: no training has started."""
        self._default_callbacks: list[pl.Callback] = []
        """Callbacks that are added to the Trainer because the user gave none of their classes."""
        self._offload_callbacks: list[pl.Callback] = []
        """Callbacks of the Trainer, the user's and ours, that decide about offloaded tensors."""
        self._undo: list[Callable[[], None]] = []
        """Functions that restore changed callbacks and modules; called in reverse order."""
        self._user_precision: pl.plugins.Precision | None = None
        """The Trainer's own precision plugin, while it is replaced by one for offloaded gradients."""

        # The model states.
        self._offloads: bool | None = None
        """Whether states are offloaded; `None`: not decided yet."""
        self._storage = self.config
        """`config` with byte counts in place of percentages, once `setup` has begun."""
        self._default_path = ""
        """Directory of scratch files if the user has named none, once `setup` has begun."""
        self._to_offload: set[torch.nn.Parameter] = set()
        """Parameters to offload, while model states are made."""
        self._uninitialized = MetaTensors(set(), set())
        """Parameters and buffers that were built on `meta`, while model states are made."""
        self._setup: Setup | None = None
        """Settings with which `model_states` were made."""
        self._grouping: list[list[list[int]]] = []
        """The optimizers' parameter groups that `model_states` were made for."""
        self._recovery: Recovery | None = None
        """Records the training for `recover=True`."""
        self._starts_from_checkpoint = False
        """Whether a checkpoint was loaded before `setup`, from which `recover=True` begins anew."""
        self._checkpoint_is_mapped = False
        """Whether the checkpoint that was loaded last may share memory with its file."""

        # The present micro-batch.
        self._retry: MicroBatchRetry | None = None
        """Runs the micro-batch; `None`: it can't be run again after an OutOfMemoryError, or its backward has begun."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not continue the training, and `Uncopied` objects are None in it.
        own: dict[str, Any] = {"_undo": []}
        own |= dict.fromkeys(("_segments", "_collections", "_user_precision", "planner"))
        return super().__getstate__() | own | {"_precision_plugin": self._user_precision or self._precision_plugin}

    @property
    def _trainer(self) -> pl.Trainer:
        """The Trainer of the present training or evaluation."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _find_trainer(self) -> pl.Trainer | None:
        """Returns the Trainer of the module, if it is attached to one."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    # ---- the device ----

    @property
    @override
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The argument, also if a Trainer has set other devices: the next Trainer sets its own."""
        return self._given_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._devices = devices

    @override
    def setup_environment(self) -> None:
        devices = self.num_nodes * max(1, len(self._devices))
        if devices > 1:
            raise ValueError(
                f"`{self.strategy_name}` trains on one device, and the Trainer was given {devices}. "
                "Set `devices=1` and `num_nodes=1`; or, to offload activations on several devices, use "
                "`strategy='ddp'` or `'fsdp'` with `callbacks=[lightning_ssd.ActivationOffload()]`."
            )
        super().setup_environment()
        if self.root_device.type == "cuda":
            self._segments = ExpandableSegments(self.root_device)
        if (trainer := self._find_trainer()) is not None:
            self._default_callbacks += add_default_callbacks(trainer)
            self._offload_callbacks = find_offload_callbacks(trainer)

    # ---- set-up, before the first step ----

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        if self.states_config.states == "gpu":
            with super().tensor_init_context(empty_init):
                yield
            return
        # The device may have no room for the model. With `empty_init`, `setup` initializes one unit after the other.
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.model_states is not None:
            raise RuntimeError(
                f"a run of this {self.strategy_name} strategy, whose model states are offloaded, has not ended. Call "
                "`validate`, `test` and `predict` in `on_fit_end` or after `fit`, or give the other Trainer a strategy "
                "of its own."
            )
        fitting = _is_fitting(trainer)
        assert self.model is not None
        if self.states_config.units is not None:  # also if no states are offloaded: plans divide the model by them
            check_unit_classes(self.model, self.states_config.units)
        # User code may change the working directory later.
        root = trainer.default_root_dir
        self._default_path = root if "://" in root else os.path.abspath(root)
        self._storage = self.config.resolve(self._default_path)
        self._offloads = None
        if fitting:
            warn_of_untested()
        if fitting and self._compile:
            self._compile_blocks()
        try:
            if self._offloads_states():
                self._setup_with_states(trainer, fitting=fitting)
            else:
                super().setup(trainer)
        finally:
            self._loaded.clear()
        if fitting:
            self._make_offloader(trainer)
            pl.utilities.rank_zero_info(f"{self.strategy_name}: {self._summary(trainer)}.")

    def _summary(self, trainer: pl.Trainer) -> str:
        """Returns a sentence with the tiers of model states and activations, and the reasons."""
        offloader, states, device = self.offloader, self.model_states, self.root_device
        assert offloader is not None and self.model is not None
        if states is not None:
            of_states = describe_states(states, present_locations(trainer), device)
        else:
            chosen = "`states='gpu'`" if self.states_config.states == "gpu" else None
            if self._placing_plan() is not None:
                chosen = "by SwapPlanner's `plan`"
            need = bytes_on_device(self.model, fitting=True)
            room = self.states_config.resident_budget(device, movable=self.can_offload_states())
            of_states = describe_resident(need, room, chosen, device)
        of_activations = describe_activations(offloader, self.config, decided_by=self.planned_by)
        drives = describe_drives(offloader, states, self.config, self._default_path)
        return "; ".join(part for part in (of_states, of_activations, drives) if part is not None)

    def _compile_blocks(self) -> None:
        """Compiles the blocks of the model until teardown, before hooks are registered around compiled modules."""
        assert self.lightning_module is not None
        blocks = find_blocks(self.lightning_module, self.states_config.units)
        if not blocks and next(compiled_regions(self.lightning_module), None) is None:
            raise ValueError(
                "`compile=True` compiles the repeated blocks of a model, and this one has none. Name the classes of "
                "its blocks by `units`, or compile parts of it yourself (`module.compile()`)."
            )
        for block in blocks:
            block.compile()
            self._undo.append(functools.partial(setattr, block, "_compiled_call_impl", None))

    def _offloads_states(self) -> bool:
        """Returns whether states are offloaded. The result is fixed until teardown."""
        if self._offloads is None:
            assert self.model is not None
            fitting = _is_fitting(self._trainer)
            if fitting and (user_plan := self._placing_plan()) is not None:
                self._offloads = any(part.states != "gpu" for part in user_plan.placements)
                return self._offloads
            movable = fitting and self.can_offload_states()
            self._offloads = self.states_config.offloads(self.model, self.root_device, fitting=fitting, movable=movable)
        return self._offloads

    def _placing_plan(self) -> Plan | None:
        """Returns the user's plan, if it determines the tiers of states."""
        return None if self.states_config.states != "auto" or self.states_config.recover else self.user_plan

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self._loaded.pop_initial(self.model)
        if not self._offloads_states():
            materialize_on(self.model, self.root_device, self._loaded.values())
            self.model.to(self.root_device)
            return
        self._uninitialized = meta_to_placeholder(self.model)
        self._to_offload = self._find_offloadable(fitting=_is_fitting(self._trainer))
        held = self._to_offload | self._uninitialized.parameters
        self.model._apply(lambda tensor: tensor if tensor in held else tensor.to(self.root_device))
        for module in self.model.modules():  # as `to` does, besides moving tensors
            if isinstance(module, fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin):
                module._device = self.root_device

    def _find_offloadable(self, *, fitting: bool) -> set[torch.nn.Parameter]:
        """Returns the parameters that can be offloaded: dense ones of at least `min_bytes`."""
        assert self.model is not None
        return offloaded_parameters(self.model, parse_bytes(self.config.min_bytes, "min_bytes"), fitting=fitting)

    @uninterrupted  # interrupted, it would leave parameters without memory
    def _setup_with_states(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        """Runs Lightning's setup, and offloads model states before all of them are on the device."""
        assert self.model is not None
        check_no_cuda_graphs(self.model, self.root_device)
        averaging = _averaging_callbacks(trainer)
        if fitting and averaging and self.states_config.recover:
            raise ValueError(
                f"{type(averaging[0]).__name__} changes weights, which `recover=True` can't repeat after a kill. "
                "Remove it, or set `recover=False`."
            )
        autocast = autocast_dtype(self.precision_plugin, self.states_config.states, fitting=fitting)
        user_plan = self._placing_plan() if fitting else None
        plan_tiers = None if user_plan is None else _planned_tiers(user_plan)
        try:
            super().setup(trainer)
            if fitting and self._ever_offloaded:
                gc.collect()  # optimizers of an earlier fit, in cycles with their schedulers, still own SSD space
            self._make_states(trainer, autocast, plan_tiers, fitting=fitting)
        finally:
            self._to_offload = set()
            self._uninitialized = MetaTensors(set(), set())

    def _make_states(
        self, trainer: pl.Trainer, autocast: torch.dtype | None, plan_tiers: PlanTiers | None, *, fitting: bool
    ) -> None:
        """Makes the model states of the parameters `_to_offload`, and connects them to Lightning.

        Args:
            trainer: the Trainer.
            autocast: dtype of matrix products; None: without autocast.
            plan_tiers: tiers of each unit and of its parts; None: those that the arguments and the memory determine.
            fitting: whether the model is trained.
        """
        assert self.model is not None
        self._setup = self._make_setup(trainer, autocast, fitting=fitting)
        self.model_states = make_model_states(
            self.model,
            self.optimizers if fitting else [],
            self._to_offload,
            self._uninitialized,
            self.root_device,
            self._setup,
            plan_tiers=plan_tiers,
            loaded=self._loaded.values(),
        )
        self._ever_offloaded = True
        if not fitting:
            return
        if self.states_config.recover:
            self._begin_recovery(trainer, self.model_states, self._setup.settings)
        in_fp32 = self.model_states.parameters | self.model_states.masters.keys()
        self._undo += [
            summon_full_params(callback, self.model, in_fp32, self.whole_weights, self._loaded.of_checkpoint)
            for callback in _averaging_callbacks(trainer)
        ]
        self._user_precision = self.precision_plugin
        self._connect_states()

    def _make_setup(self, trainer: pl.Trainer, autocast: torch.dtype | None, *, fitting: bool) -> Setup:
        """Returns the settings of model states, as the arguments, the Trainer, its callbacks and a plan have them."""
        config, user_plan = self.states_config, self._placing_plan() if fitting else None
        if user_plan is not None and user_plan.clip != "off":
            config = replace(config, clip=user_plan.clip)
        exact = scales_exactly(self.precision_plugin)
        whole = stepped_whole(self.optimizers, self._to_offload) if fitting else []
        defer_to_user_hooks = (
            not trainer.lightning_module.automatic_optimization
            or user_sees_gradients(trainer)
            or bool(whole)
            or (_clips_norm(trainer) and not exact)
            or any(zeroes_otherwise(optimizer) for optimizer in self.optimizers)
        )
        return Setup(
            config=config,
            storage=self._storage,
            default_path=self._default_path,
            autocast=autocast,
            clip_norm=functools.partial(_clips_norm, trainer),  # a partial can be pickled with the strategy
            clip_value=functools.partial(_clip_value, trainer),
            defer_to_user_hooks=defer_to_user_hooks,
            scales_exactly=exact,
            whole=whole,
            sums_gradients=fitting and _accumulates(trainer),
            settings=self._settings(trainer) if fitting and config.recover else RunFingerprint.none(),
            start_over=self._starts_from_checkpoint,
        )

    def _settings(self, trainer: pl.Trainer) -> RunFingerprint:
        """Returns the settings that a run must share to resume this training (`recover=True`)."""
        config, states = self.config, self.states_config
        own = {
            "checksum": config.checksum,
            "compile": self._compile,
            "min_bytes": parse_bytes(config.min_bytes, "min_bytes"),
            "state_format": states.state_format,
            "units": states.units,
        }
        return training_settings(trainer, self._record_path(trainer), own)

    def _begin_recovery(self, trainer: pl.Trainer, states: ModelStates, settings: RunFingerprint) -> None:
        """Begins to record the training, and resumes from the record of a killed run, if there is one."""
        self._recovery = Recovery(trainer, states, self._record_path(trainer))
        if (record := states.recovered) is not None:
            states.state_dicts.protected = True
            self._recovery.resume(record, settings)

    def _record_path(self, trainer: pl.Trainer) -> Path:
        """Returns the scratch directory that has the record of `recover=True`."""
        return self._storage.paths(self._default_path)[0]

    def _connect_states(self) -> None:
        """Makes Lightning clip, scale and zero gradients through `model_states`."""
        assert self.model_states is not None and self._user_precision is not None and self._setup is not None
        self._grouping = _grouping(self.optimizers)
        self._update_wrappers()
        self.precision_plugin = offload_precision(self._user_precision, self.model_states)

    def _update_wrappers(self) -> None:
        """Copies to Lightning's wrappers the optimizer attributes that model states have replaced or restored."""
        for wrapper in self._lightning_optimizers:  # the wrappers copied the attributes when they were made
            own = vars(wrapper.optimizer)
            for name in ("zero_grad", "state"):  # `state` may be a property, such as that of an inner optimizer
                vars(wrapper).pop(name, None)
                vars(wrapper).update({name: own[name]} if name in own else {})

    def _make_offloader(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        mark_weights(self.model)
        config, states = self._storage, self.model_states
        if states is not None:
            config = config.without(states.host_limit, states.ssd_bytes)
        self.offloader = make_offloader(
            config, self.root_device, default_path=self._default_path, rank=self.global_rank
        )
        if states is None and self.config.amount() == "none":
            # Nothing is offloaded: hooks would only add overhead.
            self.offloader.run(replace(self.offloader.policy, hooks_enabled=False))

    # ---- a micro-batch, and the step after it ----

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        restore_offload_callbacks(self._trainer, self._offload_callbacks)
        if self._collections is None:  # else the loop runs again, as in BatchSizeFinder
            self._collections = ShortCollections()
        if self.model_states is not None:
            self.model_states.state_dicts.protected = False

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        training = self._trainer.state.stage == pl.trainer.states.RunningStage.TRAINING
        return dataloader if self._recovery is None or not training else self._recovery.wrap_dataloader(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._collections is not None:
            self._collections.begin_micro_batch()
        if self._segments is not None:
            self._segments.begin_micro_batch()
        self._begin_micro_batch("train")
        if self.offloader is None:  # a loop that runs after `fit`
            return super().training_step(*args, **kwargs)
        self._retry = self._prepare_retry(args, kwargs)
        return self._forward(args, kwargs) if self._retry is None else self._retry.forward()

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.offloader is not None
        with self.offloader.hooks():
            return super().training_step(*args, **kwargs)

    def _prepare_retry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroBatchRetry | None:
        """Returns an object that can run the present micro-batch again; `None`: memory is expected to suffice.

        Args:
            args: arguments of `training_step`.
            kwargs: its keyword arguments.
        """
        module = self.lightning_module
        assert module is not None
        planner = self.planner
        if planner is None or not planner.may_run_out or not module.automatic_optimization:
            return None
        movable = not runs_within_step(self.optimizers) and self.can_offload_states()
        with planner.excluded():
            return MicroBatchRetry(
                module.trainer,
                inputs=(args, kwargs),
                states=lambda: self.model_states,
                forward=lambda: self._forward(args, kwargs),
                save_memory=functools.partial(planner.save_memory, note=UNRECORDED),
                offload_states=functools.partial(self._offload_states_for_retry, planner) if movable else None,
                delay_steps=planner.begins_rule,
            )

    def _offload_states_for_retry(self, planner: MicroBatchPlanner, part: str, zeroed: bool) -> None:
        """Offloads model states, because a micro-batch has run out of memory with all saved tensors offloaded.

        Args:
            planner: decides about saved tensors.
            part: "forward" or "backward", which has failed.
            zeroed: whether gradients of the step before were zeroed.
        """
        waiting: dict[torch.nn.Parameter, torch.Tensor] = {}
        if zeroed or not planner.begins_step:  # the next step uses all gradients that are there
            waiting = _pop_gradients(self._find_offloadable(fitting=True))
        try:
            self.offload_states()
        except Exception as error:
            error.add_note(
                f"lightning_ssd: model states were offloaded because memory had run out in the {part} of a "
                "micro-batch, with all saved tensors offloaded."
            )
            raise
        assert self.model_states is not None
        self.model_states.restore_accumulated_gradients(waiting)
        planner.restart_after_offload(part)
        self._begin_micro_batch("train")

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        retry, self._retry = self._retry, None
        plugin, module = self.precision_plugin, self.lightning_module
        if retry is None or not scales_only(plugin):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert module is not None
        # Lightning's `backward`, except that the plugin's may run several times, between hooks that run once.
        self.pre_backward(closure_loss)
        scaled = plugin.pre_backward(closure_loss, module)
        retry.backward(
            (closure_loss, scaled),
            lambda loss: plugin.backward(loss, module, optimizer, *args, **kwargs),
            lambda loss: scale(plugin, loss),
        )
        # The plugin is another one if states were offloaded for a third attempt.
        detached = self.precision_plugin.post_backward(scaled, module)
        self.post_backward(detached)
        return detached

    @override
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._regroup_states()  # before the step begins, in which Lightning runs `training_step`
        may_run_out = self.planner is not None and self.planner.may_run_out
        if may_run_out and self.model_states is None and self._tiers_may_change() and not steps_whole(optimizer):
            # The optimizer's `step` would run the closure, within which states could not be offloaded.
            with torch.enable_grad():  # as in `step`
                closure = _after_first(closure, closure())
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_micro_batch("evaluate")
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_micro_batch("evaluate")
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_micro_batch("evaluate")
        return super().predict_step(*args, **kwargs)

    def _begin_micro_batch(self, kind: Literal["train", "evaluate"]) -> None:
        """Begins a micro-batch, with a backward ("train") or without."""
        if kind == "train":
            self._regroup_states()
        if self.model_states is not None:
            self.model_states.begin(kind)

    def _regroup_states(self) -> None:
        """Regroups offloaded parameters if user code has changed the optimizers' parameter groups.

        Raises:
            RuntimeError: the groups were changed with `recover=True`, or within an optimizer step.
            ValueError: two optimizers step the same offloaded parameter.
        """
        if self.model_states is None or self._user_precision is None:  # evaluations offload no optimizer state
            return
        assert self._setup is not None
        if self._grouping == _grouping(self.optimizers):
            return
        if self.model_states.recorded:
            raise RuntimeError(
                "parameter groups of an optimizer were changed during training, which `recover=True` can't repeat "
                "after a kill. Set `recover=False`."
            )
        if self.model_states.stepping:
            raise RuntimeError(
                "parameter groups of an optimizer were changed within its step. Change them before it, such as in "
                "`on_train_batch_start`, or set `states='gpu'`."
            )
        assert self.model is not None
        self.model_states = regroup_model_states(
            self.model_states, self.model, self.optimizers, self.root_device, self._present_setup()
        )
        self._connect_states()

    # ---- tiers of model states, which callbacks change between two steps ----

    def _present_setup(self) -> Setup:
        """Returns the settings of model states. Hooks that user code has added since may need later steps."""
        assert self.model_states is not None and self._setup is not None
        if self.model_states.defers_next_steps:
            self._setup = replace(self._setup, defer_to_user_hooks=True)
        return self._setup

    def _tiers_may_change(self) -> bool:
        """Returns whether tiers of states may change between two steps: the user chose none, by argument or plan."""
        config = self.states_config
        if config.states != "auto" or config.gpu_memory != "auto" or config.recover:
            return False
        # With manual optimization gradients may add up from one batch to the next.
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and self._placing_plan() is None

    def can_offload_states(self) -> bool:
        """Returns whether `offload_states` may be called.

        That is so if all states are on the device, the user chose no tiers, weights are in fp32, and each optimizer can
        step unit by unit.
        """
        if self.model_states is not None or not self._tiers_may_change():
            return False
        if type(self.precision_plugin) not in _FP32_PRECISIONS:
            return False
        if any(steps_whole(optimizer) for optimizer in self.optimizers):
            return False
        offloaded = self._find_offloadable(fitting=True)
        # A 16-bit weight would get a master weight, and other numbers than before.
        return bool(offloaded) and all(parameter.dtype == torch.float32 for parameter in offloaded)

    def states_need_most_memory(self) -> bool:
        """Returns whether model states that can be offloaded take more than `GPU_SHARE` of the device's memory.

        `states="auto"` keeps fp32 states up to `MOVABLE_GPU_SHARE` of it there; plans should be able to move such ones.
        """
        assert self.model is not None
        room = self.states_config.resident_budget(self.root_device)
        crowded = room is not None and bytes_on_device(self.model, fitting=True) > room
        return crowded and self.can_offload_states()

    @uninterrupted
    def make_states_movable(self) -> None:
        """Makes `model_states`, so that plans can move states, all of which are on the device and stay there for now.

        Called between two steps of a training.

        Raises:
            ValueError: the states can't be offloaded. Training may continue.
        """
        assert self.model is not None
        check_no_cuda_graphs(self.model, self.root_device)
        autocast = autocast_dtype(self.precision_plugin, self.states_config.states, fitting=True)
        self._to_offload = self._find_offloadable(fitting=True)
        units = find_units(self.model, self.states_config.units)
        try:
            resident = {unit.name: UnitTiers(("gpu", "gpu")) for unit in units}
            self._make_states(self._trainer, autocast, resident, fitting=True)
        finally:
            self._to_offload = set()
        self._offloads = True

    def offload_states(self) -> None:
        """Offloads model states, all of which are on the device, between two steps of a training.

        Results do not change, except the last digits of optimizers that step on the CPU from then on. The activation
        offloader is replaced by a new one.

        Raises:
            ValueError, RuntimeError: the states could not be offloaded. Training can't continue.
            StorageError: a drive failed.
        """
        self.make_states_movable()
        present = self.present_tiers()
        try:
            self.move_states_to(dict.fromkeys(present, UnitTiers(("host", "host"))))
        except ValueError:  # host memory does not suffice
            self.move_states_to(dict.fromkeys(present, UnitTiers(("ssd", "ssd"))))

    def can_move_states(self) -> bool:
        """Returns True if `move_states` may be called: states are offloaded, and the user chose no tiers."""
        if not self._tiers_may_change():
            return False
        if self._setup is not None and self._setup.whole:
            return False
        return self.model_states is not None and not self.model_states.accumulating

    def move_states(self, plan: Plan) -> None:
        """Moves weights and optimizer states to the tiers of `plan`, between two steps.

        Results do not change, except the last digits of optimizers that step on the GPU from then on. The activation
        offloader is replaced by a new one. The plan's `clip` is ignored.

        Raises:
            ValueError: nothing was moved, because the plan is not one for this model, there is no room for it, or
                gradients wait for a step.
            RuntimeError: the move failed half-way; training can't continue.
            StorageError: a drive failed.
        """
        self.move_states_to(_planned_tiers(plan))

    def present_tiers(self, resident_bytes: int = 0) -> PlanTiers:
        """Returns the tiers of offloaded model states, for `move_states_to`.

        Args:
            resident_bytes: device bytes for states that are offloaded now. In the result, the first units in the order
                of the forward have their states on the device, as many as fit; tiers of other units do not change.
        """
        assert self.model_states is not None and self._setup is not None and self.model is not None
        return present_tiers(self.model_states, self.optimizers, self._present_setup(), resident_bytes=resident_bytes)

    @uninterrupted
    def move_states_to(self, tiers: PlanTiers) -> None:
        """Moves weights and optimizer states to `tiers`, as `move_states` does to those of a plan, with its errors."""
        assert self.model_states is not None and self._setup is not None and self.model is not None
        if self.model_states.accumulating:
            raise ValueError("model states can't be moved while gradients wait for their step. Move them after it.")
        offloader, self.offloader = self.offloader, None
        if offloader is not None:
            offloader.close()  # states may need its memory
        offloaded = self._find_offloadable(fitting=True)
        before = self.model_states
        try:
            self.model_states = move_model_states(
                self.model_states,
                self.model,
                self.optimizers,
                offloaded,
                self.root_device,
                self._present_setup(),
                plan_tiers=tiers,
            )
        except Exception as error:
            if before.closed:  # training can't continue; its parameters are whole on the CPU
                if isinstance(error, ValueError):
                    raise RuntimeError(f"model states could not be moved: {error}") from error
                raise
            self._make_offloader(self._trainer)
            raise ValueError(f"model states were not moved: {error}") from error
        self._connect_states()
        self._make_offloader(self._trainer)

    # ---- checkpoints, and whole weights for callbacks ----

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._lazily():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._regroup_states()
        with self._lazily():
            return super().optimizer_state(optimizer)

    def _lazily(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which state dicts have offloaded tensors as lazy ones, without reading them."""
        return contextlib.nullcontext() if self.model_states is None else self.model_states.state_dicts.lazy.making()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._ever_offloaded:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif storage_options is None and can_write(self.checkpoint_io, filepath):
            if self._checkpoints == "file":
                save(checkpoint, filepath)
            else:
                self._save_sharded(checkpoint, filepath)
        else:
            super().save_checkpoint(load_lazy(checkpoint), filepath, storage_options)

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        assert self.lightning_module is not None
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        numbered = [
            {number: names[item] for number, item in enumerate(parameters_of(optimizer)) if item in names}
            for optimizer in self.optimizers
        ]
        save_sharded(checkpoint, filepath, numbered)
        if not self._explained_sharded:
            self._explained_sharded = True
            pl.utilities.rank_zero_info(
                f"{filepath} is a sharded checkpoint. `load_from_checkpoint` and Trainers with other strategies load "
                f"the file that is made of it by `{consolidate_command(filepath)}`."
            )

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._starts_from_checkpoint = self.model_states is None
        if is_local(self.checkpoint_io, checkpoint_path):
            checkpoint_path = find_replaced(Path(checkpoint_path))
        mapped = self.states_config.states != "gpu"
        loaded = read_checkpoint(self.checkpoint_io, checkpoint_path, weights_only=weights_only, mapped=mapped)
        self._checkpoint_is_mapped = loaded is not None
        return super().load_checkpoint(checkpoint_path, weights_only) if loaded is None else loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.model_states is None and self._offloads is not None:  # `setup` has ended: parameters hold their values
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        if self.model_states is None:
            averages = [average_of(callback) for callback in _averaging_callbacks(self.lightning_module.trainer)]
            self._loaded.record([self.lightning_module, *(average for average in averages if average is not None)])
            with loading_to_meta():
                super().load_model_state_dict(checkpoint, strict=strict)
            return
        if self._resumes_killed_run:
            self._check_nothing_replaced(self.lightning_module)
        with self._without_offloaded():
            super().load_model_state_dict(checkpoint, strict=strict and not self._resumes_killed_run)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._regroup_states()
        with self._without_offloaded():
            super().load_optimizer_state_dict(checkpoint)
        if self._checkpoint_is_mapped:
            copy_mapped_states(self.optimizers, checkpoint)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # The record of a killed run is found during setup. Checkpoints are restored before it, in Lightning's order.
        return self._resumes_killed_run

    @property
    def _resumes_killed_run(self) -> bool:
        """True while the Trainer restores the record of a killed run, whose offloaded states are restored already."""
        return self.model_states is not None and self.model_states.state_dicts.protected

    def _check_nothing_replaced(self, module: pl.LightningModule) -> None:
        assert self.model_states is not None
        missing = self.model_states.parameters - set(module.parameters())
        if missing:
            raise RuntimeError(
                f"`on_load_checkpoint` replaced {len(missing)} parameters of a run that was killed, whose optimizer "
                "had been restored already: the new ones would not be trained. Replace them in `setup` or in "
                "`configure_model`, or set `recover=False`."
            )

    def _without_offloaded(self) -> contextlib.AbstractContextManager[None]:
        """Leaves offloaded states out of state dicts within the context, if a killed run is being resumed."""
        if not self._resumes_killed_run or self.model_states is None:
            return contextlib.nullcontext()
        return self.model_states.state_dicts.without()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Makes all parameters of the model whole tensors, which may be read and changed, within the context.

        For callbacks that read or change weights, such as averages of weights (Lightning's own need not call it).
        Offloaded parameters are on the CPU, in fp32. Entering waits for optimizer steps that have begun, and needs
        host memory for all offloaded weights. With `recover=True`, weights may only be read.

        Tensors that share memory with an offloaded weight, such as `p.data`, are for the context only: later steps do
        not change them as in plain training, and may overwrite them. Keep a `.clone()`.

        Raises:
            RuntimeError: on exit, if weights were changed with `recover=True`.
        """
        with contextlib.nullcontext() if self.model_states is None else self.model_states.summon_full_params():
            yield

    # ---- the end ----

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failure = exception
        if (trainer := self._find_trainer()) is not None:
            _drop_unread_loader(trainer)
        if self._ever_offloaded:
            note_unread(exception)
        if isinstance(exception, torch.OutOfMemoryError) and self.offloader is not None:
            assert self.lightning_module is not None
            exception.add_note(
                explain_out_of_memory(
                    exception,
                    self.lightning_module,
                    present_locations(self._trainer),
                    self.offloader,
                    self.model_states,
                    self.config,
                    planned=self.planned_by is not None,
                )
            )

    @override
    @uninterrupted
    def teardown(self) -> None:
        shutdown = Shutdown(self._failure)
        offloader, states, recovery, undo = self.offloader, self.model_states, self._recovery, self._undo
        segments, collections, default_callbacks = self._segments, self._collections, self._default_callbacks
        if self._user_precision is not None:
            self.precision_plugin = self._user_precision
        self._loaded.clear()
        self._reset()  # also if a step of the shutdown fails
        if states is not None:
            shutdown.run(states.close, shutdown.failure)
            shutdown.run(self._update_wrappers)
        if offloader is not None:
            shutdown.run(offloader.close)
        for restore in reversed(undo):
            shutdown.run(restore)
        if (trainer := self._find_trainer()) is not None:
            shutdown.run(remove_default_callbacks, trainer, default_callbacks)
        shutdown.run(super().teardown)
        for settings in (segments, collections):
            if settings is not None:
                shutdown.run(settings.end)
        shutdown.raise_failure()
        if recovery is not None and shutdown.failure is None:
            recovery.end()


def _pop_gradients(parameters: Iterable[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Removes the gradients of parameters, and returns them in host memory."""
    gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[parameter] = parameter.grad.detach().to("cpu")
            parameter.grad = None
    return gradients


def _drop_unread_loader(trainer: pl.Trainer) -> None:
    """Drops a data loader whose iterator could not be made, as if its workers can't be started.

    Lightning's shutdown would ask for its length, which is an error that hides the one that ended the run.
    """
    loop: Any = trainer._active_loop
    loader = getattr(getattr(loop, "_data_fetcher", None), "_combined_loader", None)
    if loader is not None and loader._iterator is None:
        loop._data_fetcher = None


def _is_fitting(trainer: pl.Trainer) -> bool:
    return trainer.state.fn == pl.trainer.states.TrainerFn.FITTING


def _after_first(closure: Callable[[], Any], result: Any) -> Callable[[], Any]:
    """Returns a closure whose first call has been made already, with `result`."""
    results = [result]
    return lambda: results.pop() if results else closure()


def _clips(trainer: pl.Trainer) -> bool:
    """Returns whether Lightning clips gradients by the Trainer's arguments: not at a value of 0 or less."""
    return (trainer.gradient_clip_val or 0) > 0


def _clips_norm(trainer: pl.Trainer) -> bool:
    """Returns whether gradients are clipped by their norm at present, which callbacks may change."""
    algorithm = trainer.gradient_clip_algorithm or "norm"  # Lightning's default
    return _clips(trainer) and algorithm == "norm"


def _clip_value(trainer: pl.Trainer) -> float | None:
    """Returns the present value by which gradients are clipped, which callbacks may change; None: they are not."""
    by_value = trainer.gradient_clip_algorithm == "value" and _clips(trainer)
    return trainer.gradient_clip_val if by_value else None


def _accumulates(trainer: pl.Trainer) -> bool:
    """Returns whether steps have several micro-batches, now or in a later epoch."""
    return trainer.accumulate_grad_batches > 1 or any(
        callback.going_to_accumulate_grad_batches()
        for callback in trainer_callbacks(trainer)
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
    )


def _averaging_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns the callbacks that average weights."""
    return [callback for callback in trainer_callbacks(trainer) if averages_weights(callback)]


def _grouping(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[list[int]]]:
    """Returns the parameters of each optimizer's groups, by their identity."""
    return [
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def _planned_tiers(plan: Plan) -> dict[str, UnitTiers]:
    """Returns the plan's tiers of each unit and of its parts."""
    return {
        unit_name: UnitTiers(
            (unit.weights, unit.states), {name: (part.weights, part.states) for name, part in unit.parts.items()}
        )
        for unit_name, unit in plan.units.items()
        if not is_later_call(unit_name)
    }
