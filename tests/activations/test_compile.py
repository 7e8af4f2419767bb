"""`torch.compile` under the saved-tensor hooks: Dynamo sees the same program as without them, and none of our code."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ssd import SSDOffloadStrategy
from tests.support.compiled import INDUCTOR, counted, fresh_dynamo  # noqa: F401
from tests.support.trainings import make_trainer

STEPS = 3


def sequential(backend: str) -> nn.Module:
    """`nn.Sequential` has its frame in torch's files, which Dynamo skips, so hooks run between skipped frames."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))
    model.compile(backend=backend)
    return model


def broken(backend: str) -> nn.Module:
    """A graph break in the middle of the compiled function."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                torch._dynamo.graph_break()
                x = x * x.sigmoid()
            return x

    model = Broken()
    model.compile(backend=backend)
    return model


def wrapped(backend: str) -> nn.Module:
    """`torch.compile(module)` inside an eager model."""
    return nn.Sequential(nn.Linear(32, 32), torch.compile(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), backend=backend))


def method(backend: str) -> nn.Module:
    """A module whose `forward` alone is compiled."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    model[1].forward = torch.compile(model[1].forward, backend=backend)  # type: ignore[method-assign]
    return model


def nested(backend: str) -> nn.Module:
    """A compiled module inside a compiled module, and a weight that an eager module shares with them."""
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    inner.compile(backend=backend)
    outer = nn.Sequential(nn.Linear(32, 32), inner)
    outer.compile(backend=backend)
    tied = nn.Linear(32, 32)
    tied.weight = inner[0].weight
    return nn.Sequential(tied, outer)


class Doubled(nn.Module):
    """Calls a module, and the same one compiled."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))
        self.compiled = torch.compile(self.model, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.model(x + 1)
        return self.compiled(x) - target  # type: ignore[no-any-return]


def doubled(backend: str) -> nn.Module:
    return Doubled(backend)


def decorated(backend: str) -> nn.Module:
    """A class whose `forward` is compiled by a decorator."""

    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        @torch.compile(backend=backend)
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()  # type: ignore[no-any-return]

    return nn.Sequential(nn.Linear(32, 32), Decorated(), Decorated())


def function(backend: str) -> nn.Module:
    """A compiled function of tensors, without a module."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.gate = torch.compile(lambda x: x * x.sigmoid() + x.sin(), backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.linear(x))  # type: ignore[no-any-return]

    return Functional()


def given(backend: str) -> nn.Module:
    """A compiled function that is given modules."""

    def run(layers: list[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).tanh()
        return x

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.run = torch.compile(run, backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.run(list(self.layers), x)  # type: ignore[no-any-return]

    return Given()


def regional(backend: str) -> nn.Module:
    """Blocks of a compiled module that are compiled once for all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        @torch.compiler.nested_compile_region  # type: ignore[misc,untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()  # type: ignore[no-any-return]

    model = nn.Sequential(*(Block() for _ in range(3)))
    model.compile(backend=backend)
    return model


class Conditional(nn.Module):
    """Chooses one of two modules by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(
            x.sum() > 0, lambda x: self.first(x).sin(), lambda x: self.second(x).cos() * self.first.weight[0], (x,)
        )
        return chosen


def conditional(backend: str) -> nn.Module:
    """`torch.cond` in compiled code: weights are operands."""
    model = nn.Sequential(nn.Linear(32, 32), Conditional())
    model[1].compile(backend=backend)
    return model


def scanned(backend: str) -> nn.Module:
    """`scan` in eager code traces its function, and the backward of it, to graphs."""
    from torch._higher_order_ops.scan import scan

    class Scanned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            added: Tensor = scan(lambda total, row: (total + row, (total * row).sin()), x[0].clone(), x)[1]
            return added

    return Scanned()


class Llama(nn.Module):
    """A Hugging Face model of which some layers are compiled in place."""

    def __init__(self, backend: str, layers: slice) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)
        for layer in self.llama.model.layers[layers]:
            layer.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=(x.abs() * 1000).long() % 97).logits
        return logits


def one_layer(backend: str) -> nn.Module:
    return Llama(backend, slice(1, 2))


def every_layer(backend: str) -> nn.Module:
    return Llama(backend, slice(None))


