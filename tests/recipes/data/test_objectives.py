"""Masked and span-corrupted samples: the shares of BERT and T5, new in each epoch, repeated on resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_ssd.recipes.data import MaskedTextDataModule, SpanCorruptionDataModule
from lightning_ssd.recipes.data.span_corruption import SpanCorruption, span_lengths
from tests.support.compare import same

MASK = 257
TEXT = "All work and no play makes Jack a dull boy, said the cat.\n" * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def save_tokenizer(folder: Path, *extra: str, **special: str) -> Path:
    words = ["[UNK]", "[SEP]", "[MASK]", "the", "cat", "un", "##do", "##ne", "sat", *extra]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    make: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    make(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]", **special).save_pretrained(folder)
    return folder


def masked(path: Path, **settings: Any) -> MaskedTextDataModule:
    data = MaskedTextDataModule(path=path, **{"block_size": 40, "batch_size": 2, **settings})
    data.setup()
    return data


def spans(path: Path, **settings: Any) -> SpanCorruptionDataModule:
    data = SpanCorruptionDataModule(path=path, **{"block_size": 40, "batch_size": 2, **settings})
    data.setup()
    return data


MAKERS = pytest.mark.parametrize("make", [masked, spans])


def test_masking_is_that_of_bert(text: Path) -> None:
    data = masked(text, block_size=100)
    assert data.vocab_size == 258
    kinds = {"masked": 0, "same": 0, "other": 0}
    for epoch in range(30):
        for row in range(len(data.train_set)):
            sample = data.train_set[epoch, row]
            ids, labels = sample["input_ids"], sample["labels"]
            original = torch.tensor(list(TEXT.encode()[100 * row : 100 * row + 100]))
            chosen = labels != -100
            assert int(chosen.sum()) == 15 and torch.equal(labels[chosen], original[chosen])
            assert torch.equal(ids[~chosen], original[~chosen])
            kinds["masked"] += int((ids[chosen] == MASK).sum())
            kinds["same"] += int((ids[chosen] == labels[chosen]).sum())
            kinds["other"] += int(((ids[chosen] != MASK) & (ids[chosen] != labels[chosen])).sum())
    total = sum(kinds.values())
    for kind, share in (("masked", 0.8), ("same", 0.1), ("other", 0.1)):
        assert abs(kinds[kind] / total - share) < 5 * (share * (1 - share) / total) ** 0.5 + 0.005, kinds


def test_separators_are_masked_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "ab"}\n' * 30 + '{"text": ""}\n' * 30)
    for whole_words in (False, True):
        data = masked(tmp_path / "texts.jsonl", block_size=6, batch_size=1, val_share=0.1, whole_words=whole_words)
        for row in range(len(data.train_set)):
            labels = data.train_set[row]["labels"]
            assert (labels[labels != -100] == 256).any() == (row >= 15)
            assert (labels != -100).any()


@pytest.mark.parametrize("local", [False, True], ids=["bytes", "tokenizer"])
def test_words_are_chosen_whole(tmp_path: Path, local: bool) -> None:
    (tmp_path / "text.txt").write_text("undone the cat  sat,undo\nthe " * 100)
    folder = save_tokenizer(tmp_path / "tokenizer", ",", mask_token="[MASK]") if local else None
    data = masked(tmp_path / "text.txt", tokenizer=folder, whole_words=True, block_size=60, mask_share=0.2)
    # The word of each token in a period of the text: `un ##do ##ne`, `the`, `cat`, `sat , un ##do`, `the`.
    words = [0, 0, 0, 1, 2, 3, 3, 3, 3, 4] if local else [0] * 6 + [-1] + [1] * 3 + [-1] + [2] * 3 + [-1, -1]
    words += [] if local else [3] * 8 + [-1] + [4] * 3 + [-1]
    sizes = []
    for row in range(len(data.train_set)):
        chosen = (data.train_set[3, row]["labels"] != -100).tolist()
        sizes.append(sum(chosen))
        begin = 60 * row
        groups: dict[int, set[bool]] = {}
        for position, one in enumerate(chosen, begin):
            word = words[position % len(words)]
            assert word >= 0 or not one, "whitespace"
            groups.setdefault(word + 10 * (position // len(words)), set()).add(one)
        assert all(len(values) == 1 for word, values in groups.items() if word % 10 != 9)
    assert max(sizes) <= 12 and sum(sizes) > 0.9 * 12 * len(sizes)


@MAKERS
def test_samples_depend_on_seed_epoch_and_row_alone(text: Path, make: Any) -> None:
    data, again, other = make(text), make(text, num_workers=2, batch_size=4), make(text, seed=1)

    for row in range(5):
        assert same(data.train_set[2, row], again.train_set[2, row])
        assert not same(data.train_set[2, row], data.train_set[3, row])
        assert not same(data.train_set[2, row], data.train_set[2, row + 5])
        assert not same(data.train_set[2, row], other.train_set[2, row])
    for one, two in zip(data.val_dataloader(), other.val_dataloader(), strict=True):
        assert same(one, two), "held-out samples do not depend on the seed"


@MAKERS
def test_workers_make_the_samples_of_each_epoch(text: Path, make: Any) -> None:
    seen: list[list[torch.Tensor]] = []
    for workers in (0, 2):
        loader = make(text, num_workers=workers).train_dataloader()
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            seen.append([torch.cat((batch["input_ids"], batch["labels"]), dim=1) for batch in loader])
    alone, alone_later, workers, workers_later = seen
    assert all(map(torch.equal, alone, workers)) and all(map(torch.equal, alone_later, workers_later))
    first, second = ({tuple(sample) for batch in epoch for sample in batch.tolist()} for epoch in (alone, alone_later))
    assert first.isdisjoint(second)


@given(
    inputs=st.integers(3, 400),
    share=st.floats(0.05, 0.6),
    mean_span=st.floats(1.5, 20.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_spans_restore_the_text_without_padding(inputs: int, share: float, mean_span: float, seed: int) -> None:
    try:
        lengths = span_lengths(inputs, share, mean_span)
    except ValueError as error:
        assert "data.noise_share" in str(error)
        return
    sentinels = np.arange(1000, 1000 + lengths.spans)
    row = np.random.default_rng(seed).integers(900, size=lengths.text)
    sample = SpanCorruption(lengths, sentinels, 999, 2000).sample(row, None, np.random.default_rng(seed))
    kept, dropped = sample["input_ids"].tolist(), sample["labels"].tolist()
    assert len(kept) == inputs and len(dropped) == lengths.targets
    assert kept.pop() == dropped.pop() == 999
    restored, position = [], 0
    for token in kept:
        if token < 1000:
            restored.append(token)
            continue
        assert dropped[position] == token
        position += 1
        begin = position
        while position < len(dropped) and dropped[position] < 1000:
            position += 1
        assert position > begin, "a span is not empty"
        restored += dropped[begin:position]
    assert position == len(dropped) and restored == row.tolist()


def test_lengths_are_those_of_t5() -> None:
    """Lengths of the paper's setting, and of the script of transformers that follows it."""
    lengths = span_lengths(512, 0.15, 3.0)
    assert (lengths.text, lengths.inputs, lengths.targets) == (568, 512, 114)
    assert span_lengths(1024, 0.15, 3.0).targets == 229


