"""Planners: from the profiles of a model and a machine to a plan and its predicted step. Pure Python, no torch."""

from lightning_ssd.planning.endurance import large_write_endurance
from lightning_ssd.planning.hardware import HardwareProfile, HostOverhead
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.plan import Plan, UnitPlan
from lightning_ssd.planning.planners import PLANNERS, calibrate, calibrate_step_rate, make_plan, plan_for_least_memory
from lightning_ssd.planning.report import Report, make_report, render_report, render_summary, swap_coefficient
from lightning_ssd.planning.saved_groups import FixedPlacement, default_plan, plan_with_coefficient
from lightning_ssd.planning.saved_timeline import SavedTimeline, StoragePlan, free_bytes, plan_storages
from lightning_ssd.planning.resident import resident_bytes
from lightning_ssd.planning.simulator import Prediction, replay, simulate
from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts

__all__ = [
    "PLANNERS",
    "HardwareProfile",
    "HostOverhead",
    "LifetimeProfile",
    "ModelProfile",
    "OperatorProfile",
    "Plan",
    "Prediction",
    "Report",
    "SavedTimeline",
    "StoragePlan",
    "FixedPlacement",
    "TierSpeed",
    "UnitPlan",
    "UnitProfile",
    "calibrate",
    "calibrate_step_rate",
    "free_bytes",
    "large_write_endurance",
    "make_plan",
    "make_report",
    "offload_amounts",
    "plan_for_least_memory",
    "plan_storages",
    "plan_with_coefficient",
    "render_report",
    "render_summary",
    "replay",
    "resident_bytes",
    "simulate",
    "swap_coefficient",
    "default_plan",
]
