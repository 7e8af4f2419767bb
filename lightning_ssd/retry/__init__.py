"""A micro-batch that runs out of memory.

- `micro_batch_retry` runs it again with less and less on the device;
- `step_state` records the state that `training_step` may change, and restores it;
- `out_of_memory` makes the note on an error that is raised all the same.
"""

from lightning_ssd.retry.micro_batch_retry import MicroBatchRetry
from lightning_ssd.retry.out_of_memory import explain_out_of_memory
from lightning_ssd.retry.step_state import UNRECORDED, random_states, set_random_states
