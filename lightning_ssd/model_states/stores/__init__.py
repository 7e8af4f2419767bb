"""Stores of flat parameters: compute weights, master weights and optimizer states in host memory or on SSDs.

The modules, in the order in which they are best read:

- `split`: the format of split master weights.
- `dynamic_code`: the format of optimizer states in 8 bits.
- `layout`: the arrays of a store and their byte offsets.
- `buffers`: bytes in host memory, or on SSDs with staging memory.
- `versioned_buffers`: the buffers of a store, and their committed and uncommitted versions.
- `state_store`: the store: stage, unstage, commit, revert.
- `summoned`: whole weights on the CPU, for `whole_weights` and `load_state_dict`.
- `staged`: values on the host for user code and state dicts, between two steps.
"""

from lightning_ssd.model_states.stores.buffers import HostBuffer, SpareMemory, SSDBuffer, StateBuffer, StateStaging
from lightning_ssd.model_states.stores.dynamic_code import BLOCK, code_table
from lightning_ssd.model_states.stores.layout import (
    MASTER,
    SCALES,
    WEIGHT,
    WHOLE_DTYPES,
    Layout,
    MomentFormat,
    StagedState,
)
from lightning_ssd.model_states.stores.split import write_changed
from lightning_ssd.model_states.stores.staged import StagedFlats
from lightning_ssd.model_states.stores.state_store import StateStore, commit_memory
from lightning_ssd.model_states.stores.summoned import summon
from lightning_ssd.model_states.stores.versioned_buffers import VersionedBuffers
