"""`SwapPlanner`: measures the first steps, chooses what to keep, swap and recompute, and says how right it was."""

import logging
import math
import statistics
import sys
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, OffloadAll, OffloadOnPressure, PlanMode, make_schedule
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.activations.ssd_base import SSDTierBase
from lightning_ssd.callbacks.offloader import find_offloader, offload_config, trainer_callbacks
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.device import WorkCounter, device_memory, make_clock
from lightning_ssd.planning import (
    PLANNERS,
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    correct,
    correct_step_rate,
    make_plan,
    make_report,
    plan_for_least_memory,
    plan_with_coefficient,
    render_report,
    render_summary,
    resident_bytes,
    simulate,
    swap_coefficient,
    unplanned,
)
from lightning_ssd.profiling import count_bytes, measure_machine, mixed_bandwidth
from lightning_ssd.sizes import format_bytes, parse_bytes
from lightning_ssd.states import ModelStates, is_compiled
from lightning_ssd.types import InputChoice, OffloadTierName

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """What a plan was expected to take, and what it took.

    Attributes:
        predicted: by the simulation.
        step_seconds: of a step, the median of some; of the trial, the least.
        gpu_peak_bytes: most bytes of the device that were allocated (CUDA; else 0).
        host_peak_bytes: most bytes of host memory that activations and states took.
    """

    predicted: Prediction
    step_seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int


