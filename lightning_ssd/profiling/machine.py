"""What this machine does in a second, for the planner: a few seconds of work on each of its parts."""

import os
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from lightning_ssd.device import usable_gpu_memory, usable_memory
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.optimizers import AdamOptimizer
from lightning_ssd.model_states.state_store import Layout
from lightning_ssd.planning import HardwareProfile
from lightning_ssd.profiling.host_overhead import measure_host_overhead
from lightning_ssd.storage import BlobStore
from lightning_ssd.storage.slab import Slab

PRODUCT = 8192
"""Rows and columns of the matrices that the device multiplies; on a CPU an eighth of it."""

COPIED = 2**28
"""Bytes of a copy."""

STEPPED = 2**26
"""Parameters of an optimizer step: more than caches hold."""

REPEATS = 5


def measure_machine(path: Path | None) -> HardwareProfile:
    """Returns what the machine does, its GPU if it has one, and the drive that `path` is on.

    Args:
        path: a directory on the SSD to use; None: no SSD is used.

    Raises:
        StorageError: it can't be used.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    copy_in, copy_out, both = _copies(device)
    write = read = 1.0
    ssd_bytes = 0
    if path is not None:
        store = BlobStore([path], device=device)
        write, read = store.write_bandwidth, store.read_bandwidth
        store.close()
        statistics = os.statvfs(path)
        ssd_bytes = statistics.f_bavail * statistics.f_frsize
    host = usable_memory()
    with torch.random.fork_rng(
        [torch.cuda.current_device()] if cuda else []
    ):  # who measures amid a training draws none of its random numbers
        flops = _products(device)
        stepping = adam_step(STEPPED)
        step = _seconds(torch.device("cpu"), stepping)
        # Twice as many copies as fit into that time: steps take longer beside them.
        count = ceil(2 * (REPEATS + 1) * step * max(copy_in, copy_out) / COPIED)
        beside = _beside_copies(device, count, stepping) if cuda else step
    slower = 1 - step / beside
    return HardwareProfile(
        name=torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        gpu_flops=flops,
        gpu_memory_bandwidth=_bandwidth(device),
        copy_out=copy_out,
        copy_in=copy_in,
        copy_out_both=min(copy_out, both),
        copy_in_both=min(copy_in, both),
        ssd_read=read,
        ssd_write=write,
        ssd_mixed=mixed_bandwidth(read, write),
        cpu_step_rate=STEPPED / step,
        gpu_bytes=usable_gpu_memory(device) if cuda else host,
        host_bytes=host,
        ssd_bytes=ssd_bytes,
        launch=measure_host_overhead(device),
        # As many bytes of copies as would leave nothing of it to the optimizer.
        host_memory_bandwidth=2 * min(copy_in, copy_out, both) / slower if slower > 0 else None,
    )


def mixed_bandwidth(read: float, write: float) -> float:
    """Returns bytes/s of as many reads as writes, one after the other, from bytes/s of each alone."""
    return 2 / (1 / read + 1 / write)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the least seconds that `run` takes, after one for warming up."""
    least = float("inf")
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        least = min(least, perf_counter() - begin)
    return least


def _products(device: torch.device) -> float:
    """Returns FLOP/s of a matrix product in the dtype that trainings use there."""
    size, dtype = (PRODUCT, torch.bfloat16) if device.type == "cuda" else (PRODUCT // 8, torch.float32)
    one = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _seconds(device, lambda: one @ one)


def _bandwidth(device: torch.device) -> float:
    """Returns bytes/s, read and written, of the device's memory."""
    values = torch.empty(COPIED, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    return 2 * COPIED / _seconds(device, lambda: other.copy_(values))


def _beside_copies(device: torch.device, count: int, run: Callable[[], None]) -> float:
    """Returns the least seconds that `run`, on the CPU, takes while `count` copies run each way; infinity: longer."""
    slabs = [Slab(COPIED, pin=True) for _ in range(2)]
    others = [torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for _ in range(count):
        _copy_both_ways([slab.tensor for slab in slabs], others, streams)
    seconds = float("inf")
    for _ in range(REPEATS):
        begin = perf_counter()
        run()
        taken = perf_counter() - begin
        if any(stream.query() for stream in streams):  # copies have ended meanwhile
            break
        seconds = min(seconds, taken)
    torch.cuda.synchronize(device)
    for slab in slabs:
        slab.close()
    return seconds


def _copy_both_ways(hosts: Sequence[Tensor], others: Sequence[Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
    """Has a copy made to the device, from the first of `hosts`, and one from it, to the second, on a stream each."""
    for stream, target, source in zip(streams, (others[0], hosts[1]), (hosts[0], others[1]), strict=True):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


def _copies(device: torch.device) -> tuple[float, float, float]:
    """Returns bytes/s to the device, from it, and each way with both at once."""
    pin = device.type == "cuda"
    slabs = [Slab(COPIED, pin=pin) for _ in range(2)]
    hosts = [slab.tensor for slab in slabs]
    others = [torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2)]

    def into(target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def both() -> None:
        _copy_both_ways(hosts, others, [torch.cuda.Stream(), torch.cuda.Stream()])

    alone_in = COPIED / _seconds(device, lambda: into(others[0], hosts[0]))
    alone_out = COPIED / _seconds(device, lambda: into(hosts[1], others[1]))
    at_once = COPIED / _seconds(device, both) if pin else min(alone_in, alone_out) / 2
    for slab in slabs:
        slab.close()
    return alone_in, alone_out, at_once


def adam_step(numel: int, *, split: bool = False, compiled: bool = True) -> Callable[[], None]:
    """Returns what makes a step of AdamW of `numel` parameters on the CPU, from bf16 gradients to bf16 weights.

    Args:
        numel: how many, a multiple of 64.
        split: with split master weights, else whole ones.
        compiled: by our own kernel, else by torch's.
    """
    parameter = nn.Parameter(torch.empty(()).expand(numel))
    flat = FlatParameter("flat", [("weight", parameter)], torch.bfloat16, torch.device("cpu"))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)  # a GPU's optimizer is stepped by that kernel
    rule = AdamOptimizer(flat, compiled=compiled)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    layout = Layout(flat, split, rule.state_names(options), steps=True, versions=1)
    weights, opt_state = (Slab(size, pin=False).tensor.zero_() for size in (flat.nbytes, layout.opt_state_bytes))
    staged = layout.views(weights, opt_state)
    gradient = Slab(flat.nbytes, pin=False).tensor.view(torch.bfloat16).normal_()
    return lambda: rule.step(options, staged, gradient, [True], 1.0)
