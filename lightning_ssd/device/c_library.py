"""C sources of the package, compiled at first use for the machine's processor."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

# Without contraction: the sources state explicitly where a product and a sum are fused.
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")  # fmt: skip


def load_c_library(source: Path, fallback: str) -> ctypes.CDLL | None:
    """Returns the functions of a C source, or None if they can't be compiled; the log gives the reason.

    Args:
        source: the file, whose functions release Python's lock while they run.
        fallback: the slower way without the library, for the log.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler (cc): %s. Install gcc or clang", fallback)
        return None
    try:
        return ctypes.CDLL(str(compile_library(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "stderr", None) or error
        log.warning("could not compile %s: %s. %s", source.name, fallback, details)
        return None


def compile_library(source: Path, compiler: str) -> Path:
    """Returns the path of the library, compiled now or by an earlier run on the same kind of processor.

    Raises:
        OSError: the library can't be written.
        subprocess.SubprocessError: the compiler fails.
    """
    with open("/proc/cpuinfo") as lines:
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    key = hashlib.sha256("\0".join((source.read_text(), compiler, *FLAGS, processor)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ssd"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a home that can't be written: compile for this run alone
        cache = Path(tempfile.mkdtemp(prefix="lightning_ssd-"))
    library = cache / f"{source.stem}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / library.name
            command = [compiler, *FLAGS, str(source), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(library)  # whole, even if another process compiles at the same time
    return library
