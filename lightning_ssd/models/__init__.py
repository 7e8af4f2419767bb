"""Models for the recipes."""

from lightning_ssd.models.causal_lm import CausalLM
from lightning_ssd.models.dit import DiT
from lightning_ssd.models.gpt import GPT
from lightning_ssd.models.module import RecipeModule
from lightning_ssd.models.samples import SampleGrid

__all__ = ["GPT", "CausalLM", "DiT", "RecipeModule", "SampleGrid"]
