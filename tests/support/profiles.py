"""Machines and models for the tests of planning."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from lightning_ssd.planning import (
    HardwareProfile,
    HostOverhead,
    ModelProfile,
    OperatorProfile,
    PartPlan,
    PartProfile,
    Plan,
    UnitPlan,
    UnitProfile,
)

GB, GIB = 10**9, 2**30

H100 = HardwareProfile(
    name="H100",
    gpu_flops=600e12,
    gpu_memory_bandwidth=3e12,
    copy_out=54.8e9,
    copy_in=53.9e9,
    copy_out_both=43.9e9,
    copy_in_both=43.9e9,
    ssd_read=3.4e9,
    ssd_write=3.1e9,
    ssd_mixed=3.1e9,
    cpu_step_rate=2.4e9,
    gpu_bytes=72 * GIB,
    host_bytes=110 * GIB,
    ssd_bytes=1000 * GB,
)


def make_model(
    units: int = 4,
    *,
    forward: float = 1.0,
    saved: int = 10,
    inputs: int = 2,
    parameters: int = 100,
    micro_batches: int = 1,
    clip_norm: bool = False,
    launch: float = 0.0,
    operations: int = 0,
) -> ModelProfile:
    """Returns a model of equal units, each with one operator that takes `forward` seconds and twice that backward.

    The host takes `launch` seconds for its forward, in so many operations.
    """
    return ModelProfile(
        "model",
        tuple(
            UnitProfile(
                f"unit{index}",
                (
                    OperatorProfile(
                        "work",
                        forward,
                        2 * forward,
                        1.0,
                        saved,
                        ("work.output",),
                        forward,
                        operations=operations,
                        recompute_operations=operations,
                        launch_seconds=launch,
                    ),
                ),
                inputs,
                parameters,
                2 * parameters,
                2 * parameters,
                12 * parameters,
                12 * parameters,
            )
            for index in range(units)
        ),
        micro_batches,
        1,
        10,
        clip_norm,
    )


def make_parts(counts: Sequence[int]) -> tuple[PartProfile, ...]:
    """Returns the parts of a unit with so many parameters, in 16 bits; none for a single one."""
    parts = [PartProfile(f"part{index}", one, 2 * one, 2 * one, 12 * one, 12 * one) for index, one in enumerate(counts)]
    return tuple(parts) if len(parts) > 1 else ()


def divide(model: ModelProfile, count: int) -> ModelProfile:
    """Returns the model with units of `count` parts of about equal size."""
    units = []
    for unit in model.units:
        bounds = [unit.parameters * index // count for index in range(count + 1)]
        units.append(replace(unit, parts=make_parts([stop - start for start, stop in pairwise(bounds)])))
    return replace(model, units=tuple(units))


@st.composite
def operators(draw: st.DrawFn, name: str) -> OperatorProfile:
    """Any operator."""
    forward = draw(st.floats(1e-5, 1e-2))
    return OperatorProfile(
        name,
        forward,
        draw(st.floats(1, 3)) * forward,
        draw(st.floats(0, 1e13)),
        draw(st.one_of(st.just(0), st.integers(1, GB))),
        (f"{name}.output",),
        draw(st.one_of(st.none(), st.just(forward))),
        operations=draw(st.integers(1, 9)),
        recompute_operations=draw(st.integers(1, 9)),
        launch_seconds=draw(st.floats(0, 1e-3)),
    )


@st.composite
def models(draw: st.DrawFn, most_units: int = 5) -> ModelProfile:
    """Any model."""
    units = []
    for index in range(draw(st.integers(1, most_units))):
        items = [draw(operators(f"op{position}")) for position in range(draw(st.integers(1, 4)))]
        counts = draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=3))
        parameters = sum(counts)
        units.append(
            UnitProfile(
                f"unit{index}",
                tuple(items),
                draw(st.integers(0, GB)),
                parameters,
                2 * parameters,
                2 * parameters,
                12 * parameters,
                12 * parameters,
                parts=make_parts(counts),
                checkpoint_bytes=draw(st.one_of(st.none(), st.integers(0, GB))),
                cast_bytes=draw(st.integers(0, GB)),
            )
        )
    micro_batches, clip_norm = draw(st.integers(1, 3)), draw(st.booleans())
    waits, shares = draw(st.booleans()), draw(st.booleans())
    return ModelProfile(
        "any",
        tuple(units),
        micro_batches,
        4,
        4096,
        clip_norm,
        synchronizes=waits,
        shares_gradients=shares and not clip_norm,
    )


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    """Any machine."""
    speed = st.floats(1e9, 1e11)
    out, back = draw(speed), draw(speed)
    return HardwareProfile(
        "any",
        draw(st.floats(1e13, 1e15)),
        draw(st.floats(1e11, 4e12)),
        out,
        back,
        draw(st.floats(0.5, 1.0)) * out,
        draw(st.floats(0.5, 1.0)) * back,
        draw(speed),
        draw(speed),
        draw(speed),
        draw(st.floats(1e8, 1e10)),
        draw(st.integers(GB, 100 * GB)),
        draw(st.integers(0, 200 * GB)),
        draw(st.integers(0, 1000 * GB)),
        host_overhead=HostOverhead(*(draw(st.floats(0, 1e-4)) for _ in range(7))),
        host_memory_bandwidth=draw(st.one_of(st.none(), st.floats(1e10, 1e12))),
    )


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)


@st.composite
def plans(draw: st.DrawFn, model: ModelProfile | None = None) -> Plan:
    """Any plan; one for `model` if that is given."""
    if model is None:
        names = {name: draw(st.lists(NAMES, unique=True, max_size=3)) for name in draw(st.lists(NAMES, unique=True))}
        anything = st.sampled_from(["keep", "host", "ssd", "recompute"])
        choices = {name: {item: draw(anything) for item in items} for name, items in names.items()}
    else:
        choices = {
            unit.name: {
                item.name: draw(
                    st.sampled_from(["keep", "host", "ssd"] + ["recompute"] * (item.recompute_seconds is not None))
                )
                for item in unit.operators
            }
            for unit in model.units
        }
    tiers = [("gpu", "gpu"), ("host", "host"), ("host", "ssd"), ("ssd", "host"), ("ssd", "ssd")]
    placements = st.sampled_from([PartPlan(*pair) for pair in tiers])  # type: ignore[arg-type]
    units = {}
    parts = {name: draw(st.lists(NAMES, unique=True, max_size=2)) for name in choices}
    if model is not None:
        parts = {unit.name: [part.name for part in unit.parts] for unit in model.units}
    may_checkpoint = {unit.name for unit in model.units if unit.checkpoint_bytes is not None} if model else set(choices)
    checkpointed = False
    for name, operators in choices.items():
        whole = draw(placements)
        of_parts = {part: draw(placements) for part in parts[name] if draw(st.booleans())}
        kept = checkpointed
        checkpointed = name in may_checkpoint and draw(st.booleans())
        if checkpointed:
            operators = dict.fromkeys(operators, "keep")
        where = "keep" if kept or checkpointed else draw(st.sampled_from(["keep", "host", "ssd"]))
        units[name] = UnitPlan(whole.weights, whole.states, where, operators, of_parts, checkpointed)
    size = st.integers(0, 2**40)
    clip = draw(st.sampled_from(["deferred", "speculative"] if model and model.clip_norm else ["off", "deferred"]))
    return Plan(units, draw(size), draw(size), clip)
