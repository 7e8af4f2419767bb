"""Checkpointed unit calls drop what autograd saves in them, and run their forward again in backward."""

import contextlib
import copy
import functools
import inspect
import pickle
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import DynamicCache, PretrainedConfig, modeling_layers
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_ssd.activations import ActivationOffloader, CheckpointedCall, UnitCall, UnitProof, mark_weights
from lightning_ssd.profiling import TraceMode
from lightning_ssd.types import Choice, InputChoice
from lightning_ssd.uncopied import ModuleHook
from tests.support.compare import assert_same
from tests.support.offloader import CPU, Directed, change_policy, open_offloader


class Seen:
    """What the forwards of a layer have seen.

    Attributes:
        runs: number of them.
        made: the storages of their hidden values.
        keywords: their other keyword arguments.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.made: list[weakref.ref[Any]] = []
        self.keywords: list[dict[str, Any]] = []


class Layer(GradientCheckpointingLayer):
    """A layer with dropout that calls `inside` between its two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.inside: Any = lambda value: value
        self.seen = Seen()
        self.config = PretrainedConfig()
        self.config.flags = {"scaled": [False]}
        self.adapters = {"plain": 1.0}
        self.weights = defaultdict(int)
        self.powers = deque([1.0])

    def forward(self, value: Tensor, scale: Any = None, past_key_values: Any = None, **keywords: Any) -> Tensor:
        self.seen.runs += 1
        self.seen.keywords.append(keywords)
        hidden = torch.sigmoid(self.up(value))
        self.seen.made.append(weakref.ref(hidden.untyped_storage()))
        hidden = self.inside(hidden) * 2 if self.config.flags["scaled"][0] else self.inside(hidden)
        hidden = hidden.tanh() if "tanh" in self.adapters else hidden
        hidden = hidden * 3 if self.weights.get("three") else hidden ** self.powers[-1]
        if past_key_values is not None:
            keys, values = past_key_values.update(hidden[None, None], hidden[None, None] * 2, 0)
            hidden = hidden + keys[0, 0, -4:] * values[0, 0, :4] * keys.shape[2]
        result = value + self.drop(self.down(hidden))
        return result if scale is None else result * scale["by"][0]


class Layers(nn.Module):
    """Three layers, of which the middle one is called by `call`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.middle: Any = self.layers[1]
        self.call: Callable[[Tensor], Tensor] = lambda value: self.middle(value)

    def forward(self, value: Tensor) -> Tensor:
        return self.layers[2](self.call(self.layers[0](value))).square().sum()

    def run(self) -> list[Tensor]:
        """Returns the loss and the gradients of a forward and backward."""
        torch.manual_seed(1)
        return self.gradients(self(VALUE))

    def gradients(self, loss: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


VALUE = torch.linspace(-1, 1, 32).reshape(4, 8)

FREED = frozenset({UnitCall(1, 0)})
"""The calls that are checkpointed in the tests: of the middle layer."""


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[ActivationOffloader]:
    with open_offloader(tmp_path, tier="host") as offloader:
        yield offloader


_KEEP: InputChoice = "keep"


class Checkpointed:
    """A model of which the calls `freed` are checkpointed; the other layers keep their saved tensors."""

    def __init__(self, offloader: ActivationOffloader, model: Layers, freed: frozenset[UnitCall] = FREED) -> None:
        self.model = model
        self._freed, self._inputs = freed, _KEEP
        self._directed = Directed(offloader, list(model.layers))
        with self._directed.record():
            torch.manual_seed(1)
            loss = model(VALUE)
        model.gradients(loss)
        self.saved = saved = self._directed.end_record()
        self.bytes = self._directed.graph.checkpoint_bytes()
        self._choices: dict[int, Choice] = {item.buffer: "keep" for item in saved}

    def offload_inputs(self) -> None:
        """Has the following forwards offload the inputs of layers that other layers have made."""
        saved = self._directed.graph.saved(1)
        self._choices |= {item.buffer: "host" for item in saved if item.is_unit_input and item.unit_call.unit}
        self._inputs = "host"

    def forward(self) -> Tensor:
        torch.manual_seed(1)
        with self._directed.direct(self._choices, self._freed, self._inputs):
            return self.model(VALUE)

    def check(self) -> Tensor:
        torch.manual_seed(1)
        with self._directed.check(self._freed):
            return self.model(VALUE)

    def run(self) -> list[Tensor]:
        """Returns the loss and the gradients."""
        gradients = self.model.gradients(self.forward())
        self.end()
        return gradients

    def end(self) -> None:
        self._directed.end_direct()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of transformers' layers that they drop arguments."""
    messages: list[str] = []
    for method in ("warning", "warning_once"):
        monkeypatch.setattr(modeling_layers.logger, method, messages.append)
    return messages


def count_runs(model: Layers) -> list[int]:
    """Returns the number of runs of each layer since the last call."""
    counts = [layer.seen.runs for layer in model.layers]
    for layer in model.layers:
        layer.seen.runs = 0
    return counts


def assert_runs_again(offloader: ActivationOffloader, model: Layers) -> None:
    """Asserts that the middle layer is checkpointed, and computes what it does in plain training."""
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    assert UnitCall(1, 0) in checkpointed.bytes
    count_runs(model)
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 2, 1]


def test_a_checkpointed_call_frees_its_saved_tensors(offloader: ActivationOffloader) -> None:
    model = Layers()
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    assert checkpointed.bytes.keys() >= FREED and checkpointed.bytes[UnitCall(1, 0)] == 0
    for layer in model.layers:
        layer.seen.made.clear()
    count_runs(model)
    for _ in range(2):
        loss = checkpointed.forward()
        alive = [layer.seen.made[-1]() is not None for layer in model.layers]
        assert alive == [True, False, True]
        assert count_runs(model) == [1, 1, 1]
        assert_same(model.gradients(loss), expected)
        checkpointed.end()
        assert count_runs(model) == [0, 1, 0]


