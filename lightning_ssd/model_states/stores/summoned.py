"""Offloaded weights as whole tensors on the CPU, for user code in `whole_weights` and `load_state_dict`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.units import FlatParameter, SharedMemory, same_stride
from lightning_ssd.shutdown import Shutdown


@contextlib.contextmanager
def summon(
    stores: Mapping[FlatParameter, StateStore],
    checkin: Callable[[FlatParameter, Tensor], None],
    *,
    read_only: str | None,
) -> Iterator[None]:
    """Makes the parameters of all flat parameters whole fp32 tensors, their master weights; changes are stored on exit.

    Args:
        stores: store of each flat parameter; no step and no prefetch runs.
        checkin: stores the master weights of a flat parameter.
        read_only: why a change raises an error, and the remedy, as the end of a message; None: it does not.

    Raises:
        RuntimeError: on exit, if a change can't be stored.
    """
    summoned = {flat: SummonedWeights(flat, store.checkout()) for flat, store in stores.items()}
    try:
        for weights in summoned.values():
            weights.summon()
        yield
    finally:
        shutdown = Shutdown()
        for weights in summoned.values():
            shutdown.run(weights.restore)
        shutdown.raise_failure()
        for flat, weights in summoned.items():
            if read_only is None:
                checkin(flat, weights.masters)
            elif not stores[flat].is_unchanged(weights.masters):
                raise RuntimeError(f"a hook changed weights of {flat.name}, {read_only}")


class SummonedWeights:
    """Makes the parameters of a flat parameter whole tensors, from `summon` until `restore`, which may be repeated.

    Args:
        masters: its fp32 master weights, of which the parameters are views meanwhile; owned until `restore`. A
            parameter that shares memory with tensors of user code, in fp32 and on the CPU, has that memory instead.
    """

    def __init__(self, flat: FlatParameter, masters: Tensor) -> None:
        self.masters = masters
        self._flat = flat
        self._summoned: list[Tensor] = []
        self._before: dict[int, Tensor] = {}
        """Copies of shared memory that could not become the parameter's, to detect changes by user code."""

    def summon(self) -> None:
        """Makes the parameters whole tensors."""
        flat = self._flat
        self._summoned.clear()
        self._before.clear()
        with internals.without_torch_function():
            for index, item in enumerate(flat.param_views):
                memory, whole = flat.memory(index), item.of(self.masters)
                if memory is not None and (memory.device, memory.dtype) == (whole.device, whole.dtype):
                    whole = memory
                elif memory is not None:
                    self._before[index] = memory.clone()
                item.parameter.data = whole
                self._summoned.append(whole)
        flat.summoned = True

    def restore(self) -> None:
        """Makes the parameters views of the flat again. The master weights have the changes of user code.

        Raises:
            RuntimeError: `.data` of a parameter was set to an unsuitable tensor, or shared memory was changed.
        """
        flat = self._flat
        flat.summoned = False
        try:
            with internals.without_torch_function(), torch.inference_mode(False), torch.no_grad():
                for index, whole in enumerate(self._summoned):
                    data = flat.param_views[index].parameter.data
                    if data.is_set_to(whole):
                        self._sync(index, whole)
                    else:
                        self._replace(index, data)
        finally:
            flat.attach()

    def _sync(self, index: int, whole: Tensor) -> None:
        flat, item = self._flat, self._flat.param_views[index]
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
        """Adopts a tensor that user code has set as `.data` of a parameter."""
        flat, item = self._flat, self._flat.param_views[index]
        if data.shape != item.shape or data.dtype not in (self.masters.dtype, item.dtype):
            raise RuntimeError(
                f"`.data` of {item.name}, which is offloaded, was set to a tensor of {data.dtype} {list(data.shape)}: "
                f"it is {item.dtype} {list(item.shape)} while it trains. Set it before `fit`, in `configure_model`."
            )
        item.of(self.masters).copy_(data)
        flat.shared.pop(index, None)
        if (data.dtype, data.device) == (item.dtype, flat.device) and same_stride(data, item.stride):
            flat.shared[index] = SharedMemory(data)
