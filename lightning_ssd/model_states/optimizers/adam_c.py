"""The library of the kernel in adam.c. On a machine without a compiler, torch's kernels are used."""

import ctypes
import functools
import os
import threading
from pathlib import Path

from lightning_ssd.device import load_c_library

SOURCE = Path(__file__).with_name("adam.c")


class KernelSource(ctypes.Structure):
    """The gradient of a rank; see `Source` in adam.c."""

    _fields_ = [("values", ctypes.c_void_p), ("kind", ctypes.c_int64)]


class KernelSettings(ctypes.Structure):
    """The numbers of one step; see `Settings` in adam.c."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "decay", "lerp", "beta2", "one_minus_beta2", "correction")),
        *((name, ctypes.c_float) for name in ("reciprocal", "eps", "step_size")),
        *((name, ctypes.c_int32) for name in ("decoupled", "threads", "past_caches", "parts", "moments")),
        ("step", ctypes.c_int64),
        ("root", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 2) for name in ("scales_in", "scales", "codes")),
        ("sources", ctypes.c_void_p),
        ("num_sources", ctypes.c_int64),
        ("share", ctypes.c_float),
    ]


class KernelArguments(ctypes.Structure):
    """One call of a function; see `Call` in adam.c."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("arrays", ctypes.c_void_p * 9),
        ("settings", KernelSettings),
    ]


_loading = threading.Lock()
"""Held while the library is compiled and loaded: threads that need it meanwhile wait for that."""


def _release_in_fork() -> None:
    global _loading
    _loading = threading.Lock()  # the thread that may hold the other one was not forked


os.register_at_fork(after_in_child=_release_in_fork)


def begin_loading_kernel() -> None:
    """Begins to load the library on a thread of its own. The first run on a machine compiles it, for seconds."""
    if not (_loading.locked() or load_library.cache_info().currsize):
        # No daemon: a process that ends meanwhile leaves a library for the next one, and no unfinished files.
        threading.Thread(target=adam_library, name="lightning_ssd-compiler", daemon=False).start()


def adam_library() -> ctypes.CDLL | None:
    """Returns the functions of adam.c, or None if they can't be compiled; the log gives the reason. Any thread."""
    with _loading:
        return load_library()


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Does the work of `adam_library`, once for a process."""
    library = load_c_library(SOURCE, "Adam and AdamW are stepped by torch's kernels, which take more passes")
    if library is not None:
        numbers, address, mean = ctypes.c_int64, ctypes.c_void_p, (ctypes.c_int64, ctypes.c_void_p, ctypes.c_float)
        library.rank_mean.argtypes = (numbers, address, *mean, ctypes.c_int, ctypes.c_int)
        library.rank_mean_squares.argtypes = (numbers, address, *mean, ctypes.c_int)
        library.rank_mean.restype = library.rank_mean_squares.restype = None
    return library
