"""Optimizer steps of offloaded flat parameters, on the CPU.

The modules, in the order in which they are best read:

- `running_step`: the optimizer whose step runs, and whether the step may begin in backward.
- `gradient_arrivals`: hooks of gradients, from which they are offloaded, and steps submitted.
- `gradient_clipping`: clipping and unscaling between backward and step.
- `step_scheduler`: when the step of a flat parameter begins, and which futures wait for it.
- `step`: the step of one flat parameter, from the arrival of its gradient to its commit.
- `rank_steps`: sums of gradients over ranks, and steps that another rank makes.
- `peer_sums`: sums of gradients over ranks on the owner's device.
- `device_states`: optimizer states on the owner's device, while it has memory to spare.
- `rank_fetches`: values that other ranks read, from the owner's device.
- `host_sums`: sums of gradients over hosts.
- `rank_reduction`: gradients of ranks that torch reduces, and buffers.
- `weights_first`: units whose compute weights are stepped before the rest.
- `step_records`: the steps that the journal of `recover=True` has recorded.
- `step_history`: the last steps, and the roll-back of those that were committed in part.
- `optimizer_hooks`: hooks on `step` and `zero_grad` of the user's optimizers.
"""

from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.steps.gradient_arrivals import GradientArrivals
from lightning_ssd.model_states.steps.gradient_clipping import GradientClipping, unscale_as_optimizer
from lightning_ssd.model_states.steps.optimizer_hooks import hook_step, hook_zero_grad, keep_last
from lightning_ssd.model_states.steps.rank_reduction import RankReduction
from lightning_ssd.model_states.steps.rank_steps import RankSteps
from lightning_ssd.model_states.steps.running_step import RunningStep
from lightning_ssd.model_states.steps.step_records import StepRecords
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
