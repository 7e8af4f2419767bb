"""The weights of a flat as whole tensors on the CPU, which user code may change: `whole_weights`, `load_state_dict`."""

import torch
from torch import Tensor

from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.shared_memory import SharedMemory, same_stride


class LentWeights:
    """Makes the parameters of a flat whole tensors, from `lend` until `take_back`.

    Args:
        flat: whose parameters.
        masters: its master weights, which the parameters are views of meanwhile; owned until `take_back`. A parameter
            that shares memory with tensors of user code, of the same dtype and on the CPU, has that memory instead.
    """

    def __init__(self, flat: FlatParameter, masters: Tensor) -> None:
        self.masters = masters
        self._flat = flat
        self._lent: list[Tensor] = []
        self._before: dict[int, Tensor] = {}
        """Values of memory that is shared and could not be lent, as user code may change it meanwhile."""

    def lend(self) -> None:
        """Makes the parameters whole."""
        flat = self._flat
        with torch._C.DisableTorchFunctionSubclass():
            for index, item in enumerate(flat.slices):
                memory, whole = flat.memory(index), item.of(self.masters)
                if memory is not None and (memory.device, memory.dtype) == (whole.device, whole.dtype):
                    whole = memory
                elif memory is not None:
                    self._before[index] = memory.clone()
                item.parameter.data = whole
                self._lent.append(whole)
        flat.summoned = True

    def take_back(self) -> None:
        """Makes the parameters views of the flat; what they were changed to is in the masters then.

        Raises:
            RuntimeError: a parameter was given memory that can't be taken over.
        """
        flat = self._flat
        flat.summoned = False
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
                for index, whole in enumerate(self._lent):
                    data = flat.slices[index].parameter.data
                    if data.is_set_to(whole):
                        self._sync(index, whole)
                    else:
                        self._replace(index, data)
        finally:
            flat.attach()

    def _sync(self, index: int, whole: Tensor) -> None:
        flat, item = self._flat, self._flat.slices[index]
        masters, memory = item.of(self.masters), flat.memory(index)
        if index not in self._before:
            if not whole.is_set_to(masters):
                masters.copy_(whole)
        elif memory is not None:
            if not torch.equal(memory, self._before[index]):
                raise RuntimeError(
                    f"a tensor that shares memory with {item.name} was changed while the parameter was a whole tensor "
                    "on the CPU. Change the parameter there, or the tensor outside of `whole_weights()`."
                )
            memory.copy_(masters)

    def _replace(self, index: int, data: Tensor) -> None:
        """User code has set `.data` of a parameter."""
        flat, item = self._flat, self._flat.slices[index]
        if data.shape != item.shape or data.dtype not in (self.masters.dtype, item.dtype):
            raise RuntimeError(
                f"`.data` of {item.name}, which is offloaded, was set to a tensor of {data.dtype} {list(data.shape)}: "
                f"it is {item.dtype} {list(item.shape)} while it trains. Set it before `fit`, in `configure_model`."
            )
        item.of(self.masters).copy_(data)
        flat.shared.pop(index, None)
        if (data.dtype, data.device) == (item.dtype, flat.device) and same_stride(data, item.stride):
            flat.shared[index] = SharedMemory(data)
