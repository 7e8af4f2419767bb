"""Saved tensors that are dropped, and computed again when backward wants them.

`torch.utils.checkpoint` reruns whole modules. This module reruns single operators, below autograd: a `RecomputeNode` is
an operator with its arguments, of which activations are packed as autograd's saved tensors are. They may be kept,
offloaded, or recomputed themselves. So any choice of operators can be recomputed, each once, and no graph is built
anew. The same kernel on the same bytes with the same strides gives the same results.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from lightning_ssd.activations.graph import is_random, tensors_of
from lightning_ssd.activations.record import RefCountedBytes, SavedHandle, forget_original
from lightning_ssd.device.storage_tags import RECOMPUTE_NODES, RECOMPUTED

Pack = Callable[[Tensor], Any]
"""The hook `ActivationOffloader.pack`, which returns `Kept` or a `SavedHandle` under a `UnitDispatchMode`."""


class RecomputeNode:
    """How to make again what an operation has made.

    Args:
        func: the operation, as dispatched.
        args: its arguments; it has returned already.
        kwargs: its arguments by name.
        returned: the tensors that it has returned, in order.
        random: what `random_state` returned before it ran.
        pack: takes a tensor over, as autograd's hook does.
        unpack: gives it back.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        returned: Sequence[Tensor],
        random: "RandomState | None",
        pack: Pack,
        unpack: Callable[[Any], Tensor],
    ) -> None:
        self._func = func
        self._random = random
        self._unpack = unpack
        self._returned = [_describe(tensor) for tensor in returned]
        self._grad_enabled = torch.is_grad_enabled()
        """Some kernels return workspaces for backward only where gradients are enabled (oneDNN's LSTM)."""
        self._results: list[weakref.ref[Recomputed]] = []
        self._reads: list[Recomputed] = []

        def pack_argument(tensor: Tensor) -> _Packed:
            packed = forget_original(pack(tensor))  # the operation has read what it was
            if isinstance(packed, SavedHandle) and isinstance(packed.record, Recomputed):
                self._reads.append(packed.record)
            if (recipes := _recipes_of(tensor)) is not None:
                recipes.add(self)
            return _Packed(packed)

        with _share_version_counters():
            self._args = _mapped(args, Tensor, pack_argument)
            self._kwargs = {name: _mapped(value, Tensor, pack_argument) for name, value in kwargs.items()}

    def result(self, tensor: Tensor, position: int) -> "Recomputed":
        """Returns what autograd may keep in place of `tensor`, the operation's result at `position`."""
        recomputed = Recomputed(tensor, position, self)
        self._results.append(weakref.ref(recomputed))
        return recomputed

    def make(self) -> None:
        """Makes the results again for those who show them, and before that what of the arguments is not there."""
        stack = [self]  # and no recursion: chains may be long
        while stack:
            missing = [read._recipe for read in stack[-1]._reads if read.data is None]
            if missing:
                stack += missing
                continue
            recipe = stack.pop()
            waiting = (recomputed for reference in recipe._results if (recomputed := reference()) is not None)
            if recipe is self or any(recomputed.views and recomputed.data is None for recomputed in waiting):
                recipe._run()

    def remake(self, position: int) -> Tensor:
        """Returns the result at `position`, made again, for the moment."""
        for read in self._reads:
            read.bring_back()
        return self._compute()[position]

    def _run(self) -> None:
        tensors = self._compute()
        for reference in self._results:
            if (recomputed := reference()) is not None:
                recomputed.take(tensors[recomputed.position])

    def _compute(self) -> list[Tensor]:
        def unpack_argument(packed: _Packed) -> Tensor:
            return self._unpack(packed.saved)

        args = _mapped(self._args, _Packed, unpack_argument)
        kwargs = {name: _mapped(value, _Packed, unpack_argument) for name, value in self._kwargs.items()}
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(self._grad_enabled),
            torch._C._DisableAutocast(),
            _as_it_was(self._random),
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
        """What it reads is about to change: runs it, if somebody has saved what it makes; nobody does after this."""
        results = [recomputed for reference in self._results if (recomputed := reference()) is not None]
        if any(recomputed.views and recomputed.data is None for recomputed in results):
            self.make()
        for recomputed in results:
            recomputed.expired = True


def _describe(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int]:
    """Returns what a recomputed tensor must have in common with the first one."""
    return tensor.dtype, tensor.size(), tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


