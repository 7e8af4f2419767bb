"""What training steps of a model do, measured: how long units take, what operations save, and where it all is."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_ssd.activations import ForwardGraph, Recorder, Saved, TensorCache, in_backward
from lightning_ssd.planning import ModelProfile, OperatorProfile, Settled, UnitProfile
from lightning_ssd.planning.plan import Tier
from lightning_ssd.states import ModelStates, Unit

REST = "rest"
"""The operator that stands for those operations of a unit that make nothing that is saved."""

BETWEEN = "between"
WAITING = "waiting"


class Profiler:
    """Measures one training: one micro-batch operation by operation, and then some as they are.

    Nobody waits for the device before `profile`. The numbers of the training stay what they are.

    Args:
        units: of the model, in the order of the forward.
        cache: of the training.
        states: of the training, if they leave the device.
        optimizers: of the model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        cache: TensorCache,
        states: ModelStates | None,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.units = [unit for unit in units if unit.parameters]
        self.graph = ForwardGraph()
        """Of the micro-batch that was recorded."""
        self.peak_bytes = 0
        """The most device memory that was allocated while everything was timed (CUDA)."""
        self._cache = cache
        self._states = states
        self._optimizers = optimizers
        self._timer = _Timer(self.units, cache.device)
        self._copies = [cache.copies] if states is None else [cache.copies, states.copies]
        self._recorder: Recorder | None = None
        self._mode_before = cache.forward_mode
        self._timing = False

    def begin_recording(self) -> None:
        """The next forward is recorded."""
        self._recorder = Recorder([unit.modules for unit in self.units], self._cache.device)
        self._mode_before = self._cache.forward_mode
        self._cache.forward_mode = self._recorder
        self._cache.observer = self._recorder.saved

    def end_recording(self) -> None:
        """The forward is over."""
        if (recorder := self._recorder) is None:
            return
        self._stop_recording()
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)
        recorder.finish()
        self.graph = recorder.graph

    def begin_timing(self) -> None:
        """From now on, everything is timed, and the peak of device memory is another one."""
        if self._cache.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._cache.device)
        for copies in self._copies:
            copies.on_wait = self._timer.wait
        self._timing = True
        self._timer.begin()

    def begin_forward(self) -> None:
        """A micro-batch begins."""
        self._timer.micro_batches += 1
        self._timer.mark(("forward", 0))

    def begin_backward(self) -> None:
        """Its forward is over."""
        self._timer.mark(("backward", self._timer.last))

    def end_backward(self) -> None:
        """Its backward is over."""
        self._timer.mark(BETWEEN)

    def pause(self) -> None:
        """What follows is no part of training."""
        self._timer.mark(None)

    def end_timing(self) -> None:
        """Nothing is timed any more."""
        if not self._timing:
            return
        self._timing = False
        self._timer.end()
        for copies in self._copies:
            copies.on_wait = None
        if self._cache.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._cache.device)

    def close(self) -> None:
        """Takes everything back that it has put anywhere."""
        self._stop_recording()
        self.end_timing()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            self._cache.forward_mode = self._mode_before
            self._cache.observer = None

    def saved(self) -> list[Saved]:
        """Returns what autograd saved in the micro-batch that was recorded, and may leave."""
        return self.graph.saved(self._cache.min_bytes)

    def settled(self) -> Settled:
        """Returns where model states are."""
        places = [self._tiers(unit) for unit in self.units]
        return Settled(tuple(weights for weights, _ in places), tuple(states for _, states in places))

    def profile(
        self, name: str, *, steps: int, micro_batches: int, samples: int, tokens: int, clip_norm: bool
    ) -> ModelProfile:
        """Returns what was measured.

        Args:
            name: of the model.
            steps: that were timed.
            micro_batches: of a step.
            samples: of a micro-batch.
            tokens: of a micro-batch.
            clip_norm: gradients are clipped by their norm, or scaled.
        """
        seconds = self._timer.seconds()
        share = 1 / max(1, self._timer.micro_batches)
        saved = self.saved()
        units = [
            self._unit(
                index,
                unit,
                [item for item in saved if item.unit == index],
                share * seconds["forward", index],
                share * seconds["backward", index],
            )
            for index, unit in enumerate(self.units)
        ]
        between = seconds[BETWEEN] / max(1, steps)
        return ModelProfile(name, tuple(units), micro_batches, samples, tokens, clip_norm, between)

    def _unit(self, index: int, unit: Unit, saved: Sequence[Saved], forward: float, backward: float) -> UnitProfile:
        graph = self.graph
        own = {number for number, operation in enumerate(graph.operations) if operation.unit == index}
        measured = sum(graph.operations[number].seconds for number in own)
        # Operations are timed one by one, with what that costs; together they take as long as the unit does.
        scale = forward / measured if measured else 0.0
        left = set(own)
        operators = []

        def add(name: str, chain: set[int], item: Saved | None) -> None:
            took = scale * sum(graph.operations[number].seconds for number in chain & left)
            share = took / forward if forward else 0.0
            flops = sum(graph.operations[number].flops for number in chain & left)
            again = None
            scratch = 0
            if item is not None and item.again:
                again = scale * sum(graph.operations[number].seconds for number in chain)
                scratch = _scratch_bytes(graph, item)
            operators.append(
                OperatorProfile(
                    name, took, share * backward, flops, item.nbytes if item is not None else 0,
                    (name,) if item is not None else (), again, scratch,
                )
            )  # fmt: skip
            left.difference_update(chain)

        for item in saved:
            if not item.inbound:
                maker = graph.buffers[item.buffer].maker
                add(item.name, set(item.chain) or ({maker} if maker is not None else set()), item)
        took = sum(operator.forward_seconds for operator in operators)
        rest = max(0.0, 1.0 - took / forward) if forward else 1.0
        flops = sum(graph.operations[number].flops for number in left)
        operators.append(OperatorProfile(REST, rest * forward, rest * backward, flops, 0))
        return UnitProfile(
            unit.name,
            tuple(operators),
            sum(item.nbytes for item in saved if item.inbound),
            *self._state_bytes(unit),
        )

    def _state_bytes(self, unit: Unit) -> tuple[int, int, int, int, int]:
        """Returns the count of parameters, and the bytes of weights, gradients and states (read, written)."""
        trained = weights = gradients = states = 0
        homes = {} if self._states is None else self._states.homes
        owned = {parameter for _, parameter in unit.parameters}
        for flat, home in homes.items():
            members = {item.parameter for item in flat.slices} & owned
            if members:
                owned -= members
                trained += sum(item.numel for item in flat.slices) if home.layout.steps else 0
                weights += flat.nbytes
                gradients += home.layout.gradient_bytes
                states += home.layout.rest_bytes
        masters = {} if self._states is None else self._states.masters
        for parameter in owned:
            weights += parameter.numel() * parameter.element_size()
            if parameter.requires_grad:
                trained += parameter.numel()
                master = masters.get(parameter)
                stepped = parameter if master is None else master
                gradients += stepped.numel() * stepped.element_size()
                states += 0 if master is None else master.numel() * master.element_size()
                states += _optimizer_bytes(self._optimizers, stepped)
        return trained, weights, gradients, states, states

    def _tiers(self, unit: Unit) -> tuple[Tier, Tier]:
        """Returns where most of the unit's weights are, and most of the rest."""
        if self._states is None:
            return "gpu", "gpu"
        nbytes: dict[tuple[Tier, Tier], int] = defaultdict(int)
        owned = {parameter for _, parameter in unit.parameters}
        for flat, home in self._states.homes.items():
            if any(item.parameter in owned for item in flat.slices):
                weights, rest = home.on_ssd
                nbytes["ssd" if weights else "host", "ssd" if rest else "host"] += flat.nbytes + home.layout.rest_bytes
        return max(nbytes, key=lambda tiers: nbytes[tiers]) if nbytes else ("gpu", "gpu")


