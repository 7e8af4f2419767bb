"""Attributes that the package sets on `torch.UntypedStorage` objects.

torch returns the same Python object for a storage as long as the storage lives. An attribute of that object therefore
identifies the storage, which its address does not (addresses are reused), and is freed together with it.
Attributes are read by `getattr(storage, TAG, default)`, which takes the host half as long as a method call or a weak
dictionary would: packing a saved tensor reads several of them.

| tag | value | set by |
|---|---|---|
| `SAVED` | weak reference to the `SavedStorage` that offloads it | `activations/record.py` |
| `KEPT_IN` | number of the micro-batch in which it is kept on the device | `activations/decide.py` |
| `WEIGHT` | True for parameters, buffers and views of them | `activations/weights.py` |
| `OFFLOADED_WEIGHTS` | the `OffloadedWeights` that own it | `activations/weights.py` |
| `RECOMPUTED` | weak reference to the `Recomputed` value that replaces it | `activations/recompute.py` |
| `RECOMPUTE_NODES` | weak set of the `RecomputeNode` objects that read it | `activations/recompute.py` |
| `CHOICE` | the plan's choice for it: keep, host, ssd | `activations/plan_mode.py` |
| `BUFFER` | (graph, number) of its buffer in a traced graph | `profiling/trace_mode.py` |
| `LIFETIME` | (recorder, number) of its lifetime in a profiled step | `profiling/lifetimes.py` |
| `SHARERS` | weak set of the `SharedMemory` objects over it | `model_states/units/shared_memory.py` |
"""

SAVED = "_lightning_ssd_saved"
KEPT_IN = "_lightning_ssd_kept_in"
WEIGHT = "_lightning_ssd_weight"
OFFLOADED_WEIGHTS = "_lightning_ssd_offloaded_weights"
RECOMPUTED = "_lightning_ssd_recomputed"
RECOMPUTE_NODES = "_lightning_ssd_recompute_nodes"
CHOICE = "_lightning_ssd_choice"
BUFFER = "_lightning_ssd_buffer"
LIFETIME = "_lightning_ssd_lifetime"
SHARERS = "_lightning_ssd_sharers"