class Trained(pl.LightningModule):
    def __init__(self, build: Callable[[str], nn.Module], backend: str) -> None:
        super().__init__()
        self.model = build(backend)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).float().square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    build: Callable[[str], nn.Module], backend: str, strategy: Any, path: Path, **settings: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns the losses and the last weights, and Dynamo's counts of frames, graphs, breaks and recompilations."""
    with counted() as counts:
        torch.manual_seed(0)
        module = Trained(build, backend)
        trainer = make_trainer(path, strategy, **settings)
        trainer.fit(module, DataLoader(torch.randn(8 * STEPS, 32), batch_size=8))
    assert len(module.losses) == STEPS
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    return [*module.losses, *weights], counts


REGIONAL = pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="needs torch 2.8")
CASES = [sequential, broken, wrapped, method, nested, doubled, function, one_layer, scanned]
LONG = [pytest.param(build, marks=pytest.mark.thorough) for build in (every_layer, decorated, given, conditional)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("build", [*CASES, pytest.param(regional, marks=REGIONAL), *LONG])
def test_dynamo_compiles_the_same_frames(build: Callable[[str], nn.Module], backend: str, tmp_path: Path) -> None:
    """Frames, graphs, graph breaks, recompilations and numbers are plain Lightning's."""
    plain, expected = train(build, backend, "auto", tmp_path)
    for arguments in ({"offload": 1.0}, {"states": "host", "offload": 0.5}, {"states": "ssd"}):
        strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, **arguments)
        numbers, counters = train(build, backend, strategy, tmp_path)
        assert counters == expected
        assert all(torch.equal(one, other) for one, other in zip(numbers, plain, strict=True))


def given_weights(backend: str) -> nn.Module:
    """Compiled functions that are given a parameter, a list of parameters, and a module that is used elsewhere, too."""

    def project(x: Tensor, weight: Tensor, others: list[Tensor]) -> Tensor:
        return F.linear(x, weight).tanh() @ others[0] + others[1]

    class GivenWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.project = torch.compile(project, backend=backend)
            self.call = torch.compile(lambda module, x: module(x).sin(), backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            x = self.project(self.first(x), weight=self.first.weight, others=[self.second.weight, self.second.bias])
            return self.call(self.second, x)  # type: ignore[no-any-return]

    return GivenWeights()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_functions_that_are_given_weights(precision: Any, tmp_path: Path) -> None:
    """They get ordinary weights, and Dynamo compiles the same frames."""
    plain, expected = train(given_weights, "aot_eager", "auto", tmp_path, precision=precision)
    for states in ("host", "ssd"):
        strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states=states)
        numbers, counters = train(given_weights, "aot_eager", strategy, tmp_path, precision=precision)
        assert counters == expected
        assert all(torch.equal(one, other) for one, other in zip(numbers, plain, strict=True))


@pytest.mark.parametrize(
    ("given", "precision"), [("weight", "32-true"), ("weight", "bf16-mixed"), ("module", "bf16-mixed")]
)
def test_compiled_functions_that_change_weights_that_they_are_given(given: str, precision: Any, tmp_path: Path) -> None:
    """They are refused: the change would be lost."""

    def change(weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        return F.linear(x, weight)

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            function: Any = change if given == "weight" else lambda module, x: change(module.weight, x)
            self.change = torch.compile(function, backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.change(getattr(self.second, given, self.second), self.first(x))  # type: ignore[no-any-return]

    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states="host")
    with pytest.raises(RuntimeError, match="has changed model.second.* in place"):
        train(lambda backend: Changes(), "aot_eager", strategy, tmp_path, precision=precision)


class Interrupted(nn.Module):
    """Raises KeyboardInterrupt in its second call, in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.count()
        return x

    @torch.compiler.disable
    def count(self) -> None:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("change", [lambda part: part.compile(backend="eager"), None])
def test_weights_after_a_ctrl_c_in_compiled_code(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ordinary parameters with the values of the last step."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning ignores later signals
    found = []
    for strategy in ("auto", SSDOffloadStrategy(tmp_path, min_bytes=1, states="host")):
        torch.manual_seed(0)
        part: Any = Interrupted()
        if change is None:
            part = torch.compile(part, backend="eager")
        else:
            change(part)
        module = Trained(lambda backend, part=part: part, "eager")
        with pytest.raises(SystemExit):
            make_trainer(tmp_path, strategy).fit(module, DataLoader(torch.randn(24, 32), batch_size=8))
        assert len(module.losses) == 1
        assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
        found.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Clamped(nn.Linear):
    """Compiled code that changes a weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def clamped(backend: str) -> nn.Module:
    model = nn.Sequential(Clamped(32, 32), nn.Tanh())
    model[0].compile(backend=backend)
    return model


@pytest.mark.parametrize("states", ["host", "ssd"])
def test_weights_that_compiled_code_changes(states: Any, tmp_path: Path) -> None:
    """Writes of compiled code to a weight are in the result."""
    plain, expected = train(clamped, "aot_eager", "auto", tmp_path)
    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states=states)
    numbers, counters = train(clamped, "aot_eager", strategy, tmp_path)
    assert counters == expected
    assert all(torch.equal(one, other) for one, other in zip(numbers, plain, strict=True))