def note_input(inputs: list[weakref.ref[Any]], module: nn.Module, args: tuple[Tensor]) -> None:
    inputs.append(weakref.ref(args[0].untyped_storage()))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_of_checkpointed_calls_are_offloaded(
    offloader: ActivationOffloader, autocast: bool, again: bool
) -> None:
    """The plan offloads the inputs of the second and third layer. The first layer's is the user's tensor.

    Other arguments, for which a plan has no choice, are kept. With autocast, operators save casts of the inputs, so
    that only checkpointed calls save these.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        _assert_inputs_are_offloaded(offloader, again=again)


def _assert_inputs_are_offloaded(offloader: ActivationOffloader, *, again: bool) -> None:
    model = Layers()
    model.call = lambda value: model.middle(value, other=value * 0.5)
    model.middle.seen.keywords = deque(maxlen=0)
    expected = model.run()
    inputs: list[weakref.ref[Any]] = []
    checkpointed = Checkpointed(offloader, model, frozenset(UnitCall(unit, 0) for unit in range(3)))
    checkpointed.offload_inputs()
    for layer in model.layers[1:]:
        layer.register_forward_pre_hook(ModuleHook(functools.partial(note_input, inputs)))
    for _ in range(2):
        inputs.clear()
        stored = offloader.stats().stored
        loss = checkpointed.forward()
        assert [one() for one in inputs] == [None, None]
        assert offloader.stats().stored - stored == 2 * VALUE.nbytes
        if again:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert_same(model.gradients(loss), expected)
        checkpointed.end()


def test_inputs_are_offloaded_while_recomputed_tensors_are_checked(offloader: ActivationOffloader) -> None:
    """As in the recorded micro-batch: where memory is short, the inputs of all layers may have no room."""
    model = Layers()
    expected = model.run()
    inputs: list[weakref.ref[Any]] = []
    checkpointed = Checkpointed(offloader, model, frozenset(UnitCall(unit, 0) for unit in range(3)))
    for layer in model.layers[1:]:
        layer.register_forward_pre_hook(ModuleHook(functools.partial(note_input, inputs)))
    loss = checkpointed.check()
    assert [one() for one in inputs] == [None, None]
    assert_same(model.gradients(loss), expected)
    checkpointed.end()


class Made(TorchDispatchMode):
    """Storages of values that are cast, such as weights by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.casts.append(weakref.ref(result.untyped_storage()))
        return result


def with_an_argument_that_is_saved_afterwards(model: Layers) -> None:
    """The layer itself does not save it, so that its record is made for the argument."""

    def call(value: Tensor) -> Tensor:
        other = value * 0.5
        result: Tensor = model.middle(value, other=other) * other
        return result

    model.call = call


@pytest.mark.parametrize("prepare", [lambda model: None, with_an_argument_that_is_saved_afterwards])
def test_a_recorded_checkpointed_call_keeps_no_memory(
    offloader: ActivationOffloader, prepare: Callable[[Layers], None]
) -> None:
    """Autocast's casts of weights are freed as well, and inputs are offloaded: the record is that of other calls."""
    model, graphs = Layers(), []
    prepare(model)
    offloader.min_bytes = 1
    for checkpointed in (False, True):
        proofs = {layer: UnitProof(layer) for layer in model.layers} if checkpointed else {}
        recorder = TraceMode([[layer] for layer in model.layers], CPU, None, offloader, proofs)
        offloader.begin_micro_batch()
        rules = {"mode": recorder, "on_saved": recorder.on_saved, "on_unpacked": recorder.on_unpacked}
        change_policy(offloader, **rules)
        inputs: list[weakref.ref[Any]] = []
        see = functools.partial(note_input, inputs)
        hooks = [layer.register_forward_pre_hook(ModuleHook(see)) for layer in model.layers[1:]]
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Made() as made, offloader.hooks():
            loss = model(VALUE)
        casts_alive, inputs_alive = ([one() is not None for one in made] for made in (made.casts, inputs))
        assert any(casts_alive) is not checkpointed and inputs_alive == [False, False]
        recorder.begin_backward()
        loss.backward()
        recorder.end_backward()
        recorder.finish()
        model.zero_grad()
        offloader.end_backward()
        change_policy(offloader, mode=None, on_saved=None, on_unpacked=None)
        recorder.close()
        graphs.append(recorder.graph)
        for hook in hooks:
            hook.remove()
    assert graphs[0].cast_bytes == graphs[1].cast_bytes and len(graphs[0].cast_bytes) == 3
    assert graphs[0].transients.measure() == graphs[1].transients.measure()
    assert graphs[0].saved(1) == graphs[1].saved(1)


def with_cache(model: Layers) -> None:
    model.call = lambda value: model.middle(value, past_key_values=DynamicCache(), use_cache=True)


@pytest.mark.parametrize("prepare", [lambda model: None, with_cache])
def test_a_graph_can_be_used_twice(offloader: ActivationOffloader, prepare: Callable[[Layers], None]) -> None:
    model = Layers()
    prepare(model)
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    loss = checkpointed.forward()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert_same(model.gradients(loss), expected)
    checkpointed.end()


def test_an_argument_that_a_plan_has_kept_is_recorded_again(offloader: ActivationOffloader) -> None:
    """A tensor of the user lives longer than the plan, and a later profile counts it as one that autograd saves."""
    model = Layers()
    for _ in range(2):
        checkpointed = Checkpointed(offloader, model, frozenset({UnitCall(0, 0)}))
        assert "input" in [item.name for item in checkpointed.saved]
        checkpointed.run()


