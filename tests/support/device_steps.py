"""Has the device make optimizer steps of flat parameters, chosen at random."""

import random
from collections.abc import Collection
from typing import Any

import pytest

from lightning_ssd.model_states.device_share import DeviceShare
from lightning_ssd.model_states.device_stepper import DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.prefetcher import ParamPrefetcher

SMALL_PIECE = 20 * 2048
"""Bytes of the least elements of a piece, with five arrays in fp32."""


class Shared:
    """Has the device make the steps of units that a random generator chooses, anew for each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, share: float = 0.6) -> None:
        self.steps = 0
        """Steps that the device has made."""
        self.prefetches = 0
        """Flat parameters whose values were prefetched for a step."""
        self._random = random.Random(seed)
        monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", SMALL_PIECE)
        monkeypatch.setattr(ParamPrefetcher, "change_budget", lambda prefetcher, nbytes: True)
        submit = DeviceStepper.submit

        def counted(stepper: DeviceStepper, *arguments: Any, **named: Any) -> Any:
            self.steps += 1
            return submit(stepper, *arguments, **named)

        prefetch = DeviceStepper.prefetch

        def counted_prefetch(stepper: DeviceStepper, *arguments: Any, **named: Any) -> None:
            self.prefetches += 1
            prefetch(stepper, *arguments, **named)

        monkeypatch.setattr(DeviceStepper, "submit", counted)
        monkeypatch.setattr(DeviceStepper, "prefetch", counted_prefetch)
        self._share = share

        def note(share: DeviceShare, work: Any) -> None:
            assert share.select(self.choose(share._order))

        monkeypatch.setattr(DeviceShare, "note", note)

    def choose(self, order: Collection[FlatParameter]) -> list[FlatParameter]:
        return [flat for flat in order if self._random.random() < self._share]
