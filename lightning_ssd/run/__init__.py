"""One run of a Trainer under the strategy: its offloader and model states, its checkpoints, and its precision.

The modules, by subject, in the order in which they are best read:

- `states`: `RunStates` owns the activation offloader and the model states, and moves model states between tiers.
- set-up: `setup` (settings that the Trainer determines), `user_hooks` (user code that sees gradients), `connection`
  (Lightning's clipping and scaling, passed to model states), `precision` (plugins that do it), `averaging` (Lightning's
  averages of weights), `blocks` (the argument `compile`).
- `attempts`: a micro-batch that runs out of memory is run again.
- `data_parallel`: several processes, one for each device.
- `checkpoints`: files that the strategy writes and reads itself.
"""

from lightning_ssd.run.attempts import end_retry, prepare_retry, retry_backward, run_before_step
from lightning_ssd.run.averaging import average_of, averaging_callbacks
from lightning_ssd.run.blocks import compile_blocks
from lightning_ssd.run.checkpoints import CheckpointFiles, copy_mapped_states, present_path, read_checkpoint
from lightning_ssd.run.data_parallel import DataParallelStrategy
from lightning_ssd.run.precision import scales_only
from lightning_ssd.run.setup import is_fitting
from lightning_ssd.run.states import RunStates
