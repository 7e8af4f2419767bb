"""Gradients of parameters that are not offloaded, and buffers: torch.distributed makes them equal on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_ssd.ranks import Ranks

BUCKET = 2**23
"""Elements that are summed together, unless a single parameter has more."""


class RankReduction:
    """Reduces gradients of parameters that are not offloaded over ranks, and passes on buffers.

    Threads: the training thread.

    Args:
        ranks: memory and messages of this rank.
        residents: parameters that are in no flat parameter, with their names, in the same order on all ranks.
        buffers: returns the buffers of the model.
    """

    def __init__(
        self,
        ranks: Ranks,
        residents: Sequence[tuple[str, nn.Parameter]],
        buffers: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._ranks = ranks
        self._residents = residents
        self._buffers = buffers
        self._buffers_differ = True
        """Whether buffers were not made those of rank 0 since the last reduction: as under DDP, they are then."""

    def begin_micro_batch(self) -> None:
        """Begins a micro-batch, with a backward or without."""
        if self._buffers_differ:
            self._buffers_differ = False
            self._ranks.broadcast(self._buffers())

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces gradients of parameters that are not offloaded by their mean over ranks, which torch sums in fp32.

        A parameter without a gradient on any rank keeps none. One without a gradient on some ranks has zeros there, as
        in torch's DDP.

        Raises:
            RuntimeError: a gradient is sparse, or in fp64.
            RankError: another rank has failed.
        """
        self._buffers_differ = True
        if not self._residents:
            return
        own = [_has_gradient(name, parameter) for name, parameter in self._residents]
        # The messages of all ranks precede the collective, which would end with another error if a rank had failed.
        flags = self._ranks.exchange(own)
        present = [one for (_, one), *of_ranks in zip(self._residents, *flags, strict=True) if any(of_ranks)]
        for bucket in _buckets(present):
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            values = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
            self._ranks.sum(values.mul_(1.0 / self._ranks.world_size))  # DDP multiplies before it sums, too
            means = values.split([one.numel() for one in bucket])
            for one, gradient, mean in zip(bucket, gradients, means, strict=True):
                gradient.copy_(mean.view(one.shape))
                one.grad = gradient


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields parameters whose gradients are summed together: the device may have no room for the sums of all."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(one.numel() for one in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _has_gradient(name: str, parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    if gradient is not None and (gradient.layout != torch.strided or gradient.dtype == torch.float64):
        raise RuntimeError(
            f"the gradient of {name} is sparse or in fp64, of which several devices compute no mean here. Make it "
            "dense (`sparse=False`), of at most 32 bits, or set `states='gpu'`."
        )
    return gradient is not None
