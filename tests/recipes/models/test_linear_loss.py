"""The chunked loss equals that of whole logits, within a tolerance, in the memory of a chunk."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.models import CausalLM, linear_loss
from lightning_ssd.recipes.models.linear_loss import chunked_cross_entropy
from tests.support.compare import assert_same
from tests.support.folders import FAMILIES, Tokens, save_model, strategy, train
from tests.support.products import combinations

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Of the loss and of gradients, relative to their norms: what 16-bit products round."""

TOKENS, WIDTH, CLASSES = 96, 32, 200


@pytest.fixture(params=["torch", "own"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's function, and the replacement for versions of torch without it; chunks have 8 tokens."""
    if request.param == "own":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    elif not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has no linear_cross_entropy")
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 8 * 4 * CLASSES)
    yield


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    head = nn.Linear(WIDTH, CLASSES, bias=bias).to(dtype)
    targets = torch.randint(CLASSES, (TOKENS,))
    targets[:30] = -100
    inputs = [hidden, *head.parameters()]
    exact = nn.Linear(WIDTH, CLASSES, bias=bias).double()
    exact.load_state_dict(head.state_dict())
    precise = hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(exact(precise), targets)
    gradients = torch.autograd.grad(expected, [precise, *exact.parameters()])
    loss = chunked_cross_entropy(hidden, head, targets, ignored=-100)
    assert loss.dtype == torch.float32
    assert math.isclose(loss.item(), expected.item(), rel_tol=TOLERANCE[dtype] / 4)
    for mine, exactly in zip(torch.autograd.grad(loss * 3, inputs), gradients, strict=True):
        assert (mine.double() / 3 - exactly).norm() < TOLERANCE[dtype] * exactly.norm()


class LargestOutput(TorchDispatchMode):
    """Records the elements of the largest tensor that any operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.most = max(self.most, leaf.numel())
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_of_tokens_times_vocabulary_is_ever_there(tmp_path: Path, grad: bool) -> None:
    sizes = FAMILIES["llama"].to_dict() | {"vocab_size": 2000, "max_position_embeddings": 512, "hidden_size": 8}
    ids = torch.randint(2000, (1, 512))
    most = {}
    for chunked in (False, True):
        module = CausalLM(config=sizes, chunked_loss=chunked, gradient_checkpointing=True)
        module.configure_model()
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with LargestOutput() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if grad:
                module.training_loss(ids).backward()
            else:
                with torch.no_grad():
                    module.evaluate(ids)
        most[chunked] = max(seen.most, *saved, 0)
    logits = 512 * 2000
    assert most[False] >= logits > 2 * most[True]


@pytest.mark.quick_cases(1)
@combinations(
    "family, states, precision",
    FAMILIES,
    ["host", "ssd"],
    ["32-true", "bf16-mixed"],
    quick=[("llama", "ssd", "32-true"), ("tied", "host", "bf16-mixed")],
)
def test_offloaded_trainings_are_plain_lightnings(tmp_path: Path, family: str, states: str, precision: Any) -> None:
    save_model(tmp_path / "model", family)

    def trained(how: Any) -> tuple[CausalLM, Tensor]:
        module = CausalLM(tmp_path / "model", chunked_loss=True, gradient_checkpointing=True, lr=1e-2, warmup_steps=1)
        return module, train(tmp_path, module, how, precision=precision).callback_metrics["train/loss"]

    expected, found = trained("auto"), trained(strategy(states))
    if precision == "32-true" or family in ("tied", "gpt2"):
        assert torch.equal(expected[1], found[1])
        assert_same(found[0], expected[0])
    else:  # a head that is used for every chunk has its gradients summed in 16 bits
        torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=0)


def test_validation_has_the_same_figures(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    found = []
    for chunked in (False, True):
        module = CausalLM(tmp_path / "model", chunked_loss=chunked)
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
                             default_root_dir=tmp_path)  # fmt: skip
        (figures,) = trainer.validate(module, datamodule=Tokens(), verbose=False)
        found.append(figures)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert math.isclose(math.exp(found[1]["val/loss"]), found[1]["val/perplexity"], rel_tol=1e-5)
