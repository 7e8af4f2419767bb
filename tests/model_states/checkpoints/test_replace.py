"""Replaced checkpoints: at any time one whole checkpoint exists, whatever call fails or is the last."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.model_states import find_replaced, is_sharded, load_sharded, save, save_sharded
from lightning_ssd.model_states.checkpoints import replace
from tests.support.interrupted import Fault, disturb
from tests.support.products import combinations


def checkpoint(number: int) -> dict[str, Any]:
    return {"state_dict": {"a": torch.full((40,), number), "b": torch.full((7,), number)}, "epoch": number}


def load(path: Path) -> Any:
    if is_sharded(path):
        return load_sharded(path, weights_only=True)
    return torch.load(find_replaced(path), weights_only=True)


def number_of(path: Path) -> int:
    """Returns the number of the checkpoint at `path`, and asserts that all its parts have this number."""
    loaded = load(path)
    assert all((values == loaded["epoch"]).all() for values in loaded["state_dict"].values())
    assert len(loaded["state_dict"]) == 2
    return int(loaded["epoch"])


SAVES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "directory over directory": (save_sharded, save_sharded),
    "directory over file": (save, save_sharded),
    "file over directory": (save_sharded, save),
    "file over file": (save, save),
}


@combinations(
    "fault, saves, exchange",
    ["fail", "kill"],
    list(SAVES),
    [True, False],
    quick=[("fail", "directory over directory", True), ("fail", "file over file", True)],
)
def test_every_call_that_fails_or_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, saves: str, exchange: bool
) -> None:
    """Then the old or the new checkpoint loads, the next save works, and no other files remain."""
    if not exchange:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    first, second = SAVES[saves]
    path = tmp_path / "last.ckpt"
    first(checkpoint(0), path)
    position, found = 0, 0
    while disturb(lambda: second(checkpoint(1), path), tmp_path, position, fault):
        assert number_of(path) in (found, 1), position
        found = number_of(path)
        second(checkpoint(2), path)  # which removes remaining files
        assert number_of(path) == 2
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name], position
        first(checkpoint(3), path)
        found, position = 3, position + 1
    assert position > 3
    assert number_of(path) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])
def test_faults_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """No complete save is between the kills: files of one kill are not removed by the next save."""
    if not exchange:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    save_sharded(checkpoint(0), path)
    position, latest = 0, 0
    for fault in ("kill", "fail"):
        position = 0
        while disturb(lambda: save_sharded(checkpoint(latest + 1), path), tmp_path, position, fault):  # noqa: B023
            assert number_of(path) in (latest, latest + 1), position
            latest, position = number_of(path), position + 1
        latest = number_of(path)
    save_sharded(checkpoint(100), path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_link_to_a_checkpoint_is_replaced_and_its_target_is_kept(tmp_path: Path) -> None:
    """For example links of `ModelCheckpoint(save_last="link")`."""
    save_sharded(checkpoint(0), tmp_path / "epoch=0.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=0.ckpt")
    save_sharded(checkpoint(1), tmp_path / "last.ckpt")
    assert number_of(tmp_path / "last.ckpt") == 1
    assert number_of(tmp_path / "epoch=0.ckpt") == 0


def test_a_file_needs_no_rename_that_fails_between_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is made in its own directory, and renamed by `os.replace` alone."""

    def rename(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", rename)
    for number in range(2):
        save(checkpoint(number), tmp_path / "last.ckpt")
        assert number_of(tmp_path / "last.ckpt") == number
