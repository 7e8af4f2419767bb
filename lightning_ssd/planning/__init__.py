"""Planners: from the profiles of a model and a machine to a plan and its predicted step. No torch.

The modules, by subject, in the order in which they are best read:

- the data: `plan`, `model` and `hardware` (profiles), `validation` (of both).
- predictions: `simulator`, `step_tasks`, `event_simulation`, `stages`, `resident`, `calibration` (corrects
  profiles by timed steps).
- planners: `planners` (by name), `holistic` (the default), `shrunk` (its plans for smaller micro-batches),
  `whole_units`, `saved_groups` (helpers); `papers` with `ssdtrain`, `fuyou`, `lohan` and `phase`; `unit_lifetimes`
  (Teraio's rule for units) with `teraio` (its algorithm), `io_timeline` and `migration`.
- moves: `state_moves` (whether another placement of model states is worth it).
- reports: `report`, `endurance`.
"""

from lightning_ssd.planning.calibration import calibrate, calibrate_step_rate
from lightning_ssd.planning.endurance import DAY, YEAR, bytes_per_day, large_write_endurance, lifetime_seconds
from lightning_ssd.planning.hardware import INFINITE_STEP_RATE, HardwareProfile, HostOverhead
from lightning_ssd.planning.io_timeline import Floats
from lightning_ssd.planning.migration import (
    Bytes,
    Direction,
    Migration,
    MigrationMachine,
    MigrationPeriod,
    StepMemory,
    inactive_periods,
    sum_ranges,
    wrapped,
)
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
    largest_samples,
    largest_transient,
    make_report,
    render_answer,
    render_report,
    render_summary,
    swap_coefficient,
)
from lightning_ssd.planning.resident import resident_bytes
from lightning_ssd.planning.saved_groups import FixedPlacement, default_plan, default_window
from lightning_ssd.planning.shrunk import shrink_plan
from lightning_ssd.planning.simulator import Prediction, simulate
from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts
from lightning_ssd.planning.state_moves import MIN_MOVE_GAIN, is_better_elsewhere, most_seconds_elsewhere
from lightning_ssd.planning.step_tasks import OFFLOADED_LAUNCH
from lightning_ssd.planning.teraio import plan_in_longer_step
from lightning_ssd.planning.validation import (
    as_list,
    as_mapping,
    as_whole_numbers,
    check_not_negative,
    check_positive,
    from_mapping,
    load_json,
    write_text,
)
from lightning_ssd.planning.whole_units import checkpoint_all, keep_all, offload_inputs
