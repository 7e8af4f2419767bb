"""Profiles a recipe without training it, for `lightning-ssd plan`.

The recipe's own module is built without memory, and its `training_step` is traced on the shapes of the first batch.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse._util import import_object
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd._lightning import pl
from lightning_ssd.activations import HOST_MEMORY
from lightning_ssd.device import HostClock
from lightning_ssd.model_states import (
    GPU_MEMORY,
    GPU_SHARE,
    MOVABLE_GPU_SHARE,
    Unit,
    UnitPart,
    bytes_on_device,
    compute_dtypes,
    find_units,
    states_in_memory,
)
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    PartProfile,
    Plan,
    default_plan,
    default_window,
    is_better_elsewhere,
    make_plan,
    resident_bytes,
    simulate,
)
from lightning_ssd.profiling import (
    LifetimeRecorder,
    TracingError,
    count_samples,
    fake_tensors,
    moved_bytes,
    step_workspace,
    trace,
    unit_profiles,
)
from lightning_ssd.recipes import strategy_argument
from lightning_ssd.replay import LifetimeProfile
from lightning_ssd.sizes import parse_bytes
from lightning_ssd.strategy import SSDOffloadStrategy
from lightning_ssd.types import InputChoice, Tier

log = logging.getLogger(__name__)

_DTYPES = {"32": torch.float32, "64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}
ADAM_PASSES = 20
"""Reads and writes of a tensor of the weights' size in a step of Adam that is not fused."""

_NAME_SHAPES = "Name the shapes of a batch instead, such as `--batch input_ids=8x1024:int64`."


def profile_recipe(config: Any, hardware: HardwareProfile, batch: Sequence[str] = ()) -> ModelProfile:
    """Returns the profile of a recipe's model, by tracing its `training_step` on tensors without memory.

    Args:
        config: the recipe as LightningCLI has parsed it, for `fit`.
        hardware: profile of the machine, from which times are calculated.
        batch: shapes of a batch, in the form of `parse_batch`, in place of the first batch of the recipe's data.

    Raises:
        ValueError: the module can't be built, its data can't be read, or its `training_step` can't be traced.
    """
    least = _min_bytes(config)
    with _traceable(config, batch) as (module, units, first, mode):
        dtypes = compute_dtypes(module, _autocast_dtype(config))
        # Plans count casts of weights on the GPU, and offloaded weights have none.
        casts = {parameter for parameter, dtype in dtypes.items() if dtype != parameter.dtype}
        graph = trace(units, module, _step(module, config), first, mode, hardware, least, casts=casts)
        states, moved, workspace = _optimizer_states(module)
        nbytes = bytes_on_device(module, fitting=True)
    state_format = strategy_argument(config, "state_format") or "fp32"
    split = state_format != "fp32" and _precision(config).startswith("bf16")
    divided = (strategy_argument(config, "states") or "auto") == "auto" and not strategy_argument(config, "recover")

    samples, tokens = count_samples(first)
    settings = config["trainer"]
    width = _default_dtype(config).itemsize
    clips = bool(settings["gradient_clip_val"])
    clips_norm = clips and settings["gradient_clip_algorithm"] != "value"
    # Gradients are read for their norm, and read and written to be scaled, clamped or unscaled.
    moved += width * (clips_norm + 2 * clips + 2 * (_precision(config) == "16-mixed"))

    def profile(*, masters: bool) -> ModelProfile:
        step_width = 4 if masters else width

        def parts_of(unit: Unit) -> list[PartProfile]:
            parts = unit.parts if divided else (UnitPart("", unit.parameters),)
            nbytes_of = partial(_state_bytes, masters=masters, split=split, moments=state_format)
            return [PartProfile(part.name, *nbytes_of(part, states, dtypes)) for part in parts]

        saved = graph.saved(least)
        found = unit_profiles(units, graph, saved, {}, parts_of, allow_recompute=module.automatic_optimization)
        parameters = sum(unit.parameters for unit in found)
        return ModelProfile(
            type(module).__name__,
            found,
            settings["accumulate_grad_batches"],
            samples,
            tokens,
            clips_norm,
            between_offloaded=parameters,  # `between_gpu_bytes` has the workspace of none
            # Gradients of parts on the GPU are counted in fp32 at least.
            other_gpu_bytes=min(0, step_width - 4) * parameters,
            step_workspace=workspace * step_width // 4,
            step_bytes=moved / width * step_width,
            placement_bytes=nbytes,
            largest_tensor_bytes=graph.transients.largest,
        )

    model = profile(masters=True)
    return profile(masters=False) if fixed_states(config, model, hardware) is not None else model