class SwapPlanner(StepProfiling):
    """Plans what becomes of everything that autograd saves, from what the first steps are measured to do.

    Training begins with the placement that takes least memory: all saved tensors leave. After `warm_up` steps some are
    measured, and then some more in which what can be is computed again: what bounds a step is busy all the time there,
    and shows the pace that it keeps. Then, between two steps, a plan is made and put in force: each saved tensor of
    each unit is kept, goes to host memory or to the SSDs, or is dropped and computed again in backward. All of these
    steps are ordinary steps: losses, gradients and weights stay as they are, bit for bit.

    The first plan is in force after 12 steps, or 22 where model states were moved. Where profiling is expected to take
    more than 25 steps or 30 seconds, its warm-up, its timed steps and the trial of recomputation are shortened, to four
    steps in all at least. A log line names each part that is shorter.

    From then on steps are timed on the device's clock, and nobody waits for it. `SwapPlanner/...` in the loggers:
    `predicted_step_s` and `measured_step_s`, `predicted_device_bytes` and `measured_device_bytes`,
    `predicted_host_bytes` and `measured_host_bytes`, `swap_coefficient`. What the plan is, what bounds the step, and
    what would lift that is in the log.

    With `states="auto"` and no `gpu_memory` of the strategy, weights and optimizer states that had left the device go,
    between two steps, to where a step is shorter: the GPU, host memory or SSDs, unit by unit. Then all is measured
    again. Numbers stay what they are, but for the last digits of an optimizer that steps on the GPU from then on.

    What is computed again was, in one micro-batch, computed again and compared with what autograd had saved, byte by
    byte. With manual optimization nothing is computed again.

    Args:
        planner: `"holistic"` (the simulation decides, under the budgets), or, to compare, those of papers: `"lohan"`,
            `"fuyou"`, `"ssdtrain"`.
        plan: YAML file of a plan to put in force, such as one that was saved and edited, instead of making one. With
            `states="auto"` it says from the start where the weights and the optimizer states of each unit are, too.
        gpu_memory: bytes of the device that the training may take in all (or `"40GiB"`). `"auto"`: 90 % of what is
            there. `"least"`: as few as take no more than 2 % longer than with all of it.
        machine: JSON file of what the machine does (`lightning-ssd plan --save-machine`), instead of measuring it when
            training starts.
        save: YAML file to write plans to. Where weights and optimizer states leave the device, would be better off in
            other places, and may not be moved, a plan with them there is written beside it, as `NAME.states.yaml`.
        ssd_bytes_per_day: bytes that may be written to the SSDs in a day of training (or `"1TB"`); `None`: as many as
            it takes.
        warm_up: steps before some are measured; fewer where profiling would take more than 25 steps or 30 seconds.
        steps: steps that are measured, once with all saved tensors leaving, and once with them computed again; fewer
            where profiling would take more than 25 steps or 30 seconds.
        tolerance: share of the step time by which it may drift from what it was before there is another plan.

    Raises:
        ValueError: an argument is out of range, the plan is not one for the model, or the model is compiled.
    """

    #: Steps whose median is compared with the prediction.
    WINDOW = 8
    #: Steps that go by before them: memory is moved.
    SETTLING = 2
    #: Medians in a row that must have drifted before there is another plan.
    PATIENCE = 2

    def __init__(
        self,
        planner: Literal["holistic", "lohan", "fuyou", "ssdtrain"] = "holistic",
        plan: str | Path | None = None,
        gpu_memory: int | str | Literal["auto", "least"] = "auto",
        machine: str | Path | None = None,
        save: str | Path | None = None,
        ssd_bytes_per_day: int | str | None = None,
        warm_up: int = 3,
        steps: int = 3,
        tolerance: float = 0.1,
    ) -> None:
        super().__init__(warm_up, steps)
        if planner not in PLANNERS:
            raise ValueError(f"`planner={planner!r}` must be one of {', '.join(map(repr, PLANNERS))}.")
        if gpu_memory not in ("auto", "least"):
            parse_bytes(gpu_memory, "gpu_memory")
        if not 0 < tolerance:
            raise ValueError(f"`tolerance={tolerance}` must be above 0, such as 0.1.")
        self._planner = planner
        self.pinned = None if plan is None else Plan.load(plan)
        """The plan that the user gave. With `states="auto"` it says where model states are, too."""
        self._gpu_memory = gpu_memory
        self._machine = None if machine is None else HardwareProfile.from_json(machine)
        self._save = save
        self._per_day = None if ssd_bytes_per_day is None else parse_bytes(ssd_bytes_per_day, "ssd_bytes_per_day")
        self._tolerance = tolerance
        self.profile: ModelProfile | None = None
        """What was measured last."""
        self.hardware: HardwareProfile | None = None
        """What the machine does, and the bytes of it that this training may take."""
        self.plan: Plan | None = None
        """The plan in force."""
        self.prediction: Prediction | None = None
        """For it."""
        self.comparison: Comparison | None = None
        """Of its last steps, once there were some."""
        self._director: PlanMode | None = None
        self._unwatched = False
        """Whether the plan keeps everything, and nobody has to see what."""

    # ---- a training ----

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        _check(trainer, pl_module)
        self.profile = self.plan = self.prediction = self.comparison = None
        self._measured_machine = self._measure(self._offloader)
        self._clock = make_clock(self._offloader.device)
        self._recorded_bytes: int | None = None
        """Of the batch that was recorded."""
        self._recorded_trained = 0
        """Parameters that wanted gradients then."""
        self._pace = 1.0
        """Seconds that the forward takes now, of one that was recorded."""
        self._peak_bytes = 0
        """The most device memory that was allocated in steps before the last validation."""
        self._trying = False
        """Whether the plan in force is there to be measured."""
        self._stepped = WorkCounter(0, 0.0)
        """Of the CPU optimizer, when steps under the plan began to be compared."""
        self._moved = False
        """Whether model states went elsewhere in this training: once is enough."""
        self._begun: Any = None
        self._taken: deque[tuple[Any, Any]] = deque()
        self._to_settle = 0
        self._usual: float | None = None
        self._drifting = 0
        self._retried = False
        self._compiled = _compiled_frames()

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, warm_up: int) -> None:
        super()._begin(trainer, pl_module, warm_up)
        offloader = find_offloader(trainer)
        assert offloader is not None
        self._offloader = offloader
        self._states: ModelStates | None = getattr(trainer.strategy, "model_states", None)
        self._send_all()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        begins = self._at_boundary
        if self.plan is None and self._phase == "waiting" and _compiled_frames() != self._compiled:
            raise ValueError(
                "something in `training_step` is compiled by `torch.compile`, and SwapPlanner plans single operations, "
                "which it can't see there. Leave `torch.compile` away, or remove the callback."
            )
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._look_after(pl_module, batch, batch_idx)
        if self.plan is None or self.measuring or not begins:
            return
        if self._trying and not self._taken and not self._profiling_budget.allows(1):
            self._skip_trial()
            self._decide(trainer, pl_module)
            return
        if self._to_settle:
            self._to_settle -= 1
            if not self._to_settle:
                self._peak_bytes = 0
                self._reset_peak()
                if self._states is not None:
                    self._stepped = self._states.stepped()
            return
        now = self._clock.now()
        if self._begun is not None:
            self._taken.append((self._begun, now))
        self._begun = now
        if len(self._taken) >= self._window:
            self._compare(trainer, pl_module)

    @override
    def has_time(self, steps: int) -> bool:
        trial = 0 if self.pinned is not None else self.SETTLING + self._steps
        return self._profiling_budget.allows(steps + trial)

    def _look_after(self, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Has what the micro-batch saves taken over, unless all of it stays, and no more of it than was recorded."""
        if self._phase == "recording":
            self._recorded_bytes = count_bytes(batch)
            self._recorded_trained = _count_trained(pl_module)
        if self._unwatched and batch_idx == 0 and _count_trained(pl_module) != self._recorded_trained:
            self._unwatched = False
            self._enable_hooks(True)
        if self._unwatched:
            here, recorded = count_bytes(batch), self._recorded_bytes
            self._enable_hooks(here is None or recorded is None or here > recorded)

    def _enable_hooks(self, enabled: bool) -> None:
        if self._offloader.policy.hooks_enabled != enabled:
            self._offloader.run(replace(self._offloader.policy, hooks_enabled=enabled))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._begun = None  # this one takes longer
        if self.plan is not None:
            self._peak_bytes = self._peak()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.plan is not None:
            self._reset_peak()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.plan is None or self._trying:
            log.warning("training ended before %d steps were measured: there was no plan", self._steps)

    def _end(self) -> None:
        super()._end()
        self._close_director()

    def _close_director(self) -> None:
        director, self._director = self._director, None
        if director is not None:
            director.close()

    # ---- planning ----

    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        profiler = self._profiler
        assert profiler is not None
        # One half of staging memory is read ahead, one written behind.
        room = int(_FILLED * self._capacity("host"))
        settled = self._settled = replace(profiler.settled(), staging_bytes=self._staging_bytes() // 2, host_room=room)
        hardware = self._budget(profile, settled)
        if self._offloader.device.type == "cuda":
            tiers: dict[InputChoice, int] = {name: tier.capacity for name, tier in self._offloader.tiers.items()}
            before = unplanned(profile, settled, tiers, self._offloader.policy.window_bytes)
            resident = resident_bytes(profile, before)[0]
            # Less than nothing is not there: then less was on its way, in steps that were late, than might have been.
            other = max(0, profiler.peak_bytes - simulate(profile, hardware, before).gpu_peak_bytes)
            # At rest nothing is on its way, and let go of late. Who steps by hand does it within what was measured.
            if set(settled.weights) == {"gpu"} and pl_module.automatic_optimization:
                other = min(other, profiler.resting_bytes - resident)
            between = max(0, profiler.between_bytes - resident - other)
            profile = replace(profile, other_gpu_bytes=other, between_gpu_bytes=between)
        self.profile, self.hardware = profile, hardware
        self._pace = 1.0
        self._learned = False
        trial = plan_with_coefficient(profile, hardware, 0.0, settled)
        fits = not simulate(profile, hardware, trial).excess_bytes(hardware)
        self._trying = self.pinned is None and fits
        if self._trying and not self._profiling_budget.allows(self.SETTLING + 1):
            self._skip_trial()
        if self._trying:
            self._put_in_force(trainer, trial)
        else:
            self._decide(trainer, pl_module)

    def _skip_trial(self) -> None:
        self._trying = False
        self._log_shortened("the plan is made without a measured step of recomputation")

    def _decide(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the plan, and puts it in force."""
        assert self.profile is not None and self.hardware is not None
        plan = self._make_plan()
        elsewhere = self._look_elsewhere(simulate(self.profile, self.hardware, plan))
        if elsewhere is not None and self._move(trainer, pl_module, elsewhere):
            return
        self._put_in_force(trainer, plan)
        self._report(plan)
        if elsewhere is not None:
            self._suggest(elsewhere)

    def _make_plan(self) -> Plan:
        assert self.profile is not None and self.hardware is not None
        if self.pinned is not None:
            self.pinned.check(self.profile)
            return self._settled.apply(self.pinned)
        if self._gpu_memory == "least":
            return plan_for_least_memory(self.profile, self.hardware, self._planner, self._settled)
        return make_plan(self.profile, self.hardware, self._planner, self._settled)

    def _report(self, plan: Plan) -> None:
        assert self.profile is not None and self.hardware is not None
        if self._save is not None:
            plan.save(self._save)
        report = make_report(self.profile, self.hardware, plan, settled=self._settled)
        log.info("plan from step %d on:\n%s\n%s", self._step, plan.describe(), render_report(report))
        pl.utilities.rank_zero_info("SwapPlanner: " + render_summary(report))

    def _put_in_force(self, trainer: pl.Trainer, plan: Plan) -> None:
        assert self.profile is not None and self.hardware is not None
        self.plan = plan
        self.prediction = simulate(self.profile, self.hardware, plan)
        self._send_all()
        if plan.keeps_all:  # nobody has to follow the forward
            self._close_director()
            placement = OffloadOnPressure(tuple(self._offloader.tiers), self._is_short)
            self._offloader.run(replace(self._offloader.policy, placement=placement))
            # Nor to see what is saved, where there is ample room: but of weights that come and go, and larger batches.
            ample = self.prediction.gpu_peak_bytes <= _AMPLE * self._there()
            self._unwatched = ample and set(self._settled.weights) == {"gpu"}
        else:
            self._offloader.run(replace(self._offloader.policy, mode=self._direct(plan)))
        self._hold_window(trainer, plan.window_bytes)
        self._usual = None
        self._drifting = 0
        self._to_settle = self.SETTLING
        self._begun = None
        self._taken.clear()

    def _direct(self, plan: Plan) -> PlanMode:
        """Returns the director, who has forwards follow the plan from now on."""
        profiler = self._profiler
        assert profiler is not None
        choices, chains = {}, {}
        for item in profiler.saved():
            unit = plan.units[profiler.name_of(item.visit)]
            choices[item.buffer] = unit.input if item.inbound else unit.operators[item.name]
            if choices[item.buffer] == "recompute":
                chains[item.buffer] = item.chain
        if self._director is None:
            modules = [unit.modules for unit in profiler.units]
            self._director = PlanMode(modules, self._offloader.device, self._offloader.pack, self._offloader.unpack)
        self._director.pace = self._pace
        self._director.program = make_schedule(profiler.graph, choices, chains)
        return self._director

    def _plan_again(self, trainer: pl.Trainer) -> None:
        """Goes back to the placement of the beginning, and measures."""
        self._send_all()
        self._hold_window(trainer, None)
        self._profiling_budget = ProfilingBudget()
        self._begun = None
        self._taken.clear()
        self.schedule(1)

    def _send_all(self) -> None:
        """Has all saved tensors leave, but for what a plan says."""
        self._unwatched = False
        placement = OffloadAll(tuple(self._offloader.tiers))
        self._offloader.run(replace(self._offloader.policy, placement=placement, mode=None, hooks_enabled=True))

    def _is_short(self) -> bool:
        """Whether a forward that differs from the recorded one has taken more than there is room for."""
        device = self._offloader.device
        if device.type != "cuda":
            return False
        assert self.prediction is not None
        return torch.cuda.memory_allocated(device) > max(self.prediction.gpu_peak_bytes, _ROOMY * self._there())

    def _there(self) -> float:
        """Returns the bytes of the device that may be taken."""
        assert self.hardware is not None
        device = self._offloader.device
        return min(self.hardware.gpu_bytes, device_memory(device) if device.type == "cuda" else math.inf)

    def _hold_window(self, trainer: pl.Trainer, window_bytes: int | None) -> None:
        for callback in trainer_callbacks(trainer):
            if isinstance(callback, PrefetchScheduler):
                callback.hold(window_bytes)

    # ---- model states ----

    def _look_elsewhere(self, prediction: Prediction) -> Plan | None:
        """Returns the plan with which model states are better off elsewhere, if they are."""
        assert self.profile is not None and self.hardware is not None
        if self._states is None or self.pinned is not None or self._gpu_memory == "least":
            return None
        plan = make_plan(self.profile, self.hardware, self._planner)
        better = simulate(self.profile, self.hardware, plan)
        worth = better.step_seconds <= _MUCH * prediction.step_seconds
        return plan if worth and not better.excess_bytes(self.hardware) else None

    def _move(self, trainer: pl.Trainer, pl_module: pl.LightningModule, plan: Plan) -> bool:
        """Has model states moved to where they are in `plan`, and all measured again; returns whether they were."""
        strategy: Any = trainer.strategy
        if self._moved or not strategy.can_move_states():
            return False
        assert self.profile is not None and self.hardware is not None
        self._moved = True
        self.plan = self.prediction = None
        self._end()
        try:
            strategy.move_states(plan)
        except ValueError as error:
            log.warning("%s", error)
        else:
            seconds = simulate(self.profile, self.hardware, plan).step_seconds
            gpu, host, ssd = (
                sum(unit.states == tier for unit in plan.units.values()) for tier in ("gpu", "host", "ssd")
            )
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step should take {seconds:.3f} s with the states of {gpu} units on the GPU, of {host} "
                f"in host memory and of {ssd} on SSDs: they were moved, and all is measured again."
            )
        self._begin(trainer, pl_module, 1)
        return True

    def _suggest(self, plan: Plan) -> None:
        """Says that model states would be better off as in `plan`."""
        assert self.profile is not None and self.hardware is not None
        better = simulate(self.profile, self.hardware, plan)
        how = "Set `save` to have that plan in a file, and start with it as `plan`."
        if self._save is not None:
            path = Path(self._save).with_suffix(".states.yaml")
            plan.save(path)
            how = f"To have them there, start with `states='auto'` and `SwapPlanner(plan={str(path)!r})`."
        pl.utilities.rank_zero_info(
            f"SwapPlanner: with model states placed otherwise a step should take {better.step_seconds:.3f} s. {how}"
        )

    # ---- what there is ----

    def _measure(self, offloader: ActivationOffloader) -> HardwareProfile:
        machine = self._machine if self._machine is not None else measure_machine(None)
        if offloader.device.type == "cuda":
            torch.cuda.empty_cache()  # of what was measured with
        ssd = offloader.tiers.get("ssd")
        if isinstance(ssd, SSDTierBase) and self._machine is None:
            read, write = ssd.blobs.read_bandwidth, ssd.blobs.write_bandwidth
            machine = replace(machine, ssd_read=read, ssd_write=write, ssd_mixed=mixed_bandwidth(read, write))
        return machine

    def _capacity(self, tier: OffloadTierName) -> int:
        """Returns the bytes of a tier for activations."""
        return self._offloader.tiers[tier].capacity if tier in self._offloader.tiers else 0

    def _staging_bytes(self) -> int:
        """Returns the bytes of host memory that data passes on its way to and from the SSDs."""
        ssd = self._offloader.tiers.get("ssd")
        return ssd.staging.budget if isinstance(ssd, SSDTier) else 0

    def _budget(self, profile: ModelProfile, settled: FixedPlacement) -> HardwareProfile:
        """Returns the machine with the bytes of it that this training may take."""
        offloader, machine = self._offloader, self._measured_machine
        if self._gpu_memory not in ("auto", "least"):
            gpu = parse_bytes(self._gpu_memory, "gpu_memory")
        elif offloader.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(offloader.device)
            gpu = int(
                _USABLE * min(device_memory(offloader.device), free + torch.cuda.memory_reserved(offloader.device))
            )
        else:
            gpu = machine.host_bytes
        # What the states take is theirs already.
        kept = simulate(profile, machine, unplanned(profile, settled, {}, 0))
        return replace(
            machine,
            gpu_bytes=gpu,
            host_bytes=kept.host_peak_bytes + self._capacity("host") + self._staging_bytes(),
            ssd_bytes=kept.ssd_peak_bytes + self._capacity("ssd"),
            ssd_bytes_per_day=machine.ssd_bytes_per_day if self._per_day is None else self._per_day,
        )

    # ---- comparing ----

    @property
    def _window(self) -> int:
        """Steps whose median is compared with the prediction; of a trial a single one where the budget is spent."""
        if self._trying:
            return self._steps if self._profiling_budget.allows(1) else 1
        return self.WINDOW

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares the last steps with the prediction, once the device has passed them."""
        # Of the first ones: where nothing makes the host wait, the device has never passed the last.
        window = [self._clock.elapsed(start, end) for start, end in islice(self._taken, self._window)]
        if None in window:
            return  # the device is not there yet
        assert self.prediction is not None
        self._taken.clear()
        # A host that has something else to do now and then is no slower for that: of few steps the least tells more.
        typical = min if self._trying else statistics.median
        comparison = Comparison(
            self.prediction,
            typical([value for value in window if value is not None]),
            self._peak(),
            self._offloader.peak_pinned_bytes() + (0 if self._states is None else self._states.host_bytes),
        )
        if self._trying:
            self._trying = False
            self._correct(comparison)
            self._decide(trainer, pl_module)
            return
        self.comparison = comparison
        self._tell(trainer, comparison)
        measured, usual = comparison.step_seconds, self._usual
        if usual is None:
            self._usual = measured
            if not self._learned:
                self._learned = True
                self._learn(trainer, comparison)
            return
        self._drifting = self._drifting + 1 if abs(measured / usual - 1) > self._tolerance else 0
        if self._drifting == self.PATIENCE and self.pinned is None:
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step takes {measured:.3f} s, and took {usual:.3f}: planning again."
            )
            self._plan_again(trainer)

    def _peak(self) -> int:
        """Returns the most device memory that was allocated since steps are compared, validations left aside."""
        if self._offloader.device.type != "cuda":
            return 0
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self._offloader.device))

    def _reset_peak(self) -> None:
        if self._offloader.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._offloader.device)

    def _learn(self, trainer: pl.Trainer, comparison: Comparison) -> None:
        """Corrects what was measured by what the first steps under the plan took, and plans again if that helps."""
        explained = self._correct(comparison)
        if not explained and self.pinned is None and not self._retried:
            self._retried = True
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step takes {comparison.step_seconds:.3f} s instead of "
                f"{comparison.predicted.step_seconds:.3f}: measuring again."
            )
            self._plan_again(trainer)
            return
        assert self.profile is not None and self.hardware is not None and self.plan is not None
        before = self.prediction = simulate(self.profile, self.hardware, self.plan)
        plan = self._make_plan()
        after = simulate(self.profile, self.hardware, plan)
        excess = before.excess_bytes(self.hardware), after.excess_bytes(self.hardware)
        faster = after.step_seconds < (1 - _WORTH) * before.step_seconds
        smaller = self._gpu_memory == "least" and after.gpu_peak_bytes < (1 - _WORTH) * before.gpu_peak_bytes
        if excess[1] < excess[0] or (explained and excess[1] == excess[0] and (faster or smaller)):
            self._put_in_force(trainer, plan)
            self._report(plan)

    def _correct(self, comparison: Comparison) -> bool:
        """Corrects what was measured by what steps under the plan took; returns whether that explains it.

        A device that waits now and then, as it does while all leaves, is cooler, and faster, than one that never does;
        drives, and the CPU's memory, are slower when all of it reads and writes; and memory is taken that nobody had
        seen. How long the CPU's optimizer takes is measured; what that leaves open is inferred from the step's time.
        """
        assert self.profile is not None and self.hardware is not None and self.plan is not None
        predicted, measured = comparison.predicted, comparison.step_seconds
        if comparison.gpu_peak_bytes:
            unseen = comparison.gpu_peak_bytes - predicted.gpu_peak_bytes
            self.profile = replace(self.profile, other_gpu_bytes=self.profile.other_gpu_bytes + unseen)
        stepped = WorkCounter(0, 0.0) if self._states is None else self._states.stepped().since(self._stepped)
        if stepped.amount and stepped.seconds:
            rate = stepped.amount / stepped.seconds
            self.hardware = correct_step_rate(self.profile, self.hardware, self.plan, rate, measured)
        corrected = correct(self.profile, self.hardware, self.plan, measured)
        if corrected is None:
            foretold = simulate(self.profile, self.hardware, self.plan).step_seconds
            return abs(measured / foretold - 1) <= self._tolerance
        self._pace *= corrected[0].forward_seconds / self.profile.forward_seconds
        if self._director is not None:
            self._director.pace = self._pace
        self.profile, self.hardware = corrected
        return True

    def _swap_coefficient(self) -> float:
        assert self.profile is not None and self.plan is not None
        return swap_coefficient(self.profile, self.plan)

    def _tell(self, trainer: pl.Trainer, comparison: Comparison) -> None:
        predicted = comparison.predicted
        metrics = {
            "predicted_step_s": predicted.step_seconds,
            "measured_step_s": comparison.step_seconds,
            "predicted_host_bytes": predicted.host_peak_bytes,
            "measured_host_bytes": comparison.host_peak_bytes,
            "swap_coefficient": self._swap_coefficient(),
        }
        if comparison.gpu_peak_bytes:
            metrics |= {
                "predicted_device_bytes": predicted.gpu_peak_bytes,
                "measured_device_bytes": comparison.gpu_peak_bytes,
            }
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"SwapPlanner/{name}": value for name, value in metrics.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )
        if self._usual is None:
            peak = f"predicted {format_bytes(predicted.gpu_peak_bytes)}"
            if comparison.gpu_peak_bytes:
                peak += f", {format_bytes(comparison.gpu_peak_bytes)} measured"
            seconds = f"predicted {predicted.step_seconds:.3f} s a step, measured {comparison.step_seconds:.3f}"
            pl.utilities.rank_zero_info(f"SwapPlanner: {seconds}. Peak of the device: {peak}.")


_WORTH = 0.01
"""Share of a step, or of memory, for which another plan is worth the change."""

_MUCH = 0.95
"""Share of a step's time from which on model states are better off elsewhere."""

