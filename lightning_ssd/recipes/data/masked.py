"""Text with masked tokens, which a model such as BERT restores."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.recipes.data.batch import IGNORED
from lightning_ssd.recipes.data.text import TextDataModule
from lightning_ssd.recipes.data.tokenizer import NO_WORD, WORD_START, Tokenizer


class MaskedTextDataModule(TextDataModule):
    """Blocks of text in which a share of the tokens is masked, other tokens in each epoch.

    A batch is `{"input_ids": ids, "labels": labels}`, both int64 (batch_size, block_size). As in BERT, 80 % of the
    chosen tokens are replaced by the mask token, 10 % by any token of the vocabulary, 10 % are unchanged. Labels are
    the original ids of the chosen tokens and -100 elsewhere. The choice depends on `seed`, the epoch and the sample
    only, so that a resumed run repeats it; held-out blocks have the same masks in every validation.

    Blocks are packed documents with separators between them, without padding and without `[CLS]`. Of bytes, 257 is
    the mask.

    Args:
        mask_share: Share of the tokens of a block that are chosen, between 0 and 1; at least one token.
        whole_words: Chooses words instead of tokens, up to the same share. Words are the runs of characters between
            whitespace, which is then not masked itself.
        arguments: Those of `TextDataModule`.
    """

    def __init__(self, *, mask_share: float = 0.15, whole_words: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        if not 0 < mask_share < 1:
            raise ValueError(f"data.mask_share={mask_share} is not a share: set it between 0 and 1")
        self.mask_share = mask_share
        self.whole_words = whole_words

    def make_objective(self, tokenizer: Tokenizer) -> "Masking":
        """Returns the masking for the ids of `tokenizer`."""
        mask = tokenizer.mask()
        return Masking(
            self.block_size, tokenizer.vocab_size, mask, tokenizer.separator, self.mask_share, self.whole_words
        )


class Masking:
    """Masks a share of the tokens of a row.

    Args:
        mask: Id of the mask token.
        separator: Id between documents, which is not masked.
    """

    def __init__(
        self, row_tokens: int, vocab_size: int, mask: int, separator: int, share: float, whole_words: bool
    ) -> None:
        self.row_tokens = row_tokens
        self.vocab_size = vocab_size
        self.whole_words = whole_words
        self._mask = mask
        self._separator = separator
        self._count = max(1, round(share * row_tokens))

    def sample(
        self, row: NDArray[np.int64], word_codes: NDArray[np.uint8] | None, generator: np.random.Generator
    ) -> dict[str, NDArray[np.int64]]:
        """Returns `input_ids` and `labels`, both (row_tokens,)."""
        if word_codes is None:
            candidates = np.flatnonzero(row != self._separator)
            chosen = generator.permutation(candidates)[: self._count]
        else:
            chosen = self._choose_words(word_codes, generator)
        if not len(chosen):  # a row of nothing but separators and whitespace: a mean over no token would be NaN
            chosen = generator.permutation(self.row_tokens)[: self._count]
        labels = np.full_like(row, IGNORED)
        labels[chosen] = row[chosen]
        kind = generator.random(len(chosen))
        row[chosen[kind < 0.8]] = self._mask
        replaced = chosen[kind >= 0.9]
        row[replaced] = generator.integers(self.vocab_size, size=len(replaced))
        return {"input_ids": row, "labels": labels}

    def _choose_words(self, word_codes: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.int64]:
        """Returns the positions of words in random order, without those that would exceed the count, as BERT does."""
        positions = np.flatnonzero(word_codes != NO_WORD)
        if not len(positions):
            return positions
        # A word that began in the row before starts here.
        first = (word_codes[positions] == WORD_START) | (np.arange(len(positions)) == 0)
        words = np.split(positions, np.flatnonzero(first)[1:])
        chosen: list[NDArray[np.int64]] = []
        left = self._count
        for index in generator.permutation(len(words)):
            if len(words[index]) <= left:
                chosen.append(words[index])
                left -= len(words[index])
            if left == 0:
                break
        return np.concatenate(chosen or [min(words, key=len)])