def profile_lifetimes(config: Any, hardware: HardwareProfile, batch: Sequence[str] = ()) -> LifetimeProfile:
    """Returns the lifetimes of all tensors of a recipe's training step on one GPU that has room for all of them.

    The step is one micro-batch and the user's optimizers, on the device and in the precision of the weights.

    Arguments as those of `profile_recipe`.

    Raises:
        ValueError: as in `profile_recipe`, or the optimizer's step can't be traced.
    """
    lifetimes = LifetimeRecorder()
    with _traceable(config, batch) as (module, units, first, mode):
        optimizers = _optimizers(module)
        least = _min_bytes(config)
        trace(units, module, _step(module, config), first, mode, hardware, least, lifetimes, optimizers)
    found = lifetimes.profile(type(module).__name__, HostClock())
    samples, tokens = count_samples(first)
    return replace(found, samples=samples, tokens=tokens)


def _min_bytes(config: Any) -> int:
    return parse_bytes(strategy_argument(config, "min_bytes") or 2**20, "min_bytes")


@contextlib.contextmanager
def _traceable(config: Any, batch: Sequence[str]) -> Iterator[tuple[pl.LightningModule, list[Unit], Any, Any]]:
    """Builds a recipe's module without memory: yields it, its units, a batch, and the mode of fake tensors."""
    trainer = _stub_trainer(config["trainer"])
    dtype = _default_dtype(config)
    with fake_tensors() as mode, _default_type(dtype):
        module = _attach(_module(config), trainer)
        with internals.fake_tensor.unset_fake_temporarily():
            first = parse_batch(batch) if batch else _first_batch(config, module, trainer)
        _configure(module, named=bool(batch))
        if dtype is not torch.float32:
            first = internals.tree_map_only(
                Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, first
            )
        units = [unit for unit in find_units(module, strategy_argument(config, "units")) if unit.parameters]
        try:
            yield module, units, first, mode
        except TracingError as error:
            if not batch:
                raise
            raise TracingError(
                f"{error} If `{' '.join(f'--batch {hint}' for hint in batch)}` is no batch of it, correct that: shapes "
                "without a dtype are of float32, and token ids are `input_ids=8x1024:int64`."
            ) from error


def fixed_states(config: Any, model: ModelProfile, hardware: HardwareProfile) -> FixedPlacement | None:
    """Returns the tiers of model states if a training keeps them there, whatever its planner; None: plans move them.

    bf16 weights that are on the GPU from the start have no master weights, and would get other numbers elsewhere. fp16
    and fp64 weights are never offloaded in a training.
    """
    dtype = _default_dtype(config)
    if dtype == torch.float32:
        return None
    stay = dtype != torch.bfloat16 or strategy_argument(config, "states") == "gpu"
    if not stay and not _states_fit(config, model, hardware):
        return None
    gpu: Tier = "gpu"
    tiers = (gpu,) * len(model.parts)
    return FixedPlacement(tiers, tiers)


def _states_fit(config: Any, model: ModelProfile, hardware: HardwareProfile) -> bool:
    """Returns whether `states="auto"` keeps all model states on the GPU.

    The strategy compares `placement_bytes` with `gpu_memory`, or with a share of the GPU's memory.
    """
    if (strategy_argument(config, "states") or "auto") != "auto" or strategy_argument(config, "recover"):
        return False
    budget = _gpu_budget(config, hardware)
    if budget is None:
        share = MOVABLE_GPU_SHARE if _default_dtype(config) == torch.float32 else GPU_SHARE
        budget = share * hardware.gpu_bytes
    return _states_bytes(model) <= budget


