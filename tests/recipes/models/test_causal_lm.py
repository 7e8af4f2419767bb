"""Models of folders: the same training with every strategy, read from their files, and saved in the same layout."""

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Model, T5Config

from lightning_ssd import SaveFolder
from lightning_ssd._lightning import pl
from lightning_ssd.model_states import find_units
from lightning_ssd.recipes.models import CausalLM, LoRACausalLM
from lightning_ssd.recipes.models.pretrained import PretrainedFolder
from lightning_ssd.recipes.models.small_model import mixes_samples
from tests.support.compare import assert_same
from tests.support.folders import FAMILIES, VOCABULARY, Tokens, save_model, strategy, train
from tests.support.products import combinations


def module(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM(folder, **{"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 1} | settings)


@combinations(
    "family, states",
    FAMILIES,
    ["host", "ssd", "gpu"],
    quick=[("llama", "ssd"), ("gpt2", "host"), ("tied", "gpu")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_numbers_are_plain_lightnings(tmp_path: Path, family: str, states: str, dtype: torch.dtype) -> None:
    save_model(tmp_path / "model", family, dtype, shard="20KB")
    expected, found = module(tmp_path / "model"), module(tmp_path / "model")
    losses = [
        train(tmp_path, expected).callback_metrics["train/loss"],
        train(tmp_path, found, strategy(states)).callback_metrics["train/loss"],
    ]
    assert torch.equal(*losses)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("states", "precision"), [("auto", "bf16-true"), ("gpu", "32-true"), ("host", "32-true"), ("ssd", "bf16-true")]
)
def test_training_starts_from_the_folders_values(tmp_path: Path, states: str, precision: Any) -> None:
    saved = save_model(tmp_path / "model", "tied", shard="20KB")
    found: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.update({name: value.clone() for name, value in pl_module.state_dict().items()})

    train(tmp_path, module(tmp_path / "model"), strategy(states), callbacks=[Look()], max_steps=1, precision=precision)
    for name, value in saved.state_dict().items():
        mine = found[f"model.{name}"]
        # Offloaded weights of bf16-true have fp32 masters, which are exact.
        assert torch.equal(mine, value.to(mine.dtype)), name


def test_loss_is_that_of_transformers(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "model", "llama")
    ids = torch.randint(VOCABULARY, (2, 16))
    labels = ids.clone()
    labels[:, :7] = -100
    mine = module(tmp_path / "model")
    mine.configure_model()
    for batch, expected in ((ids, ids), ({"input_ids": ids}, ids), ({"input_ids": ids, "labels": labels}, labels)):
        loss = saved(input_ids=ids, labels=expected).loss.item()
        assert math.isclose(mine.training_loss(batch).item(), loss, rel_tol=1e-6)


def test_no_more_than_a_unit_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_model(tmp_path / "model", "llama", shard="20KB")
    held, most, reads = 0, 0, []
    read = PretrainedFolder.read

    def counted(self: PretrainedFolder, name: str) -> Tensor:
        nonlocal held, most
        values = read(self, name).numpy().copy()
        reads.append(name)
        held += values.nbytes
        most = max(most, held)
        weakref.finalize(values, freed, values.nbytes)
        return torch.from_numpy(values)  # which owns the array

    def freed(nbytes: int) -> None:
        nonlocal held
        held -= nbytes

    monkeypatch.setattr(PretrainedFolder, "read", counted)
    # One value is read twice, to see whether its parameter has it rounded; a mapped file needs no memory for that.
    largest = max(sum(p.nbytes for _, p in unit.parameters) for unit in find_units(saved))
    largest += max(parameter.nbytes for name, parameter in saved.named_parameters() if ".layers." in name)
    for states in ("ssd", "host", "gpu", "auto"):
        most, reads = 0, []
        train(tmp_path, module(tmp_path / "model"), strategy(states), max_steps=1)
        assert held == 0 and 0 < most <= largest
        assert set(reads) == set(saved.state_dict())


def layout(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of every file, or of the header of a safetensors file."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    return {n: c[: 8 + int.from_bytes(c[:8], "little")] if n.endswith(".safetensors") else c for n, c in files.items()}


@combinations(
    "family, states", FAMILIES, ["auto", "host", "ssd"], quick=[("llama", "ssd"), ("gpt2", "auto"), ("tied", "host")]
)
def test_the_trained_model_is_saved_in_the_layout_of_its_folder(tmp_path: Path, family: str, states: str) -> None:
    save_model(tmp_path / "model", family, torch.bfloat16, shard="20KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    trained = module(tmp_path / "model")
    train(tmp_path, trained, strategy(states), callbacks=[SaveFolder(tmp_path / "out" / "tuned")])
    assert layout(tmp_path / "out" / "tuned") == layout(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "tuned", dtype="auto", local_files_only=True)
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, trained.state_dict()[f"model.{name}"].bfloat16()), name
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["tuned"]


def test_a_folder_is_saved_now_and_then_and_replaced(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    seen: list[bytes] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            file = tmp_path / "tuned" / "model.safetensors"
            seen.append(file.read_bytes() if file.exists() else b"")

    callbacks = [SaveFolder(tmp_path / "tuned", every_n_steps=2), Look()]
    train(tmp_path, module(tmp_path / "model"), strategy("ssd"), callbacks=callbacks, accumulate_grad_batches=1)
    assert seen[0] == b"" != seen[1] == seen[2]
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() != seen[1]


def test_unused_tensors_and_other_prefixes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder of the model without its head, like GPT-2's own, and a folder with an additional tensor."""
    saved = save_model(tmp_path / "whole", "gpt2")
    base = saved.transformer
    assert isinstance(base, GPT2Model)
    base.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file(load_file(file) | {"more": torch.arange(3)}, file, metadata={"format": "pt"})
    mine = module(tmp_path / "base", lr=0.0)
    train(tmp_path, mine, strategy("ssd"), callbacks=[SaveFolder(tmp_path / "tuned")], max_steps=1)
    assert "does not use: 'more'" in caplog.text
    assert mine.model is not None
    assert_same(mine.model, saved)
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("states", ["auto", "ssd"])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, states: str) -> None:
    save_model(tmp_path / "model", "llama")
    expected = module(tmp_path / "model")
    train(tmp_path, expected, strategy(states), max_steps=4)
    last = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    first = module(tmp_path / "model")
    train(tmp_path, first, strategy(states), max_steps=4, callbacks=[last], enable_checkpointing=True)
    found = module(tmp_path / "model")
    (checkpoint,) = (tmp_path / "saved").glob("*step=2.ckpt")
    train(tmp_path, found, strategy(states), max_steps=4, ckpt_path=checkpoint)
    assert_same(found, expected)


def broken(folder: Path, kind: str) -> None:
    """Damages a folder."""
    file, config = folder / "model.safetensors", folder / "config.json"
    if kind == "no config":
        config.unlink()
    elif kind == "no weights":
        file.unlink()
    elif kind == "unknown type":
        config.write_text(json.dumps({"model_type": "unheard_of"}))
    elif kind == "no causal model":
        T5Config().save_pretrained(folder)
    elif kind == "quantized":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"bits": 4}}))
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors = load_file(file)
        if kind == "missing":
            del tensors["model.norm.weight"]
        elif kind == "shape":
            tensors["model.norm.weight"] = torch.ones(7)
        elif kind == "dtype":
            tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", "holds no config.json"),
        ("no weights", "neither model.safetensors nor its index"),
        ("unknown type", "no model type that transformers knows.*unheard_of"),
        ("no causal model", "'t5', which is no causal language model"),
        ("quantized", "quantized"),
        ("cut", "no whole file of safetensors"),
        ("missing", r"no tensor for 'model\.norm\.weight'"),
        ("shape", r"'model\.norm\.weight'.*\(7,\).*\(32,\)"),
        ("dtype", r"'model\.norm\.weight'.*dtype I8"),
    ],
)
def test_a_folder_that_is_not_right_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    save_model(tmp_path / "model", "llama")
    broken(tmp_path / "model", kind)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        module(tmp_path / "model").configure_model()


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", shard="20KB")
    lost = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        module(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"model_type": "unheard_of"}}, "unheard_of"),
        ({"config": {"vocab_size": 5}}, "model_type None"),
        ({"config": {"model_type": "t5"}}, "no causal language model"),
        ({"config": {"model_type": "llama"}, "pretrained": "."}, "exclude each other"),
        ({"config": {"model_type": "gemma2"}, "chunked_loss": True}, "computes other ones"),
    ],
)
def test_arguments_that_are_not_right_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**arguments)


