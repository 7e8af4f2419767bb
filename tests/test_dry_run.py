"""`lightning-ssd plan` traces any recipe's own training step, without memory, or names the reason why it can't."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import ModelProfiler, SSDOffloadStrategy, cli, dry_run
from lightning_ssd.model_states import GPU_SHARE, MOVABLE_GPU_SHARE, bytes_on_device
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    make_plan,
    resident_bytes,
    simulate,
)
from lightning_ssd.recipes import read_recipe
from tests.support.plans import quiet_trainer
from tests.support.profiles import GB, make_model
from tests.support.transformer import transformer_profile

ROOT = Path(__file__).parents[1]
MACHINE = str(ROOT / "configs/machines/h100.json")
H100 = HardwareProfile.from_json(MACHINE)
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.name != "defaults.yaml")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)


def profile(recipe: Path | str, *overrides: str, batch: tuple[str, ...] = ()) -> ModelProfile:
    return dry_run.profile_recipe(read_recipe(str(recipe), overrides, run=False), H100, batch)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=[] if path.stem == "gpt" else pytest.mark.thorough) for path in RECIPES],
)
def test_plans_every_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(recipe), "--machine", MACHINE]) == 0
    printed = capsys.readouterr().out
    assert "It fits." in printed and "bound by" in printed
    assert float(re.search(r"([\d.]+)[KMG]? parameters", printed)[1]) > 0  # type: ignore[index]


def test_a_gpt_is_traced_as_it_is_calculated() -> None:
    """FLOPs, saved bytes and states of an eighth of the layers of a 6.7B model, without their memory."""
    layers = 4
    traced = profile(ROOT / "recipes/gpt.yaml", "-c", str(ROOT / "configs/models/gpt-6.7b.yaml"),
                     f"--model.n_layer={layers}", "--trainer.precision=bf16-true",
                     "--trainer.strategy.states=host")  # fmt: skip
    sizes: Any = yaml.safe_load((ROOT / "configs/models/gpt-6.7b.yaml").read_text())
    model, data = sizes["model"]["init_args"], sizes["data"]["init_args"]
    calculated = transformer_profile(
        H100,
        hidden=model["n_embd"],
        layers=layers,
        heads=model["n_head"],
        sequence=data["block_size"],
        batch=data["batch_size"],
        vocabulary=model["vocab_size"],
        tied=True,
    )
    assert traced.parameters == pytest.approx(calculated.parameters, rel=1e-3)
    states = [sum(unit.state_bytes_read for unit in model.units) for model in (traced, calculated)]
    assert states[0] == pytest.approx(states[1], rel=1e-3)
    assert (traced.samples, traced.tokens) == (calculated.samples, calculated.tokens)
    assert traced.largest_tensor_bytes == 4 * model["vocab_size"] * traced.tokens  # logits in fp32
    assert traced.saved_bytes == pytest.approx(calculated.saved_bytes, rel=0.2)
    flops = [sum(one.flops for unit in model.units for one in unit.operators) for model in (traced, calculated)]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)
    assert calculated.forward_seconds < traced.forward_seconds < 1.4 * calculated.forward_seconds


def test_checkpointing_is_traced() -> None:
    overrides = ["-c", str(ROOT / "configs/models/gpt-1.3b.yaml"), "--trainer.precision=bf16-true"]
    overrides += ["--model.n_layer=2", "--model.vocab_size=2048"]
    kept = profile(ROOT / "recipes/gpt.yaml", *overrides)
    again = profile(ROOT / "recipes/gpt.yaml", *overrides, "--model.gradient_checkpointing=true")
    assert again.saved_bytes < kept.saved_bytes / 4
    assert again.forward_seconds == pytest.approx(kept.forward_seconds)
    assert again.backward_seconds > kept.backward_seconds + 0.5 * kept.forward_seconds


class Mine(pl.LightningModule):
    """A user's module that reads values of its batch, logs, uses SGD, and has a frozen part."""

    def __init__(self, width: int = 512, how: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.layers[0].requires_grad_(False)
        self.how = how
        self.automatic_optimization = how != "manual"

    def training_step(self, batch: dict[str, Tensor]) -> Tensor | None:
        assert int(batch["ids"].max()) < 10
        out = self.layers(self.embed(batch["ids"]) * batch["scale"])
        loss: Tensor = out.square().mean()
        self.log("loss", loss.item())
        self.print(len(self.trainer.callbacks))  # type: ignore[attr-defined]
        if self.how == "branch" and loss > 1:
            loss = loss * 2
        if self.how == "nonzero":
            loss = loss + out[out > 0].sum()
        return None if self.how == "none" else loss

    def train_dataloader(self) -> Any:
        if self.how == "no data":
            raise FileNotFoundError("texts are missing")
        one = {"ids": torch.arange(8).repeat(64, 1), "scale": torch.ones(64, 8, 1)}
        return [one]

    def configure_optimizers(self) -> Any:
        if self.how == "adam":
            return [torch.optim.Adam(self.parameters())], []
        if self.how in ("foreach", "loop", "fused"):
            options: Any = {"loop": {"foreach": False}}.get(self.how, {self.how: True})
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], **options)
        return {"optimizer": torch.optim.SGD(self.parameters(), 0.1, momentum=0.9 * (self.how == "momentum"))}


