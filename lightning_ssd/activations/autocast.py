"""Autocast within a dispatch mode: kernels that call operators have it, as without the mode.

While a mode handles an operator, torch has autocast disabled, because the operator's arguments were cast before. Most
kernels call no operators that autocast knows. A few do, such as that of `affine_grid`, which calls a product: without a
mode it is computed in 16 bits.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from lightning_ssd import torch_internals as internals

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Dispatch keys of autocast."""


@functools.cache
def calls_operators(func: "internals.OpOverload") -> bool:
    """Returns whether the kernel of an operator is the same for all devices, so that it computes by other operators.

    Views have such kernels, too, and compute nothing. Queries of attributes (`prim::device`) have no kernels.
    """
    if not internals.has_kernel(func.name()) or any(one.alias_info for one in internals.schema_of(func).arguments):
        return False
    has_kernel = internals.has_kernel_for
    return not any(has_kernel(func.name(), key) for key in ("CPU", "CUDA"))


@contextlib.contextmanager
def outer_autocast() -> Iterator[None]:
    """Enables autocast within the context as it is around the operator that a mode handles."""
    with internals.around_dispatch_mode():
        enabled = [key for device, key in _KEYS.items() if torch.is_autocast_enabled(device)]
    for key in enabled:
        internals.exclude_dispatch_key(key, False)
    try:
        yield
    finally:
        for key in enabled:
            internals.exclude_dispatch_key(key, True)


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Returns the dtype of autocast for each type of device for which it is enabled."""
    return {device: torch.get_autocast_dtype(device) for device in _KEYS if torch.is_autocast_enabled(device)}


def autocast_of(dtypes: Mapping[str, torch.dtype], *, cached: bool = False) -> AbstractContextManager[object]:
    """Returns a context in which autocast is as `autocast_dtypes` has found it.

    Args:
        dtypes: the result of `autocast_dtypes`.
        cached: whether a weight that is cast twice has one cast, as it has in a forward with `cache_enabled`.
    """
    return _enabled_autocast(dtypes, cached) if dtypes else internals.without_autocast()


@contextlib.contextmanager
def _enabled_autocast(dtypes: Mapping[str, torch.dtype], cached: bool) -> Iterator[None]:
    with internals.without_autocast(), contextlib.ExitStack() as stack:
        for device, dtype in dtypes.items():
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
        yield
