"""Measures the machine's rates for the planner (FLOP/s, bytes/s, stepped parameters/s), in a few seconds each."""

import os
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from lightning_ssd.device import usable_gpu_memory, usable_memory
from lightning_ssd.model_states import (
    AdamOptimizer,
    FlatParameter,
    Layout,
    RankMean,
    StagedState,
    StepHalf,
    StepInput,
    moments_of,
)
from lightning_ssd.planning import INFINITE_STEP_RATE, HardwareProfile
from lightning_ssd.profiling.host_overhead import measure_host_overhead
from lightning_ssd.storage import BlobStore, Slab
from lightning_ssd.types import StateFormat

MATRIX_SIZE = 8192
"""Rows and columns of the matrices that a GPU multiplies; a CPU multiplies matrices of an eighth of this size."""

ATTENTION_TOKENS = 1024
"""Tokens of a sample of the attention that a GPU computes; a CPU computes that of an eighth of the tokens."""

COPY_BYTES = 2**27
"""Bytes of a copy."""

STEP_PARAMETERS = 2**25
"""Parameters of a timed optimizer step: with 16 bytes each, more than the processor's caches hold. The kernel clears
that memory first, which takes longer than all steps."""

REPEATS = 5
"""Measured calls, after one that warms up."""


def measure_machine(
    path: Path | None,
    *,
    attention: bool = False,
    state_format: StateFormat | None = "fp32",
    host_memory: int | None = None,
) -> HardwareProfile:
    """Returns the measured rates of the host, the GPU if there is one, and the SSD.

    Args:
        path: a directory on the SSD; None: no SSD is measured.
        attention: whether to measure the FLOP/s of attention, which dry runs need.
        state_format: format of the states that the optimizer steps on the CPU; None: it steps none there, and takes no
            time.
        host_memory: most bytes of host memory that measurements take; None: no limit. They need 1 GiB, and are less
            exact with less.

    Raises:
        StorageError: the directory can't be used.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    copied, stepped = COPY_BYTES, STEP_PARAMETERS
    if host_memory is not None:  # both ends of copies, and 16 bytes for each parameter, are in memory at a time
        copied = min(copied, max(host_memory // 8, 2**22))
        stepped = min(stepped, max(host_memory // 32 // 64 * 64, 2**16))
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
    ):  # a measurement during a training must not change its random numbers
        flops = _products(device)
        attention_flops = _attention(device) if attention else None
    copies = _Copies(device, copied)
    copy_in, copy_out, both = copies.bandwidths()
    step_rate, slowdown = INFINITE_STEP_RATE, 0.0
    halves: dict[str, float] = {}
    if state_format is not None:
        run_step = adam_step(stepped, state_format=state_format)
        step_seconds = _seconds(torch.device("cpu"), run_step)
        step_rate = stepped / step_seconds
        for name, half in (("cpu_weights_first", "weights"), ("cpu_rest_later", "opt_state")):
            halves[name] = _seconds(torch.device("cpu"), partial(run_step, half)) / step_seconds
        if cuda:
            # Twice as many copies as fit into the time of a step, because copies slow the step down.
            count = ceil(2 * (REPEATS + 1) * step_seconds * max(copy_in, copy_out) / copied)
            slowdown = 1 - step_seconds / copies.seconds_beside(count, run_step)
    copies.close()
    return HardwareProfile(
        name=torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        gpu_flops=flops,
        gpu_memory_bandwidth=memory_bandwidth(device),
        copy_out=copy_out,
        copy_in=copy_in,
        copy_out_both=min(copy_out, both),
        copy_in_both=min(copy_in, both),
        ssd_read=read,
        ssd_write=write,
        ssd_mixed=mixed_bandwidth(read, write),
        cpu_step_rate=step_rate,
        gpu_bytes=usable_gpu_memory(device) if cuda else host,
        host_bytes=host,
        ssd_bytes=ssd_bytes,
        host_overhead=measure_host_overhead(device),
        # The copy bandwidth at which, by extrapolation, no memory bandwidth would remain for the optimizer.
        host_memory_bandwidth=2 * min(copy_in, copy_out, both) / slowdown if slowdown > 0 else None,
        gpu_attention_flops=attention_flops,
        **halves,
    )


def mixed_bandwidth(read: float, write: float) -> float:
    """Returns the bandwidth of a drive that reads and writes equal bytes in turn, from both bandwidths (bytes/s)."""
    return 2 / (1 / read + 1 / write)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the minimum seconds of `REPEATS` + 1 calls of `run`, the first of which warms up."""
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
    """Returns the FLOP/s of a matrix product in the device's usual training dtype."""
    size, dtype = (MATRIX_SIZE, torch.bfloat16) if device.type == "cuda" else (MATRIX_SIZE // 8, torch.float32)
    one = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _seconds(device, lambda: one @ one)


def _attention(device: torch.device) -> float:
    """Returns the FLOP/s of causal attention in the device's usual training dtype, forward and backward together."""
    tokens, dtype = ATTENTION_TOKENS, torch.bfloat16
    if device.type != "cuda":
        tokens, dtype = tokens // 8, torch.float32
    samples = heads = 16
    width = 128
    shape = (samples, heads, tokens, width)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=dtype, device=device)

    def run() -> None:
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient)

    # Two products forward and five backward, of which half of the elements are needed.
    flops = (2 + 5) * 2 * samples * heads * tokens**2 * width / 2
    return flops / _seconds(device, run)


