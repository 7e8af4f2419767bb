"""The replay of a profiled step: Teraio's migrations of single tensors, simulated on any machine.

The results are predictions: trainings follow plans of units. The modules: `lifetime_profile` (uses of each tensor in a
step), `migration_simulator` (a step with migrations), `throughput` (of Teraio's plans and ours, by hardware),
`lifetime_report` (summary and pictures). Teraio's algorithm itself is in `planning`, whose planner "teraio" uses it for
units.
"""

from lightning_ssd.replay.lifetime_profile import (
    PHASES,
    LifetimeProfile,
    OperatorSpan,
    Phase,
    TensorClass,
    TensorLifetime,
)
from lightning_ssd.replay.lifetime_report import (
    active_share,
    describe_lifetimes,
    draw_active,
    draw_inactive,
    median_period,
    migratable_share,
    save_lifetimes,
)
from lightning_ssd.replay.migration_simulator import MigrationPrediction, simulate_migrations
from lightning_ssd.replay.throughput import (
    BANDWIDTHS,
    by_hardware,
    plan_roofline,
    plan_teraio,
    roofline,
)
