"""Text becomes blocks of tokens: every document once, in a fixed order, trained on or held out."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightning_ssd.recipes.data import TextDataModule, count_items, count_samples, count_tokens


def blocks(data: TextDataModule) -> Tensor:
    """Returns all blocks in the order of the text, the held-out ones last: int64 (blocks, block_size)."""
    data.setup()
    parts = (data.train_set, data.val_set)
    return torch.stack([part[i]["input_ids"] for part in parts for i in range(len(part))])


def text_of(data: TextDataModule) -> bytes:
    """Returns the text of byte tokens, with a 0 at the end of each document."""
    ids = blocks(data).flatten().tolist()
    return bytes(0 if token == 256 else token for token in ids)


def save_tokenizer(folder: Path, **special: str) -> Path:
    words = {word: i for i, word in enumerate(["<unk>", "<end>", "the", "cat", "sat", "mat"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    make(tokenizer_object=tokenizer, unk_token="<unk>", **special).save_pretrained(folder)
    return folder


def small(path: Path, **settings: Any) -> TextDataModule:
    return TextDataModule(path, **{"block_size": 2, "batch_size": 1, **settings})


def test_file_is_bytes_and_a_separator(tmp_path: Path) -> None:
    file = tmp_path / "text.bin"
    file.write_bytes(b"\xff\x00ab\nc")
    assert blocks(small(file)).flatten().tolist() == [255, 0, 97, 98, 10, 99]
    file.write_bytes(b"abc")
    assert blocks(small(file)).flatten().tolist() == [97, 98, 99, 256]


def test_folder_takes_what_matches_once_each_in_one_order(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "c.txt", "no.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    text = text_of(small(tmp_path, block_size=1))
    assert sorted(text.split(b"\0")) == [b"", b"<a.txt>", b"<c.txt>", b"<sub/b.txt>"]
    assert text == text_of(small(tmp_path, block_size=1, seed=5))
    assert text_of(small(tmp_path, block_size=1, pattern="*.md")) == b"<no.md>\0"


def test_json_lines_are_read_by_field(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"body": text}) for text in ("one", "zwölf")) + "\n\n")
    assert text_of(small(file, block_size=1, field="body")) == "one\0zwölf\0".encode()


def test_default_is_the_standard_library() -> None:
    data = TextDataModule(block_size=256, max_bytes=300_000)
    text = text_of(data)
    assert 300_000 < len(text) < 900_000
    documents = text.split(b"\0")[:-1]
    sizes = {len(document) for document in documents}
    files = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
    sources = {file.read_bytes() for file in files if file.stat().st_size in sizes}
    assert len(documents) > 2 and all(document in sources for document in documents[:-1])
    assert torch.equal(blocks(data), blocks(TextDataModule(block_size=256, max_bytes=300_000)))


def test_held_out_blocks_are_the_end_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(200)))
    data = small(file, block_size=10, val_share=0.25)
    text = blocks(data)
    assert text.flatten().tolist() == list(range(200))
    assert len(data.val_set) == 5 and len(data.train_set) == 15
    held_out = torch.cat([batch["input_ids"] for batch in data.val_dataloader()])
    assert held_out.flatten().tolist() == list(range(150, 200))
    trained = torch.cat([batch["input_ids"] for batch in data.train_dataloader()])
    assert set(trained.flatten().tolist()) == set(range(150))


def test_local_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat\nthe mat x")
    folder = save_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    data = small(tmp_path / "text.txt", block_size=1, tokenizer=folder)
    assert blocks(data).flatten().tolist() == [2, 3, 4, 2, 5, 0, 1]
    assert data.vocab_size == 6


def test_long_documents_are_read_in_pieces_and_lose_nothing(tmp_path: Path) -> None:
    text = b"".join(b"%06d\n" % line for line in range(100_000))
    (tmp_path / "text.txt").write_bytes(text)
    assert text_of(small(tmp_path, block_size=100)) == text
    assert len(text_of(small(tmp_path, block_size=100, max_bytes=1))) < len(text) // 2


def test_counts_for_the_throughput_monitor() -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    assert count_samples(ids) == count_samples({"input_ids": ids}) == 3
    assert count_tokens(ids) == count_items(ids) == count_items({"input_ids": ids}) == 15
    assert count_items({"images": torch.zeros(3, 1, 8, 8)}) == count_samples({"images": torch.zeros(3, 1, 8, 8)}) == 3


@pytest.mark.parametrize(
    ("files", "settings", "error", "message"),
    [
        ({}, {"path": "none.txt"}, FileNotFoundError, r"data\.path=.*none\.txt does not exist"),
        ({"a.md": "x"}, {}, FileNotFoundError, r"matches data\.pattern='\*\*/\*\.txt'"),
        ({"a.txt": "ab"}, {}, ValueError, r"0 samples.*data\.path.*data\.block_size"),
        ({"a.jsonl": '{"text": "ab"}\n{"body": "x"}\n'}, {}, ValueError, r"a\.jsonl:2 .*'body'.*data\.field"),
        (
            {"a.jsonl": '{"text": 1}\n'},
            {},
            ValueError,
            r"a\.jsonl:1 has no text under 'text' \(it has a value of type int",
        ),
        ({"a.jsonl": '{"text": ""}\n'}, {}, ValueError, r"data\.path=.* holds no text"),
        ({"a.jsonl": '["x"]\n'}, {}, ValueError, r"a\.jsonl:1 has no text under 'text'.*list"),
        ({"a.jsonl": "{oops\n"}, {}, ValueError, r"a\.jsonl:1 is not a line of JSON"),
        ({}, {"tokenizer": "none"}, FileNotFoundError, r"data\.tokenizer=.*none is not a folder"),
        ({"empty/x": ""}, {"tokenizer": "empty"}, ValueError, r"data\.tokenizer=.*empty holds no tokenizer"),
        ({"empty/config.json": '{"model_type": "gpt2"}'}, {"tokenizer": "empty"}, ValueError, r"it has none of tok"),
        ({}, {"tokenizer": "endless"}, ValueError, r"data\.tokenizer=.*endless has no end-of-text token"),
        ({"a.txt": b"ok \xff"}, {"tokenizer": "good"}, ValueError, r"a\.txt is not UTF-8"),
    ],
)
def test_errors_name_the_argument(
    tmp_path: Path,
    files: dict[str, str | bytes],
    settings: dict[str, str],
    error: type[Exception],
    message: str,
) -> None:
    save_tokenizer(tmp_path / "endless")
    save_tokenizer(tmp_path / "good", eos_token="<end>")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    jsonl = any(name.endswith(".jsonl") for name in files)
    paths = {"path": tmp_path, **{key: tmp_path / value for key, value in settings.items()}}
    data = small(paths.pop("path"), pattern="*.jsonl" if jsonl else "**/*.txt", **paths)
    with pytest.raises(error, match=message):
        data.setup()


@pytest.mark.parametrize(
    ("name", "value"),
    [("val_share", 0), ("val_share", 1), ("val_share", -0.5), ("batch_size", 0), ("seed", -1), ("num_workers", -1)]
    + [("block_size", 0), ("block_size", -4), ("max_bytes", 0)],
)
def test_numbers_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"data\.{name}={value} .*: set it "):
        TextDataModule(**{name: value})


def test_batches_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have 'images' and no 'input_ids': set data\.class_path"):
        count_tokens({"images": torch.zeros(3, 1, 8, 8)})
