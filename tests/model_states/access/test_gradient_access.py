"""User code that reads and writes gradients of offloaded parameters, against plain Lightning, bit for bit."""

import functools
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.model_states import build
from tests.support.access import PLACES, Toy, compare, fit
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies

ADAMW = {"optimizer": torch.optim.AdamW, "lr": 0.01}


class Manual(Toy):
    """Optimizes manually."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False


class Surgery(Manual):
    """Gradients of two losses are kept, projected and assigned; one parameter has none."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        parameters = list(self.blocks.parameters())
        kept = []
        for part in batch[0].split(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(part))
            kept.append([parameter.grad for parameter in parameters])
        self.seen.append([[float(gradient.sum()) for gradient in gradients] for gradients in kept])
        for parameter, one, other in zip(parameters, *kept, strict=True):
            parameter.grad = one - (one * other).sum() / other.square().sum() * other
        parameters[3].grad = None
        assert parameters[3].grad is None and parameters[2].grad is parameters[2].grad
        optimizer.step()


class Accumulating(Toy):
    """Reads gradients between micro-batches, makes them finite, and sets them by `.grad.data`."""

    def on_after_backward(self) -> None:
        for parameter in self.blocks.parameters():
            assert parameter.grad is not None
            self.seen.append(parameter.grad.abs().sum().item())
        self.blocks[0].up.weight.grad.data[0] = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([float(parameter.grad.norm()) for parameter in self.blocks.parameters()])


class HookedInInit(Toy):
    """Hooks that a parameter has before the strategy's own: they read, change and drop sums over micro-batches."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for parameter in self.blocks.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)
        self.blocks[1].up.weight.register_post_accumulate_grad_hook(self.drop)

    def halve(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def drop(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(parameter.grad.norm().item())
        if len(self.seen) % 3:
            parameter.grad = None


class Assigned(Manual):
    """Gradients are assigned before a backward that adds to them, assigned without one, and dropped before clipping."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        parameters = list(self.blocks.parameters())
        optimizer.zero_grad()
        for number, parameter in enumerate(parameters):
            if batch_idx != 1 or number % 2:
                parameter.grad = torch.full_like(parameter, 0.01 * number)
        if batch_idx < 2:
            loss = self.loss(batch[0])
            self.manual_backward(loss)
            self.seen.append(loss.item())
        if batch_idx == 1:
            parameters[4].grad = None
            self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


