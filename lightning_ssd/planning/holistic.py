"""The default planner: plans activations and model states together, by simulated time within every tier's memory.

The search improves one best point, within a budget of simulations (`simulator`), and then the fastest plan with units
that are kept or freed as a whole. `saved_groups` makes the plan of a point, and `whole_units` those plans.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import inf

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.papers import plan_fuyou, plan_lohan, plan_ssdtrain
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.saved_groups import (
    INPUT,
    FixedPlacement,
    SavedGroup,
    build_plan,
    default_plan,
    default_window,
    host_then_ssd,
    saved_groups,
)
from lightning_ssd.planning.simulator import Prediction, count_steps, remap_seconds, simulate
from lightning_ssd.planning.stages import cut_stages
from lightning_ssd.planning.unit_lifetimes import plan_units
from lightning_ssd.planning.whole_units import (
    checkpoint,
    checkpoint_all,
    keep_all,
    keep_most,
    offload_inputs,
)
from lightning_ssd.types import ClipMode, InputChoice, Tier

RESIDENT_SHARES = (0.0, 1 / 3, 2 / 3, 1.0)
"""Tried numbers of resident parts / number of those that fit on the GPU."""

PAPER_PLANNERS = (plan_ssdtrain, plan_fuyou, plan_lohan)
"""Planners whose plans are candidates, besides Teraio's."""

N_SPREAD = 3
"""Number of intervals between the simulated search points from saving the least to saving everything."""

SIMULATED_STAGES = 8000
"""Simulated stages, over the plans of all points, steps and micro-batches, after which no more points are tried, if a
plan fits."""

LEAST_SIMULATIONS = 40
"""Plans with other numbers of parts on the GPU, and other windows, that are simulated in any case before the search
ends. In models of few stages, there are as many as points."""

MARGIN = 0.005
"""Share of a tier's budget that is left unused after a plan exceeded the budget and was reduced."""

MAX_TRIES = 3
"""Most simulations of a search point that exceeds the budgets, each with less memory."""

TIE = 1 + 1e-9
"""Factor on a step's time up to which another step is as fast: rounding depends on the order of additions."""

SAME_EXCESS = 0.02
"""Difference of the bytes by which two plans exceed the GPU's memory / that memory, up to which the faster plan is
chosen if none fits. Predictions are no more precise, and the plan of least excess may have every tensor on slow
drives."""

CAUTION = 1.5
"""Factor on the host's overhead of a plan, with which plans are compared. The overhead is measured on an idle host. In
a training it is larger, and varies: a plan that intercepts all units, and that launches bound, was predicted at 0.525 s
a step and took 0.654 s (Qwen2.5 of 1.5B in 24 GiB with offloaded states, H200)."""

LAUNCH_CAUTION = 0.85
"""Factor on the host's launch times with which plans are compared. Measured launch times vary, because the CPU steps
the optimizer beside the forward. If they are overestimated, the plan checkpoints fewer units, so that fewer states fit
on the GPU: the step takes up to 20 % longer. If they are underestimated, it takes up to 10 % longer (GPT-2 XL,
simulated)."""

PLAIN_GAIN = 0.05
"""A plan is chosen before the fastest one if it interferes less (`_Considered.interference`), and the fastest one saves
less than this share of its step. Predictions of plans that interfere are off by 4 % and more. Of the seconds in which
the allocator maps the largest tensor anew, half count against a plan: 10 to 100 ms were measured for 4 to 5 GB."""

CLOSE_ENOUGH = 1.001
"""Factor on a step's time up to which another step is about as fast. Changes of search points end when a step is about
as fast as one without stalls and recomputation."""


@dataclass(frozen=True)
class SearchPoint:
    """A plan, described by the few numbers over which the search runs.

    Attributes:
        saved: number of groups that are not recomputed, in falling order of recomputation seconds per byte.
        resident: number of parts of units on the GPU, counted from the first.
        activations_first: whether activations get host memory before weights and states do.
        window_bytes: `window_bytes` of the plan.
        gpu_bytes: GPU bytes for resident parts and kept activations.
        host_bytes: host bytes for weights, states and activations.
        checkpoints: whether the first units that may be are checkpointed, as many as have to be for all else that is
            saved to be kept. Their groups are not among the saved ones.
    """

    saved: int
    resident: int
    activations_first: bool
    window_bytes: int
    gpu_bytes: int
    host_bytes: int
    checkpoints: bool = False


