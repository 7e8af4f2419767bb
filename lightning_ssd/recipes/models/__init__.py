"""Models for the recipes. They need the extra `recipes`."""
# ruff: noqa: E402

from lightning_ssd.extras import check_extra

check_extra("transformers", "recipes", "A recipe's model")  # before the imports below, whose error names no extra

from lightning_ssd.recipes.models.bert import BERT
from lightning_ssd.recipes.models.causal_lm import CausalLM
from lightning_ssd.recipes.models.dit import DiT
from lightning_ssd.recipes.models.gpt import GPT
from lightning_ssd.recipes.models.language import LanguageModule
from lightning_ssd.recipes.models.lora import LoRACausalLM
from lightning_ssd.recipes.models.module import RecipeModule
from lightning_ssd.recipes.models.samples import SampleGrid
from lightning_ssd.recipes.models.t5 import T5
from lightning_ssd.recipes.models.tiny_llama import make_tiny_llama

__all__ = [
    "BERT",
    "GPT",
    "T5",
    "CausalLM",
    "DiT",
    "LanguageModule",
    "LoRACausalLM",
    "RecipeModule",
    "SampleGrid",
    "make_tiny_llama",
]
