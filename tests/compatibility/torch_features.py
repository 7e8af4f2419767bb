"""Features of torch inside a training step: autograd's, hooks, views, in-place operators, other dtypes and layouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.compatibility.case import EQUAL, Case, Expectation, Refused
from tests.compatibility.families import WIDTH, Trained, convolutions, mlp, pictures, rows

Forward = Callable[[nn.Module, Tensor], Tensor]


class Stepped(Trained):
    """Computes its loss by `forward`, with two small blocks."""

    def __init__(self, forward: Forward, make: Callable[[], nn.Module] | None = None) -> None:
        super().__init__(nn.Sequential(mlp(), mlp()) if make is None else make(), rows)
        self.compute = forward

    def loss(self, index: int) -> Tensor:
        inputs = self.inputs(torch.Generator().manual_seed(int(index)))["input"]
        output = self.compute(self.model, inputs)
        return output.abs().pow(2).mean() if output.is_complex() else output.pow(2).mean()


class Exponential(torch.autograd.Function):
    """A user's autograd function, which saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        result = value.clamp(max=2.0).exp()
        ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        value, result = ctx.saved_tensors
        return gradient * result * (value < 2.0)


def reentrant(model: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    return checkpoint(model[1], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)


def non_reentrant(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model[1], checkpoint(model[0], x, use_reentrant=False), use_reentrant=False)


def selective(model: Any, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = model[0](x)
    return model[1](x.float())


def no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    with torch.inference_mode():
        model(x)
    return model(x) - target.sigmoid()


def penalty(model: Any, x: Tensor) -> Tensor:
    """A gradient penalty: double backward."""
    x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output + gradient.norm(dim=1, keepdim=True)


def retained(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    loss = output.pow(2).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return output * (1 + sum(gradient.abs().sum() for gradient in gradients).detach())  # type: ignore[union-attr]


def functional_call(model: Any, x: Tensor) -> Tensor:
    changed = {name: 0.5 * value for name, value in model.named_parameters()}
    return torch.func.functional_call(model, changed, (x,))


def functional_gradient(model: Any, x: Tensor) -> Tensor:
    def loss(value: Tensor) -> Tensor:
        return model(value).pow(2).mean()

    return model(x) + torch.func.grad(loss)(x).detach()


def mapped(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x)


def function(model: Any, x: Tensor) -> Tensor:
    return model[1](Exponential.apply(model[0](x)))


def tensor_hooks(model: Any, x: Tensor) -> Tensor:
    x = model[0](x)
    x.register_hook(lambda gradient: 0.5 * gradient)
    x.retain_grad()
    return model[1](x)


def in_place(model: Any, x: Tensor) -> Tensor:
    x = model[0](x)
    x = torch.nn.functional.relu_(x + 1).clone()
    x[:, 0] = 0.0
    x[:, 1:3] *= 2.0
    return model[1](x.add_(1.0).sigmoid_())


def views(model: Any, x: Tensor) -> Tensor:
    first, second, third = model[0](x).expand(2, -1, -1).reshape(-1, WIDTH).tensor_split(3, dim=1)
    return model[1](torch.cat([second.tanh(), first.exp(), third.t().t()], 1))


def unsafe_views(model: Any, x: Tensor) -> Tensor:
    first, second = model[0](x).unsafe_chunk(2, dim=1)
    first, second = first.sigmoid_(), second.tanh_()
    return model[1](torch.cat([first * second, second], 1))


def changed_through_data(model: Any, x: Tensor) -> Tensor:
    """Autograd saves the output of `exp`, and does not notice its change."""
    x = model[0](x).tanh().exp()
    x.data.mul_(0.5)
    return model[1](x)


def nested_hooks(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 1.0, lambda saved: saved):
        return model(x)


def saved_on_cpu(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def attention(model: Any, x: Tensor) -> Tensor:
    heads = model[0](x).view(1, 2, -1, 8)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
    return model[1](mixed.reshape(-1, WIDTH))


def indexing(model: Any, x: Tensor) -> Tensor:
    x = model[0](x)
    order = x.sum(1).argsort()
    picked = x.index_select(0, order).gather(1, x.argsort(1)).masked_fill(x > 1, 0.0)
    return model[1](picked.scatter_add(1, x.argsort(1), x).cumsum(1) / WIDTH)


def linear_algebra(model: Any, x: Tensor) -> Tensor:
    square = model[0](x).t() @ model[0](x) + 3 * torch.eye(WIDTH)
    return model[1](torch.linalg.solve(square, torch.linalg.cholesky(square)) + torch.fft.rfft(square).abs().mean())


def foreach(model: Any, x: Tensor) -> Tensor:
    decay = torch.stack(torch._foreach_norm(list(model.parameters()))).sum()
    return model(x) + 1e-3 * decay


def used_outside(model: Any, x: Tensor) -> Tensor:
    """Weights are used outside of their module's forward."""
    return nn.functional.linear(model(x), model[0][0].weight) + model[1][3].bias.norm()


def eval_and_train(model: Any, x: Tensor) -> Tensor:
    model.eval()
    target = model(x).detach()
    model.train()
    return model(x) - 0.5 * target


def sparse_product(model: Any, x: Tensor) -> Tensor:
    return model[1](torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), model[0](x)))


def nested(model: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return model(ragged).values()


class Complex(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)
        self.after = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.after((x.to(torch.complex64) @ self.weight).abs())


class Hooked(nn.Module):
    """Hooks on modules, forward and backward, and on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(), mlp())
        self.net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.net[0].register_forward_hook(lambda module, args, output: output + 1)
        self.net[1].register_full_backward_hook(lambda module, into, out: tuple(0.5 * value for value in into))
        self.net[0][0].weight.register_hook(lambda gradient: 0.5 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Buffered(nn.Module):
    """A buffer that each forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.net(x - self.mean)


class Double(nn.Module):
    """Some parameters are float64, some 0-dimensional, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.wide(self.net(x).double()).float()


class PaddedRows(nn.Module):
    """Transformer layers, which torch evaluates by fused kernels that compute no padded rows; `teacher` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.encoder, self.teacher = nn.TransformerEncoder(layer, 2), nn.TransformerEncoder(layer, 2)
        self.teacher.requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, WIDTH)
        padding = torch.arange(x.shape[1]) >= torch.tensor([[1], [x.shape[1]]])
        self.eval()
        goal = self.teacher(x, src_key_padding_mask=padding)
        with torch.no_grad():
            own = self.attention(*(self.encoder(x, src_key_padding_mask=padding),) * 3)[0]
        self.train()
        rows = self.encoder(x, src_key_padding_mask=padding)
        return self.attention(rows, rows, rows)[0] - goal - own


def with_torchscript() -> nn.Module:
    scripted, traced = torch.jit.script(mlp()), torch.jit.trace(mlp(), torch.randn(2, WIDTH))  # type: ignore[no-untyped-call]
    return nn.Sequential(mlp(), scripted, traced, torch.jit.script(nn.BatchNorm1d(WIDTH)))


class _Compiled(nn.Module):
    """A user's module: `torch.compile` leaves the forward of torch's own containers uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def compiled(backend: str, **how: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(_Compiled(), _Compiled())
        for layer in model:
            layer.compile(backend=backend, **how)
        return model

    return make


def case(
    name: str,
    forward: Forward = lambda model, x: model(x),
    states: Expectation = EQUAL,
    *,
    make: Callable[[], nn.Module] | None = None,
    **how: Any,
) -> Case:
    return Case(name, lambda: Stepped(forward, make), states, **how)


class ChannelsLast(Trained):
    def __init__(self) -> None:
        super().__init__(convolutions().to(memory_format=torch.channels_last), pictures)


FUNCTORCH = Refused("torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks")

CASES = [
    case("Activation checkpointing, non-reentrant", non_reentrant, quick=True),
    case("Activation checkpointing, reentrant", reentrant),
    case("Activation checkpointing, selective", selective),
    case("`checkpoint_sequential`", lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False)),
    case("`torch.autocast` in a part of the forward", autocast),
    case("`torch.no_grad` and `torch.inference_mode` in the forward", no_grad),
    case("Double backward (gradient penalty)", penalty, quick=True),
    case("`retain_graph=True`, `torch.autograd.grad`", retained),
    case("`torch.func.functional_call`", functional_call),
    case("`torch.func.grad` in a training step", functional_gradient, FUNCTORCH, activations=FUNCTORCH),
    case("`torch.func.vmap` over a module", mapped),
    case("A user's `torch.autograd.Function`", function),
    case("Hooks on tensors, `retain_grad`", tensor_hooks),
    case("Hooks on modules and parameters", make=Hooked),
    case("In-place operators", in_place),
    case("Views: `expand`, `tensor_split`, transposes", views),
    case("`unsafe_chunk`, changed in place", unsafe_views),
    case("A saved tensor that is changed through `.data`", changed_through_data),
    case("Nested `saved_tensors_hooks`", nested_hooks),
    case("`save_on_cpu`", saved_on_cpu),
    case("`scaled_dot_product_attention` with dropout", attention),
    case("Gather, scatter, index_select, cumsum", indexing),
    case("`torch.linalg`, `torch.fft`", linear_algebra),
    case("Sparse products", sparse_product),
    case("Weights read by `_foreach` operators in the loss", foreach),
    case("Weights used outside of their module's forward", used_outside),
    case("`eval()` and `train()` in one training step", eval_and_train),
    case("Transformer layers that are evaluated with padded rows", make=PaddedRows, quick=True),
    case("Complex parameters", make=Complex),
    case("float64, 0-dimensional and unused parameters", make=Double),
    case("Buffers that change in the forward", make=Buffered),
    Case("`channels_last`", ChannelsLast),
    case("Modules of TorchScript, scripted and traced", make=with_torchscript),
    case("`Module.compile` of each layer, aot_eager", make=compiled("aot_eager")),
]
