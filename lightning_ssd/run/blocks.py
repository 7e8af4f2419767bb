"""`compile_blocks`: the strategy's argument `compile`."""

import functools
from collections.abc import Callable, Sequence

from torch import nn

from lightning_ssd.model_states import compiled_regions, find_blocks


def compile_blocks(module: nn.Module, units: Sequence[str] | None) -> list[Callable[[], None]]:
    """Compiles the blocks of a model, before hooks are registered around compiled modules.

    Args:
        units: class names of its blocks; `None`: its repeated blocks.

    Returns:
        Functions that end the compilation.

    Raises:
        ValueError: the model has no blocks, and no compiled parts.
    """
    blocks = find_blocks(module, units)
    if not blocks and next(compiled_regions(module), None) is None:
        raise ValueError(
            "`compile=True` compiles the repeated blocks of a model, and this one has none. Name the classes of "
            "its blocks by `units`, or compile parts of it yourself (`module.compile()`)."
        )
    for block in blocks:
        block.compile()
    return [functools.partial(setattr, block, "_compiled_call_impl", None) for block in blocks]
