"""Has the device make optimizer steps of flat parameters, and keep some of their gradients, chosen at random."""

import random
from collections.abc import Collection
from typing import Any

import pytest

from lightning_ssd.model_states.device_share import DeviceShare
from lightning_ssd.model_states.device_stepper import DeviceStep, DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.prefetcher import ParamPrefetcher
from lightning_ssd.model_states.waiting_gradient import WaitingGradient

SMALL_PIECE = 20 * 2048
"""Bytes of the least elements of a piece, with five arrays in fp32."""


class Shared:
    """Has the device make the steps of units that a random generator chooses, anew for each step.

    Gradients of some of them stay on the device until the step, where that is possible.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, share: float = 0.6, *, kept: float = 0.5
    ) -> None:
        self.steps = 0
        """Steps that the device has made."""
        self.waiting = 0
        """Those of them whose gradients stayed there."""
        self.prefetches = 0
        """Flat parameters whose values were prefetched for a step."""
        self._random = random.Random(seed)
        monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", SMALL_PIECE)
        monkeypatch.setattr(ParamPrefetcher, "change_budget", lambda prefetcher, nbytes: True)
        submit = DeviceStepper.submit

        def counted(stepper: DeviceStepper, step: DeviceStep, **named: Any) -> Any:
            self.steps += 1
            self.waiting += isinstance(step.gradient, WaitingGradient)
            return submit(stepper, step, **named)

        prefetch = DeviceStepper.prefetch

        def counted_prefetch(stepper: DeviceStepper, *arguments: Any, **named: Any) -> None:
            self.prefetches += 1
            prefetch(stepper, *arguments, **named)

        monkeypatch.setattr(DeviceStepper, "submit", counted)
        monkeypatch.setattr(DeviceStepper, "prefetch", counted_prefetch)
        self._share = share

        def note(share: DeviceShare, work: Any) -> None:
            chosen = self.choose(share._order, self._share)
            assert share.plan(chosen, self.choose(chosen, kept))

        monkeypatch.setattr(DeviceShare, "note", note)

    def choose(self, order: Collection[FlatParameter], share: float) -> list[FlatParameter]:
        return [flat for flat in order if self._random.random() < share]
