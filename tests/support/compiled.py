"""Dynamo's backends and counts, for tests of compiled code."""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch._dynamo

INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.thorough, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")],
)


@contextmanager
def counted() -> Iterator[dict[str, dict[str, int]]]:
    """Yields Dynamo's counts of frames, graphs, breaks and recompilations within the context, filled at its end.

    No code is compiled at its start. Garbage is not collected within it: the finalizers of garbage, such as that of
    earlier tests, are frames for Dynamo if a collection happens to run in a compiled call.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts: dict[str, dict[str, int]] = {}
    gc.disable()
    try:
        yield counts
    finally:
        gc.enable()
    for name in ("frames", "stats", "graph_break", "unimplemented", "recompile_limit", "recompiles"):
        if found := torch._dynamo.utils.counters.get(name):
            counts[name] = dict(found)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No code is compiled, or counted, before each test of a module that imports this fixture, and none after it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