def test_sentinels(tmp_path: Path, text: Path) -> None:
    data = spans(text)
    count = span_lengths(40, 0.15, 3.0).spans
    assert data.vocab_size == 257 + count
    sample = data.train_set[0]["labels"]
    assert sample[sample >= 257].tolist() == list(range(257, 257 + count))
    extra = [f"<extra_id_{number}>" for number in reversed(range(count))]
    (tmp_path / "local.txt").write_text("the cat sat undone " * 50)
    data = spans(tmp_path / "local.txt", tokenizer=save_tokenizer(tmp_path / "tokenizer", *extra))
    sample = data.train_set[0]["labels"]
    assert sample[sample >= 9].tolist() == list(reversed(range(9, 9 + count)))
    assert sample[-1] == 1 == data.train_set[0]["input_ids"][-1]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (masked, {"tokenizer": "tokenizer"}, r"data\.tokenizer=.*tokenizer has no mask token.*`mask_token`"),
        (masked, {"mask_share": 1.0}, r"data\.mask_share=1\.0 is not a share"),
        (masked, {"path": "empty.txt"}, r"data\.path=.*holds no text"),
        (masked, {"path": "a.jsonl"}, r"a\.jsonl:1 has no text under 'text' \(it has 'body'\): set data\.field"),
        (spans, {"tokenizer": "tokenizer"}, r"data\.tokenizer=.*tokenizer has no `<extra_id_0>`.*data\.block_size"),
        (spans, {"noise_share": 0.0}, r"data\.noise_share=0\.0 is not a share"),
        (spans, {"noise_share": 0.8, "mean_span": 1.0}, r"data\.noise_share=0\.8 in \d+ spans.*data\.mean_span"),
        (spans, {"mean_span": 0.5}, r"data\.mean_span=0\.5"),
        (spans, {"block_size": 2}, r"data\.block_size=2 is too short.* 3 or more"),
        (spans, {"path": "empty.txt"}, r"data\.path=.*holds no text"),
    ],
)
def test_errors_name_the_argument(tmp_path: Path, make: Any, arguments: dict[str, Any], message: str) -> None:
    (tmp_path / "text.txt").write_text("the cat sat " * 100)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    save_tokenizer(tmp_path / "tokenizer")
    paths = {name: tmp_path / arguments.get(name, "text.txt") for name in ("path", "tokenizer")}
    if "tokenizer" not in arguments:
        del paths["tokenizer"]
    with pytest.raises(ValueError, match=message):
        make(**arguments | paths)
