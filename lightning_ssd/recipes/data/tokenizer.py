"""Tokenizers: text to token ids, which are its bytes or those of a local Hugging Face tokenizer."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.extras import import_extra

NO_WORD, WORD_START, WORD_CONTINUED = range(3)
"""Codes of a token's place in its word, see `Tokenizer.encode_words`."""

_WHITESPACE = [code for code in range(0x3001) if chr(code).isspace()]


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        vocab_size: Ids are below it.
        separator: The id that follows every document.
    """

    vocab_size: int
    separator: int

    def encode(self, text: bytes, source: str) -> NDArray[np.integer]:
        """Returns the ids of `text`, (tokens,); `source` names it in messages."""
        ...

    def encode_words(self, text: bytes, source: str) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
        """Returns the ids of `text`, and for each whether it starts a word, continues one, or is whitespace.

        Words are the runs of characters between whitespace.

        Returns:
            Ids and codes, both (tokens,); the codes are `WORD_START`, `WORD_CONTINUED` and `NO_WORD`.

        Raises:
            ValueError: If the tokenizer cannot tell which characters a token stands for.
        """
        ...

    def mask(self) -> int:
        """Returns the id that stands for a masked token.

        Raises:
            ValueError: If there is none.
        """
        ...

    def sentinels(self, count: int) -> NDArray[np.integer]:
        """Returns `count` ids that stand for left-out spans, in the order of their use.

        Raises:
            ValueError: If there are fewer.
        """
        ...


class ByteTokenizer:
    """Every byte is a token, and 256 separates documents. Any file can be read, text or not.

    A mask or sentinels have the ids from 257 on, and `vocab_size` includes them after `mask` or `sentinels` was called.
    """

    separator = 256

    def __init__(self) -> None:
        self.vocab_size = 257

    def encode(self, text: bytes, source: str) -> NDArray[np.integer]:
        """Returns the bytes of `text`."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode_words(self, text: bytes, source: str) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
        """Returns the bytes of `text`, and the code of each byte's place in its word."""
        ids = np.frombuffer(text, dtype=np.uint8)
        word_of = _words(ids)
        return ids, _word_codes(word_of)

    def mask(self) -> int:
        """Returns 257."""
        return int(self.sentinels(1)[0])

    def sentinels(self, count: int) -> NDArray[np.integer]:
        """Returns the ids from 257 on."""
        self.vocab_size = 257 + count
        return np.arange(257, 257 + count)


def read_tokenizer(folder: Path) -> Any:
    """Returns the Hugging Face tokenizer of a folder.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If the folder has no file of a tokenizer, or transformers cannot read it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"data.tokenizer={folder} is not a folder: set it to one that a Hugging Face tokenizer was saved to"
        )
    transformers = import_extra("transformers", "recipes", "A tokenizer of a folder")
    files = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")
    try:
        # transformers would make an empty tokenizer from the configuration of the model.
        if not any((folder / name).is_file() for name in files):
            raise ValueError(f"it has none of {', '.join(files)}")
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer={folder} holds no tokenizer that can be loaded: save one there, or set it to a folder that"
            f" a Hugging Face tokenizer was saved to ({error})"
        ) from error


class LocalTokenizer:
    """A Hugging Face tokenizer in a local folder; its end-of-text token (or `sep_token`) separates documents.

    Text must be UTF-8: a wrong character is an error and not replaced, because the model would be trained on the
    replacement.

    Args:
        folder: Folder that `tokenizer.save_pretrained` has written.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = read_tokenizer(folder)
        # BERT's tokenizers have a separator only.
        separators = [i for i in (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id) if i is not None]
        if not separators:
            raise ValueError(
                f"The tokenizer in data.tokenizer={folder} has no end-of-text token to put between"
                f" documents: give it an `eos_token` or a `sep_token` and save it again"
            )
        self._folder = folder
        self.vocab_size: int = len(self._tokenizer)
        self.separator: int = separators[0]

    def encode(self, text: bytes, source: str) -> NDArray[np.integer]:
        """Returns the ids of `text`, without special tokens."""
        ids = self._tokenizer(_decode(text, source), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def encode_words(self, text: bytes, source: str) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
        """Returns the ids of `text`, without special tokens, and the code of each token's place in its word."""
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"data.whole_words=True needs the place of each token in the text, and the tokenizer in"
                f" data.tokenizer={self._folder} does not give it: save a fast tokenizer (`tokenizer.json`), or set"
                f" data.whole_words=False"
            )
        decoded = _decode(text, source)
        encoded = self._tokenizer(
            decoded, add_special_tokens=False, verbose=False, return_offsets_mapping=True, return_token_type_ids=False
        )
        word_of = _words(np.frombuffer(decoded.encode("utf-32-le"), dtype=np.uint32))
        # A token may include the whitespace before its word, so that its last character determines the word.
        ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
        return np.asarray(encoded["input_ids"], dtype=np.uint32), _word_codes(word_of[np.maximum(ends - 1, 0)])

    def mask(self) -> int:
        """Returns the id of the tokenizer's mask token."""
        if self._tokenizer.mask_token_id is None:
            raise ValueError(
                f"The tokenizer in data.tokenizer={self._folder} has no mask token: give it a `mask_token` and save it"
                f" again, or take a tokenizer that was made for masked language models"
            )
        return int(self._tokenizer.mask_token_id)

    def sentinels(self, count: int) -> NDArray[np.integer]:
        """Returns the ids of `<extra_id_0>` and so on, T5's names."""
        vocabulary = self._tokenizer.get_vocab()
        ids = [vocabulary.get(f"<extra_id_{number}>") for number in range(count)]
        if None in ids:
            raise ValueError(
                f"Samples of this length leave out {count} spans, and the tokenizer in data.tokenizer={self._folder}"
                f" has no `<extra_id_{ids.index(None)}>`: add tokens `<extra_id_0>` to `<extra_id_{count - 1}>` and"
                f" save it again, or lower data.block_size"
            )
        return np.asarray(ids, dtype=np.int64)


def _decode(text: bytes, source: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text ({error.reason}): convert it, leave it out by data.path and"
            f" data.pattern, or train on bytes by leaving out data.tokenizer"
        ) from error


def _words(characters: NDArray[np.integer]) -> NDArray[np.int64]:
    """Returns the number of the word, from 1 on, that each character (a byte or a code point) is of; 0: whitespace."""
    inside = ~np.isin(characters, _WHITESPACE)
    starts = inside & ~np.concatenate(([False], inside[:-1]))
    return np.where(inside, np.cumsum(starts), 0)


def _word_codes(word_of: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns the codes of tokens, (tokens,), from the word of each, 0 for whitespace."""
    same = word_of == np.concatenate(([0], word_of[:-1]))
    return np.where(word_of == 0, NO_WORD, np.where(same, WORD_CONTINUED, WORD_START)).astype(np.uint8)
