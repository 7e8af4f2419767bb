"""Transient memory, which is neither weights nor saved tensors: its bytes over time."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_ssd.activations.graph import ForwardGraph
from lightning_ssd.profiling import TraceMode
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.offloader import CPU, change_policy, open_offloader

MIB = 2**20


class Unit(nn.Module):
    """Concatenated sums, which are not saved; their saved exponential; and its saved hyperbolic tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.cat([x + 1, x + 2])  # 1 + 1 + 2 MiB at once; 2 MiB afterwards
        second = first.exp()  # 2 MiB, saved
        del first
        third = torch.cat([second, second])  # 4 MiB
        return third.tanh().sum() * self.scale  # 4 MiB, saved


def record(path: Path, units: Sequence[nn.Module], forward: Callable[[Tensor], Tensor]) -> ForwardGraph:
    """Returns the recorded graph of a micro-batch of 1 MiB."""
    x = torch.randn(MIB // 4, requires_grad=True)
    with open_offloader(path, host_memory="64MiB", min_bytes=MIB) as offloader:
        recorder = TraceMode([[unit] for unit in units], CPU)
        change_policy(offloader, mode=recorder, on_saved=recorder.on_saved, on_unpacked=recorder.on_unpacked)
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = forward(x)
        recorder.begin_backward()
        loss.backward()
        recorder.end_backward()
        offloader.end_backward()
        change_policy(offloader, mode=None, on_saved=None, on_unpacked=None)
        recorder.finish()
        recorder.close()
    return recorder.graph


def test_intervals_between_saved_tensors(tmp_path: Path) -> None:
    unit = Unit()
    graph = record(tmp_path, [unit], unit)
    saved = {item.name: item for item in graph.saved(MIB)}
    assert sorted(saved) == ["exp", "tanh"]
    unit_call = saved["exp"].unit_call
    assert graph.transients.largest == max(buffer.nbytes for buffer in graph.buffers if buffer.maker is not None)
    forward, wanted, backward = graph.transients.measure()
    in_mib = {key[1]: round(nbytes / MIB) for key, nbytes in forward.items() if key[0] == unit_call}
    # Before the first save: two sums and their concatenation; after `exp`: its input, then its copy.
    assert in_mib == {None: 4, saved["exp"].buffer: 4, saved["tanh"].buffer: 4}
    assert round(wanted[saved["tanh"].buffer] / MIB) == 0
    # The gradient of `tanh`, freed when its halves are added up; then that of `exp`.
    assert round(backward[unit_call, saved["tanh"].buffer] / MIB) >= 4
    assert round(wanted[saved["exp"].buffer] / MIB) <= 6
    assert round(backward[unit_call, saved["exp"].buffer] / MIB) >= 4


class Shift(nn.Module):
    """Its backward returns the gradient that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_a_gradient_that_compiled_units_pass_on_is_counted_once(tmp_path: Path) -> None:
    units = [Shift() for _ in range(4)]
    for unit in units:
        unit.compile(backend="aot_eager")

    def forward(x: Tensor) -> Tensor:
        hidden = x * 2
        for unit in units:
            hidden = unit(hidden)
        return hidden.exp().sum()

    _, _, backward = record(tmp_path, units, forward).transients.measure()
    assert round(max(backward.values()) / MIB) == 1  # `x.grad`, which stays, is not transient
