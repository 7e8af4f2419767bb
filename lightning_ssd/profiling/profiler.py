"""`Profiler` measures the units, operators and saved tensors of a training, and the tiers of its model states.

It records one micro-batch, checks recomputations in the next, and times further steps. `TraceMode` records operators,
`unit_profiles` makes the units' profiles, and `limits` adds budgets.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    ActivationOffloader,
    ForwardGraph,
    KeepAll,
    PlacementPolicy,
    PlanMode,
    Saved,
    SavedStorage,
    UnitCall,
    UnitDispatchMode,
    UnitProof,
    around_call,
    kind_of,
    make_schedule,
)
from lightning_ssd.device import WorkCounter, allocator_memory, make_clock
from lightning_ssd.model_states import ModelStates, Unit, UnitPart, count_stored_bytes, states_in_memory
from lightning_ssd.planning import (
    OFFLOADED_LAUNCH,
    FixedPlacement,
    HostOverhead,
    ModelProfile,
    PartProfile,
    unit_call_name,
)
from lightning_ssd.profiling.host_overhead import measure_host_overhead
from lightning_ssd.profiling.lifetimes import LifetimeRecorder
from lightning_ssd.profiling.trace_mode import OptimizerTrace, TraceMode
from lightning_ssd.profiling.unit_profiles import calls_of_units, unit_profiles
from lightning_ssd.replay import LifetimeProfile
from lightning_ssd.types import Choice, ClipMode, Tier
from lightning_ssd.uncopied import Uncopied, takes_hooks

LAUNCH_QUEUE = 128
"""Operations that surely fit into a GPU's launch queue, together with the copies of their saved tensors."""


