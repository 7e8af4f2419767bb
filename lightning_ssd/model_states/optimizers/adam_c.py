"""The library of the kernel in adam.c, compiled at first use for the machine's processor.

On a machine without a compiler, torch's kernels are used.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("adam.c")
# Without contraction: the source states explicitly where a product and a sum are fused.
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")  # fmt: skip


class KernelSettings(ctypes.Structure):
    """The numbers of one step; see `Settings` in adam.c."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "decay", "lerp", "beta2", "one_minus_beta2", "correction")),
        *((name, ctypes.c_float) for name in ("reciprocal", "eps", "step_size")),
        *((name, ctypes.c_int32) for name in ("decoupled", "threads", "past_caches", "parts", "moments")),
        ("step", ctypes.c_int64),
        ("root", ctypes.c_void_p),
        *((name, ctypes.c_void_p * 2) for name in ("scales_in", "scales", "codes")),
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


@functools.cache
def adam_library() -> ctypes.CDLL | None:
    """Returns the functions of adam.c, or None if they can't be compiled; the log gives the reason."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.info("no C compiler (cc): Adam and AdamW are stepped by torch's kernels, which take more passes")
        return None
    try:
        return ctypes.CDLL(str(_compile(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "stderr", None) or error
        log.warning("could not compile %s: Adam and AdamW are stepped by torch's kernels. %s", SOURCE.name, details)
        return None


def _compile(compiler: str) -> Path:
    """Returns the path of the library, compiled now or by an earlier run on the same kind of processor."""
    with open("/proc/cpuinfo") as lines:
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    key = hashlib.sha256("\0".join((SOURCE.read_text(), compiler, *FLAGS, processor)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ssd"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a home that can't be written: compile for this run alone
        cache = Path(tempfile.mkdtemp(prefix="lightning_ssd-"))
    library = cache / f"adam-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(library)  # whole, even if another process compiles at the same time
    return library