LINEAR, EMBEDDING = 512 * 512 + 512, 10 * 512
"""Parameters of each of `Mine`'s three linear layers, of which one is frozen, and of its embedding."""

IN_HOST = ["--trainer.strategy=ssd_offload", "--trainer.strategy.states=host"]


def mine(**init_args: Any) -> str:
    Path("mine.yaml").write_text(yaml.safe_dump({"model": {"class_path": f"{__name__}.Mine", "init_args": init_args}}))
    return "mine.yaml"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


@pytest.mark.parametrize(
    ("how", "moments", "precision", "mastered"),
    [
        ("", 0, "32-true", 0),
        ("momentum", 1, "bf16-true", 3 * LINEAR + EMBEDDING),
        ("adam", 2, "bf16-mixed", 3 * LINEAR),
    ],
)
def test_states_are_those_of_the_users_optimizer(how: str, moments: int, precision: str, mastered: int) -> None:
    """16-bit weights have master weights, frozen ones, too. Autocast casts no embedding."""
    found = profile(mine(how=how), f"--trainer.precision={precision}", *IN_HOST)
    trained = 2 * LINEAR + EMBEDDING
    assert (found.samples, found.tokens, found.parameters) == (64, 64 * 8, trained)
    assert sum(unit.weight_bytes for unit in found.units) == 4 * (trained + LINEAR) - 2 * mastered
    assert sum(unit.state_bytes_read for unit in found.units) == 4 * (trained * moments + mastered)
    assert found.units[0].name == "embed" and len(found.units) == 4


@pytest.mark.parametrize(
    ("state_format", "precision", "nbytes"),
    [("fp32", "bf16-mixed", 12), ("split", "bf16-mixed", 10), ("bf16", "bf16-mixed", 6), ("8bit", "bf16-mixed", 4)],
)
def test_states_have_the_bytes_of_their_format(state_format: str, precision: str, nbytes: int) -> None:
    """On the GPU, all are in fp32."""
    arguments = [f"--trainer.precision={precision}", f"--trainer.strategy.state_format={state_format}"]
    found = profile(mine(how="adam"), *IN_HOST, *arguments)
    trained = [part for _, part in found.parts if part.parameters == LINEAR]
    assert [part.state_bytes_read for part in trained] == [nbytes * LINEAR] * 2
    assert [part.state_bytes_on("gpu") for part in trained] == [12 * LINEAR] * 2