class Profiler(Uncopied):
    """Profiles a training: one micro-batch operation by operation, then a few ordinary steps.

    The results of the training do not change, bit for bit. The recorded micro-batch and `profile` synchronize the host
    with the device; ordinary steps are timed without.

    Args:
        units: units of the model, in the order of the forward.
        states: offloaded model states; `None`: all are on the device.
        allow_recompute: whether saved tensors may be recomputed, and units checkpointed, which is wrong if weights
            change between a forward and its backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        offloader: ActivationOffloader,
        states: ModelStates | None,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        allow_recompute: bool = True,
    ) -> None:
        self.units = [unit for unit in units if unit.parameters]
        self.graph = ForwardGraph()
        """The recorded micro-batch."""
        self.peak_bytes = 0
        """Peak of allocated device memory in timed forwards and backwards, bytes (CUDA)."""
        self.between_bytes = 0
        """Peak of allocated device memory between micro-batches, such as in optimizer steps, bytes (CUDA)."""
        self.resting_bytes = 0
        """Allocated device memory before the first timed step, plus gradients not allocated then, bytes (CUDA)."""
        self.stepped = WorkCounter(0, 0.0)
        """Parameters that the CPU has stepped while steps were timed, and the seconds of these steps."""
        self._offloader = offloader
        self._states = states
        self._optimizers = optimizers
        self._allow_recompute = allow_recompute
        self.saved: list[Saved] = []
        """Saved tensors of the recorded micro-batch that may be offloaded."""
        self._lifetimes: LifetimeRecorder | None = None
        """Recorder of all tensors' lifetimes in the recorded step, if they are recorded."""
        self._module: nn.Module | None = None
        """The model whose tensors are recorded."""
        self._trace_mode: TraceMode | None = None
        self._traced: TraceMode | None = None
        """The ended mode of the recorded micro-batch, which times the operators of its optimizer step."""
        self._optimizer_trace: OptimizerTrace | None = None
        self._plan_mode: PlanMode | None = None
        self._recorded_backward = False
        self._checkpointed: Mapping[nn.Module, UnitProof] = {}
        """Modules of units that are checkpointed in the recorded micro-batch and the next one."""
        self._policy_before = offloader.policy
        self._memory = allocator_memory(offloader.device)
        self._clock = make_clock(offloader.device)
        self._stepped_before = self.stepped
        """Those before the first timed step."""
        self._between: list[tuple[Any, Any]] = []
        """Begin and end of the spans between timed micro-batches."""
        self._ended: Any = None
        """End of the last timed micro-batch, while none runs."""
        self._num_steps = self._num_ahead = 0
        """Timed steps after the first one, and those of them that the host began before the device ended the step
        before."""
        self._launches: dict[UnitCall, list[tuple[float, int]]] = defaultdict(list)
        """Host seconds from each call of a unit to the next call, without the time that offloading took, and the number
        of saved tensors that were packed meanwhile."""
        self._launching: tuple[UnitCall, float, int] | None = None
        """The unit call whose operations the host launches, the time of its begin, and the tensors packed before."""
        self._num_calls: Counter[int] = Counter()
        """Calls of each unit, by index, in the present timed forward."""
        self._removals: list[Callable[[], None]] = []
        """Functions that remove the hooks of timed steps."""

    def follow_move(self, offloader: ActivationOffloader, states: ModelStates | None) -> None:
        """Continues with another offloader and other tiers of model states, and keeps its measurements."""
        self._offloader, self._states, self._policy_before = offloader, states, offloader.policy

    # ---- one micro-batch, operation by operation ----

    def record_lifetimes(self, module: nn.Module) -> None:
        """Has the lifetimes of all tensors recorded, too, in the step of the recorded micro-batch.

        All saved tensors are kept on the device in that step.

        Raises:
            ValueError: model states are offloaded, so that weights and states are not tensors of the device.
        """
        if self._states is not None:
            raise ValueError(
                "Lifetimes of tensors are measured with all weights and optimizer states on the GPU, and this training "
                "offloads them. Set `states='gpu'`, or trace the step without memory: `lightning-ssd profile RECIPE`."
            )
        self._module = module

    def begin_recording(self, checkpointed: Mapping[nn.Module, UnitProof] | None = None) -> None:
        """Records the next forward and its backward.

        Args:
            checkpointed: modules of units that are checkpointed meanwhile, and while recomputed tensors are compared,
                each with the proof that it may be.
        """
        self._checkpointed = checkpointed or {}
        if self._module is not None:
            self._lifetimes = LifetimeRecorder()
            self._lifetimes.register_model(self.units, self._module, self._optimizers)
        units = [unit.modules for unit in self.units]
        mode = TraceMode(units, self._offloader.device, self._lifetimes, self._offloader, checkpointed)
        self._trace_mode = mode
        placement = self._offloader.policy.placement if self._lifetimes is None else KeepAll()
        self._enter_mode(mode, mode.on_saved, mode.on_unpacked, placement)

    def begin_backward(self) -> None:
        """Called between the forward and the backward of every micro-batch."""
        self._begin_launches(None)
        if self._trace_mode is not None and not self._recorded_backward:
            self._recorded_backward = True
            self._trace_mode.begin_backward()

    def end_recording(self) -> None:
        """Called at the end of the recorded micro-batch. Synchronizes the device, and completes `graph`."""
        tracer = self._trace_mode
        self._stop_recording()
        if tracer is not None:
            if self._offloader.device.type == "cuda":
                torch.cuda.synchronize(self._offloader.device)
            tracer.finish()
            self.graph = tracer.graph
            saved = self.graph.saved(self._offloader.min_bytes)
            self.saved = [replace(item, recomputable=item.recomputable and self._allow_recompute) for item in saved]
            if self._lifetimes is not None:
                self._traced = tracer

    def begin_optimizer(self) -> None:
        """Called before each optimizer step, after its backward: records the step's operators for lifetimes."""
        if self._traced is not None and self._lifetimes is not None and self._optimizer_trace is None:
            self._lifetimes.register_model(self.units, None, self._optimizers)
            self._optimizer_trace = OptimizerTrace(self._traced, self._lifetimes)
            self._optimizer_trace.__enter__()

    def end_optimizer(self) -> None:
        """Called at the end of every step: ends the recording of lifetimes."""
        trace, self._optimizer_trace, self._traced = self._optimizer_trace, None, None
        if trace is not None and self._lifetimes is not None:
            trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._lifetimes.register_model(self.units, None, self._optimizers)  # states of a first step
            self._lifetimes.close()

    # ---- one micro-batch in which each recomputable saved tensor is recomputed and compared ----

    def begin_checking(self) -> None:
        """Compares recomputed tensors with the saved ones in the next micro-batch."""
        mode = self._plan_mode = PlanMode([unit.modules for unit in self.units], self._offloader)
        choices: dict[int, Choice] = {item.buffer: "recompute" for item in self.saved if item.recomputable}
        checkpointed = _all_but_first(self.units, self.graph, self._checkpointed)
        mode.schedule = make_schedule(self.graph, self.saved, choices, checkpointed=dict.fromkeys(checkpointed, "keep"))
        mode.checking = True
        self._enter_mode(mode, mode.on_saved, mode.check)

    def end_checking(self) -> None:
        """Called at the end of the checked micro-batch. Tensors that were not proved equal are not recomputed."""
        mode, self._plan_mode = self._plan_mode, None
        if mode is None:
            return
        mode.close()
        self._leave_mode()
        self.saved = _with_proofs(self.graph, self.saved, mode.schedule.checkpointed, mode.proved)

    def _stop_recording(self) -> None:
        tracer, self._trace_mode = self._trace_mode, None
        if tracer is None:
            return
        if self._recorded_backward:
            self._recorded_backward = False
            tracer.end_backward()
        tracer.close()
        self._leave_mode()

    def _enter_mode(
        self,
        mode: UnitDispatchMode,
        on_saved: Callable[[torch.UntypedStorage, SavedStorage], None],
        on_unpacked: Callable[[SavedStorage], None],
        placement: PlacementPolicy | None = None,
    ) -> None:
        """Runs the next forward inside `mode` and active hooks. The other arguments are those of `OffloadPolicy`."""
        policy = self._policy_before = self._offloader.policy
        changes: dict[str, Any] = {} if placement is None else {"placement": placement}
        self._offloader.run(
            replace(
                policy,
                mode=mode,
                on_saved=on_saved,
                on_unpacked=on_unpacked,
                hooks_enabled=True,
                **changes,
            )
        )

    def _leave_mode(self) -> None:
        policy, before = self._offloader.policy, self._policy_before
        placement = before.placement if isinstance(policy.placement, KeepAll) else policy.placement
        enabled = policy.hooks_enabled and before.hooks_enabled
        self._offloader.run(
            replace(
                policy,
                mode=before.mode,
                placement=placement,
                on_saved=None,
                on_unpacked=None,
                hooks_enabled=enabled,
            )
        )

    # ---- ordinary steps ----

    def begin_timing(self) -> None:
        """Times the following steps, and resets the peaks of device memory."""
        if self._memory is not None:
            without_grad = {
                one for unit in self.units for _, one in unit.parameters if one.requires_grad and one.grad is None
            }
            gradient_bytes = sum(one.numel() * one.element_size() for one in without_grad)
            self.resting_bytes = self._memory.allocated() + gradient_bytes
        self._pop_peak()
        self.peak_bytes = self.between_bytes = 0
        self._stepped_before = self._stepped()
        self._between.clear()
        self._ended = None
        self._num_steps = self._num_ahead = 0
        self._launches.clear()
        for index, unit in enumerate(self.units):
            for module in filter(takes_hooks, unit.modules):
                self._removals.append(around_call(module, self._launch_hook(index), _ignore))

    def begin_forward(self, *, of_step: bool) -> None:
        """Called when a timed micro-batch begins; `of_step` is True for the first one of a step."""
        if self._ended is not None and of_step:
            self._num_steps += 1
            self._num_ahead += self._clock.elapsed(self._ended, self._ended) is None
        self.pause()
        self._num_calls.clear()
        self._begin_launches(UnitCall(0, 0))

    def end_backward(self) -> None:
        """Called when the backward of a timed micro-batch has ended."""
        self.peak_bytes = max(self.peak_bytes, self._pop_peak())
        self._ended = self._clock.now()

    def pause(self) -> None:
        """Ends the time between micro-batches, when a micro-batch or a validation begins."""
        if self._ended is not None:
            self._between.append((self._ended, self._clock.now()))
            self._ended = None
            self.between_bytes = max(self.between_bytes, self._pop_peak())

    def resume(self) -> None:
        """Called when a validation has ended, whose peak of device memory is discarded."""
        self._pop_peak()

    def end_timing(self) -> None:
        """Stops timing."""
        self.pause()
        self.peak_bytes = max(self.peak_bytes, self._pop_peak())
        self.stepped = self._stepped().since(self._stepped_before)
        self._unhook()

    def _stepped(self) -> WorkCounter:
        return WorkCounter(0, 0.0) if self._states is None else self._states.steps.work()

    def _launch_hook(self, index: int) -> Callable[[object, object], None]:
        def begin(args: object, kwargs: object) -> None:
            if self._launching is not None:  # not in a backward that recomputes the forward
                self._begin_launches(UnitCall(index, self._num_calls[index]))
                self._num_calls[index] += 1

        return begin

    def _begin_launches(self, unit_call: UnitCall | None) -> None:
        """Ends the launch time of the present call, and begins that of `unit_call`; None: of a backward."""
        now, packed = perf_counter() - self._offloader.offload_seconds, self._offloader.num_packed
        if self._states is not None:
            now -= self._states.weight_wait_seconds
        if self._launching is not None:
            before, begun, packed_before = self._launching
            if unit_call == before:  # the first unit, whose time includes the operations before it
                return
            self._launches[before].append((now - begun, packed - packed_before))
        self._launching = None if unit_call is None else (unit_call, now, packed)

    def _unhook(self) -> None:
        for remove in self._removals:
            remove()
        self._removals.clear()
        self._launching = None

    def _pop_peak(self) -> int:
        """Returns the peak of allocated device memory since the last call, bytes (0 without CUDA)."""
        if self._memory is None:
            return 0
        peak = self._memory.peak()
        self._memory.reset_peak()
        return peak

    def close(self) -> None:
        """Removes all hooks and modes."""
        self._stop_recording()
        self.end_optimizer()
        self.end_checking()
        self._unhook()

    # ---- results ----

    def lifetimes(self, name: str) -> LifetimeProfile:
        """Returns the recorded lifetimes of all tensors, after `profile`, or another wait for the device.

        Raises:
            ValueError: no whole step was recorded, such as with gradient accumulation.
        """
        if self._lifetimes is None or not self._lifetimes.closed:
            raise ValueError(
                "Lifetimes of tensors need a step of one micro-batch that Lightning makes. Set "
                "`accumulate_grad_batches=1`, and `automatic_optimization=True`."
            )
        return self._lifetimes.profile(name, self._clock)

    def name_of(self, unit_call: UnitCall) -> str:
        """Returns the name of a call in profiles and plans."""
        return unit_call_name(self.units[unit_call.unit].name, unit_call.call_index)

    def parts_of(self, unit: Unit) -> Sequence[UnitPart]:
        """Returns the parts of a unit that may be on tiers of their own: one or more."""
        return unit.parts if self._states is None else self._states.parts_of(unit)

    def fixed_placement(self) -> FixedPlacement:
        """Returns the tiers of model states, and how the training steps them."""
        tiers: list[tuple[Tier, Tier]] = []
        for unit_call in calls_of_units(self.units, self.graph):
            parts = self.parts_of(self.units[unit_call.unit])
            # A later call is one part, which has no bytes.
            tiers += [self._tiers(part) for part in (parts if unit_call.call_index == 0 else parts[:1])]
        clip: ClipMode | None = None
        if self._states is not None:
            clip = "speculative" if self._states.speculates else "deferred"
        return FixedPlacement(tuple(weights for weights, _ in tiers), tuple(states for _, states in tiers), clip=clip)

    def profile(
        self, name: str, *, steps: int, micro_batches: int, samples: int, tokens: int, clip_norm: bool
    ) -> ModelProfile:
        """Returns the profile of the training; the host waits for the device.

        Args:
            micro_batches: micro-batches per step.
            samples: samples per micro-batch.
            tokens: tokens per micro-batch.
            clip_norm: whether gradients are clipped by their global norm, or scaled by a loss scaler.
        """
        if self._offloader.device.type == "cuda":
            torch.cuda.synchronize(self._offloader.device)
        launches = self._launch_seconds(measure_host_overhead(self._offloader.device))
        units = unit_profiles(
            self.units,
            self.graph,
            self.saved,
            launches,
            self._part_profiles,
            allow_recompute=self._allow_recompute,
        )
        between = sum(self._clock.elapsed(start, end) or 0.0 for start, end in self._between) / max(1, steps)
        offloaded = 0
        if self._states is not None:
            stepped = (flat for flat, store in self._states.stores.items() if store.layout.steps)
            offloaded = sum(item.numel for flat in stepped for item in flat.param_views)
        return ModelProfile(
            name,
            units,
            micro_batches,
            samples,
            tokens,
            clip_norm,
            between,
            offloaded,
            param_budget_bytes=None if self._states is None else self._states.nbytes.device,
            synchronizes=2 * self._num_ahead <= self._num_steps,
            shares_gradients=self._states is not None and self._states.shares_gradients,
            largest_tensor_bytes=self.graph.transients.largest,
            step_workspace=step_workspace(self._optimizers, self._offloader.device),
        )

    def _launch_seconds(self, overhead: HostOverhead) -> Mapping[UnitCall, float]:
        """Returns the host seconds to launch the forward of each unit call, without the overhead of a plan.

        If hooks have packed fewer tensors than the call saves, and the call may be checkpointed, it was. The seconds
        are those with the unit's weights on the GPU.
        """
        counts = Counter(operation.unit_call for operation in self.graph.operations)
        num_saved = Counter(item.unit_call for item in self.saved)
        seconds: dict[UnitCall, float] = {}
        per_operation = []
        issued = 0
        for unit_call, count in counts.items():
            total, packed = min(self._launches.get(unit_call, [(0.0, 0)]))
            added = overhead.pack * min(packed, num_saved[unit_call])
            if packed < num_saved[unit_call] and unit_call in self.graph.proofs:
                added += overhead.checkpoint * num_saved[unit_call]
            seconds[unit_call] = total - min(total / 2, added)
            if any(self._tiers(part)[0] != "gpu" for part in self.parts_of(self.units[unit_call.unit])):
                seconds[unit_call] /= OFFLOADED_LAUNCH
            if issued < LAUNCH_QUEUE:
                per_operation.append(seconds[unit_call] / count)
            issued += count
        # In a call with more time per operation than the first calls, the host waited for room in the launch queue.
        usual = statistics.median(per_operation) if per_operation else 0.0
        return {unit_call: min(seconds[unit_call], usual * counts[unit_call]) for unit_call in seconds}

    def _part_profiles(self, unit: Unit) -> list[PartProfile]:
        """Returns the profiles of a unit's parts."""
        return [PartProfile(part.name, *self._state_bytes(part)) for part in self.parts_of(unit)]

    def _state_bytes(self, part: UnitPart) -> tuple[int, int, int, int, int, int, bool]:
        """Returns the trained parameters, bytes of weights, gradients, and optimizer states (read, written, more on the
        device), and whether weights on the device are cast."""
        trained = weights = gradients = states = more = 0
        casts = False
        stores = {} if self._states is None else self._states.stores
        owned = {parameter for _, parameter in part.parameters}
        for flat, store in stores.items():
            members = {item.parameter for item in flat.param_views} & owned
            if members:
                owned -= members
                trained += sum(item.numel for item in flat.param_views) if store.layout.steps else 0
                weights += flat.nbytes
                gradients += store.layout.gradient_bytes
                states += store.layout.opt_state_bytes
                more += store.layout.resident_extra_bytes
                casts |= flat.mixed
        masters = {} if self._states is None else self._states.masters
        in_memory = states_in_memory(self._optimizers)
        for parameter in owned:
            weights += parameter.numel() * parameter.element_size()
            if parameter.requires_grad:
                trained += parameter.numel()
                master = masters.get(parameter)
                stepped = parameter if master is None else master
                gradients += stepped.numel() * stepped.element_size()
                states += 0 if master is None else master.numel() * master.element_size()
                own = (value for value in in_memory.get(stepped, {}).values() if isinstance(value, Tensor))
                states += sum(count_stored_bytes(value) for value in own if value.numel() > 1)
        return trained, weights, gradients, states, states, more, casts

    def _tiers(self, part: UnitPart) -> tuple[Tier, Tier]:
        """Returns the tiers (weights, optimizer states) of most bytes of a part."""
        if self._states is None:
            return "gpu", "gpu"
        nbytes: dict[tuple[Tier, Tier], int] = defaultdict(int)
        owned = {parameter for _, parameter in part.parameters}
        for flat, store in self._states.stores.items():
            if any(item.parameter in owned for item in flat.param_views):
                nbytes[store.buffers.tiers] += flat.nbytes + store.layout.opt_state_bytes
        return max(nbytes, key=lambda tiers: nbytes[tiers]) if nbytes else ("gpu", "gpu")


