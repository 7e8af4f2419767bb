"""Lifetimes measured on a CUDA device: backward runs on autograd's own thread, and is recorded operator by operator."""

from pathlib import Path
from typing import Any

import pytest

from lightning_ssd import ModelProfiler, SSDOffloadStrategy
from lightning_ssd.replay import PHASES, LifetimeProfile
from tests.support.compare import assert_same
from tests.support.parity import TinyGPT, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_operators_of_all_phases_are_recorded(precision: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"device": "cuda", "model": TinyGPT, "steps": 8, "precision": precision, "recorded": False}
    files = {"path": tmp_path / "profile.json", "lifetimes": tmp_path / "lifetimes.json"}
    strategy, plain = (SSDOffloadStrategy(min_bytes=1, states="gpu") for _ in range(2))
    assert_same(train(strategy, callbacks=[ModelProfiler(**files, warm_up=2, steps=2)], **how), train(plain, **how))
    profile = LifetimeProfile.from_json(tmp_path / "lifetimes.json")
    seconds = {phase: sum(one.end - one.start for one in profile.operators if one.phase == phase) for phase in PHASES}
    counts = {phase: sum(one.phase == phase for one in profile.operators) for phase in PHASES}
    assert min(seconds.values()) > 0 and counts["backward"] > counts["forward"] / 2
    matrices = [one for one in profile.tensors if one.kind == "weight" and one.name.endswith("c_fc.weight")]
    assert len(matrices) == 3
    # In mixed precision, backward uses a copy of 16 bits.
    phases = set(PHASES) if precision == "32-true" else {"forward", "optimizer"}
    assert all({profile.operators[use].phase for use in one.uses} == phases for one in matrices)
    saved = [one for one in profile.tensors if one.kind == "saved tensor"]
    phases_of = [(one.name, one.nbytes, [profile.operators[use].phase for use in one.uses]) for one in saved]
    assert saved and not [one for one in phases_of if one[-1][-1] != "backward"]
    gradients = [one for one in profile.tensors if one.kind == "gradient"]
    assert {profile.operators[one.allocated].phase for one in gradients if one.allocated is not None} == {"backward"}
