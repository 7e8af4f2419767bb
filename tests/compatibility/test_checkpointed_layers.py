"""Layers of transformers' models are checkpointed, each of them, and gradients are those of plain training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.compatibility.families import TRANSFORMERS
from tests.support.compare import assert_same
from tests.support.offloader import Directed, open_offloader

MODELS = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",  # its cache is that of a sliding window
    "MixtralForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "ViTForImageClassification",
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformers(tmp_path: Path, name: str) -> None:
    (case,) = (case for case in TRANSFORMERS if case.name == f"transformers {name}")
    torch.manual_seed(0)
    module: Any = case.module()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    layers = [layer.train() for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def forward(index: int) -> Tensor:
        torch.manual_seed(index)
        loss: Tensor = module.loss(index)
        return loss

    def gradients(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss.detach(), *(gradient for gradient in found if gradient is not None)]

    expected = [gradients(forward(index)) for index in range(2)]
    with open_offloader(tmp_path, tier="host") as offloader:
        directed = Directed(offloader, layers)
        with directed.record():
            loss = forward(0)
        gradients(loss)
        saved = directed.end_record()
        checkpointed = frozenset(directed.graph.checkpoint_bytes())
        assert {unit_call.unit for unit_call in checkpointed} == set(range(len(layers)))
        for index in range(2):
            with directed.direct({item.buffer: "keep" for item in saved}, checkpointed):
                loss = forward(index)
            assert_same(gradients(loss), expected[index])
            directed.end_direct()
