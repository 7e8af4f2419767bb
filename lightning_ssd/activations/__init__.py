"""Offloads and recomputes tensors that autograd saves for backward. Knows autograd and `storage`, not Lightning."""

from lightning_ssd.activations.backward_graph import backward_nodes
from lightning_ssd.activations.config import OffloadConfig, make_offloader
from lightning_ssd.activations.graph import ForwardGraph, Saved
from lightning_ssd.activations.offloader import ActivationOffloader, BudgetError, OffloadStats
from lightning_ssd.activations.placement import OffloadAll, OffloadExcess, OffloadOnPressure, PlacementPolicy
from lightning_ssd.activations.plan_mode import PlanMode, make_schedule
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.resident_limit import AllocatorMeter, ResidentLimit
from lightning_ssd.activations.unit_dispatch_mode import UnitCall, UnitDispatchMode
from lightning_ssd.activations.weights import mark_weights

__all__ = [
    "AllocatorMeter",
    "BudgetError",
    "OffloadStats",
    "PlanMode",
    "ForwardGraph",
    "OffloadConfig",
    "OffloadPolicy",
    "PlacementPolicy",
    "ResidentLimit",
    "Saved",
    "OffloadAll",
    "OffloadExcess",
    "OffloadOnPressure",
    "ActivationOffloader",
    "UnitCall",
    "UnitDispatchMode",
    "backward_nodes",
    "make_schedule",
    "make_offloader",
    "mark_weights",
]
