"""Units of a model and their flat parameters: which weights are transferred and stepped together.

The modules, in the order in which they are best read:

- `compiled_modules`: modules and functions that `torch.compile` has compiled.
- `units`: units, usually one transformer block each, and their parts.
- `flat`: a flat parameter, a view of which each parameter is.
- `trained_parameter`: the base class of parameters with additional state during a training.
- `shared_memory`: host memory that parameters share with tensors of user code.
- `loaded`: checkpoint values of a dtype that a parameter can't hold.
- `materialize`: initial values of models that were built on `meta`, a unit at a time.
"""

from lightning_ssd.model_states.units.compiled_modules import (
    compiled_functions,
    compiled_methods,
    compiled_regions,
    is_compiled,
    is_region,
)
from lightning_ssd.model_states.units.flat import ALIGNMENT, FlatParameter, ParamView, in_memory_order, with_stride
from lightning_ssd.model_states.units.loaded import Loaded, LoadedValues, exact_value, loading_to_meta
from lightning_ssd.model_states.units.materialize import (
    MetaTensors,
    init_groups,
    materialize,
    materialize_buffers,
    materialize_on,
    meta_to_placeholder,
)
from lightning_ssd.model_states.units.shared_memory import (
    SharedMemory,
    check_apart,
    check_shareable,
    over,
    same_bits,
    same_stride,
)
from lightning_ssd.model_states.units.trained_parameter import TrainedParameter, hook_gradient, ordinary
from lightning_ssd.model_states.units.units import Unit, UnitPart, check_unit_classes, find_blocks, find_units