def test_the_layer_is_the_users_at_every_time(offloader: ActivationOffloader) -> None:
    """Copies and pickles of it, also in its own forward, are copies of a plain layer."""
    model = Layers()
    seen: list[dict[str, Any]] = []

    def look(value: Tensor) -> Tensor:
        assert not model.middle.gradient_checkpointing
        with torch.no_grad():
            copied, loaded = (pickle.loads(pickle.dumps(model.middle.up)), copy.deepcopy(model.middle.down))
        seen.append(dict(vars(model.middle)))
        assert copied.weight.shape == loaded.weight.T.shape
        return value

    model.middle.inside = look
    expected = model.run()
    plain, *_ = seen
    checkpointed = Checkpointed(offloader, model)
    assert_same(checkpointed.run(), expected)
    assert len(seen) == 4 and all(list(one) == list(plain) for one in seen)
    assert list(vars(model.middle)) == list(plain)


class Abort(BaseException):
    """An error that is no `Exception`, for which torch calls no hook."""


@pytest.mark.parametrize("error", [ValueError, Abort, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["inside", "before"])
def test_an_error_leaves_nothing_behind(offloader: ActivationOffloader, error: type[BaseException], where: str) -> None:
    """The error is raised in the forward of the layer, or in a later hook before it, such as that of a failed drive."""
    model = Layers()
    failing: list[bool] = []

    def fail(*arguments: Any) -> Any:
        if failing:
            raise error
        return arguments[0]

    if where == "inside":
        model.middle.inside = fail
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    attributes = list(vars(model.middle))
    failing.append(True)
    if where == "before":
        handle = model.middle.register_forward_pre_hook(ModuleHook(fail))
    with pytest.raises(error):
        checkpointed.forward()
    assert _get_current_dispatch_mode() is None
    assert list(vars(model.middle)) == attributes
    saved = offloader.stats().saved
    failing.clear()
    if where == "before":
        handle.remove()
    assert_same(model.run(), expected)
    assert offloader.stats().saved == saved  # no hook is left
    checkpointed.end()
    assert_same(checkpointed.run(), expected)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, Abort])
