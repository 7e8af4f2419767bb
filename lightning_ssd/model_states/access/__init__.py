"""Reads and writes of offloaded parameters and gradients by user code.

The modules, in the order in which they are best read:

- `torch_functions`: the effect of each function of torch on its tensor arguments.
- `references`: references that autograd saves in place of offloaded weights.
- `autograd_forwards`: the running forward of an `autograd.Function` of user code.
- `grad_dtype`: gradients of 16-bit weights that are summed in fp32.
- `parameter`: the tensor classes of offloaded parameters and of aliases of them.
- `operands`: arguments and results of operators on offloaded tensors.
- `sources`: whole values of an offloaded tensor, read and written wherever they are stored.
- `access`: runs operators outside of a unit's forward.
- `gradient_access`: `Tensor.grad` of offloaded parameters.
"""

from lightning_ssd.model_states.access.access import Access
from lightning_ssd.model_states.access.grad_dtype import GradDtype
from lightning_ssd.model_states.access.gradient_access import GradientAccess
from lightning_ssd.model_states.access.parameter import OffloadedTensor, OffloadedView, share_all
from lightning_ssd.model_states.access.sources import end_aliases
