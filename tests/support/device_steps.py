"""Has the device make optimizer steps of flat parameters, and keep some of their gradients, chosen at random."""

import random
from collections.abc import Collection
from typing import Any

import pytest

from lightning_ssd.model_states.gradients.waiting_gradient import WaitingGradient
from lightning_ssd.model_states.steps.device_stepper import DeviceStep, DeviceStepper
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.model_states.weights.prefetcher import ParamPrefetcher

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
        self._random = random.Random(seed)
        monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", SMALL_PIECE)
        monkeypatch.setattr(ParamPrefetcher, "change_budget", lambda prefetcher, nbytes: True)
        submit = DeviceStepper.submit

        def counted(stepper: DeviceStepper, step: DeviceStep, **named: Any) -> Any:
            self.steps += 1
            self.waiting += isinstance(step.gradient, WaitingGradient)
            return submit(stepper, step, **named)

        monkeypatch.setattr(DeviceStepper, "submit", counted)
        self._share = share
        begin_outer = StepScheduler._begin_outer

        def plan(scheduler: StepScheduler) -> None:  # between two steps
            steps = scheduler._device_steps
            chosen = self.choose(steps._order, self._share)
            assert steps.plan(chosen, self.choose(chosen, kept))
            begin_outer(scheduler)

        monkeypatch.setattr(StepScheduler, "_begin_outer", plan)

    def choose(self, order: Collection[FlatParameter], share: float) -> list[FlatParameter]:
        return [flat for flat in order if self._random.random() < share]
