"""Any lifetime profile of a few operators and tensors."""

from hypothesis import strategies as st

from lightning_ssd.replay import LifetimeProfile, OperatorSpan, TensorLifetime


@st.composite
def profiles(draw: st.DrawFn) -> LifetimeProfile:
    """Any step of a few operators: global tensors, saved tensors, gradients, states.

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
        tensors.append(TensorLifetime(len(tensors), "a", "saved tensor", draw(size), uses, *uses))
    return LifetimeProfile("any", tuple(operators), tuple(tensors))
