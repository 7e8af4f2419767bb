"""Images for diffusion models: scikit-learn's digits, or a local folder of images or latents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_ssd.extras import import_extra
from lightning_ssd.recipes.data.data_module import RecipeDataModule

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
_LATENTS = {".npy"}
_GRAY = {"1", "L", "LA"}
_COLOUR = {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}


class ImageDataModule(RecipeDataModule):
    """Square images of one size, with a class each.

    A batch is `{"images": float32 (batch_size, channels, size, size), "labels": int64 (batch_size,)}`; images are
    within [-1, 1], gray (1 channel) if all files are, else RGB. The held-out images are a fixed random choice.

    Args:
        path: A folder with a subfolder of images for each class, whose labels follow the order of the names; or with
            images alone, which are then one class. Files that end in .npy hold latents, floating-point
            (channels, size, size), which are used as they are. None: the 1797 digits of scikit-learn, 8x8, 10 classes,
            which need no download.
        image_size: Pixels to which each image is scaled, along its shorter side, and then cropped at the centre.
            None: images are used as they are, and have to be square and of one size.
        batch_size: Images in a micro-batch, per device.
        val_share: Held-out share of the images, between 0 and 1; at least one image.
        seed: Seed of the training order.
        num_workers: Processes that read images.

    Attributes:
        num_classes: Labels are below it; set by `setup`, like the others.
        channels: Channels of an image.
        size: Pixels of an image's side.
    """

    remedy = "give more images (data.path), or lower data.batch_size"

    def __init__(
        self,
        path: str | Path | None = None,
        image_size: int | None = None,
        batch_size: int = 32,
        val_share: float = 0.1,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, val_share, seed, num_workers)
        if image_size is not None and image_size < 1:
            raise ValueError(f"data.image_size={image_size} is not a number of pixels: set it to 1 or more")
        self.path = None if path is None else Path(path)
        self.image_size = image_size

    def read(self) -> tuple[Dataset[dict[str, Tensor]], Dataset[dict[str, Tensor]]]:
        """Returns the images of training and the held-out ones.

        Only the headers of files are read here, to check that their sizes agree.

        Raises:
            FileNotFoundError: If the folder does not exist or holds no image.
            ValueError: If images differ in size, are not square, can't be read, or are beside folders of classes.
            ModuleNotFoundError: If the extra `images` is not installed.
        """
        images: Dataset[dict[str, Tensor]]
        if self.path is None:
            digits = import_extra("sklearn.datasets", "images", "The digits").load_digits()
            pixels = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
            if self.image_size is not None:
                pixels = F.interpolate(pixels, (self.image_size, self.image_size), mode="bilinear")
            images = _Digits(pixels, torch.from_numpy(digits.target))
            self.num_classes, self.channels, self.size = 10, 1, pixels.shape[-1]
        else:
            classes = _find_classes(self.path)
            files = [file for names in classes for file in names]
            self.num_classes = len(classes)
            self.channels, self.size = _common_shape(files, self.image_size)
            labels = [label for label, names in enumerate(classes) for _ in names]
            images = _Files(files, labels, self.channels, self.size)
        # Seeded apart from the run: resumed runs and runs with other seeds hold out the same images.
        count = len(images)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        held_out = max(1, int(count * self.val_share))
        return torch.utils.data.Subset(images, order[held_out:]), torch.utils.data.Subset(images, order[:held_out])


class _Digits(Dataset[dict[str, Tensor]]):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self._images[index], "labels": self._labels[index]}


class _Files(Dataset[dict[str, Tensor]]):
    """Image files, each decoded when a batch needs it."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], channels: int, size: int) -> None:
        self._files, self._labels = files, labels
        self._channels, self._size = channels, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file = self._files[index]
        try:
            values = np.load(file) if file.suffix in _LATENTS else self._decode(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} can't be read as an image: repair or remove it ({error})") from error
        return {"images": torch.from_numpy(values).float(), "labels": torch.tensor(self._labels[index])}

    def _decode(self, file: Path) -> Any:
        pil = import_extra("PIL.Image", "images", "A folder of images")
        ops = import_extra("PIL.ImageOps", "images", "A folder of images")
        with pil.open(file) as image:
            image = image.convert("L" if self._channels == 1 else "RGB")
            if image.size != (self._size, self._size):
                image = ops.fit(image, (self._size, self._size), pil.Resampling.BICUBIC)
            pixels = np.asarray(image, dtype=np.float32) / 127.5 - 1
        return pixels[None] if self._channels == 1 else pixels.transpose(2, 0, 1).copy()