def test_arguments_of_a_recorded_call_that_can_not_be_saved_leave_nothing_behind(
    offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Their error is that of the forward: after an `OutOfMemoryError`, a training runs the micro-batch again."""
    model = Layers()
    expected = model.run()
    proofs: dict[nn.Module, UnitProof] = {model.middle: UnitProof(model.middle)}
    recorder = TraceMode([[layer] for layer in model.layers], CPU, None, offloader, proofs)
    begin = CheckpointedCall.begin

    def failing(self: CheckpointedCall) -> None:
        monkeypatch.setattr(offloader, "_new_record", fail)
        begin(self)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(CheckpointedCall, "begin", failing)
    offloader.begin_micro_batch()
    change_policy(offloader, mode=recorder, on_saved=recorder.on_saved, on_unpacked=recorder.on_unpacked)
    with pytest.raises(error), offloader.hooks():
        model(VALUE)
    change_policy(offloader, mode=None, on_saved=None, on_unpacked=None)
    recorder.close()
    saved = offloader.stats().saved
    assert _get_current_dispatch_mode() is None
    assert_same(model.run(), expected)
    assert offloader.stats().saved == saved  # no hook is left


@pytest.mark.parametrize("error", [ValueError, Abort])
def test_a_model_that_catches_an_error_computes_something_else(
    offloader: ActivationOffloader, error: type[BaseException]
) -> None:
    """What it computes then is no part of the checkpointed call, or backward raises an error with the reason."""
    model = Layers()
    failing: list[bool] = []

    def call(value: Tensor) -> Tensor:
        try:
            result: Tensor = model.layers[1](value)
        except (ValueError, Abort):
            result = model.middle.down(torch.tanh(model.middle.up(value)))
        return result

    def fail(value: Tensor) -> Tensor:
        if failing:
            raise error
        return value

    model.middle.inside = fail
    checkpointed = Checkpointed(offloader, model)
    model.call = call
    failing.append(True)
    expected = model.run()
    if error is ValueError:
        assert_same(checkpointed.run(), expected)
        return
    with pytest.raises(RuntimeError, match="Layer has raised an error that is no"):
        checkpointed.run()
    checkpointed.end()
    failing.clear()
    expected = model.run()
    assert_same(checkpointed.run(), expected)


def with_hook(model: Layers) -> None:
    model.middle.up.register_forward_hook(lambda *_: None)


def with_backward_hook(model: Layers) -> None:
    model.middle.up.register_full_backward_hook(lambda *_: None)


def with_hook_on_arguments(model: Layers) -> None:
    model.middle.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def with_global_hook(model: Layers) -> None:
    model.handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)  # type: ignore[assignment]


def with_own_forward(model: Layers) -> None:
    forward = model.middle.forward
    model.middle.forward = lambda value: forward(value)


def with_compiled_calls(model: Layers) -> None:
    model.middle.compile(backend="eager")


def with_compiled_class(model: Layers) -> None:
    class Compiled(Layer):
        forward = torch.compile(Layer.forward, backend="eager")

    model.layers[1] = model.middle = Compiled()


def with_object(model: Layers) -> None:
    model.call = lambda value: model.middle(value, state=object())


def with_a_tensor_made_in_inference_mode(model: Layers) -> None:
    with torch.inference_mode():
        scale = torch.full((4, 8), 0.5)
    model.middle.inside = lambda hidden: hidden + model.middle.seen.keywords[-1]["mask"][0]["causal"].sum()
    model.call = lambda value: model.middle(value, mask=[{"causal": scale}])


def without_gradients(model: Layers) -> None:
    def call(value: Tensor) -> Tensor:
        with torch.no_grad():
            model.middle(value)
        return value

    model.call = call


def in_evaluation(model: Layers) -> None:
    model.middle.eval()


def with_a_tensor_of_another_layer(model: Layers) -> None:
    model.layers[0].inside = lambda value: setattr(model, "hidden", value) or value
    model.middle.inside = lambda value: value + model.hidden  # type: ignore[operator]


def with_a_cache_that_another_layer_has_filled(model: Layers) -> None:
    def call(value: Tensor) -> Tensor:
        cache = DynamicCache()
        result: Tensor = model.middle(model.layers[0](value, past_key_values=cache), past_key_values=cache)
        return result

    model.call = call


def with_a_layer_of_another_unit(model: Layers) -> None:
    model.middle.inside = lambda value: value + model.layers[0](VALUE).mean()


def with_a_changed_tensor(model: Layers) -> None:
    model.register_buffer("calls", torch.zeros(()))
    model.middle.inside = lambda value: value + model.calls.add_(1) * 0  # type: ignore[operator]


def with_an_argument_that_is_changed_afterwards(model: Layers) -> None:
    """The change would change what the second run reads."""

    def call(value: Tensor) -> Tensor:
        scale = torch.ones(4, 8)
        result: Tensor = model.middle(value, mask=scale)
        scale.mul_(2)
        return result

    model.call = call
    model.middle.inside = lambda hidden: hidden + model.middle.seen.keywords[-1]["mask"].sum()


def with_statistics(model: Layers) -> None:
    model.statistics = nn.BatchNorm1d(16)
    model.middle.inside = model.statistics


def with_first_hook_on_result(model: Layers) -> None:
    """The user registers it in the forward, and so before those of the package."""

    def call(value: Tensor) -> Tensor:
        handle = model.middle.register_forward_hook(lambda module, args, output: output.sigmoid(), prepend=True)
        result: Tensor = model.middle(value)
        handle.remove()
        return result

    model.call = call


def with_changed_buffer(model: Layers) -> None:
    model.middle.register_buffer("calls", torch.ones(()))
    mark_weights(model)
    model.middle.inside = lambda value: value / model.middle.calls.add_(1).clone()


def with_buffer_changed_afterwards(model: Layers) -> None:
    model.middle.register_buffer("calls", torch.ones(()))
    mark_weights(model)
    model.middle.inside = lambda value: torch.sigmoid(value + model.middle.calls)

    def call(value: Tensor) -> Tensor:
        result: Tensor = model.middle(value)
        model.middle.calls.add_(1)
        return result

    model.call = call


def with_number_of_calls(model: Layers) -> None:
    """The number may be one by which the forward chooses its code."""
    model.middle.calls = 0

    def inside(value: Tensor) -> Tensor:
        model.middle.calls += 1
        return value

    model.middle.inside = inside


def with_generator(model: Layers) -> None:
    generator = torch.Generator().manual_seed(0)
    model.middle.inside = lambda value: value * torch.rand(16, generator=generator)


def with_random_numbers_of_python(model: Layers) -> None:
    model.middle.inside = lambda value: value * random.random()


def with_random_numbers_of_numpy(model: Layers) -> None:
    model.middle.inside = lambda value: value * float(np.random.rand())


class Scaled(TorchFunctionMode):
    """Multiplies the results of `torch.sigmoid`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.sigmoid else result


def with_function_mode(model: Layers) -> None:
    def call(value: Tensor) -> Tensor:
        with Scaled():
            result: Tensor = model.middle(value)
        return result

    model.call = call


def with_wrapper_inside(model: Layers) -> None:
    forward = model.middle.up.forward
    model.middle.up.forward = lambda value: forward(value)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "prepare",
    [
        with_hook,
        with_backward_hook,
        with_hook_on_arguments,
        with_first_hook_on_result,
        with_global_hook,
        with_own_forward,
        with_compiled_calls,
        with_compiled_class,
        with_object,
        with_a_tensor_made_in_inference_mode,
        without_gradients,
        in_evaluation,
        with_a_tensor_of_another_layer,
        with_a_cache_that_another_layer_has_filled,
        with_a_layer_of_another_unit,
        with_a_changed_tensor,
        with_an_argument_that_is_changed_afterwards,
        with_statistics,
        with_changed_buffer,
        with_buffer_changed_afterwards,
        with_number_of_calls,
        with_generator,
        with_random_numbers_of_python,
        with_random_numbers_of_numpy,
        with_function_mode,
        with_wrapper_inside,
    ],
)
def test_layers_that_must_run_once(offloader: ActivationOffloader, prepare: Callable[[Layers], None]) -> None:
    """They can't be planned as checkpointed."""
    model = Layers()
    prepare(model)
    try:
        checkpointed = Checkpointed(offloader, model)
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()  # type: ignore[union-attr]
    assert UnitCall(1, 0) not in checkpointed.bytes
    assert UnitCall(2, 0) in checkpointed.bytes or prepare is with_global_hook


def with_hook_on_result(model: Layers) -> None:
    model.middle.register_forward_hook(lambda module, args, output: output.sigmoid())


def with_hook_on_keywords(model: Layers) -> None:
    def hook(module: nn.Module, args: object, keywords: dict[str, Any], output: Tensor) -> Tensor:
        return output.sigmoid() * keywords["scale"]["by"][0]

    model.middle.register_forward_hook(hook, with_kwargs=True)
    model.call = lambda value: model.middle(value, scale={"by": [torch.full((8,), 2.0)]}, use_cache=True)


def with_hook_on_gradients(model: Layers) -> None:
    model.middle.register_full_backward_hook(lambda module, of_inputs, of_outputs: tuple(g * 2 for g in of_inputs))


def with_hook_on_gradients_of_result(model: Layers) -> None:
    model.middle.register_full_backward_pre_hook(lambda module, of_outputs: tuple(g * 2 for g in of_outputs))


@pytest.mark.parametrize(
    "prepare", [with_hook_on_result, with_hook_on_keywords, with_hook_on_gradients, with_hook_on_gradients_of_result]
)
def test_hooks_on_the_layer_itself_run_once(offloader: ActivationOffloader, prepare: Callable[[Layers], None]) -> None:
    """Its saved tensors are dropped, and those that a hook saves are not."""
    plain = Layers().run()
    model = Layers()
    prepare(model)
    assert not torch.equal(plain[1], model.run()[1])
    assert_runs_again(offloader, model)


