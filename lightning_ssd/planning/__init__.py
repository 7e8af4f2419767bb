"""Numbers in, plan out: pure Python, no torch."""

from lightning_ssd.planning.endurance import DRIVES, Drive, endurance_bytes, large_write_endurance
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.plan import Plan, UnitPlan
from lightning_ssd.planning.planners import PLANNERS, make_plan
from lightning_ssd.planning.report import Report, make_report, render_report
from lightning_ssd.planning.simulator import Prediction, replay, simulate
from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts
from lightning_ssd.planning.transformer import transformer_profile

__all__ = [
    "DRIVES",
    "PLANNERS",
    "Drive",
    "HardwareProfile",
    "ModelProfile",
    "OperatorProfile",
    "Plan",
    "Prediction",
    "Report",
    "TierSpeed",
    "UnitPlan",
    "UnitProfile",
    "endurance_bytes",
    "large_write_endurance",
    "make_plan",
    "make_report",
    "offload_amounts",
    "render_report",
    "replay",
    "simulate",
    "transformer_profile",
]
