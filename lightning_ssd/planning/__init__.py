"""Planners: from the profiles of a model and a machine to a plan and its predicted step. No torch.

The modules, by subject, in the order in which they are best read:

- the data: `plan`, `model` and `hardware` (profiles), `validation` (of both).
- predictions: `simulator`, `step_tasks`, `event_simulation`, `stages`, `resident`, `calibration` (corrections).
- planners: `planners` (by name), `holistic` (the default), `few_launches`, `saved_groups` (helpers); `papers` with
  `ssdtrain`, `fuyou`, `lohan` and `phase`; `unit_lifetimes` (Teraio's rule for units).
- compiled code: `saved_timeline`.
- single tensors (Teraio): `lifetimes`, `teraio`, `evictions`, `io_timeline`, `migration`, `migration_simulator`,
  `transfer_bounds`.
- reports: `report`, `endurance`, `roofline`, `traffic`.
"""

from lightning_ssd.planning.calibration import calibrate, calibrate_step_rate
from lightning_ssd.planning.endurance import YEAR, bytes_per_day, large_write_endurance, lifetime_seconds
from lightning_ssd.planning.hardware import HardwareProfile, HostOverhead
from lightning_ssd.planning.holistic import exceeds_no_more
from lightning_ssd.planning.lifetimes import (
    CLASSES,
    PHASES,
    LifetimeProfile,
    OperatorSpan,
    Phase,
    TensorClass,
    TensorLifetime,
)
from lightning_ssd.planning.migration import MigrationMachine
from lightning_ssd.planning.model import (
    ModelProfile,
    OperatorProfile,
    PartProfile,
    UnitProfile,
    is_later_call,
    unit_call_name,
)
from lightning_ssd.planning.plan import PartPlan, Plan, UnitPlan
from lightning_ssd.planning.planners import PLANNERS, make_plan, plan_for_least_memory
from lightning_ssd.planning.report import (
    find_what_ifs,
    make_report,
    render_report,
    render_summary,
    render_what_ifs,
    swap_coefficient,
)
from lightning_ssd.planning.resident import resident_bytes
from lightning_ssd.planning.roofline import BANDWIDTHS, Prices, best_throughput, by_hardware, cost_table, roofline
from lightning_ssd.planning.saved_groups import FixedPlacement, default_plan, default_window, plan_with_coefficient
from lightning_ssd.planning.saved_timeline import (
    SavedTimeline,
    StoragePlan,
    needed_early,
    plan_storages,
    smaller_budget,
)
from lightning_ssd.planning.simulator import Prediction, replay, simulate
from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts
from lightning_ssd.planning.traffic import DIRECTIONS, Traffic, migration_traffic, planned_traffic, recorded_traffic
from lightning_ssd.planning.validation import (
    MOST_BYTES,
    as_mapping,
    check_not_negative,
    check_positive,
    parse_json,
)

__all__ = [
    "BANDWIDTHS",
    "CLASSES",
    "DIRECTIONS",
    "MOST_BYTES",
    "PHASES",
    "PLANNERS",
    "YEAR",
    "FixedPlacement",
    "HardwareProfile",
    "HostOverhead",
    "LifetimeProfile",
    "MigrationMachine",
    "ModelProfile",
    "OperatorProfile",
    "OperatorSpan",
    "Phase",
    "PartPlan",
    "PartProfile",
    "Plan",
    "Prediction",
    "Prices",
    "SavedTimeline",
    "StoragePlan",
    "TensorClass",
    "TensorLifetime",
    "TierSpeed",
    "Traffic",
    "UnitPlan",
    "UnitProfile",
    "as_mapping",
    "best_throughput",
    "by_hardware",
    "bytes_per_day",
    "calibrate",
    "calibrate_step_rate",
    "check_not_negative",
    "check_positive",
    "cost_table",
    "default_plan",
    "default_window",
    "exceeds_no_more",
    "find_what_ifs",
    "is_later_call",
    "large_write_endurance",
    "lifetime_seconds",
    "make_plan",
    "migration_traffic",
    "needed_early",
    "make_report",
    "offload_amounts",
    "parse_json",
    "plan_for_least_memory",
    "plan_storages",
    "plan_with_coefficient",
    "planned_traffic",
    "recorded_traffic",
    "render_report",
    "render_summary",
    "render_what_ifs",
    "replay",
    "resident_bytes",
    "roofline",
    "simulate",
    "smaller_budget",
    "swap_coefficient",
    "unit_call_name",
]