def test_contexts_that_hooks_of_the_user_enter_and_leave(offloader: ActivationOffloader) -> None:
    """A layer that runs as in plain training ends before the user's hook leaves the context."""
    model = Layers()
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    model.middle.drop.p = 0.0  # its operator changes a tensor in place, for which it would be intercepted
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    model.middle.register_forward_pre_hook(lambda *_: hooks.__enter__())
    model.middle.register_forward_hook(lambda *_: hooks.__exit__())
    expected = model.run()
    by_layer = list(packed)
    checkpointed = Checkpointed(offloader, model, frozenset())
    packed.clear()
    assert_same(checkpointed.run(), expected)
    assert packed == by_layer
    assert_same(model.run(), expected)


class OwnCall(Layer):
    """A layer that saves a tensor in its `__call__`, after its forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.sigmoid(super().__call__(*args, **kwargs))


class Derived(Layer):
    """A layer that saves a tensor after the forward of its base class."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.sigmoid(super().forward(*args, **kwargs))


class Undecorated(Layer):
    """A layer as those of transformers before 5.23, where `__call__` reads whether the user checkpoints it."""


Undecorated.forward = inspect.unwrap(Layer.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [OwnCall, Derived, Undecorated])
def test_layers_of_derived_classes(offloader: ActivationOffloader, kind: type[Layer]) -> None:
    model = Layers()
    model.layers[1] = model.middle = kind()
    assert_runs_again(offloader, model)


def switch_to_evaluation(model: Layers) -> None:
    model.eval()


def change_an_option(model: Layers) -> None:
    model.middle.drop.p = 0.25


def replace_a_module(model: Layers) -> None:
    model.middle.up = nn.Linear(8, 16)


def replace_a_function(model: Layers) -> None:
    model.middle.inside = torch.tanh


def replace_a_class(model: Layers) -> None:
    model.middle.drop.__class__ = nn.Tanh


def change_the_configuration(model: Layers) -> None:
    model.middle.config.flags["scaled"][0] = True


def rename_an_option(model: Layers) -> None:
    model.middle.adapters["tanh"] = model.middle.adapters.pop("plain")


def add_an_option_with_default(model: Layers) -> None:
    model.middle.weights["three"] += 1


def append_to_a_queue(model: Layers) -> None:
    model.middle.powers.append(2.0)


def add_a_hook(model: Layers) -> None:
    model.middle.up.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    "change",
    [
        switch_to_evaluation,
        change_an_option,
        replace_a_module,
        replace_a_function,
        replace_a_class,
        change_the_configuration,
        rename_an_option,
        add_an_option_with_default,
        append_to_a_queue,
        add_a_hook,
    ],
)
def test_the_second_run_finds_the_state_of_the_first(
    offloader: ActivationOffloader, change: Callable[[Layers], None]
) -> None:
    """Users change the module between forward and backward, and find their changes afterwards."""
    model = Layers()
    parameters = list(model.parameters())
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    count_runs(model)
    loss = checkpointed.forward()
    change(model)
    changed = [(type(module), dict(vars(module))) for module in model.modules()]
    actual = [loss.detach(), *torch.autograd.grad(loss, parameters)]
    checkpointed.end()
    assert_same(actual, expected)
    assert count_runs(model) == [1, 2, 1]
    assert [(type(module), dict(vars(module))) for module in model.modules()] == changed


class Interrupted(nn.Tanh):
    """A class that the user interrupts when it is replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_an_interrupt_of_the_second_run_leaves_the_present_state(offloader: ActivationOffloader) -> None:
    model = Layers()
    checkpointed = Checkpointed(offloader, model)
    loss = checkpointed.forward()
    model.middle.drop.__class__ = Interrupted
    model.middle.eval()
    changed = [(type(module), dict(vars(module))) for module in model.modules()]
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.gradients(loss)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    checkpointed.end()
    assert [(type(module), dict(vars(module))) for module in model.modules()] == changed


def test_elements_may_have_tensors_as_names(offloader: ActivationOffloader) -> None:
    """The mask of each weight that a user prunes, for example. The weight is replaced later."""
    model = Layers()
    model.middle.masks = {model.middle.up.weight: torch.ones(16, 8)}
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    for _ in range(2):
        count_runs(model)
        assert_same(checkpointed.run(), expected)
        assert count_runs(model) == [1, 2, 1]
        model.middle.up.weight = nn.Parameter(model.middle.up.weight.detach().clone())
        model.middle.masks = {model.middle.up.weight: torch.ones(16, 8)}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("wrap", [lambda linear: linear, nn.Sequential])
def test_a_replaced_module_is_freed(
    offloader: ActivationOffloader, wrap: Callable[[nn.Module], nn.Module], index: int
) -> None:
    """Once a forward has run without it, whether its layer is checkpointed then or not. The first one never is."""
    model = Layers()
    layer: Any = model.layers[index]
    checkpointed = Checkpointed(offloader, model)
    checkpointed.run()
    replaced = weakref.ref(layer.up.weight)
    layer.up = wrap(nn.Linear(8, 16))
    checkpointed.run()
    assert replaced() is None


def test_names_of_classes_are_not_recorded(offloader: ActivationOffloader) -> None:
    """A configuration may have thousands, which would be compared in each forward of a layer."""
    model = Layers()
    names: dict[int, Any] = {0: Seen()}
    model.middle.config.id2label = names
    checkpointed = Checkpointed(offloader, model)
    checkpointed.run()
    name = weakref.ref(names.pop(0))
    assert name() is None
    checkpointed.run()
    assert count_runs(model)[1] == 5


def test_the_kind_of_a_loss_is_not_that_of_a_layer(offloader: ActivationOffloader) -> None:
    """Classifiers of transformers set it in their configuration after the layers of the first forward have run."""
    model = Layers()
    model.middle.config.problem_type = None
    checkpointed = Checkpointed(offloader, model)
    expected = model.run()
    model.middle.config.problem_type = "regression"
    count_runs(model)
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 2, 1]


def test_the_second_run_changes_no_state(offloader: ActivationOffloader) -> None:
    """A layer with a running mean of its forwards has that of plain training, and reads that of the first run."""
    model = Layers()
    middle = model.middle
    middle.register_buffer("mean", torch.zeros(16))

    def inside(value: Tensor) -> Tensor:
        middle.mean = middle.mean * 0.5 + value.detach().mean(0)
        return value * middle.mean

    def reset() -> None:
        middle.mean = torch.zeros(16)

    reset()
    middle.inside = inside
    expected = [tensor for _ in range(3) for tensor in model.run()]
    mean = middle.mean
    checkpointed = Checkpointed(offloader, model)
    assert UnitCall(1, 0) in checkpointed.bytes
    reset()
    assert_same([tensor for _ in range(3) for tensor in checkpointed.run()], expected)
    assert_same(middle.mean, mean)


def test_the_second_run_has_the_settings_of_the_first(offloader: ActivationOffloader) -> None:
    """A forward ran inside of contexts that choose kernels and the dtype of new tensors; backward runs outside."""
    model = Layers()

    def inside(value: Tensor) -> Tensor:
        value = nn.functional.scaled_dot_product_attention(value[None], value[None], value[None])[0]
        return value + torch.ones(16).cumsum(0).div(3).to(value.dtype)

    def call(value: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                result: Tensor = model.middle(value)
        finally:
            torch.set_default_dtype(torch.float32)
        return result

    model.middle.inside, model.call = inside, call
    assert_runs_again(offloader, model)
    assert torch.get_default_dtype() == torch.float32 and torch.backends.cuda.flash_sdp_enabled()


def test_a_second_run_has_the_dtype_that_autocast_takes_over(offloader: ActivationOffloader) -> None:
    """A context inside of the layer takes the dtype of the one around it, be that disabled."""
    model = Layers()

    def inside(value: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return (value @ value.T @ value).float()

    def call(value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=False):
            result: Tensor = model.middle(value)
        return result

    model.middle.inside, model.call = inside, call
    assert_runs_again(offloader, model)
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


class OwnCache(DynamicCache):
    """A cache that refers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = {"cache": [self]}


