"""Model states off the device: weights, gradients, master weights, optimizer states. Imports torch, not Lightning.

The modules, by subject, in the order in which they are best read:

- events of a training: `model_states`, a facade over the others; `config` (settings), `build` (construction), `move`
  with `unit_mover` (changes between two steps), `restorer` and `ending` (the end).
- choice and grouping of offloaded parameters: `units`, `residency` (parameters that are kept on the device),
  `grouping`, `flat` (flat parameters), `offloaded`, `materialize` and `loaded` (initial values), `masters` (master
  weights of resident parameters).
- stores of values: `layout` (arrays in memory), `split` (a format), `state_store`, `buffers`, `state_storage`,
  `budget` (which tier), `staged` (values on the host for user code), `locations` (the location table).
- weights for a forward: `unit_hooks`, `prefetcher`; `regions` (compiled modules) and `compile` (calls of them).
- gradients: `gradient_offload`, `gradient`, `waiting_gradient` (on the device until a step), `grad_dtype`, `grad_scale`
  (clipping and loss scales).
- optimizer steps: `step_scheduler` (when), `group_options`, `step` (one flat parameter), `step_work`, `step_history`
  (roll-back), `weights_first`; `optimizers`, `adam` and `adam_c` (kernels of the CPU); `device_steps`,
  `device_stepper`, `piece_transfers` and `adam_cuda` (steps of the GPU).
- the user's optimizers: `user_optimizers`, `optimizer_hooks`, `optimizer_state`, `whole_step`.
- operators of user code on offloaded tensors: `access`, `parameter`, `torch_functions`, `autograd_forwards` (calls of
  autograd functions), `operands`, `references` (that autograd saves), `sources`, `gradient_access`, `shared_memory`,
  `summoned` (whole weights).
- checkpoints: `state_dicts`, `values` (in nested containers), `lazy`, `sharded`, `replace` (of files).
- `recover=True`: `journal`, `settings`, `plain_data`.
"""

from lightning_ssd.model_states.build import make_model_states
from lightning_ssd.model_states.config import GPU_MEMORY, GPU_SHARE, MOVABLE_GPU_SHARE, Setup, StatesConfig
from lightning_ssd.model_states.ending import Ending
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.grad_scale import is_power_of_two
from lightning_ssd.model_states.journal import CommitRecord
from lightning_ssd.model_states.layout import Layout, StagedState
from lightning_ssd.model_states.lazy import LazyTensor, load_lazy, note_unread, save
from lightning_ssd.model_states.loaded import Loaded, LoadedValues, exact_value, loading_to_meta
from lightning_ssd.model_states.locations import (
    StateClass,
    TensorLocation,
    count_stored_bytes,
    locate_tensors,
    state_tensors,
    states_in_memory,
)
from lightning_ssd.model_states.materialize import MetaTensors, materialize_on, meta_to_placeholder
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.move import move_model_states, present_tiers, regroup_model_states
from lightning_ssd.model_states.optimizers import AdamOptimizer, StepHalf, StepInput
from lightning_ssd.model_states.plain_data import NotPlainError, PlainData, encode
from lightning_ssd.model_states.regions import compiled_regions, is_compiled
from lightning_ssd.model_states.replace import find_replaced
from lightning_ssd.model_states.residency import PlanTiers, UnitTiers, bytes_on_device, offloaded_parameters
from lightning_ssd.model_states.settings import Settings, describe, differences, model_settings, show, type_name
from lightning_ssd.model_states.sharded import is_sharded, load_sharded, save_sharded
from lightning_ssd.model_states.units import Unit, UnitPart, check_unit_classes, find_blocks, find_units
from lightning_ssd.model_states.user_optimizers import (
    parameters_of,
    register_optimizer,
    runs_within_step,
    stepped_whole,
    steps_whole,
    unscales_itself,
    zeroes_otherwise,
)
from lightning_ssd.model_states.values import replace_values

__all__ = [
    "GPU_MEMORY",
    "GPU_SHARE",
    "MOVABLE_GPU_SHARE",
    "AdamOptimizer",
    "CommitRecord",
    "Ending",
    "FlatParameter",
    "Layout",
    "LazyTensor",
    "Loaded",
    "LoadedValues",
    "MetaTensors",
    "ModelStates",
    "NotPlainError",
    "PlainData",
    "PlanTiers",
    "Settings",
    "Setup",
    "StagedState",
    "StateClass",
    "StatesConfig",
    "StepHalf",
    "StepInput",
    "TensorLocation",
    "Unit",
    "UnitPart",
    "UnitTiers",
    "bytes_on_device",
    "check_unit_classes",
    "compiled_regions",
    "count_stored_bytes",
    "describe",
    "differences",
    "encode",
    "exact_value",
    "find_blocks",
    "find_replaced",
    "find_units",
    "is_compiled",
    "is_power_of_two",
    "is_sharded",
    "load_lazy",
    "load_sharded",
    "loading_to_meta",
    "locate_tensors",
    "make_model_states",
    "materialize_on",
    "meta_to_placeholder",
    "model_settings",
    "note_unread",
    "move_model_states",
    "offloaded_parameters",
    "register_optimizer",
    "regroup_model_states",
    "replace_values",
    "runs_within_step",
    "save",
    "save_sharded",
    "show",
    "state_tensors",
    "states_in_memory",
    "stepped_whole",
    "steps_whole",
    "parameters_of",
    "present_tiers",
    "type_name",
    "unscales_itself",
    "zeroes_otherwise",
]
