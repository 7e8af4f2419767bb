"""`ExpandableSegments`: torch's CUDA allocator grows its segments in place while memory is short."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import torch

from lightning_ssd import torch_internals as internals
from lightning_ssd.device.memory import CUDAMemory, process_gpu_memory

FIRST_MICRO_BATCHES = 4
"""Micro-batches after which the allocator has reserved as much as later ones need, as long as nothing changes."""

_NAME = "expandable_segments"

SHORT = 0.6
"""Share of this process's GPU memory that is reserved where memory counts as short."""


class ExpandableSegments:
    """Lets torch's CUDA allocator grow segments in place where memory is short, which causes fewer fragments.

    A step that the host's launches bound takes some 4 % longer with them (`benchmarks/results/default.md`, T5). So
    they are in use from the beginning, and no longer if the first micro-batches need little memory, until memory gets
    short. Settings of the user's environment stay in force. If they name `expandable_segments` or another backend,
    nothing is changed.

    Threads: the training thread, between micro-batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = CUDAMemory(device)
        self._short_bytes = SHORT * process_gpu_memory(device)
        self._change = _setting()
        self._enabled = False
        self._decided = self._change is None
        """Whether nothing will change before the end."""
        self._micro_batches = 0
        self._enable(True)

    def begin_micro_batch(self) -> None:
        """Disables them after the first micro-batches unless memory is short, and enables them for good when it is."""
        self._micro_batches += 1
        if self._decided or self._micro_batches <= FIRST_MICRO_BATCHES:
            return
        if self._memory.reserved() > self._short_bytes:
            self._enable(True)
            self._decided = True
        elif self._enabled:
            self._enable(False)
            torch.cuda.empty_cache()  # cached memory of expanded segments would be allocated first

    def end(self) -> None:
        """Restores the allocator's settings."""
        self._enable(False)
        self._decided = True

    def _enable(self, enabled: bool) -> None:
        if self._change is not None and self._enabled != enabled:
            self._change(enabled)
            self._enabled = enabled


@contextlib.contextmanager
def fixed_segments() -> Iterator[None]:
    """Memory that is allocated within the context is in no expandable segment: other processes can map it.

    Called while `ExpandableSegments` has enabled them: before the first micro-batch. The user's settings follow.
    """
    user = _user_settings()
    own = "" if _NAME in user else f"{_NAME}:True"
    if is_native := torch.cuda.get_allocator_backend() == "native":
        internals.set_allocator(_joined(re.sub(f"{_NAME}:\\w*,?", "", user), f"{_NAME}:False"))
    try:
        yield
    finally:
        if is_native:
            internals.set_allocator(_joined(user, own))


def _setting() -> Callable[[bool], None] | None:
    """Returns a function that enables or disables expandable segments; `None`: the user's settings are final."""
    user = _user_settings()
    if _NAME in user or torch.cuda.get_allocator_backend() != "native":
        return None
    return lambda enabled: internals.set_allocator(_joined(user, f"{_NAME}:{enabled}"))


def _user_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _joined(*settings: str) -> str:
    """Returns settings for one call, which sets all: those of the user are repeated."""
    return ",".join([one.strip(",") for one in settings if one])
