"""Stages of a forward: neighbouring operators that are simulated as one task, and their bytes and seconds in a plan."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.plan import Plan, UnitPlan
from lightning_ssd.types import InputChoice

MIN_STAGES = 96
"""A forward with fewer units than this has several stages for each unit, as far as units have so many operators."""


@dataclass(kw_only=True, slots=True)
class Stage:
    """Neighbouring operators of one unit, which are simulated as one compute task.

    Attributes:
        unit: index of the unit.
        first: whether the unit's forward begins with this stage.
        last: whether the unit's forward ends with this stage.
        forward: seconds of GPU time.
        backward: seconds of GPU time, without recomputation.
        saved: bytes of saved tensors that are not recomputed, at the end of the forward, before any is offloaded.
        swapped: bytes of `saved` that are offloaded.
        to_ssd: bytes of `swapped` that are offloaded to SSDs.
        largest: bytes of the largest offloaded tensor.
        num_saved: saved tensors, recomputed ones and the unit's input included.
        num_swapped: offloaded tensors.
        fwd_workspace: peak bytes that only the forward needs.
        bwd_workspace: peak bytes that only the backward needs.
        recomputed: bytes of recomputed tensors that are released after the backward of this stage.
        remat_bytes: bytes that recomputation allocates before the backward of this stage: tensors that this backward
            needs, and their inputs.
        remat_seconds: seconds of recomputation.
        remat_operations: operations that recomputation launches.
        operations: operations of the forward.
        launch: seconds in which the host launches the forward, without the overhead of a plan.
        rerun_launch: seconds in which the host launches the forward of a checkpointed unit before this backward, or,
            if user code checkpoints it, in this backward.
        num_rerun_saved: saved tensors of that unit.
    """

    unit: int
    first: bool
    last: bool
    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    swapped: int = 0
    to_ssd: int = 0
    largest: int = 0
    num_saved: int = 0
    num_swapped: int = 0
    fwd_workspace: int = 0
    bwd_workspace: int = 0
    recomputed: int = 0
    remat_bytes: int = 0
    remat_seconds: float = 0.0
    remat_operations: int = 0
    operations: int = 0
    launch: float = 0.0
    rerun_launch: float = 0.0
    num_rerun_saved: int = 0

    def add_saved(self, nbytes: int, choice: InputChoice) -> None:
        """Counts a saved tensor of `nbytes` that is not recomputed."""
        self.saved += nbytes
        if choice != "keep":
            self.swapped += nbytes
            self.to_ssd += nbytes if choice == "ssd" else 0
            self.largest = max(self.largest, nbytes)
            self.num_swapped += 1


def cut_stages(model: ModelProfile, plan: Plan) -> list[Stage]:
    """Returns the stages of a forward, with sums of the operators' bytes and seconds by the plan's choices."""
    pieces = ceil(MIN_STAGES / len(model.units))
    stages = []
    # Autocast's casts of weights in checkpointed units before a stage. The profile counts them in the workspaces of all
    # later operators, but they are freed until the unit's rerun.
    freed_casts = 0
    casts = _casts_of_weights(model, plan)
    for index, profile in enumerate(model.units):
        unit = plan.units[profile.name]
        count = len(profile.operators)
        remat_bytes = _remat_bytes(profile, unit)
        bounds = [count * piece // min(pieces, count) for piece in range(min(pieces, count) + 1)]
        for start, stop in pairwise(bounds):
            stage = Stage(unit=index, first=start == 0, last=stop == count, remat_bytes=sum(remat_bytes[start:stop]))
            _add_operators(stage, profile, unit, start, stop)
            if unit.checkpoint and stage.last:
                _add_rerun(stage, profile, unit)
            elif profile.reruns and stage.last:
                stage.rerun_launch = profile.launch_seconds
            stage.fwd_workspace = max(0, stage.fwd_workspace - freed_casts)
            stage.bwd_workspace = max(0, stage.bwd_workspace - freed_casts)
            if unit.checkpoint or profile.reruns:
                stage.fwd_workspace += casts[index]
                stage.bwd_workspace += casts[index]
            elif stage.first:
                stage.saved += casts[index]
            stages.append(stage)
        freed_casts += profile.cast_bytes if unit.checkpoint else 0
    return stages


def _casts_of_weights(model: ModelProfile, plan: Plan) -> Counter[int]:
    """Returns, by the index of a unit, the bytes of casts of its weights that the plan has on the GPU.

    Autocast makes them in the forward. They live until the unit's backward, or, if it is checkpointed, in its forward
    and its rerun. The profile's workspaces have those of weights that were on the GPU when it was made.
    """
    casts: Counter[int] = Counter()
    for (index, profile), part in zip(model.parts, plan.parts(model), strict=True):
        casts[index] += profile.weight_bytes if profile.casts and not part.offloaded else 0
    return casts


def _remat_bytes(profile: UnitProfile, unit: UnitPlan) -> list[int]:
    """Returns, for each operator, the bytes that recomputation allocates when backward needs its saved tensor.

    Recomputed tensors that precede it are allocated with it, and held until backward needs them. A checkpointed unit's
    are allocated before its last operator's backward, which may save nothing itself.
    """
    remat_bytes = [0] * len(profile.operators)
    if unit.checkpoint:
        remat_bytes[-1] = profile.saved_bytes
        return remat_bytes
    waiting = 0
    last: int | None = None
    for number, operator in enumerate(profile.operators):
        if not operator.saved_bytes:
            continue
        if _dropped(operator, unit):
            waiting += operator.saved_bytes
            last = number
        elif last is not None:
            remat_bytes[last], waiting, last = waiting, 0, None
    if last is not None:
        remat_bytes[last] = waiting
    return remat_bytes


def _add_operators(stage: Stage, profile: UnitProfile, unit: UnitPlan, start: int, stop: int) -> None:
    """Adds bytes and seconds of the operators from `start` to before `stop` to an empty stage."""
    operators = profile.operators
    input_bytes = profile.input_bytes if stage.first else 0
    if input_bytes and not _reruns_from_tier(unit):
        stage.num_saved += 1
        stage.add_saved(input_bytes, unit.input)
    peak = input_bytes + (profile.forward_bytes if stage.first else 0)
    if stage.first or stage.last:
        stage.bwd_workspace = profile.backward_bytes
    # A dropped result is freed after the next operator has used it.
    before = _dropped(operators[start - 1], unit) if start else 0
    for operator in operators[start:stop]:
        stage.forward += operator.forward_seconds
        stage.backward += operator.backward_seconds
        stage.launch += operator.launch_seconds
        stage.operations += operator.operations
        stage.num_saved += operator.saved_bytes > 0
        dropped = _dropped(operator, unit)
        needed = operator.first_use_bytes
        if dropped:
            stage.recomputed += dropped
            if not unit.checkpoint:
                needed += operator.recompute_bytes
                stage.remat_seconds += operator.recompute_seconds or 0.0
                stage.remat_operations += operator.recompute_operations
        elif operator.saved_bytes:
            choice = unit.operators[operator.name]
            assert choice != "recompute"
            stage.add_saved(operator.saved_bytes, choice)
        peak = max(peak, stage.saved + before + dropped + operator.forward_bytes)
        stage.bwd_workspace = max(stage.bwd_workspace, needed, operator.backward_bytes)
        before = dropped
    stage.fwd_workspace = max(0, peak - stage.saved)


def _reruns_from_tier(unit: UnitPlan) -> bool:
    """Whether a unit is checkpointed, and its arguments are offloaded, which its rerun needs: in its last stage."""
    return unit.checkpoint and unit.input != "keep"


def _add_rerun(stage: Stage, profile: UnitProfile, unit: UnitPlan) -> None:
    """Adds the run of a checkpointed unit's forward before the backward of its last stage."""
    kept = profile.checkpoint_bytes or 0
    if _reruns_from_tier(unit):
        stage.num_saved += 1
        stage.add_saved(profile.input_bytes + profile.argument_bytes, unit.input)
        kept -= profile.argument_bytes
    stage.saved += kept
    stage.remat_seconds += profile.forward_seconds
    stage.rerun_launch = profile.launch_seconds
    stage.num_rerun_saved = profile.num_saved
    # Saved tensors are made one after another, and the peak may be before the last is.
    peak, saved = profile.forward_bytes, 0
    for operator in profile.operators:
        saved += operator.saved_bytes
        peak = max(peak, saved + operator.forward_bytes)
    stage.bwd_workspace = max(stage.bwd_workspace, peak - saved)


def _dropped(operator: OperatorProfile, unit: UnitPlan) -> int:
    """Returns the bytes of an operator's saved tensor that are dropped for recomputation."""
    return operator.saved_bytes if unit.checkpoint or unit.operators[operator.name] == "recompute" else 0
