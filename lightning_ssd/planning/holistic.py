"""The default planner: plans activations and model states together, by simulated time within every tier's memory.

The search improves one best point, within a budget of simulations (`simulator`); `saved_groups` makes the plan of a
point, and `few_launches` makes plans with little host time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import inf

from lightning_ssd.planning.few_launches import (
    checkpoint,
    checkpoint_all,
    free_tensors,
    free_units,
    keep_all,
    offload_inputs,
)
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.papers import plan_fuyou, plan_lohan, plan_ssdtrain
from lightning_ssd.planning.phase import iteration_seconds, step_phases
from lightning_ssd.planning.plan import PartPlan, Plan
from lightning_ssd.planning.saved_groups import (
    INPUT,
    FixedPlacement,
    SavedGroup,
    build_plan,
    default_window,
    host_then_ssd,
    saved_groups,
)
from lightning_ssd.planning.simulator import Prediction, count_steps, simulate
from lightning_ssd.planning.stages import cut_stages
from lightning_ssd.planning.unit_lifetimes import rated_plan
from lightning_ssd.types import ClipMode, InputChoice, Tier

GPU_SHARES = tuple(step / 8 for step in range(9))
"""Tried shares of the free GPU memory for resident parts; the rest is for kept activations."""

NUM_AMOUNTS = 32
"""Number of amounts of saved activations for which the bound is computed."""

PAPER_PLANNERS = (plan_ssdtrain, plan_fuyou, plan_lohan)
"""Planners whose plans are candidates, besides Teraio's."""

TOP_K = 3
"""Number of search points with the least bound that are simulated."""

N_SPREAD = 3
"""Number of intervals between the simulated search points from saving the least to saving everything."""

SIMULATED_STAGES = 8000
"""Simulated stages, over all plans, steps and micro-batches, after which no more points are tried, if a plan fits.
Plans with few launches are tried all the same, and those of papers do not count."""

MARGIN = 0.005
"""Share of a tier's budget that is left unused after a plan exceeded the budget and was reduced."""

MAX_TRIES = 3
"""Most simulations of a search point that exceeds the budgets, each with less memory."""

TIE = 1 + 1e-9
"""Relative difference below which two step times are equal: rounding depends on the order of additions."""

DEVICE_WEIGHTS = (0.0, 0.5, 1.0)
"""Tried values of `device_weight` of `free_tensors` and `free_units`."""

LAUNCH_TRIES = 6
"""Most simulations of plans with few launches for a weight, each of which frees more than the one before."""

SAME_EXCESS = 0.02
"""Difference of the bytes by which two plans exceed the GPU's memory / that memory, up to which the faster plan is
chosen if none fits. Predictions are no more precise, and the plan of least excess may have every tensor on slow
drives."""

CAUTION = 1.5
"""Factor on the host's overhead of a plan, with which plans are compared. The overhead is measured on an idle host. In
a training it is larger, and varies: a plan that intercepts all units, and that launches bound, was predicted at 0.525 s
a step and took 0.654 s (Qwen2.5 of 1.5B in 24 GiB with offloaded states, H200)."""

PLAIN_GAIN = 0.05
"""Share of a step by which a plan that intercepts units must be faster than all that intercept none. Those keep all
saved tensors of a unit, or checkpoint it, as a person would write; predictions of others are off by 4 % and more."""

CLOSE_ENOUGH = 1.001
"""Factor on a step's time up to which another step is about as fast. The search ends when a step is about as fast as
one without stalls and recomputation."""


@dataclass(frozen=True)
class SearchPoint:
    """A plan, described by the few numbers over which the search runs.

    Attributes:
        saved: number of groups that are not recomputed, in falling order of recomputation seconds per byte.
        resident: number of parts of units on the GPU, counted from the first.
        activations_first: whether activations get host memory before weights and states do.
        window_bytes: `window_bytes` of the plan.
        clip: clip mode of the plan.
        gpu_bytes: GPU bytes for resident parts and kept activations.
        host_bytes: host bytes for weights, states and activations.
        checkpointed: number of units that are checkpointed, counted from the first that may be. Their groups are not
            among the saved ones.
    """

    saved: int
    resident: int
    activations_first: bool
    window_bytes: int
    clip: ClipMode
    gpu_bytes: int
    host_bytes: int
    checkpointed: int = 0