def test_tensors_saved_by_a_compiled_region_are_offloaded(tmp_path: Path) -> None:
    """The hooks see at run time which tensors a compiled region saves."""

    class Stored(pl.Callback):
        stored = 0

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            stats = trainer.strategy.offloader.stats()
            assert stats.stored == stats.loaded
            self.stored = stats.stored

    amounts = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        stored = Stored()
        trainer = make_trainer(
            tmp_path,
            SSDOffloadStrategy(tmp_path, min_bytes=1, offload=1.0),
            max_epochs=None,
            max_steps=1,
            callbacks=[stored],
        )
        trainer.fit(Trained(function, backend), DataLoader(torch.randn(8, 32), batch_size=8))
        amounts.append(stored.stored)
    assert min(amounts) > 0


class Stack(nn.Module):
    """Repeated blocks, of which the last one is compiled by the user."""

    def __init__(self, backend: str, compiled: slice) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        for block in self.blocks[compiled]:
            block.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("states", ["gpu", "host"])
def test_compile_compiles_the_blocks_while_the_model_trains(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers and Dynamo's counts are those of the same blocks compiled by the user."""
    plain, expected = train(lambda backend: Stack(backend, slice(None)), "aot_eager", "auto", tmp_path)
    compile_module = nn.Module.compile
    compiled: list[nn.Module] = []

    def compile_eagerly(module: nn.Module, backend: str = "aot_eager") -> None:
        compiled.append(module)
        compile_module(module, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states=states, compile=True)
    numbers, counters = train(lambda backend: Stack(backend, slice(2, None)), "aot_eager", strategy, tmp_path)
    assert counters == expected
    assert all(torch.equal(one, other) for one, other in zip(numbers, plain, strict=True))
    assert [block._compiled_call_impl is not None for block in compiled] == [True, False, False]


def test_a_compiled_step_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    class Stepped(Trained):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
            return optimizer

    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states="host")
    with pytest.raises(ValueError, match="`step` of SGD is compiled.*Remove `torch.compile` from the optimizer"):
        make_trainer(tmp_path, strategy).fit(Stepped(sequential, "eager"), DataLoader(torch.randn(8, 32)))


class OwnWeight(nn.Module):
    """`torch.cond` of a weight of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x @ self.weight, (x,))
        return chosen


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("build", [Conditional, OwnWeight])
def test_operators_that_compile_their_functions_are_refused_in_eager_code(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """The error names the remedy, which gives plain Lightning's numbers."""

    def host() -> SSDOffloadStrategy:
        return SSDOffloadStrategy(tmp_path, min_bytes=1, states="host")

    def compiled(backend: str) -> nn.Module:
        module = build()
        module.compile(backend=backend)
        return module

    with pytest.raises(RuntimeError, match=r"offloaded.*`torch\.cond`.*`module\.compile\(\)`"):
        train(lambda backend: build(), "eager", host(), tmp_path)
    numbers, _ = train(compiled, "eager", host(), tmp_path)
    plain, _ = train(compiled, "eager", "auto", tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(numbers, plain, strict=True))


def test_compiled_autograd_is_refused(tmp_path: Path) -> None:
    """torch raises an error of its own, whose cause names the weight and the remedy."""

    class Backward(Trained):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()

    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states="host")
    with pytest.raises(NotImplementedError, match="turn off compiled autograd") as caught:
        make_trainer(tmp_path, strategy).fit(Backward(sequential, "eager"), DataLoader(torch.randn(8, 32)))
    assert "which is offloaded" in str(caught.value.__cause__)
    assert "Call `backward` and `optimizer.step` outside" in str(caught.value.__cause__)


def test_compile_refuses_a_model_without_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none"):
        train(lambda backend: nn.Linear(32, 32), "aot_eager", SSDOffloadStrategy(tmp_path, compile=True), tmp_path)
