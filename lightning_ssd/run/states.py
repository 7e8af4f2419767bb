"""`RunStates`: the activation offloader and the offloaded model states of one run, and the moves of model states."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ssd._lightning import fabric, pl
from lightning_ssd.activations import (
    HOST_MEMORY,
    ActivationOffloader,
    OffloadConfig,
    check_no_cuda_graphs,
    make_offloader,
    mark_weights,
)
from lightning_ssd.autoplan import MicroBatchPlanner, StatesOwner
from lightning_ssd.device import available_memory, share_cores
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.locations import present_locations
from lightning_ssd.model_states import (
    LoadedValues,
    MetaTensors,
    ModelStates,
    PlanTiers,
    Setup,
    StatesConfig,
    UnitTiers,
    bytes_on_device,
    check_state_format,
    describe_smaller_formats,
    find_units,
    make_model_states,
    materialize_on,
    meta_to_placeholder,
    move_model_states,
    offloaded_parameters,
    present_tiers,
    regroup_model_states,
    steps_whole,
)
from lightning_ssd.planning import Plan
from lightning_ssd.recover import Recovery
from lightning_ssd.run.averaging import averaging_callbacks, summon_full_params
from lightning_ssd.run.connection import Connection
from lightning_ssd.run.data_parallel import DataParallelStrategy
from lightning_ssd.run.precision import autocast_dtype
from lightning_ssd.run.setup import check_several_hosts, is_fitting, make_setup, planned_tiers
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.sizes import format_bytes, parse_bytes, show_argument
from lightning_ssd.summary import describe_activations, describe_resident, describe_states, describe_totals, join_lines
from lightning_ssd.uncopied import Uncopied

_FP32_PRECISIONS = (pl.plugins.Precision, pl.plugins.MixedPrecision)
"""Classes of precision plugins whose weights and optimizer states are fp32."""


class RunStates(Uncopied, StatesOwner):
    """Owns the activation offloader and the offloaded model states of one run.

    A run is a training or an evaluation, and ends with the strategy's `teardown`. It is set up by `begin`, within
    Lightning's setup `place_model`, then `make`, and `make_offloader` for a training. All methods are called on the
    training thread.

    Args:
        strategy: Lightning's side of the strategy. It has the model, its device, its optimizers and the precision
            plugin, which is replaced while gradients are offloaded.
        config: the user's arguments for activations and storage.
        states_config: the user's arguments for model states.
        compiles: the strategy's argument `compile`, which a resumed run must share.

    Attributes:
        planner, user_plan, planned_by: see `StatesOwner`.
        offloads: whether model states are offloaded; `None`: it is decided when the run begins.
        offloader: the activation offloader of a training; `None` in evaluations.
        model_states: the offloaded model states; `None`: all states are on the device.
        recovery: records the training for `recover=True`; `None` otherwise.
        loaded: values of a checkpoint that was loaded before `begin`.
        starts_from_checkpoint: whether a checkpoint was loaded before `begin`, from which `recover=True` begins anew.
        connection: passes Lightning's clipping and scaling to `model_states`; `None`: no gradients are offloaded.
    """

    def __init__(
        self,
        strategy: DataParallelStrategy,
        config: OffloadConfig,
        states_config: StatesConfig,
        *,
        compiles: bool,
    ) -> None:
        self.planner: MicroBatchPlanner | None = None
        self.user_plan: Plan | None = None
        self.planned_by: str | None = None
        self.offloads: bool | None = None
        self.offloader: ActivationOffloader | None = None
        self.model_states: ModelStates | None = None
        self.recovery: Recovery | None = None
        self.loaded = LoadedValues()
        self.starts_from_checkpoint = False
        self.connection: Connection | None = None
        self._strategy = strategy
        self._config = config
        self._states_config = states_config
        self._compiles = compiles
        self._fitting = False
        self._storage = config
        """`config` with byte counts in place of percentages, once the run has begun."""
        self._default_path = ""
        """Directory of scratch files if the user has named none, once the run has begun."""
        self._to_offload: set[nn.Parameter] = set()
        """Parameters to offload, from `place_model` to `make`."""
        self._uninitialized = MetaTensors(set(), set())
        """Parameters and buffers that were built on `meta`, from `place_model` to `make`."""
        self._setup: Setup | None = None
        """Settings with which `model_states` were made."""
        self._told_spare = False
        """Whether a log line has said that the device has memory to spare."""
        self._undo: list[Callable[[], None]] = []
        """Functions that restore changed callbacks; called in reverse order."""

    # ---- set-up, before the first step ----

    def begin(self, trainer: pl.Trainer) -> None:
        """Determines budgets of memory and disk space, and whether model states are offloaded.

        Raises:
            ValueError: they have to be, and can't be; the message has the cause and the remedy.
        """
        # User code may change the working directory later.
        root = trainer.default_root_dir
        self._default_path = root if "://" in root else os.path.abspath(root)
        self._storage = self._config.resolve(self._default_path, self._processes)
        self._fitting = is_fitting(trainer)
        self.offloads = self._choose_offloads()
        if self.offloads:
            self._check_can_offload(trainer)
            budget, free = HOST_MEMORY.parse(self._config.host_memory), available_memory() // self._processes
            if isinstance(budget, int) and budget > free and self._fitting:
                pl.utilities.rank_zero_warn(
                    f"{show_argument('host_memory', self._config.host_memory)} is more than the {format_bytes(free)} "
                    "that are free for each process: the system may kill the training when it takes them. Give less."
                )

    def _choose_offloads(self) -> bool:
        if self._fitting and (plan := self._placing_plan()) is not None:
            return any([part.states != "gpu" for part in plan.placements])
        movable = self._fitting and self.can_offload_states()
        device = self._strategy.root_device
        offloads = self._states_config.offloads(self._model, device, fitting=self._fitting, movable=movable)
        # Ranks whose device has room for all states offload them with the others.
        return self._strategy.reduce_boolean_decision(offloads, all=False)

    def _check_can_offload(self, trainer: pl.Trainer) -> None:
        config, ranks = self._states_config, self._strategy.ranks
        if ranks is not None:
            check_several_hosts(trainer, config, self._placing_plan() if self._fitting else None)
            if config.gpu_memory != "auto":  # else prefetched weights alone use it, on each rank as it can
                smallest = min(ranks.exchange(config.budget(self._strategy.root_device)))
                self._states_config = replace(config, gpu_memory=f"{smallest}B")
        check_no_cuda_graphs(self._model, self._strategy.root_device)
        averaging = averaging_callbacks(trainer)
        if self._fitting and averaging and self._states_config.recover:
            raise ValueError(
                f"{type(averaging[0]).__name__} changes weights, which `recover=True` can't repeat after a kill. "
                "Remove it, or set `recover=False`."
            )
        # Raises an error that `make` would raise after Lightning's setup.
        autocast_dtype(self._strategy.precision_plugin, self._states_config.states, fitting=self._fitting)

    def place_model(self) -> None:
        """Moves the model to the device, except parameters that `make` offloads."""
        model, device = self._model, self._strategy.root_device
        self.loaded.pop_initial(model)
        if not self.offloads:
            materialize_on(model, device, self.loaded.values())
            model.to(device)
            return
        self._uninitialized = meta_to_placeholder(model)
        self._to_offload = self.find_offloadable(fitting=self._fitting)
        held = self._to_offload | self._uninitialized.parameters
        model._apply(lambda tensor: tensor if tensor in held else tensor.to(device))
        for module in model.modules():  # as `to` does, besides moving tensors
            if isinstance(module, fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin):
                module._device = device

    def find_offloadable(self, *, fitting: bool) -> set[nn.Parameter]:
        """Returns the parameters that can be offloaded: dense ones of at least `min_bytes`."""
        return offloaded_parameters(self._model, parse_bytes(self._config.min_bytes, "min_bytes"), fitting=fitting)

    def make(self) -> None:
        """Offloads model states, before all of them are on the device. Lightning's setup has ended."""
        plan = self._placing_plan() if self._fitting else None
        to_offload, self._to_offload = self._to_offload, set()
        uninitialized, self._uninitialized = self._uninitialized, MetaTensors(set(), set())
        self._make(to_offload, uninitialized, None if plan is None else planned_tiers(plan))

    def _make(self, to_offload: set[nn.Parameter], uninitialized: MetaTensors, plan_tiers: PlanTiers | None) -> None:
        """Makes the model states, in tiers by the arguments and the memory if there is no plan, and connects them to
        Lightning.
        """
        trainer = self._trainer
        optimizers = self._strategy.optimizers if self._fitting else []
        self._setup = make_setup(
            trainer,
            self._states_config,
            self._storage,
            self._default_path,
            to_offload,
            plan=self._placing_plan(),
            compiles=self._compiles,
            start_over=self.starts_from_checkpoint,
        )
        # The last digits of operators on a CPU depend on their threads: the device keeps those of Lightning's `ddp`.
        if self._strategy.ranks is not None and self._strategy.root_device.type != "cpu":
            affinities = self._strategy.ranks.messages.exchange(os.sched_getaffinity(0))
            self._undo.append(share_cores(affinities))  # before the threads that step begin
        self.model_states = make_model_states(
            self._model,
            optimizers,
            to_offload,
            uninitialized,
            self._strategy.root_device,
            self._setup,
            plan_tiers=plan_tiers,
            loaded=self.loaded.values(),
            connected=self._strategy.ranks,
        )
        if not self._fitting:
            return
        if self._states_config.recover:
            self.recovery = Recovery(trainer, self.model_states, self._storage.paths(self._default_path)[0])
            if (record := self.model_states.recovered) is not None:
                self.recovery.resume(record, self._setup.settings)
        in_fp32 = self.model_states.parameters | self.model_states.masters.keys()
        self._undo += [
            summon_full_params(callback, self._model, in_fp32, self.whole_weights, self.loaded.of_checkpoint)
            for callback in averaging_callbacks(trainer)
        ]
        self.connection = Connection(self._strategy)
        self.connection.connect(self.model_states)

    def make_offloader(self) -> None:
        """Makes the activation offloader of a training, with the memory that model states leave.

        Raises:
            ValueError: `state_format` does not support an optimizer.
        """
        check_state_format(self._states_config, self._strategy.optimizers)
        mark_weights(self._model)
        config, states = self._storage, self.model_states
        # Budgets are those of one process, and the processes of a host share its model states.
        used = (0, 0) if states is None else (states.nbytes.host_limit, states.nbytes.ssd)
        config = config.without(*[nbytes // self._processes for nbytes in used])
        self.offloader = make_offloader(
            config,
            self._strategy.root_device,
            default_path=self._default_path,
            rank=self._strategy.global_rank,
            processes=self._processes,
        )
        if states is None and self._config.amount() == "none":
            # Nothing is offloaded: hooks would only add overhead.
            self.offloader.run(replace(self.offloader.policy, hooks_enabled=False))

    def describe(self, name: str) -> str:
        """Returns lines after `name`: tiers of weights, states and activations, reasons, totals, limits, remedies."""
        offloader, states, device = self.offloader, self.model_states, self._strategy.root_device
        assert offloader is not None
        need = 0
        if states is not None:
            of_states = describe_states(states, present_locations(self._trainer), device)
        else:
            chosen = "`states='gpu'`" if self._states_config.states == "gpu" else None
            if self._placing_plan() is not None:
                chosen = "by SwapPlanner's `plan`"
            need = bytes_on_device(self._model, fitting=True)
            room = self._states_config.resident_budget(device, movable=self.can_offload_states())
            of_states = describe_resident(need, room, chosen, device)
        planned_by = self.planned_by
        of_activations = describe_activations(offloader, self._config, decided_by=planned_by)
        totals = describe_totals(
            offloader, states, self._config, self._default_path, resident=need, decided_by=planned_by
        )
        lines = [*of_states, of_activations, *totals]
        config = self._states_config
        if states is not None and states.nbytes.ssd and config.states == "auto" and not config.recover:
            smaller = describe_smaller_formats([store.layout for store in states.stores.values()])
            if smaller is not None:
                lines.append(f"host memory is short: rounded moments would save {smaller}")
        return join_lines(name, lines)

    # ---- steps ----

    def begin_micro_batch(self, kind: Literal["train", "evaluate"]) -> None:
        """Begins a micro-batch, with a backward ("train") or without."""
        if kind == "train":
            self.regroup()
        if self.model_states is not None:
            self._use_spare_memory(self.model_states, kind)
            self.model_states.begin(kind)

    def _use_spare_memory(self, states: ModelStates, kind: Literal["train", "evaluate"]) -> None:
        """Has optimizer states of several ranks use memory of the device that a micro-batch does not need."""
        chosen = self._states_config
        if states.device_states is None or (chosen.states, chosen.gpu_memory) != ("auto", "auto"):
            return
        spare = self.planner.spare_bytes if kind == "train" and self.planner is not None else 0
        states.device_states.use(spare)
        if spare and not self._told_spare:
            self._told_spare = True
            pl.utilities.rank_zero_info(
                f"ssd_offload: this device has {format_bytes(spare)} to spare: optimizer states of this rank are kept "
                "and stepped there, until a micro-batch may need the memory."
            )

    def regroup(self) -> None:
        """Regroups offloaded parameters if user code has changed the optimizers' parameter groups.

        Raises:
            RuntimeError: the groups were changed with `recover=True`, several devices, or within an optimizer step.
            ValueError: two optimizers step the same offloaded parameter.
        """
        if self.model_states is None or self.connection is None:  # evaluations offload no optimizer state
            return
        if not self.connection.groups_changed():
            return
        if self.model_states.records.enabled:
            raise RuntimeError(
                "parameter groups of an optimizer were changed during training, which `recover=True` can't repeat "
                "after a kill. Set `recover=False`."
            )
        if self._strategy.is_distributed:
            raise RuntimeError(
                "parameter groups of an optimizer were changed during training, which several devices with offloaded "
                "model states can't follow. Give the optimizer all parameters when it is made, or set `devices=1`."
            )
        if self.model_states.running.optimizer is not None:
            raise RuntimeError(
                "parameter groups of an optimizer were changed within its step. Change them before it, such as in "
                "`on_train_batch_start`, or set `states='gpu'`."
            )
        self.model_states = regroup_model_states(
            self.model_states, self._model, self._strategy.optimizers, self._strategy.root_device, self._present_setup()
        )
        self.connection.connect(self.model_states)

    def _present_setup(self) -> Setup:
        """Returns the settings of model states. Hooks that user code has added since may need later steps."""
        assert self.model_states is not None and self._setup is not None
        if self.model_states.running.defers_next:
            self._setup = replace(self._setup, defer_to_user_hooks=True)
        return self._setup

    def lazy_state_dicts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which state dicts have offloaded tensors as lazy ones, without reading them."""
        return contextlib.nullcontext() if self.model_states is None else self.model_states.state_dicts.lazy.making()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Makes all parameters whole tensors within the context; `SSDOffloadStrategy.whole_weights` documents it."""
        with contextlib.nullcontext() if self.model_states is None else self.model_states.summon_full_params():
            yield

    # ---- tiers of model states, which change between two steps: `autoplan.StatesOwner` ----

    def _placing_plan(self) -> Plan | None:
        """Returns the user's plan, if it determines the tiers of states."""
        config = self._states_config
        return None if config.states != "auto" or config.recover else self.user_plan

    def tiers_may_change(self) -> bool:
        """Returns whether tiers of states may change between two steps: the user chose none, by argument or plan."""
        config = self._states_config
        if config.states != "auto" or config.gpu_memory != "auto" or config.recover or self._strategy.is_distributed:
            return False
        # With manual optimization gradients may add up from one batch to the next.
        return self._trainer.lightning_module.automatic_optimization and self._placing_plan() is None

    def can_offload_states(self) -> bool:
        """Returns whether `offload_states` may be called.

        That is so if all states are on the device, the user chose no tiers, weights are in fp32, and each optimizer can
        step unit by unit.
        """
        if self.model_states is not None or not self.tiers_may_change():
            return False
        if type(self._strategy.precision_plugin) not in _FP32_PRECISIONS:
            return False
        if any([steps_whole(optimizer) for optimizer in self._strategy.optimizers]):
            return False
        offloaded = self.find_offloadable(fitting=True)
        # A 16-bit weight would get a master weight, and other numbers than before.
        return bool(offloaded) and all([parameter.dtype == torch.float32 for parameter in offloaded])

    @uninterrupted
    def make_states_movable(self) -> None:
        """Makes the model states of a training whose states are on the device, where they stay until `move_states_to`.

        Raises:
            ValueError: the states can't be offloaded. Training may continue.
        """
        check_no_cuda_graphs(self._model, self._strategy.root_device)
        units = find_units(self._model, self._states_config.units)
        resident = {unit.name: UnitTiers(("gpu", "gpu")) for unit in units}
        self._make(self.find_offloadable(fitting=True), MetaTensors(set(), set()), resident)
        self.offloads = True

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

    @override
    def can_move_states(self) -> bool:
        if self.model_states is None:
            return self.can_offload_states()
        if not self.tiers_may_change() or (self._setup is not None and self._setup.whole):
            return False
        return not self.model_states.gradients.pending

    @override
    def param_budget(self) -> int:
        return self._states_config.budget(self._strategy.root_device)

    @override
    def move_states(self, plan: Plan) -> None:
        if self.model_states is None:
            self.make_states_movable()
        self.move_states_to(planned_tiers(plan))

    def present_tiers(self) -> PlanTiers:
        """Returns the tiers of offloaded states, for `move_states_to`."""
        assert self.model_states is not None
        return present_tiers(self.model_states, self._present_setup())

    @uninterrupted
    def move_states_to(self, tiers: PlanTiers) -> None:
        """Moves states to tiers, as `move_states` does to those of a plan, with its errors."""
        before = self.model_states
        assert before is not None and self.connection is not None
        if before.gradients.pending:
            raise ValueError("model states can't be moved while gradients wait for their step. Move them after it.")
        offloader, self.offloader = self.offloader, None
        if offloader is not None:
            offloader.close()  # states may need its memory
        try:
            self.model_states = move_model_states(
                before,
                self._model,
                self._strategy.optimizers,
                self.find_offloadable(fitting=True),
                self._strategy.root_device,
                self._present_setup(),
                plan_tiers=tiers,
            )
        except Exception as error:
            if before.closed:  # training can't continue; its parameters are whole on the CPU
                if isinstance(error, ValueError):
                    raise RuntimeError(f"model states could not be moved: {error}") from error
                raise
            self.make_offloader()
            raise ValueError(f"model states were not moved: {error}") from error
        self.connection.connect(self.model_states)
        self.make_offloader()

    # ---- the end ----

    def close(self, shutdown: Shutdown) -> None:
        """Ends the run: all steps are committed, parameters are whole tensors, and nothing is left on drives.

        Args:
            shutdown: runs each step of the end, even if others fail.
        """
        states, self.model_states = self.model_states, None
        offloader, self.offloader = self.offloader, None
        self.loaded.clear()
        if states is not None:
            shutdown.run(states.close, shutdown.failure)
        if self.connection is not None:
            shutdown.run(self.connection.end)
        if offloader is not None:
            shutdown.run(offloader.close)
        for restore in reversed(self._undo):
            shutdown.run(restore)

    # ---- attributes of the strategy ----

    @property
    def _model(self) -> nn.Module:
        model = self._strategy.model
        assert model is not None
        return model.module if isinstance(model, DistributedDataParallel) else model

    @property
    def _processes(self) -> int:
        """Processes of the run on this host, which share its memory and drives."""
        return max(1, len(self._strategy.parallel_devices))

    @property
    def _trainer(self) -> pl.Trainer:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer
