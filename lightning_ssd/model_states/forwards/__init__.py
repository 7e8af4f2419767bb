"""Forwards of units: hooks that keep the weights of modules on the device while their code runs.

The modules, in the order in which they are best read:

- `compiled_calls`: calls of compiled modules, with hooks outside of the compiled code.
- `unit_hooks`: the hooks of units, compiled modules, fused layers and recurrent layers.
"""

from lightning_ssd.model_states.forwards.compiled_calls import renew_guards
from lightning_ssd.model_states.forwards.unit_hooks import UnitHooks
