"""Saved tensors that are dropped in forward, and recomputed when backward unpacks them.

`torch.utils.checkpoint` reruns whole modules. This module reruns single operators, below autograd: a `RecomputeNode` is
an operator with its arguments. Activations among the arguments are packed like autograd's saved tensors: they may be
kept, offloaded, or recomputed themselves. So any choice of operators can be recomputed, each once, and no autograd
graph is built again. The same kernel on the same bytes with the same strides gives the same results.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.autocast import autocast_dtypes, autocast_of
from lightning_ssd.activations.graph import is_random, tensors_of
from lightning_ssd.activations.record import RefCountedBytes, SavedHandle, bytes_of, forget_original
from lightning_ssd.activations.rerun_state import GeneratorState, restored_generators
from lightning_ssd.storage_tags import RECOMPUTE_NODES, RECOMPUTED

Pack = Callable[[Tensor], Any]
"""The hook `ActivationOffloader.pack`, which returns `InlineSaved` or a `SavedHandle` under a `UnitDispatchMode`."""


class RecomputeNode:
    """An executed operation with its arguments, by which its results can be recomputed.

    Args:
        func: the dispatched operation, which has returned already.
        returned: tensors that the operation has returned, in order.
        random: result of `random_state` before the operation ran.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        returned: Sequence[Tensor],
        random: GeneratorState | None,
        pack: Pack,
        unpack: Callable[[Any], Tensor],
    ) -> None:
        self._func = func
        self._random = random
        self._unpack = unpack
        self._returned = [_describe(tensor) for tensor in returned]
        self._grad_enabled = torch.is_grad_enabled()
        """Grad mode of the operation: some kernels return workspaces for backward only if it is on (oneDNN's LSTM)."""
        self._autocast = autocast_dtypes()
        self._results: list[weakref.ref[Recomputed]] = []
        self._reads: list[Recomputed] = []

        def pack_argument(tensor: Tensor) -> _Packed:
            packed = forget_original(pack(tensor))  # the operation has read the tensor before any later `.data =`
            if isinstance(packed, SavedHandle) and isinstance(packed.record, Recomputed):
                self._reads.append(packed.record)
            if (nodes := _nodes_reading(tensor)) is not None:
                nodes.add(self)
            return _Packed(packed)

        with internals.with_dispatch_key("ADInplaceOrView"):  # `detach` shares the version counter, too
            self._args = _mapped(args, Tensor, pack_argument)
            self._kwargs = {name: _mapped(value, Tensor, pack_argument) for name, value in kwargs.items()}

    def result(self, tensor: Tensor, position: int) -> "Recomputed":
        """Returns the value that replaces `tensor`, the operation's result at `position`, in autograd's nodes."""
        recomputed = Recomputed(tensor, position, self)
        self._results.append(weakref.ref(recomputed))
        return recomputed

    def make(self) -> None:
        """Recomputes results that have views, and before that arguments that were dropped."""
        stack = [self]  # instead of recursion: chains may be long
        while stack:
            missing = [read._node for read in stack[-1]._reads if read.data is None]
            if missing:
                stack += missing
                continue
            node = stack.pop()
            waiting = (recomputed for reference in node._results if (recomputed := reference()) is not None)
            if node is self or any([recomputed.views and recomputed.data is None for recomputed in waiting]):
                node._run()

    def remake(self, position: int) -> Tensor:
        """Recomputes and returns the result at `position`, without storing it."""
        for read in self._reads:
            read.recompute()
        return self._compute()[position]

    def _run(self) -> None:
        tensors = self._compute()
        for reference in self._results:
            if (recomputed := reference()) is not None:
                recomputed.materialize(tensors[recomputed.position])

    def _compute(self) -> list[Tensor]:
        def unpack_argument(packed: _Packed) -> Tensor:
            return self._unpack(packed.saved)

        args = _mapped(self._args, _Packed, unpack_argument)
        kwargs = {name: _mapped(value, _Packed, unpack_argument) for name, value in self._kwargs.items()}
        with (
            internals.without_autograd(),
            torch.set_grad_enabled(self._grad_enabled),
            autocast_of(self._autocast),
            restored_generators(() if self._random is None else (self._random,)),
        ):
            tensors = tensors_of(self._func(*args, **kwargs))
        returned = [_describe(tensor) for tensor in tensors]
        if returned != self._returned:
            raise RuntimeError(
                f"{self._func} returned {returned} when it was recomputed in backward, and {self._returned} in "
                "forward: it depends on more than its arguments. Give `SwapPlanner` a plan that keeps or offloads "
                "its results."
            )
        return tensors

    def expire(self) -> None:
        """Called before an argument is changed: recomputes viewed results; later it is impossible."""
        results = [recomputed for reference in self._results if (recomputed := reference()) is not None]
        if any([recomputed.views and recomputed.data is None for recomputed in results]):
            self.make()
        for recomputed in results:
            recomputed.expired = True