@dataclass(frozen=True, slots=True)
class _Packed:
    """What there is in place of a tensor among arguments."""

    saved: Any


def _mapped(argument: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Returns an argument of an operation with `function` applied to what is of `kind`: it, or what a list has."""
    if isinstance(argument, kind):
        return function(argument)
    if isinstance(argument, list | tuple):
        return [_mapped(value, kind, function) for value in argument]
    return argument


class Recomputed(RefCountedBytes):
    """A storage that is not there until it is made again.

    Attributes:
        position: of the tensor that shows it, among the results of its recipe.
        version: of that tensor when it was made.
        nbytes: of the storage.
        expired: it can't be made again any more; what is there stays.
    """

    __slots__ = ("_recipe", "expired", "nbytes", "position", "version")

    def __init__(self, tensor: Tensor, position: int, recipe: RecomputeNode) -> None:
        super().__init__()
        self.position = position
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.expired = False
        self._recipe = recipe

    def bring_back(self) -> None:
        """Has the bytes made again, if they are not there."""
        if self.data is None:
            self._recipe.make()

    def remake(self) -> Tensor:
        """Returns the bytes, made again, whatever is there."""
        tensor = self._recipe.remake(self.position)
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def take(self, tensor: Tensor) -> None:
        """Shows the storage of `tensor`, if anybody has saved it."""
        if self.views and self.data is None:
            storage = tensor.untyped_storage()
            self.restored()
            self.data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def release(self) -> None:
        if not self.expired:
            self.data = None

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Shows `storage`, the one that the operation returned, from here on: it is about to be changed.

        The change may come through an alias with a version counter of its own, and backward sees it then, as in plain
        autograd. Saved tensors that share the counter raise PyTorch's error.
        """
        self.expired = True
        if self.views:
            self.data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


RandomState = tuple[torch.Generator, Tensor]
"""A generator, and a state that it was in."""


def random_state(func: Any, device: torch.device) -> RandomState | None:
    """Returns what an operation on `device` will draw from, if it draws random numbers."""
    if not is_random(func):
        return None
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return generator, generator.get_state()


def mark_recomputed(tensor: Tensor, recomputed: Recomputed) -> None:
    """Makes `recomputed` what `recomputed_of` returns for the storage of `tensor`, as long as somebody holds it."""
    setattr(tensor.untyped_storage(), RECOMPUTED, weakref.ref(recomputed))


def recomputed_of(tensor: Tensor, storage: torch.UntypedStorage) -> Recomputed | None:
    """Returns what `tensor` can be made again by, as it is now."""
    recomputed = _marked(storage)
    if recomputed is None or recomputed.expired or recomputed.version != tensor._version:
        return None
    return recomputed


def _marked(storage: torch.UntypedStorage) -> Recomputed | None:
    reference: weakref.ref[Recomputed] | None = getattr(storage, RECOMPUTED, None)
    return None if reference is None else reference()


def before_change(tensors: Sequence[Tensor]) -> None:
    """Has everything made that is to be computed from what the storages of `tensors` hold now, or is in them."""
    for tensor in tensors:
        recipes = _recipes_of(tensor)
        for recipe in list(recipes or ()):
            recipe.expire()
        if tensor.layout is torch.strided and (recomputed := _marked(tensor.untyped_storage())) is not None:
            recomputed.adopt(tensor.untyped_storage())


def _recipes_of(tensor: Tensor) -> "weakref.WeakSet[RecomputeNode] | None":
    """Returns the recipes that read the storage of `tensor`, if it has one."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    recipes: weakref.WeakSet[RecomputeNode] | None = getattr(storage, RECOMPUTE_NODES, None)
    if recipes is None:
        recipes = weakref.WeakSet()
        setattr(storage, RECOMPUTE_NODES, recipes)
    return recipes


@contextlib.contextmanager
def _as_it_was(random: RandomState | None) -> Iterator[None]:
    """Draws the random numbers that followed `random`, and leaves no trace of it."""
    if random is None:
        yield
        return
    generator, state = random
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def _share_version_counters() -> AbstractContextManager[object]:
    """Lets `detach` share the counter of changes in place, which below autograd it does not."""
    included = torch._C._dispatch_tls_local_include_set().add(DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(included, excluded)
    return guard