class Zeroed(Toy):
    """Gradients become zero instead of None, so that a parameter that is not used is stepped with zeros."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) if len(self.seen) % 2 else super().forward(x)


KINDS = [
    Surgery,
    Assigned,
    Accumulating,
    HookedInInit,
    Zeroed,
]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(tmp_path: Path, kind: type[Toy]) -> None:
    arguments = {"accumulate_grad_batches": 2} if kind in (Accumulating, HookedInInit) else {}
    compare(tmp_path, lambda: kind(**ADAMW), "host", **arguments)


def test_a_gradient_that_a_step_has_used_is_an_error(tmp_path: Path) -> None:
    """Also after the parameter got another gradient, in a micro-batch without a step."""
    kept: list[Tensor] = []

    def act(module: Any) -> None:
        if module.global_step > 1:
            kept.append(module.blocks[0].up.weight.grad)
            assert kept[0].shape == (8, 8)
            with pytest.raises(RuntimeError, match=r"blocks.0.up.weight was consumed.*on_before_optimizer_step"):
                kept[0].norm()

    fit(tmp_path, Toy("on_train_batch_end", act), "host", accumulate_grad_batches=2, max_epochs=2)
    assert len(kept) == 4


# ---- zero_grad ----


def drop_none(optimizer: Any, call: int) -> None:
    return


def drop_at_every_other_call(optimizer: Any, call: int) -> None:
    if call % 2 == 0:
        torch.optim.Optimizer.zero_grad(optimizer)


def drop_some(optimizer: Any, call: int) -> None:
    for parameter in optimizer.param_groups[0]["params"][call % 2 :: 2]:
        parameter.grad = None


def halve(optimizer: Any, call: int) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def zero_some(optimizer: Any, call: int) -> None:
    gradients = [p.grad for p in optimizer.param_groups[0]["params"][call % 3 :] if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


DROPS = [drop_none, drop_at_every_other_call, drop_some, halve, zero_some]


class DropsInModule(Toy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.drop(getattr(optimizer, "optimizer", optimizer), batch_idx)


class DropsInOptimizer(Toy):
    """`zero_grad` of the optimizer is replaced, by a subclass or by a function."""

    def __init__(self, *, subclass: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.subclass = subclass

    def configure_optimizers(self) -> Any:
        optimizer, drop = super().configure_optimizers(), self.drop
        calls = iter(range(100))
        if self.subclass:
            kind = type(optimizer)
            members = {"zero_grad": lambda self, set_to_none=True: drop(self, next(calls))}
            optimizer.__class__ = type(kind.__name__, (kind,), members)
        else:
            optimizer.zero_grad = lambda set_to_none=True: drop(optimizer, next(calls))
        return optimizer


@pytest.mark.parametrize(
    ("kind", "how", "drop"),
    [
        *((DropsInModule, {}, drop) for drop in DROPS),
        (DropsInOptimizer, {"subclass": True}, halve),
        (DropsInOptimizer, {"subclass": False}, drop_some),
    ],
)
def test_gradients_that_zero_grad_does_not_drop_are_added_to(
    tmp_path: Path, kind: type[Toy], how: Any, drop: Any
) -> None:
    def make() -> Toy:
        module = kind(**how, **ADAMW)
        module.drop = drop
        return module

    compare(tmp_path, make, "host")


def test_gradients_that_nothing_drops_are_not_recorded(tmp_path: Path) -> None:
    module = DropsInModule(**ADAMW)
    module.drop = drop_none
    with pytest.raises(RuntimeError, match=r"that the last step has used is added to.*recover=False"):
        fit(tmp_path, module, "ssd", strategy={"recover": True})


class StepsAgain(Manual):
    """Makes steps that use gradients of earlier steps: all of them, or those of one block."""

    case = ""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if self.case == "one block":
            loss = self.blocks[batch_idx % 2](batch[0]).square().mean()
        elif self.case == "one parameter":
            loss = list(self.blocks[0].parameters())[batch_idx % 2].square().sum()
        else:
            loss = self.loss(batch[0])
        if self.case == "two steps":
            optimizer.zero_grad()
        if self.case != "no backward" or batch_idx % 2 == 0:
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        if self.case == "two steps":
            optimizer.step()
        self.seen.append(loss.detach().clone())


@pytest.mark.parametrize(
    ("case", "precision", "states"),
    [
        ("two steps", "32-true", "host"),
        ("no backward", "bf16-mixed", "ssd"),
        ("one block", "32-true", "host"),
        ("one parameter", "bf16-mixed", "host"),
    ],
)
def test_gradients_that_zero_grad_does_not_drop_are_stepped_again(
    tmp_path: Path, case: str, precision: Any, states: str
) -> None:
    def make() -> Toy:
        module = StepsAgain(**ADAMW)
        module.case = case
        return module

    compare(tmp_path, make, states, precision=precision)


class Alternates(Manual):
    """Two optimizers in turn, as a GAN has; each zeroes its gradients before its own backward only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = self.loss(batch[0])
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.seen.append(loss.detach().clone())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(block.parameters()) for block in self.blocks]


def test_a_step_records_no_gradients_that_another_optimizer_has_used(tmp_path: Path) -> None:
    def train(states: str | None, **strategy: Any) -> Any:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        return fit(tmp_path, Alternates(), states, strategy=strategy, plugins=plugin)

    assert_same(train("ssd", recover=True), train(None))


class SkipsBackward(Toy):
    """Its second batch has neither `zero_grad` nor backward, as an epoch for BatchNorm's statistics."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.fit_loop._skip_backward = batch_idx == 1


class SkipsBackwardAndReads(SkipsBackward):
    def on_after_backward(self) -> None:
        pass


@pytest.mark.parametrize("algorithm", [None, "norm"])
def test_a_step_without_backward_uses_the_gradients_of_the_last_step(tmp_path: Path, algorithm: str | None) -> None:
    clip: Any = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm} if algorithm else {}
    compare(tmp_path, lambda: SkipsBackwardAndReads(**ADAMW), "host", **clip)
    with pytest.raises(RuntimeError, match=r"would use the gradient of .* again.*Call `optimizer.zero_grad\(\)`"):
        fit(tmp_path, SkipsBackward(**ADAMW), "host", **clip)


class Normalized(Toy):
    def __init__(self) -> None:
        super().__init__(**ADAMW)
        self.blocks.append(nn.BatchNorm1d(8))


def test_averages_of_weights_with_batch_norm(tmp_path: Path) -> None:
    """Lightning's epoch for the statistics of BatchNorm ends with a step, which uses the last gradients."""

    def train(states: str | None) -> Any:
        callback = pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
        return fit(tmp_path, Normalized(), states, callbacks=[callback], max_epochs=3)

    expected = train(None)
    for states in PLACES:
        assert_same(train(states), expected)


