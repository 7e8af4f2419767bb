"""Programs that users write around weights, gradients and optimizers, each a few lines, in full and mixed precision."""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.compatibility.case import EQUAL, Case, Expectation, Refused
from tests.compatibility.families import WIDTH, Trained, mlp, rows

Loss = Callable[[Any, Tensor], Tensor]
"""Computes a loss from the LightningModule and the inputs."""


def squares(module: Any, x: Tensor) -> Tensor:
    return module.model(x).float().pow(2).mean()


class Program(Trained):
    """Two small blocks whose loss is `compute`; `seen` has what user code has read."""

    compute = squares

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, rows)
        self.seen: list[Tensor] = []

    def loss(self, index: int) -> Tensor:
        return self.compute(self.batch(index))

    def batch(self, index: int) -> Tensor:
        return self.inputs(torch.Generator().manual_seed(int(index)))["input"]

    def see(self, *values: Tensor) -> None:
        self.seen += [value.detach().float().clone() for value in values]


def two() -> nn.Module:
    return nn.Sequential(mlp(), mlp())


class ByHand(Program):
    """Optimizes by hand; `update` makes the gradients."""

    automatic_optimization = False

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.update(self.batch(batch))
        optimizer.step()
        return loss.detach()

    def update(self, x: Tensor) -> Tensor:
        raise NotImplementedError


# ---- weights that are computed ----


def parametrized(function: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = two()
        for layer in (model[0][0], model[1][3]):  # type: ignore[index]
            function(layer)
        return model

    return make


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    model = nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH), mlp())
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    return model


def pruned() -> nn.Module:
    model: Any = two()
    prune.l1_unstructured(model[0][0], "weight", 0.3)
    prune.random_structured(model[1][3], "weight", 0.2, dim=0)
    return model


class Function(nn.Module):
    """A module of one or two weights, whose forward is `function`."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def between(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(mlp(), Function(function), mlp())


def standardized(m: Any, x: Tensor) -> Tensor:
    mean, deviation = m.weight.mean(1, keepdim=True), m.weight.std(1, keepdim=True)
    return F.linear(x, (m.weight - mean) / (deviation + 1e-5))


def autoencoder(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.weight).tanh(), m.weight.t())


def hypernetwork(m: Any, x: Tensor) -> Tensor:
    made = (x.mean(0) @ m.weight).outer(x.mean(0) @ m.other)
    return x @ made + x


def fake_quantized(m: Any, x: Tensor) -> Tensor:
    scale = m.weight.detach().abs().max() / 127
    rounded = (m.weight / scale).round() * scale
    return F.linear(x, m.weight + (rounded - m.weight).detach())


def unrolled(m: Any, x: Tensor) -> Tensor:
    hidden = torch.zeros_like(x)
    for _ in range(3):
        hidden = torch.tanh(x @ m.weight + hidden @ m.other)
    return hidden


def indexed(m: Any, x: Tensor) -> Tensor:
    picked = m.weight[torch.arange(x.shape[0]) % 3]
    return x * picked + F.embedding(torch.arange(x.shape[0]), m.other) * m.gate


def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.5 else x + m.gate * F.linear(x, m.weight).relu()


def low_rank(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight.detach()) + (x @ m.other[:, :2]) @ m.other[:2]


def checkpointed_function(m: Any, x: Tensor, reentrant: bool = False) -> Tensor:
    def function(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(x @ weight) @ other

    return checkpoint(function, x, m.weight, m.other, use_reentrant=reentrant)


def pieces(m: Any, x: Tensor) -> Tensor:
    query, key = m.weight.chunk(2)
    first, *_ = m.other.unbind(1)
    return torch.cat([F.linear(x, query), F.linear(x, key)], 1) * first


def einsum(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bi,ij,jk->bk", x, m.weight, m.other.view(WIDTH, -1))


def compiled_function(m: Any, x: Tensor, *, cloned: bool = False) -> Tensor:
    @torch.compile(backend="aot_eager")
    def function(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(x @ weight) @ other

    return function(x, *(weight.clone() if cloned else weight for weight in (m.weight, m.other)))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * gradient


class Straight(torch.autograd.Function):
    """Binary weights; saves the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.sign().float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        return gradient @ weight.sign().t(), (x.float().t() @ gradient) * (weight.abs() <= 1)


