"""The profile of a machine: throughput of its resources, memory budgets, and the host's overhead of a plan."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from lightning_ssd.planning.validation import (
    as_mapping,
    check_not_negative,
    check_positive,
    from_mapping,
    load_json,
    save_json,
)
from lightning_ssd.sizes import GPU_USABLE, format_bytes

INFINITE_STEP_RATE = 1e20
"""Parameters/s of a CPU whose optimizer steps take no time."""


@dataclass(frozen=True)
class HostOverhead:
    """Seconds that following a plan adds on the host thread that launches the GPU's work.

    Attributes:
        dispatch: seconds per intercepted operation of a forward.
        pack: seconds per saved tensor, for packing and unpacking, in intercepted units and where weights are offloaded.
        record: seconds per recomputed operation to record its inputs in forward.
        replay: seconds per recomputed operation to replay it in backward.
        offload: seconds per tensor that is offloaded.
        prefetch: seconds per tensor that is prefetched.
        checkpoint: seconds per saved tensor of a checkpointed unit in its forward, for torch's bookkeeping.
        rerun: the same in its backward. The unit's own operations, which run again, are not included.
    """

    dispatch: float = 0.0
    pack: float = 0.0
    record: float = 0.0
    replay: float = 0.0
    offload: float = 0.0
    prefetch: float = 0.0
    checkpoint: float = 0.0
    rerun: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_not_negative(f"host_overhead.{field.name}", getattr(self, field.name))

    def times(self, factor: float) -> "HostOverhead":
        """Returns the overhead multiplied by `factor`."""
        return HostOverhead(*(factor * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class HardwareProfile:
    """Measured throughput and memory of a machine with one GPU.

    Attributes:
        name: name of the machine.
        gpu_flops: achieved FLOP/s of the GPU in large matrix products.
        gpu_memory_bandwidth: bytes/s of the GPU's own memory.
        copy_out: bytes/s from the GPU to pinned host memory, alone.
        copy_in: bytes/s from pinned host memory to the GPU, alone.
        copy_out_both: bytes/s from the GPU while the other direction is busy.
        copy_in_both: bytes/s to the GPU while the other direction is busy.
        ssd_read: bytes/s of all SSDs together, reading alone.
        ssd_write: bytes/s of all SSDs together, writing alone.
        ssd_mixed: bytes/s of all SSDs together, reading and writing at once.
        cpu_step_rate: parameters/s of the optimizer on the CPU while nothing else uses host memory.
        gpu_bytes: budget of GPU memory.
        host_bytes: budget of host memory for offloaded tensors.
        ssd_bytes: budget of SSD space.
        ssd_bytes_per_day: bytes that may be written to SSDs in a day of training; None: unlimited.
        host_overhead: the host's overhead of following a plan; zero if it was not measured.
        host_memory_bandwidth: bytes/s of host memory, which copies and the CPU optimizer share; None: they do not
            slow each other.
        gpu_attention_flops: achieved FLOP/s of the GPU in causal attention, forward and backward together. None:
            attention runs at `gpu_flops`, as it does if that is less.
        cpu_weights_first: seconds in which the CPU makes the compute weights of a step that is made in two halves /
            seconds of a whole step. The default is by bytes of exact states that are read and written, with 16-bit
            weights and gradients.
        cpu_rest_later: seconds in which the CPU makes master weights and optimizer states, the second half of such a
            step / seconds of a whole step.
    """

    name: str
    gpu_flops: float
    gpu_memory_bandwidth: float
    copy_out: float
    copy_in: float
    copy_out_both: float
    copy_in_both: float
    ssd_read: float
    ssd_write: float
    ssd_mixed: float
    cpu_step_rate: float
    gpu_bytes: int
    host_bytes: int
    ssd_bytes: int
    ssd_bytes_per_day: float | None = None
    host_overhead: HostOverhead = HostOverhead()
    host_memory_bandwidth: float | None = None
    gpu_attention_flops: float | None = None
    cpu_weights_first: float = 16 / 28
    cpu_rest_later: float = 26 / 28

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "ssd_bytes_per_day":
                if self.ssd_bytes_per_day is not None:
                    check_not_negative(field.name, self.ssd_bytes_per_day)
            elif field.name in ("host_memory_bandwidth", "gpu_attention_flops"):
                if (value := getattr(self, field.name)) is not None:
                    check_positive(field.name, value)
            elif field.name in ("host_bytes", "ssd_bytes"):
                check_not_negative(field.name, getattr(self, field.name))
            elif field.name not in ("name", "host_overhead"):
                check_positive(field.name, getattr(self, field.name))
        for alone, both in (("copy_out", "copy_out_both"), ("copy_in", "copy_in_both")):
            if getattr(self, both) > getattr(self, alone):
                raise ValueError(
                    f"`{both}={getattr(self, both)!r}` is more than `{alone}={getattr(self, alone)!r}`: a direction is "
                    f"not faster while the other is busy. Measure again, or set `{both}` to `{alone}`."
                )

    @property
    def gpu_cache_bytes(self) -> int:
        """Bytes of GPU memory that torch's allocator may hold, cached memory included. `gpu_bytes` is a share of it."""
        return int(self.gpu_bytes / GPU_USABLE)

    def with_ssds(self, factor: float) -> "HardwareProfile":
        """Returns the machine with SSD bandwidths multiplied by `factor`."""
        return replace(
            self,
            ssd_read=factor * self.ssd_read,
            ssd_write=factor * self.ssd_write,
            ssd_mixed=factor * self.ssd_mixed,
        )

    def with_host_overhead(self, factor: float) -> "HardwareProfile":
        """Returns the machine with the host's overhead multiplied by `factor`."""
        return replace(self, host_overhead=self.host_overhead.times(factor))

    def with_link(self, factor: float) -> "HardwareProfile":
        """Returns the machine with copy bandwidths multiplied by `factor`, in both directions."""
        return replace(
            self,
            copy_in=factor * self.copy_in,
            copy_out=factor * self.copy_out,
            copy_in_both=factor * self.copy_in_both,
            copy_out_both=factor * self.copy_out_both,
        )

    def to_json(self, path: str | Path) -> None:
        """Saves the profile in the file `path`."""
        save_json(self, path)

    @classmethod
    def from_json(cls, path: str | Path) -> "HardwareProfile":
        """Loads a profile from the JSON file `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is invalid; the message names the file and the field.
        """
        where = f"the hardware profile {path}"
        machine = dict(as_mapping(load_json(path, where), where))
        if not {"gpu_flops", "gpu_bytes"} & machine.keys():
            raise ValueError(
                f"{where} has no `gpu_flops`: it is no file that `lightning-ssd plan --save-machine` has written. Give "
                "such a file."
            )
        overhead = machine.get("host_overhead", {})
        machine["host_overhead"] = from_mapping(HostOverhead, overhead, f"`host_overhead` of {where}")
        return from_mapping(cls, machine, where)

    def describe(self) -> str:
        """Returns a readable summary of the profile."""
        overhead = self.host_overhead
        rate = self.gpu_attention_flops
        attention = "" if rate is None else f"{rate / 1e12:.0f} in attention, "
        return "\n".join(
            [
                f"{self.name}",
                f"  GPU     {self.gpu_flops / 1e12:.0f} TFLOP/s, {attention}{format_bytes(self.gpu_bytes)} at "
                f"{self.gpu_memory_bandwidth / 1e9:.0f} GB/s",
                f"  copies  out {self.copy_out / 1e9:.1f} GB/s, in {self.copy_in / 1e9:.1f} GB/s; both at once "
                f"{self.copy_out_both / 1e9:.1f} and {self.copy_in_both / 1e9:.1f} GB/s",
                f"  SSD     read {self.ssd_read / 1e9:.1f} GB/s, write {self.ssd_write / 1e9:.1f} GB/s, mixed "
                f"{self.ssd_mixed / 1e9:.1f} GB/s, {format_bytes(self.ssd_bytes)}",
                f"  CPU     {self.cpu_step_rate / 1e9:.2f} G parameters/s, {format_bytes(self.host_bytes)}"
                + ("" if (memory := self.host_memory_bandwidth) is None else f" at {memory / 1e9:.0f} GB/s"),
                f"  plan    host time of {1e6 * overhead.dispatch:.0f} us an operation, {1e6 * overhead.pack:.0f} us a "
                f"saved tensor; {1e6 * (overhead.record + overhead.replay):.0f} us more for a recomputed operation, "
                f"{1e6 * (overhead.offload + overhead.prefetch):.0f} us more for an offloaded tensor; "
                f"{1e6 * overhead.checkpoint:.0f} us a saved tensor of a checkpointed unit",
            ]
        )
