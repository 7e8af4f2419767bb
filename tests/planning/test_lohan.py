"""LoHan's cost model and Algorithm 1.

Reproduced: table II and the sizes that follow from it, and from section III and figure 1 the times of the 13B model at
batch 32 (see also `test_model.py` for its activations). Not reproduced: that LoHan swaps about 34 GB there
(figure 1c). The bandwidths of the SSDs and the free host memory, which decide it, are not in the text.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning.lohan import Layer, bytes_to_ssd, choose_swaps
from lightning_ssd.planning.phase import iteration_seconds
from tests.support.papers import StateSizes, lohan_phases
from tests.support.profiles import GB, H100

# Section III: forward 5.96 s of GPU time, full recomputation 5.7 s.
FORWARD, RECOMPUTE = 5.96, 5.7
# III-C: 213 GB of activations are offloaded in 10 s.
LINK = 213 * GB / 10
PCIE4 = replace(H100, copy_out=LINK, copy_in=LINK, copy_out_both=LINK, copy_in_both=LINK, ssd_read=32e9, ssd_write=32e9)
NOTHING = StateSizes(0, 0, 0, 0)


def test_table_2() -> None:
    """4, 8, 2 and 2 bytes for each parameter."""
    assert StateSizes.mixed_precision(1) == StateSizes(master=4, optimizer=8, gradients=2, weights=2)


@pytest.mark.parametrize(("parameters", "total"), [(13 * GB, 182 * GB), (175 * GB, 2450 * GB)])
def test_model_states(parameters: int, total: int) -> None:
    """II and III-C: master weights, optimizer states and compute weights of 13B are 182 GB, of 175B 2.45 TB."""
    states = StateSizes.mixed_precision(parameters)
    assert states.master + states.optimizer + states.weights == total


def test_backward_of_13b_with_full_recomputation() -> None:
    """III-B: 17.6 s of GPU time in backward."""
    _, backward = lohan_phases(
        flops=FORWARD, recomputed_flops=RECOMPUTE, throughput=1, states=NOTHING, swapped=0, host=0
    )
    assert backward.compute == pytest.approx(17.6, abs=0.05)


def test_backward_of_13b_without_recomputation() -> None:
    """III-B: it takes 1.91 times as long as 6.25 s of SSD I/O."""
    _, backward = lohan_phases(flops=FORWARD, recomputed_flops=0, throughput=1, states=NOTHING, swapped=0, host=0)
    assert backward.compute / 6.25 == pytest.approx(1.91, abs=0.005)


def test_forward_of_13b_with_all_activations_swapped() -> None:
    """III-C: 10 s, in 59 % of which the GPU computes."""
    forward, _ = lohan_phases(
        flops=FORWARD, recomputed_flops=0, throughput=1, states=NOTHING, swapped=213 * GB, host=213 * GB
    )
    assert forward.seconds(PCIE4) == pytest.approx(10)
    assert int(100 * forward.compute / forward.seconds(PCIE4)) == 59


def test_swapping_the_outputs_of_4h_to_h_leaves_a_third_more_computation() -> None:
    """Figure 1c: 32 % more computation in backward. This is the rest if those layers, by far the best, are swapped."""
    flops = {"qkv": 6, "out": 2, "up": 8, "down": 8}
    sizes = {"qkv": 3, "out": 1, "up": 4, "down": 1}
    layers = {name: Layer(flops[name] * RECOMPUTE / 24, sizes[name]) for name in flops}
    assert max(layers, key=lambda name: layers[name].benefit) == "down"
    left = RECOMPUTE - layers["down"].flops
    assert left / (2 * FORWARD) == pytest.approx(0.32, abs=0.002)


def test_equations_4_and_5() -> None:
    """Each resource's time, by hand: 1 G parameters, 10 GB swapped, 4 GB of them to SSDs."""
    forward, backward = lohan_phases(
        flops=2.0,
        recomputed_flops=0.5,
        throughput=1.0,
        states=StateSizes.mixed_precision(GB),
        swapped=10 * GB,
        host=6 * GB,
    )
    machine = replace(PCIE4, copy_out=10e9, copy_in=10e9, copy_out_both=10e9, copy_in_both=10e9)
    machine = replace(machine, ssd_read=4e9, ssd_write=2e9)
    assert forward.times(machine) == {"compute": 2, "copy_in": 0.2, "copy_out": 1, "ssd": 0.5 + 2, "cpu": 0}
    # In backward 14 P and the activations are read, 14 P are written.
    assert backward.times(machine) == {
        "compute": 4.5, "copy_in": 1.2, "copy_out": 0.2, "ssd": (14 + 4) / 4 + 14 / 2, "cpu": 0
    }  # fmt: skip
    assert iteration_seconds(machine, forward, backward) == 2.5 + 11.5


