"""Text for language models: any documents, as blocks of tokens without padding."""

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ssd._lightning import pl
from lightning_ssd.data.documents import Document, documents
from lightning_ssd.data.loader import ResumableDataLoader
from lightning_ssd.data.tokenizer import ByteTokenizer, LocalTokenizer, Tokenizer


class TextDataModule(pl.LightningDataModule):
    """Documents, one after the other with a separator behind each, cut into blocks of `block_size` tokens.

    A batch is `{"input_ids": int64 (batch_size, block_size)}`. Files are read in a fixed random order, the
    last `val_share` of the blocks is held out for validation and test, and training sees the others in an
    order that depends on `seed` and the epoch only. A run that resumes from a checkpoint goes on with the
    batches not yet seen.

    Args:
        path: A text file, a `.jsonl` file (a document a line), or a folder. None takes the sources of
            Python's standard library, which every machine has.
        pattern: Which files of a folder, as a glob.
        field: The field of a `.jsonl` line that holds the text.
        tokenizer: A folder with a Hugging Face tokenizer, for UTF-8 text. None takes bytes as they are: 256
            ids and one that separates documents.
        block_size: Tokens a block; the model's context.
        batch_size: Blocks a micro-batch and device.
        val_share: The share of the blocks that is held out, between 0 and 1; at least one block.
        max_bytes: Reading stops at the first line end (give or take 256 KiB) past this many bytes. None reads
            all.
        seed: Of the training order.
        num_workers: Processes that prepare batches. Blocks lie in memory, so 0 is seldom slower.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        pattern: str = "**/*.txt",
        field: str = "text",
        tokenizer: str | Path | None = None,
        block_size: int = 1024,
        batch_size: int = 8,
        val_share: float = 0.02,
        max_bytes: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < val_share < 1:
            raise ValueError(f"data.val_share={val_share} is not a share: set it between 0 and 1")
        self.path = None if path is None else Path(path)
        self.pattern = pattern
        self.field = field
        self.tokenizer = None if tokenizer is None else Path(tokenizer)
        self.block_size = block_size
        self.batch_size = batch_size
        self.val_share = val_share
        self.max_bytes = max_bytes
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str | None = None) -> None:
        """Reads and tokenizes the documents, the first time, and makes the training batches for this run.

        Raises:
            ValueError: If there is not enough text for a held-out block and a batch on every device.
        """
        if not hasattr(self, "train_blocks"):
            self._read()
        devices, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        if len(self.train_blocks) < self.batch_size * devices:
            raise ValueError(
                f"The text has {len(self.train_blocks)} blocks of {self.block_size} tokens for training, less"
                f" than a batch of {self.batch_size} for each of {devices} devices: give more text"
                f" (data.path, data.max_bytes), or lower data.block_size or data.batch_size"
            )
        self._train_loader = ResumableDataLoader(
            self.train_blocks,
            batch_size=self.batch_size,
            sampler=DistributedSampler(self.train_blocks, devices, rank, seed=self.seed, drop_last=True),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            drop_last=True,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the training data."""
        return self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved place.

        Lightning restores the place of a loader too, but not if something asked for the loader before the
        checkpoint was read, and `trainer.estimated_stepping_batches` does.
        """
        self._train_loader.load_state_dict(state_dict)

    def train_dataloader(self) -> ResumableDataLoader:
        """Returns the training batches, all of one size, shuffled, and this device's share of them."""
        return self._train_loader

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Returns the held-out batches, in order."""
        return DataLoader(
            self.val_blocks,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Returns the held-out batches, in order."""
        return self.val_dataloader()

    def _read(self) -> None:
        tokenizer = ByteTokenizer() if self.tokenizer is None else LocalTokenizer(self.tokenizer)
        tokens = _tokenize(documents(self.path, self.pattern, self.field), tokenizer, self.max_bytes)
        blocks = len(tokens) // self.block_size
        held_out = max(1, int(blocks * self.val_share))
        table = tokens[: blocks * self.block_size].reshape(blocks, self.block_size)
        self.vocab_size = tokenizer.vocab_size
        self.train_blocks = _Blocks(table[:-held_out])
        self.val_blocks = _Blocks(table[-held_out:])


class _Blocks(Dataset[dict[str, Tensor]]):
    """Rows of a table of token ids, kept in the smallest integers that hold them."""

    def __init__(self, table: NDArray[np.integer]) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self._table[index].astype(np.int64))}


def _tokenize(texts: Iterable[Document], tokenizer: Tokenizer, max_bytes: int | None) -> NDArray[np.integer]:
    """Returns the ids of all documents, (tokens,), up to `max_bytes` of text."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    tokens = array(np.dtype(dtype).char)  # grows in place, unlike a list of parts that is joined at the end
    left = float("inf") if max_bytes is None else max_bytes
    for source, pieces in texts:
        for piece in pieces:
            tokens.frombytes(tokenizer.encode(piece, source).astype(dtype).tobytes())
            left -= len(piece)
            if left <= 0:
                break
        tokens.append(tokenizer.separator)
        if left <= 0:
            break
    return np.frombuffer(tokens, dtype=dtype)
