"""Gradients: offloaded to host memory, summed in fp32, clipped and scaled.

The modules, in the order in which they are best read:

- `gradient`: the gradient of one flat parameter, and the pool of its buffers.
- `gradient_offload`: copies gradients to the host as backward computes them, and sums them.
- `copies_in_flight`: device memory of gradients that are being copied.
- `running_backward`: whether the gradients of a backward that fails can be dropped.
- `norms`: norms of the gradients, which decide the scale of their step.
- `grad_scale`: the gradient scale of a step (clip coefficient, loss scale), or the decision to skip it.
"""

from lightning_ssd.model_states.gradients.grad_scale import Clipping, GradScaleDecision, add_check, is_power_of_two
from lightning_ssd.model_states.gradients.gradient import Gradient, GradientPool, GradientState, SharedGradient, clip
from lightning_ssd.model_states.gradients.gradient_offload import GradientOffloader
