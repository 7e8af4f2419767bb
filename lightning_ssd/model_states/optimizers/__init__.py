"""The user's optimizers, and their arithmetic on flat parameters.

The modules, in the order in which they are best read:

- `user_optimizers`: parameters and groups of the user's optimizers, and which may be stepped a part at a time.
- `optimizers`: flat optimizers: the same class and options on a flat parameter in host memory.
- `rounding`: stochastic rounding of moments in bf16.
- `adam`: torch's roundings of Adam and AdamW, and the calls of `adam.c`.
- `adam_c`: the compiled library of `adam.c`.
- `adam_cuda`: the same step on a CUDA device.
- `rank_mean`: the mean of several ranks' gradients, which a step computes as it reads it.
- `step_work`: calls of `adam.c` that are made together.
- `group_options`: options of parameter groups, copied before the optimizer's own code runs.
- `optimizer_state`: `Optimizer.state` while some states are offloaded.
- `whole_step`: optimizers that couple parameters: stepped once, whole, on the CPU.
"""

from lightning_ssd.model_states.optimizers.adam_c import begin_loading_kernel
from lightning_ssd.model_states.optimizers.adam_cuda import AdamValues, cuda_step, has_cuda_step
from lightning_ssd.model_states.optimizers.group_options import GroupOptions
from lightning_ssd.model_states.optimizers.optimizer_state import check_state, guard_state, resident_states
from lightning_ssd.model_states.optimizers.optimizers import (
    ADAM_MOMENTS,
    AdamOptimizer,
    ElementwiseOptimizer,
    FlatOptimizer,
    GenericOptimizer,
    Options,
    StepHalf,
    StepInput,
    WholeOptimizer,
    is_adam,
    make_flat_optimizer,
    runs_closure_first,
)
from lightning_ssd.model_states.optimizers.rank_mean import RankMean
from lightning_ssd.model_states.optimizers.step_work import StepWork, do_together
from lightning_ssd.model_states.optimizers.user_optimizers import (
    Groups,
    check_steps_not_compiled,
    groups_of,
    parameters_of,
    register_optimizer,
    runs_within_step,
    stepped_whole,
    steps_whole,
    unscales_itself,
    zeroes_otherwise,
)
from lightning_ssd.model_states.optimizers.whole_step import WholeStep
