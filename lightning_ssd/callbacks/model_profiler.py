"""`ModelProfiler`: what a training step of a model does, measured, for the planner."""

import logging
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.tensor_cache import find_tensor_cache
from lightning_ssd.planning import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.states import find_units

log = logging.getLogger(__name__)

Label = tuple[int, str]
"""A unit's index, and one of its operators."""

REST = "rest"
"""The operator that stands for whatever of a unit is in none of its modules without children."""


class ModelProfiler(pl.Callback):
    """Measures a few training steps, and writes what they do as a profile: `lightning-ssd plan --profile FILE`.

    Of every unit and, in it, of every module without children ("operator"): the time of its forward and backward, its
    FLOP, and the bytes that autograd saves there. Of CUDA devices nobody waits while steps are measured; their clocks
    are read at the end. The numbers of the training stay as they are.

    Args:
        path: JSON file to write when the steps are over.
        warm_up: steps before.
        steps: steps that are measured; times are their means.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, path: str | Path, warm_up: int = 3, steps: int = 3) -> None:
        if warm_up < 1 or steps < 1:
            raise ValueError(f"`warm_up={warm_up}` and `steps={steps}` must be at least 1.")
        self._path = Path(path)
        self._warm_up = warm_up
        self._steps = steps
        self._handles: list[RemovableHandle] = []
        self._mode: _Flops | None = None
        self._measuring = False
        """Whether a forward or backward runs that is measured."""
        self._done = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if find_tensor_cache(trainer) is None:
            raise ValueError("ModelProfiler needs `strategy='ssd_offload'`, or an `ActivationOffload` callback.")
        self._units = [unit for unit in find_units(pl_module, _units_of(trainer)) if unit.parameters]
        self._cuda = pl_module.device.type == "cuda"
        self._first_step = trainer.global_step
        self._done = False
        self._marks: list[tuple[Any, tuple[str, Label] | None]] = []
        self._flops: dict[Label, float] = defaultdict(float)
        self._saved: dict[Label, int] = defaultdict(int)
        self._inputs: dict[int, int] = defaultdict(int)
        self._input_storages: list[set[int]] = [set() for _ in self._units]
        self._micro_batches = 0
        self._open: list[Label] = []
        self._last: Label = (0, REST)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step - self._first_step
        if self._done or step < self._warm_up - 1:
            return
        if not self._handles:
            self._hook()
        if step < self._warm_up:
            if not self._flops:  # once: it slows down what it counts
                self._mode = _Flops(self)
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            return
        cache = find_tensor_cache(trainer)
        assert cache is not None
        cache.observer = self._on_saved
        self._micro_batches += 1
        self._measuring = True
        self._samples, self._tokens = _count(batch)
        self._mark(("forward", (0, REST)))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._stop_counting()
        if self._measuring:
            self._mark(("backward", self._last))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_measuring(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_counting()  # of a batch without backward
        self._stop_measuring(trainer)
        if self._handles and trainer.global_step - self._first_step >= self._warm_up + self._steps:
            self._unhook()
            self._done = True
            profile = self._profile(trainer, pl_module)
            profile.to_json(self._path)
            log.info("profile of %d steps, in %s:\n%s", self._steps, self._path, profile.describe())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._done:
            log.warning("training ended before %d steps were profiled: there is no %s", self._steps, self._path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        self._stop_counting()
        self._stop_measuring(trainer)
        self._unhook()

    # ---- while a step runs ----

    def _stop_counting(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None

    def _stop_measuring(self, trainer: pl.Trainer) -> None:
        if self._measuring:
            self._mark(None)
            self._measuring = False
            if (cache := find_tensor_cache(trainer)) is not None:  # else it is closed already
                cache.observer = None

    def _hook(self) -> None:
        for index, unit in enumerate(self._units):
            for module in unit.modules:
                self._hook_module(module, (index, REST), unit=True)
                for name, leaf in module.named_modules():
                    if leaf is not module and not list(leaf.children()):
                        self._hook_module(leaf, (index, name), unit=False)

    def _hook_module(self, module: nn.Module, label: Label, *, unit: bool) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if unit and self._measuring and _phase() == "forward":
                self._input_storages[label[0]] = {
                    value.untyped_storage()._cdata for value in tree_leaves(args) if isinstance(value, Tensor)
                }
            self._enter(label)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._exit(label, output)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _enter(self, label: Label) -> None:
        self._open.append(label)
        self._last = label
        self._mark((_phase(), label))

    def _exit(self, label: Label, output: Any) -> None:
        if self._open and self._open[-1] == label:
            self._open.pop()
        parent = self._open[-1] if self._open else (label[0], REST)
        if self._measuring and _phase() == "forward":
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda _: self._mark(("backward", label)))
        self._mark((_phase(), parent))

    def _mark(self, running: tuple[str, Label] | None) -> None:
        """From now on `running` is what the device computes."""
        if not self._measuring:
            return
        if self._cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((now, running))

    def _on_saved(self, storage: torch.UntypedStorage) -> None:
        label = self._open[-1] if self._open else self._last
        if storage._cdata in self._input_storages[label[0]]:
            self._inputs[label[0]] += storage.nbytes()
        else:
            self._saved[label] += storage.nbytes()

    def _count_flops(self, flops: float) -> None:
        self._flops[self._open[-1] if self._open else self._last] += flops

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- afterwards ----

    def _profile(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> ModelProfile:
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[tuple[str, Label], float] = defaultdict(float)
        for (start, running), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if running is not None:
                seconds[running] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        self._marks.clear()
        share = 1 / self._micro_batches
        states = _state_bytes(trainer.optimizers)
        width = 2 if trainer.precision in ("bf16-mixed", "16-mixed", "bf16-true") else 4
        units = []
        for index, unit in enumerate(self._units):
            names = dict.fromkeys(label[1] for _, label in seconds if label[0] == index) or {REST: None}
            operators = []
            for name in names:
                label = index, name
                forward = share * seconds["forward", label]
                saved = round(share * self._saved[label])
                operators.append(
                    OperatorProfile(
                        name, forward, share * seconds["backward", label], self._flops[label], saved,
                        (f"{name}.saved",) * bool(saved), forward,
                    )
                )  # fmt: skip
            trained = sum(parameter.numel() for _, parameter in unit.parameters if parameter.requires_grad)
            every = sum(parameter.numel() for _, parameter in unit.parameters)
            kept = sum(
                parameter.numel() * (states.get(id(parameter), 0) + (4 if width == 2 else 0))
                for _, parameter in unit.parameters
                if parameter.requires_grad
            )
            units.append(
                UnitProfile(
                    unit.name, tuple(operators), round(share * self._inputs[index]), trained, width * every,
                    width * trained, kept, kept,
                )
            )  # fmt: skip
        return ModelProfile(
            type(pl_module).__name__,
            tuple(units),
            trainer.accumulate_grad_batches,
            self._samples,
            self._tokens,
            bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value",
        )


class _Flops(TorchDispatchMode):
    def __init__(self, profiler: ModelProfiler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profiler = profiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self._profiler._count_flops(count(*args, **(kwargs or {}), out_val=result))
        return result


def _phase() -> str:
    """Returns what the device computes: what is computed again in backward belongs to backward."""
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _units_of(trainer: pl.Trainer) -> Any:
    config = getattr(trainer.strategy, "states_config", None)
    return None if config is None else config.units


def _count(batch: Any) -> tuple[int, int]:
    """Returns the samples and tokens of a batch: rows, and integers where it has them, of its first tensor."""
    for value in tree_leaves(batch):
        if isinstance(value, Tensor) and value.dim():
            rows = value.shape[0]
            return rows, value.numel() if not value.is_floating_point() and value.dim() == 2 else rows
    return 1, 1


def _state_bytes(optimizers: list[Any]) -> dict[int, int]:
    """Returns, by the identity of each parameter, the bytes of optimizer state for one element."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "betas" in group:
                nbytes = 12 if group.get("amsgrad") else 8
            else:
                nbytes = 4 if group.get("momentum") else 0
            found |= {id(parameter): nbytes for parameter in group["params"]}
    return found
