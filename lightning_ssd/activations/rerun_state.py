"""State besides its arguments that a forward reads: a second run in backward must find it as the first run did.

User code may change it after the forward: it switches adapters or to `eval()`, or leaves a `sdpa_kernel` context. The
second run must not change it either, such as a running mean or the numbers that a later dropout draws.

A forward was recorded to prove that it may be run again, and changes by user code before a later one end that proof.
Each forward compares attributes by identity, in less time than copies of them take. Therefore a copy serves
all forwards until an attribute is changed. Global variables, and attributes of classes and of objects that are neither
modules nor configurations, are not compared.
"""

import contextlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.autocast import autocast_dtypes, autocast_of
from lightning_ssd.activations.record import check_version

KEEP_UNIT = "set `checkpoint: false` in the unit of your plan, or `offload=1.0`, which checkpoints no unit"
"""Remedy for user code that does not allow that units are checkpointed."""

_CONTAINERS = frozenset({dict, list, set, OrderedDict, defaultdict, deque})
"""Types of attributes whose elements are recorded, among them the parameters, buffers and hooks of a module."""

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)

_BY_VALUE = (bool, int, float, complex, str, Enum, torch.dtype, torch.device, type, *_FUNCTIONS)
"""Types of attributes whose value, which is the identity of a function, shows that user code has changed them."""

_NO_CODE = frozenset(name for name in vars(nn.Module()) if "hook" in name) | {"_compiled_call_impl", "problem_type"}
"""Attributes that show nothing about a layer's code: the package itself has hooks in most modules, and models of
transformers set the kind of their loss in their configuration when they first compute it."""

_LABELS = frozenset({"id2label", "label2id"})
"""Attributes of configurations with the names of classes, which no layer reads: a model may have 20 000, and comparing
them takes 2 ms for each forward of a layer."""

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (partial(getattr, torch.backends.cudnn, "enabled"), partial(setattr, torch.backends.cudnn, "enabled")),
    (partial(getattr, torch.backends.cudnn, "deterministic"), partial(setattr, torch.backends.cudnn, "deterministic")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
)
"""Functions that return and change settings by which torch chooses dtypes and kernels; contexts of autocast inside of a
forward take over those of autocast. Those of fp32 products are not among them: which of torch's two sets of functions
may read them depends on the user's calls."""


GeneratorState = tuple[torch.Generator, Tensor]
"""A generator, and one of its states."""


class ModuleState:
    """Attributes of a module and of those inside of it, elements of their containers, and their configurations.

    Args:
        module: the module, of which the present state is recorded. It stays alive with this object.

    Attributes:
        kind: compares equal for states of a module in which its forward runs the same code, unless data make it differ.
        tensors: parameters, buffers and other tensors among them, without those made in inference mode.
        allows_checkpointing: whether the forward may be run again as far as this state shows; `None`: not known yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self.allows_checkpointing: bool | None = None
        self._modules = list(module.modules())
        self._classes = [type(inner) for inner in self._modules]
        self._filled: list[Any] = []
        """Containers with elements."""
        self._empty: list[Any] = []
        """Containers without elements, such as most of those of hooks."""
        kind: list[object] = [*self._classes]
        tensors: dict[int, Tensor] = {}
        left: list[tuple[Any, bool]] = [(vars(inner), True) for inner in self._modules]
        seen: set[int] = set()
        configuration = class_of_transformers("configuration_utils", "PretrainedConfig")
        while left:
            container, of_user = left.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            if type(container) is not tuple:
                (self._filled if container else self._empty).append(container)
            for name, value in container.items() if isinstance(container, dict) else enumerate(container):
                counts, is_tensor = of_user and name not in _NO_CODE, isinstance(value, Tensor)
                if counts:
                    kind_of_value = Tensor if is_tensor else type(value)
                    key = Tensor if isinstance(name, Tensor) else name  # `==` of tensors returns tensors
                    kind.append((key, kind_of_value, value if isinstance(value, _BY_VALUE) else None))
                if is_tensor:
                    tensors[id(value)] = value
                elif (type(value) in _CONTAINERS and name not in _LABELS) or type(value) is tuple:
                    left.append((value, counts))
                elif configuration is not None and isinstance(value, configuration):
                    left.append((vars(value), counts))
        self.kind = tuple(kind)
        with internals.without_torch_function():
            self.tensors = [one for one in tensors.values() if not one.is_inference()]
        self._copies = [container.copy() for container in self._filled]
        self._lengths = [len(container) for container in self._filled]
        self._present: list[Any] = []
        """Views of the present keys and values of dicts, and the other containers themselves."""
        for one in self._filled:
            self._present += (one.keys(), one.values()) if isinstance(one, dict) else (one,)
        self._values = list(chain.from_iterable(self._present))

    def is_present(self) -> bool:
        """Returns whether each container has the same names and elements as then, in the same order, by identity."""
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._lengths
            and all(map(is_, chain.from_iterable(self._present), self._values))
            and list(map(type, self._modules)) == self._classes
        )

    def restore(self) -> None:
        """Restores the recorded state."""
        if self.is_present():
            return
        for inner, kind in zip(self._modules, self._classes, strict=True):
            if type(inner) is not kind:
                inner.__class__ = kind
        for container in self._empty:
            container.clear()
        for container, before in zip(self._filled, self._copies, strict=True):
            if not _is_same(container, before):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)


class UnitProof:
    """The proof that the forward of a unit's module may be run again, as one that was recorded may.

    It holds as long as user code does not change the module, such as an activation or a flag in it: other code might
    draw numbers of its own, or read tensors that change before backward.

    Args:
        module: the module, whose forward is recorded now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kind = ModuleState(module).kind
        self._state: ModuleState | None = None
        """The last state in which the proof held, which keeps tensors alive that user code has replaced since; `None`:
        no call needed one yet, or the proof does not hold."""

    def holds(self) -> bool:
        """Returns whether user code has not changed the module."""
        return ModuleState(self._module).kind == self._kind

    def state(self) -> ModuleState | None:
        """Returns the present state of the module; `None`: it was changed, so that nothing is proved."""
        if self._state is None or not self._state.is_present():
            present = ModuleState(self._module)
            self._state = present if present.kind == self._kind else None
        return self._state

    def forget(self) -> None:
        """Frees tensors of the state that user code has replaced. Called while no call needs the state."""
        self._state = None


