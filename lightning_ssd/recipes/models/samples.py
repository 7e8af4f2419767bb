"""Pictures of images that a diffusion model generates during training."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.extras import import_extra
from lightning_ssd.recipes.models.dit import DiT
from lightning_ssd.sizes import check_least

_PIXELS = 48  # smallest side of an image in the picture


class SampleGrid(pl.Callback):
    """Writes a PNG of generated images after every validation: a row for each class, from the same noise each time.

    The files are `samples/step_NNNNNN.png` in the logger's folder. The noise has a generator of its own, so the
    random numbers of training do not change. All devices sample, and the first one writes.

    Args:
        classes: Number of rows: classes 0, 1, ...; at most the model's.
        columns: Images of each class.
        steps: Denoising steps (DDIM).
        guidance: Scale of classifier-free guidance; 1: none.
        seed: Seed of the noise.
    """

    def __init__(
        self, classes: int = 10, columns: int = 8, steps: int = 20, guidance: float = 2.0, seed: int = 0
    ) -> None:
        for argument, value in {"classes": classes, "columns": columns, "steps": steps}.items():
            check_least(f"SampleGrid's {argument}", value, 1)
        self.classes = classes
        self.columns = columns
        self.steps = steps
        self.guidance = guidance
        self.seed = seed

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Checks that the model generates images.

        Raises:
            TypeError: If it is no `DiT`.
        """
        if not isinstance(pl_module, DiT):
            raise TypeError(
                f"SampleGrid samples from a lightning_ssd.recipes.models.DiT, not {type(pl_module).__name__}"
            )

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples and writes the PNG."""
        if trainer.sanity_checking:
            return
        images = self.sample(pl_module)  # type: ignore[arg-type]  # `setup` has checked
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "samples"  # on all devices: it is broadcast
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            write_grid(images, self.columns, folder / f"step_{trainer.global_step:06d}.png")

    def sample(self, model: DiT) -> Tensor:
        """Returns the images, fp32 (rows * columns, channels, size, size)."""
        rows = min(self.classes, model.num_classes)
        labels = torch.arange(rows).repeat_interleave(self.columns)
        shape = (len(labels), model.in_channels, model.image_size, model.image_size)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))
        return model.sample(noise.to(model.device), labels.to(model.device), self.steps, self.guidance)


def write_grid(images: Tensor, columns: int, path: Path) -> None:
    """Writes images within [-1, 1] as one PNG. Latents are drawn by their first channel, in gray.

    Args:
        images: (rows * columns, channels, size, size), on any device.
        columns: Images of a row.
        path: The file.
    """
    picture: Any = import_extra("PIL.Image", "images", "A grid of samples")
    channels = 3 if images.shape[1] == 3 else 1
    zoom = max(1, -(-_PIXELS // images.shape[-1]))
    # Bicubic: a digit is hard to recognize in 8x8 squares.
    pixels = F.interpolate(images[:, :channels].float().cpu(), scale_factor=zoom, mode="bicubic")
    pixels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte()
    pixels = F.pad(pixels, (2, 2, 2, 2), value=255)
    grid = pixels.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).numpy()
    picture.fromarray(np.ascontiguousarray(grid[..., 0] if channels == 1 else grid)).save(path)