@pytest.mark.parametrize(
    ("precision", "how", "workspace"),
    [
        ("32-true", "foreach", 4),
        ("bf16-mixed", "foreach", 4),
        ("bf16-mixed", "loop", 0),
        ("bf16-true", "foreach", 4),
        ("bf16-true", "fused", 0),
    ],
)
def test_memory_is_counted_as_in_the_profile_of_a_training(
    precision: Any, how: str, workspace: int, tmp_path: Path
) -> None:
    """States of each part, steps on the GPU, and forwards, which make no casts of offloaded weights."""
    found = profile(mine(how=how), f"--trainer.precision={precision}", *IN_HOST, "--trainer.strategy.min_bytes=1")
    module = Mine(how=how)
    batches = DataLoader(module.train_dataloader() * 6, batch_size=None)  # type: ignore[arg-type,var-annotated]
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B")
    profiler = ModelProfiler(tmp_path / "profile.json", 2, 2)
    quiet_trainer(tmp_path, strategy=strategy, precision=precision, callbacks=[profiler], max_epochs=1).fit(
        module, batches
    )
    trained = ModelProfile.from_json(tmp_path / "profile.json")
    assert [part for _, part in found.parts] == [part for _, part in trained.parts]
    assert found.step_workspace == trained.step_workspace == workspace
    assert found.saved_bytes == trained.saved_bytes
    transients = [[unit.forward_bytes for unit in model.units] for model in (found, trained)]
    assert transients[0] == pytest.approx(transients[1], abs=100)


@pytest.mark.parametrize(
    ("precision", "how", "nbytes", "frozen"),
    [
        ("32-true", "adam", 16 + 4, 4),
        ("32-true", "fused", 16, 4),
        ("bf16-mixed", "adam", 16 + 4, 4),
        ("bf16-true", "adam", 8 + 2, 2),
        ("64-true", "adam", 32 + 8, 8),
    ],
)
def test_a_step_on_the_gpu_needs_memory_of_its_own(precision: str, how: str, nbytes: int, frozen: int) -> None:
    """Torch's default allocates a tensor for each parameter, more than the forward and backward of a small batch."""
    config = read_recipe(mine(how=how), [f"--trainer.precision={precision}"], run=False)
    found = dry_run.profile_recipe(config, H100, ("ids=1x1:int64", "scale=1x1x1"))
    peak = simulate(found, H100, dry_run.plan_as_configured(config, found, H100)).gpu_peak_bytes
    assert peak == pytest.approx(nbytes * found.parameters + frozen * LINEAR, rel=0.01)


def test_casts_of_a_tied_weight_are_saved() -> None:
    """The embedding has it in fp32. Of other weights, plans count the casts, and only of those on the GPU."""
    overrides = ["--trainer.precision=bf16-mixed", "--model.n_layer=2", "--model.n_embd=64", "--model.vocab_size=512"]
    found = profile(ROOT / "recipes/gpt.yaml", *overrides)
    assert sum(unit.cast_bytes for unit in found.units) == 2 * 64 * 512


@pytest.mark.parametrize(("more", "parts"), [(-1, 1), (0, 2)])
def test_gpu_memory_has_room_for_casts(more: int, parts: int) -> None:
    """The embedding, and frozen weights in fp32 and 16 bits, beside three units that are prefetched."""
    needed = 16 * EMBEDDING + (4 + 2) * LINEAR + 3 * 2 * LINEAR
    overrides = ["--trainer.precision=bf16-mixed", "--trainer.strategy=ssd_offload"]
    overrides += [f"--trainer.strategy.gpu_memory={needed + more}B"]
    config = read_recipe(mine(how="adam"), overrides, run=False)
    found = dry_run.profile_recipe(config, H100)
    assert dry_run.configured_tiers(config, found, H100).states.count("gpu") == parts


@pytest.mark.parametrize(("states", "how", "moments"), [("auto", "", 0), ("gpu", "momentum", 1), ("auto", "adam", 2)])
def test_16_bit_weights_on_the_gpu_have_no_master_weights(states: str, how: str, moments: int) -> None:
    """As in plain Lightning, where gradients and optimizer states have 16 bits, too. No plan moves them."""
    overrides = ["--trainer.precision=bf16-true", "--trainer.strategy=ssd_offload"]
    overrides += [f"--trainer.strategy.states={states}"]
    config = read_recipe(mine(how=how), overrides, run=False)
    found = dry_run.profile_recipe(config, H100)
    assert sum(unit.state_bytes_read for unit in found.units) == 2 * moments * found.parameters
    fixed = dry_run.fixed_states(config, found, H100)
    assert fixed is not None and set(fixed.states) == {"gpu"}
    resident = resident_bytes(found, dry_run.plan_as_configured(config, found, H100))[0] + found.other_gpu_bytes
    weights = sum(unit.weight_bytes for unit in found.units)
    assert resident == weights + 2 * (1 + moments) * found.parameters