def _states_bytes(model: ModelProfile) -> int:
    """Returns the GPU bytes of all model states, as the strategy counts them."""
    if model.placement_bytes is not None:
        return model.placement_bytes
    return sum(unit.weight_bytes + unit.gradient_bytes + unit.state_bytes_read for unit in model.units)


def _gpu_budget(config: Any, hardware: HardwareProfile) -> float | None:
    """Returns the bytes of `gpu_memory`, or None if the strategy has no such argument."""
    given = GPU_MEMORY.parse(strategy_argument(config, "gpu_memory") or "auto")
    if isinstance(given, str):
        return None
    return given if isinstance(given, int) else given * hardware.gpu_bytes


def within_budgets(config: Any, hardware: HardwareProfile) -> HardwareProfile:
    """Returns the machine with the host memory and SSDs that the strategy's arguments leave to offloaded tensors."""
    if strategy_argument(config, "tier") == "host":
        hardware = replace(hardware, ssd_bytes=0)
    given = HOST_MEMORY.parse(strategy_argument(config, "host_memory") or "auto")
    if isinstance(given, str):
        return hardware
    nbytes = given if isinstance(given, int) else int(given * hardware.host_bytes)
    return replace(hardware, host_bytes=min(hardware.host_bytes, nbytes))


def plan_as_configured(config: Any, model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Returns the plan of a run without a user's `SwapPlanner`.

    With `states="auto"` and `offload="auto"`, offloaded model states are planned together with saved tensors, as the
    default's planner moves them, and so are states on the GPU if they leave too little room. Otherwise they are in the
    tiers of `configured_tiers`. With `offload="auto"` saved tensors are kept if all fit, and planned otherwise. With
    `"none"` they are kept. With `"ssdtrain"`, or an amount, they are offloaded up to the bytes that the link transfers
    during a forward.
    """
    amount = strategy_argument(config, "offload") or "auto"
    fixed = fixed_states(config, model, hardware)
    movable = fixed is None and amount == "auto" and _tiers_may_change(config)
    if movable and not _states_fit(config, model, hardware):
        return make_plan(model, hardware)
    placement = configured_tiers(config, model, hardware) if fixed is None else fixed
    room: dict[InputChoice, int] = {}
    if amount not in ("auto", "none"):
        in_host = resident_bytes(model, default_plan(model, placement, {}, 0))[1]
        transferred = int(model.forward_seconds * hardware.copy_out)
        room = {"host": max(0, min(transferred, int(hardware.host_bytes - in_host)))}
    plan = default_plan(model, placement, room, default_window(model, placement.weights))
    if amount == "auto" and simulate(model, hardware, plan).excess_bytes(hardware):
        plan = make_plan(model, hardware, fixed=placement)
        if movable:
            other = make_plan(model, hardware)
            present, elsewhere = (simulate(model, hardware, one) for one in (plan, other))
            return other if is_better_elsewhere(hardware, present, elsewhere, resident=True) else plan
    return plan


def _tiers_may_change(config: Any) -> bool:
    """Returns whether the default's planner may move offloaded model states: the user has chosen no tiers."""
    given = (strategy_argument(config, name) or "auto" for name in ("states", "gpu_memory"))
    return all(value == "auto" for value in given) and not strategy_argument(config, "recover")


def chosen_states(config: Any) -> Any:
    """Returns the tier of all offloaded model states that the strategy's arguments name, or "auto"."""
    return "ssd" if strategy_argument(config, "recover") else strategy_argument(config, "states") or "auto"


def configured_tiers(config: Any, model: ModelProfile, hardware: HardwareProfile) -> FixedPlacement:
    """Returns the tiers of model states that the strategy's arguments choose, before a planner moves any.

    `states="auto"` fills the GPU up to `gpu_memory`, if it is given, with the first parts, then host memory with
    compute weights, then with the other states, the largest first. The rest is on SSDs.
    """
    states = chosen_states(config)
    parts = [part for _, part in model.parts]
    if states == "auto" and _states_fit(config, model, hardware):
        states = "gpu"
    if states != "auto":
        return FixedPlacement((states,) * len(parts), (states,) * len(parts))
    resident = _first_parts(model, _gpu_budget(config, hardware) or 0)
    # Without `host_memory`, activations and other programs need the rest.
    share = 1.0 if strategy_argument(config, "host_memory") else 0.85
    budget = int(share * hardware.host_bytes)

    def others_in(tier: Tier) -> list[Tier]:
        return ["gpu" if index < resident else tier for index in range(len(parts))]

    def host_bytes(tiers: list[Tier]) -> int:
        placement = FixedPlacement(tuple(tiers), tuple(tiers))
        return resident_bytes(model, default_plan(model, placement, {}, 0))[1]

    weights, others = others_in("host"), others_in("host")
    if host_bytes(weights) > budget:
        weights, others = others_in("ssd"), others_in("ssd")
        _fill_host(model, weights, others, budget - host_bytes(weights))
    return FixedPlacement(tuple(weights), tuple(others))


def _fill_host(model: ModelProfile, weights: list[Tier], others: list[Tier], left: int) -> None:
    """Moves parts from SSDs to `left` bytes of host memory: compute weights first, then other states, by size."""
    parts = [part for _, part in model.parts]
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].weight_bytes):
        if weights[index] == "ssd" and parts[index].weight_bytes <= left:
            weights[index] = "host"
            left -= parts[index].weight_bytes
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].state_bytes_read):
        if others[index] == "ssd" and weights[index] == "host" and parts[index].state_bytes_read <= left:
            others[index] = "host"
            left -= parts[index].state_bytes_read


