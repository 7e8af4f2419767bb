"""`lightning-ssd export`: from checkpoints to folders that transformers loads."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lightning_ssd import SSDOffloadStrategy, cli, export
from lightning_ssd.recipes.models.gpt import GPT
from tests.support.trainings import make_trainer


@pytest.fixture(scope="module", params=["file", "sharded"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT]:
    """A checkpoint of a trained GPT, and the model."""
    path = tmp_path_factory.mktemp("trained")
    model = GPT(64, 16, 32, 2, 2)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=path, save_last=True, save_weights_only=True)
    trainer = make_trainer(
        path,
        SSDOffloadStrategy(states="ssd", min_bytes=1, checkpoints=request.param),
        enable_checkpointing=True,
        max_epochs=None,
        max_steps=2,
        callbacks=[checkpoint],
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randint(64, (8, 16)), batch_size=2))
    assert (path / "last.ckpt").is_dir() == (request.param == "sharded")
    return path / "last.ckpt", model


@pytest.mark.parametrize("shard", ["1GiB", "20KiB"])
def test_transformers_loads_the_folder(trained: tuple[Path, GPT], tmp_path: Path, shard: str) -> None:
    checkpoint, model = trained
    assert isinstance(model.model, GPT2LMHeadModel)
    like = tmp_path / "like"
    model.model.config.save_pretrained(like)
    folder = tmp_path / "folder"
    how = ["--prefix=model.", f"--shard={shard}", f"--like={like}"]
    assert cli.main(["export", str(checkpoint), str(folder), *how]) == 0
    assert (folder / "model.safetensors.index.json").exists() == (shard == "20KiB")
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    expected = model.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    again = GPT(pretrained=folder)
    again.configure_model()
    assert isinstance(again.config, GPT2Config)


def test_dtype(trained: tuple[Path, GPT], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(trained[0]), str(tmp_path / "folder"), "--dtype=bfloat16"]) == 0
    assert "1 file in" in capsys.readouterr().out
    loaded = load_file(tmp_path / "folder" / "model.safetensors")
    assert {value.dtype for value in loaded.values()} == {torch.bfloat16}


def test_a_recipes_checkpoint_needs_no_options(
    trained: tuple[Path, GPT], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its configuration and the prefix of its model's weights are in the checkpoint."""
    assert cli.main(["export", str(trained[0]), str(tmp_path / "folder")]) == 0
    assert "can't load" not in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True)
    assert trained[1].model is not None
    expected = trained[1].model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_what_a_folder_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"model.a": torch.ones(1)}}, tmp_path / "a.ckpt")
    assert cli.main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "folder")]) == 0
    printed = capsys.readouterr().out
    assert "needs a config.json" in printed and "--like FOLDER" in printed and "--prefix model." in printed
    assert list(load_file(tmp_path / "folder" / "model.safetensors")) == ["model.a"]


def test_mistakes(trained: tuple[Path, GPT], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").touch()
    torch.save({"state_dict": {"a": torch.ones(1)}, "odd": Path("x")}, tmp_path / "odd.ckpt")
    for arguments, message in (
        (["nowhere.ckpt", "out"], "there is no file 'nowhere.ckpt'"),
        ([str(trained[0]), str(full)], "is not empty"),
        ([str(trained[0]), str(tmp_path / "out"), "--prefix=net."], "begins with 'net.'. They begin with model."),
        ([str(tmp_path / "odd.ckpt"), str(tmp_path / "out")], "add --trust"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["export", *arguments])
        assert message in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "odd.ckpt"), str(tmp_path / "out"), "--trust"]) == 0
    assert json.dumps(sorted(load_file(tmp_path / "out" / "model.safetensors"))) == '["a"]'


def test_configuration_of_the_folder_that_a_recipe_has_loaded(
    trained: tuple[Path, GPT], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder can be loaded without `--like`, and its files have the mode of the umask."""
    model = trained[1].model
    assert isinstance(model, GPT2LMHeadModel)
    model.config.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").chmod(0o600)
    content = {"state_dict": model.state_dict(), "hyper_parameters": {"pretrained": str(tmp_path / "base")}}
    torch.save(content, tmp_path / "a.ckpt")
    before = os.umask(0o027)
    try:
        assert cli.main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "folder")]) == 0
    finally:
        os.umask(before)
    assert "needs a config.json" not in capsys.readouterr().out
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "folder").iterdir()} == {
        name: 0o640 for name in ("config.json", "model.safetensors")
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_strides_views_and_entries_that_are_no_tensors(tmp_path: Path) -> None:
    square = torch.randn(3, 3)
    state = {"a": square, "tied": square, "transposed": square.t(), "images": torch.randn(2, 3, 4, 4)}
    state["images"] = state["images"].to(memory_format=torch.channels_last)
    for content in ({"state_dict": {**state, "module._extra_state": {"scale": 1.0}, "note": "x"}},
                    {**state, "module._extra_state": None}):  # fmt: skip
        torch.save(content, tmp_path / "a.ckpt")
        folder = tmp_path / f"folder-{len(content)}"
        assert cli.main(["export", str(tmp_path / "a.ckpt"), str(folder)]) == 0
        loaded = load_file(folder / "model.safetensors")
        assert sorted(loaded) == ["a", "images", "transposed"]
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())


def test_a_file_without_a_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "step": torch.ones(())}, tmp_path / "a.ckpt")
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")])
    assert "has no state dict" in capsys.readouterr().err


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    """So it can be tried again. Folders in `--like` are not copied."""
    torch.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "a.ckpt")
    like, folder = tmp_path / "like", tmp_path / "folder"
    (like / "tokenizer").mkdir(parents=True)
    (like / "config.json").write_text("{}")
    if exists:
        folder.mkdir()
    arguments = ["export", str(tmp_path / "a.ckpt"), str(folder), "--shard=16B", f"--like={like}"]

    def fail_at_second(tensors: Any, path: Path, metadata: Any) -> None:
        if "b" in tensors:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(export, "save_file", fail_at_second)
    with pytest.raises((OSError, SystemExit)):
        cli.main(arguments)
    assert folder.exists() == exists and (not exists or not list(folder.iterdir()))
    monkeypatch.undo()
    assert cli.main(arguments) == 0
    assert len(list(folder.glob("*.safetensors"))) == 2 and (folder / "config.json").exists()
