"""Plans the tiers of flat parameters, host memory or SSDs, within a budget of bytes."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lightning_ssd.model_states.optimizers import ADAM_MOMENTS
from lightning_ssd.model_states.stores import Layout, MomentFormat
from lightning_ssd.shared_gradients import shared_gradient_bytes
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import align_up
from lightning_ssd.types import OffloadTierName

log = logging.getLogger(__name__)

AHEAD = 3
"""Flat parameters that staging memory holds at once: one is read, one is used, one is written."""


@dataclass(frozen=True)
class MemoryPlan:
    """Tiers of flat parameters, and their bytes in each tier.

    Attributes:
        weights: tier of the compute weights of each flat parameter.
        opt_state: tier of the other values of each flat parameter.
        param_staging: bytes of memory that prefetched weights are read to from SSDs.
        staging: bytes of memory that values from SSDs are staged in.
        gradients: bytes of memory that gradients are copied to.
        host: bytes of host memory in all, gradients and their sums included.
        ssd: bytes on SSDs, in whole pages.
        later: bytes of second versions in host memory that `host` does not count.
    """

    weights: Sequence[OffloadTierName]
    opt_state: Sequence[OffloadTierName]
    param_staging: int
    staging: int
    gradients: int
    host: int
    ssd: int
    later: int

    def log(self) -> None:
        """Logs the bytes of each tier."""
        log.info(
            "weights, gradients and optimizer states take %s of host memory and %s on SSDs",
            format_bytes(self.host),
            format_bytes(self.ssd),
        )


def plan_memory(
    layouts: Sequence[Layout],
    states: Literal["host", "ssd", "auto"],
    budget: int | None,
    *,
    shared: bool,
    summed: bool = False,
    tiers: Sequence[tuple[OffloadTierName, OffloadTierName]] | None = None,
    later_versions: bool = False,
    ranks: int = 1,
    means: bool = False,
    copies: bool = True,
    weights_in_memory: bool = False,
) -> MemoryPlan:
    """Returns the tiers of flat parameters: with "auto", host memory within `budget`, compute weights first.

    Compute weights come first because a step reads each of their bytes twice and writes it once, and reads and writes
    each byte of the other values once.

    Args:
        layouts: layouts of the flat parameters, in the order of the forward.
        states: "host" or "ssd": the tier of all flat parameters; "auto": as above.
        budget: bytes of host memory, gradients and staging included; None: unlimited.
        shared: whether flat parameters may share the memory that gradients are copied to. They do if any is on SSDs: a
            backward that waits for memory waits for steps, and these wait for the drives anyway.
        summed: whether gradients of several micro-batches are summed, in memory beside that which they are copied to.
        tiers: tiers of the compute weights and the other values of each flat parameter, if a plan has them.
        later_versions: whether second versions of flat parameters that are in host memory as a whole are not planned,
            but allocated from the remaining memory when steps need them.
        ranks: ranks that share the memory, in which each of them has gradients and staging memory of its own.
        weights_in_memory: whether with "ssd" compute weights are in host memory within `budget`: of those on SSDs, each
            rank reads all.
        means: whether the owner of a flat parameter keeps the mean of this host's gradients in host memory.
        copies: whether gradients of each rank are copied to host memory.

    Raises:
        ValueError: the budget is too small; it names `host_memory` and the bytes needed.
    """
    everything: list[OffloadTierName] = ["host"] * len(layouts)
    make_plan = partial(
        _plan,
        layouts,
        shared=shared,
        summed=summed,
        later_versions=later_versions,
        ranks=ranks,
        means=means,
        copies=copies,
    )
    all_host = make_plan(everything, everything)
    if tiers is not None:
        plan = make_plan([weights for weights, _ in tiers], [opt_state for _, opt_state in tiers])
    elif states == "host" or (states == "auto" and (budget is None or all_host.host <= budget)):
        plan = all_host
    else:
        weights: list[OffloadTierName] = ["ssd"] * len(layouts)
        opt_state: list[OffloadTierName] = ["ssd"] * len(layouts)
        of_weights = (weights, [layout.flat.nbytes for layout in layouts])
        of_opt_state = (opt_state, [layout.opt_state_bytes for layout in layouts])
        in_memory = [of_weights, of_opt_state] if states == "auto" else [of_weights] if weights_in_memory else []
        if in_memory:
            room = math.inf if budget is None else budget
            order = range(len(layouts))
            for kind, sizes in in_memory:
                # The largest flat parameters are moved to host memory first, because those on SSDs determine the size
                # of staging memory. When staging memory becomes smaller, others fit into host memory, too.
                largest_first, left = sorted(order, key=lambda index: -sizes[index]), len(layouts) + 1  # noqa: B023
                while kind.count("ssd") < left:
                    left = kind.count("ssd")
                    for index in largest_first:
                        if kind[index] == "ssd" and (weights[index] == "host" or kind is weights):
                            kind[index] = "host"
                            if make_plan(weights, opt_state).host > room:
                                kind[index] = "ssd"
        plan = make_plan(weights, opt_state)
    if budget is not None and plan.host > budget:
        smaller = describe_smaller_formats(layouts)
        remedy = ", or set `states='auto'`." if states == "host" else "."
        raise ValueError(
            f"`host_memory` of {format_bytes(budget)} is too small: with `states={states!r}` the model takes "
            f"{format_bytes(plan.host)} of it, gradients and staging memory included. Raise it"
            + remedy
            + (" Steps of one micro-batch need no sums of gradients, 4 bytes a parameter." if summed else "")
            + (f" Rounded moments would save {smaller}." if smaller is not None else "")
        )
    return plan


def describe_smaller_formats(layouts: Sequence[Layout]) -> str | None:
    """Returns the host memory that other values of `state_format` save, for a log line; None: they save none."""
    if any(layout.moments != "fp32" or not {*layout.state_names} <= {*ADAM_MOMENTS} for layout in layouts):
        return None
    moments: Sequence[MomentFormat] = ("bf16", "8bit")
    saved = [
        sum(layout.opt_state_bytes - replace(layout, moments=name).opt_state_bytes for layout in layouts)
        for name in moments
    ]
    if not all(saved):
        return None
    by_name = zip(moments, saved, strict=True)
    return ", ".join(f"{format_bytes(nbytes)} by `state_format='{name}'`" for name, nbytes in by_name)


def _plan(
    layouts: Sequence[Layout],
    weights: Sequence[OffloadTierName],
    opt_state: Sequence[OffloadTierName],
    *,
    shared: bool,
    summed: bool,
    later_versions: bool,
    ranks: int,
    means: bool,
    copies: bool,
) -> MemoryPlan:
    param_staging: list[int] = []
    staging: list[int] = []
    host = ssd = later = 0
    for layout, of_weights, of_opt_state in zip(layouts, weights, opt_state, strict=True):
        staged = 0
        versions = layout.versions
        if versions == 2 and later_versions and of_weights == of_opt_state == "host":
            versions = 1
            later += layout.flat.nbytes + layout.opt_state_bytes
        for tier, nbytes in ((of_weights, layout.flat.nbytes), (of_opt_state, layout.opt_state_bytes)):
            if tier == "host":
                host += versions * nbytes
            else:
                ssd += layout.versions * align_up(nbytes)
                staged += align_up(nbytes)
        staging.append(staged)
        param_staging.append(align_up(layout.flat.nbytes) if of_weights == "ssd" else 0)
    for_params, for_staging = (sum(sorted(sizes, reverse=True)[:AHEAD]) for sizes in (param_staging, staging))
    sizes = [align_up(layout.gradient_bytes) for layout in layouts]
    gradients = 0 if not copies else shared_gradient_bytes(sizes) if shared and ssd else sum(sizes)
    host += ranks * (for_params + for_staging + gradients)
    if summed:
        host += ranks * sum(layout.summed_gradient_bytes for layout in layouts)
    elif means:
        host += sum(layout.summed_gradient_bytes for layout in layouts)
    return MemoryPlan(weights, opt_state, for_params, for_staging, gradients, host, ssd, later)