class Keeps(Toy):
    """Reads gradients of earlier steps that `zero_grad` has filled with zeros, and to which backward has added."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        self.kept = getattr(self, "kept", None) or [parameter.grad for parameter in self.blocks.parameters()]
        self.seen.append([float(gradient.sum()) for gradient in self.kept])

    def on_train_end(self) -> None:
        del self.kept


def test_zeros_are_written_to_the_tensors_that_user_code_has_kept(tmp_path: Path) -> None:
    compare(tmp_path, lambda: Keeps(**ADAMW), "host")


def test_a_parameter_is_given_the_gradient_of_another(tmp_path: Path) -> None:
    def swap(module: Any) -> None:
        one, other = (block.up.weight for block in module.blocks)
        one.grad, other.grad = other.grad, one.grad

    compare(tmp_path, lambda: Toy("on_after_backward", swap, **ADAMW), "host")


def test_dropping_an_unused_gradient_keeps_those_that_are_being_accumulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "make_copy_engine", LateCopies)

    def drop(module: Any) -> None:
        if len(module.losses) == 1:
            module.blocks[1].unused.grad = None

    def make() -> Toy:
        module = Toy("on_after_backward", drop, **ADAMW)
        module.blocks[1].unused = nn.Parameter(torch.ones(8))
        return module

    compare(tmp_path, make, "host", accumulate_grad_batches=2)


# ---- clipping that is left to the jobs of a step ----


class Alternating(Toy):
    """Uses its second block in every other batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count = 2 - batch_idx % 2
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.count]:
            x = block(x)
        return x


def _total(module: Any) -> float:
    return sum(float(one.grad.norm()) for one in module.blocks.parameters() if one.grad is not None)


def _add(module: Any) -> None:
    if (gradient := module.blocks[0].up.weight.grad) is not None:
        gradient.add_(0.25)


def _assign(module: Any) -> None:
    module.blocks[1].down.weight.grad = torch.full((8, 8), 0.125)


def _drop(module: Any) -> None:
    module.blocks[1].up.weight.grad = None


def _clip(module: Any) -> float:
    return float(nn.utils.clip_grad_norm_(module.blocks.parameters(), 0.003))


def _clip_further(module: Any) -> None:
    _by_precision(module, 0.002, "norm")


def _clamp(module: Any) -> None:
    _by_precision(module, 0.001, "value")


def _by_precision(module: Any, limit: float, algorithm: str) -> None:
    """Does the work of `clip_gradients`, which refuses other limits than the Trainer's."""
    kind = pl.utilities.enums.GradClipAlgorithmType(algorithm)
    module.trainer.precision_plugin.clip_gradients(module.optimizers().optimizer, limit, kind)


def _backward(module: Any) -> None:
    module.loss(torch.linspace(-1, 1, 32).view(4, 8)).backward()


def _zero(module: Any) -> None:
    module.optimizers().optimizer.zero_grad()


def _replace_by_first(module: Any) -> None:
    """Drops all gradients, and computes those of the first block from other rows."""
    _zero(module)
    module.blocks[0](torch.linspace(-1, 1, 32).view(4, 8)).square().mean().backward()


BETWEEN = {
    "on_after_backward": [_total, _add, _assign, _drop, _clip, _replace_by_first],
    "on_before_optimizer_step": [_total, _add, _assign, _drop, _clip, _backward, _replace_by_first],
    "configure_gradient_clipping": [_total, _add, _assign, _drop, _clip, _clip_further, _clamp, _backward, _zero],
    "optimizer_step": [_total, _add],
    "on_train_batch_end": [_total, _add, _drop],
}
"""Uses of gradients at each hook, of which the last two come after the step."""


