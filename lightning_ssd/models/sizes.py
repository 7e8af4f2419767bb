"""Checks of the sizes in a configuration of transformers, which would fail in the first step or make an empty model."""

from typing import Any

from lightning_ssd.sizes import check_least

__all__ = ["check_sizes"]

_SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
_SIZES += ["d_kv", "d_ff", "num_decoder_layers", "num_key_value_heads", "head_dim"]
"""Sizes that are 1 or more, by transformers' common names."""


def check_sizes(config: Any, key: str) -> None:
    """Checks that sizes are 1 or more, and that they divide into attention heads.

    Args:
        config: Configuration of a model of transformers.
        key: Key of a recipe that holds the sizes, such as `model`.

    Raises:
        ValueError: If they do not; the message names the size as the configuration's class calls it.
    """

    def named(size: str) -> str:
        return f"{key}.{getattr(config, 'attribute_map', {}).get(size, size)}"

    def value(size: str) -> Any:
        return getattr(config, size, None)

    for size in _SIZES:
        if isinstance(value(size), int | float | None):
            check_least(named(size), value(size), 1)
    heads, groups, head = value("num_attention_heads"), value("num_key_value_heads"), value("head_dim")
    if not isinstance(heads, int):
        return
    if head is None and value("d_kv") is None and value("hidden_size") % heads:
        raise ValueError(
            f"{named('hidden_size')}={value('hidden_size')} is not a multiple of"
            f" {named('num_attention_heads')}={heads}: change one of them"
        )
    if isinstance(groups, int) and heads % groups:
        raise ValueError(
            f"{named('num_attention_heads')}={heads} is not a multiple of"
            f" {named('num_key_value_heads')}={groups}: change one of them"
        )
    if isinstance(head, int) and head % 2 and value("rope_parameters"):
        raise ValueError(
            f"{named('hidden_size')}={value('hidden_size')} makes heads of {head}, and rotary positions take an even"
            f" size: change it, {named('num_attention_heads')} or {named('head_dim')}"
        )
