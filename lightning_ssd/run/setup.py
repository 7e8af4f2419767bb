"""Settings of a run's model states, as the Trainer, its callbacks, its optimizers and a plan determine them."""

import functools
from collections.abc import Set
from dataclasses import replace

from torch import nn

from lightning_ssd._lightning import pl
from lightning_ssd.activations import OffloadConfig
from lightning_ssd.callbacks import clips_norm, trainer_callbacks
from lightning_ssd.model_states import (
    RunFingerprint,
    Setup,
    StatesConfig,
    UnitTiers,
    stepped_whole,
    zeroes_otherwise,
)
from lightning_ssd.planning import Plan, is_later_call
from lightning_ssd.recover import training_settings
from lightning_ssd.run.precision import autocast_dtype, scales_exactly
from lightning_ssd.run.user_hooks import user_sees_gradients
from lightning_ssd.sizes import parse_bytes

_AGREED = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
"""Attributes of the Trainer that ranks have to agree on."""


def is_fitting(trainer: pl.Trainer) -> bool:
    """Returns whether the run of the Trainer is a training."""
    return trainer.state.fn == pl.trainer.states.TrainerFn.FITTING


def make_setup(
    trainer: pl.Trainer,
    config: StatesConfig,
    storage: OffloadConfig,
    default_path: str,
    to_offload: Set[nn.Parameter],
    *,
    plan: Plan | None,
    compiles: bool,
    start_over: bool,
) -> Setup:
    """Returns the settings of model states for the run of a Trainer whose optimizers are set up.

    Args:
        default_path: directory of scratch files if the user has named none.
        plan: the user's plan, if it determines the tiers of states.
        compiles: the strategy's argument `compile`.
        start_over: whether training starts from a checkpoint although a killed run has left a record.

    Raises:
        ValueError: model states can't be offloaded with the Trainer's precision.
    """
    fitting, strategy = is_fitting(trainer), trainer.strategy
    if fitting and plan is not None and plan.clip != "off":
        config = replace(config, clip=plan.clip)
    exact = scales_exactly(strategy.precision_plugin)
    whole = stepped_whole(strategy.optimizers, to_offload, on_ranks=trainer.world_size > 1) if fitting else []
    defer_to_user_hooks = (
        not trainer.lightning_module.automatic_optimization
        or user_sees_gradients(trainer)
        or bool(whole)
        or (clips_norm(trainer) and not exact)
        or any([zeroes_otherwise(optimizer) for optimizer in strategy.optimizers])
    )
    return Setup(
        config=config,
        storage=storage,
        default_path=default_path,
        autocast=autocast_dtype(strategy.precision_plugin, config.states, fitting=fitting),
        clip_norm=functools.partial(clips_norm, trainer),  # a partial can be pickled with the strategy
        clip_value=functools.partial(_clip_value, trainer),
        defer_to_user_hooks=defer_to_user_hooks,
        scales_exactly=exact,
        whole=whole,
        sums_gradients=fitting and _accumulates(trainer),
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes if trainer.world_size > 1 else 1,
        trainer_arguments={name: getattr(trainer, name) for name in _AGREED},
        planned=plan is not None,
        last_micro_batch=functools.partial(_ends_window, trainer),
        settings=_fingerprint(trainer, config, storage, default_path, compiles) if fitting else RunFingerprint.none(),
        start_over=start_over,
    )


def check_several_hosts(trainer: pl.Trainer, config: StatesConfig, plan: Plan | None) -> None:
    """Raises ValueError, with the remedy, if several hosts don't support the settings of offloaded states."""
    if trainer.num_nodes == 1:
        return
    on_ssd = plan is not None and any(["ssd" in (part.weights, part.states) for part in plan.placements])
    unsupported = {
        "`recover=True`": ("`recover=False`", config.recover),
        "`states='ssd'`": ("`states='host'`", config.states == "ssd"),
        "a `plan` of SwapPlanner that places some on `ssd`": ("another tier in it", on_ssd),
        "`overlap='naive'`": ("`overlap='optimized'`", config.overlap == "naive"),
    }
    for what, (remedy, found) in unsupported.items():
        if found:
            raise ValueError(
                f"several hosts don't offload model states with {what}. Set {remedy}; or, if all states fit on each "
                "device, `states='gpu'`."
            )


def _fingerprint(
    trainer: pl.Trainer, config: StatesConfig, storage: OffloadConfig, default_path: str, compiles: bool
) -> RunFingerprint:
    """Returns the settings that a run must share to resume this training (`recover=True`)."""
    if not config.recover:
        return RunFingerprint.none()
    own = {
        "checksum": storage.checksum,
        "compile": compiles,
        "min_bytes": parse_bytes(storage.min_bytes, "min_bytes"),
        "state_format": config.state_format,
        "units": config.units,
    }
    return training_settings(trainer, storage.paths(default_path)[0], own)


def planned_tiers(plan: Plan) -> dict[str, UnitTiers]:
    """Returns the plan's tiers of each unit and of its parts."""
    return {
        unit_name: UnitTiers(
            (unit.weights, unit.states), {name: (part.weights, part.states) for name, part in unit.parts.items()}
        )
        for unit_name, unit in plan.units.items()
        if not is_later_call(unit_name)
    }


def _clip_value(trainer: pl.Trainer) -> float | None:
    """Returns the present value by which gradients are clipped, which callbacks may change; None: they are not."""
    limit = trainer.gradient_clip_val or 0  # Lightning clips at no value of 0 or less
    return limit if trainer.gradient_clip_algorithm == "value" and limit > 0 else None


def _ends_window(trainer: pl.Trainer) -> bool:
    """Returns whether a step follows the present micro-batch; in manual optimization, one may."""
    return not (trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate())


def _accumulates(trainer: pl.Trainer) -> bool:
    """Returns whether steps have several micro-batches, now or in a later epoch."""
    return trainer.accumulate_grad_batches > 1 or any(
        [
            callback.going_to_accumulate_grad_batches()
            for callback in trainer_callbacks(trainer)
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
        ]
    )
