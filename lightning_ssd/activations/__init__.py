"""Offloads and recomputes tensors that autograd saves for backward. Knows autograd and `storage`, not Lightning."""

from lightning_ssd.activations.backward_graph import backward_nodes
from lightning_ssd.activations.compiled_code import compile_seconds, records_cuda_graphs
from lightning_ssd.activations.config import OffloadConfig, make_offloader
from lightning_ssd.activations.graph import ForwardGraph, Saved
from lightning_ssd.activations.memory_budget import PartitionerBudget
from lightning_ssd.activations.offloader import ActivationOffloader, BudgetError, OffloadStats
from lightning_ssd.activations.placement import KeepAll, OffloadAll, OffloadExcess, OffloadOnPressure, PlacementPolicy
from lightning_ssd.activations.plan_mode import PlanMode, make_schedule
from lightning_ssd.activations.planned_excess import PlannedExcess
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.record import SavedStorage, State
from lightning_ssd.activations.resident_limit import AllocatorMeter, ResidentLimit
from lightning_ssd.activations.unit_dispatch_mode import UnitCall, UnitDispatchMode
from lightning_ssd.activations.weights import mark_weights

__all__ = [
    "AllocatorMeter",
    "BudgetError",
    "OffloadStats",
    "PlanMode",
    "ForwardGraph",
    "KeepAll",
    "OffloadConfig",
    "OffloadPolicy",
    "PartitionerBudget",
    "PlacementPolicy",
    "PlannedExcess",
    "ResidentLimit",
    "Saved",
    "SavedStorage",
    "State",
    "OffloadAll",
    "OffloadExcess",
    "OffloadOnPressure",
    "ActivationOffloader",
    "UnitCall",
    "UnitDispatchMode",
    "backward_nodes",
    "compile_seconds",
    "make_schedule",
    "make_offloader",
    "mark_weights",
    "records_cuda_graphs",
]
