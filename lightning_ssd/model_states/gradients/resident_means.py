"""Gradients of parameters that are not offloaded: their mean over ranks, on all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_ssd.model_states.optimizers import RankMean
from lightning_ssd.ranks import Ranks, Topic
from lightning_ssd.waits import wait_for


class ResidentMeans:
    """Replaces gradients on the device by their mean over ranks, summed in fp32 in the order of ranks by each of them.
    Means of several hosts are summed by the ranks of each number.

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
        self._hosts = ranks.values
        self._share = 1.0 / ranks.world_size
        self._parameters = parameters
        numel = max(1, sum(parameter.numel() for _, parameter in parameters))
        self._memory = [[memory.floats(numel) for memory in ranks.memory] for _ in range(2)]
        self._turn = 0

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces the gradients; called by all ranks.

        Raises:
            RuntimeError: a gradient is sparse, or in fp64.
            RankError: another rank has failed.
        """
        if not self._parameters:
            return
        memory, messages = self._memory[self._turn % 2], self._messages
        gradients = [self._gradient(name, parameter) for name, parameter in self._parameters]
        flags = bytes(gradient is not None for gradient in gradients)
        if any(flags):
            # One copy from the device, which zeros of missing gradients do not make much longer.
            values = [
                gradient.reshape(-1).float() if gradient is not None else torch.zeros(one.numel(), device=one.device)
                for gradient, (_, one) in zip(gradients, self._parameters, strict=True)
            ]
            memory[messages.rank].copy_(torch.cat(values))
        messages.post(Topic.RESIDENTS, 0, self._turn, flags, messages.others)
        contents = wait_for(messages.collect(Topic.RESIDENTS, 0, self._turn, messages.others), "other ranks")
        self._turn += 1
        by_rank = [contents.get(rank, flags) for rank in range(messages.size)]
        present = [any(of_parameter) for of_parameter in zip(*by_rank, strict=True)]
        sources = [one for one, of_rank in zip(memory, by_rank, strict=True) if any(of_rank)]
        if self._hosts is not None:
            present = self._hosts.maximum(torch.tensor(present, dtype=torch.uint8)).tolist()
        if any(present):
            mean = torch.zeros_like(memory[0])
            if sources:
                RankMean(sources, self._share).write(mean)
            if self._hosts is not None:
                self._hosts.sum(mean)
            device = self._parameters[0][1].device
            means = mean.to(device).split([parameter.numel() for _, parameter in self._parameters])
            for (_, parameter), values_of_parameter, has in zip(self._parameters, means, present, strict=True):
                if has:
                    _assign(parameter, values_of_parameter)

    @staticmethod
    def _gradient(name: str, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        if gradient is not None and (gradient.layout != torch.strided or gradient.dtype == torch.float64):
            raise RuntimeError(
                f"the gradient of {name} is sparse or in fp64, of which several devices compute no mean here. Make it "
                "dense (`sparse=False`), of at most 32 bits, or set `states='gpu'`."
            )
        return gradient


def _assign(parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = values.view(parameter.shape).to(parameter.dtype, copy=True)
    else:
        parameter.grad.copy_(values.view(parameter.shape))