class _Header(NamedTuple):
    channels: int
    width: int
    height: int


def _find_classes(folder: Path) -> list[list[Path]]:
    """Returns the files of each class, in the order of the subfolders' names."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"data.path={folder} is not a folder: set it to a folder of images, or leave it out to train on the"
            f" digits of scikit-learn"
        )
    known = ", ".join(sorted(_IMAGES | _LATENTS))
    loose = _image_files(folder.iterdir())
    named = {child: _image_files(child.rglob("*")) for child in sorted(folder.iterdir()) if child.is_dir()}
    named = {child: files for child, files in named.items() if not child.name.startswith(".")}
    classes = {child: files for child, files in named.items() if files}
    if not loose and not classes:
        raise FileNotFoundError(f"data.path={folder} holds no image ({known}): set it to a folder that does")
    if empty := sorted(child.name for child in named.keys() - classes.keys()):
        raise FileNotFoundError(
            f"The folder {empty[0]!r} in data.path={folder} holds no image ({known}), and so is a class without"
            f" images: remove it, or add images"
        )
    if loose and classes:
        raise ValueError(
            f"data.path={folder} holds images, such as {loose[0].name}, beside folders of classes, such as"
            f" {next(iter(classes)).name}: put every image into the folder of its class"
        )
    return [loose] if loose else list(classes.values())


def _image_files(entries: Any) -> list[Path]:
    return sorted(file for file in entries if file.suffix.lower() in _IMAGES | _LATENTS and file.is_file())


def _common_shape(files: Sequence[Path], image_size: int | None) -> tuple[int, int]:
    """Returns the channels and the side, in pixels, of all images."""
    headers = {file: _header(file) for file in files}
    channels = max(header.channels for header in headers.values())
    first, shape = next(iter(headers.items()))
    for file, header in headers.items():
        latent = file.suffix in _LATENTS
        if latent != (first.suffix in _LATENTS) or (latent and header.channels != shape.channels):
            raise ValueError(f"{file} and {first} differ in channels: use images alone, or latents of one shape")
        if latent and image_size not in (None, header.width):
            raise ValueError(f"{file} holds latents, which are not scaled: leave data.image_size out")
        if (latent or image_size is None) and header[1:] != shape[1:]:
            raise ValueError(
                f"{first} has {shape.width}x{shape.height} pixels and {file} {header.width}x{header.height}: set"
                f" data.image_size, to which each image is then scaled and cropped"
            )
    if shape.width != shape.height and (image_size is None or first.suffix in _LATENTS):
        raise ValueError(
            f"{first} is not square, but has {shape.width}x{shape.height} pixels: set data.image_size, to which each"
            f" image is then scaled and cropped"
        )
    return channels, image_size or shape.width


def _header(file: Path) -> _Header:
    try:
        if file.suffix in _LATENTS:
            latents = np.load(file, mmap_mode="r")
            if latents.ndim != 3 or not np.issubdtype(latents.dtype, np.floating):
                raise ValueError(f"{latents.dtype} {latents.shape} in place of floating-point (channels, size, size)")
            channels, height, width = latents.shape
            return _Header(channels, width, height)
        with import_extra("PIL.Image", "images", "A folder of images").open(file) as image:
            if image.mode not in _GRAY | _COLOUR:
                raise ValueError(f"its mode is {image.mode!r}, in place of 8 bits for each channel")
            return _Header(1 if image.mode in _GRAY else 3, *image.size)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read as an image: repair or remove it ({error})") from error
