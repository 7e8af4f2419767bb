"""Cross entropy of a linear head in chunks of tokens, without the logits of all tokens in memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**29
"""Largest bytes of the fp32 logits of a chunk."""


def chunked_cross_entropy(hidden: Tensor, head: nn.Linear, targets: Tensor, *, ignored: int) -> Tensor:
    """Returns the mean cross entropy, fp32, of `head(hidden)`, in the memory of a chunk's logits.

    If torch has `torch.nn.functional.linear_cross_entropy` (2.13) and autocast is off, that function computes the loss:
    it saves only the input, and recomputes the logits in backward. Otherwise each chunk is checkpointed.

    Args:
        hidden: Input of the head, (tokens, width).
        head: Output layer.
        targets: Class of each token, int64 (tokens,).
        ignored: Target of tokens that are not predicted.
    """
    classes = head.weight.shape[0]
    tokens = max(1, min(len(targets), CHUNK_BYTES // (4 * classes)))
    # Under autocast the head casts its own weight, which is in 16 bits already if it is offloaded.
    mixed = torch.is_autocast_enabled(hidden.device.type)
    if hasattr(F, "linear_cross_entropy") and type(head) is nn.Linear and not mixed:
        total = _fused(hidden, head, targets, tokens, ignored)
    else:
        total = _checkpointed(hidden, head, targets, tokens, ignored)
    return total / (targets != ignored).sum()


def _fused(hidden: Tensor, head: nn.Linear, targets: Tensor, tokens: int, ignored: int) -> Tensor:
    functional: Any = F
    options: Any = torch.nn
    # The function returns 16-bit losses for 16-bit inputs. Losses of single tokens are summed in fp32: a mean would be
    # rounded.
    losses: Tensor = functional.linear_cross_entropy(
        hidden.to(head.weight.dtype),
        head.weight,
        targets,
        linear_bias=head.bias,
        reduction="none",
        ignore_index=ignored,
        options=options.LinearCrossEntropyOptions(
            batch_chunk_size=tokens, chunking_method=None, acc_policy="accurate", acc_dtype=torch.float32
        ),
    )
    return losses.float().sum()


def _checkpointed(hidden: Tensor, head: nn.Module, targets: Tensor, tokens: int, ignored: int) -> Tensor:
    def chunk_loss(part: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(head(part).float(), classes, ignore_index=ignored, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for part, classes in zip(hidden.split(tokens), targets.split(tokens), strict=True):
        total = total + checkpoint(chunk_loss, part, classes, use_reentrant=False)
    return total
