"""Saved tensors: what autograd keeps for backward, kept elsewhere. Knows autograd and `storage`, not Lightning."""

from lightning_ssd.activations.cache import BudgetError, CacheStats, TensorCache
from lightning_ssd.activations.config import OffloadConfig, make_tensor_cache
from lightning_ssd.activations.placement import Placement
from lightning_ssd.activations.weights import mark_weights

__all__ = [
    "BudgetError",
    "CacheStats",
    "OffloadConfig",
    "Placement",
    "TensorCache",
    "make_tensor_cache",
    "mark_weights",
]
