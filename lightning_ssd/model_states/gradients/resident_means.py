"""Gradients of parameters that are not offloaded: their mean over ranks, on all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_ssd.ranks import Ranks, Topic
from lightning_ssd.waits import wait_for


class ResidentMeans:
    """Replaces gradients on the device by their mean over ranks, summed in fp32 in the order of ranks by each of them.

    A parameter without a gradient on any rank keeps none. One without a gradient on some ranks has zeros there, as in
    torch's DDP.

    Ownership: memory of a turn belongs to its rank until `Topic.RESIDENTS` is posted, and then to its readers. There
    are two, in turns: a rank that posts turn t + 1 has read those of turn t.

    Args:
        ranks: memory and messages of this rank.
        parameters: the parameters, in the same order on all ranks.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._messages = ranks.messages
        self._parameters = parameters
        numel = max(1, sum(parameter.numel() for _, parameter in parameters))
        self._memory = [[ranks.memory.floats(numel) for _ in range(ranks.size)] for _ in range(2)]
        self._turn = 0

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces the gradients; called by all ranks.

        Raises:
            RuntimeError: a gradient is sparse, or in fp64.
            RankError: another rank has failed.
        """
        memory, messages = self._memory[self._turn % 2], self._messages
        flags, start = [], 0
        for name, parameter in self._parameters:
            gradient = parameter.grad
            flags.append(gradient is not None)
            if gradient is not None:
                if gradient.layout != torch.strided or gradient.dtype == torch.float64:
                    raise RuntimeError(
                        f"the gradient of {name} is sparse or in fp64, of which several devices compute no mean here. "
                        "Make it dense (`sparse=False`), of at most 32 bits, or set `states='gpu'`."
                    )
                memory[messages.rank][start : start + parameter.numel()].view(parameter.shape).copy_(gradient)
            start += parameter.numel()
        messages.post(Topic.RESIDENTS, 0, self._turn, bytes(flags), messages.others)
        contents = wait_for(messages.collect(Topic.RESIDENTS, 0, self._turn, messages.others), "other ranks")
        by_rank = [contents.get(rank, bytes(flags)) for rank in range(messages.size)]
        self._turn += 1
        start = 0
        for index, (_, parameter) in enumerate(self._parameters):
            elements = slice(start, start + parameter.numel())
            start = elements.stop
            chosen = [values[elements] for values, flags in zip(memory, by_rank, strict=True) if flags[index]]
            if chosen:
                _assign(parameter, _mean(chosen, messages.size))


def _mean(values: Sequence[Tensor], size: int) -> Tensor:
    mean = values[0] * (1.0 / size)
    for value in values[1:]:
        mean.add_(value, alpha=1.0 / size)
    return mean


def _assign(parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = values.view(parameter.shape).to(parameter.device, parameter.dtype)
    else:
        parameter.grad.copy_(values.view(parameter.shape))
