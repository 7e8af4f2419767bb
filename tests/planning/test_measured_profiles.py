"""Plans for profiles that trainings on a GPU have measured.

The files of `measured/` have the profiles of two models of transformers (Llama-3.2 1B, 4 x 2048 tokens; GPT-2 XL,
4 x 1024) and of the machine, as the default had them when it made its plan: an H200 with 16 cores, bf16-mixed, AdamW,
clipping in every step, states in host memory. GPT-2 XL's kernels are so short that launches nearly bound its step.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ssd.planning import FixedPlacement, HardwareProfile, ModelProfile, make_plan, simulate
from lightning_ssd.planning.saved_groups import default_plan, default_window
from lightning_ssd.planning.whole_units import checkpoint_all
from tests.support.profiles import GIB


def measured(name: str, gpu_gib: float, folder: Path) -> tuple[ModelProfile, HardwareProfile]:
    """Returns the profiles of a training, on a GPU with `gpu_gib` GiB for plans."""
    with gzip.open(Path(__file__).parent / "measured" / f"{name}.json.gz") as file:
        both = json.load(file)
    for kind, content in both.items():
        (folder / f"{kind}.json").write_text(json.dumps(content))
    machine = HardwareProfile.from_json(folder / "machine.json")
    return ModelProfile.from_json(folder / "model.json"), replace(machine, gpu_bytes=int(gpu_gib * GIB))


@pytest.mark.parametrize("gpu_gib", [15.5, 17.0, 20.0])
def test_no_plan_is_slower_than_checkpointing_of_every_layer(gpu_gib: float, tmp_path: Path) -> None:
    """As a person would write it, where the states stay in host memory and the logits hardly have room."""
    model, machine = measured("llama-3.2-1b", gpu_gib, tmp_path)
    fixed = FixedPlacement(("host",) * len(model.parts), ("host",) * len(model.parts), clip="deferred")
    person = checkpoint_all(model, default_plan(model, fixed, {}, default_window(model, fixed.weights)))
    assert person is not None
    of_person, ours = (simulate(model, machine, plan) for plan in (person, make_plan(model, machine, fixed=fixed)))
    assert not of_person.excess_bytes(machine) and not ours.excess_bytes(machine)
    assert ours.step_seconds <= 1.001 * of_person.step_seconds


@pytest.mark.parametrize("error", [0.8, 1.0, 1.4])
def test_an_error_of_the_launches_costs_little(error: float, tmp_path: Path) -> None:
    """A host that seems slow would keep saved tensors in place of states on the GPU."""
    model, machine = measured("gpt2-xl", 26.0, tmp_path)
    best, ours = (
        simulate(model, machine, make_plan(one, machine, clip="deferred"))
        for one in (model, model.with_launches(error))
    )
    assert ours.step_seconds <= 1.02 * best.step_seconds
