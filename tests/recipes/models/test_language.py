"""GPT, BERT and T5 compute the same as transformers, count their FLOPs, and are saved and loaded unchanged."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import MaskedTextDataModule, SpanCorruptionDataModule, TextDataModule
from lightning_ssd.recipes.models import BERT, GPT, T5, LanguageModule


def bert(**settings: Any) -> BERT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=258, max_position_embeddings=32, hidden_size=32, num_hidden_layers=2)
    return BERT(**sizes | dict(num_attention_heads=2, lr=1e-2, warmup_steps=3) | settings)


def gpt(**settings: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=258, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return GPT(**sizes | dict(lr=1e-2, warmup_steps=3) | settings)


def t5(**settings: Any) -> T5:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=260, d_model=32, d_kv=8, d_ff=64, num_heads=2, num_layers=3)
    return T5(**sizes | dict(num_decoder_layers=2, lr=1e-2, warmup_steps=3) | settings)


def gated_t5() -> T5:
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


KINDS: dict[Any, Any] = {
    gpt: TextDataModule, bert: MaskedTextDataModule, t5: SpanCorruptionDataModule, gated_t5: SpanCorruptionDataModule,
}  # fmt: skip
EACH = pytest.mark.parametrize("make", [gpt, bert, t5])


def text(folder: Path, kind: Any, **settings: Any) -> Any:
    (folder / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    return kind(path=folder / "text.txt", **{"block_size": 32, "batch_size": 4, **settings})


class OneToken(TextDataModule):
    """Blocks without a token to predict."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "block_size": 1})


def trainer(folder: Path, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "limit_val_batches": 2}
    return pl.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, enable_checkpointing=False, **quiet | settings
    )


def some_batch(make: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (
        torch.randint(0, 258, (2, length), generator=generator) for length in (32, 32 if make in (gpt, bert) else 9)
    )
    if make in (gpt, bert):
        labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("make", KINDS)
def test_loss_is_that_of_transformers(make: Any) -> None:
    module: LanguageModule = make()
    module.configure_model()
    model: Any = module.model
    batch = some_batch(make)
    assert math.isclose(module.training_loss(batch).item(), model(**batch).loss.item(), rel_tol=1e-6)
    if make is gpt:  # which predicts each next token where a batch has no labels
        ids = batch["input_ids"]
        for alone in (ids, {"input_ids": ids}):
            assert math.isclose(module.training_loss(alone).item(), model(ids, labels=ids).loss.item(), rel_tol=1e-6)


@pytest.mark.parametrize("make", KINDS)
def test_flops_are_those_of_the_matrix_products(make: Any) -> None:
    module: LanguageModule = make()
    module.configure_model()
    batch = some_batch(make)
    # The counter knows matrix products, and only this kernel of attention consists of them.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module.predict(batch)
    assert counter.get_total_flops() == module.forward_flops(batch)


@EACH
def test_held_out_tokens_have_perplexity_and_accuracy(tmp_path: Path, make: Any) -> None:
    module, data = make(), text(tmp_path, KINDS[make], val_share=0.1)
    (seen,) = trainer(tmp_path).validate(module, data, verbose=False)
    assert math.isclose(seen["val/perplexity"], math.exp(seen["val/loss"]), rel_tol=1e-4)
    right, every = 0, 0
    for batch in list(data.val_dataloader())[:2]:
        logits, targets = module.predict(batch)
        right += int((logits.argmax(-1) == targets).sum())
        every += int((targets != -100).sum())
    assert math.isclose(seen["val/accuracy"], right / every, rel_tol=1e-5)


@pytest.mark.parametrize(("make", "precision"), [(gpt, "bf16-true"), (bert, "bf16-true"), (t5, "bf16-mixed")])
def test_16_bits_round_neither_loss_nor_counts(tmp_path: Path, make: Any, precision: str) -> None:
    run = trainer(tmp_path, max_steps=2, precision=precision, val_check_interval=2, log_every_n_steps=1)
    run.fit(make(), text(tmp_path, KINDS[make]))
    seen = run.callback_metrics
    assert seen["train/loss"].bfloat16() != seen["train/loss"]
    assert math.isclose(seen["val/perplexity"], math.exp(seen["val/loss"]), rel_tol=1e-4)
    assert 0 <= seen["val/accuracy"] <= 1


@EACH
def test_pretrained_folder_round_trip(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(3)
    saved: Any
    if make is gpt:
        config = GPT2Config(vocab_size=300, n_positions=40, n_embd=24, n_layer=3, n_head=3)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        saved = GPT2LMHeadModel(config)
    elif make is bert:
        sizes: Any = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40)
        saved = BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=40, **sizes))
    else:
        saved = T5ForConditionalGeneration(
            T5Config(vocab_size=300, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=2)
        )
    saved.save_pretrained(tmp_path / "saved")
    saved.config.decoder_start_token_id = 0  # which a folder need not have
    module = type(make())(pretrained=tmp_path / "saved")
    module.configure_model()
    model: Any = module.model
    assert all(part.training for part in model.modules())
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in saved.named_parameters())
    batch = some_batch(make)
    # Without dropout; GPT's activation is fused.
    assert math.isclose(module.training_loss(batch).item(), saved.eval()(**batch).loss.item(), rel_tol=1e-6)
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, text(tmp_path, KINDS[make]))
    model.save_pretrained(tmp_path / "tuned")
    tuned = type(module)(pretrained=str(tmp_path / "tuned"))
    tuned.configure_model()
    assert all(map(torch.equal, tuned.parameters(), module.parameters()))
    other = GPT if make is t5 else T5
    with pytest.raises(
        ValueError, match=rf"model\.pretrained=.*type '{module.config.model_type}', and {other.__name__}"
    ):
        other(pretrained=tmp_path / "saved")