def test_saving_over_the_folder_that_was_read_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    before = layout(tmp_path / "model")
    with pytest.raises(ValueError, match="is or holds the folder that the model comes from"):
        train(tmp_path, module(tmp_path / "model"), callbacks=[SaveFolder(tmp_path / "model")], max_steps=1)
    assert layout(tmp_path / "model") == before


@pytest.mark.parametrize("late", [False, True])
def test_random_weights(tmp_path: Path, late: bool) -> None:
    sizes = FAMILIES["llama"].to_dict()
    mine = CausalLM(config=sizes, draw_late=late, warmup_steps=1)
    train(tmp_path, mine, strategy("ssd"), callbacks=[SaveFolder(tmp_path / "tuned")])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="auto", local_files_only=True)
    assert mine.model is not None
    assert_same(loaded, mine.model)
    assert all(parameter.isfinite().all() for parameter in mine.parameters())
    if not late:
        expected = CausalLM(config=sizes, warmup_steps=1)
        train(tmp_path, expected)
        assert_same(mine, expected)


def test_checkpoints_hold_plain_types(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    mine = module(tmp_path / "model")
    train(tmp_path, mine).save_checkpoint(tmp_path / "last.ckpt")
    shutil.move(tmp_path / "model", tmp_path / "moved")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True, pretrained=tmp_path / "moved")
    assert_same(loaded, mine)