def binary(m: Any, x: Tensor) -> Tensor:
    return Straight.apply(x, m.weight) / WIDTH


def through_parameters() -> nn.Module:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
            self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.several:
                x = torch.addmm(self.named["shift"], x, weight).relu()
            return x * self.named["scale"]

    return nn.Sequential(mlp(), Held())


# ---- losses over weights ----


def functional(module: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(module.model, dict(module.model.named_parameters()), (x,)).float().pow(2).mean()


def lasso(module: Any, x: Tensor) -> Tensor:
    return squares(module, x) + 1e-3 * sum(parameter.abs().sum() for parameter in module.parameters())


def ridge(module: Any, x: Tensor) -> Tensor:
    return squares(module, x) + 1e-2 * torch.cat([parameter.flatten() for parameter in module.parameters()]).norm()


def orthogonal_penalty(module: Any, x: Tensor) -> Tensor:
    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    return squares(module, x) + 1e-2 * sum((w @ w.t() - torch.eye(w.shape[0])).pow(2).sum() for w in weights)


def meta_learning(module: Any, x: Tensor) -> Tensor:
    """MAML: one inner step through the weights, with its graph."""
    weights = dict(module.model.named_parameters())
    inner = torch.func.functional_call(module.model, weights, (x[:2],)).float().pow(2).mean()
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(module.model, fast, (x[2:],)).float().pow(2).mean()


def meta_of_inputs(module: Any, x: Tensor) -> Tensor:
    """The inner step is over a code, not over weights."""
    code = torch.zeros_like(x).requires_grad_()
    (gradient,) = torch.autograd.grad(squares(module, x + code), code, create_graph=True)
    return squares(module, x - gradient)


def distilled(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        goal = module.model[0](x)
    return (module.model[1](x) - goal).float().pow(2).mean()


def reversed_gradients(module: Any, x: Tensor) -> Tensor:
    return module.model[1](Reverse.apply(module.model[0](x))).float().pow(2).mean()


def mixup(module: Any, x: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return squares(module, share * x + (1 - share) * x[torch.randperm(len(x))])


def frozen_teacher() -> nn.Module:
    model: Any = two()
    model[0].requires_grad_(False)
    return model


class Queue(Program):
    """MoCo: a momentum encoder and a queue in a buffer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        model[0].requires_grad_(False)  # type: ignore[index]
        self.register_buffer("queue", torch.randn(8, WIDTH))
        self.register_buffer("end", torch.zeros(1, dtype=torch.long))

    def compute(self, x: Tensor) -> Tensor:  # type: ignore[override]
        model: Any = self.model
        with torch.no_grad():
            torch._foreach_lerp_(list(model[0].parameters()), list(model[1].parameters()), 0.1)
            keys = F.normalize(model[0](x).float())
        logits = F.normalize(model[1](x).float()) @ self.queue.clone().t()
        place = int(self.end)
        self.queue[place : place + len(keys)] = keys  # type: ignore[index]
        self.end[0] = (place + len(keys)) % 8  # type: ignore[index]
        return logits.logsumexp(1).mean()


class CriticPenalty(ByHand):
    """WGAN-GP: a penalty of the critic's gradient, clipping of the generator's weights."""

    def configure_optimizers(self) -> Any:
        model: Any = self.model
        return torch.optim.Adam(model[0].parameters(), 1e-3), torch.optim.RMSprop(model[1].parameters(), 1e-3)

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        model: Any = self.model
        generator, critic = self.optimizers()  # type: ignore[misc,attr-defined]
        x = self.batch(batch)
        mixed = (0.5 * x + 0.5 * model[0](x).detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(model[1](mixed).sum(), mixed, create_graph=True)
        loss = model[1](x).mean() + 10 * (gradient.float().norm(dim=1) - 1).pow(2).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(-model[1](model[0](x)).mean())
        generator.step()
        self.untoggle_optimizer(generator)
        return loss.detach()


# ---- gradients ----


class HookedGradients(Program):
    """Noise and scale by hooks on parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for number, parameter in enumerate(self.parameters()):
            parameter.register_hook(lambda gradient, number=number: gradient + torch.linspace(0, 1e-3, 3)[number % 3])


class Accumulated(Program):
    """Hooks after the accumulation of each gradient, which autograd calls in an order of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.gradients: dict[Any, Tensor] = {}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients[parameter] = parameter.grad.detach().clone()
        parameter.grad.mul_(0.5).sub_(1e-4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(*(self.gradients[parameter] for parameter in self.parameters()))


class LateHooks(Accumulated):
    def __init__(self, model: nn.Module) -> None:
        Program.__init__(self, model)
        self.gradients = {}

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            parameter.register_post_accumulate_grad_hook(self.halve)


class Fisher(Program):
    """The diagonal of the Fisher information."""

    def on_fit_start(self) -> None:
        self.fisher = {name: torch.zeros_like(weight) for name, weight in self.named_parameters()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, weight in self.named_parameters():
            if weight.grad is not None:
                self.fisher[name] += weight.grad**2
        self.see(*self.fisher.values())


class TotalNorm(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(self.parameters(), 0.05, norm)
        self.see(norm)


class Centralized(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


class NoneByHand(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, parameter in enumerate(self.parameters()):
            if number % 3 == 0:
                parameter.grad = None


class Surgery(ByHand):
    """PCGrad: the gradients of two losses are projected, and assigned."""

    def update(self, x: Tensor) -> Tensor:
        weights = list(self.parameters())
        output = self.model(x).float()
        losses = output.pow(2).mean(), output.abs().sum()
        one, two = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
        for weight, a, b in zip(weights, one, two, strict=True):
            product = (a * b).sum()
            weight.grad = a + b if product > 0 else a - product / (b.norm() ** 2 + 1e-8) * b
        return losses[0]


class Curvature(Program):
    """A product with the Hessian, by double backward over weights."""

    def compute(self, x: Tensor) -> Tensor:  # type: ignore[override]
        loss = squares(self, x)
        weights = [parameter for parameter in self.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return loss + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)


class PerSample(Program):
    """Gradients of each sample, between steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}

        def loss(weights: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.model, weights, (x[None],)).float().pow(2).mean()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, self.batch(batch))
        self.see(*(gradient.flatten(1).norm(dim=1) for gradient in gradients.values()))


class Ensemble(Program):
    """vmap over stacked weights of two modules."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        model: Any = self.model
        weights, buffers = torch.func.stack_module_state([model[0], model[1]])
        base = copy.deepcopy(model[0]).to("meta")

        def call(weights: Any, buffers: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(base, (weights, buffers), (x,))

        self.see(torch.func.vmap(call, in_dims=(0, 0, None))(weights, buffers, self.batch(batch)))


# ---- optimizers ----


class Lookahead(Optimizer):
    """Wraps an optimizer; slow weights follow every second step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.param_groups = inner.param_groups
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            fast = [parameter for group in self.param_groups for parameter in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.add_(parameter.data - slow, alpha=0.5)
                parameter.data.copy_(slow)
        return result


class Wrapped(Program):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW(self.parameters(), 1e-2))


class LayerRates(Program):
    def configure_optimizers(self) -> Any:
        model: Any = self.model
        groups = [{"params": list(part.parameters()), "lr": 1e-2 * 0.5**number} for number, part in enumerate(model)]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


class ResetStates(Program):
    """Reads the optimizer's states, and drops them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.see(*(optimizer.state[parameter]["exp_avg"] for parameter in self.parameters()))
        if batch_idx == 1:
            for parameter in self.parameters():
                optimizer.state[parameter]["exp_avg"].zero_()


class FreezesBySchedule(Program):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        model: Any = self.model
        model[0].requires_grad_(batch_idx % 2 == 0)


# ---- modules ----


class Replaced(Program):
    """A module is replaced between epochs by one without trained parameters."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            model: Any = self.model
            torch.manual_seed(5)
            model[1] = mlp()


class Vectors(Program):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, self.parameters())
        self.see(vector)