def _describe(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int]:
    """Returns the attributes in which a recomputed tensor must equal the original one."""
    return tensor.dtype, tensor.size(), tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed tensor among the arguments of a node."""

    saved: Any


def _mapped(argument: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Returns an argument of an operation with `function` applied to values of `kind`, also inside lists and tuples."""
    if isinstance(argument, kind):
        return function(argument)
    if isinstance(argument, list | tuple):
        return [_mapped(value, kind, function) for value in argument]
    return argument


class Recomputed(RefCountedBytes):
    """A storage that is dropped until it is recomputed.

    Attributes:
        position: position of its tensor among the results of the node.
        version: version of that tensor when it was made.
        expired: True if it can't be recomputed any more; its bytes, if present, are kept then.
        checked: number of its buffer in the recorded graph, if autograd saves it all the same, to compare its bytes.
    """

    __slots__ = ("_node", "checked", "expired", "nbytes", "position", "version")

    def __init__(self, tensor: Tensor, position: int, node: RecomputeNode) -> None:
        super().__init__()
        self.position = position
        self.version = internals.version_of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()
        self.expired = False
        self.checked: int | None = None
        self._node = node

    def recompute(self) -> None:
        """Recomputes the bytes if they are dropped."""
        if self.data is None:
            self._node.make()

    def remake(self) -> Tensor:
        """Recomputes and returns the bytes, whether they are dropped or not."""
        return bytes_of(self._node.remake(self.position).untyped_storage())

    def materialize(self, tensor: Tensor) -> None:
        """Uses the storage of `tensor`, a recomputed result, if there are views of it."""
        if self.views and self.data is None:
            storage = tensor.untyped_storage()
            self.restored()
            self.data = bytes_of(storage)

    def release(self) -> None:
        if not self.expired:
            self.data = None

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Uses `storage`, the one that the operation returned, from here on, because it is about to be changed.

        If the change is made through an alias with a version counter of its own, backward reads it, as in plain
        autograd. Saved tensors that share the counter raise PyTorch's error.
        """
        self.expired = True
        if self.views:
            self.data = bytes_of(storage)


def random_state(func: Any, device: torch.device) -> GeneratorState | None:
    """Returns the generator of an operation on `device` and its state, or None if it draws no random numbers."""
    if not is_random(func):
        return None
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return generator, generator.get_state()


def mark_recomputed(tensor: Tensor, recomputed: Recomputed) -> None:
    """Makes `marked_recomputed` return `recomputed` for the storage of `tensor`, as long as `recomputed` is alive."""
    setattr(tensor.untyped_storage(), RECOMPUTED, weakref.ref(recomputed))


def recomputed_of(tensor: Tensor, storage: torch.UntypedStorage) -> Recomputed | None:
    """Returns the value that replaces `tensor` in its present version, or None."""
    recomputed = marked_recomputed(storage)
    if recomputed is None or recomputed.expired or recomputed.checked is not None:
        return None
    return recomputed if recomputed.version == internals.version_of(tensor) else None


def marked_recomputed(storage: torch.UntypedStorage) -> Recomputed | None:
    """Returns the value that replaces `storage` in autograd's nodes, or is compared with it, or None."""
    reference: weakref.ref[Recomputed] | None = getattr(storage, RECOMPUTED, None)
    return None if reference is None else reference()


def before_change(tensors: Sequence[Tensor]) -> None:
    """Called before `tensors` are changed in place: recomputes values that depend on their storages, while possible."""
    for tensor in tensors:
        nodes = _nodes_reading(tensor)
        for node in list(nodes or ()):
            node.expire()
        if tensor.layout is torch.strided and (recomputed := marked_recomputed(tensor.untyped_storage())) is not None:
            recomputed.adopt(tensor.untyped_storage())


def _nodes_reading(tensor: Tensor) -> "weakref.WeakSet[RecomputeNode] | None":
    """Returns the nodes with the storage of `tensor` among their arguments, or None if `tensor` is not strided."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    nodes: weakref.WeakSet[RecomputeNode] | None = getattr(storage, RECOMPUTE_NODES, None)
    if nodes is None:
        nodes = weakref.WeakSet()
        setattr(storage, RECOMPUTE_NODES, nodes)
    return nodes
