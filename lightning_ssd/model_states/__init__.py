"""Model states off the device: weights, gradients, master weights, optimizer states. Imports torch, not Lightning."""

from lightning_ssd.model_states.build import make_model_states
from lightning_ssd.model_states.compile import compiled_regions, is_compiled
from lightning_ssd.model_states.config import GPU_SHARE, Setup, StatesConfig
from lightning_ssd.model_states.ending import Ending
from lightning_ssd.model_states.journal import CommitRecord
from lightning_ssd.model_states.lazy import LazyTensor, load_lazy, save
from lightning_ssd.model_states.loaded import Loaded, exact_value, loading_to_meta, recording_loads, take_initial_values
from lightning_ssd.model_states.materialize import MetaTensors, materialize_on, meta_to_placeholder
from lightning_ssd.model_states.model_states import ModelStates
from lightning_ssd.model_states.move import move_model_states, regroup_model_states
from lightning_ssd.model_states.replace import find_replaced
from lightning_ssd.model_states.residency import bytes_on_device, offloaded_parameters
from lightning_ssd.model_states.settings import Settings, describe, differences, model_settings
from lightning_ssd.model_states.sharded import is_sharded, load_sharded, save_sharded
from lightning_ssd.model_states.units import Unit, find_blocks, find_units
from lightning_ssd.model_states.user_optimizers import register_optimizer, stepped_whole, zeroes_otherwise

__all__ = [
    "GPU_SHARE",
    "Ending",
    "LazyTensor",
    "Loaded",
    "ModelStates",
    "CommitRecord",
    "Settings",
    "Setup",
    "StatesConfig",
    "MetaTensors",
    "Unit",
    "bytes_on_device",
    "describe",
    "differences",
    "exact_value",
    "find_replaced",
    "find_blocks",
    "find_units",
    "compiled_regions",
    "is_compiled",
    "is_sharded",
    "offloaded_parameters",
    "load_sharded",
    "loading_to_meta",
    "make_model_states",
    "materialize_on",
    "model_settings",
    "move_model_states",
    "recording_loads",
    "register_optimizer",
    "regroup_model_states",
    "save",
    "save_sharded",
    "stepped_whole",
    "load_lazy",
    "take_initial_values",
    "meta_to_placeholder",
    "zeroes_otherwise",
]
