"""Data for the recipes: samples in an order that a resumed run continues."""

from lightning_ssd.recipes.data.batch import IGNORED, Batch, count_items, count_samples, count_tokens, input_ids
from lightning_ssd.recipes.data.data_module import RecipeDataModule
from lightning_ssd.recipes.data.documents import documents
from lightning_ssd.recipes.data.finetune import CompletionDataModule
from lightning_ssd.recipes.data.images import ImageDataModule
from lightning_ssd.recipes.data.masked import MaskedTextDataModule
from lightning_ssd.recipes.data.span_corruption import SpanCorruptionDataModule
from lightning_ssd.recipes.data.text import TextDataModule

__all__ = [
    "IGNORED",
    "Batch",
    "CompletionDataModule",
    "ImageDataModule",
    "MaskedTextDataModule",
    "RecipeDataModule",
    "SpanCorruptionDataModule",
    "TextDataModule",
    "count_items",
    "count_samples",
    "count_tokens",
    "documents",
    "input_ids",
]