def precise(precision: str | float) -> dict[str, Any]:
    """Returns the Trainer's arguments of a precision, or of `16-mixed` with the given loss scale."""
    if isinstance(precision, str):
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=precision, growth_interval=2)
    return {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)}


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(
    uses=st.fixed_dictionaries({hook: st.sampled_from([None, *uses]) for hook, uses in BETWEEN.items()}),
    clip=st.sampled_from([None, 0.01, 10.0]),
    by=st.sampled_from(["norm", "value"]),
    accumulate=st.sampled_from([1, 2]),
    precision=st.sampled_from(["32-true", "bf16-mixed", 2.0**16, 1000.0, 2.0**60]),
    drops=st.booleans(),
    kind=st.sampled_from([Toy, Alternating]),
    late=st.booleans(),
    min_bytes=st.sampled_from([1, 64]),
    states=st.sampled_from(PLACES),
)
def test_uses_of_gradients_before_and_after_they_are_clipped(
    uses: dict[str, Any],
    clip: float | None,
    by: str,
    accumulate: int,
    precision: str | float,
    drops: bool,
    kind: type[Toy],
    late: bool,
    min_bytes: int,
    states: str,
) -> None:
    """With 64 bytes as the smallest, biases are on the device."""

    def make() -> Toy:
        module = kind(**ADAMW)
        for hook, use in uses.items():
            if use is not None or hook == "on_before_optimizer_step":
                module.at(hook, use or (lambda _: None))
        if not drops:
            module.at("on_train_start", lambda module: setattr(module, "optimizer_zero_grad", lambda *_: None))
        return module

    how: dict[str, Any] = {"accumulate_grad_batches": accumulate, **precise(precision)}
    how |= {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": by}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(build, "make_copy_engine", LateCopies)
        found = fit(Path(folder), make(), states, strategy={"min_bytes": min_bytes}, **how)
        patch.undo()
        assert_same(found, fit(Path(folder), make(), None, **how | precise(precision)))


def test_norms_of_gradients_that_were_dropped_do_not_count(tmp_path: Path) -> None:
    compare(tmp_path, lambda: Toy("on_after_backward", _replace_by_first, **ADAMW), "host", gradient_clip_val=0.01)


def test_norms_of_gradients_of_earlier_steps_count(tmp_path: Path) -> None:
    """A parameter that the batch does not use is stepped with its earlier gradient, which nothing has dropped."""

    class NeverDropped(Alternating):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    compare(tmp_path, lambda: NeverDropped(**ADAMW), "host", gradient_clip_val=0.01)


@pytest.mark.parametrize("clips", ["norm", "value in hook", None])
def test_gradients_that_no_hook_reads_are_not_summed_on_the_host(tmp_path: Path, clips: str | None) -> None:
    """They stay where they were copied to, and the jobs of the step clip them."""
    summed: list[int] = []

    def look(module: Any) -> None:
        summed.append(sum(one.accum is not None for _, one in module.trainer.strategy.model_states.gradients.items()))

    def read(module: Any) -> None:
        module.blocks[0].up.weight.grad.sum()

    def clip(module: Any) -> None:
        _by_precision(module, 0.01, str(clips).split()[0])

    how: Any = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": clips} if clips in ("norm", "value") else {}
    for action in (lambda _: None, read):
        module = Toy("on_before_optimizer_step", action, **ADAMW)
        module.at("on_train_end", look)
        if clips is not None and not how:
            module.at("configure_gradient_clipping", clip)
        fit(tmp_path, module, "host", **how)
    assert summed[0] == 0 < summed[1]


# ---- state dicts, copies, files ----


def test_a_trainer_is_pickled_after_fit(tmp_path: Path) -> None:
    module = fit(tmp_path, Toy(), "ssd")
    trainer = pickle.loads(pickle.dumps(module.trainer))
    assert trainer.global_step == module.trainer.global_step


def test_a_write_with_recover_is_refused(tmp_path: Path) -> None:
    def act(module: Any) -> None:
        with pytest.raises(RuntimeError, match=r"blocks.*recover=False"), torch.no_grad():
            module.blocks[0].up.weight.mul_(2)

    expected = fit(tmp_path, Toy("on_train_batch_end", lambda _: None, **ADAMW), None)
    strategy = {"recover": True}
    assert_same(fit(tmp_path, Toy("on_train_batch_end", act, **ADAMW), "ssd", strategy=strategy), expected)


class GradientNodes(Toy):
    """Hooks on several gradients at once, and on autograd's nodes of parameters and of their views."""

    def loss(self, batch: Tensor) -> Tensor:
        parameters = list(self.blocks.parameters())
        torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: self.see("all", *grads))
        weight: Any = self.blocks[0].up.weight
        view, transposed = weight.view(-1), weight.t()
        for made in (view, transposed, weight.expand_as(weight), weight[0]):
            self.seen.append([made.grad_fn.name(), made.grad_fn.next_functions[0][0].name()])
        view.grad_fn.register_hook(lambda inputs, outputs: self.see("view", *inputs, *outputs))
        transposed.grad_fn.register_prehook(lambda outputs: self.see("transposed", *outputs))
        return super().loss(batch) + view.float().square().sum() + (batch @ transposed).float().square().mean()

    def see(self, name: str, *grads: Any) -> None:
        self.seen.append([name, *(grad.float().clone() for grad in grads)])


