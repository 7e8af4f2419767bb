"""Lightning callbacks with which a user observes, tunes or plans offloading.

The modules, by subject, in the order in which they are best read:

- callbacks of every training: `defaults`, `micro_batch_switch`, `prefetch_scheduler`, `offload_monitor`,
  `auto_planner`.
- plans of operators: `swap_planner`, `training_events` (passes events to `autoplan`), `step_profiling` (refuses code
  that is compiled), `training` (a Trainer's training, as `autoplan` sees it).
- for a user to add: `activation_offload`, `pipeline_stages` (for its `training_step`), `model_profiler`,
  `timeline_recorder`, `save_folder`.
- helpers: `find` (finds the offloader of a training), `output_files` (checks files before the training),
  `wear_line` (of `offload_monitor`).
"""

from lightning_ssd.callbacks.activation_offload import ActivationOffload
from lightning_ssd.callbacks.auto_planner import AutoPlanner
from lightning_ssd.callbacks.defaults import (
    add_default_callbacks,
    find_offload_callbacks,
    remove_default_callbacks,
    restore_offload_callbacks,
)
from lightning_ssd.callbacks.find import trainer_callbacks
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.model_profiler import ModelProfiler
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.pipeline_stages import follow_stages
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.save_folder import SaveFolder
from lightning_ssd.callbacks.swap_planner import SwapPlanner
from lightning_ssd.callbacks.timeline_recorder import TimelineRecorder
from lightning_ssd.callbacks.training import clips_norm
