"""Models for the recipes."""

from lightning_ssd.models.gpt import GPT

__all__ = ["GPT"]
