"""The values of a flat parameter in memory: weights, master weights, optimizer states, and where each lies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_ssd.model_states.stores.dynamic_code import BLOCK, decode, encode
from lightning_ssd.model_states.stores.split import join, split
from lightning_ssd.model_states.units import FlatParameter, ParamView
from lightning_ssd.storage import PinnedBuffer

WHOLE_DTYPES = (torch.float32, torch.float64)
"""Dtypes of weights that are their own master weights, as fp16 ones are. fp64 and fp16 weights are evaluated only."""

MomentFormat = Literal["fp32", "bf16", "8bit"]
"""Format of optimizer states that have an element for each weight. Steps round bf16 ones stochastically, so that small
changes add up; values that are loaded from elsewhere are rounded to the nearest number. "8bit": see `dynamic_code`."""

MOMENT_DTYPES: dict[MomentFormat, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "8bit": torch.uint8,
}

UNSIGNED_STATES = ("exp_avg_sq",)
"""Optimizer states without negative values, which have a code of their own in 8 bits."""

WEIGHT, MASTER = "weight", "master"
"""Keys of compute weights, and of master weights that are apart from them."""

SCALES = " scales"
"""End of the keys of scales of optimizer states."""


@dataclass
class StagedState:
    """Values of a flat parameter on the host, or of some of its elements. One-dimensional, an element each.

    Attributes:
        weights: compute weights, in the flat's dtype; undefined where `master` is another tensor.
        master: fp32 master weights; `weights` itself if those are fp32, None if they are split.
        low: low half of split master weights (`weights` is the high half), int16.
        states: optimizer states by name, zero before the first step; `state` returns them in fp32.
        scales: fp32 scales of optimizer states in 8 bits by name, one for each block of `dynamic_code.BLOCK` elements.
        memory: bytes that values on SSDs were read to; None: the values lie where they are stored.
        buffer: staging memory that has these bytes; None: they are memory of their own.
        uncommitted: destination of a step's new values; None: the step is made in place.
    """

    weights: Tensor
    master: Tensor | None
    low: Tensor | None
    states: dict[str, Tensor]
    moments: MomentFormat = "fp32"
    scales: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None
    buffer: PinnedBuffer | None = None
    uncommitted: "StagedState | None" = None

    @property
    def out(self) -> "StagedState":
        """Destination of a step's new values. No attribute: a cycle would keep the memory until garbage collection."""
        return self if self.uncommitted is None else self.uncommitted

    def copy(self, other: "StagedState") -> None:
        """Copies the values of another of the same layout."""
        self.weights.copy_(other.weights)
        if self.master is not None and other.master is not None and self.master is not self.weights:
            self.master.copy_(other.master)
        if self.low is not None and other.low is not None:
            self.low.copy_(other.low)
        self.copy_states(other)

    def copy_states(self, other: "StagedState") -> None:
        """Copies the optimizer states of another of the same layout."""
        for name, values in self.states.items():
            values.copy_(other.states[name])
        for name, values in self.scales.items():
            values.copy_(other.scales[name])

    def elements(self, start: int, end: int) -> "StagedState":
        """Returns views of some elements, which begin with a block of `dynamic_code`, in one version."""

        def part(values: Tensor) -> Tensor:
            return values[start:end]

        scales = {name: values[start // BLOCK : -(-end // BLOCK)] for name, values in self.scales.items()}
        weights = part(self.weights)
        master = weights if self.master is self.weights else None if self.master is None else part(self.master)
        low = None if self.low is None else part(self.low)
        states = {name: part(values) for name, values in self.states.items()}
        return StagedState(weights, master, low, states, self.moments, scales)

    def decode(self, name: str) -> Tensor:
        """Returns an optimizer state in fp32: the stored one if it is stored so, else a copy."""
        values = self.states[name]
        if self.moments == "8bit":
            return decode(values, self.scales[name], signed=name not in UNSIGNED_STATES)
        return values.float()

    def encode(self, name: str, values: Tensor) -> None:
        """Assigns an optimizer state in 8 bits from fp32 values, rounded to numbers of the code."""
        encode(values, self.states[name], self.scales[name], signed=name not in UNSIGNED_STATES)

    def state(self, name: str, item: ParamView) -> Tensor:
        """Returns an optimizer state of one parameter in fp32: a view if it is stored so, else a copy."""
        return item.unflatten(self.elements(item.start, item.start + item.numel).decode(name))

    def set_state(self, name: str, item: ParamView, value: Tensor) -> None:
        """Assigns an optimizer state of one parameter, rounded to numbers of its format."""
        if self.moments != "8bit":
            item.of(self.states[name]).copy_(value)
            return
        values = torch.empty_strided(item.shape, item.stride, dtype=torch.float32, device="cpu").copy_(value)
        self.elements(item.start, item.start + item.numel).encode(name, item.flatten(values))

    def masters(self) -> Tensor:
        """Returns the fp32 master weights: a copy if they are split."""
        if self.master is not None:
            return self.master
        assert self.low is not None
        return join(self.weights, self.low)

    def set_masters(self, masters: Tensor) -> None:
        """Assigns master weights, which may be the tensor that `masters` has returned, and rounds them."""
        if self.low is not None:
            split(masters, self.weights, self.low)
            return
        assert self.master is not None
        if masters is not self.master:
            self.master.copy_(masters)
        self.round()

    def round(self) -> None:
        """Rounds whole master weights to the compute weights."""
        if self.master is not None and self.weights is not self.master:
            self.weights.copy_(self.master)


@dataclass(frozen=True)
class StoredArray:
    """An array of a flat parameter, with a value for each element, or for each block of them.

    Attributes:
        key: `WEIGHT`, `MASTER`, or the name of an optimizer state, which for its scales ends with `SCALES`.
        dtype: dtype of the values; of split master weights, `MASTER` has the low half, int16.
        buffer: 0: it is in the buffer of the compute weights; 1: in that of all other values.
        start: offset in the buffer, bytes.
        block: elements that have a value together.
    """

    key: str
    dtype: torch.dtype
    buffer: int
    start: int
    block: int = 1

    def nbytes_of(self, numel: int) -> int:
        """Returns the bytes of `numel` elements, which begin with a block."""
        return -(-numel // self.block) * self.dtype.itemsize

    def range_of(self, item: ParamView) -> tuple[int, int]:
        """Returns offset and number of the bytes in the buffer that have the elements of one parameter."""
        return self.start + self.nbytes_of(item.start), self.nbytes_of(item.numel)


@dataclass(frozen=True)
class Layout:
    """How a flat parameter's values lie in memory: compute weights in one buffer, all others in a second one.

    Attributes:
        split: whether its master weights are split; those of bf16 weights can be.
        state_names: optimizer states that have an element for each weight.
        steps: whether it is stepped, and has gradients.
        versions: 2 if a step can be rolled back, else 1.
        moments: format of the optimizer states.
    """

    flat: FlatParameter
    split: bool
    state_names: Sequence[str]
    steps: bool
    versions: int
    moments: MomentFormat = "fp32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient as it is copied from the device."""
        return self.flat.nbytes if self.steps else 0

    @property
    def summed_gradient_bytes(self) -> int:
        """Bytes of the gradients of several micro-batches, which are summed in fp32."""
        return torch.float32.itemsize * self.flat.numel if self.steps else 0

    @property
    def whole_master(self) -> bool:
        """Whether there are fp32 master weights beside the compute weights."""
        evaluated = self.flat.dtype == torch.float16 and not self.flat.mixed
        return self.flat.dtype not in WHOLE_DTYPES and not self.split and not evaluated

    @property
    def opt_state_bytes(self) -> int:
        """Bytes of all values but the compute weights: master weights and optimizer states."""
        last = self.arrays[-1]
        return last.start + last.nbytes_of(self.flat.numel) if last.buffer else 0

    @property
    def resident_extra_bytes(self) -> int:
        """Bytes that master weights and optimizer states take more on the device, where all are in fp32."""
        whole = torch.float32.itemsize * self.flat.numel * (len(self.state_names) + (self.whole_master or self.split))
        return whole - sum(array.nbytes_of(self.flat.numel) for array in self.arrays if array.key != WEIGHT)

    @cached_property
    def arrays(self) -> tuple[StoredArray, ...]:
        """All arrays: compute weights, optimizer states, master weights."""
        kinds = [(name, MOMENT_DTYPES[self.moments], 1) for name in self.state_names]
        if self.whole_master or self.split:
            kinds.append((MASTER, torch.float32 if self.whole_master else torch.int16, 1))
        if self.moments == "8bit":
            kinds += [(name + SCALES, torch.float32, BLOCK) for name in self.state_names]
        arrays, start = [StoredArray(WEIGHT, self.flat.dtype, 0, 0)], 0
        for key, dtype, block in kinds:
            arrays.append(StoredArray(key, dtype, 1, start, block))
            start += arrays[-1].nbytes_of(self.flat.numel)
        return tuple(arrays)

    def views(self, *buffers: Tensor) -> StagedState:
        """Returns views of the values that lie in the bytes of the buffers."""
        arrays: dict[str, Tensor] = {}
        for index, memory in enumerate(buffers):
            arrays |= self.arrays_in(index, memory)
        return self.state_of(arrays)

    def arrays_in(self, buffer: int, memory: Tensor) -> dict[str, Tensor]:
        """Returns views of the arrays that lie in the bytes of a buffer, by their keys."""
        return {
            array.key: memory[array.start : array.start + array.nbytes_of(self.flat.numel)].view(array.dtype)
            for array in self.arrays
            if array.buffer == buffer
        }

    def state_of(self, arrays: dict[str, Tensor]) -> StagedState:
        """Returns the values in the arrays of all buffers, by their keys; the dictionary becomes a part of it."""
        compute, master = arrays.pop(WEIGHT), arrays.pop(MASTER, None)
        scales = {name: arrays.pop(name + SCALES) for name in self.state_names if name + SCALES in arrays}
        if self.split:
            return StagedState(compute, None, master, arrays, self.moments, scales)
        return StagedState(compute, compute if master is None else master, None, arrays, self.moments, scales)
