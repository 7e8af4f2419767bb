"""Tokenizer: bytes to token ids, either as they are or through a local Hugging Face tokenizer."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer


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


class ByteTokenizer:
    """Every byte is a token, and 256 separates documents. Takes any file, text or not."""

    vocab_size = 257
    separator = 256

    def encode(self, text: bytes, source: str) -> NDArray[np.integer]:
        """Returns the bytes of `text`."""
        return np.frombuffer(text, dtype=np.uint8)


class LocalTokenizer:
    """A Hugging Face tokenizer in a local folder; its end-of-text token separates documents.

    Text must be UTF-8: a wrong character would be trained on for ever after, so it is an error and not
    replaced.

    Args:
        folder: What `tokenizer.save_pretrained` wrote.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.tokenizer={folder} is not a folder: set it to one that a Hugging Face tokenizer was"
                f" saved to, or leave it out to train on bytes"
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"data.tokenizer={folder} holds no tokenizer that can be loaded: set it to a folder that a"
                f" Hugging Face tokenizer was saved to ({error})"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer in data.tokenizer={folder} has no end-of-text token to put between"
                f" documents: give it an `eos_token` and save it again"
            )
        self.vocab_size: int = len(self._tokenizer)
        self.separator: int = self._tokenizer.eos_token_id

    def encode(self, text: bytes, source: str) -> NDArray[np.integer]:
        """Returns the ids of `text`, without special tokens."""
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source} is not UTF-8 text ({error.reason}): convert it, leave it out by data.path and"
                f" data.pattern, or train on bytes by leaving out data.tokenizer"
            ) from error
        ids = self._tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)
