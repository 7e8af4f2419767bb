"""When to measure, plan and apply. Knows a training by a small protocol, and no Lightning.

The modules, by subject, in the order in which they are best read:

- the meeting with Lightning: `protocol`.
- the decision of `offload="auto"`: `auto_plan`, `known_memory` (a micro-batch that may need more memory), `obstacles`,
  `unplanned_checkpoints` (checkpointed units in the first steps).
- a plan: `plan_cycle` (its life), `profiled_steps`, `plan_maker`, `recompilation` (compiled code saves less),
  `plan_runner` (applies and measures it), `plan_report`, `step_timer`.
- sizes of micro-batches, and rows of a plan: `batches`.
"""

from lightning_ssd.autoplan.auto_plan import AutoPlan, Outcome
from lightning_ssd.autoplan.obstacles import CompiledCode, compiled_units, obstacle_to_planning
from lightning_ssd.autoplan.plan_cycle import PlanCycle
from lightning_ssd.autoplan.plan_maker import PlanOptions
from lightning_ssd.autoplan.plan_runner import COMPARED_STEPS, WARMUP_AFTER_CHANGE, Comparison, PlanRunner
from lightning_ssd.autoplan.profiled_steps import ProfiledSteps
from lightning_ssd.autoplan.protocol import MicroBatchPlanner, StatesOwner, Training
