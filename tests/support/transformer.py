"""Profiles of transformers by calculation: models of any size for planners, and a check of traced profiles."""

from typing import Literal

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.validation import check_positive

WIDTH = 2
"""Bytes of a 16-bit number."""


def transformer_profile(
    hardware: HardwareProfile,
    *,
    hidden: int,
    layers: int,
    heads: int,
    sequence: int,
    batch: int,
    vocabulary: int,
    kind: Literal["gpt", "bert"] = "gpt",
    micro_batches: int = 1,
    clip_norm: bool = False,
    tied: bool = False,
) -> ModelProfile:
    """Returns the profile of a GPT or a BERT in 16 bit, with flash attention, fp32 master weights and AdamW states.

    A block's products take 24 b s h^2 FLOP and its attention 4 b s^2 h (LoHan and Fuyou count them so, too), half of it
    where it is causal; a backward takes twice that, and 2.5 times in flash attention, which recomputes its scores.
    Products run at the GPU's FLOP/s, what is pointwise at its memory bandwidth. Without dropout.

    Args:
        hardware: gives the times.
        hidden: size of the hidden dimension, h.
        layers: count of blocks.
        heads: of attention.
        sequence: tokens in a sample, s.
        batch: samples in a micro-batch, b.
        vocabulary: entries of it.
        kind: "gpt" has causal attention, "bert" attends to all.
        micro_batches: in a step.
        clip_norm: gradients are clipped by their global norm.
        tied: the head's weights are the embedding's.
    """
    for name, value in {"hidden": hidden, "layers": layers, "heads": heads, "sequence": sequence, "batch": batch,
                        "vocabulary": vocabulary}.items():  # fmt: skip
        check_positive(name, value)
    tokens = batch * sequence
    plane = tokens * hidden * WIDTH  # bytes of one hidden vector for each token

    def product(name: str, flops: float, saved: int, backward: float = 2.0) -> OperatorProfile:
        seconds = flops / hardware.gpu_flops
        return OperatorProfile(
            name, seconds, backward * seconds, flops, saved, (f"{name}.output",) * bool(saved), seconds
        )

    def pointwise(name: str, moved: int, saved: int) -> OperatorProfile:
        seconds = moved / hardware.gpu_memory_bandwidth
        return OperatorProfile(
            name, seconds, 2 * seconds, moved / WIDTH, saved, (f"{name}.output",) * bool(saved), seconds
        )

    def unit(name: str, operators: list[OperatorProfile], saved_input: int, parameters: int) -> UnitProfile:
        # Compute weights and gradients in 16 bit; master weights and both moments in 32.
        sizes = WIDTH * parameters, WIDTH * parameters, 12 * parameters, 12 * parameters
        return UnitProfile(name, tuple(operators), saved_input, parameters, *sizes)

    square = 2.0 * tokens * hidden * hidden
    attention = 4.0 * tokens * sequence * hidden * (0.5 if kind == "gpt" else 1.0)
    block = [
        pointwise("norm1", 2 * plane, plane),
        product("qkv", 3 * square, 3 * plane),
        product("attention", attention, plane + 4 * tokens * heads, 2.5),
        product("out", square, plane),  # with the residual: the second norm's input
        pointwise("norm2", 2 * plane, plane),
        product("up", 4 * square, 4 * plane),
        pointwise("gelu", 8 * plane, 4 * plane),
        product("down", 4 * square, 0),  # with the residual: the next unit's input
    ]
    embedding = [pointwise("lookup", 2 * plane, 0)]
    logits = tokens * vocabulary * WIDTH
    head = [
        pointwise("norm", 2 * plane, plane),
        product("logits", 2.0 * tokens * hidden * vocabulary, logits),
        pointwise("loss", 3 * logits, 0),
    ]
    units = [unit("embedding", embedding, 0, (vocabulary + sequence) * hidden)]
    units += [unit(f"block{index}", block, plane, 12 * hidden * hidden + 13 * hidden) for index in range(layers)]
    units.append(unit("head", head, plane, (0 if tied else vocabulary * hidden) + 2 * hidden))
    name = f"{kind} hidden {hidden}, layers {layers}"
    return ModelProfile(name, tuple(units), micro_batches, batch, tokens, clip_norm)
