"""What a batch of tokens is, and how much is in it.

A YAML file can hand `count_samples` and `count_tokens` to Lightning's `ThroughputMonitor` by their names.
"""

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

Batch: TypeAlias = Tensor | Mapping[str, Tensor]
"""Token ids, int64 (batch, sequence), alone or under the key `input_ids`."""


def input_ids(batch: Batch) -> Tensor:
    """Returns the token ids of `batch`, int64 (batch, sequence)."""
    return batch if isinstance(batch, Tensor) else batch["input_ids"]


def count_samples(batch: Batch) -> int:
    """Returns the number of sequences in `batch`."""
    return input_ids(batch).shape[0]


def count_tokens(batch: Batch) -> int:
    """Returns the number of tokens in `batch`, over all its sequences."""
    return input_ids(batch).numel()
