"""The tiny Llama that stands in for a downloaded model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_ssd.recipes.models.tiny_llama import VOCABULARY, cached_tiny_llama, make_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "deep" / "llama"
    make_tiny_llama(made)
    return made


def test_transformers_loads_model_and_tokenizer(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size == VOCABULARY
    special = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert len(special) == 3 and None not in special
    text = "def f(x: int) -> None:\n    return x  # ü∂\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text and ids.shape[1] < 0.7 * len(text)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


def test_chat_template_marks_the_assistants_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "a + b"}]
    chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    said = [id for id, mask in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "a + b<|stop|>"


def test_a_folder_with_files_is_not_changed(folder: Path) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match="not an empty folder"):
        make_tiny_llama(folder)
    assert sorted(folder.iterdir()) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_the_cached_one_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = cached_tiny_llama()
    assert made.is_relative_to(tmp_path) and str(made) in caplog.text
    times = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    assert cached_tiny_llama() == made and {file: file.stat().st_mtime_ns for file in made.iterdir()} == times
