"""Saved tensors: what autograd keeps for backward, kept elsewhere. Knows autograd and `storage`, not Lightning."""

from lightning_ssd.activations.cache import BudgetError, CacheStats, TensorCache
from lightning_ssd.activations.config import OffloadConfig, make_tensor_cache
from lightning_ssd.activations.director import Director, make_program
from lightning_ssd.activations.forward import Visit
from lightning_ssd.activations.graph import ForwardGraph, Saved
from lightning_ssd.activations.placement import Placement, SendAll, SendIfShort
from lightning_ssd.activations.weights import mark_weights

__all__ = [
    "BudgetError",
    "CacheStats",
    "Director",
    "ForwardGraph",
    "OffloadConfig",
    "Placement",
    "Saved",
    "SendAll",
    "SendIfShort",
    "TensorCache",
    "Visit",
    "make_program",
    "make_tensor_cache",
    "mark_weights",
]
