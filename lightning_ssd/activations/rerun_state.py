"""State besides its arguments that a forward reads: a second run in backward must find it as the first run did.

User code may change it after the forward: it switches adapters or to `eval()`, or leaves a `sdpa_kernel` context. The
second run must not change it either, such as a counter of forwards. Torch itself restores the states of its default
random number generators and of autocast.
"""

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.record import check_version

KEEP_UNIT = "set `checkpoint: false` in the unit of your plan, or `offload=1.0`, which checkpoints no unit"
"""Remedy for user code that does not allow that units are checkpointed."""

_CONTAINERS = frozenset({dict, list, set, OrderedDict})
"""Types of attributes whose elements are recorded, among them the parameters, buffers and hooks of a module."""

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (partial(getattr, torch.backends.cudnn, "enabled"), partial(setattr, torch.backends.cudnn, "enabled")),
    (partial(getattr, torch.backends.cudnn, "deterministic"), partial(setattr, torch.backends.cudnn, "deterministic")),
)
"""Functions that return and change settings of the process by which torch chooses dtypes and kernels. Those of fp32
products are not among them: which of torch's two sets of functions may read them depends on the user's calls."""


class RerunState:
    """The attributes of a module and of those inside of it, elements of their containers, and settings of torch.

    Args:
        module: the module, of which the present state is recorded. Its tensors stay alive with this object.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._settings = [read() for read, _ in _SETTINGS]
        self._filled: list[tuple[Any, Any]] = []
        """Containers and copies of them."""
        self._empty: list[Any] = []
        """Containers without elements, such as most of those of hooks."""
        self._versions: list[tuple[nn.Parameter, int]] = []
        """Parameters and their versions."""
        for inner in module.modules():
            attributes = vars(inner)
            containers = [value for value in attributes.values() if type(value) in _CONTAINERS]
            self._empty += [value for value in containers if not value]
            self._filled += [(value, value.copy()) for value in (attributes, *containers) if value]
            with internals.without_torch_function():  # offloaded weights would answer for their versions
                self._versions += [
                    (one, internals.version_of(one)) for one in inner._parameters.values() if one is not None
                ]

    def check_versions(self) -> None:
        """Checks that no parameter was changed in place since.

        Raises:
            RuntimeError: one was (PyTorch's message for a saved tensor).
        """
        with internals.without_torch_function():
            for parameter, version in self._versions:
                check_version(parameter, version, parameter.dtype, parameter.size(), self._remedy)

    def _remedy(self) -> str:
        return (
            f" It is a parameter of {type(self._module).__name__}, which is checkpointed. Change it after backward, "
            f"or {KEEP_UNIT}."
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the state for the length of the context, and afterwards the one before."""
        present = RerunState(self._module)
        self._restore()
        try:
            yield
        finally:
            present._restore()

    def _restore(self) -> None:
        for (read, change), value in zip(_SETTINGS, self._settings, strict=True):
            if read() != value:
                change(value)
        if any(self._empty):
            for container in self._empty:
                container.clear()
        for container, before in self._filled:
            if not _is_same(container, before):
                container.clear()
                (container.extend if type(container) is list else container.update)(before)


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
