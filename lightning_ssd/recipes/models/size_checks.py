"""Checks the sizes of a model and of its data, before wrong ones fail in the first step or make an empty model."""

from typing import Any

from lightning_ssd.sizes import check_least

_SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
_SIZES += ["d_kv", "d_ff", "num_decoder_layers", "num_key_value_heads", "head_dim"]
"""Sizes that are 1 or more, by transformers' common names."""


def check_sizes(config: Any, key: str) -> None:
    """Checks that sizes are 1 or more, and that they divide into attention heads.

    Args:
        config: Configuration of a model of transformers; of one for texts and images, its part for texts is checked.
        key: Key of a recipe that holds the sizes, such as `model`.

    Raises:
        ValueError: If they do not; the message names the size as the configuration's class calls it.
    """

    text = config.get_text_config()
    if text is not config:
        key += ".text_config"
    config = text

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


def check_data(data: Any, config: Any, vocabulary: str, lengthen: str) -> None:
    """Checks that the token ids and the sequences of a data module fit a model, where it states its sizes.

    Args:
        vocabulary: Key of a recipe for the size of the model's vocabulary.
        lengthen: Remedy by which the model accepts longer sequences, for the message.

    Raises:
        ValueError: If the data has more token ids, or longer sequences, than the model.
    """
    config = config.get_text_config()
    tokens, block = getattr(data, "vocab_size", 0), getattr(data, "block_size", 0)
    if tokens > config.vocab_size:
        raise ValueError(
            f"The data has {tokens} token ids and the model {config.vocab_size}: set {vocabulary}={tokens} or more, or"
            f" data.tokenizer to the model's own"
        )
    longest = getattr(config, "max_position_embeddings", None)  # None: relative positions
    if longest is not None and block > longest:
        raise ValueError(
            f"The data has sequences of {block} tokens and the model takes {longest}: lower data.block_size, or"
            f" {lengthen}"
        )