def _all_but_first(
    units: Sequence[Unit], graph: ForwardGraph, checkpointed: Collection[nn.Module]
) -> frozenset[UnitCall]:
    """Returns the calls of units that may be checkpointed, without the first one of each kind."""
    seen: set[Hashable] = set()
    calls = []
    for call in graph.checkpoint_bytes():
        module = units[call.unit].modules[0]
        if module in checkpointed:
            kind = kind_of(module)
            if kind in seen:
                calls.append(call)
            seen.add(kind)
    return frozenset(calls)


def _with_proofs(
    graph: ForwardGraph, saved: Sequence[Saved], unchecked: Collection[UnitCall], proved: Collection[int]
) -> list[Saved]:
    """Returns saved buffers, which are recomputable only if a recomputed one was equal.

    Those of `unchecked` calls were not compared. They are recomputable if all compared ones were equal that the same
    operators compute.
    """

    def computation(item: Saved) -> Hashable:
        return item.name, item.nbytes, tuple(graph.operations[index].func for index in item.recompute_ops)

    equal: dict[Hashable, bool] = {}
    for item in saved:
        if item.recomputable and item.unit_call not in unchecked:
            equal[computation(item)] = equal.get(computation(item), True) and item.buffer in proved
    found = []
    for item in saved:
        checked = item.unit_call not in unchecked
        is_equal = item.buffer in proved if checked else equal.get(computation(item), False)
        found.append(replace(item, recomputable=item.recomputable and is_equal))
    return found


def _ignore(output: object) -> None:
    """Called after a unit's forward, whose end is not timed."""


def count_samples(batch: Any) -> tuple[int, int]:
    """Returns the samples and tokens of a batch.

    Samples are the rows of its first tensor; tokens are the elements of that tensor if it is a matrix of integers, else
    the samples.
    """
    for value in internals.tree_leaves(batch):
        if isinstance(value, Tensor) and value.dim():
            rows = value.size(0)  # a nested tensor has no `shape`
            return rows, value.numel() if not value.is_floating_point() and value.dim() == 2 else rows
    return 1, 1


def step_workspace(optimizers: Iterable[Optimizer], device: torch.device) -> int:
    """Returns the temporary bytes per parameter of an optimizer step on the device.

    Torch's foreach implementations, the default on a GPU, allocate a tensor for each parameter at the same time, such
    as the square roots of Adam's second moments.
    """

    def allocates(group: Mapping[str, Any]) -> bool:
        foreach = group.get("foreach", False)
        return not group.get("fused") and (device.type == "cuda" if foreach is None else bool(foreach))

    return torch.float32.itemsize if any(allocates(group) for one in optimizers for group in one.param_groups) else 0
