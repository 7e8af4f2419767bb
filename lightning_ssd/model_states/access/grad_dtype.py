"""The dtype in which gradients of 16-bit weights are summed: fp32, where plain Lightning sums them in fp32."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.units import FlatParameter


class GradDtype:
    """Sums gradients of 16-bit weights in fp32, in mixed precision, if there are several or if user code reads them.

    Autograd computes these sums if torch has `Tensor.grad_dtype`; otherwise gradients are added on the host.

    Sums in fp32 end at the first micro-batch after a step of the weights' own optimizer. Until then, backward may use
    graphs from before that step, and steps of other optimizers may precede the backward.

    Threads: as `Access`, whose operators count the uses.

    Args:
        groups: optimizer and index of the parameter group of each flat parameter that is stepped.

    Attributes:
        summed_on_host: flat parameters for which backward adds gradients on the host.
    """

    def __init__(
        self, flat_params: Iterable[FlatParameter], groups: Mapping[FlatParameter, tuple[Optimizer, int]]
    ) -> None:
        self.summed_on_host: set[FlatParameter] = set()
        self._groups = groups
        self._micro_batch = 0
        self._in_fp32: dict[nn.Parameter, FlatParameter] = {}
        """Parameters whose gradients autograd sums in fp32."""
        self._stepped: set[FlatParameter] = set()
        """Flat parameters that were stepped since their gradients were last found to need fp32."""
        self._used: dict[int, int] = {}
        """The graph that the 16-bit weights of a parameter were last used in, by identity of the parameter."""
        self._hooked = {
            item.parameter: flat
            for flat in flat_params
            for item in flat.param_views
            if flat.mixed and (item.parameter._backward_hooks or item.parameter._post_accumulate_grad_hooks)
        }
        """Parameters with hooks of user code, which get gradients in fp32."""

    def open(self) -> None:
        """Begins the sums in fp32 of parameters with hooks of user code."""
        for parameter, flat in self._hooked.items():
            self.sum_in_fp32(parameter, flat)

    def begin_micro_batch(self) -> None:
        """Begins to count uses of parameters, and ends the sums of stepped ones, unless user code has hooked them."""
        self._micro_batch += 1
        self.summed_on_host -= self._stepped
        ended = [one for one, flat in self._in_fp32.items() if flat in self._stepped and one not in self._hooked]
        self._stepped.clear()
        self._end_sums(ended)

    def end_step(self, optimizer: Optimizer) -> None:
        """Has the next micro-batch end the sums in fp32 of the parameters of `optimizer`, which has stepped."""
        for flat in {*self._in_fp32.values(), *self.summed_on_host}:
            if flat in self._groups and self._groups[flat][0] is optimizer:
                self._stepped.add(flat)

    def close(self) -> None:
        """Ends all sums in fp32."""
        self._end_sums(list(self._in_fp32))
        self.summed_on_host.clear()

    def add_hooked(self, parameter: nn.Parameter, flat: FlatParameter) -> None:
        """Passes gradients in fp32 to hooks that user code has registered on a parameter."""
        if flat.mixed:
            self._hooked[parameter] = flat
            self.sum_in_fp32(parameter, flat)

    def note_use(self, parameter: nn.Parameter, flat: FlatParameter) -> None:
        """Counts an operator on 16-bit weights. From the second one in a graph on, gradients are summed in fp32."""
        node = internals.autograd_node()
        # A recomputation in backward makes a graph of its own, which the number of its node identifies.
        graph = self._micro_batch if node is None else -1 - internals.sequence_of(node)
        if self._used.get(id(parameter)) == graph:
            self.sum_in_fp32(parameter, flat)
        self._used[id(parameter)] = graph

    def sum_in_fp32(self, parameter: nn.Parameter, flat: FlatParameter) -> bool:
        """Makes autograd sum gradients of a parameter in fp32 until its next step; returns False if torch can't."""
        if not hasattr(parameter, "grad_dtype"):
            return False
        self._stepped.discard(flat)
        if parameter.grad_dtype != torch.float32:
            parameter.grad_dtype = torch.float32
            self._in_fp32[parameter] = flat
        return True

    def sum_on_host(self, flat: FlatParameter) -> None:
        """Has backward add gradients of `flat` on the host until its next step."""
        self._stepped.discard(flat)
        self.summed_on_host.add(flat)

    def _end_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        with internals.without_torch_function():
            for parameter in parameters:
                parameter.grad_dtype = None  # the dtype of the operators' gradients
                del self._in_fp32[parameter]