def with_twice_the_host(model: ModelProfile, hardware: HardwareProfile, plan: Plan) -> Plan:
    """Returns a plan for a machine with twice the host memory: `plan`, with states of SSDs in the added memory.

    Another search would take as long as that of `plan`, and find a step that is no longer than this one's.
    """
    placement = FixedPlacement.of(model, plan)
    weights, others = list(placement.weights), list(placement.states)
    left = 2 * hardware.host_bytes - simulate(model, hardware, plan).host_peak_bytes
    _fill_host(model, weights, others, left)
    return FixedPlacement(tuple(weights), tuple(others)).apply(model, plan)


def _first_parts(model: ModelProfile, budget: float) -> int:
    """Returns the number of the first parts whose states fit into a budget of GPU bytes, beside prefetched weights."""
    largest = sorted((unit.weight_bytes for unit in model.units), reverse=True)
    left = budget - sum(largest[:3])  # one unit computes, one is prefetched, one is evicted
    for index, (_, part) in enumerate(model.parts):
        # The strategy reserves a budget's bytes for autocast's casts, too, which have those of compute weights.
        left -= part.resident_bytes + (part.weight_bytes if part.casts else 0)
        if left < 0:
            return index
    return len(model.parts)


def parse_batch(hints: Sequence[str]) -> Any:
    """Returns a batch of zeros: one tensor, a dict of tensors if they have names, or a list of several.

    Args:
        hints: texts of the form `[NAME=]SHAPE[:DTYPE]`, such as `input_ids=8x1024:int64`. The default dtype is float32.

    Raises:
        ValueError: a text has another form.
    """
    tensors: dict[str, Tensor] = {}
    for number, hint in enumerate(hints):
        name, _, value = hint.rpartition("=")
        shape, _, kind = value.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        try:
            sizes = [int(size) for size in shape.split("x")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1 or not isinstance(dtype, torch.dtype):
            raise ValueError(f"`--batch {hint}` is not [NAME=]SHAPE[:DTYPE], such as `input_ids=8x1024:int64`.")
        tensors[name or str(number)] = torch.zeros(1, dtype=dtype).expand(sizes)
    if any("=" in hint for hint in hints):
        return tensors
    values = list(tensors.values())
    return values[0] if len(values) == 1 else values


def _instantiate(config: Any, name: str, base: type) -> Any:
    """Returns an instance of the class that `config` names.

    Raises:
        ValueError: the instance can't be made.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, name, fail_untyped=False)
    try:
        return parser.instantiate_classes(Namespace({name: config[name]}))[name]  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ValueError(f"`{name}` of the recipe can't be built: {error}") from error


def _module(config: Any) -> pl.LightningModule:
    """Returns the recipe's module. Its constructor runs on real tensors if it builds layers in `configure_model`."""
    kind = import_object(config["model"]["class_path"])
    late = getattr(kind, "configure_model", None) is not pl.LightningModule.configure_model
    with internals.fake_tensor.unset_fake_temporarily() if late else contextlib.nullcontext():
        module: pl.LightningModule = _instantiate(config, "model", pl.LightningModule)
    return module


def _attach(module: pl.LightningModule, trainer: pl.Trainer) -> pl.LightningModule:
    """Attaches the module to a Trainer as in a training. Values that it logs are dropped."""
    if not module.automatic_optimization:
        raise ValueError(
            "With manual optimization a `training_step` can't be traced. Give the profile that the callback "
            "ModelProfiler measures: `--profile FILE`."
        )
    trainer.strategy.connect(module)
    module.trainer = trainer
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **kwargs: None)
    return module.train()


