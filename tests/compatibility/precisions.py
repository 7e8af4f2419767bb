"""Precisions of the Trainer."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.compatibility.case import EQUAL, Case, Expectation, Refused, Within
from tests.compatibility.families import GPT2, Trained, mlp, pretrained, rows, tokens


def _mlp() -> Trained:
    return Trained(nn.Sequential(mlp(), mlp()), rows)


def case(
    precision: Any, states: Expectation = EQUAL, *, model: Callable[[], Trained] = _mlp, name: str = "MLP", **how: Any
) -> Case:
    return Case(f"`{precision}`, {name}", model, states, trainer=lambda: {"precision": precision}, **how)


GPT = pretrained("GPT2LMHeadModel", "GPT2Config", GPT2, tokens)

MASTERS = Within(0.02, "weights are stepped in fp32 (Lightning's own `bf16-true` steps them in bf16)")
REFUSED = Refused("trains with `precision='32-true'`, `'bf16-mixed'`, `'16-mixed'` or `'bf16-true'`")
STATES = {"bf16-true": MASTERS, "16-true": REFUSED, "64-true": REFUSED}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")

CASES = [
    *(case(precision, STATES.get(precision, EQUAL), quick=precision != "32-true") for precision in PRECISIONS),
    *(case(precision, STATES.get(precision, EQUAL), model=GPT, name="GPT-2") for precision in PRECISIONS),
]