def plan_holistic(
    model: ModelProfile,
    hardware: HardwareProfile,
    fixed: FixedPlacement | None = None,
    clip: ClipMode | None = None,
) -> Plan:
    """Returns the fastest plan, by simulation, among those that fit, or, if none does, among those of least excess.

    Steps of offloaded states count as longer (`Prediction.cost_seconds`). Plans are simulated with `CAUTION` and
    `LAUNCH_CAUTION`, so that they are fast on a busy host and a quick one, too.

    The papers' plans are simulated first, except Teraio's: its search takes the longest, and ends early if faster plans
    are known. Further plans fill the memory that the plan of least memory leaves unused: the GPU with parts of units
    and kept activations, the host with weights, states and swapped activations. From the fastest plan, others follow in
    which each unit keeps or frees all of its saved tensors. A plan that interferes less with the training is chosen
    before a faster one, unless that one saves `PLAIN_GAIN` of the step.

    Args:
        model: profile of the model.
        hardware: profile of the machine.
        fixed: tiers of model states; None: they are planned, too.
        clip: clip mode of the training, whatever the plan; None: that of `fixed`, or the faster one.
    """
    search = _Search(model.with_launches(LAUNCH_CAUTION), hardware.with_host_overhead(CAUTION), fixed, clip)
    search.search()
    return search.choose()


def min_memory_plan(model: ModelProfile, window_bytes: int | None = 0, ssd_bytes: float = inf) -> Plan:
    """Returns the plan of least memory: tensors that can't be recomputed and states are on SSDs, the others recomputed.

    Args:
        model: profile of the model.
        window_bytes: `window_bytes` of the plan; 0: one transfer at a time; None: `default_window`.
        ssd_bytes: bytes of SSD space. If the tensors have no room in it, they all are in host memory; so is each part's
            states or weights that have none.
    """
    certain = [item for item in saved_groups(model) if item.seconds is None]
    left = ssd_bytes - sum(item.nbytes for item in certain)
    where: InputChoice = "ssd" if left >= 0 else "host"
    left = left if left >= 0 else ssd_bytes
    saved: dict[tuple[int, int], InputChoice] = {item.key: where for item in certain}
    weights: list[Tier] = []
    states: list[Tier] = []
    for _, part in model.parts:
        for tiers, nbytes in ((states, part.state_bytes_read), (weights, part.weight_bytes)):
            tiers.append("ssd" if nbytes <= left else "host")
            left -= nbytes if tiers[-1] == "ssd" else 0
    return build_plan(model, weights=weights, states=states, saved=saved, window_bytes=window_bytes)


@dataclass(frozen=True)
class _Considered:
    """A simulated plan.

    Attributes:
        score: excess bytes and `Prediction.cost_seconds`, to be minimized in this order.
        wear: bytes written to SSDs, and seconds of copies and compute, to be minimized among plans of equal score.
        plan: the plan.
        prediction: its prediction.
    """

    score: tuple[float, float]
    wear: tuple[int, float]
    plan: Plan
    prediction: Prediction

    @property
    def interference(self) -> int:
        """0: each unit keeps all of its saved tensors on the GPU, or is checkpointed and keeps its input there. 1:
        inputs of checkpointed units are also offloaded. 2: operations are intercepted."""
        if any(self.plan.intercepted):
            return 2
        return int(any(unit.input != "keep" for unit in self.plan.units.values()))