@pytest.mark.parametrize(
    ("precision", "room", "gpu_memory"),
    [
        ("32-true", 0.99, "auto"),
        ("32-true", 1.01, "auto"),
        ("bf16-mixed", 0.5, "bytes"),
        ("bf16", 1.01, "bytes"),
        ("bf16-true", 0.99, "50%"),
        ("bf16-true", 1.01, "50%"),
    ],
)
def test_states_are_on_the_gpu_where_a_training_keeps_them(precision: str, room: float, gpu_memory: str) -> None:
    """By the bytes that the strategy counts, of trained and of frozen weights. Precision "bf16" is "bf16-mixed"."""
    module = Mine().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    movable = precision != "bf16-true"
    needed = bytes_on_device(module, fitting=True)
    overrides = [f"--trainer.precision={precision}"]
    share = MOVABLE_GPU_SHARE if movable else GPU_SHARE
    machine = replace(H100, gpu_bytes=int(room * needed / (0.5 if gpu_memory == "50%" else share)))
    if gpu_memory != "auto":
        given = gpu_memory if gpu_memory == "50%" else f"{int(room * needed)}B"
        overrides += ["--trainer.strategy=ssd_offload", f"--trainer.strategy.gpu_memory={given}"]
    if gpu_memory == "bytes":
        machine = H100
    config = read_recipe(mine(), overrides, run=False)
    found = dry_run.profile_recipe(config, machine)
    assert (set(dry_run.configured_tiers(config, found, machine).states) == {"gpu"}) == (room > 1)
    assert (dry_run.fixed_states(config, found, machine) is not None) == (room > 1 and not movable)


@pytest.mark.parametrize(
    ("precision", "clip", "nbytes"),
    [
        # The norm reads the gradients, which are then scaled: 3 * 4. SGD reads them, and adds them to the weights.
        ("32-true", "1.0", 3 * 4 + 3 * 4),
        ("32-true", "0", 3 * 4),
        ("bf16-true", "0", 3 * 2),
        ("16-mixed", "0", 2 * 4 + 3 * 4),
    ],
)
def test_a_step_of_the_optimizer_moves_the_bytes_of_its_operators(precision: str, clip: str, nbytes: int) -> None:
    overrides = [f"--trainer.precision={precision}", f"--trainer.gradient_clip_val={clip}"]
    assert profile(mine(), *overrides).step_bytes == pytest.approx(nbytes, rel=0.01)


def test_clamped_gradients_are_read_and_written() -> None:
    overrides = ["--trainer.gradient_clip_val=1.0", "--trainer.gradient_clip_algorithm=value"]
    found = profile(mine(), *overrides)
    assert found.step_bytes == pytest.approx(2 * 4 + 3 * 4, rel=0.01) and not found.clip_norm


@pytest.mark.parametrize(("precision", "states"), [("16-true", "host"), ("64-true", "auto")])
def test_weights_that_a_training_never_offloads_are_on_the_gpu(precision: str, states: str) -> None:
    overrides = [f"--trainer.precision={precision}", "--trainer.strategy=ssd_offload"]
    config = read_recipe(mine(how="adam"), [*overrides, f"--trainer.strategy.states={states}"], run=False)
    machine = replace(H100, gpu_bytes=1)
    found = dry_run.profile_recipe(config, machine)
    plan = dry_run.plan_as_configured(config, found, machine)
    fixed = dry_run.fixed_states(config, found, machine)
    assert fixed is not None and {part.states for part in plan.parts(found)} == set(fixed.states) == {"gpu"}