class RerunState:
    """State at the begin of a forward, of a module and of torch.

    Args:
        module: the module.
        state: its state.
        tensors: the forward's arguments, which show the devices on which it may draw random numbers.
    """

    def __init__(self, module: nn.Module, state: ModuleState, tensors: Sequence[Tensor]) -> None:
        self._module = module
        self._state = state
        self._settings = _read_settings()
        self._generators = _generators_of(tensors)
        self._autocast = autocast_dtypes()
        with internals.without_torch_function():  # offloaded weights would answer for their versions
            self._versions = list(map(internals.version_of, state.tensors))
            self._requires_grad = list(map(_requires_grad, state.tensors))

    def changed(self) -> list[tuple[Tensor, RuntimeError]]:
        """Returns the parameters, buffers and other tensors of the module that were changed in place since.

        Each has PyTorch's error for a saved tensor, for a forward that reads it.
        """
        found: list[tuple[Tensor, RuntimeError]] = []
        with internals.without_torch_function():
            for tensor, version in zip(self._state.tensors, self._versions, strict=True):
                try:
                    check_version(tensor, version, tensor.dtype, tensor.size(), self._remedy)
                except RuntimeError as error:
                    found.append((tensor, error))
        return found

    def _remedy(self) -> str:
        return (
            f" It belongs to {type(self._module).__name__}, which is checkpointed. Change it after backward, "
            f"or {KEEP_UNIT}."
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the state for the length of the context, and afterwards the one before."""
        settings = _read_settings()
        present = self._state if self._state.is_present() else ModuleState(self._module)
        try:
            _change_settings(self._settings)
            if present is not self._state:
                self._state.restore()
            with (
                restored_generators(self._generators),
                autocast_of(self._autocast, cached=torch.is_autocast_cache_enabled()),
                self._restored_requires_grad(),
            ):
                yield
        finally:  # also if the user interrupts it
            _change_settings(settings)
            present.restore()

    @contextlib.contextmanager
    def _restored_requires_grad(self) -> Iterator[None]:
        """Freezes the parameters within the context that were frozen then: autograd saves other tensors for them.

        User code may freeze a discriminator for one forward, and train it again before the backward.
        """
        with internals.without_torch_function():
            before = zip(self._state.tensors, self._requires_grad, strict=True)
            changed = [(one, then) for one, then in before if one.requires_grad != then and one.is_leaf]
            for tensor, then in changed:
                tensor.requires_grad_(then)
        try:
            yield
        finally:
            with internals.without_torch_function():
                for tensor, then in changed:
                    tensor.requires_grad_(not then)


_requires_grad = attrgetter("requires_grad")


def _read_settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _change_settings(values: Sequence[Any]) -> None:
    for (read, change), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            change(value)


def _generators_of(tensors: Sequence[Tensor]) -> list[GeneratorState]:
    """Returns the present states of torch's default generators of the CPU, and of each GPU with one of `tensors`."""
    gpus = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
    return [(generator, generator.get_state()) for generator in generators]


@contextlib.contextmanager
def restored_generators(states: Sequence[GeneratorState]) -> Iterator[None]:
    """Sets generators to `states` within the context, and restores their own states afterwards."""
    now = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)


def kind_of(module: nn.Module) -> Hashable:
    """Returns the kind of a unit's module: classes, attributes and parameters of the modules in it.

    Attributes count by their type, flags and texts also by their value; parameters by name, shape and dtype. Forwards
    of modules of one kind run the same operators, unless data or numbers, such as a layer's index, make them differ.
    """
    with internals.without_torch_function():
        parameters = tuple((name, tuple(one.shape), one.dtype) for name, one in module.named_parameters())
    return tuple((type(inner), _kinds_of_attributes(inner)) for inner in module.modules()), parameters


def _kinds_of_attributes(module: nn.Module) -> Hashable:
    attributes = vars(module).items()
    return tuple((name, type(value), value if isinstance(value, bool | str) else None) for name, value in attributes)


def class_of_transformers(module: str, name: str) -> type | None:
    """Returns a class of transformers if that is imported already, which takes seconds."""
    found: type | None = getattr(sys.modules.get(f"transformers.{module}"), name, None)
    return found


def _is_same(container: Any, before: Any) -> bool:
    """Returns whether a container has the elements of its copy `before`, in the same order, compared by identity."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(map(is_, container, before)) and all(map(is_, container.values(), before.values()))
    return container == before if type(container) is set else all(map(is_, container, before))


def other_random_states() -> tuple[object, ...]:
    """Returns the states of the random number generators of Python and NumPy, which torch does not restore."""
    name, key, *others = np.random.get_state()
    return random.getstate(), name, np.asarray(key).tobytes(), *others
