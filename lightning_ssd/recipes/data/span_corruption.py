"""Text with left-out spans, which an encoder-decoder such as T5 restores."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.recipes.data.text import TextDataModule
from lightning_ssd.recipes.data.tokenizer import Tokenizer


class SpanLengths(NamedTuple):
    """Numbers of tokens in a sample.

    Attributes:
        text: Tokens of text.
        noise: Tokens of text that are left out.
        spans: Spans that the left-out tokens form.
    """

    text: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        """Tokens of the encoder: those that remain, a sentinel for each span, and the end."""
        return self.text - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens of the decoder: the left-out spans, a sentinel before each, and the end token."""
        return self.noise + self.spans + 1


class SpanCorruptionDataModule(TextDataModule):
    """Blocks of text in which random spans are left out, as T5 is trained; other spans in each epoch.

    A batch is `{"input_ids": ids, "labels": labels}`, int64 (batch_size, block_size) and (batch_size, targets). In
    `input_ids` a sentinel stands for each span that was left out; `labels` is each sentinel followed by its span. Both
    end with the separator of documents. As in T5, a sample has so much text that `input_ids` has `block_size` tokens,
    and nothing is padded: with `block_size=512`, 568 tokens of text make 512 of the encoder and 114 of the decoder. The
    spans depend on `seed`, the epoch and the sample only, so that a resumed run repeats them; held-out
    blocks have the same spans in every validation.

    Sentinels are the ids from 257 on where bytes are tokens, else the tokenizer's `<extra_id_0>`, `<extra_id_1>`, ...

    Args:
        noise_share: Share of the tokens that is left out, between 0 and 1.
        mean_span: Mean length of a span, in tokens; at least 1.
        arguments: Those of `TextDataModule`. `block_size` is the length of `input_ids`.
    """

    def __init__(self, *, noise_share: float = 0.15, mean_span: float = 3.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        if not 0 < noise_share < 1:
            raise ValueError(f"data.noise_share={noise_share} is not a share: set it between 0 and 1")
        if mean_span < 1:
            raise ValueError(f"data.mean_span={mean_span} is not the length of a span: set it to 1 or more")
        self.noise_share = noise_share
        self.mean_span = mean_span

    def make_objective(self, tokenizer: Tokenizer) -> "SpanCorruption":
        """Returns the span corruption for the ids of `tokenizer`."""
        lengths = span_lengths(self.block_size, self.noise_share, self.mean_span)
        sentinels = tokenizer.sentinels(lengths.spans)
        return SpanCorruption(lengths, sentinels, tokenizer.separator, tokenizer.vocab_size)


class SpanCorruption:
    """Leaves random spans out of a row.

    Args:
        sentinels: Ids that stand for spans, (spans,).
        end: Id at the end of inputs and targets.
    """

    whole_words = False

    def __init__(self, lengths: SpanLengths, sentinels: NDArray[np.integer], end: int, vocab_size: int) -> None:
        self.row_tokens = lengths.text
        self.vocab_size = vocab_size
        self._lengths = lengths
        self._sentinels = sentinels
        self._end = end

    def sample(
        self, row: NDArray[np.int64], word_codes: NDArray[np.uint8] | None, generator: np.random.Generator
    ) -> dict[str, NDArray[np.int64]]:
        """Returns `input_ids`, (block_size,), and `labels`, (targets,)."""
        text, noise, spans = self._lengths
        # The text begins with tokens that remain, as in T5, and alternates from there.
        kept_lengths = _random_lengths(text - noise, spans, generator)
        noise_lengths = _random_lengths(noise, spans, generator)
        ends = np.cumsum(np.stack((kept_lengths, noise_lengths), axis=1))
        parts = np.split(row, ends[:-1])
        sentinels = [np.array([sentinel]) for sentinel in self._sentinels]
        end = [np.array([self._end])]
        inputs = [part for pair in zip(parts[::2], sentinels, strict=True) for part in pair]
        targets = [part for pair in zip(sentinels, parts[1::2], strict=True) for part in pair]
        return {"input_ids": np.concatenate(inputs + end), "labels": np.concatenate(targets + end)}


def span_lengths(inputs: int, noise_share: float, mean_span: float) -> SpanLengths:
    """Returns the lengths of the samples whose encoder input has `inputs` tokens, computed as T5's reference does.

    Raises:
        ValueError: If `inputs` is too short, or spans would touch each other.
    """
    lengths = _lengths_of_text(2, noise_share, mean_span)
    while (longer := _lengths_of_text(lengths.text + 1, noise_share, mean_span)).inputs <= inputs:
        lengths = longer
    if lengths.inputs > inputs:
        raise ValueError(
            f"data.block_size={inputs} is too short for a span that is left out: set it to {lengths.inputs} or more"
        )
    if lengths.text - lengths.noise < lengths.spans:
        raise ValueError(
            f"data.noise_share={noise_share} in {lengths.spans} spans leaves {lengths.text - lengths.noise} tokens to"
            f" stand between them: lower data.noise_share, or raise data.mean_span"
        )
    return lengths


def _lengths_of_text(text: int, noise_share: float, mean_span: float) -> SpanLengths:
    noise = min(max(round(text * noise_share), 1), text - 1)
    return SpanLengths(text, noise, max(round(noise / mean_span), 1))


def _random_lengths(total: int, parts: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Returns `parts` positive lengths with the sum `total`, (parts,), all such lengths equally likely."""
    cuts = 1 + np.sort(generator.choice(total - 1, parts - 1, replace=False))
    return np.diff(cuts, prepend=0, append=total)
