"""State dicts of modules and optimizers whose values are offloaded.

Flat parameters are staged one after the other: a state dict needs the memory of its result and of one flat parameter.
"""

import contextlib
import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.access import OffloadedView, share_all
from lightning_ssd.model_states.checkpoints.lazy import LazyTensors
from lightning_ssd.model_states.optimizers import FlatOptimizer, parameters_of
from lightning_ssd.model_states.stores import StagedFlats
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.model_states.weights import MasterWeights
from lightning_ssd.uncopied import ModuleHook


class StateDicts:
    """Makes `state_dict` and `load_state_dict` of modules and optimizers read and write offloaded values.

    Threads: the training thread.

    Ownership: weights in a module's state dict share memory with the parameters as long as user code references them,
    as in plain training; states of an optimizer are copies. Both are lazy tensors while `lazy` makes them: weights have
    the values of the first read, or those before the next step. Loaded values belong to `StagedFlats` until they are
    stored.

    Args:
        staged: stages the model's flat parameters on the host.
        where: flat parameter of each offloaded parameter, and its index there.
        optimizers: optimizers that step flat parameters.
        changing: called before values are loaded.
        loading: called before states of an optimizer are loaded: it returns when no other rank reads those before any
            more. None: there is one rank.
    """

    def __init__(
        self,
        module: nn.Module,
        staged: StagedFlats,
        flat_optimizers: Mapping[FlatParameter, FlatOptimizer],
        where: Mapping[nn.Parameter, tuple[FlatParameter, int]],
        masters: MasterWeights,
        optimizers: list[Optimizer],
        *,
        changing: Callable[[], None],
        loading: Callable[[], object] | None,
    ) -> None:
        self._staged = staged
        self._flat_optimizers = flat_optimizers
        self._where = where
        self._masters = masters
        self._summoned_masters = contextlib.ExitStack()
        """Open while a checkpoint is loaded into master weights on the device."""
        self._changing = changing
        self._loading_states = loading
        self.lazy = LazyTensors()
        self._without = False
        self.protected = False
        """Whether offloaded values must not be loaded before training begins: a killed run resumes with them."""
        self._loading: set[FlatParameter] = set()
        """Flat parameters whose parameters are staged master weights while `load_state_dict` loads a module."""
        self._removed: list[tuple[FlatParameter, int, Mapping[str, Any]]] = []
        """States of offloaded parameters in the state dict that an optimizer is loading."""
        self._stepped = {optimizer: self._stepped_flat(optimizer) for optimizer in optimizers}
        """Offloaded parameters that each optimizer steps, although user code may since have changed its groups."""
        self._handles: list[RemovableHandle] = []
        for owner in module.modules():
            if self._offloaded(owner) or self._mastered(owner):
                self._handles.append(internals.register_state_dict_hook(owner, ModuleHook(self._after_state_dict)))
                self._handles.append(owner.register_load_state_dict_pre_hook(ModuleHook(self._before_load)))
                self._handles.append(owner.register_load_state_dict_post_hook(ModuleHook(self._after_load)))
        for optimizer in optimizers:
            # Hooks of user code find the states of all parameters: of hooks that a state dict passes on its way to
            # the user, ours are the first ones, and on its way to the optimizer, the last ones.
            self._handles.append(optimizer.register_state_dict_post_hook(self._add_states, prepend=True))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._remove_states))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._load_states, prepend=True))

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Excludes offloaded values from state dicts that are made or loaded within the context."""
        self._without = True
        try:
            yield
        finally:
            self._without = False

    def before_step(self) -> None:
        """Prepares a step: lazy tensors read their values, and staged values are unstaged."""
        self.lazy.load_all()
        self._staged.unstage()

    def remove(self) -> None:
        """Removes the hooks."""
        try:
            self.before_step()
        finally:
            for handle in self._handles:
                handle.remove()

    def _offloaded(self, owner: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Returns the offloaded parameters of `owner` itself, with their names in it."""
        return _own_parameters(owner, self._where)

    def _mastered(self, owner: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters of `owner` itself that have master weights on the device, with their names in it."""
        return _own_parameters(owner, self._masters.by_param)

    def _after_state_dict(self, owner: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        """Replaces compute weights in a state dict by master weights, those of offloaded ones on the CPU.

        Values that `_save_to_state_dict` or an earlier hook of user code has computed stay.
        """
        offloaded = self._offloaded(owner)
        mastered = self._mastered(owner)
        self._masters.sync(parameter for _, parameter in mastered)
        for name, parameter in mastered:
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.is_set_to(parameter):
                state[prefix + name] = self._masters.by_param[parameter].detach()
        if self._without:
            for name, _ in offloaded:
                state.pop(prefix + name, None)
            return
        for name, parameter in offloaded:
            value = state.get(prefix + name)
            if not isinstance(value, OffloadedView) or not share_all(value, parameter):
                continue  # missing, computed by user code, the parameter itself (`keep_vars`), or `parameter` is whole
            flat, index = self._where[parameter]
            masters = flat.param_views[index].of(self._staged.stage(flat).masters)
            if self.lazy.enabled:
                state[prefix + name] = self.lazy.make((flat, index), masters, self._reader(flat, index), copied=False)
            else:
                state[prefix + name] = flat.share(index, masters)

    def _before_load(
        self, owner: nn.Module, state: object, prefix: str, metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Makes the parameters of `owner` whole on the CPU before a checkpoint is loaded into them."""
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "`load_state_dict(assign=True)` would put new parameters in the model: leave `assign` out."
            )
        if self._without:
            return
        if self.protected and any(prefix + name in state for name, _ in self._offloaded(owner)):  # type: ignore[operator]
            raise RuntimeError(
                "a killed run is being resumed, and `load_state_dict` would overwrite its weights. Load "
                "them before `fit`, in `setup` or in `configure_model`."
            )
        if self._mastered(owner):
            self._summoned_masters.enter_context(self._masters.summon())
        # In one order on all ranks, which change them together.
        flat_params = dict.fromkeys(self._where[parameter][0] for _, parameter in self._offloaded(owner))
        self._changing()
        for flat in flat_params:
            if flat.summoned:
                continue
            self._staged.summon(flat, keep=flat_params)
            self._loading.add(flat)

    def _after_load(self, owner: nn.Module, incompatible: object) -> None:
        """Makes the parameters views of their flat parameters again; their values are stored by the next `unstage`."""
        for flat in self._loading:
            self._staged.restore(flat)
        self._loading.clear()
        self._summoned_masters.close()

    def _add_states(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Adds copies of the optimizer states of offloaded parameters, by their numbers among those on the device."""
        resident = state["state"]
        for number, _, _ in self._numbers(optimizer):
            resident.pop(number, None)  # a value of `OffloadedOptimizerState`
        if self._without:
            return
        offloaded: dict[int, dict[str, Any]] = {}
        for number, flat, index in self._numbers(optimizer):
            of_parameter = self._flat_optimizers[flat].state_of(index, self._staged.stage(flat).values)
            if of_parameter:
                offloaded[number] = {
                    name: self._shown(value, flat, index, name) for name, value in of_parameter.items()
                }
        self._staged.unstage()
        both = {**resident, **offloaded}
        # Keys of `Optimizer.state` that are no tensors have no numbers.
        order = heapq.merge(resident, offloaded, key=lambda key: key if isinstance(key, int) else inf)
        state["state"] = {key: both[key] for key in order}

    def copy_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Returns a copy of the optimizer state of an offloaded parameter."""
        flat, index = self._where[parameter]
        state = self._flat_optimizers[flat].state_of(index, self._staged.stage(flat).values)
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def _shown(self, value: Any, flat: FlatParameter, index: int, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.lazy.enabled and value.dim():
            return self.lazy.make((flat, index, name), value, self._reader(flat, index, name), copied=True)
        return value.clone()

    def _reader(self, flat: FlatParameter, index: int, state: str | None = None) -> Callable[[], Tensor]:
        """Returns a function that reads the master weights of a parameter, or one of its states."""

        def read() -> Tensor:
            if state is None and flat.summoned:
                return flat.param_views[index].parameter.detach()
            values = self._staged.stage(flat)
            if state is None:
                return flat.param_views[index].of(values.masters)
            found: Tensor = self._flat_optimizers[flat].state_of(index, values.values)[state]
            return found

        return read

    def _remove_states(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Removes the states of offloaded parameters from a state dict, which torch then compares with the optimizer.

        Raises:
            RuntimeError: a hook of user code, which may change the state dict, would run after this one.
            ValueError: a state does not fit the parameter.
        """
        self._removed = []
        if self._without:
            return state
        if next(reversed(optimizer._optimizer_load_state_dict_pre_hooks.values())) != self._remove_states:
            raise RuntimeError(
                "`register_load_state_dict_pre_hook` was called while states of the optimizer were offloaded: the hook "
                "would find no states of these. Register it in `configure_optimizers`, or with `prepend=True`."
            )
        if self._loading_states is not None:
            self._loading_states()
        self._changing()
        # As in torch, loading discards the states of parameters that are in no group any more.
        for parameter in self._stepped[optimizer].difference(parameters_of(optimizer)):
            self._removed.append((*self._where[parameter], {}))
        # A state dict may number its parameters in any way: its groups name them in the order of the optimizer's.
        saved = [number for group in state["param_groups"] for number in group["params"]]
        states = dict(state["state"])
        for position, flat, index in self._numbers(optimizer):
            if position < len(saved):  # else torch refuses the state dict
                of_parameter = states.pop(saved[position], {})
                self._flat_optimizers[flat].check_state(index, of_parameter)
                self._removed.append((flat, index, of_parameter))
        return {**state, "state": states}

    def _load_states(self, optimizer: Optimizer) -> None:
        """Loads the states that `_remove_states` has found, once torch has accepted the state dict."""
        found, self._removed = self._removed, []
        self.lazy.load_copies()
        for flat, index, state in found:
            self._load_state(flat, index, self._flat_optimizers[flat].converted(state))
        if found:
            self._staged.unstage()

    def adopt_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Adopts states that optimizers already have of offloaded parameters.

        Adagrad makes some in its constructor; an optimizer that `configure_optimizers` returns again has those of its
        last training.
        """
        for optimizer in optimizers:
            for _, flat, index in self._numbers(optimizer):
                state = optimizer.state.pop(flat.param_views[index].parameter, None)
                if state:
                    self._load_state(flat, index, state)
        self._staged.unstage()

    def _load_state(self, flat: FlatParameter, index: int, state: Mapping[str, Any]) -> None:
        staged = self._staged.stage(flat)
        staged.loaded = True
        self._flat_optimizers[flat].load_state(index, state, staged.values)

    def _numbers(self, optimizer: Optimizer) -> Iterator[tuple[int, FlatParameter, int]]:
        """Yields the number in the state dict, flat parameter and index of the optimizer's offloaded parameters.

        Those that user code has added to its groups since the last step have no offloaded state of this optimizer.
        """
        for number, parameter in enumerate(parameters_of(optimizer)):
            if parameter in self._stepped[optimizer]:
                yield number, *self._where[parameter]

    def _stepped_flat(self, optimizer: Optimizer) -> set[nn.Parameter]:
        return {
            parameter
            for parameter in parameters_of(optimizer)
            if parameter in self._where and self._where[parameter][0] in self._flat_optimizers
        }


def _own_parameters(owner: nn.Module, chosen: Container[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name, value in owner._parameters.items() if value is not None and value in chosen]
