"""`SwapPlanner`: profiles the first steps, chooses a plan, and compares its prediction with measured steps."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import (
    PlanCycle,
    PlanOptions,
    Training,
    obstacle_to_planning,
)
from lightning_ssd.callbacks.find import find_offloader, offload_config
from lightning_ssd.callbacks.output_files import check_output
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.callbacks.training import LightningTraining, states_owner
from lightning_ssd.device import allocator_memory
from lightning_ssd.planning import PLANNERS, HardwareProfile, Plan
from lightning_ssd.sizes import (
    LEAST_BUDGET,
    SizeArgument,
    check_choice,
    parse_bytes,
    parse_path,
)


class SwapPlanner(StepProfiling):
    """Chooses by measurement, for each saved tensor: keep it on the GPU, offload it, or recompute it in backward.

    Training begins with all saved tensors offloaded, which needs least GPU memory. After `warm_up` steps some steps are
    profiled, under a plan that checkpoints all units that may be. Between two steps the plan is made and applied: each
    saved tensor of each unit is kept, offloaded to host memory or to the SSDs, or recomputed. All of these steps are
    ordinary training steps: losses, gradients and weights are the same bit for bit.

    The plan is in force after 7 steps. It is made again if measured steps exceed the memory that the training may use.
    It is for batches of every size: smaller ones than the recorded one offload less. Those that may need more memory
    than all before have all units checkpointed that may be, or offload all saved tensors.

    Steps are timed on the device's clock, without a wait of the host. The loggers get `SwapPlanner/...`:
    `predicted_step_s` and `measured_step_s`, `predicted_device_bytes` and `measured_device_bytes`,
    `predicted_host_bytes` and `measured_host_bytes`, `swap_coefficient`. The log has a summary of the plan and the
    resource that bounds the step. Records of level INFO (`logging.basicConfig(level="INFO")`) have the choices for all
    units, and at the end of training hardware that would make a step faster.

    With `states="auto"` and no `gpu_memory` of the strategy, offloaded weights and optimizer states are moved, between
    two steps, to the tiers that make a step shorter, or to those of a paper's plan: GPU, host memory or SSDs, unit by
    unit. `"holistic"` offloads those on the GPU if no plan fits beside them, or a step is shorter by a third. Results
    are the same, except the last digits of an optimizer that steps on another device from then on.

    A tensor is recomputed only if its recomputation gave the same bytes as autograd had saved, in one micro-batch. With
    manual optimization nothing is recomputed. A compiled block is one operator: its saved tensors are kept or
    offloaded, or its compiled code runs again in backward.

    Args:
        planner: `"holistic"` searches by simulation, within the budgets. `"lohan"`, `"fuyou"`, `"ssdtrain"` and
            `"teraio"` are the rules of these papers, for comparison.
        plan: YAML file of a plan to apply instead of making one, such as a saved and edited plan. With `states="auto"`
            it also places the weights and optimizer states of units and their parts from the start.
        gpu_memory: bytes of the device that the training may use in all (or `"40GiB"`). `"auto"`: 92 % of the memory
            that this process may use. `"least"`: the least that makes a step at most 2 % longer than `"auto"` does.
        machine: JSON file of the machine's rates (`lightning-ssd plan --save-machine`), instead of measuring them when
            training starts.
        save: YAML file to write plans to.
        ssd_bytes_per_day: bytes that may be written to the SSDs in a day of training (or `"1TB"`); `None`: no limit.
        warm_up: steps before the timed ones, the last of which is recorded.
        steps: steps that are timed.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, the plan is not one for the model, it can't be saved, or code is
            compiled that is no block of the model.
    """

    follows_units = True

    def __init__(
        self,
        planner: Literal["holistic", "lohan", "fuyou", "ssdtrain", "teraio"] = "holistic",
        plan: str | Path | None = None,
        gpu_memory: int | str | Literal["auto", "least"] = "auto",
        machine: str | Path | None = None,
        save: str | Path | None = None,
        ssd_bytes_per_day: int | str | None = None,
        warm_up: int = 3,
        steps: int = 3,
    ) -> None:
        super().__init__(warm_up, steps)
        check_choice("planner", planner, PLANNERS)
        SizeArgument("gpu_memory", ("auto", "least"), least=LEAST_BUDGET).parse(gpu_memory)
        measured = None
        if machine is not None:
            measured = HardwareProfile.from_json(parse_path("machine", machine, "machine.json"))
        per_day = None
        if ssd_bytes_per_day is not None:
            per_day = parse_bytes(ssd_bytes_per_day, "ssd_bytes_per_day", least=LEAST_BUDGET)
        self._options = PlanOptions(
            planner=planner,
            plan=None if plan is None else Plan.load(parse_path("plan", plan, "plan.yaml")),
            gpu_memory=gpu_memory,
            machine=measured,
            save=None if save is None else parse_path("save", save, "plan.yaml"),
            ssd_bytes_per_day=per_day,
            warm_up=warm_up,
            steps=steps,
        )
        self.cycle: PlanCycle | None = None
        """The plan of the present training, or of the last one: prediction, comparison with measured steps, profile."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        owner = states_owner(trainer)
        if owner is not None:
            owner.planned_by, owner.user_plan = "SwapPlanner", self._options.plan

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.cycle = None
        if self._options.save is not None:
            check_output("`save` of SwapPlanner", self._options.save)
        if find_offloader(trainer) is not None:
            _check_amount(trainer)
        super().on_train_start(trainer, pl_module)

    @override
    def make_events(self, training: LightningTraining) -> PlanCycle:
        _check_can_plan(training)
        meter = allocator_memory(training.offloader.device)
        options = self._options if training.is_global_zero else replace(self._options, save=None)
        self.cycle = PlanCycle(training, options, meter, logs_metrics=True)
        return self.cycle

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.cycle is not None:
            self.cycle.report()
        self._end(trainer)  # user code may script or trace the model at the end of the training


def _check_amount(trainer: pl.Trainer) -> None:
    """Raises ValueError if the user has chosen the offloaded activations."""
    config = offload_config(trainer)
    if config.amount() != "auto":
        raise ValueError(
            "SwapPlanner decides which activations are offloaded, and "
            f"`offload={config.offload!r}` decides about them, too. Set it to 'auto', or remove the callback."
        )


def _check_can_plan(training: Training) -> None:
    """Raises ValueError if no plan can be applied to the training."""
    obstacle = obstacle_to_planning(training)
    if obstacle is not None:
        remedy = "Remove `torch.compile` there" if training.replicated else "Set `devices=1`"
        raise ValueError(f"SwapPlanner can't plan: {obstacle}. {remedy}, or remove the callback.")
