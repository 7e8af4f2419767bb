"""Measurements that plans are made of: a training step operator by operator, the host's overhead, and the machine."""

from lightning_ssd.profiling.launch_costs import measure_launches
from lightning_ssd.profiling.machine import adam_step, measure_machine, mixed_bandwidth
from lightning_ssd.profiling.model import Profiler, count_bytes, count_samples, unit_profiles
from lightning_ssd.profiling.recorder import Recorder
from lightning_ssd.profiling.tracing import TracingError, fake_tensors, trace

__all__ = [
    "Profiler",
    "Recorder",
    "TracingError",
    "adam_step",
    "count_bytes",
    "count_samples",
    "fake_tensors",
    "measure_launches",
    "measure_machine",
    "mixed_bandwidth",
    "trace",
    "unit_profiles",
]
