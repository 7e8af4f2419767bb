"""A tiny Llama in a folder, with a tokenizer and a chat template: the default model of the fine-tuning recipes."""

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_ssd.recipes.data import documents

log = logging.getLogger(__name__)

VOCABULARY = 2048
"""Number of token ids, with special tokens."""

_END, _PAD, _UNKNOWN, _START, _STOP = "<|end|>", "<|pad|>", "<|unknown|>", "<|start|>", "<|stop|>"
_TOKENIZER_BYTES = 2_000_000  # text that the tokenizer is trained on

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|stop|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|stop|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def make_tiny_llama(folder: Path) -> None:
    """Writes a Llama of 1.3 million random parameters to a folder that `from_pretrained` loads.

    The tokenizer is a byte-level BPE of 2048 tokens, trained on the sources of Python's standard library. It has an
    end-of-text, a padding and an unknown token and a chat template, which marks the tokens of the assistant. After an
    error there is no folder.

    Args:
        folder: Folder to make, or an empty one.

    Raises:
        ValueError: `folder` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: name another one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tokenizer = _train_tokenizer()
        tokenizer.save_pretrained(part)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = LlamaForCausalLM(_config(tokenizer))
        model.save_pretrained(part)
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def cached_tiny_llama() -> Path:
    """Returns the tiny Llama of this user's cache directory, which is made at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ssd"
    # The tokenizer depends on the sources of the standard library.
    folder = cache / f"tiny-llama-python{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.is_dir():
        log.warning("making a tiny Llama with random weights in %s, as no folder of a model is given", folder)
        try:
            make_tiny_llama(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def _config(tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _train_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END, _PAD, _UNKNOWN, _START, _STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_library_text(), trainer)
    fast: Any = PreTrainedTokenizerFast  # untyped
    return fast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        additional_special_tokens=[_START, _STOP],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=2048,
    )


def _library_text() -> Iterator[str]:
    """Yields sources of Python's standard library, up to `_TOKENIZER_BYTES`."""
    left = _TOKENIZER_BYTES
    for document in documents(None, "", ""):
        for piece in document.pieces:
            yield piece.decode(errors="ignore")
            left -= len(piece)
            if left <= 0:
                return
