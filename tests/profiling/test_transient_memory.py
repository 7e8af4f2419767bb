"""Memory that is neither weights nor saved: how much there is, and when."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_ssd.profiling import TraceMode
from tests.support.offloader import CPU, change_policy, open_cache

MIB = 2**20


class Unit(nn.Module):
    """A product that is not saved, twice itself, and what is saved of that."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.cat([x + 1, x + 2])  # 1 + 1 + 2 MiB at once, of which 2 stay
        second = first.exp()  # 2 MiB, saved
        del first
        third = torch.cat([second, second])  # 4 MiB
        return third.tanh().sum() * self.scale  # 4 MiB, saved


def test_intervals_between_saved_tensors(tmp_path: Path) -> None:
    unit = Unit()
    x = torch.randn(MIB // 4, requires_grad=True)
    with open_cache(tmp_path, host_memory="64MiB") as cache:
        cache.min_bytes = MIB
        recorder = TraceMode([[unit]], CPU)
        change_policy(cache, mode=recorder, on_saved=recorder.saved, on_unpacked=recorder.wanted)
        cache.begin_micro_batch()
        with cache.hooks():
            loss = unit(x)
        recorder.begin_backward()
        loss.backward()
        recorder.end_backward()
        cache.end_backward()
        change_policy(cache, mode=None, on_saved=None, on_unpacked=None)
        recorder.finish()
        recorder.close()
    graph = recorder.graph
    saved = {item.name: item for item in graph.saved(MIB)}
    assert sorted(saved) == ["exp", "tanh"]
    visit = saved["exp"].visit
    forward, wanted, backward = graph.transients.measure()
    in_mib = {key[1]: round(nbytes / MIB) for key, nbytes in forward.items() if key[0] == visit}
    # Before anything is saved: two sums and both of them side by side; with `exp`, what it was made of, then its copy.
    assert in_mib == {None: 4, saved["exp"].buffer: 4, saved["tanh"].buffer: 4}
    assert round(wanted[saved["tanh"].buffer] / MIB) == 0
    # The gradient of `tanh`, which leaves as its halves are added up; then that of `exp`.
    assert round(backward[visit, saved["tanh"].buffer] / MIB) >= 4
    assert round(wanted[saved["exp"].buffer] / MIB) <= 6
    assert round(backward[visit, saved["exp"].buffer] / MIB) >= 4
