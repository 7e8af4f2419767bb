"""`SSDOffloadStrategy`: the only file that knows Lightning's Strategy contract.

Lightning calls, in a `fit`: `setup_environment`; `load_checkpoint` and `load_model_state_dict`, if `ckpt_path` is
given; `setup`, which calls `model_to_device`; `on_train_start`; for each micro-batch `training_step` and `backward`,
within `optimizer_step` if optimization is automatic and a step follows; and `teardown`. The sections of the class have
this order; loading is in the one of checkpoints. `RunStates` does the work of a run: it owns `offloader`, the
activation offloader, and `model_states`, if model states are offloaded.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.activations import ActivationOffloader, OffloadConfig
from lightning_ssd.autoplan import StatesOwner
from lightning_ssd.callbacks import (
    add_default_callbacks,
    find_offload_callbacks,
    remove_default_callbacks,
    restore_offload_callbacks,
)
from lightning_ssd.device import ExpandableSegments
from lightning_ssd.garbage import ShortCollections
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.locations import present_locations
from lightning_ssd.model_states import (
    ModelStates,
    StatesConfig,
    begin_loading_kernel,
    check_unit_classes,
    load_lazy,
    loading_to_meta,
    note_unread,
)
from lightning_ssd.retry import MicroBatchRetry, explain_out_of_memory
from lightning_ssd.run import (
    CheckpointFiles,
    DataParallelStrategy,
    RunStates,
    average_of,
    averaging_callbacks,
    compile_blocks,
    copy_mapped_states,
    end_retry,
    is_fitting,
    prepare_retry,
    present_path,
    read_checkpoint,
    retry_backward,
    run_before_step,
    scales_only,
)
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.sizes import check_flag
from lightning_ssd.storage import Backend
from lightning_ssd.types import BackendName, StateFormat
from lightning_ssd.versions import warn_of_untested


class SSDOffloadStrategy(DataParallelStrategy):
    """Trains with activations and model states offloaded to host memory and SSDs.

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

    With several devices (`devices=n`, `num_nodes=n`), one process trains on each and offloads its own activations;
    results are those of Lightning's `ddp`. Model states that fit on each device are trained by torch's DDP. Others, and
    those with `states="host"` or `"ssd"`, are in host memory or on SSDs, where the processes of a host share one copy,
    and each steps its part.

    When a training starts, log lines say which tensors are offloaded to which tier, and why others are not. The
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
            the memory of the first one to three steps. If all fit, they are kept and saved-tensor hooks are disabled.
            Otherwise the training is profiled and planned within its first steps: each saved tensor is kept, offloaded
            or recomputed, and with `states="auto"` offloaded states may be moved (see `SwapPlanner`).
            Micro-batches that may need more memory than the measured ones offload all saved tensors. If one of the
            first micro-batches runs out of memory, it is run again with all saved tensors offloaded or recomputed, and
            then with model states offloaded (`states="auto"`), with the same numbers. A compiled block is one operator:
            its saved tensors are kept or offloaded, or its compiled code runs again in backward. If other code is
            compiled, such as the whole model, there is no plan, and saved tensors without room are offloaded. On a CPU
            device all saved tensors are kept.
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
        staging_memory: most bytes of pinned memory through which activations are transferred to and from the SSDs. If
            `host_memory` is given, it is a part of that, and an eighth of it at most.
        backend: `"posix"` (O_DIRECT through pinned memory), `"kvikio"` (GPUDirect Storage), or `"auto"`: kvikio if
            GPUDirect Storage is available and `checksum=False`, else posix. A log record of level INFO has the reason.
            GPUDirect Storage transfers saved tensors and prefetched weights; all others are staged in host memory.
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
        accelerator, cluster_environment, checkpoint_io: as in Lightning's strategies.
        parallel_devices: devices of this host, if the Trainer's are not to be used.
        precision_plugin: plugin of the Trainer's `precision`.
        ddp: further arguments of Lightning's `DDPStrategy` for several devices, such as
            `{"find_unused_parameters": True}`.

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
        cluster_environment: fabric.plugins.ClusterEnvironment | None = None,
        checkpoint_io: fabric.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.precision.Precision | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, ddp)
        self.config = OffloadConfig(
            path, tier, offload, host_memory, ssd_capacity, spill, min_bytes, staging_memory, backend, checksum
        )
        self.states_config = StatesConfig(states, gpu_memory, units, overlap, state_format, clip, recover)
        self._checkpoints = CheckpointFiles(checkpoints)
        check_flag("compile", compile)
        self._compile = compile
        self._ever_offloaded = False
        """Whether an earlier run with this strategy has offloaded states: checkpoints may have lazy tensors, and
        optimizers of that run may still own SSD space."""
        self._begin_run()
        if states != "gpu":
            begin_loading_kernel()

    def _begin_run(self) -> None:
        """Initializes the state of one training or evaluation, which ends with `teardown`."""
        self._run = RunStates(self, self.config, self.states_config, compiles=self._compile)
        self._segments: ExpandableSegments | None = None
        """Settings of torch's CUDA allocator; `None`: nothing is set up on a GPU."""
        self._collections: ShortCollections | None = None
        """Full garbage collections of the training; `None`: no training has started."""
        self._offload_callbacks: list[pl.Callback] = []
        """Callbacks of the Trainer, the user's and ours, that decide about offloaded tensors."""
        self._undo: list[Callable[[], None]] = []
        """Functions that restore the process, the Trainer and the module at `teardown`; called in reverse order."""
        self._maps_checkpoint = False
        """Whether the checkpoint that was loaded last may share memory with its file."""
        self._retry: MicroBatchRetry | None = None
        """Runs the micro-batch; `None`: it can't be run again after an OutOfMemoryError, or its backward has begun."""
        self._failure: BaseException | None = None
        """The error that has ended the training."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not continue the run.
        own: dict[str, Any] = {"_undo": []} | dict.fromkeys(("_run", "_segments", "_collections", "_retry"))
        if self._run.connection is not None:
            own["_precision_plugin"] = self._run.connection.precision
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_run()

    # ---- what callbacks and users ask ----

    @property
    def offloader(self) -> ActivationOffloader | None:
        """The activation offloader of a training; `None` in evaluations."""
        return self._run.offloader

    @property
    def model_states(self) -> ModelStates | None:
        """The offloaded model states; `None`: all states are on the device."""
        return self._run.model_states

    @property
    def states_owner(self) -> StatesOwner:
        """Places and moves model states, for the planner of the training."""
        return self._run

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
        with self._run.whole_weights():
            yield

    # ---- set-up, before the first step ----

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.root_device.type == "cuda":
            self._segments = ExpandableSegments(self.root_device)
            self._undo.append(self._segments.end)
        if (trainer := _trainer_of(self.lightning_module)) is not None:
            self._undo.append(functools.partial(remove_default_callbacks, trainer, add_default_callbacks(trainer)))
            self._offload_callbacks = find_offload_callbacks(trainer)

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
        run, fitting = self._run, is_fitting(trainer)
        assert self.model is not None
        if self.states_config.units is not None:  # also if no states are offloaded: plans divide the model by them
            check_unit_classes(self.model, self.states_config.units)
        run.begin(trainer)
        self._reduces_gradients = not run.offloads
        if fitting:
            warn_of_untested()
            if self._compile:
                self._undo += compile_blocks(trainer.lightning_module, self.states_config.units)
        try:
            if run.offloads:
                self._setup_with_states(trainer)
            else:
                super().setup(trainer)
        finally:
            run.loaded.clear()
        if fitting:
            run.make_offloader()
            pl.utilities.rank_zero_info(run.describe(self.strategy_name))

    @uninterrupted  # interrupted, it would leave parameters without memory
    def _setup_with_states(self, trainer: pl.Trainer) -> None:
        """Runs Lightning's setup, and offloads model states before all of them are on the device."""
        super().setup(trainer)
        if self._ever_offloaded and is_fitting(trainer):
            gc.collect()  # optimizers of an earlier fit, in cycles with their schedulers, still own SSD space
        self._run.make()

    @override
    def model_to_device(self) -> None:
        self._run.place_model()

    # ---- a micro-batch, and the step after it ----

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        restore_offload_callbacks(self.lightning_module.trainer, self._offload_callbacks)
        if self._collections is None:  # else the loop runs again, as in BatchSizeFinder
            self._collections = ShortCollections()
            self._undo.append(self._collections.end)
        if self._run.recovery is not None:
            self._run.recovery.end_restoring()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.state.stage == pl.trainer.states.RunningStage.TRAINING
        recovery = self._run.recovery
        return dataloader if recovery is None or not training else recovery.wrap_dataloader(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._collections is not None:
            self._collections.begin_micro_batch()
        if self._segments is not None:
            self._segments.begin_micro_batch()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.ranks is not None:
            self.ranks.begin_batch(last=trainer.is_last_batch)
        self._run.begin_micro_batch("train")
        if self.offloader is None:  # a loop that runs after `fit`
            return super().training_step(*args, **kwargs)
        forward = functools.partial(self._forward, *args, **kwargs)
        self._retry = prepare_retry(self._run, trainer, (args, kwargs), forward)
        return forward() if self._retry is None else self._retry.forward()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.offloader is not None
        with self.offloader.hooks():
            return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._retry is not None and scales_only(self.precision_plugin):
            retry_backward(self.precision_plugin, self._retry, closure_loss)
        self._retry = None

    @override
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._run.regroup()  # before the step begins, in which Lightning runs `training_step`
        closure = run_before_step(self._run, optimizer, closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._run.begin_micro_batch("evaluate")
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._run.begin_micro_batch("evaluate")
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._run.begin_micro_batch("evaluate")
        return super().predict_step(*args, **kwargs)

    # ---- checkpoints ----

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._run.lazy_state_dicts():
            return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._run.regroup()
        with self._run.lazy_state_dicts():
            return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not (self._has_lazy_tensors and self.is_global_zero):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        files, module = self._checkpoints, self.lightning_module
        if storage_options is None and files.write(self.checkpoint_io, checkpoint, filepath, module, self.optimizers):
            return
        super().save_checkpoint(load_lazy(checkpoint), filepath, storage_options)

    @property
    def _has_lazy_tensors(self) -> bool:
        """Whether this run or an earlier one has offloaded states, so that checkpoints may have lazy tensors."""
        return self._ever_offloaded or self.model_states is not None

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._run.starts_from_checkpoint = self.model_states is None
        checkpoint_path = present_path(self.checkpoint_io, checkpoint_path)
        mapped = self.states_config.states != "gpu"
        loaded = read_checkpoint(self.checkpoint_io, checkpoint_path, weights_only=weights_only, mapped=mapped)
        self._maps_checkpoint = loaded is not None
        return super().load_checkpoint(checkpoint_path, weights_only) if loaded is None else loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        run = self._run
        if run.offloads is None:  # parameters get these values in `setup`
            assert self.lightning_module is not None
            averages = [average_of(callback) for callback in averaging_callbacks(self.lightning_module.trainer)]
            run.loaded.record([self.lightning_module, *(average for average in averages if average is not None)])
            with loading_to_meta():
                super().load_model_state_dict(checkpoint, strict=strict)
        elif run.recovery is not None and run.recovery.restoring:
            run.recovery.check_nothing_replaced()
            with run.recovery.without_restored():
                super().load_model_state_dict(checkpoint, strict=False)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._run.regroup()
        recovery = self._run.recovery
        with contextlib.nullcontext() if recovery is None else recovery.without_restored():
            super().load_optimizer_state_dict(checkpoint)
        if self._maps_checkpoint:
            copy_mapped_states(self.optimizers, checkpoint)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # The record of a killed run is found during setup. Checkpoints are restored before it, in Lightning's order.
        return self._run.recovery is not None and self._run.recovery.restoring

    # ---- the end ----

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failure = exception
        trainer = _trainer_of(self.lightning_module)
        if trainer is not None:
            _drop_unread_loader(trainer)
        if self._has_lazy_tensors:
            note_unread(exception)
        if isinstance(exception, torch.OutOfMemoryError) and self.offloader is not None and trainer is not None:
            exception.add_note(
                explain_out_of_memory(
                    exception,
                    trainer.lightning_module,
                    present_locations(trainer),
                    self.offloader,
                    self.model_states,
                    self.config,
                    planned=self._run.planned_by is not None,
                )
            )

    @override
    @uninterrupted
    def teardown(self) -> None:
        shutdown, run, undo = Shutdown(self._failure), self._run, self._undo
        end_retry(self.precision_plugin)
        self._ever_offloaded = self._has_lazy_tensors
        self._begin_run()  # also if a step of the shutdown fails
        run.close(shutdown)
        shutdown.run(super().teardown)
        for restore in reversed(undo):
            shutdown.run(restore)
        shutdown.raise_failure()
        if run.recovery is not None and shutdown.failure is None:
            run.recovery.end()


def _trainer_of(module: pl.LightningModule | None) -> pl.Trainer | None:
    """Returns the Trainer of a module, if there is one and it is attached to one."""
    return None if module is None else module._trainer


def _drop_unread_loader(trainer: pl.Trainer) -> None:
    """Drops a data loader whose iterator could not be made, as if its workers can't be started.

    Lightning's shutdown would ask for its length, which is an error that hides the one that ended the run.
    """
    loop: Any = trainer._active_loop
    loader = getattr(getattr(loop, "_data_fetcher", None), "_combined_loader", None)
    if loader is not None and loader._iterator is None:
        loop._data_fetcher = None
