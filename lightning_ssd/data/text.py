"""Text for language models: any documents, as blocks of tokens without padding."""

from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ssd.data.documents import Document, documents
from lightning_ssd.data.module import RecipeDataModule
from lightning_ssd.data.tokenizer import ByteTokenizer, LocalTokenizer, Tokenizer


class TextDataModule(RecipeDataModule):
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

    remedy = "give more text (data.path, data.max_bytes), or lower data.block_size or data.batch_size"

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
        super().__init__(batch_size, val_share, seed, num_workers)
        self.path = None if path is None else Path(path)
        self.pattern = pattern
        self.field = field
        self.tokenizer = None if tokenizer is None else Path(tokenizer)
        self.block_size = block_size
        self.max_bytes = max_bytes

    def read(self) -> tuple[Dataset[dict[str, Tensor]], Dataset[dict[str, Tensor]]]:
        """Returns the blocks of training and the held-out ones; reads and tokenizes the documents.

        Raises:
            FileNotFoundError: If there is no document, or no tokenizer.
            ValueError: If a document can't be read.
        """
        tokenizer = ByteTokenizer() if self.tokenizer is None else LocalTokenizer(self.tokenizer)
        tokens = _tokenize(documents(self.path, self.pattern, self.field), tokenizer, self.max_bytes)
        blocks = len(tokens) // self.block_size
        held_out = max(1, int(blocks * self.val_share))
        table = tokens[: blocks * self.block_size].reshape(blocks, self.block_size)
        self.vocab_size = tokenizer.vocab_size
        return _Blocks(table[:-held_out]), _Blocks(table[-held_out:])


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