class Histograms(Program):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            self.see(torch.histc(parameter.detach(), 8), parameter.mean(), parameter.std(), parameter.abs().max())


class Average(Program):
    """EMA by hand, with values exchanged for the evaluation."""

    def on_fit_start(self) -> None:
        self.shadow = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        backup = {}
        for name, weight in self.named_parameters():
            self.shadow[name].mul_(0.9).add_(weight.data, alpha=0.1)
            backup[name] = weight.data.clone()
            weight.data.copy_(self.shadow[name])
        with torch.no_grad():
            self.see(self.model(self.batch(7)))
        for name, weight in self.named_parameters():
            weight.data.copy_(backup[name])


class Quantized(Program):
    def on_train_epoch_end(self) -> None:
        quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(self.model), {nn.Linear})
        self.see(quantized(self.batch(7)))


class TraceScript(Program):
    """TorchScript of the module itself, amid training."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            traced: Any = torch.jit.trace(self.model, self.batch(7), check_trace=False)
            self.see(traced(self.batch(7)))


class ScriptCopy(Program):
    def on_train_end(self) -> None:
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(copy.deepcopy(self.model)), buffer)
        buffer.seek(0)
        self.see(torch.jit.load(buffer)(self.batch(7)))


class Script(Program):
    def on_train_end(self) -> None:
        self.see(torch.jit.script(self.model)(self.batch(7)))


class Exported(Program):
    def on_train_end(self) -> None:
        self.see(torch.export.export(self.model, (self.batch(7),)).module()(self.batch(7)))


class StateHooks(Program):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        model.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"extra": torch.ones(1)}))
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra", None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = {name: value * 0.9 for name, value in self.model.state_dict().items()}
        self.see(state["extra"])
        self.model.load_state_dict(state)


class Deleted(Program):
    """A parameter is registered anew under another name, and removed, before training."""

    def configure_model(self) -> None:
        model: Any = self.model
        if "bias" in model[1][3]._parameters:
            model[1][3].extra = model[1][3].bias
            del model[1][3].bias
            model[1][3].bias = None


class WholeNorm(Program):
    """Spectral quantities of weights, and copies to NumPy."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.dim() == 2:
                self.see(torch.linalg.svdvals(parameter.detach()), torch.from_numpy(parameter.detach().cpu().numpy()))