@pytest.mark.parametrize(("swapped", "host", "to_ssd"), [(10, 4, 6), (10, 10, 0), (10, 40, 0)])
def test_states_in_host_memory_are_not_written_to_ssds(swapped: float, host: float, to_ssd: float) -> None:
    """Equation 3."""
    assert bytes_to_ssd(swapped, host) == to_ssd


LAYERS = st.lists(st.builds(Layer, st.floats(0, 1e15), st.floats(1e6, 1e10)), min_size=1, max_size=30)


def times(layers: list[Layer], base: float, host: float, parameters: float) -> list[tuple[float, float]]:
    """Returns (bytes swapped, T_iter) as layers are added in falling benefit."""
    total = sum(layer.flops for layer in layers)
    swapped, left = base, total
    points = []
    for layer in [Layer(0, 0), *sorted(layers, key=lambda layer: -layer.benefit)]:
        swapped, left = swapped + layer.nbytes, left - layer.flops
        step = lohan_phases(
            flops=total,
            recomputed_flops=max(0.0, left),
            throughput=1e14,
            states=StateSizes.mixed_precision(parameters),
            swapped=swapped,
            host=host,
        )
        points.append((swapped, iteration_seconds(H100, *step)))
    return points


@given(LAYERS, st.floats(0, 1e10), st.floats(0, 1e11), st.floats(0, 1e10))
def test_iteration_time_is_convex(layers: list[Layer], base: float, host: float, parameters: float) -> None:
    """T_iter is convex in the bytes swapped, in falling benefit: no point is above the line of its neighbours."""
    points = times(layers, base, host, parameters)
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        line = y0 + (y2 - y0) * (x1 - x0) / (x2 - x0)
        assert y1 <= line * (1 + 1e-9) + 1e-9


@given(LAYERS, st.floats(0, 1e10), st.floats(0, 1e11), st.floats(0, 1e10))
def test_algorithm_1_finds_the_lowest_point(layers: list[Layer], base: float, host: float, parameters: float) -> None:
    """The descent that ends at the first rise finds the least T_iter."""
    total = sum(layer.flops for layer in layers)

    def iteration(swapped: float, recomputed: float) -> float:
        step = lohan_phases(
            flops=total,
            recomputed_flops=recomputed,
            throughput=1e14,
            states=StateSizes.mixed_precision(parameters),
            swapped=swapped,
            host=host,
        )
        return iteration_seconds(H100, *step)

    least = min(seconds for _, seconds in times(layers, base, host, parameters))
    chosen = [layers[index] for index in choose_swaps(layers, base, iteration)]
    swapped, saved = base + sum(layer.nbytes for layer in chosen), sum(layer.flops for layer in chosen)
    assert iteration(swapped, max(0.0, total - saved)) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("per_byte", "layers"),
    [
        pytest.param(10.0, (), id="never"),
        pytest.param(0.0, (1, 0, 2), id="always"),
        pytest.param(1.5, (1, 0), id="up to a point"),
    ],
)
def test_three_cases(per_byte: float, layers: tuple[int, ...]) -> None:
    """IV-D: swapping never helps, always helps, or helps up to a point. Layers are in falling benefit: 4, 2 and 1."""
    chosen = choose_swaps(
        [Layer(2, 1), Layer(4, 1), Layer(1, 1)], 5.0, lambda swapped, flops: flops + per_byte * swapped
    )
    assert chosen == layers
