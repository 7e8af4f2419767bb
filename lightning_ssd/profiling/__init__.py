"""Measurements for planners: the operators of a training step, the host's overhead, and the machine's rates."""

from lightning_ssd.profiling.host_overhead import measure_host_overhead
from lightning_ssd.profiling.lifetimes import LifetimeRecorder
from lightning_ssd.profiling.limits import (
    add_unseen_memory,
    current_placement,
    limit_hardware,
    measure_training_machine,
    offloading_plan,
    with_measured_step_rate,
)
from lightning_ssd.profiling.machine import adam_step, copy_bandwidths, measure_machine, memory_bandwidth
from lightning_ssd.profiling.profiler import Profiler, count_samples, step_workspace
from lightning_ssd.profiling.trace_mode import TraceMode
from lightning_ssd.profiling.tracing import TracingError, fake_tensors, moved_bytes, trace
from lightning_ssd.profiling.unit_profiles import unit_profiles
