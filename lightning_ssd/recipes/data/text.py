"""Text for language models: any documents, as blocks of tokens without padding."""

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ssd.recipes.data.data_module import RecipeDataModule
from lightning_ssd.recipes.data.documents import Document, documents
from lightning_ssd.recipes.data.loader import EpochSampler
from lightning_ssd.recipes.data.tokenizer import NO_WORD, ByteTokenizer, LocalTokenizer, Tokenizer
from lightning_ssd.sizes import check_least


class Objective(Protocol):
    """Turns a row of tokens into a sample. It is pickled to the processes that prepare batches.

    Attributes:
        row_tokens: Tokens of text in a row.
        vocab_size: Ids of samples are below it.
        whole_words: True if `sample` needs `word_codes`.
    """

    row_tokens: int
    vocab_size: int
    whole_words: bool

    def sample(
        self, row: NDArray[np.int64], word_codes: NDArray[np.uint8] | None, generator: np.random.Generator
    ) -> dict[str, NDArray[np.int64]]:
        """Returns the fields of a sample.

        Args:
            row: Token ids, (row_tokens,), not shared with other samples.
            word_codes: Code of each token's place in its word, (row_tokens,), see `Tokenizer.encode_words`; None
                unless `whole_words`.
            generator: Source of all randomness; depends on seed, epoch and sample only.
        """
        ...


class NextToken:
    """The row itself is the sample: for models that predict the next token."""

    whole_words = False

    def __init__(self, row_tokens: int, vocab_size: int) -> None:
        self.row_tokens = row_tokens
        self.vocab_size = vocab_size

    def sample(
        self, row: NDArray[np.int64], word_codes: NDArray[np.uint8] | None, generator: np.random.Generator
    ) -> dict[str, NDArray[np.int64]]:
        """Returns `{"input_ids": row}`."""
        return {"input_ids": row}


class TextDataModule(RecipeDataModule):
    """Documents, one after the other with a separator behind each, cut into blocks of `block_size` tokens.

    A batch is `{"input_ids": int64 (batch_size, block_size)}`; subclasses make other samples of the same text, by an
    `Objective` of their own. Files are read in a fixed random order. The last `val_share` of the blocks is held out for
    validation and test, and training reads the others in an order that depends on `seed` and the epoch only. A run that
    resumes from a checkpoint continues with the next batch.

    Args:
        path: A text file, a `.jsonl` file (a document a line), or a folder. None takes the sources of
            Python's standard library, which every machine has.
        pattern: Glob of the files of a folder.
        field: Field of a `.jsonl` line that has the text.
        tokenizer: Folder with a Hugging Face tokenizer, for UTF-8 text. None: tokens are bytes, with 256 ids and one
            that separates documents.
        block_size: Tokens in a block, the model's context.
        batch_size: Blocks in a micro-batch, per device.
        val_share: Held-out share of the blocks, between 0 and 1; at least one block.
        max_bytes: Bytes after which reading stops, at a line end up to 256 KiB later. None reads all.
        seed: Seed of the training order.
        num_workers: Processes that prepare batches. Blocks are in memory, so 0 is seldom slower.
    """

    sampler = EpochSampler
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
        check_least("data.block_size", block_size, 1)
        check_least("data.max_bytes", max_bytes, 1)
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
            ValueError: If a document can't be read, or all of them are empty.
        """
        tokenizer = ByteTokenizer() if self.tokenizer is None else LocalTokenizer(self.tokenizer)
        objective = self.make_objective(tokenizer)
        texts = documents(self.path, self.pattern, self.field)
        tokens, word_codes = _tokenize(texts, tokenizer, self.max_bytes, objective.whole_words)
        if not np.any(tokens != tokenizer.separator):
            raise ValueError(f"data.path={self.path} holds no text: set it to a file or folder with some")
        blocks = len(tokens) // objective.row_tokens
        held_out = max(1, int(blocks * self.val_share))

        def rows(values: NDArray[Any]) -> NDArray[Any]:
            return values[: blocks * objective.row_tokens].reshape(blocks, objective.row_tokens)

        table, codes = rows(tokens), None if word_codes is None else rows(word_codes)
        self.vocab_size = objective.vocab_size
        held_in = _Blocks(table[:-held_out], None if codes is None else codes[:-held_out], objective, self.seed)
        # Held-out samples are the same ones in every validation of every run, whatever the run's seed.
        return held_in, _Blocks(table[-held_out:], None if codes is None else codes[-held_out:], objective, 0)

    def make_objective(self, tokenizer: Tokenizer) -> Objective:
        """Returns the objective that makes samples of the text."""
        return NextToken(self.block_size, tokenizer.vocab_size)


class _Blocks(Dataset[dict[str, Tensor]]):
    """Rows of a table of token ids, kept in the smallest integers that hold them, as samples of an objective."""

    def __init__(
        self, table: NDArray[np.integer], word_codes: NDArray[np.uint8] | None, objective: Objective, seed: int
    ) -> None:
        self._table = table
        self._word_codes = word_codes
        self._objective = objective
        self._seed = seed

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        """Returns a sample.

        Args:
            key: `(epoch, row)`, or a row of epoch 0.
        """
        epoch, row = key if isinstance(key, tuple) else (0, key)
        codes = None if self._word_codes is None else self._word_codes[row]
        generator = np.random.default_rng((self._seed, epoch, row))
        fields = self._objective.sample(self._table[row].astype(np.int64), codes, generator)
        return {name: torch.from_numpy(values) for name, values in fields.items()}


def _tokenize(
    texts: Iterable[Document], tokenizer: Tokenizer, max_bytes: int | None, whole_words: bool
) -> tuple[NDArray[np.integer], NDArray[np.uint8] | None]:
    """Returns the ids of all documents up to `max_bytes` of text, (tokens,), and with `whole_words` their codes."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    tokens = array(np.dtype(dtype).char)  # grows in place, unlike a list of parts that is joined at the end
    word_codes = array("B")
    left = float("inf") if max_bytes is None else max_bytes
    for source, pieces in texts:
        for piece in pieces:
            if whole_words:
                ids, codes = tokenizer.encode_words(piece, source)
                word_codes.frombytes(codes.tobytes())
            else:
                ids = tokenizer.encode(piece, source)
            tokens.frombytes(ids.astype(dtype).tobytes())
            left -= len(piece)
            if left <= 0:
                break
        tokens.append(tokenizer.separator)
        if whole_words:
            word_codes.append(NO_WORD)
        if left <= 0:
            break
    return np.frombuffer(tokens, dtype=dtype), np.frombuffer(word_codes, dtype=np.uint8) if whole_words else None
