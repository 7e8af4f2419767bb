"""Models for the recipes."""

from lightning_ssd.models.gpt import GPT
from lightning_ssd.models.module import RecipeModule

__all__ = ["GPT", "RecipeModule"]
