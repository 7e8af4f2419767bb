"""The recipes of language models learn, and resume exactly, with this package's strategy and without it."""

from pathlib import Path

import pytest
import torch

from tests.support.recipes import logged, no_arguments, read  # noqa: F401

# T5 is first, and so in the default tests: all blocks of its decoder share tensors, and its embedding has three uses.
QUICK = {
    "t5": ("--model.num_layers=1", "--model.num_decoder_layers=1", "--data.block_size=48", "--model.warmup_steps=10"),
    "bert": ("--model.num_hidden_layers=1", "--data.block_size=32", "--data.batch_size=16", "--model.warmup_steps=10"),
}
OFFLOADED = ("states=host", "offload=1.0", "min_bytes=1", "gpu_memory=1B", "host_memory=64MiB", "staging_memory=16MiB")
SAVE = (
    "--trainer.callbacks+={class_path: lightning.pytorch.callbacks.ModelCheckpoint,"
    " init_args: {dirpath: saved, filename: '{step}', every_n_train_steps: 20, save_top_k: -1}}"
)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", QUICK)
def test_recipe_learns_and_resumes_exactly(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*QUICK[recipe], "--data.max_bytes=150000", "--trainer.accelerator=cpu", "--trainer.max_steps=40")
    options += ("--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false", SAVE)
    runs: dict[str, dict[str, torch.Tensor]] = {}
    for name, more in {
        "straight": ("--trainer.strategy=auto",),
        "resumed": (
            *(f"--trainer.strategy.{argument}" for argument in OFFLOADED),
            f"--ckpt_path={tmp_path / 'straight' / 'saved' / 'step=20.ckpt'}",
        ),
    }.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        built = read(recipe, options=(*options, *more), run=True)
        runs[name] = {key: value.clone() for key, value in built.model.state_dict().items()}
    losses = logged(tmp_path / "straight" / "runs" / recipe, "train/loss")
    assert len(losses) == 4 and losses[-1] < losses[0] < 6.5 and losses[-1] < 4.2
    assert logged(tmp_path / "resumed" / "runs" / recipe, "train/loss") == losses[2:]
    for column in ("train/tokens", "lr-AdamW/pg1"):
        straight, resumed = (logged(tmp_path / name / "runs" / recipe, column) for name in runs)
        assert resumed == straight[2:]
    assert logged(tmp_path / "straight" / "runs" / recipe, "train/device/flops_per_sec")
    assert list(runs["straight"]) == list(runs["resumed"])
    assert all(torch.equal(value, runs["resumed"][key]) for key, value in runs["straight"].items())
