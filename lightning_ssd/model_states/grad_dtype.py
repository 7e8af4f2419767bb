"""The dtype in which gradients of 16-bit weights are summed: fp32, where plain Lightning sums them in fp32."""

from collections.abc import Iterable

import torch
from torch import nn

from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.parameter import OffloadedParameter


class GradDtype:
    """Sums gradients of 16-bit weights in fp32, in mixed precision, if there are several or if user code reads them.

    Autograd computes these sums if torch has `Tensor.grad_dtype`; otherwise gradients are added on the host.

    Threads: as `Access`, whose operators count the uses.

    Args:
        flat_params: the flat parameters.

    Attributes:
        summed_on_host: flat parameters for which backward has added gradients on the host since the last step.
    """

    def __init__(self, flat_params: Iterable[FlatParameter]) -> None:
        self.summed_on_host: set[FlatParameter] = set()
        self._micro_batch = 0
        self._in_fp32: list[nn.Parameter] = []
        """Parameters whose gradients autograd sums in fp32."""
        self._hooked = [
            item.parameter
            for flat in flat_params
            for item in flat.param_views
            if flat.mixed and (item.parameter._backward_hooks or item.parameter._post_accumulate_grad_hooks)
        ]
        """Parameters with hooks of user code, which get gradients in fp32."""

    def begin_micro_batch(self) -> None:
        """Begins to count uses of parameters."""
        self._micro_batch += 1

    def end_step(self) -> None:
        """Ends the sums in fp32, except those of parameters with hooks of user code."""
        self.summed_on_host.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._in_fp32:
                parameter.grad_dtype = None  # the dtype of the operators' gradients
            self._in_fp32.clear()
            for hooked in self._hooked:
                self.sum_in_fp32(hooked)

    def close(self) -> None:
        """Ends all sums in fp32."""
        self._hooked.clear()
        self.end_step()

    def add_hooked(self, parameter: OffloadedParameter) -> None:
        """Passes gradients in fp32 to hooks that user code has registered on a parameter."""
        if parameter.flat.mixed:
            self._hooked.append(parameter)
            self.sum_in_fp32(parameter)

    def note_use(self, parameter: OffloadedParameter) -> None:
        """Counts an operator on 16-bit weights. From the second one in a graph on, gradients are summed in fp32."""
        node = torch._C._current_autograd_node()
        # A recomputation in backward makes a graph of its own, which the number of its node identifies.
        graph = self._micro_batch if node is None else -1 - node._sequence_nr()
        if parameter.used == graph:
            self.sum_in_fp32(parameter)
        parameter.used = graph

    def sum_in_fp32(self, parameter: nn.Parameter) -> bool:
        """Makes autograd sum gradients of a parameter in fp32 until the next step; returns False if torch can't."""
        if not hasattr(parameter, "grad_dtype"):
            return False
        if parameter.grad_dtype != torch.float32:
            parameter.grad_dtype = torch.float32
            self._in_fp32.append(parameter)
        return True
