"""Ctrl-C amid code that must not end halfway."""

import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_ssd
from lightning_ssd import interrupts
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.gradients.gradient_offload import GradientOffloader
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.retry.step_state import StepState
from tests.support.garbage import collect
from tests.support.states import offloading
from tests.support.trainings import WIDTH, SmallModel, batches, make_trainer, nothing_left, small_model  # noqa: F401


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Python's own handler, which Lightning and shells may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_interrupt_waits_and_the_second_does_not() -> None:
    done: list[str] = []

    @uninterrupted
    def inner() -> None:
        press()
        done.append("inner")

    @uninterrupted
    def outer(times: int) -> None:
        for _ in range(times):
            inner()
        done.append("outer")

    outer(0)
    with pytest.raises(KeyboardInterrupt):
        outer(1)
    assert done == ["outer", "inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        outer(2)
    assert done == ["outer", "inner", "outer", "inner"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_while_the_handler_is_put_back_do_not_prevent_that(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = interrupts
    getsignal = module._signal.getsignal

    def press_twice(number: int) -> Any:
        press()
        press()
        return getsignal(number)

    @uninterrupted
    def run() -> None:
        monkeypatch.setattr(module._signal, "getsignal", press_twice)

    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_has_priority_and_other_handlers_are_kept() -> None:
    @uninterrupted
    def fail() -> None:
        press()
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(ValueError):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    thread = threading.Thread(target=uninterrupted(lambda: None))  # which may set no handler
    thread.start()
    thread.join()


class Presses(random.Random):
    """A generator whose restoration is interrupted."""

    def setstate(self, state: Any) -> None:
        press()
        super().setstate(state)


def test_the_state_before_a_micro_batch_is_restored_as_a_whole() -> None:
    module = nn.Module()
    module.noise, module.rate = Presses(1), 0.1
    state = StepState(module, (), None, set())
    drawn, module.rate = module.noise.random(), 0.2
    with pytest.raises(KeyboardInterrupt):
        state.restore()
    assert module.rate == 0.1 and module.noise.random() == drawn


@pytest.mark.parametrize("owner, method", [(StateStore, "restore_to_cpu"), (GradientOffloader, "hand_over")])
def test_an_interrupt_leaves_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    """In the end of training, and as a step is submitted: `fit` ends by it, and no parameter is without memory."""
    called = getattr(owner, method)
    pressed: list[bool] = []

    def interrupted(*args: Any) -> Any:
        if not pressed:
            pressed.append(True)
            press()
        return called(*args)

    monkeypatch.setattr(owner, method, interrupted)
    module, plain = small_model(), small_model()
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, offloading(states="host")).fit(module, batches(2))
    make_trainer(tmp_path).fit(plain, batches(1 if method == "hand_over" else 2))
    steps = len(module.losses)
    assert pressed and steps == (1 if method == "hand_over" else 2)
    for name, value in module.state_dict().items():
        assert value.untyped_storage().nbytes() and torch.isfinite(value).all(), name
        assert method == "hand_over" or torch.equal(value, plain.state_dict()[name]), name


class Fused(SmallModel):
    """Layers that torch evaluates by fused kernels; an interrupt in the first layer of the first validation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WIDTH))
        self.net[0].layers[0].register_forward_pre_hook(self._press)  # type: ignore[operator, union-attr]
        self.pressed = False

    def _press(self, layer: nn.Module, args: Any) -> None:
        if not layer.training and not self.pressed:
            self.pressed = True
            press()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch[:, None])[:, 0]


def test_an_interrupt_in_a_fused_layer_leaves_an_ordinary_model(tmp_path: Path) -> None:
    module, plain = small_model(kind=Fused), small_model(kind=Fused)
    for strategy, one in ((offloading(states="host", min_bytes=1), module), ("auto", plain)):
        with pytest.raises(SystemExit):
            make_trainer(tmp_path, strategy).fit(one, batches(2), batches(1))
    for (name, value), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert type(value) is nn.Parameter and torch.equal(value, other), name
    assert not any("modules" in vars(layer) for layer in module.modules())
    row = torch.ones(1, WIDTH)
    assert torch.equal(module.eval()(row), plain.eval()(row))


@pytest.mark.parametrize("how", [{"states": "host"}, {"states": "ssd", "offload": 1.0}])
def test_no_generator_is_left_before_its_end_in_a_micro_batch(tmp_path: Path, how: dict[str, Any]) -> None:
    """Python loses a KeyboardInterrupt that a signal handler raises while a generator is closed."""
    package = str(Path(lightning_ssd.__file__).parent)
    left: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and argument[0] is GeneratorExit:
            left.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return note if frame.f_code.co_filename.startswith(package) else None

    class Traced(pl.Callback):
        """Traces from the second micro-batch on: the first one has set-up of its own."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            sys.settrace(note if batch_idx < 3 else None)

    collect()  # generators of earlier tests, which were interrupted, end here
    try:
        make_trainer(tmp_path, offloading(**how), callbacks=[Traced()], gradient_clip_val=1.0).fit(
            small_model(), batches(5)
        )
    finally:
        sys.settrace(None)
    assert not left
