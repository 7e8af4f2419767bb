"""Images are read unchanged, with classes, and folders that can't be trained on raise an error that names them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_ssd.recipes.data import ImageDataModule


def save(path: Path, size: tuple[int, int] = (8, 8), mode: str = "RGB", value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value,) * 3).save(path)


def samples(data: ImageDataModule) -> list[tuple[Tensor, int]]:
    data.setup()
    return [(row["images"], int(row["labels"])) for part in (data.train_set, data.val_set) for row in part]  # type: ignore[attr-defined]


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = ImageDataModule()
    rows = samples(data)
    assert (len(rows), data.num_classes, data.channels, data.size) == (1797, 10, 1, 8)
    digits = load_digits()
    pairs = zip(digits.images, digits.target, strict=True)
    expected = {((image / 8 - 1).astype(np.float32).tobytes(), int(label)) for image, label in pairs}
    assert {(image.numpy().tobytes(), label) for image, label in rows} == expected
    assert len(data.val_set) == 179  # type: ignore[arg-type]


def test_classes_are_the_subfolders_in_order(tmp_path: Path) -> None:
    for index, name in enumerate(("ant", "bee", "cat")):
        for number in range(3):
            save(tmp_path / name / "deep" / f"{number}.png", value=index * 100)
    (tmp_path / "notes.txt").write_text("no image")
    data = ImageDataModule(tmp_path, batch_size=2)
    rows = samples(data)
    assert (len(rows), data.num_classes, data.channels, data.size) == (9, 3, 3, 8)
    for image, label in rows:
        torch.testing.assert_close(image, torch.full((3, 8, 8), label * 100 / 127.5 - 1))


def test_folder_without_classes_is_one_class(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / f"{number}.png", mode="L", value=255)
    data = ImageDataModule(tmp_path, batch_size=2)
    assert {label for _, label in samples(data)} == {0} and (data.num_classes, data.channels) == (1, 1)
    assert all(bool((image == 1).all()) for image, _ in samples(data))


def test_images_are_scaled_and_cropped_to_the_size(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (20, 10))
    save(tmp_path / "b.png", (8, 30), mode="L")
    save(tmp_path / "c.png", (4, 4))
    data = ImageDataModule(tmp_path, image_size=6, batch_size=1)
    assert {tuple(image.shape) for image, _ in samples(data)} == {(3, 6, 6)}
    assert ImageDataModule(image_size=16).read()[0][0]["images"].shape == (1, 16, 16)


def test_latents_are_used_as_they_are(tmp_path: Path) -> None:
    latents = np.random.default_rng(0).normal(size=(3, 4, 8, 8)).astype(np.float16)
    for number, latent in enumerate(latents):
        np.save(tmp_path / f"{number}.npy", latent)
    data = ImageDataModule(tmp_path, batch_size=2)
    rows = samples(data)
    assert (data.channels, data.size) == (4, 8)
    assert {image.half().numpy().tobytes() for image, _ in rows} == {latent.tobytes() for latent in latents}


def test_same_images_are_held_out_with_every_seed() -> None:
    first, second = ImageDataModule(seed=0), ImageDataModule(seed=1)
    for data in (first, second):
        data.setup()
    assert first.val_set.indices == second.val_set.indices  # type: ignore[attr-defined]
    orders = [next(iter(data.train_dataloader()))["labels"].tolist() for data in (first, second)]
    assert orders[0] != orders[1]


def nothing(folder: Path) -> None:
    folder.mkdir()


def empty_class(folder: Path) -> None:
    save(folder / "a" / "1.png")
    (folder / "b").mkdir()


def loose(folder: Path) -> None:
    save(folder / "a" / "1.png")
    save(folder / "2.png")


def sizes(folder: Path) -> None:
    save(folder / "1.png", (8, 8))
    save(folder / "2.png", (9, 9))


def oblong(folder: Path) -> None:
    save(folder / "1.png", (8, 9))


def broken(folder: Path) -> None:
    save(folder / "1.png")
    (folder / "2.png").write_bytes(b"no image")


def deep_colour(folder: Path) -> None:
    save(folder / "1.png", mode="I;16", value=1000)


def flat_latents(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "1.npy", np.zeros((8, 8)))


def two_kinds(folder: Path) -> None:
    save(folder / "1.png")
    np.save(folder / "2.npy", np.zeros((3, 8, 8)))


def few(folder: Path) -> None:
    for number in range(4):
        save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda folder: None, FileNotFoundError, r"data\.path=.*images is not a folder"),
        (nothing, FileNotFoundError, r"data\.path=.*images holds no image.*\.png"),
        (empty_class, FileNotFoundError, r"'b' in data\.path=.*images holds no image"),
        (loose, ValueError, r"2\.png, beside folders of classes, such as a"),
        (sizes, ValueError, r"1\.png has 8x8 pixels and .*2\.png 9x9: set data\.image_size"),
        (oblong, ValueError, r"1\.png is not square.*8x9.*data\.image_size"),
        (broken, ValueError, r"2\.png can't be read as an image"),
        (deep_colour, ValueError, r"1\.png can't be read.*I;16"),
        (flat_latents, ValueError, r"1\.npy can't be read.*\(8, 8\) in place of"),
        (two_kinds, ValueError, r"2\.npy and .*1\.png differ in channels"),
        (few, ValueError, r"3 samples for training.*batch of 32.*data\.path.*data\.batch_size"),
    ],
)
def test_folders_that_are_refused(
    tmp_path: Path, make: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    make(tmp_path / "images")
    with pytest.raises(error, match=message):
        ImageDataModule(tmp_path / "images").setup()


def test_a_file_that_breaks_after_the_check_is_named(tmp_path: Path) -> None:
    few(tmp_path)
    data = ImageDataModule(tmp_path, batch_size=3)
    data.setup()
    for file in tmp_path.glob("*.png"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"\.png can't be read as an image: repair or remove it"):
        next(iter(data.train_dataloader()))


def test_scaling_latents_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", np.zeros((4, 8, 8), np.float32))
    with pytest.raises(ValueError, match=r"latents, which are not scaled: leave data\.image_size out"):
        ImageDataModule(tmp_path, image_size=16).setup()


@pytest.mark.parametrize("settings", [{"val_share": 1.0}, {"image_size": 0}])
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"data\.{next(iter(settings))}="):
        ImageDataModule(**settings)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sklearn", "sklearn.datasets", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"digits needs sklearn.*pip install 'lightning-ssd\[images\]'"):
        ImageDataModule().setup()
    few_files = tmp_path / "images"
    few_files.mkdir()
    (few_files / "1.png").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"folder of images needs PIL.*lightning-ssd\[images\]"):
        ImageDataModule(few_files).setup()
