"""Samples to fine-tune on, packed into rows of tokens."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ssd.recipes.data.batch import IGNORED
from lightning_ssd.recipes.data.completions import Sample, Templates, library_samples, read_samples
from lightning_ssd.recipes.data.data_module import RecipeDataModule
from lightning_ssd.recipes.data.tokenizer import read_tokenizer
from lightning_ssd.sizes import check_least

log = logging.getLogger(__name__)

_OPEN_ROWS = 64
"""Most rows with room that are considered for a sample."""


class CompletionDataModule(RecipeDataModule):
    """Chats, or prompts with completions, of which only the answers are predicted.

    A batch has `input_ids`, `labels` (-100 where nothing is predicted) and `position_ids`, each int64
    (batch_size, block_size). Samples are packed into rows. Positions begin at 0 with each sample, by which many models
    of transformers restrict attention to the sample, and the last token of a sample does not predict the first one of
    the next; so a packed sample has the loss that it has alone. `CausalLM` refuses packing for models that do not
    separate samples. The samples of a row are the same in each epoch, and the order of the rows in training depends on
    `seed` and the epoch only.

    Args:
        path: A `.jsonl` file; each line has `messages` (of `role` and `content`), or `prompt` and `completion`. None:
            functions of Python's standard library, whose prompts are their signatures and docstrings.
        tokenizer: Folder with a Hugging Face tokenizer. None takes that of the model's folder.
        block_size: Tokens in a row. Answers are cut there, with a warning; a prompt must be shorter.
        packing: Puts several samples into a row. Else each has a row of its own, which is padded.
        batch_size: Rows in a micro-batch, per device.
        val_share: Held-out share of the rows, between 0 and 1; at least one row.
        max_samples: Samples to read at most; None reads all.
        seed: Seed of the training order.
        num_workers: Processes that prepare batches.
    """

    remedy = "give more samples (data.path, data.max_samples), or lower data.block_size or data.batch_size"

    def __init__(
        self,
        path: str | Path | None = None,
        tokenizer: str | Path | None = None,
        block_size: int = 1024,
        packing: bool = True,
        batch_size: int = 8,
        val_share: float = 0.02,
        max_samples: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, val_share, seed, num_workers)
        check_least("data.block_size", block_size, 2)  # the first token alone predicts nothing
        check_least("data.max_samples", max_samples, 1)
        self.path = None if path is None else Path(path)
        self.tokenizer = None if tokenizer is None else Path(tokenizer)
        self.block_size = block_size
        self.packing = packing
        self.max_samples = max_samples

    def read(self) -> tuple[Dataset[dict[str, Tensor]], Dataset[dict[str, Tensor]]]:
        """Returns the rows of training and the held-out ones; reads and tokenizes the samples.

        Raises:
            FileNotFoundError: If there are no samples, or no tokenizer.
            ValueError: If a sample can't be read, its prompt fills a row, or only its first token is predicted.
        """
        folder = self._tokenizer_folder()
        tokenizer = read_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer in {folder} has no `eos_token` to end answers with: set one and save it again"
            )
        self.vocab_size = len(tokenizer)
        templates = Templates(tokenizer, folder)
        if self.path is None:
            read = library_samples(templates, 1000 if self.max_samples is None else self.max_samples)
        else:
            read = read_samples(self.path, templates)
        samples = self._fitting(read)
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # The samples of a row, and the held-out samples, are from all parts of the file, and do not change with `seed`.
        order = np.random.default_rng(0).permutation(len(samples))
        rows = pack([samples[i] for i in order], self.block_size, _OPEN_ROWS if self.packing else 0)
        tables = _tables(rows, self.block_size, padding)
        held_out = max(1, int(len(rows) * self.val_share))
        return _Rows([table[:-held_out] for table in tables]), _Rows([table[-held_out:] for table in tables])

    def _fitting(self, read: Iterable[tuple[str, Sample]]) -> list[Sample]:
        """Returns the samples, cut where a row ends."""
        samples: list[Sample] = []
        cut = 0
        for source, (ids, predicted) in read:
            if self.max_samples is not None and len(samples) == self.max_samples:
                break
            if True not in predicted[1:]:
                raise ValueError(f"{source} has nothing to predict after its first token: add an answer, or remove it")
            if True not in predicted[1 : self.block_size]:  # no token precedes the first one
                raise ValueError(
                    f"{source} has a prompt of {predicted.index(True, 1)} tokens, and data.block_size={self.block_size}"
                    f" leaves none of its answer: shorten or remove it, or raise data.block_size"
                )
            cut += len(ids) > self.block_size
            samples.append((ids[: self.block_size], predicted[: self.block_size]))
        if not samples:
            raise ValueError(f"data.path={self.path} is empty: set it to a .jsonl file with samples")
        if cut:
            log.warning(
                "%d of %d samples were longer than data.block_size=%d tokens, and their answers are cut there",
                cut,
                len(samples),
                self.block_size,
            )
        return samples

    def _tokenizer_folder(self) -> Path:
        if self.tokenizer is not None:
            return self.tokenizer
        module = None if self.trainer is None else self.trainer.lightning_module
        folder: Any = getattr(module, "folder", None)
        if folder is None:
            raise ValueError("data.tokenizer is null, and the model has come from no folder: set it to a tokenizer's")
        path: Path = folder.path
        return path


def pack(samples: list[Sample], length: int, open_rows: int) -> list[list[Sample]]:
    """Returns rows of whole samples, at most `length` tokens each: a sample is put into the first row with room.

    Args:
        samples: Samples, none longer than `length`.
        length: Tokens in a row.
        open_rows: Number of latest rows that are considered for a sample; with 0 each sample has a row of its own.
    """
    rows: list[list[Sample]] = []
    left: list[int] = []
    for sample in samples:
        size = len(sample[0])
        first = max(0, len(rows) - open_rows)
        index = next((i for i in range(first, len(rows)) if left[i] >= size), None)
        if index is None:
            index = len(rows)
            rows.append([])
            left.append(length)
        rows[index].append(sample)
        left[index] -= size
    return rows


def _tables(rows: list[list[Sample]], length: int, padding: int) -> list[NDArray[np.int32]]:
    """Returns ids, labels and positions, each (rows, length)."""
    ids = np.full((len(rows), length), padding, dtype=np.int32)
    labels = np.full_like(ids, IGNORED)
    positions = np.zeros_like(ids)
    for index, row in enumerate(rows):
        start = 0
        for sample_ids, predicted in row:
            part = slice(start, start + len(sample_ids))
            ids[index, part] = sample_ids
            labels[index, part] = np.where(predicted, sample_ids, IGNORED)
            labels[index, start] = IGNORED  # the token before it is of another sample
            positions[index, part] = np.arange(len(sample_ids))
            start = part.stop
        positions[index, start:] = np.arange(length - start)  # padding, as if it were a sample
    return [ids, labels, positions]


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, tables: list[NDArray[np.int32]]) -> None:
        self._tables = tables

    def __len__(self) -> int:
        return len(self._tables[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels, positions = (torch.from_numpy(table[index].astype(np.int64)) for table in self._tables)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
