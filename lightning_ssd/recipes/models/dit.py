"""DiT: a diffusion transformer with `diffusers`' blocks, conditioned on classes, trained to predict noise."""

import random
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric
from typing_extensions import override

from lightning_ssd.extras import import_extra
from lightning_ssd.recipes.models.module import RecipeModule
from lightning_ssd.sizes import check_least, check_probability

TIMESTEPS = 1000
"""Steps from an image to noise in training."""

NO_LABEL = -1
"""Label of an image without class."""


class DiT(RecipeModule):
    """The diffusion transformer of Peebles and Xie (2023), with adaLN-zero blocks.

    A batch is `{"images": (batch, in_channels, image_size, image_size), "labels": int64 (batch,)}`; a label of -1
    stands for no class. The loss is the mean squared error of the predicted noise. The variance is fixed to DDPM's; the
    published model learns it, so that its last projection has twice as many outputs.

    The noise, timesteps and dropped labels of a micro-batch depend on `noise_seed`, on the number of images seen
    before it and on the device's rank only. So a run that resumes from a checkpoint draws the same ones as an
    uninterrupted run, and the global random number generators are not used.

    Args:
        image_size: Pixels of an image's side; of the latents' side, for latents.
        in_channels: Channels of an image.
        patch_size: Pixels of a patch's side; a patch is a token.
        hidden_size: Width of the model, a multiple of 4.
        num_layers: Number of transformer blocks.
        num_heads: Number of attention heads, a divisor of `hidden_size`.
        num_classes: Labels are below it.
        label_dropout: Probability to train an image without its label, which classifier-free guidance needs.
        noise_schedule: Growth of the noise's variances: `linear`, as published, or `squaredcos_cap_v2`, which leaves
            more of small images visible.
        clip_sample: Clips images to [-1, 1] while sampling. False for latents, which have other bounds.
        noise_seed: Seed of the training's noise, timesteps and dropped labels.
        lr: Highest learning rate.
        betas: Betas of AdamW.
        weight_decay: Weight decay of matrices.
        settings: Other arguments of `RecipeModule`.

    Raises:
        ValueError: If sizes are less than 1 or do not divide each other, or `label_dropout` is no probability.
        ModuleNotFoundError: If the extra `images` is not installed.
    """

    unit = "images"

    def __init__(
        self,
        image_size: int = 64,
        in_channels: int = 4,
        patch_size: int = 2,
        hidden_size: int = 1152,
        num_layers: int = 28,
        num_heads: int = 16,
        num_classes: int = 1000,
        label_dropout: float = 0.1,
        noise_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear",
        clip_sample: bool = True,
        noise_seed: int = 0,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(lr=lr, betas=betas, weight_decay=weight_decay, **settings)
        sizes = {"image_size": image_size, "in_channels": in_channels, "patch_size": patch_size}
        sizes |= {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}
        for name, size in {**sizes, "num_classes": num_classes}.items():
            check_least(f"model.{name}", size, 1)
        if image_size % patch_size:
            raise ValueError(
                f"model.image_size={image_size} is not a multiple of model.patch_size={patch_size}: change one of them"
            )
        if hidden_size % num_heads or hidden_size % 4:
            raise ValueError(
                f"model.hidden_size={hidden_size} is not a multiple of 4 and of model.num_heads={num_heads}: change"
                f" one of them"
            )
        check_probability("model.label_dropout", label_dropout)
        self.save_hyperparameters()
        self.image_size = image_size
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_classes = num_classes
        self.label_dropout = label_dropout
        self.noise_schedule = noise_schedule
        self.clip_sample = clip_sample
        self.noise_seed = noise_seed
        with torch.device("cpu"):  # also where the module itself is built on `meta`
            self._noising = _diffusers().DDPMScheduler(num_train_timesteps=TIMESTEPS, beta_schedule=noise_schedule)

    def build_model(self) -> nn.Module:
        """Returns a DiT with random weights."""
        return _Network(self)

    @override
    def setup(self, stage: str) -> None:
        """Checks that the data fits the model, where the data module states sizes.

        Raises:
            ValueError: If the images have another size or number of channels than the model, or more classes.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        if (size := getattr(data, "size", self.image_size)) != self.image_size:
            raise ValueError(
                f"The images have {size} pixels a side and the model {self.image_size}: set model.image_size={size},"
                f" or data.image_size={self.image_size}"
            )
        if (channels := getattr(data, "channels", self.in_channels)) != self.in_channels:
            raise ValueError(
                f"The images have {channels} channels and the model {self.in_channels}: set"
                f" model.in_channels={channels}"
            )
        if (classes := getattr(data, "num_classes", 0)) > self.num_classes:
            raise ValueError(
                f"The data has {classes} classes and the model {self.num_classes}: set model.num_classes={classes}"
            )

    @override
    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Returns the predicted noise, of the shape and dtype of `images`.

        Args:
            images: Noisy images, (batch, in_channels, image_size, image_size).
            timesteps: int64 (batch,), below `TIMESTEPS`.
            labels: int64 (batch,), below `num_classes`; `NO_LABEL` for none.
        """
        assert self.model is not None, "configure_model() makes the model"
        noise: Tensor = self.model(images, timesteps, labels)
        return noise

    def training_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean squared error of the predicted noise, at random timesteps."""
        images, labels = _images(batch), batch["labels"]
        seed = random.Random(f"{self.noise_seed} {self.seen} {self.global_rank}").getrandbits(63)
        generator = torch.Generator(images.device).manual_seed(seed)
        chance = torch.rand(len(labels), generator=generator, device=images.device)
        labels = torch.where(chance < self.label_dropout, NO_LABEL, labels)
        timesteps = torch.randint(TIMESTEPS, (len(images),), generator=generator, device=images.device)
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        return self._loss(images, labels, timesteps, noise)

    def evaluate(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Metric | Tensor]]:
        """Returns the mean squared error at timesteps and noise that are the same in every validation."""
        images = _images(batch)
        # Drawn on the CPU, so that they are the same on every device.
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images.device)
        spread = torch.arange(len(images), device=images.device) * TIMESTEPS // len(images)
        return self._loss(images, batch["labels"], spread, noise), {}

    @torch.no_grad()
    def sample(self, noise: Tensor, labels: Tensor, steps: int = 20, guidance: float = 2.0) -> Tensor:
        """Returns images, denoised by DDIM without randomness, fp32 and of the shape of `noise`.

        Args:
            noise: Gaussian noise, fp32 (batch, in_channels, image_size, image_size), on the model's device.
            labels: int64 (batch,), the classes of the images.
            steps: Denoising steps; each is a forward of twice the batch.
            guidance: Scale of classifier-free guidance; 1: none.
        """
        scheduler = _diffusers().DDIMScheduler(
            num_train_timesteps=TIMESTEPS, beta_schedule=self.noise_schedule, clip_sample=self.clip_sample
        )
        scheduler.set_timesteps(steps)
        both = torch.cat((labels, torch.full_like(labels, NO_LABEL)))
        images = noise
        for step in scheduler.timesteps:
            timesteps = torch.full_like(both, int(step))
            conditional, unconditional = self(torch.cat((images, images)), timesteps, both).float().chunk(2)
            predicted = unconditional + guidance * (conditional - unconditional)
            images = scheduler.step(predicted, step, images).prev_sample
        return images

    def forward_flops(self, batch: Mapping[str, Tensor]) -> int:
        """Returns the FLOPs of a micro-batch's forward, those of matrix products."""
        tokens = (self.image_size // self.patch_size) ** 2
        width, patch = self.hidden_size, self.in_channels * self.patch_size**2
        # Attention's and the MLP's matrices, and attention itself; then six modulations from the embedding.
        block = tokens * (12 * width**2 + 2 * tokens * width) + 6 * width**2
        rest = 2 * tokens * patch * width + 256 * width + 3 * width**2
        return 2 * len(batch["images"]) * (self.num_layers * block + rest)

    def _loss(self, images: Tensor, labels: Tensor, timesteps: Tensor, noise: Tensor) -> Tensor:
        expected = (self.in_channels, self.image_size, self.image_size)
        if images.shape[1:] != expected:  # the model would interpolate its positions
            raise ValueError(f"Images have the shape {tuple(images.shape[1:])} and the model takes {expected}")
        # On other devices the embedding itself fails; reading the labels' values would synchronize the host.
        if labels.device.type == "cpu" and not NO_LABEL <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise ValueError(
                f"Labels from {int(labels.min())} to {int(labels.max())} are not all within the model's classes, 0 to"
                f" {self.num_classes - 1}: raise model.num_classes, or correct the labels"
            )
        noisy = self._noising.add_noise(images.float(), noise, timesteps)
        return F.mse_loss(self(noisy, timesteps, labels).float(), noise)


class _Network(nn.Module):
    """`diffusers`' DiT with one embedding of timesteps and labels for all blocks, as published.

    `diffusers` has an embedding in each block, which adds 11 % to the parameters of DiT-XL/2, and drops other labels in
    each block.
    """

    def __init__(self, sizes: DiT) -> None:
        super().__init__()
        embeddings = import_extra("diffusers.models.embeddings", "images", "DiT")
        self.embedding = embeddings.CombinedTimestepLabelEmbeddings(
            sizes.num_classes + 1, sizes.hidden_size, class_dropout_prob=0.0
        )
        self.transformer = _diffusers().DiTTransformer2DModel(
            num_attention_heads=sizes.num_heads,
            attention_head_dim=sizes.hidden_size // sizes.num_heads,
            in_channels=sizes.in_channels,
            num_layers=sizes.num_layers,
            sample_size=sizes.image_size,
            patch_size=sizes.patch_size,
            num_embeds_ada_norm=1,
        )
        for block in self.transformer.transformer_blocks:
            block.norm1.emb = _Embedded()
        self.apply(self._init_weights)

    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        # Row 0 of the table is that of NO_LABEL, so that labels beyond the classes are out of range.
        embedded = self.embedding(timesteps, labels - NO_LABEL, hidden_dtype=dtype)
        noise: Tensor = self.transformer(images.to(dtype), timestep=embedded, return_dict=False)[0]
        return noise

    def gradient_checkpointing_enable(self, arguments: Mapping[str, Any]) -> None:
        self.transformer.enable_gradient_checkpointing(partial(checkpoint, **arguments))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Gives a module's own parameters and buffers the published initial values, also those built on `meta`."""
        transformer = self.transformer
        if module is transformer.pos_embed:
            positions = import_extra("diffusers.models.embeddings", "images", "DiT").get_2d_sincos_pos_embed(
                transformer.inner_dim,
                transformer.height // transformer.patch_size,
                base_size=transformer.height // transformer.patch_size,
                output_type="pt",
            )
            module.pos_embed = positions[None].to(module.pos_embed)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            zero = [block.norm1.linear for block in transformer.transformer_blocks]
            zero += [transformer.proj_out_1, transformer.proj_out_2]
            timestep = self.embedding.timestep_embedder
            if any(module is one for one in zero):  # every block begins as the identity
                nn.init.zeros_(module.weight)
            elif module in (timestep.linear_1, timestep.linear_2):
                nn.init.normal_(module.weight, std=0.02)
            else:
                nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class _Embedded(nn.Module):
    """Replaces a block's embedding: its first argument is the embedding already."""

    def forward(self, embedded: Tensor, labels: Tensor | None, hidden_dtype: torch.dtype | None = None) -> Tensor:
        return embedded


def _images(batch: Mapping[str, Tensor]) -> Tensor:
    if "images" not in batch:
        raise ValueError(
            f"The batches have {', '.join(map(repr, batch))} and no 'images': set"
            f" data.class_path=lightning_ssd.recipes.data.ImageDataModule"
        )
    return batch["images"]


def _diffusers() -> Any:
    return import_extra("diffusers", "images", "DiT")
