"""Data for the recipes: text as blocks of tokens, in an order that a resumed run takes up again."""

from lightning_ssd.data.batch import Batch, count_samples, count_tokens, input_ids
from lightning_ssd.data.loader import ResumableDataLoader
from lightning_ssd.data.text import TextDataModule

__all__ = ["Batch", "ResumableDataLoader", "TextDataModule", "count_samples", "count_tokens", "input_ids"]
