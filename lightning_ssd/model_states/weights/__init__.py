"""Weights on the device: prefetched and evicted ones, and resident ones with master weights.

The modules, in the order in which they are best read:

- `offloaded`: the offloaded part of a model: units, stores, flat optimizers.
- `prefetcher`: prefetches weights in recorded order within a byte budget, and evicts them.
- `masters`: fp32 master weights of resident bf16 parameters.
"""

from lightning_ssd.model_states.weights.masters import MasteredParameter, MasterWeights
from lightning_ssd.model_states.weights.offloaded import OffloadedModel
from lightning_ssd.model_states.weights.prefetcher import ParamPrefetcher