_FILLED = 0.85
"""Of the host tier, what tensors of different sizes fill."""

_ROOMY = 0.8
"""Of the device's memory that may be taken: the rest is for what backward allocates."""

_AMPLE = 0.5
"""Of it: who takes no more than that is not looked after."""

_USABLE = 0.9
"""Of the device's memory: the rest is lost between blocks of different sizes."""


def _count_trained(module: pl.LightningModule) -> int:
    """Returns how many parameters want gradients."""
    return sum(parameter.requires_grad for parameter in module.parameters())


def _compiled_frames() -> int:
    """Returns how much `torch.compile` has looked at in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises ValueError if plans can't be put in force."""
    if trainer.world_size > 1:
        raise ValueError("SwapPlanner plans the training of one device. Set `devices=1`, or remove the callback.")
    config = offload_config(trainer)
    if config.amount() != "auto":
        raise ValueError(
            f"SwapPlanner chooses what leaves, and `offload={config.offload!r}` says it, too. Leave it at 'auto', or "
            "remove the callback."
        )
    for name, part in module.named_modules():
        if is_compiled(part):
            raise ValueError(
                f"{name or type(module).__name__} is compiled, and SwapPlanner plans single operations, which it can't "
                "see there. Leave `torch.compile` away, or remove the callback."
            )
