"""Placement: which parameters are offloaded, in which flat parameters and tiers, and moves between tiers.

The modules, in the order in which they are best read:

- `budget`: host memory or SSDs for each flat parameter, within a budget of bytes.
- `residency`: parameters that stay on the device with gradients and optimizer states.
- `states_config`: settings for a whole training.
- `grouping`: parameters grouped into flat parameters, with layouts and optimizers.
- `rank_states`: what several ranks share of the flat parameters, in host memory and on devices.
- `state_storage`: the scratch space on SSDs, and the store of each flat parameter.
- `unit_mover`: moves the values of one part of a unit after the other.
"""

from lightning_ssd.model_states.placement.budget import MemoryPlan, describe_smaller_formats, plan_memory
from lightning_ssd.model_states.placement.grouping import (
    FLAT_ELEMENTS,
    STAGED_FLAT_ELEMENTS,
    FlatSpec,
    check_state_format,
    compute_dtypes,
    flat_groups,
    flats_of,
    make_flat_params,
    make_spec,
)
from lightning_ssd.model_states.placement.rank_states import RankStates, describe_training, share_peer_memory
from lightning_ssd.model_states.placement.residency import (
    PlanTiers,
    UnitTiers,
    bytes_on_device,
    needs_master,
    off_device,
    offloaded_parameters,
    planned_residents,
    residents_within,
)
from lightning_ssd.model_states.placement.state_storage import KilledRun, make_staging, make_store
from lightning_ssd.model_states.placement.states_config import (
    GPU_MEMORY,
    GPU_SHARE,
    MOVABLE_GPU_SHARE,
    Setup,
    StatesConfig,
    moments_of,
)
from lightning_ssd.model_states.placement.unit_mover import TieredSpec, UnitMover, present_spec
