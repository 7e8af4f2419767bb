"""Chats and completions: predicted tokens, packing into rows, and errors that name the line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_ssd.recipes.data import CompletionDataModule
from lightning_ssd.recipes.data.finetune import pack
from lightning_ssd.recipes.models import CausalLM
from lightning_ssd.recipes.models.tiny_llama import make_tiny_llama
from tests.support.folders import FAMILIES, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "llama"
    make_tiny_llama(made)
    return made


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def rows(folder: Path, path: Path, **arguments: Any) -> list[dict[str, Tensor]]:
    """Returns all rows, the held-out ones last."""
    data = CompletionDataModule(path, folder, **{"block_size": 64, "batch_size": 1} | arguments)
    data.setup()
    return [*data.train_set, *data.val_set]  # type: ignore[misc]


def predicted(folder: Path, row: dict[str, Tensor]) -> str:
    labels = row["labels"]
    assert torch.equal(labels[labels != -100], row["input_ids"][labels != -100])
    return AutoTokenizer.from_pretrained(folder).decode(labels[labels != -100])


RECORDS = [
    (chat("Hi.", "Hello!"), "Hello!<|stop|>"),
    (chat("Hi.", "Hello!", "And?", "Bye!"), "Hello!<|stop|>Bye!<|stop|>"),
    ({"prompt": "Hi. ", "completion": "Hello!"}, "Hello!<|end|>"),
]


@pytest.mark.parametrize(("record", "answer"), RECORDS)
@pytest.mark.parametrize("marks", [True, False], ids=["marks", "prefixes"])
def test_answers_alone_are_predicted(tmp_path: Path, folder: Path, record: Any, answer: str, marks: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not marks:
        for tag in ("{% generation %}", "{% endgeneration %}"):
            assert tag in tokenizer.chat_template
            tokenizer.chat_template = tokenizer.chat_template.replace(tag, "")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = rows(tmp_path / "tokenizer", written(tmp_path / "a.jsonl", record, record), packing=False)
    assert len(found) == 2
    # Without marks in the template, the text after the end of a message belongs to it.
    assert predicted(folder, found[0]).replace("\n", "") == answer


def test_a_begin_token_that_the_tokenizer_adds_is_there(tmp_path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    record = {"prompt": "a", "completion": "b"}
    path = written(tmp_path / "a.jsonl", record, record)
    assert rows(folder, path, packing=False)[0]["input_ids"][0] != tokenizer.eos_token_id
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "begins")
    ids = rows(tmp_path / "begins", path, packing=False)[0]["input_ids"]
    assert tokenizer.decode(ids[:4]) == "<|end|>ab<|end|>"


@pytest.mark.parametrize("chunked", [False, True])
def test_packed_samples_have_the_loss_that_they_have_alone(tmp_path: Path, folder: Path, chunked: bool) -> None:
    records = [chat(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(2, 14)]
    path = written(tmp_path / "a.jsonl", *records)
    packed, alone = rows(folder, path, block_size=128), rows(folder, path, block_size=128, packing=False)
    assert len(packed) < len(alone) / 2
    assert any((row["position_ids"] == 0).sum() > 2 for row in packed)
    module = CausalLM(folder, chunked_loss=chunked)
    module.configure_model()

    def total(found: list[dict[str, Tensor]]) -> Tensor:
        losses = [
            module.training_loss({name: value[None] for name, value in row.items()}) * (row["labels"] != -100).sum()
            for row in found
        ]
        return torch.stack(losses).sum()

    with torch.no_grad():
        torch.testing.assert_close(total(packed), total(alone), rtol=1e-5, atol=0)
        reference = AutoModelForCausalLM.from_pretrained(folder)
        sums = [
            reference(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss * (row["labels"] != -100).sum()
            for row in alone
        ]
        torch.testing.assert_close(total(alone), torch.stack(sums).sum(), rtol=1e-5, atol=0)


def test_packing_fills_rows_and_keeps_samples_whole() -> None:
    sizes = [5, 3, 9, 1, 7, 2, 10, 4]
    samples = [([i] * size, [True] * size) for i, size in enumerate(sizes)]
    found = pack(samples, 10, open_rows=8)
    assert [[ids[0] for ids, _ in row] for row in found] == [[0, 1, 3], [2], [4, 5], [6], [7]]
    assert [len(row) for row in pack(samples, 10, open_rows=0)] == [1] * 8


def test_long_answers_are_cut_with_a_warning(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = chat("Hi.", "word " * 200)
    found = rows(folder, written(tmp_path / "a.jsonl", long, chat("Hi.", "Hello!")), packing=False)
    assert sorted(int((row["labels"] != -100).sum()) for row in found)[1] > 30
    assert "1 of 2 samples were longer than data.block_size=64" in caplog.text


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (["Hi.", "a", "\nb" * 50], r"a\.jsonl:1 has nothing to predict after its first token"),
        (
            ["Hi.", "a", "\nb" * 50, "\nc"],
            r"a\.jsonl:1 has a prompt of \d+ tokens, and data\.block_size=64 leaves none",
        ),
    ],
)
@pytest.mark.parametrize("packing", [True, False])
def test_an_answer_of_the_first_token_alone_is_refused(
    tmp_path: Path, folder: Path, contents: list[str], message: str, packing: bool
) -> None:
    """The first token is predicted from no other, so that the row would have no target and a loss of NaN."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role != 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    roles = ["user", "assistant", "system", "assistant"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    path = written(tmp_path / "a.jsonl", {"messages": messages}, chat("Hi.", "Hello!"))
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / "tokenizer", path, packing=packing)


