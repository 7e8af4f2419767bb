"""Room for optimizer states on the device of their owner. The ranks are threads of one process."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.model_states import ModelStates
from lightning_ssd.model_states.steps import DeviceStates
from lightning_ssd.model_states.units import FlatParameter
from tests.support.ranks import build_on_ranks


def choose_all(states: ModelStates) -> tuple[DeviceStates, list[FlatParameter]]:
    """Returns states on the device, and the flat parameters, all of which may be there."""
    device = states.device_states
    assert device is not None
    flats = list(device._optimizers)
    for _ in flats:
        device.use(10**9)
    assert all(map(device.steps, flats))
    return device, flats


def test_first_units_stay_on_the_device(tmp_path: Path) -> None:
    """The others are offloaded at once, also while a first unit is copied to the device."""

    def look(states: ModelStates) -> list[bool]:
        device, flats = choose_all(states)
        del device._chosen[flats[0]]
        device.use(2 * 12 * flats[0].numel)
        return list(map(device.steps, flats))

    for steps in build_on_ranks(tmp_path, ["1MiB"] * 2, look):
        assert steps == [True, True, *[False] * (len(steps) - 2)]


def test_values_are_offloaded_after_an_interrupted_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(flat: FlatParameter) -> None:
        raise KeyboardInterrupt

    def look(states: ModelStates) -> bool:
        device, (flat, *_) = choose_all(states)
        device._copy_to_device(flat, flat.numel)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(device, "_submit_offload", interrupt)
            device.use(0)
        device.use(0)
        return device.holds(flat)

    assert build_on_ranks(tmp_path, ["1MiB"] * 2, look) == [False] * 2


def test_an_error_of_a_copy_to_the_host_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(flat: FlatParameter) -> None:
        raise ValueError("a lost device")

    def look(states: ModelStates) -> None:
        device, (flat, *_) = choose_all(states)
        device._copy_to_device(flat, flat.numel)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="a lost device"):
            patch.setattr(device, "copy_to_host", fail)
            device.use(0)

    build_on_ranks(tmp_path, ["1MiB"] * 2, look)


def test_states_without_memory_do_not_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to, barrier, short = Tensor.to, threading.Barrier(2), threading.Event()

    def copy(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if short.is_set():
            raise torch.OutOfMemoryError
        return to(tensor, *args, **named)

    monkeypatch.setattr(Tensor, "to", copy)

    def look(states: ModelStates) -> tuple[bool, bool]:
        device, (first, *others) = choose_all(states)
        barrier.wait(20)
        short.set()
        assert device._copy_to_device(first, first.numel) is None
        barrier.wait(20)
        short.clear()
        device.use(10**9)
        return device.steps(first), all(map(device.steps, others))

    assert build_on_ranks(tmp_path, ["1MiB"] * 2, look) == [(False, True)] * 2
