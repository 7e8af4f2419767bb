"""Offloads and recomputes tensors that autograd saves for backward. Knows autograd and the storage, not Lightning.

The modules, by subject, in the order in which they are best read:

- a saved tensor, from pack to unpack: `offloader`, `decide` (its treatment), `policy` (the rules in force), `record`
  (one saved storage), `micro_batch` (the order of storages), `pipeline` (micro-batches of a schedule), `in_flight`
  (evictions).
- choice of offloaded tensors: `placement` (rules), `resident_limit` (bytes that fit), `config` (the user's arguments).
- tiers: `tier` (the interface), `host`, `ssd_base`, `ssd` (staged), `direct` (GPUDirect Storage).
- special tensors: `weights`, `wrappers` (such as DTensor).
- plans of operators: `unit_dispatch_mode`, `autocast` (within a mode), `plan_mode`, `graph` (a recorded forward),
  `transient_memory`, `recompute`, `checkpointed_call` and `rerun_state` (checkpointed units).
- compiled code: `compiled_code`, `untraced`, `dropped_tensors` (offloaded at once), and
  `backward_graph` (nodes of a loss).
"""

from lightning_ssd.activations.autocast import calls_operators, outer_autocast
from lightning_ssd.activations.backward_graph import backward_nodes
from lightning_ssd.activations.checkpointed_call import (
    Arguments,
    CheckpointedCall,
    EmptyCaches,
    allows_checkpointing,
    rerun_arguments,
)
from lightning_ssd.activations.compiled_code import (
    GuardHook,
    around_call,
    calls_are_compiled,
    check_no_cuda_graphs,
    count_cuda_graphs,
    is_compiled_function,
    runs_cuda_graphs,
    wrap_function,
)
from lightning_ssd.activations.config import (
    HOST_MEMORY,
    SMALLEST_TIER,
    OffloadConfig,
    make_auto_placement,
    make_offloader,
)
from lightning_ssd.activations.decide import is_activation
from lightning_ssd.activations.graph import (
    COMPILED_OPERATOR,
    Buffer,
    ForwardGraph,
    Operation,
    Saved,
    changes_statistics,
    is_random,
    tensors_of,
    written,
)
from lightning_ssd.activations.host import HostTier
from lightning_ssd.activations.offloader import ActivationOffloader, BudgetError
from lightning_ssd.activations.pipeline import StagePass
from lightning_ssd.activations.placement import KeepAll, OffloadAll, OffloadExcess, PlacementPolicy
from lightning_ssd.activations.plan_mode import OpSchedule, PlanMode, make_schedule
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.record import SavedStorage, check_version
from lightning_ssd.activations.rerun_state import UnitProof, kind_of, other_random_states
from lightning_ssd.activations.resident_limit import AllocatorMeter, ResidentLimit
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.activations.ssd_base import SSDTierBase
from lightning_ssd.activations.transient_memory import Interval
from lightning_ssd.activations.unit_dispatch_mode import (
    Segment,
    UnitCall,
    UnitDispatchMode,
    in_backward,
    wraps,
)
from lightning_ssd.activations.weights import (
    SavedWeight,
    is_weight,
    mark_offloaded,
    mark_weights,
    offloaded_weights,
    storage_of,
    unmark_offloaded,
    weights_of,
)
