"""Log lines about plans."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ssd.autoplan.plan_report import LARGE_TRANSIENT, report_large_transient
from lightning_ssd.planning import largest_transient, make_plan, simulate
from tests.support.profiles import GIB, H100
from tests.support.transformer import transformer_profile

MACHINE = replace(H100, gpu_bytes=12 * GIB, host_bytes=24 * GIB)
GPT = transformer_profile(MACHINE, hidden=4096, layers=6, heads=16, sequence=1024, batch=8, vocabulary=50257)


@pytest.mark.parametrize(("share", "said"), [(1.01, True), (0.99, False)])
def test_temporary_tensors_are_reported_if_they_are_large(share: float, said: bool) -> None:
    units = (*GPT.units[:-1], replace(GPT.units[-1], backward_bytes=4 * GIB))
    profile = replace(GPT, units=units)
    unit, nbytes = largest_transient(profile)
    assert (unit, nbytes) == (GPT.units[-1].name, 4 * GIB)
    machine = replace(MACHINE, gpu_bytes=int(nbytes / (share * LARGE_TRANSIENT)))
    lines: list[str] = []
    training: Any = SimpleNamespace(inform=lines.append)
    plan = make_plan(GPT, MACHINE, "lohan")
    runner: Any = SimpleNamespace(
        profile=profile, hardware=machine, plan=plan, prediction=simulate(GPT, MACHINE, plan), placement=None
    )
    report_large_transient(training, runner)
    assert bool(lines) == said
    assert not said or (f"`{unit}`" in lines[0] and "linear_cross_entropy" in lines[0] and "fit" not in lines[0])


@pytest.mark.parametrize(("gib", "fitting"), [(4, "it has 8 samples, and [1-7] would fit"), (1, "and none would")])
def test_the_micro_batch_that_fits_is_named_if_the_present_one_does_not(gib: int, fitting: str) -> None:
    profile = replace(GPT, units=(*GPT.units[:-1], replace(GPT.units[-1], backward_bytes=4 * GIB)))
    machine = replace(MACHINE, gpu_bytes=gib * GIB)
    plan = make_plan(profile, MACHINE, "lohan")
    lines: list[str] = []
    training: Any = SimpleNamespace(inform=lines.append)
    prediction = simulate(profile, machine, plan)
    runner: Any = SimpleNamespace(profile=profile, hardware=machine, plan=plan, prediction=prediction, placement=None)
    report_large_transient(training, runner)
    assert re.search(fitting, lines[0]), lines
