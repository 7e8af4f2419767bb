"""Limits of a training: the rate of the CPU optimizer that plans are made with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ssd.device import WorkCounter
from lightning_ssd.planning import FixedPlacement, default_plan
from lightning_ssd.profiling import with_measured_step_rate
from tests.support.profiles import H100, make_model

MODEL = make_model(4, forward=0.1, parameters=10**9)
IN_HOST = FixedPlacement(("host",) * 4, ("host",) * 4)


def rate_beside(stepped: WorkCounter, *, device: str = "cuda", placement: FixedPlacement = IN_HOST) -> float:
    """Returns the planned rate of a machine that steps 10 G parameters/s alone, and `stepped` beside the training."""
    machine = replace(H100, cpu_step_rate=1e10, host_memory_bandwidth=None)
    profiler: Any = SimpleNamespace(stepped=stepped)
    plan = default_plan(MODEL, placement, {}, 0)
    return with_measured_step_rate(MODEL, machine, plan, profiler, torch.device(device)).cpu_step_rate


def test_the_first_plan_has_the_rate_of_the_optimizer_beside_the_training() -> None:
    assert rate_beside(WorkCounter(8 * 10**9, 2.0)) == pytest.approx(4e9)


@pytest.mark.parametrize("how", ["no step", "all on the GPU", "no GPU"])
def test_the_rate_is_that_of_the_machine_where_no_step_was_measured(how: str) -> None:
    """On a CPU, threads of the model's operators are those of the optimizer, and `calibrate` corrects plans alone."""
    stepped = WorkCounter(0, 0.0) if how == "no step" else WorkCounter(8 * 10**9, 2.0)
    placement = FixedPlacement(("gpu",) * 4, ("gpu",) * 4) if how == "all on the GPU" else IN_HOST
    assert rate_beside(stepped, device="cpu" if how == "no GPU" else "cuda", placement=placement) == 1e10