@pytest.mark.parametrize(("states", "precision"), [("host", "bf16-mixed"), ("ssd", "32-true")])
def test_nodes_of_parameters_are_those_of_plain_training(tmp_path: Path, states: str, precision: str) -> None:
    compare(tmp_path, GradientNodes, states, precision=precision)


class Differentiated(Manual):
    """Computes gradients of chosen weights, while functions, hooks and recomputation in backward use other weights."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.unused = nn.Linear(2, 2)

    def loss(self, batch: Tensor) -> Tensor:
        module = self

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * module.blocks[1].up.weight.norm()

        def hidden(x: Tensor) -> Tensor:
            return nn.functional.linear(x, module.blocks[0].down.weight)

        x = Scaled.apply(self.blocks[0](batch))
        x = torch.utils.checkpoint.checkpoint(hidden, x, use_reentrant=False)
        x.register_hook(lambda gradient: gradient + module.blocks[1].down.bias.detach().mean())
        return self.blocks[1](x).float().square().mean()

    def on_train_start(self) -> None:
        bias = self.blocks[1].up.bias
        bias.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(parameter.grad.clone()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        chosen = [*self.blocks.parameters(), self.unused.weight]
        if self.how == "backward":
            self.manual_backward(loss, retain_graph=True, inputs=chosen[:-1])
            self.manual_backward(loss, inputs=[self.blocks[0].up.weight, self.blocks[1].down.bias])
        else:
            gradients = torch.autograd.grad(loss, chosen, materialize_grads=True)
            for parameter, gradient in zip(chosen, gradients, strict=True):
                parameter.grad = gradient
        self.seen.append([None if one.grad is None else one.grad.clone() for one in self.parameters()])
        optimizer.step()


@pytest.mark.parametrize(
    ("how", "precision", "states"), [("backward", "bf16-mixed", "ssd"), ("grad", "32-true", "host")]
)
def test_gradients_of_chosen_weights(tmp_path: Path, how: str, precision: str, states: str) -> None:
    """`backward(inputs=...)` accumulates gradients, and user code in backward may use other offloaded weights."""
    compare(tmp_path, lambda: Differentiated(how), states, precision=precision)


class GradientsWithGraph(Manual):
    """Uses gradients that `backward(create_graph=True)` has made.

    Args:
        use: the use of the gradients; returns a loss to add, or None.
    """

    def __init__(self, *, use: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.use = use

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch[0])
        self.manual_backward(loss, create_graph=True)
        if (penalty := self.use(self, [parameter.grad for parameter in self.blocks.parameters()])) is not None:
            self.manual_backward(penalty + self.loss(batch[0]))
        optimizer.step()
        self.seen.append(loss.item())


def _penalize(module: Any, gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()


def test_gradients_that_have_lost_their_graph_are_not_differentiated(tmp_path: Path) -> None:
    """`backward` through `.grad` after `create_graph=True` is an error: second derivatives would be lost."""
    model = GradientsWithGraph(use=_penalize, **ADAMW)
    fit(tmp_path, model, None)
    with pytest.raises(RuntimeError, match="the gradient of blocks.*`torch.autograd.grad.*create_graph=True"):
        fit(tmp_path, model, "host")


def _of_gradients(parameters: list[Tensor], gradients: list[Tensor]) -> Any:
    return torch.autograd.grad(gradients, parameters, [torch.ones_like(one) for one in gradients])


class SecondOrder(torch.optim.Optimizer):
    """Differentiates gradients in its step, as AdaHessian does.

    Args:
        derivatives: returns the derivatives of gradients.
    """

    def __init__(self, parameters: Any, derivatives: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.derivatives = derivatives

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        parameters = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        derivatives = self.derivatives(parameters, [one.grad for one in parameters])
        with torch.no_grad():
            for parameter, derivative in zip(parameters, derivatives, strict=True):
                parameter.sub_(parameter.grad / (derivative.abs() + 1), alpha=self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("automatic", [False, True])
def test_an_optimizer_that_differentiates_gradients_is_refused_by_name(tmp_path: Path, automatic: bool) -> None:
    class Automatic(Toy):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(create_graph=True)

    def make() -> Toy:
        optimizer = functools.partial(SecondOrder, derivatives=_of_gradients)
        if automatic:
            return Automatic(optimizer=optimizer)
        return GradientsWithGraph(use=lambda *_: None, optimizer=optimizer)

    fit(tmp_path, make(), None)
    with pytest.raises(RuntimeError, match="the gradient of blocks.*`create_graph=True`.*`states='gpu'`"):
        fit(tmp_path, make(), "host")


def _scale_some(module: Any) -> None:
    """In the first micro-batch of a step, assigns a gradient of one block, and exchanges two of the other one."""
    if module.trainer.fit_loop._should_accumulate():
        first, second = (list(block.parameters()) for block in module.blocks)
        first[0].grad = 0.5 * first[0].grad
        second[0].grad, second[2].grad = second[2].grad.T.contiguous(), second[0].grad.T.contiguous()


@pytest.mark.parametrize(
    ("states", "clip", "hook"), [("ssd", None, "on_train_batch_end"), ("host", 0.01, "on_after_backward")]
)
def test_some_gradients_of_a_unit_are_assigned_amid_accumulation(
    tmp_path: Path, states: str, clip: float | None, hook: str
) -> None:
    """Those that are assigned, and those that are not, are in the step."""
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": clip}
    compare(tmp_path, lambda: Toy(hook, _scale_some, **ADAMW), states, **arguments)


def _decay_gradients(module: Any) -> None:
    for parameter in module.blocks.parameters():
        parameter.grad += 0.1 * parameter


def _add_weights_to_gradients(module: Any) -> Any:
    for parameter in module.blocks.parameters():
        parameter.grad[0].add_(parameter[0], alpha=0.1)
    return [parameter.grad.norm() for parameter in module.blocks.parameters()]


def _add_by_foreach(module: Any) -> None:
    parameters = list(module.blocks.parameters())
    torch._foreach_add_([parameter.grad for parameter in parameters], parameters, alpha=0.1)


def _scale_data_of_gradients(module: Any) -> None:
    for parameter in module.blocks.parameters():
        parameter.grad.data *= 0.5
        parameter.grad.data += 0.1 * parameter.data


@pytest.mark.parametrize(
    ("action", "precision", "hook"),
    [
        (_decay_gradients, "32-true", "on_after_backward"),
        (_add_weights_to_gradients, "bf16-mixed", "on_before_optimizer_step"),
        (_add_by_foreach, "bf16-mixed", "on_after_backward"),
        (_scale_data_of_gradients, "32-true", "on_before_optimizer_step"),
    ],
)
def test_tensors_that_require_a_gradient_are_written_to_gradients(
    tmp_path: Path, action: Any, precision: Any, hook: str
) -> None:
    """As `p.grad += decay * p` does where gradients are enabled."""
    arguments = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    compare(tmp_path, lambda: Toy(hook, action, **ADAMW), "host", **arguments)


def test_a_gradient_to_which_a_graph_was_written_is_not_differentiated(tmp_path: Path) -> None:
    class Written(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            self.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            _decay_gradients(self)
            self.manual_backward(sum(parameter.grad.sum() for parameter in self.blocks.parameters()))

    fit(tmp_path, Written(**ADAMW), None)
    with pytest.raises(RuntimeError, match="the gradient of blocks.*were written.*`states='gpu'`"):
        fit(tmp_path, Written(**ADAMW), "host")
