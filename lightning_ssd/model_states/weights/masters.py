"""fp32 master weights of resident bf16 parameters, which the user's optimizer steps on the device.

In the optimizer's groups a master replaces its parameter. Only the master has a gradient: the parameter's gradients,
summed in fp32. After a step, parameters are set to the rounded masters. User code may use both. Its writes to a
parameter are copied to the master before the next step, `state_dict` or `whole_weights()`; elements that equal the
rounded master do not change the master. Its writes to a master are copied to the parameter before the next forward.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.stores import write_changed
from lightning_ssd.model_states.units import TrainedParameter, hook_gradient

_CHUNK = 2**24
"""Elements that are compared at a time, which limits the device memory for comparing."""

_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
"""autograd's own attributes, which `MasteredParameter` overrides."""


class MasteredParameter(TrainedParameter):
    """The class of a bf16 parameter on the device while it has an fp32 master.

    `grad` is the master's fp32 gradient, so that user code that clips or scales it loses no digits. An assigned
    gradient of another dtype is converted, which copies it. In-place writes to the parameter are detected by its
    version counter. Once `data` was read, the parameter is compared instead. Writes that use neither, such as through a
    DLPack capsule or a data pointer, are lost.

    Attributes:
        exposed: whether `data` was read or set, so that writes need not increment the version counter.
        assigned: an assigned gradient that was converted, and its version at that time.
    """

    _OWN = ("master", "exposed", "assigned")

    master: nn.Parameter
    exposed: bool
    assigned: tuple[Tensor, int] | None

    @property
    def grad(self) -> Tensor | None:
        add_gradient(self)  # user code may read it before the hook that adds it is called
        return self.master.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, None)
        converts = gradient is not None and gradient.dtype != torch.float32
        self.assigned = (gradient, internals.version_of(gradient)) if gradient is not None and converts else None
        self.master.grad = None if gradient is None else gradient.float()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        self.exposed = True
        return _data(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        self.exposed = True
        _set_data(self, values)


class MasterWeights:
    """The fp32 master weights of bf16 parameters on the device.

    Args:
        parameters: bf16 parameters. Their optimizers' states and group entries become their masters'.
        values: existing masters, on the same device; the others are made from the parameters.

    Attributes:
        by_param: master of each parameter, on the same device.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        values: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        known = values or {}
        self.by_param = {
            parameter: nn.Parameter(known[parameter] if parameter in known else parameter.detach().float())
            for parameter in parameters
        }
        self._parameter_of = {master: parameter for parameter, master in self.by_param.items()}
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}
        """Versions of each parameter and of its master when the parameter last equalled the rounded master."""
        self._optimizers = optimizers
        self._summoned = False
        self._handles = [hook_gradient(parameter, add_gradient) for parameter in self.by_param]
        for optimizer in optimizers if self.by_param else ():
            _replace(optimizer, self.by_param)
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for parameter, master in self.by_param.items():
            parameter.__class__ = MasteredParameter
            assert isinstance(parameter, MasteredParameter)
            parameter.master, parameter.exposed, parameter.assigned = master, False, None
            add_gradient(parameter)
            self._note_versions(parameter)

    def sync_params(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Rounds masters that user code has changed to their parameters, for `parameters` or for all.

        Raises:
            RuntimeError: user code has changed a parameter and its master.
        """
        if self._summoned:
            return
        changed = []
        for parameter in self.by_param if parameters is None else parameters:
            own, of_master = self._versions[parameter]
            if internals.version_of(self.by_param[parameter]) != of_master:
                if internals.version_of(parameter) != own:
                    raise RuntimeError(
                        f"a bf16 parameter of shape {list(parameter.shape)} and its fp32 master in the optimizer's "
                        "groups were both changed since the last step, and one change would be lost. Change the "
                        "module's parameters only, or do it inside `with trainer.strategy.whole_weights():`."
                    )
                changed.append(parameter)
        self._round(changed)

    def sync(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Copies user code's changes of parameters to their masters and vice versa, for `parameters` or for all.

        Raises:
            RuntimeError: user code has changed a parameter and its master.
        """
        if self._summoned:
            return
        chosen = list(self.by_param if parameters is None else parameters)
        self.sync_params(chosen)
        for parameter in chosen:
            assert isinstance(parameter, MasteredParameter)
            if internals.version_of(parameter) != self._versions[parameter][0] or parameter.exposed:
                with torch.no_grad():
                    _write(self.by_param[parameter], _data(parameter))
                self._note_versions(parameter)

    @contextlib.contextmanager
    def summon(self) -> Iterator[None]:
        """Makes the parameters their fp32 masters within the context; changes of them count."""
        if self._summoned:
            yield
            return
        self.sync()
        self._summoned = True
        rounded = {parameter: _data(parameter) for parameter in self.by_param}
        try:
            for parameter, master in self.by_param.items():
                _set_data(parameter, master.data)
            yield
        finally:
            self._summoned = False
            for parameter, weights in rounded.items():
                _set_data(parameter, weights)
            self._round(list(self.by_param))

    def close(self) -> None:
        """Restores the parameters in the optimizers' groups and states."""
        self.sync_params()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            _replace(optimizer, self._parameter_of)
        for parameter in self.by_param:
            assert isinstance(parameter, MasteredParameter)
            del parameter.master, parameter.exposed, parameter.assigned
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Copies user code's writes to the masters: writes before the step, or in its closure."""
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._synced(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._synced(optimizer, args[1]), *args[2:]), kwargs
        self._sync_before(optimizer)
        return None

    def _synced(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that first rounds masters, which the step may have changed, to their parameters."""

        def run() -> Any:
            self.sync_params(self._stepped(optimizer))
            result = closure()
            self._sync_before(optimizer)
            return result

        return run

    def _sync_before(self, optimizer: Optimizer) -> None:
        stepped = self._stepped(optimizer)
        for parameter in stepped:
            assert isinstance(parameter, MasteredParameter)
            assigned, parameter.assigned = parameter.assigned, None
            if (
                assigned is not None
                and internals.version_of(assigned[0]) != assigned[1]
                and self.by_param[parameter].grad is not None
            ):
                raise RuntimeError(
                    f"the {assigned[0].dtype} tensor that was assigned to `.grad` of a bf16 parameter of shape "
                    f"{list(parameter.shape)} was changed afterwards, and the gradient is an fp32 copy of it. Change "
                    "`parameter.grad` itself, or assign it after the change."
                )
        self.sync(stepped)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._round(self._stepped(optimizer))

    def _stepped(self, optimizer: Optimizer) -> list[nn.Parameter]:
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [self._parameter_of[master] for master in stepped if master in self._parameter_of]

    def _round(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            _data(parameter).copy_(self.by_param[parameter].data)
            self._note_versions(parameter)

    def _note_versions(self, parameter: nn.Parameter) -> None:
        self._versions[parameter] = (internals.version_of(parameter), internals.version_of(self.by_param[parameter]))


def add_gradient(parameter: nn.Parameter) -> None:
    """Adds the gradient that autograd has accumulated for a parameter, if any, to its master's gradient."""
    grad: Tensor | None = _GRAD.__get__(parameter)
    if grad is None:
        return
    _GRAD.__set__(parameter, None)
    master = cast(MasteredParameter, parameter).master  # its class is nn.Parameter while compiled code runs
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)


def _data(parameter: nn.Parameter) -> Tensor:
    data: Tensor = _DATA.__get__(parameter)
    return data


def _set_data(parameter: nn.Parameter, values: Tensor) -> None:
    _DATA.__set__(parameter, values)


def _write(master: Tensor, values: Tensor) -> None:
    if not master.dim():
        write_changed(master, values)
        return
    rows = max(1, _CHUNK * len(master) // max(1, master.numel()))
    for target, part in zip(master.split(rows), values.split(rows), strict=True):
        write_changed(target, part)


def _replace(optimizer: Optimizer, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replaces parameters by others in the groups and the states of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
    for parameter, replacement in replacements.items():
        if parameter in optimizer.state:
            optimizer.state[replacement] = optimizer.state.pop(parameter)