def test_head_of_its_own() -> None:
    module = gated_t5()
    module.configure_model()
    model: Any = module.model
    assert model.lm_head.weight is not model.shared.weight
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert math.isclose(module.training_loss(some_batch(t5)).item(), math.log(260), rel_tol=0.2)


@EACH
def test_checkpoint_round_trip(tmp_path: Path, make: Any) -> None:
    module = make()
    run = trainer(tmp_path, max_steps=2, limit_val_batches=0)
    run.fit(module, text(tmp_path, KINDS[make]))
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert all(map(torch.equal, loaded.parameters(), module.parameters()))
    assert loaded.seen == module.seen == 2 * 4 * 32 and loaded.hparams == module.hparams


@pytest.mark.parametrize(
    ("make", "kind", "sizes", "message"),
    [
        (gpt, TextDataModule, {"vocab_size": 256}, r"257 token ids.*model\.vocab_size=257"),
        (gpt, TextDataModule, {"n_positions": 16}, r"sequences of 32 tokens.*data\.block_size.*model\.n_positions"),
        (bert, MaskedTextDataModule, {"vocab_size": 257}, r"258 token ids.*model\.vocab_size=258"),
        (t5, SpanCorruptionDataModule, {"vocab_size": 257}, r"259 token ids.*model\.vocab_size=259"),
        (bert, MaskedTextDataModule, {"max_position_embeddings": 16}, r"32 tokens.*model\.max_position_embeddings"),
        (lambda: GPT(258, 32, 32, 1, 2), OneToken, {}, r"data\.block_size=1 is out of range: set it to 2 or more"),
        (bert, TextDataModule, {}, r"no `labels`.*lightning_ssd\.recipes\.data\.MaskedTextDataModule"),
        (t5, TextDataModule, {}, r"no `labels`.*lightning_ssd\.recipes\.data\.SpanCorruptionDataModule"),
    ],
)
def test_data_that_does_not_fit_is_refused_at_start(
    tmp_path: Path, make: Any, kind: Any, sizes: dict[str, int], message: str
) -> None:
    module = make(**sizes)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, max_steps=1).fit(module, text(tmp_path, kind))
    assert module.seen == 0


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (GPT, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")),
        (BERT, ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        (T5, ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")),
    ],
)
def test_sizes_out_of_range_are_refused(kind: Any, names: tuple[str, ...]) -> None:
    for name in names:
        with pytest.raises(ValueError, match=rf"^model\.{name}=0 is out of range: set it to 1 or more"):
            kind(**{name: 0})
    for name in ("lr", "weight_decay", "warmup_steps"):
        with pytest.raises(ValueError, match=rf"^model\.{name}=-1 is out of range: set it to 0 or more"):
            kind(**{name: -1})


@EACH
def test_pretrained_folder_without_weights_is_refused(tmp_path: Path, make: Any) -> None:
    make().config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.pretrained=.* holds no weights"):
        make(pretrained=tmp_path).configure_model()


@pytest.mark.parametrize("kind", [GPT, BERT, T5])
def test_missing_pretrained_folder(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.pretrained=.*none"):
        kind(pretrained=tmp_path / "none")