# ---- the table ----


def case(
    name: str,
    make: Callable[[nn.Module], Program] | Loss = Program,
    model: Callable[[], nn.Module] = two,
    states: Expectation = EQUAL,
    activations: Expectation = EQUAL,
    mixed: tuple[Expectation, Expectation] | None = None,
    quick: bool = False,
    **trainer: Any,
) -> list[Case]:
    """Returns a program's cases in full and in mixed precision.

    Args:
        name: of the row.
        make: makes the LightningModule from the model, or computes its loss.
        model: makes the model.
        states: outcome with offloaded states.
        activations: outcome with offloaded activations.
        mixed: both outcomes in mixed precision, if they are others.
        quick: whether the case in full precision runs by default.
        **trainer: arguments of the Trainer; callables are called for each run.
    """
    chosen: Any = make if isinstance(make, type) else type("Computed", (Program,), {"compute": make})

    def arguments(precision: str) -> Mapping[str, Any]:
        made = {key: value() if callable(value) else value for key, value in trainer.items()}
        return {**made, "precision": precision}

    outcomes = {"32-true": (states, activations), "bf16-mixed": mixed or (states, activations)}
    return [
        Case(
            name if precision == "32-true" else f"{name}, `{precision}`",
            lambda: chosen(model()),
            *outcome,
            trainer=lambda precision=precision: arguments(precision),
            quick=quick and precision == "32-true",
        )
        for precision, outcome in outcomes.items()
    ]


def _scheduler() -> Sequence[pl.Callback]:
    return [pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 1})]


TRANSFORMED = Refused("Give it `.detach().clone()` of the weights")
COMPILED = Refused("which is offloaded, is given to a compiled function")
SCRIPT = Refused("`torch.jit.script` compiles the hooks of a module")