class _Timer:
    """Says what the device does from when to when: forwards and backwards of units, waiting, and what lies between.

    Marks are put by the training thread and, while that waits in `backward`, by autograd's.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self.micro_batches = 0
        self.last = 0
        """The unit whose forward began last."""
        self._units = units
        self._cuda = device.type == "cuda"
        self._handles: list[RemovableHandle] = []
        self._marks: list[tuple[Any, Any]] = []
        self._open: list[int] = []
        self._running: Any = None
        self._waiting = 0
        self._inside = False
        """Whether a micro-batch's forward or backward runs."""

    def begin(self) -> None:
        self._marks.clear()
        self._open.clear()
        self.micro_batches = 0
        for index, unit in enumerate(self._units):
            for module in unit.modules:
                self._hook(index, module)

    def end(self) -> None:
        if self._handles:
            self.mark(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mark(self, running: Any) -> None:
        """From now on the device does `running`; None: nothing that counts."""
        self._inside = isinstance(running, tuple)
        self._running = running
        self._put(running)

    def _turn(self, running: tuple[str, int]) -> None:
        if self._inside:
            self.mark(running)

    def wait(self, begins: bool) -> None:
        """The device waits for a copy, or goes on."""
        self._waiting += 1 if begins else -1
        self._put(WAITING if self._waiting else self._running)

    def seconds(self) -> dict[Any, float]:
        """Returns the seconds of everything that was marked; the host waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[Any, float] = defaultdict(float)
        for (start, running), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if running is not None:
                total[running] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return total

    def _put(self, running: Any) -> None:
        if self._cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((now, running))

    def _hook(self, index: int, module: nn.Module) -> None:
        def before(module: nn.Module, args: object) -> None:
            if self._inside and not in_backward():
                self._open.append(index)
                self.last = index
                self.mark(("forward", index))

        def after(module: nn.Module, args: object, output: object) -> None:
            if not self._inside or in_backward():
                return
            if self._open:
                self._open.pop()
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda _: self._turn(("backward", index)))
            self.mark(("forward", self._open[-1] if self._open else index))

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after))


def count_samples(batch: Any) -> tuple[int, int]:
    """Returns the samples and tokens of a batch: rows, and integers where it has them, of its first tensor."""
    for value in tree_leaves(batch):
        if isinstance(value, Tensor) and value.dim():
            rows = value.shape[0]
            return rows, value.numel() if not value.is_floating_point() and value.dim() == 2 else rows
    return 1, 1


def _scratch_bytes(graph: ForwardGraph, item: Saved) -> int:
    """Returns the bytes on the device while `item` is made again, beside itself: two results of the way to it."""
    made = (buffer for buffer in graph.buffers if buffer.maker in item.chain and buffer.unit is None)
    return 2 * max((buffer.nbytes for buffer in made), default=0)


def _optimizer_bytes(optimizers: Sequence[torch.optim.Optimizer], parameter: nn.Parameter) -> int:
    """Returns the bytes that an optimizer keeps for a parameter."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        if parameter in optimizer.state
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
