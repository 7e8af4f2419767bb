"""The LightningDataModule that all recipes read from: loaders, splits over devices and resume, without the samples."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data.loader import ResumableDataLoader
from lightning_ssd.sizes import check_least


class RecipeDataModule(pl.LightningDataModule):
    """Batches the samples that a subclass reads, in an order that a resumed run continues.

    A subclass implements `read`. The order of training depends on `seed` and the epoch only.

    Args:
        batch_size: Samples in a micro-batch, per device.
        val_share: Held-out share of the samples, between 0 and 1.
        seed: Seed of the training order.
        num_workers: Processes that prepare batches.

    Attributes:
        train_set: Samples of training, after `setup`.
        val_set: Held-out samples, after `setup`.

    Raises:
        ValueError: If an argument is out of range.
    """

    sampler: ClassVar[type[DistributedSampler[Any]]] = DistributedSampler
    """Order of training; `EpochSampler` for data sets that make other samples in each epoch."""

    remedy: ClassVar[str] = "give more data, or lower data.batch_size"
    """Remedy that the error for too few samples names."""

    train_set: Dataset[dict[str, Tensor]]
    val_set: Dataset[dict[str, Tensor]]

    def __init__(self, batch_size: int, val_share: float, seed: int, num_workers: int) -> None:
        super().__init__()
        if not 0 < val_share < 1:
            raise ValueError(f"data.val_share={val_share} is not a share: set it between 0 and 1")
        check_least("data.batch_size", batch_size, 1)
        check_least("data.seed", seed, 0)
        check_least("data.num_workers", num_workers, 0)
        self.batch_size = batch_size
        self.val_share = val_share
        self.seed = seed
        self.num_workers = num_workers

    @abstractmethod
    def read(self) -> tuple[Dataset[dict[str, Tensor]], Dataset[dict[str, Tensor]]]:
        """Returns the samples of training and the held-out samples; called once."""

    @override
    def setup(self, stage: str | None = None) -> None:
        """Reads the samples, the first time, and makes the training batches for this run.

        Raises:
            ValueError: If there is no batch for every device.
        """
        if not hasattr(self, "train_set"):
            self.train_set, self.val_set = self.read()
        devices, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        samples = len(self.train_set)  # type: ignore[arg-type]
        if samples < self.batch_size * devices:
            raise ValueError(
                f"There are {samples} samples for training, less than a batch of {self.batch_size} for each of"
                f" {devices} devices: {self.remedy}"
            )
        self._train_loader = ResumableDataLoader(
            self.train_set,
            batch_size=self.batch_size,
            sampler=self.sampler(self.train_set, devices, rank, seed=self.seed, drop_last=True),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            drop_last=True,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training data."""
        return self._train_loader.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved position.

        Lightning restores the position of a loader too, but not if something asked for the loader before the
        checkpoint was read, and `trainer.estimated_stepping_batches` does.
        """
        self._train_loader.load_state_dict(state_dict)

    @override
    def train_dataloader(self) -> ResumableDataLoader:
        """Returns the training batches, all of one size, shuffled, and this device's share of them."""
        return self._train_loader

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Returns the held-out batches, in order."""
        return DataLoader(
            self.val_set,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
