"""`RecordedCheckpoint`: a checkpointed call in a recorded forward, whose record is that of an ordinary call.

The call's hooks drop the tensors that it saves. Hooks inside of them record each tensor before, and when backward
unpacks it. The mode that records the backward is removed while the call runs again.
"""

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    ActivationOffloader,
    CheckpointedCall,
    SavedStorage,
    is_activation,
    offloaded_weights,
    storage_of,
)


class Recorder(Protocol):
    """The part of `TraceMode` that a call uses; see there."""

    backward_mode: "internals.TorchDispatchMode"

    def on_saved(self, storage: torch.UntypedStorage, record: "SavedStorage | Dropped", /) -> None: ...
    def on_unpacked(self, record: "SavedStorage | Dropped", /) -> None: ...
    def outlive(self, storage: torch.UntypedStorage, dropped: "Dropped", /) -> None: ...


class Dropped:
    """A saved tensor of a checkpointed call, which autograd owns.

    Args:
        holder: stands for the tensor in the call's hooks.
    """

    def __init__(self, holder: Any) -> None:
        self.holder = holder


class RecordedCheckpoint:
    """A checkpointed call that runs in a recorded forward, from `begin` to `end`.

    Args:
        call: the call. Its arguments are saved by the offloader's hooks. They are not recorded then, so that they count
            as saved only if an operator saves them.
        offloader: the offloader, whose mode is paused.
        mode: its mode, which remains in force within the call.
    """

    def __init__(
        self,
        call: CheckpointedCall,
        offloader: ActivationOffloader,
        mode: "internals.TorchDispatchMode",
        recorder: Recorder,
    ) -> None:
        self._call = call
        self._offloader = offloader
        self._recorder = recorder
        self._mode = mode
        self._entered = contextlib.ExitStack()
        """The mode and the hooks that `begin` has entered: none if the call's arguments could not be saved."""

    def begin(self) -> None:
        """Called before the forward, while the mode is paused."""
        self._call.begin()
        internals.push_dispatch_mode(self._mode)
        self._entered.callback(internals.pop_dispatch_mode)
        hooks = internals.innermost_saved_hooks(False)
        assert hooks is not None
        self._drop, self._remake = hooks
        # Left by `end`: a longer reference would be a cycle that keeps the call's arguments.
        self._entered.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def end(self, *, interrupted: bool = False) -> None:
        """Called when the call has returned or raised an error; `interrupted`: torch has called no hook since."""
        self._entered.close()
        if interrupted:
            self._call.interrupt()
        else:
            self._call.end()
        self._offloader.resume()

    def _pack(self, tensor: Tensor) -> Dropped:
        with internals.without_dispatch():
            dropped = Dropped(self._drop(tensor))
            if tensor.layout is torch.strided and internals.has_storage(tensor):
                storage = storage_of(tensor)
                offloader = self._offloader
                if offloaded_weights(storage) is not None:
                    return dropped  # a reference in an ordinary call
                if is_activation(tensor, storage, offloader.device, offloader.min_bytes) and storage.resizable():
                    self._recorder.on_saved(storage, dropped)
                else:  # such as autocast's cast of a weight, which counts as transient memory
                    self._recorder.outlive(storage, dropped)
            return dropped

    def _unpack(self, dropped: Dropped) -> Tensor:
        mode = self._recorder.backward_mode
        if internals.innermost_dispatch_mode() is not mode:
            tensor: Tensor = self._remake(dropped.holder)
            return tensor
        internals.pop_dispatch_mode()
        try:
            tensor = self._remake(dropped.holder)
        finally:
            internals.push_dispatch_mode(mode)
        self._recorder.on_unpacked(dropped)
        return tensor
