"""Sources of offloaded tensors: the whole values of a weight, read and written wherever they are stored.

Threads and ownership: as in `access`, whose operators read and write the sources.
"""

import torch
from torch import Tensor, nn

from lightning_ssd.activations import mark_offloaded
from lightning_ssd.model_states.access.parameter import (
    AliasReferences,
    OffloadedParameter,
    Source,
)
from lightning_ssd.model_states.stores import write_changed
from lightning_ssd.model_states.units import SharedMemory


class Weights(Source):
    """The weights of one parameter."""

    @property
    def whole(self) -> bool:
        return self.flat.summoned or not isinstance(self.item.parameter, OffloadedParameter)

    def read(self) -> Tensor:
        if self.whole:
            return self.item.parameter.data
        if (memory := self.flat.memory(self.index)) is not None:
            self.access.staged.pull(self.flat)  # other parameters of the flat may have been changed, too
            return memory.to(self.flat.device, self.item.dtype)
        if not self.flat.mixed:
            return self.flat.view(self.index)
        masters = self.access.staged.stage(self.flat).masters
        return self.item.of(masters).to(self.flat.device, self.item.dtype, copy=True)

    @property
    def in_flat_memory(self) -> bool:
        return not (self.whole or self.flat.mixed or self.flat.memory(self.index) is not None)

    @property
    def backs_views(self) -> bool:
        return self.flat.forwards > 0 and self.flat.resident and not self.whole

    def base(self) -> Tensor:
        flat = self.flat
        if not self.backs_views or not flat.mixed or flat.memory(self.index) is not None:
            return self.read()
        if self.index not in flat.forward_values:
            values = flat.forward_values[self.index] = self.read()
            mark_offloaded(values.untyped_storage(), AliasReferences(self, versioned=True))
        return flat.forward_values[self.index]

    def write(self, values: Tensor) -> None:
        if self.whole:
            return
        flat, item = self.flat, self.item
        if (memory := flat.memory(self.index)) is not None:
            if (values.device, values.dtype) != (memory.device, memory.dtype):  # else `values` are this memory
                write_changed(memory, values.to(memory.device))
            self.access.staged.pull(flat)
            return
        self.access.begin_change(flat)
        self.access.prefetcher.wait(flat)  # a running copy to the device reads the host memory that is written here
        values = values.detach().to("cpu")
        staged = self.access.staged.change(flat)
        write_changed(item.of(staged.masters), values)
        if flat.mixed:
            self.changed()  # a later backward would need the overwritten values, which the forward has cast
            flat.refresh(self.index, item.of(staged.masters))

    @property
    def origin(self) -> int:
        memory = self.item.parameter.data if self.whole else self.flat.memory(self.index)
        return 0 if memory is None else int(memory.storage_offset()) * memory.itemsize

    def share(self) -> Tensor:
        """Returns the parameter's memory in plain training, which other tensors share from now on.

        Raises:
            RuntimeError: a state dict has the values in other memory.
        """
        values = self.read()
        if self.whole:
            return values
        if (memory := self.flat.memory(self.index)) is None:
            values = values.clone(memory_format=torch.preserve_format)
            self.flat.shared[self.index] = SharedMemory(values)
        elif not values.is_set_to(memory):
            raise RuntimeError(
                f"`.data` can't share memory with {self.name}, which is offloaded, while a state dict has its values. "
                "Drop the state dict, or copy the values (`copy_`)."
            )
        return values


def end_aliases(parameter: nn.Parameter) -> None:
    """Makes the aliases of a parameter that is no longer offloaded ordinary tensors, which share its memory.

    Later changes of the parameter find plain aliases, as do later trainings: those share the memory with them.
    """
    source = vars(parameter).pop("source", None)
    if source is not None:
        source.end_aliases(parameter.data)
