"""The nodes that the backward of a loss runs."""

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node


def backward_nodes(loss: Tensor) -> Iterator[Node]:
    """Yields each node of the graph of `loss` once."""
    seen: set[Node] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        yield node
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
