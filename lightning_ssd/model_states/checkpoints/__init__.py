"""Values outside of a training: state dicts, checkpoint files, the model after the end of training.

The modules, in the order in which they are best read:

- `values`: replacement of values in nested containers.
- `replace`: atomic replacement of files and directories.
- `lazy`: tensors that are read from the tiers when the file is written.
- `sharded`: checkpoint directories of `torch.distributed.checkpoint`.
- `state_dicts`: state dicts of modules and optimizers whose values are offloaded.
- `restorer`: whole parameters and optimizer states after training.
"""

from lightning_ssd.model_states.checkpoints.lazy import LazyTensor, load_lazy, note_unread, save
from lightning_ssd.model_states.checkpoints.replace import find_replaced, put_in_place
from lightning_ssd.model_states.checkpoints.restorer import ModelRestorer
from lightning_ssd.model_states.checkpoints.sharded import is_sharded, load_sharded, save_sharded
from lightning_ssd.model_states.checkpoints.state_dicts import StateDicts
from lightning_ssd.model_states.checkpoints.values import replace_values