class _Search:
    """The search: its points, the simulated plans, and the numbers that all points share."""

    def __init__(
        self, model: ModelProfile, hardware: HardwareProfile, fixed: FixedPlacement | None, clip: ClipMode | None
    ) -> None:
        self.model = model
        self.parts = [part for _, part in model.parts]
        self.hardware = hardware
        self.fixed = fixed
        self.clip = clip if fixed is None or clip is not None else fixed.clip
        self._window = default_window(model, None if fixed is None else fixed.weights)
        min_memory = min_memory_plan(model, window_bytes=self._window, ssd_bytes=hardware.ssd_bytes)
        min_memory = (min_memory if fixed is None else fixed.apply(model, min_memory)).clipped(self.clip)
        # Tensors with the most recomputation seconds per byte are saved first, after those that can't be recomputed.
        tensors = saved_groups(model)
        self.tensors = sorted(tensors, key=_seconds_per_byte, reverse=True)
        self._num_certain = sum(item.seconds is None for item in tensors)
        self._checkpointable = [i for i, unit in enumerate(model.units) if unit.checkpoint_bytes is not None]
        """Indices of the units that may be checkpointed."""
        freed = (model.units[i].saved_bytes - (model.units[i].checkpoint_bytes or 0) for i in self._checkpointable)
        self._freed = [0, *accumulate(freed)]
        """Bytes that are freed if none of them is checkpointed, the first one, the first two, ..."""
        self._bytes = [0, *accumulate(item.nbytes for item in self.tensors)]
        start = simulate(model, hardware, min_memory)
        self._considered = [_Considered(_score(start, hardware), _wear(start), min_memory, start)]
        self.fastest = self._considered[0]
        self._gpu_bytes = min(hardware.gpu_bytes, hardware.gpu_cache_bytes - model.largest_tensor_bytes)
        """Bytes of the GPU that the search fills. The largest tensor has room besides, if possible: `remap_seconds`."""
        if start.gpu_peak_bytes > self._gpu_bytes:
            self._gpu_bytes = hardware.gpu_bytes
        self._gpu_left = max(0, self._gpu_bytes - start.gpu_peak_bytes)
        self._host_left = max(0, hardware.host_bytes - start.host_peak_bytes)
        self._simulations = 0
        """Number of predictions for points. Those that were made before count again."""
        self._predictions: dict[str, Prediction] = {}
        """Predictions of considered plans, by the plan's text: several points may have the same plan."""
        self._tried: set[SearchPoint] = set()
        stages = len(cut_stages(model, min_memory)) * model.micro_batches * count_steps(model, min_memory)
        self._most_simulations = SIMULATED_STAGES // stages
        # Excess bytes and step seconds of the best point, the point, and its unused bytes of GPU and host memory.
        self._best_point: tuple[tuple[float, float], SearchPoint, tuple[int, int]] | None = None
        self._ideal_seconds = model.forward_seconds + model.backward_seconds
        """Seconds of a micro-batch that waits for nothing."""

    def search(self) -> None:
        """Searches among the papers' plans, all points, and plans that keep or free whole units."""
        self.consider_papers()
        for point in (*self.checkpointing(), *self.spread()):
            if self._best_point is None or not self.is_over():
                self.try_point(point)
        self.refine()
        self.improve()

    def improve(self) -> None:
        """Simulates Teraio's plans, and those in which few units free memory, with other numbers of first parts on the
        GPU and other windows of prefetches.

        Parts may take the room of the largest tensor: the states of a large embedding save more time than mapping that
        tensor takes.
        """
        most_seconds = inf if self.fastest.score[0] else CLOSE_ENOUGH * self.fastest.score[1]
        self.consider(plan_units(self.model, self.hardware, self.fixed, most_seconds))
        self._keep_most_units(self.fastest.plan)
        if self.fastest.score[0]:  # one transfer at a time needs the least memory
            self._keep_most_units(replace(self.fastest.plan, window_bytes=0))
        most = self._count_resident(self._gpu_left + self.hardware.gpu_bytes - self._gpu_bytes)
        counts = sorted({*(round(share * most) for share in RESIDENT_SHARES), self._most_beside_checkpoints()})
        for clip, resident in product(("deferred", "speculative") if self.clip is None else (self.clip,), counts):
            self._keep_most_units(self._with_resident(self.fastest.plan.clipped(clip), resident))
        step = max(1, len(self.parts) // 8) if self.fixed is None else 1
        last = len(self._predictions) + max(self._most_simulations, LEAST_SIMULATIONS)
        while step and len(self._predictions) < last:
            fastest, plan = self.fastest, self.fastest.plan
            for window_bytes in (plan.window_bytes // 2, max(2 * plan.window_bytes, self._window // 8)):
                changed = replace(plan, window_bytes=window_bytes)
                self.consider(changed)
                self._keep_most_units(changed)
            count = [*(part.offloaded for part in plan.parts(self.model)), True].index(True)
            narrower = replace(plan, window_bytes=plan.window_bytes // 2)
            for base, resident in ((plan, count + step), (plan, count - step), (narrower, count + step)):
                resident = min(max(resident, 0), len(self.parts))
                self._keep_most_units(self._with_resident(base, resident))
            if self.fastest.score >= (fastest.score[0], fastest.score[1] / CLOSE_ENOUGH):
                step = 1 if 1 < step < 3 else step // 3

    def _most_beside_checkpoints(self) -> int:
        """Returns the number of first parts that have room on the GPU beside the units' checkpoints, if all units are
        checkpointed that may be."""
        freeing = None if self.fixed is not None else checkpoint_all(self.model, keep_all(self.fastest.plan))
        if freeing is None:
            return 0
        return bisect_left(
            range(1, len(self.parts) + 1),
            True,
            key=lambda count: not self._has_room(self._with_resident(freeing, count)),
        )

    def _with_resident(self, plan: Plan, resident: int) -> Plan:
        """Returns a plan with that number of first parts on the GPU, and the others as the best point places them."""
        assert self._best_point is not None
        return plan.placed(self.model, self.plan(replace(self._best_point[1], resident=resident)).parts(self.model))

    def consider_papers(self) -> None:
        """Simulates the plan that checkpoints all units that may be, as a user's `gradient_checkpointing_enable()`
        does, the plans of least memory, and the papers' plans except Teraio's.

        Plans of least memory are also made without SSDs, with units checkpointed that may be, with inputs of units
        kept, and with all tensors offloaded.
        """
        on_ssd = min_memory_plan(self.model, ssd_bytes=self.hardware.ssd_bytes)
        in_host = [min_memory_plan(self.model, window, ssd_bytes=0) for window in (self._window, 0)]
        checkpointed = (offload_inputs(checkpoint_all(self.model, plan) or plan) for plan in in_host)
        of_papers = (planner(self.model, self.hardware) for planner in PAPER_PLANNERS)
        kept = keep_all(in_host[0])
        as_by_user = checkpoint_all(self.model, kept) or kept
        for plan in (as_by_user, on_ssd, *in_host, *checkpointed, *self._without_checkpoints(in_host[1]), *of_papers):
            self.consider(plan if self.fixed is None else self.fixed.apply(self.model, plan))

    def consider(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan, which may be chosen from now on."""
        plan = plan.clipped(self.clip)  # the training steps in its own mode, whatever the plan
        prediction = self._predict(plan)
        considered = _Considered(_score(prediction, self.hardware), _wear(prediction), plan, prediction)
        self._considered.append(considered)
        if considered.score < self.fastest.score:
            self.fastest = considered
        return prediction

    def _consider_with_room(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan, which may be chosen if the largest tensor has room or none fits."""
        if self.fastest.score[0] or self._has_room(plan):
            return self.consider(plan)
        return self._predict(plan.clipped(self.clip))

    def _predict(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan, which is simulated the first time."""
        text = repr(plan)
        if text not in self._predictions:
            self._predictions[text] = simulate(self.model, self.hardware, plan)
        return self._predictions[text]

    def choose(self) -> Plan:
        """Returns the preferred plan, or an equally fast one with fewer transfers.

        If no plan fits, it is the fastest one of about the least excess.
        """
        if self.fastest.score[0]:
            least = self.fastest.prediction
            near = (item for item in self._considered if _exceeds_no_more(item.prediction, least, self.hardware))
            return min(near, key=lambda item: (item.score[1], item.wear)).plan
        most_seconds = self.fastest.score[1] / (1 - PLAIN_GAIN)
        fitting = (item for item in self._considered if not item.score[0])
        fast = [item for item in fitting if self._least_seconds(item) <= most_seconds]
        least_interference = min(item.interference for item in fast)
        preferred = [item for item in fast if item.interference == least_interference]
        most_seconds = TIE * min(item.score[1] for item in preferred)
        return min((item for item in preferred if item.score[1] <= most_seconds), key=lambda item: item.wear).plan

    def _least_seconds(self, item: _Considered) -> float:
        """Returns the seconds of a step, with half of those in which the largest tensor's memory is mapped anew."""
        return item.score[1] - remap_seconds(self.model, self.hardware, item.prediction.gpu_peak_bytes) / 2

    def try_point(self, point: SearchPoint) -> bool:
        """Simulates a point, with less memory again if its plan exceeds a budget. Returns whether it is the best so
        far.
        """
        better = False
        margins = MARGIN * self.hardware.gpu_bytes, MARGIN * self.hardware.host_bytes
        for _ in range(MAX_TRIES):
            if point in self._tried:
                break
            self._tried.add(point)
            self._simulations += 1
            prediction = self._consider_with_room(self.plan(point))
            # Points are compared by the step alone: the search reaches those with all parts on the GPU through points
            # with some of them there, which cost more.
            score = float(prediction.excess_bytes(self.hardware)), prediction.step_seconds
            gpu = self._gpu_bytes - prediction.gpu_peak_bytes
            host = self.hardware.host_bytes - prediction.host_peak_bytes
            if self._best_point is None or score < self._best_point[0]:
                unused = max(0, int(gpu - margins[0])), max(0, int(host - margins[1]))
                self._best_point = score, point, unused
                better = True
            if gpu >= 0 and host >= 0:
                break
            less_gpu = int(margins[0] - gpu) if gpu < 0 else 0
            less_host = int(margins[1] - host) if host < 0 else 0
            point = self._with_memory(point, point.gpu_bytes - less_gpu, point.host_bytes - less_host)
        return better

    def spread(self) -> list[SearchPoint]:
        """Returns points from saving the least to saving everything, with half of the parts that fit on the GPU."""
        resident = self._count_resident(self._gpu_left) // 2
        least, most = self._bytes[self._num_certain], self._bytes[-1]
        amounts = (least + (most - least) * step / N_SPREAD for step in range(N_SPREAD + 1))
        counts = (max(self._num_certain, bisect_right(self._bytes, amount) - 1) for amount in amounts)
        return [self._point(saved, resident) for saved in counts]

    def checkpointing(self) -> list[SearchPoint]:
        """Returns points that checkpoint units, with all, half, and none of the parts that fit on the GPU."""
        if not self._checkpointable:
            return []
        most = self._count_resident(self._gpu_left)
        points = (self._point(len(self.tensors), resident) for resident in (most, most // 2, 0))
        return list(dict.fromkeys(replace(point, checkpoints=True) for point in points))

    def _point(self, saved: int, resident: int) -> SearchPoint:
        """Returns a point with the memory that the plan of least memory leaves unused."""
        return SearchPoint(saved, resident, False, self._window, self._gpu_left, self._host_left)

    def is_over(self) -> bool:
        """Returns True if the limit of simulations is reached and a plan that fits was found."""
        return self._simulations >= self._most_simulations and self.fastest.score[0] == 0

    def refine(self) -> None:
        """Improves the best point by changes of one of its numbers, in ever smaller steps."""
        amount, parts = max(1, len(self.tensors) // 8), max(1, len(self.parts) // 8)
        ideal = self.model.micro_batches * self._ideal_seconds
        while self._best_point is not None:
            for point in list(self._neighbours(*self._best_point[1:], amount, parts)):
                if self.is_over() or self.fastest.score <= (0.0, CLOSE_ENOUGH * ideal):
                    return
                if self.try_point(point):
                    break
            else:
                if amount == parts == 1:
                    return
                amount, parts = max(1, amount // 2), max(1, parts // 2)

    def _keep_most_units(self, base: Plan) -> None:
        """Simulates plans with the placement of `base`, in which few units free memory: the others run as in plain
        training.

        Units are checkpointed. If none may be, they keep their input and recompute the rest, or offload all.
        """
        kept = keep_all(base)
        least_seconds = max(self.consider(kept).busy_seconds.values())
        if self._has_room(kept) or self.fastest.score <= (0.0, least_seconds):
            return
        freeing = checkpoint_all(self.model, kept)
        if freeing is None:
            self._consider_with_room(base)
            for freeing in self._without_checkpoints(base):
                if self._has_room(freeing):
                    self.consider(keep_most(freeing, self._has_room))
                    break
        else:
            plan = keep_most(freeing, self._has_room) if self._has_room(freeing) else freeing
            peak = self.consider(plan).gpu_peak_bytes
            if peak + self.model.largest_tensor_bytes > self.hardware.gpu_cache_bytes:
                self.consider(freeing)
                self.consider(offload_inputs(freeing))

    def _without_checkpoints(self, base: Plan) -> list[Plan]:
        """Returns the plans that place model states as `base` does, and free memory in all units without checkpoints:
        they keep inputs and recompute the rest, or offload all."""
        least = min_memory_plan(self.model, ssd_bytes=0)
        keeping_inputs = {name: replace(unit, input="keep") for name, unit in least.units.items()}
        placement = FixedPlacement.of(self.model, base)
        offloading = default_plan(self.model, placement, {"host": self.model.saved_bytes}, 0)
        parts = base.parts(self.model)
        return [replace(base, units=one).placed(self.model, parts) for one in (keeping_inputs, offloading.units)]

    def _has_room(self, plan: Plan) -> bool:
        return self._predict(plan.clipped(self.clip)).gpu_peak_bytes <= self._gpu_bytes

    def _neighbours(
        self, point: SearchPoint, unused: tuple[int, int], amount: int, parts: int
    ) -> Iterator[SearchPoint]:
        # The budgets are the bytes that the plan of least memory leaves unused. This point may leave more unused.
        gpu_bytes, host_bytes = point.gpu_bytes + unused[0], point.host_bytes + unused[1]
        point = replace(point, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
        yield point
        yield replace(point, activations_first=not point.activations_first)
        for resident in (point.resident + parts, point.resident - parts):
            yield replace(point, resident=min(max(resident, 0), self._count_resident(gpu_bytes)))
        for saved in (point.saved - amount, point.saved + amount):
            yield replace(point, saved=min(max(saved, self._num_certain), len(self.tensors)))
        for window_bytes in () if point.checkpoints else (2 * point.window_bytes, point.window_bytes // 2):
            yield replace(point, window_bytes=window_bytes)

    def plan(self, point: SearchPoint) -> Plan:
        """Returns the plan of a point."""
        host = point.host_bytes
        if self.fixed is not None and self.fixed.host_limit is not None:
            host = min(host, self.fixed.host_limit)
        # Units without parameters of their own, such as the second call of a tied one, are resident.
        weights: list[Tier] = ["ssd" if part.weight_bytes or part.state_bytes_read else "gpu" for part in self.parts]
        states = list(weights)
        if self.fixed is not None:
            weights, states = list(self.fixed.weights), list(self.fixed.states)
        for index in range(point.resident):
            weights[index] = states[index] = "gpu"
        checkpointed, kept, swapped = self._keep(point)
        saved: dict[tuple[int, int], InputChoice] = {tensor.key: "keep" for tensor in kept}

        def place_activations(host: int) -> int:
            placed, left = host_then_ssd(swapped, host)
            saved.update(placed)
            return left

        def place_states(host: int) -> int:
            # Weights first: a byte of weights in host memory saves three or more SSD transfers a step, of states two.
            if self.fixed is not None:
                return host
            for tiers, size in ((weights, "weight_bytes"), (states, "state_bytes_read")):
                for index, part in enumerate(self.parts):
                    nbytes = getattr(part, size)
                    if tiers[index] == "ssd" and nbytes <= host:
                        tiers[index] = "host"
                        host -= nbytes
            return host

        placers: tuple[Callable[[int], int], ...] = (place_states, place_activations)
        for place_in_host in reversed(placers) if point.activations_first else placers:
            host = place_in_host(host)
        plan = build_plan(self.model, weights=weights, states=states, saved=saved, window_bytes=point.window_bytes)
        plan = checkpoint(plan, [self.model.units[index].name for index in checkpointed])
        return plan if self.fixed is None else self.fixed.apply(self.model, plan)

    def _keep(self, point: SearchPoint) -> tuple[Sequence[int], list[SavedGroup], list[SavedGroup]]:
        """Returns the indices of the checkpointed units of a point, the kept tensors, and the swapped tensors.

        The last saved tensors are read first in backward: they are kept. The first ones are offloaded to SSDs.
        """
        left = point.gpu_bytes - sum(part.resident_bytes for part in self.parts[: point.resident])
        count = bisect_left(self._freed, self._bytes[point.saved] - left) if point.checkpoints else 0
        checkpointed = self._checkpointable[:count]
        for index in checkpointed:
            unit = self.model.units[index]
            left -= unit.input_bytes + (unit.checkpoint_bytes or 0)
        kept, swapped = [], []
        for tensor in sorted(self.tensors[: point.saved], key=lambda tensor: tensor.key, reverse=True):
            if tensor.unit in checkpointed:
                continue
            # The output of a checkpointed unit is kept, so that the next unit need not be intercepted for it.
            if tensor.nbytes <= left or (tensor.operator == INPUT and tensor.unit - 1 in checkpointed):
                kept.append(tensor)
                left -= tensor.nbytes
            else:
                swapped.append(tensor)
        return checkpointed, kept, swapped

    def _with_memory(self, point: SearchPoint, gpu_bytes: int, host_bytes: int) -> SearchPoint:
        gpu, host = max(0, gpu_bytes), max(0, host_bytes)
        resident = min(point.resident, self._count_resident(gpu))
        return replace(point, resident=resident, gpu_bytes=gpu, host_bytes=host)

    def _count_resident(self, gpu_bytes: int) -> int:
        """Returns the number of parts that fit into `gpu_bytes`, 0 if the placement of model states is fixed."""
        count = 0
        if self.fixed is not None:
            return count
        while count < len(self.parts) and (needed := self.parts[count].resident_bytes) <= gpu_bytes:
            gpu_bytes -= needed
            count += 1
        return count


def _exceeds_no_more(one: Prediction, other: Prediction, hardware: HardwareProfile) -> bool:
    """Returns whether a plan that does not fit exceeds limits by no more than another such plan, or by little more.

    That is up to `SAME_EXCESS` of the GPU's memory more on the GPU, and no more elsewhere.
    """
    excess = one.excess_bytes(hardware), other.excess_bytes(hardware)
    on_gpu = [max(0, prediction.gpu_peak_bytes - hardware.gpu_bytes) for prediction in (one, other)]
    elsewhere = excess[0] - on_gpu[0], excess[1] - on_gpu[1]
    return elsewhere[0] <= elsewhere[1] and on_gpu[0] <= on_gpu[1] + SAME_EXCESS * hardware.gpu_bytes


def _score(prediction: Prediction, hardware: HardwareProfile) -> tuple[float, float]:
    """Returns the score to minimize: excess bytes, then the seconds by which plans are compared."""
    return float(prediction.excess_bytes(hardware)), prediction.cost_seconds


def _wear(prediction: Prediction) -> tuple[int, float]:
    """Returns bytes written to SSDs, and seconds of copies and of GPU compute, per step."""
    return prediction.ssd_written_bytes, sum(
        prediction.busy_seconds[name] for name in ("copy_in", "copy_out", "compute")
    )


def _seconds_per_byte(tensor: SavedGroup) -> float:
    return float("inf") if tensor.seconds is None else tensor.seconds / tensor.nbytes
