"""Lightning callbacks with which a user observes, tunes or plans offloading.

The modules, by subject, in the order in which they are best read:

- callbacks of every training: `defaults`, `micro_batch_switch`, `prefetch_scheduler`, `offload_monitor`,
  `auto_planner`.
- the decision of `offload="auto"`: `auto_planner`, `memory_guard`, `seen_batches`, `obstacles`, `proven_rules`.
- plans of operators: `step_profiling`, `swap_planner` (the phases of a plan), `plan_maker`, `plan_runner`,
  `plan_progress`, `plan_report`, `shape_planner`, `planned_shapes`, `profiling_budget`.
- plans of compiled code: `region_planner` (events), `region_recording`, `region_search` (trials), `region_progress` (of
  one shape), `storage_planner`, `recompilation`, `fragments`, `resident_states` (model states).
- plans of earlier trainings: `plan_cache`, `plan_key`, `cached_regions`.
- times of steps: `step_timer`, `step_drift`.
- for a user to add: `activation_offload`, `model_profiler`, `timeline_recorder`, `save_folder`.
- helpers: `offloader` (finds the offloader of a training), `averaging` (Lightning's averages of weights),
  `output_files` (checks files before the training).
"""

from lightning_ssd.callbacks.activation_offload import ActivationOffload
from lightning_ssd.callbacks.auto_planner import AutoPlanner
from lightning_ssd.callbacks.averaging import average_of, averages_weights, summon_full_params
from lightning_ssd.callbacks.defaults import (
    add_default_callbacks,
    find_offload_callbacks,
    remove_default_callbacks,
    restore_offload_callbacks,
)
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.model_profiler import ModelProfiler
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.offloader import trainer_callbacks
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.save_folder import SaveFolder
from lightning_ssd.callbacks.swap_planner import SwapPlanner
from lightning_ssd.callbacks.timeline_recorder import TimelineRecorder

__all__ = [
    "ActivationOffload",
    "AutoPlanner",
    "MicroBatchSwitch",
    "ModelProfiler",
    "OffloadMonitor",
    "PrefetchScheduler",
    "SaveFolder",
    "SwapPlanner",
    "TimelineRecorder",
    "add_default_callbacks",
    "average_of",
    "averages_weights",
    "find_offload_callbacks",
    "remove_default_callbacks",
    "restore_offload_callbacks",
    "summon_full_params",
    "trainer_callbacks",
]