def memory_bandwidth(device: torch.device) -> float:
    """Returns the bandwidth of the device's memory, bytes read and written per second."""
    values = torch.empty(2 * COPY_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    return 4 * COPY_BYTES / _seconds(device, lambda: other.copy_(values))


class _Copies:
    """Copies of `nbytes` bytes between the device and host memory, page-locked for a GPU.

    Until `close`, the memory is this object's; each method returns when the device has ended its copies.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._slabs = [Slab(nbytes, pin=device.type == "cuda") for _ in range(2)]
        self._hosts = [slab.tensor for slab in self._slabs]
        self._others = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def bandwidths(self) -> tuple[float, float, float]:
        """Returns the bandwidths (bytes/s) to the device, from the device, and in each direction if both are in use."""
        nbytes, hosts, others = self._nbytes, self._hosts, self._others
        alone_in = nbytes / _seconds(self._device, lambda: others[0].copy_(hosts[0], non_blocking=True))
        alone_out = nbytes / _seconds(self._device, lambda: hosts[1].copy_(others[1], non_blocking=True))
        if not self._streams:
            return alone_in, alone_out, min(alone_in, alone_out) / 2
        return alone_in, alone_out, nbytes / _seconds(self._device, self._copy_both_ways)

    def seconds_beside(self, count: int, run: Callable[[], None]) -> float:
        """Returns the minimum seconds of `run`, on the CPU, while `count` copies run each way.

        The result is infinity if the copies end before the first call of `run` does.
        """
        for _ in range(count):
            self._copy_both_ways()
        seconds = float("inf")
        for _ in range(REPEATS):
            begin = perf_counter()
            run()
            taken = perf_counter() - begin
            if any(stream.query() for stream in self._streams):  # copies have ended meanwhile
                break
            seconds = min(seconds, taken)
        torch.cuda.synchronize(self._device)
        return seconds

    def close(self) -> None:
        """Frees the memory on both sides."""
        self._hosts.clear()
        self._others.clear()
        for slab in self._slabs:
            slab.close()

    def _copy_both_ways(self) -> None:
        """Issues a copy to the device and one from it, on two streams."""
        pairs = (self._others[0], self._hosts[0]), (self._hosts[1], self._others[1])
        for stream, (target, source) in zip(self._streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)


def copy_bandwidths(device: torch.device) -> tuple[float, float, float]:
    """Returns the bandwidths (bytes/s) to the device, from the device, and in each direction if both are in use."""
    copies = _Copies(device, COPY_BYTES)
    found = copies.bandwidths()
    copies.close()
    return found


def adam_step(
    numel: int,
    *,
    state_format: StateFormat = "fp32",
    compiled: bool = True,
    two_versions: bool = False,
    ranks: int = 1,
) -> Callable[..., None]:
    """Returns a function that steps AdamW once on the CPU, from bf16 gradients to bf16 weights.

    The function makes a whole step, or the half that is its argument (`StepHalf`).

    Args:
        numel: number of parameters, a multiple of 64.
        state_format: format of master weights and moments (see `SSDOffloadStrategy`).
        compiled: whether to use our own kernel instead of torch's.
        two_versions: whether new values are written to a second version, as those of speculative steps are, instead of
            in place.
        ranks: number of gradients, whose mean is the step's if there are several.
    """
    parameter = nn.Parameter(torch.empty(()).expand(numel))
    flat = FlatParameter("flat", [("weight", parameter)], torch.bfloat16, torch.device("cpu"))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)  # a GPU's optimizer is stepped by that kernel
    flat_optimizer = AdamOptimizer(flat, compiled=compiled)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    split, moments = state_format != "fp32", moments_of(state_format)
    layout = Layout(flat, split, flat_optimizer.state_names(options), steps=True, versions=1, moments=moments)

    def make_version() -> StagedState:
        weights, opt_state = (Slab(size, pin=False).tensor.zero_() for size in (flat.nbytes, layout.opt_state_bytes))
        return layout.views(weights, opt_state)

    staged = make_version()
    staged.uncommitted = make_version() if two_versions else None
    gradients = [Slab(flat.nbytes, pin=False).tensor.view(torch.bfloat16).fill_(0.01) for _ in range(ranks)]
    gradient = gradients[0] if ranks == 1 else RankMean(gradients, 1.0 / ranks)

    def step(half: StepHalf = "whole") -> None:
        flat_optimizer.step(StepInput(options, gradient, [True], 1.0), staged, half)

    return step
