"""fp32 master weights of bf16 parameters that stay on the device, which the user's optimizer steps there.

In the optimizer's groups a master stands for its parameter: it gets the parameter's gradients, summed in fp32, and what
clips or zeroes gradients finds them there. After a step the parameters are the masters, rounded.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.states.parameter import hook_gradient


class Masters:
    """Of some parameters.

    Args:
        parameters: on the device, in bf16. What their optimizers have of them is their masters' from then on.
        optimizers: the model's.
        values: masters that there are already, on the same device; others are made from the parameters.

    Attributes:
        of: of each parameter, its master, on the same device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        values: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        known = values or {}
        self.of = {
            parameter: nn.Parameter(known[parameter] if parameter in known else parameter.detach().float())
            for parameter in parameters
        }
        self._parameter_of = {master: parameter for parameter, master in self.of.items()}
        self._optimizers = optimizers
        self._lent = False
        self._handles = [hook_gradient(parameter, self._landed) for parameter in self.of]
        for optimizer in optimizers:
            self._put_in(optimizer, self.of)
            _pass_on_states(optimizer, self.of)
            self._handles.append(optimizer.register_step_post_hook(lambda optimizer, *_: self._round(optimizer)))

    def round(self) -> None:
        """Makes the parameters anew from their masters."""
        self._copy(list(self.of))

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """Makes the parameters their masters, in fp32; what is changed there counts."""
        if self._lent:
            yield
            return
        self._lent = True
        rounded = {parameter: parameter.data for parameter in self.of}
        try:
            for parameter, master in self.of.items():
                parameter.data = master.data
            yield
        finally:
            self._lent = False
            for parameter, weights in rounded.items():
                parameter.data = weights
            self.round()

    def close(self) -> None:
        """Gives the optimizers their parameters back."""
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            self._put_in(optimizer, self._parameter_of)
            _pass_on_states(optimizer, self._parameter_of)

    def _landed(self, parameter: nn.Parameter) -> None:
        grad, parameter.grad = parameter.grad, None
        master = self.of[parameter]
        assert grad is not None
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad.add_(grad)

    @staticmethod
    def _put_in(optimizer: Optimizer, instead: "dict[nn.Parameter, nn.Parameter]") -> None:
        for group in optimizer.param_groups:
            group["params"] = [instead.get(parameter, parameter) for parameter in group["params"]]

    def _round(self, optimizer: Optimizer) -> None:
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._copy([self._parameter_of[master] for master in stepped if master in self._parameter_of])

    def _copy(self, parameters: list[nn.Parameter]) -> None:
        if parameters:
            weights = [parameter.data for parameter in parameters]
            torch._foreach_copy_(weights, [self.of[parameter].data for parameter in parameters])


def _pass_on_states(optimizer: Optimizer, heirs: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gives what the optimizer keeps of parameters to others."""
    for parameter, heir in heirs.items():
        if parameter in optimizer.state:
            optimizer.state[heir] = optimizer.state.pop(parameter)