def test_a_plan_says_that_states_stay(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = mine(how="adam")
    command = ["plan", recipe, "--machine", MACHINE, "--trainer.precision=bf16-true"]
    assert cli.main(command) == 0
    kept = capsys.readouterr().out
    assert "no master weights, as in plain Lightning" in " ".join(kept.split())
    assert cli.main([*command, "--trainer.strategy=ssd_offload", "--trainer.strategy.states=host"]) == 0
    assert "no master weights" not in " ".join(capsys.readouterr().out.split())


def test_states_fill_gpu_memory_then_host_memory_then_ssds() -> None:
    """With `gpu_memory` the default's planner does not move them, and activations have the rest of the GPU."""
    model = transformer_profile(
        H100, hidden=2048, layers=24, heads=16, sequence=1024, batch=4, vocabulary=1000, tied=True
    )
    states = sum(part.resident_bytes for _, part in model.parts)

    def configured(**arguments: Any) -> Any:
        return {"trainer": {"strategy": {"class_path": "SSDOffloadStrategy", "init_args": arguments}}}

    config = configured(gpu_memory=states // 3, host_memory=states // 3)
    machine = dry_run.within_budgets(config, H100)
    plan = dry_run.plan_as_configured(config, model, machine)
    placed = [(part.weights, part.states) for part in plan.parts(model)]
    assert {("gpu", "gpu"), ("host", "ssd")} <= set(placed)
    assert placed == sorted(placed, key=lambda tiers: "gpu" not in tiers), "the first parts are on the GPU"
    on_gpu = sum(part.resident_bytes for (_, part), tiers in zip(model.parts, placed, strict=True) if "gpu" in tiers)
    assert 0.2 * states < on_gpu <= states // 3
    prediction = simulate(model, machine, plan)
    assert not prediction.excess_bytes(machine) and prediction.host_peak_bytes <= states // 3
    larger = dry_run.with_twice_the_host(model, machine, plan)
    assert sum(part.states == "ssd" for part in larger.parts(model)) < sum("ssd" in tiers for tiers in placed)

    small = replace(H100, gpu_bytes=states // 2)
    assert dry_run.plan_as_configured(configured(), model, small) == make_plan(model, small), "the default moves states"


def test_adam_takes_more_passes_than_sgd() -> None:
    """Torch's Adam, if it is not fused, makes its step by operators that each read and write whole tensors."""
    found = [profile(mine(how=how), "--trainer.gradient_clip_val=0").step_bytes or 0 for how in ("adam", "fused")]
    assert 40 < found[0] < 120 and found[1] == pytest.approx(32, rel=0.01)


def test_attention_has_a_rate_of_its_own() -> None:
    """It is slower than matrix products, and never faster."""
    overrides = ["-c", str(ROOT / "configs/models/gpt-1.3b.yaml"), "--model.n_layer=1", "--model.vocab_size=2048"]
    config = read_recipe(str(ROOT / "recipes/gpt.yaml"), overrides, run=False)
    seconds = [
        dry_run.profile_recipe(config, replace(H100, gpu_attention_flops=rate)).forward_seconds
        for rate in (None, 1e18, 1e13)
    ]
    assert seconds[0] == seconds[1] < seconds[2]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("branch", "at the operator aten._local_scalar_dense.*--profile FILE"),
        ("nonzero", "at the operator aten.(nonzero|index).*--profile FILE"),
        ("none", "no loss"),
        ("manual", "manual optimization.*--profile FILE"),
        ("no data", "texts are missing.*--batch"),
    ],
)
def test_says_why_a_step_is_not_traced(how: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", mine(how=how), "--machine", MACHINE])
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_shapes_stand_for_data() -> None:
    found = profile(mine(how="no data"), batch=("ids=4x8:int64", "scale=4x8x1"))
    assert (found.samples, found.tokens) == (4, 32)


def test_latents_that_are_elsewhere_are_planned_by_their_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(ROOT / "recipes/dit.yaml"), "-c", str(ROOT / "configs/models/dit-xl-2.yaml")]
    command += ["--model.num_layers=2", "--machine", MACHINE]
    with pytest.raises(SystemExit):  # the recipe's data has other images
        cli.main(command)
    assert "`--batch " in capsys.readouterr().err
    assert cli.main([*command, "--batch", "images=32x4x64x64", "--batch", "labels=32:int64"]) == 0
    printed = capsys.readouterr().out
    assert " samples/s" in printed and "tokens/s" not in printed


@pytest.mark.parametrize("hint", ["8y1024", "ids=8x1024:int65", "0x4", "ids="])
def test_refuses_shapes(hint: str) -> None:
    with pytest.raises(ValueError, match="is not \\[NAME=\\]SHAPE"):
        dry_run.parse_batch([hint])


def test_building_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile(mine(width=30_000))  # 11 GB of weights
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.thorough
@pytest.mark.drawn(3)  # docs/measured.md has the three
@pytest.mark.parametrize("shape", ["2048x24", "2560x32", "3072x34"])
def test_predicts_the_run_without_a_planner(shape: str) -> None:
    """Steps of full fine-tuning with states in RAM, measured on the machine of `h100.json` with the GPU capped."""
    measured = json.loads((ROOT / "benchmarks/results/full_finetune.json").read_text())[f"host:{shape}"]
    hidden, layers = shape.split("x")
    overrides = [
        "-c",
        str(ROOT / "configs/models/gpt-1.3b.yaml"),
        f"--model.n_embd={hidden}",
        f"--model.n_layer={layers}",
        f"--model.n_head={int(hidden) // 128}",
        "--model.gradient_checkpointing=true",
        "--trainer.precision=bf16-true",
        "--trainer.strategy.states=host",
        "--trainer.gradient_clip_val=null",
        "--trainer.strategy.offload=none",
    ]
    config = read_recipe(str(ROOT / "recipes/gpt.yaml"), overrides, run=False)
    machine = replace(H100, gpu_bytes=24 * 2**30)
    model = dry_run.profile_recipe(config, machine)
    prediction = simulate(model, machine, dry_run.plan_as_configured(config, model, machine))
    assert prediction.step_seconds == pytest.approx(median(run["step"] for run in measured), rel=0.05)


def test_the_default_keeps_what_fits_and_plans_the_rest() -> None:
    """With `offload="ssdtrain"` saved tensors are offloaded whatever the memory."""
    model = transformer_profile(
        H100, hidden=1024, layers=4, heads=16, sequence=512, batch=4, vocabulary=1000, tied=True
    )

    def planned(gpu_bytes: float, **arguments: str) -> Plan:
        config = {"trainer": {"strategy": {"class_path": "SSDOffloadStrategy", "init_args": arguments}}}
        return dry_run.plan_as_configured(config, model, replace(H100, gpu_bytes=int(gpu_bytes)))

    kept = planned(80e9)
    assert kept.keeps_all and not planned(80e9, offload="ssdtrain").keeps_all
    peak = simulate(model, H100, kept).gpu_peak_bytes
    short = planned(0.8 * peak, states="gpu")
    assert not short.keeps_all and simulate(model, H100, short).gpu_peak_bytes <= 0.8 * peak


@pytest.mark.parametrize(("room", "leave"), [(1.05, False), (0.95, True)])
def test_states_on_the_gpu_are_offloaded_where_no_plan_fits_beside_them(room: float, leave: bool) -> None:
    """They take less than `GPU_SHARE` of the memory."""
    model = make_model(8, saved=2 * GB, inputs=2 * GB, parameters=GB // 20, forward=0.1)
    config: Any = {"trainer": {"strategy": {"class_path": "SSDOffloadStrategy", "init_args": {}}}}
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    least = simulate(model, H100, make_plan(model, replace(H100, gpu_bytes=1), fixed=fixed)).gpu_peak_bytes
    machine = replace(H100, gpu_bytes=int(room * least))
    assert sum(part.resident_bytes for _, part in model.parts) < GPU_SHARE * machine.gpu_bytes
    plan = dry_run.plan_as_configured(config, model, machine)
    assert any(part.offloaded for part in plan.parts(model)) == leave
    assert not simulate(model, machine, plan).excess_bytes(machine)