CASES = [
    *case("`functional_call` with the module's own parameters", functional),
    *case("`parametrizations.weight_norm`", model=parametrized(parametrizations.weight_norm), quick=True),
    *case("`parametrizations.spectral_norm`", model=parametrized(parametrizations.spectral_norm)),
    *case("`parametrizations.orthogonal`", model=parametrized(parametrizations.orthogonal)),
    *case("A parametrization of one's own", model=symmetric),
    *case("`nn.utils.weight_norm`", model=parametrized(nn.utils.weight_norm)),
    *case("`nn.utils.spectral_norm`", model=parametrized(nn.utils.spectral_norm)),
    *case("`nn.utils.prune` before training", model=pruned),
    *case("Weight standardisation", model=between(standardized)),
    *case("An autoencoder whose weight is shared, transposed", model=between(autoencoder)),
    *case("A hypernetwork", model=between(hypernetwork)),
    *case("Fake quantization of weights, straight-through", model=between(fake_quantized)),
    *case("Binary weights by an autograd function", model=between(binary)),
    *case("A recurrence that uses weights several times", model=between(unrolled)),
    *case("Rows of weights by index and embedding", model=between(indexed)),
    *case("Stochastic depth", model=between(stochastic_depth)),
    *case("LoRA by hand, on slices of weights", model=between(low_rank)),
    *case("`checkpoint` of a function of weights", model=between(checkpointed_function)),
    *case(
        "Reentrant `checkpoint` of a function of weights",
        model=between(lambda m, x: checkpointed_function(m, x, reentrant=True)),
    ),
    *case("Chunks and unbound rows of weights", model=between(pieces)),
    *case("`einsum` over weights and views", model=between(einsum)),
    *case("A compiled function of weights", model=between(compiled_function), states=COMPILED),
    *case("A compiled function of clones", model=between(lambda m, x: compiled_function(m, x, cloned=True))),
    *case("`ParameterList` and `ParameterDict`", model=through_parameters),
    *case("L1 regularisation of all parameters", lasso),
    *case("L2 regularisation of all parameters, concatenated", ridge),
    *case("Orthogonality penalty", orthogonal_penalty),
    *case("MAML: an inner step over weights, `create_graph`", meta_learning),
    *case("An inner step over inputs, `create_graph`", meta_of_inputs),
    *case("Distillation from a frozen part of the module", distilled, frozen_teacher),
    *case("Gradient reversal", reversed_gradients),
    *case("Mixup", mixup),
    *case("MoCo: momentum encoder and queue", Queue),
    *case("WGAN-GP: two optimizers, gradient penalty", CriticPenalty),
    *case("Hooks on parameters", HookedGradients),
    *case("`register_post_accumulate_grad_hook`", Accumulated),
    *case("Hooks on parameters, registered in `on_fit_start`", LateHooks, quick=True),
    *case("Fisher information in `on_before_optimizer_step`", Fisher, quick=True),
    *case("`get_total_norm`, `clip_grads_with_norm_`", TotalNorm),
    *case("Gradient centralization", Centralized),
    *case("Some gradients set to None before a step", NoneByHand),
    *case("PCGrad: gradients of two losses, assigned", Surgery),
    *case("Hessian-vector product over weights", Curvature),
    *case("Gradients of each sample by `torch.func`, between steps", PerSample, states=TRANSFORMED),
    *case("Ensemble of modules by `torch.func.vmap`", Ensemble),
    *case("An optimizer around an optimizer (Lookahead)", Wrapped),
    *case("Learning rates by layer, with a scheduler", LayerRates),
    *case(
        "Optimizer states read and zeroed",
        ResetStates,
        states=Refused("the AdamW state of this parameter is offloaded"),
    ),
    *case("Parameters frozen by schedule", FreezesBySchedule),
    *case("GradientAccumulationScheduler", callbacks=_scheduler, max_epochs=2, max_steps=-1),
    *case("A module replaced between epochs", Replaced, max_epochs=2, max_steps=-1),
    *case("`parameters_to_vector`, `vector_to_parameters`", Vectors),
    *case("Histograms and statistics of weights", Histograms),
    *case("EMA by hand, exchanged for evaluation", Average),
    *case("Dynamic quantization of a copy", Quantized),
    *case(
        "`torch.jit.trace` of the module amid training", TraceScript, states=Refused("would trace memory that is freed")
    ),
    *case("`torch.jit.script` of a copy in `on_train_end`", ScriptCopy, states=SCRIPT),
    *case("`torch.jit.script` in `on_train_end`", Script, states=SCRIPT),
    *case("`torch.export` in `on_train_end`", Exported, states=Refused("gives an address that is not valid")),
    *case("Hooks of `state_dict` and `load_state_dict`", StateHooks),
    *case("A parameter registered under another name", Deleted),
    *case("Singular values of weights, and NumPy copies", WholeNorm),
]