class Windowed(DynamicCache):
    """A cache with a setting that is a tensor, as those of sliding windows have."""

    def __init__(self) -> None:
        super().__init__()
        self.window = torch.tensor(4)


class Unhashable(DynamicCache):
    """A cache that is equal to others, and has no hash for that reason."""

    __hash__ = None  # type: ignore[assignment]


def test_an_unhashable_cache_is_no_argument_of_a_checkpointed_call(offloader: ActivationOffloader) -> None:
    model = Layers()
    model.call = lambda value: model.middle(value, past_key_values=Unhashable(), use_cache=True)
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    assert UnitCall(1, 0) not in checkpointed.bytes
    assert_same(checkpointed.run(), expected)


class ReadTwice(torch.autograd.Function):
    """A function of the user whose backward reads its saved tensor twice."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


def test_a_saved_tensor_may_be_read_twice(offloader: ActivationOffloader) -> None:
    model = Layers()
    model.middle.inside = ReadTwice.apply
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    count_runs(model)
    assert_same(checkpointed.run(), expected)
    assert count_runs(model)[1] > 1


class Switched:
    """An operator that runs one of two functions, by a state that is no attribute of a module."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        self.functions = [first, second]
        self.number = 0

    def __call__(self, value: Tensor) -> Tensor:
        return self.functions[self.number](value)


def run_with_caught_errors(value: Tensor) -> Tensor:
    """Saves tensors of another shape; catches the error that this raises in a second run, as user code may."""
    with contextlib.suppress(Exception):
        value = torch.cat([value, value]).exp()[:4]
    return value.exp()


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda value: value * 2, id="fewer"),
        pytest.param(lambda value: torch.cat([value, value]).exp()[:4], id="other shapes"),
        pytest.param(lambda value: value.double().exp().float(), id="other dtypes"),
        pytest.param(run_with_caught_errors, id="errors are caught"),
    ],
)
def test_a_second_run_that_saves_other_tensors_is_an_error(
    offloader: ActivationOffloader, second: Callable[[Tensor], Tensor]
) -> None:
    """What a forward reads beside its arguments and attributes is not known, such as a global variable."""
    model = Layers()
    model.middle.inside = switched = Switched(lambda value: value.exp().exp(), second)
    model.middle.drop = nn.Identity()
    checkpointed = Checkpointed(offloader, model)
    count_runs(model)
    loss = checkpointed.forward()
    switched.number = 1
    with pytest.raises(RuntimeError, match="has saved other tensors when it was run again in backward"):
        model.gradients(loss)
    checkpointed.end()
    switched.number = 0
    assert_same(checkpointed.run(), model.run())


def test_tensors_of_a_second_run_are_freed_once_they_are_read(offloader: ActivationOffloader) -> None:
    """Those that autograd does not own any more, because their graph was freed in forward, are never kept."""
    model = Layers()
    made: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    def inside(value: Tensor) -> Tensor:
        def note(gradient: Tensor) -> None:
            alive.append([one() is not None for one in made])

        unused = value.cos()  # its graph is freed at the end
        made.extend(weakref.ref(tensor.untyped_storage()) for tensor in (unused.sin(), unused.exp()))
        value = value.exp()
        made.append(weakref.ref(value.untyped_storage()))
        value.register_hook(note)
        first = value.exp()
        made.append(weakref.ref(first.untyped_storage()))
        return first * 2

    model.middle.inside = inside
    checkpointed = Checkpointed(offloader, model)
    loss = checkpointed.forward()
    made.clear()
    alive.clear()
    model.gradients(loss)
    checkpointed.end()
    assert alive == [[False, False, True, False]]


def test_gradients_inside_of_the_forward(offloader: ActivationOffloader) -> None:
    model = Layers()

    def inside(value: Tensor) -> Tensor:
        loss = (torch.sigmoid(value) * value).sum()
        (gradient,) = torch.autograd.grad(loss, [value], create_graph=True)
        return value + gradient

    model.middle.inside = inside
    expected = model.run()
    assert_same(Checkpointed(offloader, model).run(), expected)