def _configure(module: pl.LightningModule, *, named: bool) -> None:
    """Builds the module's layers. `named`: the user has named the shapes of a batch, so that no data is read."""
    try:
        module.setup("fit")
        module.configure_model()
    except Exception as error:
        other = "" if named else f". Is other data meant? {_NAME_SHAPES}"
        raise ValueError(f"`model` of the recipe can't be built without memory: {error}{other}") from error
    _from_meta(module)
    module.train()


def _from_meta(module: nn.Module) -> None:
    """Replaces parameters and buffers on `meta` by fake tensors on the CPU, whose operators can be traced."""
    replaced: dict[Tensor, Tensor] = {}  # one fake tensor for tied weights
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if tensor not in replaced:
                    empty = torch.empty_like(tensor, device="cpu")
                    weight = isinstance(tensor, nn.Parameter)
                    replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if weight else empty
                tensors[name] = replaced[tensor]  # type: ignore[assignment]


def _stub_trainer(settings: Any) -> pl.Trainer:
    """Returns a Trainer that has the recipe's settings for modules to read. It does not train."""
    with _quiet():
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=SSDOffloadStrategy(),  # with this strategy, modules may have weights on `meta`
            max_epochs=-1,
            max_steps=settings["max_steps"] if (settings["max_steps"] or -1) > 0 else 1000,
            accumulate_grad_batches=settings["accumulate_grad_batches"],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def _first_batch(config: Any, module: pl.LightningModule, trainer: pl.Trainer) -> Any:
    """Returns the first training batch of the recipe's data module, or of the module itself.

    Raises:
        ValueError: no batch can be loaded.
    """
    source: Any = module
    if config.get("data") is not None:
        source = _instantiate(config, "data", pl.LightningDataModule)
        trainer.datamodule = source  # type: ignore[attr-defined]  # modules read sizes of the data from it
        source.trainer = trainer
    try:
        source.prepare_data()
        if source is not module:
            source.setup("fit")
        return next(iter(source.train_dataloader()))
    except Exception as error:
        raise ValueError(f"The recipe's data can't be read: {error or type(error).__name__}. {_NAME_SHAPES}") from error


def _step(module: pl.LightningModule, config: Any) -> Any:
    """Returns the function that computes the loss of a batch, in the recipe's precision."""
    mixed = _autocast_dtype(config)
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def run(batch: Any) -> Tensor:
        with contextlib.nullcontext() if mixed is None else torch.autocast("cpu", mixed, cache_enabled=False):
            output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TracingError("`training_step` has returned no loss for the first batch.")
        return loss

    return run


