"""Bytes that compiled layers save for backward, by torch's `activation_memory_budget`: no GPU is needed.

    python -m benchmarks.saved_shares [--shapes llama-3.2-1b vit-l] [--times 8]

Layers of the models of `benchmarks.people` are traced with tensors that have no memory, in bf16 autocast of a CPU, with
Inductor's decompositions, and partitioned with each budget. Bytes are those of saved tensors that are not inputs of the
layer. A graph that is like an earlier one, in bytes, has no row of its own.
`--times` multiplies micro-batches: bf16 copies of weights are recomputed with any budget below 1, so that the shares
are largest where activations are most of the bytes. The last row has the largest share of each budget, rounded up to
hundredths, without models that have an encoder and a decoder: `SAVED_SHARES` of
`lightning_ssd/autoplan/recompilation.py`.
"""

import argparse
import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config, partitioners
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.people import SHAPES, Shape

BUDGETS = [tenth / 10 for tenth in range(10, 0, -1)]
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


class Partitions:
    """A compiler that runs traced code as it is, and records the bytes that each budget would save.

    Attributes:
        saved: of each graph, the bytes that it saves with each of `BUDGETS`.
    """

    def __init__(self) -> None:
        self.saved: list[list[int]] = []
        self.backend = aot_autograd(
            fw_compiler=nop, bw_compiler=nop, partition_fn=self._partition, decompositions=select_decomp_table()
        )

    def _partition(self, joint: Any, inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
        row = []
        for budget in BUDGETS:
            with config.patch(activation_memory_budget=budget):
                forward, backward = partitioners.min_cut_rematerialization_partition(
                    copy.deepcopy(joint), inputs, "inductor", num_fwd_outputs=num_fwd_outputs, **options
                )
            (output,) = forward.graph.find_nodes(op="output")
            nodes = [one for one in output.args[0][num_fwd_outputs:] if isinstance(one, torch.fx.Node)]
            row.append(sum(partitioners._size_of(node) for node in nodes if node.op != "placeholder"))
        if row not in self.saved:
            self.saved.append(row)
        return forward, backward


def saved_bytes(shape: Shape) -> list[list[int]]:
    """Returns the bytes that each kind of layer of a model saves with each of `BUDGETS`."""
    torch.compiler.reset()
    partitions = Partitions()
    # The first layer's input may require no gradient. All later ones are alike.
    sizes = {name: 2 if name in LAYER_COUNTS else size for name, size in shape.sizes.items()}
    text = shape.batch, shape.tokens
    with FakeTensorMode(), no_init_weights(), torch.autocast("cpu", torch.bfloat16):
        model = replace(shape, sizes=sizes).build().train()
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(backend=partitions.backend)
        if shape.inputs == "images":
            inputs, labels = {"pixel_values": torch.randn(shape.batch, 3, 224, 224)}, (shape.batch,)
        elif shape.inputs == "audio":
            inputs, labels = {"input_features": torch.randn(shape.batch, 80, 3000)}, text
        else:
            inputs, labels = {"input_ids": torch.zeros(text, dtype=torch.long)}, text
        model(**inputs, labels=torch.zeros(labels, dtype=torch.long)).loss.backward()
    return partitions.saved


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models")
    parser.add_argument("--times", type=int, default=8, help="micro-batches / those of `benchmarks.people`")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    largest = [0.0] * len(BUDGETS)
    _print_row(f"torch {torch.__version__}", map(str, BUDGETS))
    _print_row("---", ["---"] * len(BUDGETS))
    for name in arguments.shapes:
        for row in saved_bytes(replace(SHAPES[name], batch=arguments.times * SHAPES[name].batch)):
            shares = [saved / row[0] for saved in row]
            if SHAPES[name].inputs not in ("text pairs", "audio"):
                largest = list(map(max, largest, shares))
            _print_row(f"{name}, {row[0] / 2**20:.0f} MiB", (f"{share:.3f}" for share in shares))
    _print_row("largest", (f"{math.ceil(100 * share) / 100:.2f}" for share in largest))


def _print_row(title: str, cells: Iterable[str]) -> None:
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