def with_own_cache(model: Layers) -> None:
    model.call = lambda value: model.middle(value, past_key_values=OwnCache(), use_cache=True)


def with_a_cache_that_has_a_tensor(model: Layers) -> None:
    model.call = lambda value: model.middle(value, past_key_values=Windowed(), use_cache=True)


def with_an_argument_that_was_changed_before(model: Layers) -> None:
    """Masks are made in that way."""
    model.call = lambda value: model.middle(value, scale={"by": [torch.ones(4, 8).mul_(2)]})


def with_a_container_that_the_forward_fills(model: Layers) -> None:
    """The forward gets the container itself, which the model reads afterwards."""

    def inside(hidden: Tensor) -> Tensor:
        model.middle.seen.keywords[-1]["store"]["mean"] = hidden.detach().mean()
        return hidden

    def call(value: Tensor) -> Tensor:
        store: dict[str, Tensor] = {}
        result: Tensor = model.middle(value, store=store)
        return result * store["mean"]

    model.middle.inside, model.call = inside, call


def with_a_hook_on_an_argument(model: Layers) -> None:
    """The second run does not add it to the argument again, whose gradient it changes."""

    def inside(hidden: Tensor) -> Tensor:
        factor = model.middle.seen.keywords[-1]["factor"]
        factor.register_hook(lambda gradient: gradient * 2)
        return hidden * factor.mean()

    model.middle.inside = inside
    model.call = lambda value: model.middle(value, factor=value.exp())


def with_an_argument_that_depends_on_another_one(model: Layers) -> None:
    """The forward differentiates one by the other."""

    def inside(hidden: Tensor) -> Tensor:
        given = model.middle.seen.keywords[-1]
        (force,) = torch.autograd.grad(given["energy"], given["position"], create_graph=True)
        return hidden * force.mean()

    def call(value: Tensor) -> Tensor:
        position = value.exp()
        result: Tensor = model.middle(value, position=position, energy=position.sin().sum())
        return result

    model.middle.inside, model.call = inside, call


def with_an_argument_that_is_given_twice(model: Layers) -> None:
    """As to `nn.MultiheadAttention`, which asks whether its key is its query."""

    def inside(hidden: Tensor) -> Tensor:
        given = model.middle.seen.keywords[-1]
        return hidden.sin() * hidden.exp() if given["key"] is given["query"] else hidden.cos()

    def call(value: Tensor) -> Tensor:
        query = value.exp()
        result: Tensor = model.middle(value, query=query, key=query)
        return result

    model.middle.inside, model.call = inside, call


def with_an_error_of_its_own(model: Layers) -> None:
    """The error that ends the second run is replaced by another one."""
    forward = Layer.forward

    class Explained(Layer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            try:
                return forward(self, *args, **kwargs).exp()
            except Exception as error:
                raise ValueError("an explanation") from error

    model.middle.__class__ = Explained


def with_a_nested_tensor(model: Layers) -> None:
    """It has no size."""

    def inside(hidden: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([hidden[:1], hidden[1:]]) * 2
        return torch.nested.to_padded_tensor(nested, 0.0).sin().flatten(0, 1)[:4]

    model.middle.inside = inside


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "prepare",
    [
        with_own_cache,
        with_a_cache_that_has_a_tensor,
        with_an_argument_that_was_changed_before,
        with_a_container_that_the_forward_fills,
        with_a_hook_on_an_argument,
        with_an_argument_that_depends_on_another_one,
        with_an_argument_that_is_given_twice,
        with_an_error_of_its_own,
        with_a_nested_tensor,
    ],
)
def test_layers_that_may_run_again(offloader: ActivationOffloader, prepare: Callable[[Layers], None]) -> None:
    model = Layers()
    prepare(model)
    assert_runs_again(offloader, model)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_is_frozen_for_the_forward_alone(offloader: ActivationOffloader, frozen: bool) -> None:
    """Or for the backward alone: autograd saves other tensors for a frozen layer."""
    model = Layers()

    def gradients(loss: Tensor) -> list[Tensor]:
        model.middle.requires_grad_(frozen)
        found = torch.autograd.grad(loss, list(model.layers[0].parameters()))
        assert all(one.requires_grad is frozen for one in model.middle.parameters())
        model.middle.requires_grad_(not frozen)
        return list(found)

    model.middle.requires_grad_(not frozen)
    model.gradients = gradients  # type: ignore[method-assign]
    assert_runs_again(offloader, model)


def test_a_backward_in_compiled_code(offloader: ActivationOffloader) -> None:
    """The second run is not compiled, as the first one was not: compiled code saves other tensors."""
    model = Layers()
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    loss = checkpointed.forward()
    torch.compile(loss.backward.__func__, backend="aot_eager")(loss)  # type: ignore[attr-defined]
    checkpointed.end()
    assert_same([loss.detach(), *(one.grad for one in model.parameters())], expected)


def with_another_function(model: Layers) -> None:
    """The new one may draw numbers of its own, and nothing has shown that it doesn't."""
    model.middle.inside = torch.tanh


def with_another_option(model: Layers) -> None:
    model.middle.config.flags["scaled"][0] = True


@pytest.mark.parametrize(
    "prepare",
    [
        with_hook,
        with_hook_on_arguments,
        with_first_hook_on_result,
        with_own_forward,
        with_object,
        with_a_tensor_made_in_inference_mode,
        in_evaluation,
        with_another_function,
        with_another_option,
    ],
)
def test_layers_that_must_run_once_since_the_recorded_forward(
    offloader: ActivationOffloader, prepare: Callable[[Layers], None]
) -> None:
    """They run once, and their saved tensors are offloaded: the plan has no memory for them."""
    model = Layers()
    checkpointed = Checkpointed(offloader, model)
    prepare(model)
    expected = model.run()
    count_runs(model)
    stored = offloader.stats().stored
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 1, 1]
    assert offloader.stats().stored > stored


