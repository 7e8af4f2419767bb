"""Model families: transformers' models from tiny configurations, and modules of torch."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.compatibility.case import Case

VOCABULARY, LENGTH, ROWS = 64, 12, 2

Inputs = Callable[[torch.Generator], Mapping[str, Any]]


class Trained(pl.LightningModule):
    """Trains `model` on random inputs that depend on the batch index alone."""

    def __init__(self, model: nn.Module, inputs: Inputs, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.learning_rate = learning_rate

    def loss(self, index: int) -> Tensor:
        output = self.model(**self.inputs(torch.Generator().manual_seed(int(index))))
        loss = getattr(output, "loss", None)
        return loss if loss is not None else sum(_squares(output))  # type: ignore[return-value]

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: int, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def _squares(output: Any) -> list[Tensor]:
    """Returns the mean squares of all floating-point tensors in an output that autograd has made."""
    if isinstance(output, Tensor):
        return [output.float().pow(2).mean()] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [square for part in output for square in _squares(part)] if isinstance(output, list | tuple) else []


# ---- transformers ----


def tokens(generator: torch.Generator, name: str = "input_ids") -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {name: ids, "labels": ids}


def classes(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 2, (ROWS,), generator=generator)}


def images(size: int = 32) -> Inputs:
    return lambda generator: {
        "pixel_values": torch.randn(ROWS, 3, size, size, generator=generator),
        "labels": torch.randint(0, 2, (ROWS,), generator=generator),
    }


def pixels(size: int = 32) -> Inputs:
    return lambda generator: {"pixel_values": torch.randn(ROWS, 3, size, size, generator=generator)}


SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQ2SEQ = dict(
    vocab_size=VOCABULARY,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
VISION = {"image_size": 32, "patch_size": 8, "num_labels": 2} | {
    key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}


def pretrained(model: str, config: str, sizes: Mapping[str, Any], inputs: Inputs) -> Callable[[], Trained]:
    """Returns a function that makes a model of transformers with random weights."""

    def make() -> Trained:
        import transformers

        settings: Any = getattr(transformers, config)(**sizes)
        return Trained(getattr(transformers, model)(settings).train(), inputs, 1e-3)

    return make


def causal(name: str, sizes: Mapping[str, Any] = GROUPED, **more: Any) -> Case:
    made = pretrained(f"{name}ForCausalLM", f"{name}Config", {**sizes, **more}, tokens)
    return Case(f"transformers {name}ForCausalLM", made)


def other(model: str, config: str, inputs: Inputs, sizes: Mapping[str, Any], **more: Any) -> Case:
    return Case(f"transformers {model}", pretrained(model, config, {**sizes, **more}, inputs))


GPT2 = dict(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)


def _whisper(generator: torch.Generator) -> dict[str, Tensor]:
    features = torch.randn(ROWS, 8, 32, generator=generator)
    return {"input_features": features, "labels": tokens(generator)["labels"]}


def _wave(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, VOCABULARY, (ROWS, 3), generator=generator)
    return {"input_values": torch.randn(ROWS, 400, generator=generator), "labels": labels}


def _pairs(generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY - 1, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, **pixels()(generator), "return_loss": True}


def _segments(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 2, (ROWS, 32, 32), generator=generator)
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator), "labels": labels}


TRANSFORMERS = [
    Case("transformers GPT2LMHeadModel", pretrained("GPT2LMHeadModel", "GPT2Config", GPT2, tokens), quick=True),
    causal("Llama"),
    causal("Mistral", sliding_window=4),
    causal("Qwen2"),
    causal("Qwen3"),
    causal("Gemma"),
    causal("Gemma2"),
    other("Gemma3ForCausalLM", "Gemma3TextConfig", tokens, GROUPED, sliding_window=4),
    causal("Phi", SMALL),
    causal("Phi3", SMALL),
    causal("Falcon", SMALL),
    causal("GPTNeoX", SMALL),
    causal("GPTJ", GPT2, rotary_dim=4),
    causal("GPTNeo", SMALL, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]),
    causal("GPTBigCode", GPT2),
    causal("OPT", SMALL, ffn_dim=32, word_embed_proj_dim=16),
    causal("Bloom", SMALL, n_layer=2, n_head=2),
    causal("Mpt", SMALL, d_model=16, n_heads=2, n_layers=2, max_seq_len=32),
    causal("StableLm"),
    causal("Starcoder2"),
    causal("Olmo2"),
    causal("Cohere"),
    causal("Granite"),
    causal("Mixtral", EXPERTS),
    causal("Qwen2Moe", EXPERTS, shared_expert_intermediate_size=16),
    causal("Qwen3Moe", EXPERTS),
    causal("Olmoe", EXPERTS),
    causal("Mamba", SMALL, state_size=4, expand=2, conv_kernel=2, time_step_rank=2),
    causal("Mamba2", SMALL, state_size=4, expand=2, conv_kernel=2, num_heads=4, head_dim=8, n_groups=1, chunk_size=4),
    causal("Rwkv", SMALL, attention_hidden_size=16, context_length=32),
    causal("XGLM", SMALL, d_model=16, ffn_dim=32, num_layers=2, attention_heads=2),
    other(
        "XLNetLMHeadModel",
        "XLNetConfig",
        tokens,
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    ),
    other("BertForMaskedLM", "BertConfig", tokens, SMALL),
    other("BertForSequenceClassification", "BertConfig", classes, SMALL),
    other("RobertaForMaskedLM", "RobertaConfig", tokens, SMALL),
    other("AlbertForMaskedLM", "AlbertConfig", tokens, SMALL, embedding_size=8),
    other(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        tokens,
        dict(vocab_size=VOCABULARY, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=32),
    ),
    other("ElectraForMaskedLM", "ElectraConfig", tokens, SMALL, embedding_size=8),
    other("DebertaForMaskedLM", "DebertaConfig", tokens, SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    other(
        "DebertaV2ForMaskedLM", "DebertaV2Config", tokens, SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    other("MPNetForMaskedLM", "MPNetConfig", tokens, SMALL),
    other("RoFormerForMaskedLM", "RoFormerConfig", tokens, SMALL, embedding_size=16),
    other("FNetForMaskedLM", "FNetConfig", tokens, SMALL),
    other("ConvBertForMaskedLM", "ConvBertConfig", tokens, SMALL, embedding_size=16),
    other(
        "FunnelForMaskedLM",
        "FunnelConfig",
        tokens,
        {"vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1]},
    ),
    other("LongformerForMaskedLM", "LongformerConfig", tokens, SMALL, attention_window=4),
    other(
        "ModernBertForMaskedLM", "ModernBertConfig", tokens, SMALL, attn_implementation="sdpa", reference_compile=False
    ),
    other(
        "T5ForConditionalGeneration",
        "T5Config",
        tokens,
        dict(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
    other("BartForConditionalGeneration", "BartConfig", tokens, SEQ2SEQ),
    other("MBartForConditionalGeneration", "MBartConfig", tokens, SEQ2SEQ),
    other("PegasusForConditionalGeneration", "PegasusConfig", tokens, SEQ2SEQ),
    other("MarianMTModel", "MarianConfig", tokens, SEQ2SEQ),
    other(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _whisper,
        SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    other(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _wave,
        SMALL,
        conv_dim=[8, 8],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
    ),
    other("ViTForImageClassification", "ViTConfig", images(), VISION),
    other("DeiTForImageClassification", "DeiTConfig", images(), VISION),
    other("BeitForImageClassification", "BeitConfig", images(), VISION),
    other("Dinov2ForImageClassification", "Dinov2Config", images(), VISION),
    other(
        "SwinForImageClassification",
        "SwinConfig",
        images(),
        dict(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=2),
    ),
    other(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images(),
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 2, "layer_scale_init_value": 0.1},
    ),
    other(
        "ResNetForImageClassification",
        "ResNetConfig",
        images(),
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 2, "layer_type": "basic"},
    ),
    other(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", images(), {"depth_multiplier": 0.25, "num_labels": 2}
    ),
    other(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _segments,
        dict(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=2,
        ),
    ),
    other(
        "CLIPModel",
        "CLIPConfig",
        _pairs,
        {"text_config": SMALL | {"eos_token_id": VOCABULARY - 1}, "vision_config": VISION, "projection_dim": 8},
    ),
    other(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        pixels(),
        VISION
        | dict(
            decoder_num_attention_heads=2,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_intermediate_size=32,
        ),
    ),
]


# ---- modules of torch ----

WIDTH = 16


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randn(ROWS * 2, WIDTH, generator=generator)}


def sequences(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randn(ROWS, LENGTH, WIDTH, generator=generator)}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randn(ROWS * 2, 3, 16, 16, generator=generator)}


def numbers(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)}


class Cells(nn.Module):
    """A recurrent cell, unrolled over the sequence."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        state, outputs = None, []
        for step in input.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **how: Any) -> None:
        super().__init__()
        self.net = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **how)

    def forward(self, input: Tensor) -> Tensor:
        return self.net(input)[0]