class PackedTokens(Tokens):
    """Rows of two samples."""

    def __init__(self, packing: bool = True) -> None:
        super().__init__()
        self.packing = packing

    def read(self) -> Any:
        train_set, val_set = super().read()
        return tuple(
            [row | {"position_ids": torch.arange(8).repeat(2)} for row in rows] for rows in (train_set, val_set)
        )


LAYERS = {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
SMALL = LAYERS | {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
SEPARATING: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"intermediate_size": 64},
    "gpt2": SMALL,
    "gemma2": SMALL | {"intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2},
    "qwen3_moe": SMALL | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
MIXING: dict[str, dict[str, Any]] = {
    "opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": LAYERS | {"hidden_size": 32, "state_size": 8},
    "biogpt": SMALL | {"intermediate_size": 64},
    "bert": SMALL | {"intermediate_size": 64, "is_decoder": True},
}


@pytest.mark.parametrize("kind", [*SEPARATING, *MIXING])
def test_samples_of_a_row_that_are_not_separated_are_refused(tmp_path: Path, kind: str) -> None:
    sizes = (SEPARATING | MIXING)[kind]
    mine = CausalLM(config={"model_type": kind, **sizes}, warmup_steps=1)
    if kind in SEPARATING:
        train(tmp_path, mine, data=PackedTokens(), max_steps=1)
        return
    with pytest.raises(ValueError, match=rf"'{kind}' computes.*set data\.packing=false"):
        train(tmp_path, mine, data=PackedTokens(), max_steps=1)
    train(tmp_path, mine, data=PackedTokens(packing=False), max_steps=1)


@pytest.mark.parametrize(
    ("kind", "mixes", "sizes"),
    [
        ("mistral", False, {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}),
        ("falcon", True, {}),
        ("phi3", False, {}),
    ],
)
def test_separation_is_measured_for_large_models(
    kind: str, mixes: bool, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is never made in its own size, and the random states of the training are unchanged."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)
    config = AutoConfig.for_model(kind, **sizes)
    before = torch.get_rng_state()
    assert mixes_samples(config) is mixes
    assert torch.equal(torch.get_rng_state(), before)


def test_separation_is_measured_for_small_vocabularies() -> None:
    assert mixes_samples(AutoConfig.for_model("llama", **SEPARATING["llama"] | {"vocab_size": 3})) is False


def test_an_architecture_that_can_not_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no model")

    config = {"model_type": "llama", **SEPARATING["llama"]}
    mine = CausalLM(config=config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fail)
    with pytest.raises(ValueError, match=r"can't be measured.*set data\.packing=false"):
        train(tmp_path, mine, data=PackedTokens())
    with pytest.raises(ValueError, match=r"chunked_loss=true.*can't be compared.*set it to false"):
        CausalLM(config=config, chunked_loss=True)


CHANGING: dict[str, dict[str, Any]] = {
    "gemma2": SEPARATING["gemma2"],
    "cohere": SMALL | {"intermediate_size": 64, "logit_scale": 0.5},
    "granite": SMALL | {"intermediate_size": 64, "logits_scaling": 2.0},
    "falcon_h1": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "lm_head_multiplier": 0.04}
    | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    "recurrent_gemma": SMALL | {"lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 32},
    "modernbert-decoder": SMALL | {"intermediate_size": 64},
    "bert": MIXING["bert"],
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING)
def test_chunks_are_refused_if_logits_are_more_than_the_output_layer(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"chunked_loss=true.*'{kind}' computes other ones: set it to false"):
        CausalLM(config={"model_type": kind, **CHANGING[kind]}, chunked_loss=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "opt"])
def test_the_loss_in_chunks_is_that_of_all_logits(kind: str) -> None:
    whole, chunked = (
        CausalLM(config={"model_type": kind, **(SEPARATING | MIXING)[kind]}, chunked_loss=chunks)
        for chunks in (False, True)
    )
    whole.configure_model()
    chunked.model = whole.model
    ids = torch.randint(VOCABULARY, (2, 16))
    assert whole.model is not None
    whole.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(chunked.training_loss(ids), whole.training_loss(ids))


def counted_flops(module: CausalLM, ids: Tensor, backward: bool) -> int:
    """Returns the FLOPs of the operators of a forward, and of its backward."""
    # The counter knows these kernels.
    module.causal_lm.set_attn_implementation("eager")
    if hasattr(module.causal_lm, "set_experts_implementation"):
        module.causal_lm.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        logits = module(ids)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **SEPARATING["llama"]},
        {"model_type": "qwen3_moe", **SEPARATING["qwen3_moe"], "num_experts": 16},
        {"model_type": "mixtral", **SEPARATING["llama"], "num_local_experts": 8},
        {
            "model_type": "gpt_oss",
            **SEPARATING["llama"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
        },
    ],
    ids=lambda config: config["model_type"],
)
@pytest.mark.parametrize("lora", [False, True])
def test_flops_are_those_of_the_operators(config: dict[str, Any], lora: bool) -> None:
    """Only experts that tokens are routed to count, and weights of a frozen base have no gradients."""
    config = {"num_key_value_heads": 2} | config
    mine = LoRACausalLM(config=config, rank=2, targets=["q_proj", "v_proj"]) if lora else CausalLM(config=config)
    mine.configure_model()
    ids = torch.randint(VOCABULARY, (2, 32))
    assert mine.forward_flops(ids) == pytest.approx(counted_flops(mine, ids, backward=False), rel=0.01)
    # The first layer needs no gradient of its input, which is a tenth of a model as small.
    assert mine.training_flops(ids) == pytest.approx(counted_flops(mine, ids, backward=True), rel=0.1)