def test_functions_of_the_standard_library_are_the_default(folder: Path) -> None:
    data = CompletionDataModule(tokenizer=folder, block_size=256, max_samples=20)
    data.batch_size = 1
    data.setup()
    (row, *_) = data.val_set  # type: ignore[misc]
    text = AutoTokenizer.from_pretrained(folder).decode(row["input_ids"])
    assert "<|start|>user\ndef " in text and "<|start|>assistant\n" in text


def test_the_order_is_resumed(tmp_path: Path, folder: Path) -> None:
    path = written(tmp_path / "a.jsonl", *(chat(f"{n}?", f"{n}!") for n in range(30)))

    def loaded(state: Any = None) -> Any:
        data = CompletionDataModule(path, folder, block_size=32, packing=False, batch_size=2, seed=3)
        data.setup()
        if state is not None:
            data.load_state_dict(state)
        return data

    data = loaded()
    batches = iter(data.train_dataloader())
    for _ in range(4):
        next(batches)
    rest = list(iter(loaded(data.state_dict()).train_dataloader()))
    for mine, expected in zip(rest, batches, strict=True):
        assert mine.keys() == {"input_ids", "labels", "position_ids"}
        assert all(torch.equal(mine[name], expected[name]) for name in mine)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2 is not a line of JSON"),
        ({"text": "a"}, r"a\.jsonl:2 has neither 'messages' nor 'prompt' and 'completion' \(it has 'text'\)"),
        ([1], r"a\.jsonl:2 has neither.*it has list"),
        ({"prompt": "a", "completion": " "}, r"a\.jsonl:2 has an empty text under 'completion'"),
        ({"prompt": "", "completion": "a"}, r"a\.jsonl:2 has an empty text under 'prompt'"),
        ({"prompt": "a", "completion": 1}, r"a\.jsonl:2 has no text under 'completion'"),
        (chat("Hi."), r"a\.jsonl:2 has no message of the role 'assistant'"),
        (chat("Hi.", ""), r"a\.jsonl:2 has an empty text under 'content'"),
        ({"messages": []}, r"a\.jsonl:2 has no list of messages"),
        ({"messages": [{"role": "user"}]}, r"a\.jsonl:2 has a message without"),
        (chat("Hi " * 100, "Hello!"), r"a\.jsonl:2 has a prompt of \d+ tokens, and data\.block_size=64 leaves none"),
    ],
)
def test_a_line_that_is_not_right_is_named(tmp_path: Path, folder: Path, line: Any, message: str) -> None:
    path = written(tmp_path / "a.jsonl", chat("Hi.", "Hello!"), line)
    with pytest.raises(ValueError, match=message):
        rows(folder, path)


def test_missing_files_and_tokenizers(tmp_path: Path, folder: Path) -> None:
    path = written(tmp_path / "a.jsonl", chat("Hi.", "Hello!"))
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*none\.jsonl"):
        rows(folder, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        rows(folder, written(tmp_path / "empty.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer=.*none"):
        rows(tmp_path / "none", path)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="bare holds no tokenizer"):
        rows(bare, path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is a chat.*no chat template"):
        rows(tmp_path / "plain", path)


def test_sequences_longer_than_the_models_positions_are_refused(tmp_path: Path, folder: Path) -> None:
    path = written(tmp_path / "a.jsonl", *(chat("Hi.", "Hello!") for _ in range(3)))
    data = CompletionDataModule(path, block_size=4096, packing=False, batch_size=1)
    with pytest.raises(ValueError, match=r"sequences of 4096 tokens and the model takes 2048.*data\.block_size"):
        train(tmp_path, CausalLM(folder), data=data)


def test_the_models_tokenizer_is_used(tmp_path: Path, folder: Path) -> None:
    path = written(tmp_path / "a.jsonl", *(chat("Hi.", "Hello!") for _ in range(3)))
    data = CompletionDataModule(path, block_size=32, packing=False, batch_size=1)
    train(tmp_path, CausalLM(folder, warmup_steps=1), data=data, max_steps=1)
    assert data.vocab_size == 2048
    data = CompletionDataModule(path, block_size=32, packing=False, batch_size=1)
    with pytest.raises(ValueError, match=r"data\.tokenizer is null.*no folder"):
        train(tmp_path, CausalLM(config=FAMILIES["llama"].to_dict()), data=data)