class Attention(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **how)

    def forward(self, input: Tensor) -> Tensor:
        return self.attention(input, input, input)[0]


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.net(input, input.flip(1))


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(mlp(), mlp())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(input)))


class Listed(nn.Module):
    """Parameters in lists and dictionaries, used by the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.scales = nn.ParameterDict({"up": torch.ones(WIDTH), "down": torch.ones(WIDTH)})

    def forward(self, input: Tensor) -> Tensor:
        for weight in self.weights:
            input = torch.tanh(input @ weight * self.scales["up"]) * self.scales["down"]
        return input


class Shared(nn.Module):
    """One block, applied several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp()

    def forward(self, input: Tensor) -> Tensor:
        return self.block(self.block(self.block(input)))


class Autoencoder(nn.Module):
    """A VAE: samples within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Sequential(mlp(), mlp())

    def forward(self, input: Tensor) -> Tensor:
        mean, deviation = self.encoder(input).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * deviation).exp()
        divergence = 0.5 * (mean.pow(2) + deviation.exp() - 1 - deviation)
        return (self.decoder(code) - input).pow(2) + divergence


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.Dropout2d(0.1),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.GELU(), parametrize(nn.Linear(WIDTH, WIDTH)))


def module(name: str, make: Callable[[], nn.Module], inputs: Inputs = rows, **how: Any) -> Case:
    return Case(name, lambda: Trained(make(), inputs), **how)


MODULES = [
    module("MLP with LayerNorm", mlp),
    module("nn.LSTM", lambda: Recurrent(nn.LSTM), sequences),
    module(
        "nn.LSTM, bidirectional, projected, dropout",
        lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=8, dropout=0.1),
        sequences,
    ),
    module("nn.GRU", lambda: Recurrent(nn.GRU), sequences),
    module("nn.RNN", lambda: Recurrent(nn.RNN), sequences),
    module("nn.LSTMCell", lambda: Cells(nn.LSTMCell), sequences, quick=True),
    module("nn.GRUCell", lambda: Cells(nn.GRUCell), sequences),
    module("nn.RNNCell", lambda: Cells(nn.RNNCell), sequences),
    module("nn.Transformer", Seq2Seq, sequences),
    module(
        "nn.TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 2),
        lambda generator: {"src": sequences(generator)["input"]},
    ),
    module("nn.MultiheadAttention", Attention, sequences),
    module("nn.MultiheadAttention with bias_kv", lambda: Attention(add_bias_kv=True, add_zero_attn=True), sequences),
    module("nn.Embedding", lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), mlp()), numbers),
    module(
        "nn.Embedding(max_norm=1)", lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0), mlp()), numbers
    ),
    module("nn.EmbeddingBag", lambda: nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), mlp()), numbers),
    module("Convolutions, BatchNorm, GroupNorm, Dropout2d", convolutions, pictures),
    module(
        "nn.BatchNorm1d", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    ),
    module("nn.Bilinear", lambda: _Bilinear()),
    module("nn.PReLU", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH), nn.Linear(WIDTH, WIDTH))),
    module("weight_norm parametrization", lambda: parametrized(torch.nn.utils.parametrizations.weight_norm)),
    module("spectral_norm parametrization", lambda: parametrized(torch.nn.utils.parametrizations.spectral_norm)),
    module("orthogonal parametrization", lambda: parametrized(torch.nn.utils.parametrizations.orthogonal)),
    module("Tied weights", Tied, numbers, quick=True),
    module("A block that is applied several times", Shared),
    module("nn.ParameterList and nn.ParameterDict", Listed),
    module("VAE", Autoencoder),
    module("nn.Sequential of one nn.Linear", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))),
]


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return self.net(input, input)


CASES = [*MODULES, *TRANSFORMERS]