def _autocast_dtype(config: Any) -> torch.dtype | None:
    """Returns the dtype of matrix products under autocast, or None without autocast."""
    # bfloat16 also for 16-mixed: both dtypes have the same size.
    return torch.bfloat16 if _precision(config).endswith("-mixed") else None


def _default_dtype(config: Any) -> torch.dtype:
    """Returns the dtype of weights in the precision of a recipe."""
    name, _, kind = _precision(config).partition("-")
    return torch.float32 if kind == "mixed" else _DTYPES.get(name, torch.float32)


def _precision(config: Any) -> str:
    """Returns the precision of a recipe by the name that Lightning has for it."""
    given = str(config["trainer"].get("precision") or "32-true")
    return {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(given, given)


@contextlib.contextmanager
def _default_type(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _MovedBytes(internals.TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # such as `prim.device`, which fused optimizers call
            self.nbytes += moved_bytes(func, args, kwargs or {}, result)
        return result


def _optimizer_states(module: pl.LightningModule) -> tuple[dict[Tensor, int], float, int]:
    """Traces optimizer steps. Returns the elements of each trained parameter's states, and bytes of a step for each
    parameter: read and written ones in the dtype of the weights, and temporary ones on a GPU in fp32."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    numel = max(1, sum(parameter.numel() for parameter in trained))
    try:
        optimizers = _optimizers(module)
        for optimizer in optimizers:
            optimizer.step()  # makes the states
        with _MovedBytes() as counted:
            for optimizer in optimizers:
                optimizer.step()
        elements = {
            parameter: sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
            for parameter, state in states_in_memory(optimizers).items()
        }
        moved = counted.nbytes / numel
    except Exception as error:
        log.warning("states are counted as Adam's, because no step of the optimizer could be traced: %s", error)
        optimizers = [torch.optim.Adam(trained)]
        elements = {parameter: 2 * parameter.numel() for parameter in trained}
        moved = ADAM_PASSES * torch.get_default_dtype().itemsize
    return elements, moved, step_workspace(optimizers, torch.device("cuda"))


def _optimizers(module: pl.LightningModule) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that the module configures."""
    with _quiet():
        found = module.configure_optimizers()
    return [leaf for leaf in internals.tree_leaves(found) if isinstance(leaf, torch.optim.Optimizer)]


def _state_bytes(
    part: UnitPart,
    opt_states: Mapping[Tensor, int],
    dtypes: Mapping[nn.Parameter, torch.dtype],
    *,
    masters: bool,
    split: bool,
    moments: str,
) -> tuple[int, int, int, int, int, int, bool]:
    """Returns the number of trained parameters, bytes of weights, gradients and states (read, written, more on the
    GPU), and whether weights on the GPU are cast.

    Args:
        opt_states: elements of optimizer states of each parameter.
        dtypes: dtypes in which parameters compute.
        masters: whether 16-bit weights have fp32 master weights, and states are in fp32; else all have `dtypes`.
        split: whether offloaded master weights are split.
        moments: argument `state_format` of the strategy.
    """
    own = [parameter for _, parameter in part.parameters]
    trained = [parameter for parameter in own if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    weights, gradients = (sum(one.numel() * dtypes[one].itemsize for one in chosen) for chosen in (own, trained))
    casts = any(dtypes[parameter] != parameter.dtype for parameter in own)
    if not masters:  # no state is offloaded
        states = sum(opt_states.get(parameter, 0) * dtypes[parameter].itemsize for parameter in trained)
        return numel, weights, gradients, states, states, 0, casts
    resident = 4 * sum(opt_states.get(parameter, 0) for parameter in trained)
    offloaded = resident // {"bf16": 2, "8bit": 4}.get(moments, 1)
    mastered = sum(parameter.numel() for parameter in own if dtypes[parameter].itemsize < 4)
    offloaded += (2 if split else 4) * mastered
    return numel, weights, gradients, offloaded, offloaded, resident + 4 * mastered - offloaded, casts


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppresses Lightning's warnings about a Trainer that does not train."""
    logger = logging.getLogger(pl.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
