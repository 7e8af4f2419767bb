"""Small models of an architecture, by which properties of large ones are measured before a training."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_ssd import torch_internals as internals

_MOST_PARAMETERS = 2**22
_DIVISORS = [2**power for power in range(8)]
_ROUNDING = 1e-3
"""Difference of logits / largest logit up to which they count as equal."""

_SAMPLE = 8  # tokens
_LAYERS = 2
"""Layers of a small model, if they are of one type."""
_VOCABULARY = 64
_EXPERTS = 8
_CHUNK = 4  # tokens, to which state-space models pad sequences

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_LIMITS = {
    "vocab": _VOCABULARY,
    "_token_id$": 0,
    "^(moe_)?num(_local)?_experts$|^n_routed_experts$": _EXPERTS,
    "experts_per_tok|^moe_topk$|^moe_k$": 2,
    "^n_group$|^topk_group$|^num_expert_group$": 1,
    "^(mamba_)?chunk_size$": _CHUNK,
}
"""Largest values of the sizes that are no widths, by patterns of their names."""
_PERIODS = re.compile("period|interval|every|pattern|first_k")
_INDICES = re.compile("ids$|idxs$|layers$")
_WIDTHS = re.compile("size|dim|^d_|_d_|width|rank|ffn|embd|inner|channels")
_NO_WIDTHS = re.compile("window|chunk|kernel|position|block|batch|max|bucket|patch|image|conv|factor|token|^num_")


def mixes_samples(config: PretrainedConfig) -> bool | None:
    """Returns whether a packed sample, whose positions begin at 0, has other logits than the sample alone; None: no
    small model of that architecture can be made.
    """

    def measure(model: PreTrainedModel) -> bool:
        ids, positions = _draw_ids(model), torch.arange(_SAMPLE)
        packed = model(input_ids=ids, position_ids=positions.repeat(len(ids), 2), use_cache=False).logits
        alone = model(input_ids=ids[:, _SAMPLE:], position_ids=positions.repeat(len(ids), 1), use_cache=False).logits
        return _differ(packed[:, _SAMPLE:], alone)

    return _measure(config, measure)


def changes_logits(config: PretrainedConfig) -> bool | None:
    """Returns whether the logits of a model are other ones than those that its output layer computes alone; None: no
    small model of that architecture can be made.
    """

    def measure(model: PreTrainedModel) -> bool:
        untyped: Any = model
        head = untyped.get_output_embeddings()
        head.weight.mul_(1e3)  # caps change large logits only
        ids = _draw_ids(model)
        alone = head(untyped.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return _differ(model(input_ids=ids, use_cache=False).logits, alone)

    return _measure(config, measure)


def _measure(config: PretrainedConfig, measure: Callable[[PreTrainedModel], bool]) -> bool | None:
    """Returns the result of `measure` with the least reduced model for which it raises no error; None: there is none.

    Random states are unchanged. Models are real also while a training is traced with fake tensors.
    """
    with (
        internals.fake_tensor.unset_fake_temporarily(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.no_grad(),
    ):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would change the generators of devices, too
        for divisor in _DIVISORS:
            try:
                model = _make_small(config, divisor)
                if model is not None:
                    return measure(model)
            except Exception:  # architectures bind sizes to each other by rules of their own
                continue
    return None


def _make_small(config: PretrainedConfig, divisor: int) -> PreTrainedModel | None:
    """Returns a model in fp32 whose widths are those of `config` / `divisor`, or None if it is still large."""
    auto: Any = AutoModelForCausalLM  # untyped
    values = config.to_dict()
    _reduce(values, divisor)
    small = type(config).from_dict(values)
    how = {"dtype": torch.float32, "attn_implementation": config._attn_implementation}
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in auto.from_config(small, **how).parameters()) > _MOST_PARAMETERS:
            return None
    model: Any = auto.from_config(small, **how)
    # Initial weights of zero, or near it, would hide dependencies.
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model  # type: ignore[no-any-return]


def _reduce(values: dict[str, Any], divisor: int) -> None:
    """Reduces the sizes in a configuration: layers to a few of each type, widths to `1 / divisor`, in place."""
    for part in values.values():
        if isinstance(part, dict) and "model_type" in part:
            _reduce(part, divisor)
    layers = next((values[key] for key in _LAYER_COUNTS if isinstance(values.get(key), int)), 0)
    kept = min(layers, max([_LAYERS, *_least_layers(values, layers)]))
    for key, value in values.items():
        if key in _LAYER_COUNTS and value == layers:
            values[key] = kept
        elif isinstance(value, list) and len(value) == layers:
            values[key] = [_reduced(key, one, divisor) for one in value[:kept]]
        elif isinstance(value, list) and _INDICES.search(key) and all(isinstance(one, int) for one in value):
            values[key] = [one for one in value if one < kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            for one in value.values():
                _reduce(one, divisor)
            values[key] = {index: one for index, one in value.items() if int(index) < kept}
        elif divisor > 1 and isinstance(value, dict) and key.startswith("rope"):
            values[key] = _reduced_rope(value, divisor)
        else:
            values[key] = _reduced(key, value, divisor)


def _least_layers(values: Mapping[str, Any], layers: int) -> Iterator[int]:
    """Yields numbers of layers among which there is one of each type."""
    for key, value in values.items():
        if isinstance(value, int) and _PERIODS.search(key):
            yield value + 1
        elif isinstance(value, list) and value and value != list(range(len(value))):
            if len(value) == layers or isinstance(value[0], str):
                yield 1 + max(value.index(one) for one in value)
            elif _INDICES.search(key) and isinstance(value[0], int):
                yield 1 + min(value)
        elif key == "per_layer_config" and value:
            yield 1 + min(map(int, value))


def _reduced(key: str, value: Any, divisor: int) -> Any:
    if divisor == 1 or not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, limit in _LIMITS.items():
        if re.search(pattern, key):
            return min(value, limit)
    wide = _WIDTHS.search(key) and not _NO_WIDTHS.search(key)
    return max(1, value // divisor) if wide and value >= 4 else value


def _reduced_rope(rope: dict[str, Any], divisor: int) -> dict[str, Any]:
    """Returns the parameters of rotary embeddings for heads of `1 / divisor` of the width."""
    found: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            found[key] = _reduced_rope(value, divisor)
        elif key == "mrope_section":
            found[key] = [size // divisor for size in value]
        else:  # lists have a factor for each frequency
            found[key] = value[: len(value) // divisor] if isinstance(value, list) else value
    return found


def _draw_ids(model: Any) -> Tensor:
    """Returns random tokens of two samples in each of two rows."""
    vocabulary = min(_VOCABULARY, len(model.get_input_embeddings().weight))
    return torch.randint(vocabulary, (2, 2 * _SAMPLE))


def _differ(found: Tensor, expected: Tensor) -> bool:
    if not (found.isfinite().all() and expected.isfinite().all()):
        raise ValueError("the model has no finite logits")
    return bool((found - expected).abs().max() > _ROUNDING * expected.abs().max())
