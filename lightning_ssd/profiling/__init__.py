"""Measurements that plans are made of: a training step operator by operator, the host's overhead, and the machine."""

from lightning_ssd.profiling.host_overhead import measure_host_overhead
from lightning_ssd.profiling.machine import adam_step, measure_machine, mixed_bandwidth
from lightning_ssd.profiling.model import Profiler, count_bytes, count_samples, unit_profiles
from lightning_ssd.profiling.trace_mode import TraceMode
from lightning_ssd.profiling.tracing import TracingError, fake_tensors, trace

__all__ = [
    "Profiler",
    "TraceMode",
    "TracingError",
    "adam_step",
    "count_bytes",
    "count_samples",
    "fake_tensors",
    "measure_host_overhead",
    "measure_machine",
    "mixed_bandwidth",
    "trace",
    "unit_profiles",
]
