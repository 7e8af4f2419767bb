"""Names of the spans in a timeline, and the annotation of work with them."""

import re

from torch.autograd import profiler

from lightning_ssd import torch_internals as internals

SSD_READ = "ssd read"
SSD_WRITE = "ssd write"
COPY_IN = "copy in"
COPY_OUT = "copy out"
"""Copies of a CPU device. The profiler sees those of a GPU by itself."""
OPTIMIZER = "step "
"""Prefix: the name of the stepped parameters follows."""
WAIT = "wait for "
"""Prefix: the awaited work follows."""

_WITH_BYTES = re.compile(r"(.*), (\d+) bytes")
"""The annotation of a transfer: torch's profiler keeps names alone of the annotations on all threads."""


class span:
    """Annotates the work inside of a `with` block for torch's profiler, on any thread.

    It differs from torch's `record_function` in two points: it takes almost no time while no profiler records (instead
    of ten microseconds), and dispatch modes do not intercept it as an operator of the forward.

    Args:
        nbytes: bytes of a transfer; None: the work is no transfer.
    """

    __slots__ = ("_name", "_nbytes", "_record")

    def __init__(self, name: str, nbytes: int | None = None) -> None:
        self._name = name
        self._nbytes = nbytes
        self._record: profiler.record_function | None = None

    def __enter__(self) -> None:
        if internals.is_recording():
            name = self._name if self._nbytes is None else f"{self._name}, {self._nbytes} bytes"
            self._record = profiler.record_function(name)
            with internals.without_dispatch():
                self._record.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._record is not None:
            with internals.without_dispatch():
                self._record.__exit__(None, None, None)


def name_and_bytes(annotation: str) -> tuple[str, int]:
    """Returns the name of a recorded span, and its bytes: 0 if it is no transfer."""
    found = _WITH_BYTES.fullmatch(annotation)
    return (found[1], int(found[2])) if found else (annotation, 0)