def plan_holistic(
    model: ModelProfile,
    hardware: HardwareProfile,
    fixed: FixedPlacement | None = None,
    clip: ClipMode | None = None,
) -> Plan:
    """Returns the fastest plan, by simulation, among those that fit, or, if none does, among those of least excess.

    Plans are simulated with `CAUTION`, so that they are fast on a busy host, too.

    The papers' plans, and those that a person would write (keep all, checkpoint every block, SSDTrain's rule), are
    simulated first, except Teraio's: its search takes the longest, and ends early if faster plans are known. Further
    plans fill the memory that the plan of least memory leaves unused: the GPU with parts of units and kept activations,
    the host with weights, states and swapped activations. These plans are ranked by a bound (the time of the busiest
    resource in forward, plus that in backward, as in LoHan and Fuyou), and the best ones are simulated. If the fastest
    plan intercepts units, and is faster by less than `PLAIN_GAIN` than all that intercept none, the fastest of the
    latter is the result.

    If units have parts, the search is made for whole units first, and continued with parts from its best point: units
    are fewer, and their plan is a candidate, so that a division makes no plan slower.

    Args:
        model: profile of the model.
        hardware: profile of the machine.
        fixed: tiers of model states; None: they are planned, too.
        clip: clip mode of the training, whatever the plan; None: that of `fixed`, or the faster one.
    """
    hardware = hardware.with_host_overhead(CAUTION)
    search = _Search(model, hardware, fixed, clip)
    if fixed is not None or model.undivided is model:
        search.search_all()
    else:
        whole = _Search(model.undivided, hardware, None, clip)
        whole.search_all()
        search.continue_from(whole)
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
        score: excess bytes and step seconds, to be minimized in this order.
        wear: bytes written to SSDs, and seconds of copies and of compute, to be minimized among plans of about equal
            score (see `_wear`).
        plan: the plan.
        prediction: its prediction.
    """

    score: tuple[float, float]
    wear: tuple[int, float, float]
    plan: Plan
    prediction: Prediction

    @property
    def is_plain(self) -> bool:
        """Whether the operations of no unit are intercepted."""
        return not any(self.plan.intercepted)


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
        min_memory = min_memory if fixed is None else fixed.apply(model, min_memory)
        # Tensors with the most recomputation seconds per byte are saved first, after those that can't be recomputed.
        tensors = saved_groups(model)
        self.tensors = sorted(tensors, key=_seconds_per_byte, reverse=True)
        self._num_certain = sum(item.seconds is None for item in tensors)
        self._checkpointable = [i for i, unit in enumerate(model.units) if unit.checkpoint_bytes is not None]
        """Indices of the units that may be checkpointed."""
        self._bytes = [0, *accumulate(item.nbytes for item in self.tensors)]
        self._recompute_seconds = [0.0, *accumulate(item.seconds or 0.0 for item in self.tensors)]
        start = simulate(model, hardware, min_memory)
        self._considered = [_Considered(_score(start, hardware), _wear(start), min_memory, start)]
        self.fastest = self._considered[0]
        self._limit = self.fastest.score
        """The least score of `consider_other`, or that of the plan of least memory."""
        self.of_teraio: Sequence[Plan] = ()
        """Teraio's plan, once it was made."""
        self._plain: _Considered | None = None
        """The fastest plan that fits and intercepts no unit."""
        self._gpu_bytes = hardware.gpu_bytes - model.largest_tensor_bytes
        """Bytes of the GPU that the search fills. The largest tensor has room besides, if possible: `remap_seconds`."""
        if start.gpu_peak_bytes > self._gpu_bytes:
            self._gpu_bytes = hardware.gpu_bytes
        self._gpu_left = max(0, self._gpu_bytes - start.gpu_peak_bytes)
        self._host_left = max(0, hardware.host_bytes - start.host_peak_bytes)
        self._simulations = 1
        """Number of considered plans. Those that were simulated before count again."""
        self._predictions: dict[str, Prediction] = {}
        """Predictions of considered plans, by the plan's text: several points may have the same plan."""
        self._tried: set[SearchPoint] = set()
        stages = len(cut_stages(model, min_memory)) * model.micro_batches * count_steps(model, min_memory)
        self._most_simulations = SIMULATED_STAGES // stages
        # Score of the best point, the point, and its unused bytes of GPU and host memory.
        self._best_point: tuple[tuple[float, float], SearchPoint, tuple[int, int]] | None = None
        self._ideal_seconds = model.forward_seconds + model.backward_seconds
        """Seconds of a micro-batch that waits for nothing."""

    def search_all(self) -> None:
        """Searches among the papers' plans, those that a person would write, and all points."""
        self.consider_papers()
        ranked = self.ranked()
        self.consider_written(self.plan(ranked[0]))
        self._simulations = 0  # the limit is for the points below
        wider = (replace(ranked[0], window_bytes=factor * ranked[0].window_bytes) for factor in (2, 4))
        for point in (*self.checkpointing(ranked[0]), *self.spread(ranked[0]), *ranked[:TOP_K], *wider):
            if not self.is_over():
                self.try_point(point)
        self.refine()
        self._improve()

    def continue_from(self, whole: "_Search") -> None:
        """Continues the ended search for whole units with parts of them: its plans are candidates, its best point the
        first.
        """
        self.consider_papers()
        for plan in (whole.fastest.plan, whole.choose(), *whole.of_teraio):
            self.consider_other(plan)
        self._simulations = 0
        if whole._best_point is not None:
            _, point, _ = whole._best_point
            resident = sum(len(unit.own_parts) for unit in self.model.units[: point.resident])
            self.try_point(replace(point, resident=resident))
            self.refine()
        self._improve()

    def _improve(self) -> None:
        """Simulates Teraio's plan, plans with few launches, and those that use the room of the largest tensor."""
        most_seconds = inf if self.fastest.score[0] else CLOSE_ENOUGH * self.fastest.score[1]
        *_, plan = rated_plan(self.model, self.model, self.hardware, self.fixed, most_seconds)
        self.of_teraio = [plan]
        self.consider_other(plan)
        self.try_few_launches()
        if self.fixed is None and self._checkpointable and self._gpu_bytes < self.hardware.gpu_bytes:
            self._fill_room_of_largest()
        plan = self._preferred.plan  # a narrower window of prefetches leaves more memory to the largest tensor
        self.consider(replace(plan, window_bytes=plan.window_bytes // 2))

    def _fill_room_of_largest(self) -> None:
        """Simulates plans that checkpoint all units, and whose first parts also take the room of the largest tensor.

        They may save more time than mapping that tensor takes, as the states of a large embedding do.
        """
        most = self._count_resident(self._gpu_left + self.hardware.gpu_bytes - self._gpu_bytes)
        for resident in sorted({min(self._count_resident(self._gpu_left) + 1, most), most}):
            parts = [PartPlan("gpu", "gpu")] * resident + list(self.fastest.plan.parts(self.model))[resident:]
            kept = keep_all(self.fastest.plan.placed(self.model, parts))
            self.consider(checkpoint_all(self.model, kept) or kept)

    def consider_papers(self) -> None:
        """Simulates the plans of least memory, and those of papers, but Teraio's.

        The former are made without SSDs, too, and with units checkpointed that may be.
        """
        on_ssd = min_memory_plan(self.model, ssd_bytes=self.hardware.ssd_bytes)
        in_host = [min_memory_plan(self.model, window, ssd_bytes=0) for window in (self._window, 0)]
        checkpointed = (checkpoint_all(self.model, plan) for plan in in_host)
        in_host += [offload_inputs(plan) for plan in checkpointed if plan is not None]
        for plan in (on_ssd, *in_host, *(of_papers(self.model, self.hardware) for of_papers in PAPER_PLANNERS)):
            self.consider_other(plan if self.fixed is None else self.fixed.apply(self.model, plan))

    def consider_other(self, plan: Plan) -> None:
        """Simulates the plan of another planner or search: the chosen one is not slower."""
        self._limit = min(self._limit, _score(self.consider(plan), self.hardware))

    def consider_written(self, base: Plan) -> None:
        """Simulates the plans that a person would write, with the placement of `base`, and with all states on the GPU.

        These keep all saved tensors, checkpoint every unit that may be, also with few prefetches, and with inputs of
        units in host memory, and follow SSDTrain's rule.
        """
        bases = [base]
        if self.fixed is None:
            bases.append(base.placed(self.model, [PartPlan("gpu", "gpu")] * len(self.parts)))
        by_rule = plan_ssdtrain(self.model, self.hardware)
        for one in bases:
            kept = keep_all(one)
            placed = FixedPlacement.of(self.model, one).apply(self.model, by_rule)
            checkpointed = checkpoint_all(self.model, kept) or kept
            narrow = replace(checkpointed, window_bytes=self._window // 4)
            offloading = offload_inputs(narrow)
            without_window = replace(offloading, window_bytes=0)
            for plan in (kept, checkpointed, narrow, offloading, without_window, placed):
                self.consider(plan)

    def consider(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan, which is simulated the first time."""
        plan = plan.clipped(self.clip)  # the training steps in its own mode, whatever the plan
        self._simulations += 1
        text = repr(plan)
        prediction = self._predictions.get(text)
        if prediction is None:
            prediction = simulate(self.model, self.hardware, plan)
            self._predictions[text] = prediction
            considered = _Considered(_score(prediction, self.hardware), _wear(prediction), plan, prediction)
            self._considered.append(considered)
            if considered.score < self.fastest.score:
                self.fastest = considered
            if considered.is_plain and not considered.score[0]:
                self._plain = min(self._plain or considered, considered, key=lambda item: item.score)
        return prediction

    def choose(self) -> Plan:
        """Returns the plan with the fewest transfers among those that are about as fast as the fastest.

        If a plan that intercepts no unit is about as fast, it is one of these. Other plans are not slower than the best
        of `consider_other`. If no plan fits, it is the fastest one of about the least excess.
        """
        if self.fastest.score[0]:
            least = self.fastest.prediction
            near = (item for item in self._considered if _exceeds_no_more(item.prediction, least, self.hardware))
            return min(near, key=lambda item: (item.score[1], item.wear)).plan
        fastest = self._preferred
        among = [item for item in self._considered if item.is_plain or not fastest.is_plain]
        close = [item for item in among if not item.score[0] and item.score[1] <= CLOSE_ENOUGH * fastest.score[1]]
        least_wear = min(close, key=lambda item: (item.wear, item.score))
        limit = self._limit[0], TIE * self._limit[1]
        must_be_fastest = not fastest.is_plain and limit < least_wear.score
        return (fastest if must_be_fastest else least_wear).plan

    @property
    def _preferred(self) -> _Considered:
        """The fastest plan, or one that intercepts no unit, unless it is slower by `PLAIN_GAIN`."""
        fastest, plain = self.fastest, self._plain
        is_close = plain is not None and fastest.score >= (0.0, (1 - PLAIN_GAIN) * plain.score[1])
        return plain if plain is not None and is_close else fastest

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
            prediction = self.consider(self.plan(point))
            score = _score(prediction, self.hardware)
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

    def ranked(self) -> list[SearchPoint]:
        """Returns one point for each share of the GPU's memory, in the order of their bounds, the least first."""
        clip: ClipMode = "deferred" if self.model.clip_norm else "off"
        best: dict[SearchPoint, float] = {}
        for share in GPU_SHARES:
            resident = self._count_resident(round(share * self._gpu_left))
            bounds: list[tuple[float, int, SearchPoint]] = []
            # If all fit into host memory, the order does not matter. Of equal bounds, that of states first is chosen.
            for activations_first, saved in product((False, True), self._amounts()):
                point = SearchPoint(
                    saved, resident, activations_first, self._window, clip, self._gpu_left, self._host_left
                )
                bounds.append((self._bound(point), len(bounds), point))
            bound, _, point = min(bounds)
            best[point] = bound
        return sorted(best, key=lambda point: best[point])

    def spread(self, point: SearchPoint) -> list[SearchPoint]:
        """Returns points from saving the least to saving everything, because the bound ignores the tiers' budgets."""
        counts = list(self._amounts())
        return [replace(point, saved=counts[(len(counts) - 1) * step // N_SPREAD]) for step in range(N_SPREAD + 1)]

    def checkpointing(self, point: SearchPoint) -> list[SearchPoint]:
        """Returns points that checkpoint all units that may be, with all, half, and no GPU memory for parts."""
        if not self._checkpointable:
            return []
        checkpointed = replace(point, checkpointed=len(self._checkpointable), saved=len(self.tensors))
        residents = (self._count_resident(round(share * self._gpu_left)) for share in (1.0, 0.5, 0.0))
        return list(dict.fromkeys(replace(checkpointed, resident=resident) for resident in residents))

    def is_over(self) -> bool:
        """Returns True if the limit of simulations is reached and a plan that fits was found."""
        return self._simulations >= self._most_simulations and self.fastest.score[0] == 0

    def refine(self) -> None:
        """Improves the best point by changes of one or two of its numbers, in ever smaller steps."""
        amount, parts = max(1, len(self.tensors) // 8), max(1, len(self.parts) // 8)
        ideal = self.model.micro_batches * self._ideal_seconds
        while self._best_point is not None:
            for point in list(self._neighbours(*self._best_point[1:], amount, parts)):
                if self._simulations >= self._most_simulations or self.fastest.score <= (0.0, CLOSE_ENOUGH * ideal):
                    return
                if self.try_point(point):
                    break
            else:
                if amount == parts == 1:
                    return
                amount, parts = max(1, amount // 2), max(1, parts // 2)

    def try_few_launches(self) -> None:
        """Simulates plans with few launches, which may also have fewer transfers than other plans: with the placement
        of the fastest plan, and with all states on the GPU."""
        base, ideal = self.fastest.plan, self.model.micro_batches * self._ideal_seconds
        if self.fastest.score <= (0.0, CLOSE_ENOUGH * ideal) and self.fastest.is_plain:
            return
        self._try_few_launches_of(base)
        if self.fastest.score[0]:  # one transfer at a time needs the least memory
            self._try_few_launches_of(replace(base, window_bytes=0))
        needed = sum(part.resident_bytes for part in self.parts)
        if self.fixed is None and base.offloads_states and needed < self.hardware.gpu_bytes:
            self._try_few_launches_of(base.placed(self.model, [PartPlan("gpu", "gpu")] * len(self.parts)))

    def _try_few_launches_of(self, base: Plan) -> None:
        """Simulates plans with few launches that place model states as `base` does."""
        excess = self.consider(keep_all(base)).gpu_peak_bytes - self._gpu_bytes
        margin = int(MARGIN * self.hardware.gpu_bytes)
        for free, device_weight in product((free_tensors, free_units), DEVICE_WEIGHTS):
            nbytes = excess
            for _ in range(LAUNCH_TRIES):
                plan, freed = free(self.model, self.hardware, base, nbytes, device_weight)
                over = self.consider(plan).gpu_peak_bytes - self._gpu_bytes
                if over <= 0 or freed < nbytes:  # it fits, or frees all that it can
                    break
                nbytes = freed + over + margin

    def _neighbours(
        self, point: SearchPoint, unused: tuple[int, int], amount: int, parts: int
    ) -> Iterator[SearchPoint]:
        # The budgets are the bytes that the plan of least memory leaves unused. This point may leave more unused.
        gpu_bytes, host_bytes = point.gpu_bytes + unused[0], point.host_bytes + unused[1]
        for flipped in (False, True):
            yield replace(
                point,
                activations_first=point.activations_first != flipped,
                gpu_bytes=gpu_bytes,
                host_bytes=host_bytes,
            )
        for saved, resident in ((0, 1), (0, -1), (-1, 0), (1, 0), (-1, 1), (1, -1)):
            moved = replace(
                point,
                gpu_bytes=gpu_bytes,
                host_bytes=host_bytes,
                saved=min(max(point.saved + saved * amount, self._num_certain), len(self.tensors)),
                resident=min(max(point.resident + resident * parts, 0), self._count_resident(point.gpu_bytes)),
            )
            if moved != point:
                yield moved
        for window_bytes in (2 * point.window_bytes, point.window_bytes // 2):
            yield replace(point, window_bytes=window_bytes, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
        if point.clip == "deferred" and self.clip is None:
            yield replace(point, clip="speculative")
        for count in (point.checkpointed - amount, point.checkpointed + amount):
            checkpointed = min(max(count, 0), len(self._checkpointable))
            if checkpointed != point.checkpointed:
                yield replace(point, checkpointed=checkpointed, gpu_bytes=gpu_bytes, host_bytes=host_bytes)

    def plan(self, point: SearchPoint) -> Plan:
        """Returns the plan of a point."""
        host = self._host_limit(point)
        # Units without parameters of their own, such as the second call of a tied one, are resident.
        weights: list[Tier] = ["ssd" if part.weight_bytes or part.state_bytes_read else "gpu" for part in self.parts]
        states = list(weights)
        if self.fixed is not None:
            weights, states = list(self.fixed.weights), list(self.fixed.states)
        for index in range(point.resident):
            weights[index] = states[index] = "gpu"
        kept, swapped, _ = self._keep(point)
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
        plan = build_plan(
            self.model,
            weights=weights,
            states=states,
            saved=saved,
            clip=point.clip,
            window_bytes=point.window_bytes,
        )
        checkpointed = [self.model.units[index].name for index in self._checkpointable[: point.checkpointed]]
        plan = checkpoint(plan, checkpointed)
        return plan if self.fixed is None else self.fixed.apply(self.model, plan)

    def _keep(self, point: SearchPoint) -> tuple[list[SavedGroup], list[SavedGroup], int]:
        """Returns the kept tensors of a point, the swapped tensors, and the remaining GPU bytes.

        The last saved tensors are read first in backward: they are kept. The first ones are offloaded to SSDs.
        """
        left = point.gpu_bytes - sum(part.resident_bytes for part in self.parts[: point.resident])
        checkpointed = frozenset(self._checkpointable[: point.checkpointed])
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
        return kept, swapped, left

    def _host_limit(self, point: SearchPoint) -> int:
        """Returns the bytes of host memory that activations and model states share."""
        if self.fixed is None or self.fixed.host_limit is None:
            return point.host_bytes
        return min(point.host_bytes, self.fixed.host_limit)

    def _with_memory(self, point: SearchPoint, gpu_bytes: int, host_bytes: int) -> SearchPoint:
        gpu, host = max(0, gpu_bytes), max(0, host_bytes)
        resident = min(point.resident, self._count_resident(gpu))
        return replace(point, resident=resident, gpu_bytes=gpu, host_bytes=host)

    def _amounts(self) -> Iterator[int]:
        """Yields numbers of saved groups, from the least possible to all, at equal distances in bytes."""
        least, most = self._bytes[self._num_certain], self._bytes[-1]
        counts = {self._num_certain, len(self.tensors)}
        for step in range(1, NUM_AMOUNTS):
            counts.add(bisect_right(self._bytes, least + (most - least) * step / NUM_AMOUNTS) - 1)
        yield from sorted(count for count in counts if count >= self._num_certain)

    def _count_resident(self, gpu_bytes: int) -> int:
        """Returns the number of parts that fit into `gpu_bytes`, 0 if the placement of model states is fixed."""
        count = 0
        if self.fixed is not None:
            return count
        while count < len(self.parts) and (needed := self.parts[count].resident_bytes) <= gpu_bytes:
            gpu_bytes -= needed
            count += 1
        return count

    def _bound(self, point: SearchPoint) -> float:
        """Returns the seconds of a micro-batch if all resources overlap perfectly in forward and in backward."""
        model, hardware = self.model, self.hardware
        streamed = self.parts[point.resident :]
        if (fixed := self.fixed) is not None:
            streamed = [part for part, where in zip(self.parts, fixed.weights, strict=True) if where != "gpu"]
        weights = sum(part.weight_bytes for part in streamed)
        states = sum(part.state_bytes_read for part in streamed)
        used = sum(part.resident_bytes for part in self.parts[: point.resident])
        saved = self._bytes[point.saved]
        swapped = max(0, saved - max(0, point.gpu_bytes - used))
        host = self._host_limit(point)
        in_host = {}
        demands = [("weights", weights), ("states", states)]
        if fixed is not None:
            placed = list(zip(self.parts, fixed.weights, fixed.states, strict=True))
            in_host["weights"] = sum(part.weight_bytes for part, where, _ in placed if where == "host")
            in_host["states"] = sum(part.state_bytes_read for part, _, where in placed if where == "host")
            demands = []
        demands.insert(0 if point.activations_first else len(demands), ("activations", swapped))
        for name, nbytes in demands:
            in_host[name] = min(nbytes, host)
            host -= in_host[name]
        share = 1 / model.micro_batches
        on_ssd = weights - in_host["weights"]
        of_states = (states - in_host["states"]) / states if states else 0.0
        phases = step_phases(
            forward=model.forward_seconds,
            backward=model.backward_seconds + self._recompute_seconds[-1] - self._recompute_seconds[point.saved],
            cpu=share * sum(part.parameters for part in streamed) / hardware.cpu_step_rate,
            weights=weights,
            weights_on_ssd=on_ssd,
            gradients=sum(part.gradient_bytes for part in streamed),
            read=share * of_states * states,
            written=share * (of_states * sum(part.state_bytes_written for part in streamed) + on_ssd),
            swapped=swapped,
            swapped_to_ssd=swapped - in_host["activations"],
        )
        return iteration_seconds(hardware, *phases)


def _exceeds_no_more(one: Prediction, other: Prediction, hardware: HardwareProfile) -> bool:
    """Returns whether a plan that does not fit exceeds limits by no more than another such plan, or by little more.

    That is up to `SAME_EXCESS` of the GPU's memory more on the GPU, and no more elsewhere.
    """
    excess = one.excess_bytes(hardware), other.excess_bytes(hardware)
    on_gpu = [max(0, prediction.gpu_peak_bytes - hardware.gpu_bytes) for prediction in (one, other)]
    elsewhere = excess[0] - on_gpu[0], excess[1] - on_gpu[1]
    return elsewhere[0] <= elsewhere[1] and on_gpu[0] <= on_gpu[1] + SAME_EXCESS * hardware.gpu_bytes


def _score(prediction: Prediction, hardware: HardwareProfile) -> tuple[float, float]:
    """Returns the score to minimize: excess bytes, then step seconds."""
    return float(prediction.excess_bytes(hardware)), prediction.step_seconds


def _wear(prediction: Prediction) -> tuple[int, float, float]:
    """Returns bytes written to SSDs, seconds of copies, and seconds of GPU compute per step."""
    busy = prediction.busy_seconds
    return prediction.ssd_written_bytes, busy["copy_in"] + busy["copy_out"], busy["compute"]


def _seconds_per_byte(tensor: SavedGroup) -> float:
    return float("inf") if tensor.seconds is None else tensor.seconds / tensor.nbytes
