"""Batches of the recipes, and the number of samples and tokens in them.

A YAML file can name `count_samples` and `count_items` as arguments of Lightning's `ThroughputMonitor`.
"""

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

Batch: TypeAlias = Tensor | Mapping[str, Tensor]
"""Token ids, int64 (batch, sequence), alone or under the key `input_ids`; or other tensors, (batch, ...), by name."""


IGNORED = -100
"""Label of a token that is not to be predicted, as in transformers."""


def input_ids(batch: Batch) -> Tensor:
    """Returns the token ids of `batch`, int64 (batch, sequence).

    Raises:
        ValueError: If there are none.
    """
    if isinstance(batch, Tensor):
        return batch
    if "input_ids" not in batch:
        raise ValueError(
            f"The batches have {', '.join(map(repr, batch))} and no 'input_ids': set data.class_path to a data module"
            f" of texts, such as lightning_ssd.recipes.data.TextDataModule"
        )
    return batch["input_ids"]


def count_samples(batch: Batch) -> int:
    """Returns the number of sequences (or images) in `batch`."""
    return (batch if isinstance(batch, Tensor) else next(iter(batch.values()))).shape[0]


def count_tokens(batch: Batch) -> int:
    """Returns the number of tokens in `batch`, over all its sequences."""
    return input_ids(batch).numel()


def count_items(batch: Batch) -> int:
    """Returns the number of tokens in `batch`, or of samples where they have no tokens."""
    return count_tokens(batch) if isinstance(batch, Tensor) or "input_ids" in batch else count_samples(batch)
