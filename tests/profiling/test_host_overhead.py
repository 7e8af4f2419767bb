"""What following a plan costs the host."""

import threading
from dataclasses import asdict
from math import isfinite

import torch

from lightning_ssd.profiling import measure_host_overhead


def test_nothing_is_left_of_the_measurement() -> None:
    """Seconds of everything, no thread, and random numbers as they were; measured once."""
    measure_host_overhead.cache_clear()
    threads, state = set(threading.enumerate()), torch.get_rng_state()
    with torch.no_grad():
        costs = measure_host_overhead(torch.device("cpu"))
    assert all(isfinite(seconds) and seconds >= 0 for seconds in asdict(costs).values())
    assert sum(asdict(costs).values()) > 0
    assert set(threading.enumerate()) <= threads
    assert torch.equal(torch.get_rng_state(), state)
    assert measure_host_overhead(torch.device("cpu")) is costs
