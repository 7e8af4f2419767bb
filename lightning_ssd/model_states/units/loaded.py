"""Checkpoint values that a parameter can't hold when Lightning restores the model, which is before states are set up.

A parameter on `meta` has no memory then, and a 16-bit parameter would round the fp32 master weights of a checkpoint.
The values are kept, by reference, until the parameter's store is filled.
"""

import contextlib
import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd.uncopied import ModuleHook

Loaded = Mapping[nn.Parameter, Tensor]
"""Checkpoint values of parameters."""


class LoadedValues:
    """Values that parameters get when model states are set up: those of a checkpoint, else their initial ones.

    All methods are called on the training thread. Values are references, not copies.

    Attributes:
        of_checkpoint: values of the checkpoint that was loaded last.
    """

    def __init__(self) -> None:
        self.of_checkpoint: dict[nn.Parameter, Tensor] = {}
        self._initial: Loaded = {}
        self._recording = contextlib.ExitStack()

    def record(self, modules: Iterable[nn.Module]) -> None:
        """Records the values that `load_state_dict` gives to parameters of `modules` from now on, until `clear`."""
        self.clear()
        for module in modules:
            self._recording.enter_context(recording_loads(module, self.of_checkpoint))

    def pop_initial(self, model: nn.Module) -> None:
        """Takes over the initial values that modules of `model` have for parameters on `meta`."""
        self._initial = pop_initial_values(model)

    def values(self) -> Loaded:
        """Returns all values. Those of a checkpoint have priority."""
        return ChainMap(self.of_checkpoint, self._initial)  # type: ignore[arg-type]  # neither is written to

    def clear(self) -> None:
        """Ends recording, and drops the references."""
        self._recording.close()
        self.of_checkpoint, self._initial = {}, {}


def pop_initial_values(root: nn.Module) -> Loaded:
    """Returns the initial values that modules of `root` have for parameters on `meta`, and removes them there.

    A module that was built on `meta` has them in an attribute `initial_values`, a `Mapping` like `Loaded`, which may
    read a value at each look-up. A value is looked up while its unit is materialized, and not kept.
    """
    found: ChainMap[nn.Parameter, Tensor] = ChainMap()
    for module in root.modules():
        if (values := vars(module).pop("initial_values", None)) is not None:
            found.maps.append(values)
    return found


@contextlib.contextmanager
def recording_loads(module: nn.Module, loaded: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Adds to `loaded` the tensors that `load_state_dict` calls inside give to the parameters of `module`.

    Buffers on `meta` get memory on the CPU when they are loaded. Tensors are not copied: those of a mapped file take
    no memory.
    """

    def record(owner: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in owner._parameters.items():
            value = state.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                loaded[parameter] = value
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta and prefix + name in state:
                owner._buffers[name] = torch.empty_like(buffer, device="cpu")

    with contextlib.ExitStack() as stack:
        for owner in module.modules():
            stack.callback(owner.register_load_state_dict_pre_hook(ModuleHook(record)).remove)
        yield


@contextlib.contextmanager
def loading_to_meta() -> Iterator[None]:
    """Suppresses torch's warning about loading values to parameters on `meta`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter in the checkpoint to a meta parameter")
        yield


def exact_value(parameter: nn.Parameter, loaded: Loaded) -> Tensor | None:
    """Returns the loaded value if `parameter` holds it rounded, else None.

    The result is also None if user code has changed the parameter since it was loaded.
    """
    value = loaded.get(parameter)
    if value is None or value.dtype == parameter.dtype:
        return None
    rounded = value.to(parameter.device, parameter.dtype)
    return value if torch.equal(rounded, parameter.data) else None