def gemma3(**sizes: Any) -> dict[str, Any]:
    """Returns the configuration of a model of texts and images."""
    text = SEPARATING["gemma2"] | {"sliding_window": 8} | sizes
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"model_type": "gemma3", "text_config": text, "vision_config": vision | {"image_size": 28, "patch_size": 14}}


@pytest.mark.parametrize(("states", "chunked"), [("auto", False), ("ssd", True)])
def test_a_model_of_texts_and_images_is_trained_on_texts(tmp_path: Path, states: str, chunked: bool) -> None:
    expected, found = (CausalLM(config=gemma3(), chunked_loss=chunked, warmup_steps=1) for _ in range(2))
    train(tmp_path, expected, data=PackedTokens())
    train(tmp_path, found, strategy(states), data=PackedTokens())
    assert_same(found, expected)
    ids = torch.randint(VOCABULARY, (2, 16))
    assert expected.forward_flops(ids) == pytest.approx(counted_flops(expected, ids, backward=False), rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 0}, r"model\.config\.text_config\.vocab_size=0 is out of range"),
        ({"num_key_value_heads": 3}, r"=4 is not a multiple of model\.config\.text_config\.num_key_value_heads=3"),
        ({"max_position_embeddings": 8}, r"sequences of 16 tokens and the model takes 8"),
        ({"vocab_size": 32}, r"64 token ids and the model 32"),
    ],
)
def test_sizes_of_a_models_text_part_are_checked(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    data = Tokens()
    data.block_size, data.vocab_size = 16, 64  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        train(tmp_path, CausalLM(config=gemma3(**sizes)), data=data)


def test_a_folder_of_a_model_of_texts_and_images_is_refused(tmp_path: Path) -> None:
    train(tmp_path, CausalLM(config=gemma3()), callbacks=[SaveFolder(tmp_path / "model")], max_steps=1)
    with pytest.raises(ValueError, match=r"has encoders of images.*text part alone, of the model type 'gemma3_text'"):
        module(tmp_path / "model").configure_model()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_folder_whose_layout_transformers_converts_is_refused(tmp_path: Path, kind: str) -> None:
    """Files have each expert alone; the model has all of them in one parameter."""
    sizes = SEPARATING["qwen3_moe"] | {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4}
    config = AutoConfig.for_model(kind, **sizes)
    saved = AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"layout of files that transformers converts.*not supported: load the model"):
        module(tmp_path / "model").configure_model()
    save_file(saved.state_dict(), tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    mine = module(tmp_path / "model")
    mine.configure_model()
    assert mine.model is not None
    assert_same(mine.model, saved)
