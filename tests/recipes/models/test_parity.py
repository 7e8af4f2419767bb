"""BERT and T5 of the recipes have plain Lightning's numbers, bit for bit, in all tiers.

T5 has the hard cases: the encoder's output is an input of every decoder block, the position bias of the first block one
of all others, and one embedding is read by encoder, decoder and head.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import MaskedTextDataModule, SpanCorruptionDataModule
from lightning_ssd.recipes.models import BERT, T5
from tests.support.compare import assert_same
from tests.support.products import combinations
from tests.support.trainings import make_trainer, nothing_left  # noqa: F401

T5_SIZES: dict[str, Any] = dict(vocab_size=260, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=3)


def bert(**settings: Any) -> BERT:
    return BERT(258, 24, 32, 3, 4, dropout=0.1, lr=1e-2, warmup_steps=2, **settings)


def t5(**settings: Any) -> T5:
    return T5(**T5_SIZES, num_decoder_layers=2, dropout=0.1, lr=1e-2, warmup_steps=2, **settings)


def untied_t5(**settings: Any) -> T5:
    return t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu", **settings)


MODELS = [bert, t5, untied_t5]
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {"offload": "none"},
    "host": {"offload": 1.0, "host_memory": "64MiB"},
    "ssd": {"offload": 1.0, "host_memory": "64MiB", "spill": "ssd_first"},
}


class Losses(pl.Callback):
    """Losses of the micro-batches."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach().clone())


def train(
    path: Path, strategy: Any, make: Any, callbacks: Sequence[pl.Callback] = (), *, steps: int, **settings: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses and the weights after `steps` steps of two micro-batches."""
    (path / "text.txt").write_text("All work and no play makes Jack a dull boy, said the cat.\n" * 40)
    precision = settings.pop("precision", "32-true")
    kind = MaskedTextDataModule if make is bert else SpanCorruptionDataModule
    data = kind(path=path / "text.txt", block_size=24, batch_size=2)
    losses = Losses()
    trainer = make_trainer(
        path,
        strategy,
        max_epochs=None,
        precision=precision,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[losses, *callbacks],
    )
    torch.manual_seed(5)
    model = make(**settings)
    trainer.fit(model, data)
    assert trainer.global_step == steps
    assert losses.values[0] != losses.values[-1]
    return losses.values, {name: value.detach().clone() for name, value in model.state_dict().items()}


@functools.cache
def plain(make: Any, steps: int, **settings: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the result of `train` under Lightning's own strategy."""
    with tempfile.TemporaryDirectory() as path:
        return train(Path(path), "auto", make, steps=steps, **settings)


@combinations(
    "precision, checkpointing, make, states, activations",
    ["32-true", "bf16-mixed"],
    [False, True],
    MODELS,
    ["gpu", "host", "ssd"],
    ACTIVATIONS,
    quick=[
        ("32-true", True, t5, "host", "ssd"),
    ],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path, precision: str, checkpointing: bool, make: Any, states: Any, activations: str
) -> None:
    settings: dict[str, Any] = {"precision": precision, "gradient_checkpointing": checkpointing, "steps": 3}
    places = ACTIVATIONS[activations]
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, gpu_memory="1B", staging_memory="16MiB", **places)
    assert_same(train(tmp_path, strategy, make, **settings), plain(make, **settings))
