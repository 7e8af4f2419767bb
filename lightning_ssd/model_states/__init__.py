"""Model states off the device: weights, gradients, master weights, optimizer states. Imports torch, not Lightning.

The modules, by subject: a folder imports only folders above it in this list, through their `__init__`, and no module
beside the folders.

- `units`: units of a model, parts, flat parameters, initial values.
- `stores`: compute weights, master weights and optimizer states in host memory or on SSDs.
- `optimizers`: the user's optimizers, and their arithmetic on flat parameters.
- `weights`: weights on the device, prefetched ones and resident ones with master weights.
- `gradients`: gradients, offloaded, summed, clipped and scaled.
- `access`: reads and writes of offloaded tensors by user code.
- `forwards`: hooks that keep the weights of modules on the device while their code runs.
- `journal`: the last committed step, from which `recover=True` resumes.
- `checkpoints`: state dicts, checkpoint files, the model after the end of training.
- `placement`: which parameters are offloaded, their flat parameters and tiers, moves between tiers.
- `steps`: optimizer steps on the CPU and on the device.

Beside the folders: `model_states`, a facade that passes the events of a training on; `build` (construction), `move`
(changes between two steps) and `location_table` (tier and address of every tensor).
"""

from lightning_ssd.model_states.build import make_model_states
from lightning_ssd.model_states.checkpoints import (
    LazyTensor,
    find_replaced,
    is_sharded,
    load_lazy,
    load_sharded,
    note_unread,
    put_in_place,
    replace_values,
    save,
    save_sharded,
)
from lightning_ssd.model_states.gradients import is_power_of_two
from lightning_ssd.model_states.journal import (
    CommitRecord,
    NotPlainError,
    PlainData,
    RunFingerprint,
    describe,
    differences,
    encode,
    model_settings,
    show,
    type_name,
)
from lightning_ssd.model_states.location_table import (
    TensorLocation,
    count_stored_bytes,
    locate_tensors,
    state_tensors,
    states_in_memory,
)
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.move import move_model_states, present_tiers, regroup_model_states
from lightning_ssd.model_states.optimizers import (
    AdamOptimizer,
    RankMean,
    StepHalf,
    StepInput,
    begin_loading_kernel,
    parameters_of,
    register_optimizer,
    runs_within_step,
    stepped_whole,
    steps_whole,
    unscales_itself,
    zeroes_otherwise,
)
from lightning_ssd.model_states.placement import (
    GPU_MEMORY,
    GPU_SHARE,
    MOVABLE_GPU_SHARE,
    PlanTiers,
    Setup,
    StatesConfig,
    UnitTiers,
    bytes_on_device,
    check_state_format,
    compute_dtypes,
    describe_smaller_formats,
    moments_of,
    offloaded_parameters,
)
from lightning_ssd.model_states.stores import Layout, StagedState
from lightning_ssd.model_states.units import (
    FlatParameter,
    Loaded,
    LoadedValues,
    MetaTensors,
    Unit,
    UnitPart,
    check_unit_classes,
    compiled_functions,
    compiled_regions,
    exact_value,
    find_blocks,
    find_units,
    is_compiled,
    loading_to_meta,
    materialize_on,
    meta_to_placeholder,
)
