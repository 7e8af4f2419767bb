"""Streams, events, copies, threads, cores and memory sizes. Knows torch's devices and `storage`.

`CopyEngine` copies bytes between the training device and host memory, `Clock` measures spans of the compute stream,
`Worker` runs jobs when the futures that they depend on are done, and `StagedReader` reads from SSDs to the host memory
from which bytes are copied to the device.
"""

from lightning_ssd.device.c_library import load_c_library
from lightning_ssd.device.cgroups import CGROUPS, PROC
from lightning_ssd.device.clock import Clock, HostClock, Stopwatch, make_clock
from lightning_ssd.device.copies import CopyEngine, CPUCopyEngine, CUDACopyEngine, WorkCounter, make_copy_engine
from lightning_ssd.device.cores import available_cores, kernel_threads, share_cores
from lightning_ssd.device.cuda_events import Mark
from lightning_ssd.device.empty_storage import allow_access, refuse_access
from lightning_ssd.device.memory import (
    FRAGMENTS,
    CUDAMemory,
    allocator_memory,
    available_memory,
    count_evictable,
    process_gpu_memory,
    process_ram,
    trim_heap,
    usable_gpu_memory,
    usable_memory,
)
from lightning_ssd.device.peer_access import close_memory, export_memory, open_memory
from lightning_ssd.device.segments import ExpandableSegments, fixed_segments
from lightning_ssd.device.staging import StagedReader, h2d_and_release
from lightning_ssd.device.worker import Worker
