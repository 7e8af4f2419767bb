"""Any lifetime profile of a few operators and tensors."""

from hypothesis import strategies as st

from lightning_ssd.planning.lifetimes import LifetimeProfile, OperatorSpan, TensorLifetime


@st.composite
def profiles(draw: st.DrawFn) -> LifetimeProfile:
    """Any step of a few operators: global tensors, saved tensors that can be recomputed or not, gradients, states.

    Operators may take no time, as views do, but not all of them.
    """
    counts = [draw(st.integers(1, 6)) for _ in range(3)]
    phases = [
        name for name, count in zip(("forward", "backward", "optimizer"), counts, strict=True) for _ in range(count)
    ]
    operators, now = [], 0.0
    durations = draw(st.lists(st.just(0.0) | st.floats(0.1, 5.0), min_size=len(phases), max_size=len(phases)))
    durations[draw(st.integers(0, len(phases) - 1))] += draw(st.floats(0.1, 5.0))
    for phase, duration in zip(phases, durations, strict=True):
        begin, now = now, now + duration
        operators.append(OperatorSpan("work", phase, begin, now))
    turn, end, last = counts[0], counts[0] + counts[1], len(phases) - 1
    forward, backward, optimizer = st.integers(0, turn - 1), st.integers(turn, end - 1), st.integers(end, last)
    size = st.integers(1, 50)
    tensors: list[TensorLifetime] = []
    for _ in range(draw(st.integers(0, 4))):
        unit = f"unit{draw(st.integers(0, 2))}"  # of several weights, or one
        step = draw(optimizer)
        before, after = (sorted(draw(st.sets(one, min_size=1, max_size=3))) for one in (forward, backward))
        summed = sorted(draw(st.sets(backward, min_size=1, max_size=2)))
        nbytes = draw(size)
        tensors.append(TensorLifetime(len(tensors), "w", "weight", nbytes, (*before, *after, step), unit=unit))
        tensors.append(TensorLifetime(len(tensors), "g", "gradient", nbytes, (*summed, step), summed[0], step, unit))
        tensors.append(TensorLifetime(len(tensors), "s", "optimizer state", 2 * nbytes, (step,), unit=unit))
    for _ in range(draw(st.integers(1, 8))):
        uses = draw(forward), draw(backward)
        again = draw(st.one_of(st.none(), st.floats(0.01, 1.0)))
        saved = [one.id for one in tensors if one.kind == "saved tensor" and (one.allocated or 0) <= uses[0]]
        sources = tuple(draw(st.lists(st.sampled_from(saved), unique=True, max_size=2))) if saved and again else ()
        name = "saved tensor"
        tensors.append(
            TensorLifetime(len(tensors), "a", name, draw(size), uses, *uses, recompute_seconds=again, sources=sources)
        )
    return LifetimeProfile("any", tuple(operators), tuple(tensors))


@st.composite
def layers(draw: st.DrawFn) -> LifetimeProfile:
    """A step through units of the same bytes, one operator after the other, in which host memory may stage states."""
    num_units, nbytes = draw(st.integers(2, 6)), draw(st.integers(2, 20))
    phases = ["forward"] * num_units + ["backward"] * num_units + ["optimizer"] * num_units
    operators, now = [], 0.0
    for phase in phases:
        begin, now = now, now + draw(st.floats(0.5, 5.0))
        operators.append(OperatorSpan("work", phase, begin, now))
    tensors: list[TensorLifetime] = []
    for number in range(num_units):
        unit, back, step = f"unit{number}", 2 * num_units - 1 - number, 2 * num_units + number
        ids = range(4 * number, 4 * number + 4)
        tensors += [
            TensorLifetime(ids[0], "w", "weight", nbytes, (number, back, step), unit=unit),
            TensorLifetime(ids[1], "g", "gradient", nbytes, (back, step), back, step, unit),
            TensorLifetime(ids[2], "s", "optimizer state", 2 * nbytes, (step,), unit=unit),
            TensorLifetime(ids[3], "a", "saved tensor", draw(st.integers(1, 20)), (number, back), number, back),
        ]
    return LifetimeProfile("layers", tuple(operators), tuple(tensors))