def test_checkpointing_that_the_user_has_enabled(offloader: ActivationOffloader) -> None:
    """The layer runs a second time by the user's function."""
    model = Layers()
    checkpointed = Checkpointed(offloader, model)
    called: list[int] = []

    def by_user(forward: Any, *args: Any) -> Any:
        called.append(1)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    model.middle.gradient_checkpointing, model.middle._gradient_checkpointing_func = True, by_user
    expected = model.run()
    assert_same(checkpointed.run(), expected)
    assert len(called) == 2 and model.middle._gradient_checkpointing_func is by_user
    assert UnitCall(1, 0) not in Checkpointed(offloader, model).bytes


def test_arguments_are_those_of_the_call(
    offloader: ActivationOffloader, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors inside of containers have gradients, and no argument is dropped with a warning."""
    model = Layers()
    factor = torch.linspace(1, 2, 8, requires_grad=True)
    model.call = lambda value: model.middle(value, scale={"by": [factor]}, use_cache=True, mask=(None, "causal", 2.0))

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [factor, *model.parameters()])]

    monkeypatch.setattr(model, "gradients", gradients)
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    count_runs(model)
    model.middle.seen.keywords.clear()
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 2, 1]
    assert model.middle.seen.keywords == 2 * [{"use_cache": True, "mask": (None, "causal", 2.0)}]
    assert not warned


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_is_filled_once(offloader: ActivationOffloader, warned: list[str], filled: bool) -> None:
    """The second run fills a copy of the empty cache. A cache that was filled before the forward has no such copy."""
    model = Layers()
    caches: list[DynamicCache] = []

    def call(value: Tensor) -> Tensor:
        caches.append(DynamicCache())
        if filled:
            caches[-1].update(torch.ones(1, 1, 4, 16), torch.ones(1, 1, 4, 16), 0)
        result: Tensor = model.middle(value, past_key_values=caches[-1], use_cache=True)
        return result

    model.call = call
    expected = model.run()
    checkpointed = Checkpointed(offloader, model)
    assert checkpointed.bytes.get(UnitCall(1, 0)) == (None if filled else 2 * 4 * 16 * 4)  # keys and values stay
    count_runs(model)
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 1 if filled else 2, 1]
    nothing = torch.empty(1, 1, 0, 16)
    assert_same(*(cache.update(nothing, nothing, 0) for cache in (caches[-1], caches[0])))
    assert not warned


def test_a_second_call_with_the_same_cache_is_no_checkpointed_one(offloader: ActivationOffloader) -> None:
    model = Layers()

    def call(value: Tensor) -> Tensor:
        cache = DynamicCache()
        result: Tensor = model.middle(model.middle(value, past_key_values=cache), past_key_values=cache)
        return result

    model.call = call
    expected = model.run()
    checkpointed = Checkpointed(offloader, model, FREED | {UnitCall(1, 1)})
    assert UnitCall(1, 0) in checkpointed.bytes and UnitCall(1, 1) not in checkpointed.bytes
    count_runs(model)
    assert_same(checkpointed.run(), expected)
    assert count_runs(model) == [1, 3, 1]


def test_a_weight_that_is_changed_before_backward(offloader: ActivationOffloader) -> None:
    """Plain autograd refuses it, because it has saved the weight, and a second run would compute with other values."""
    model = Layers()
    checkpointed = Checkpointed(offloader, model)
    losses = [model(VALUE), checkpointed.forward()]
    with torch.no_grad():
        model.middle.down.weight.mul_(2)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model.gradients(loss)
    checkpointed.end()


@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_a_tensor_of_a_layer_that_is_changed_before_backward(offloader: ActivationOffloader, where: str) -> None:
    """Plain autograd has saved another tensor, which the second run would compute from other values."""
    model = Layers()
    scale = torch.ones(16)
    if where == "buffer":
        model.middle.register_buffer("scale", scale)
    else:
        model.middle.scales = [scale]
    model.middle.inside = lambda value: value * scale.clone()
    checkpointed = Checkpointed(offloader, model)
    loss = checkpointed.forward()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="belongs to Layer, which is checkpointed. Change it after backward"):
        model.gradients(loss)
    checkpointed.end()


@pytest.mark.parametrize("changed", ["after the forward", "in backward"])
def test_a_statistic_that_the_forward_does_not_read_may_change_before_backward(
    offloader: ActivationOffloader, changed: str
) -> None:
    model = Layers()
    middle = model.middle
    middle.register_buffer("statistic", torch.zeros(()))

    def call(value: Tensor) -> Tensor:
        result = middle(value)
        if changed == "in backward":
            result.register_hook(lambda gradient: middle.statistic.copy_(gradient.norm()) and None)
        else:
            middle.statistic.add_(1)
        return result

    model.call = call
    assert_runs_again(offloader, model)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_that_keep_weights_resident_run_around_the_second_run(
    offloader: ActivationOffloader, fails: bool
) -> None:
    """Other hooks of the package do not, and the one after it does after an error, too."""
    model = Layers()
    events: list[str] = []

    def run(value: Tensor) -> Tensor:
        events.append("run")
        if fails and torch._C._current_graph_task_id() != -1:
            raise ValueError("an error of the user")
        return value

    model.middle.inside = run
    checkpointed = Checkpointed(offloader, model)
    note = events.append
    model.middle.register_forward_pre_hook(ModuleHook(lambda *_: note("begin"), in_reruns=True), prepend=True)
    model.middle.register_forward_pre_hook(ModuleHook(lambda *_: note("other")))
    model.middle.register_forward_hook(ModuleHook(lambda *_: note("end"), in_reruns=True), always_call=True)
    events.clear()
    loss = checkpointed.forward()
    assert events == ["begin", "other", "run", "end"]
    events.clear()
    with pytest.raises(ValueError, match="an error of the user") if fails else nullcontext():
        model.gradients(loss)
    assert events == ["begin", "run", "end"]
    checkpointed.end()
