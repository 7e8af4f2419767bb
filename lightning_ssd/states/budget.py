"""What stays on the device, what goes to host memory and what to SSDs, within budgets of bytes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.sizes import format_bytes
from lightning_ssd.states.home import Layout
from lightning_ssd.storage.slots import align_up
from lightning_ssd.types import OffloadTierName

log = logging.getLogger(__name__)

AHEAD = 3
"""Flats that staging memory holds at once: one is read, one is used, one is written."""

LANDING_FLATS = 6
"""Gradients that shared memory has room for at least: some land, some are stepped, some wait."""

LANDING_SHARE = 16
"""The part of all gradients that it has room for at least."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the flats' values go.

    Attributes:
        weights: of each flat, where the compute weights are.
        rest: of each flat, where all others are.
        window: bytes of memory that weights pass through on their way from SSDs to the device.
        staging: bytes of memory that flats from SSDs are opened in.
        landing: bytes of memory that gradients land in.
        host: bytes of host memory in all, gradients included.
        ssd: bytes on SSDs, in whole pages.
    """

    weights: Sequence[OffloadTierName]
    rest: Sequence[OffloadTierName]
    window: int
    staging: int
    landing: int
    host: int
    ssd: int


def choose_places(
    layouts: Sequence[Layout],
    states: Literal["host", "ssd", "auto"],
    budget: int | None,
    *,
    shared: bool,
    given: Sequence[tuple[OffloadTierName, OffloadTierName]] | None = None,
) -> MemoryPlan:
    """Returns where flats go: with "auto", to host memory as far as `budget` reaches, compute weights first.

    A byte of compute weights is read twice and written once a step, one of the others once each.

    Args:
        layouts: of the flats, in the order of the forward.
        states: "host" and "ssd": all of them there; "auto": as said.
        budget: bytes of host memory, for gradients and staging, too; None: as many as needed.
        shared: whether flats may share the memory that gradients land in. They do if any is on SSDs: backward then
            waits for steps, and those for drives, which are what takes longest.
        given: of each flat, where its weights and all others go, if a plan says so.

    Raises:
        ValueError: the budget is too small; it names `host_memory` and what is needed.
    """
    everything: list[OffloadTierName] = ["host"] * len(layouts)
    all_host = _places(layouts, everything, everything, shared)
    if given is not None:
        places = _places(layouts, [weights for weights, _ in given], [rest for _, rest in given], shared)
    elif states == "host" or (states == "auto" and (budget is None or all_host.host <= budget)):
        places = all_host
    else:
        weights: list[OffloadTierName] = ["ssd"] * len(layouts)
        rest: list[OffloadTierName] = ["ssd"] * len(layouts)
        if states == "auto":
            assert budget is not None
            order = range(len(layouts))
            for kind, of in ((weights, [layout.flat.nbytes for layout in layouts]),
                             (rest, [layout.rest_bytes for layout in layouts])):  # fmt: skip
                # The largest first: staging memory is as large as what is left for SSDs, and as it shrinks there may be
                # room for what had none.
                largest_first, left = sorted(order, key=lambda index: -of[index]), len(layouts) + 1  # noqa: B023
                while kind.count("ssd") < left:
                    left = kind.count("ssd")
                    for index in largest_first:
                        if kind[index] == "ssd" and (weights[index] == "host" or kind is weights):
                            kind[index] = "host"
                            if _places(layouts, weights, rest, shared).host > budget:
                                kind[index] = "ssd"
        places = _places(layouts, weights, rest, shared)
    if budget is not None and places.host > budget:
        raise ValueError(
            f"`host_memory` of {format_bytes(budget)} is too small: with `states={states!r}` the model takes "
            f"{format_bytes(places.host)} of it, gradients and staging memory included. Raise it"
            + (", or set `states='auto'`." if states == "host" else ".")
        )
    log.info(
        "weights, gradients and optimizer states take %s of host memory and %s on SSDs",
        format_bytes(places.host),
        format_bytes(places.ssd),
    )
    return places


def _places(
    layouts: Sequence[Layout], weights: Sequence[OffloadTierName], rest: Sequence[OffloadTierName], shared: bool
) -> MemoryPlan:
    window: list[int] = []
    staging: list[int] = []
    host = ssd = 0
    for layout, of_weights, of_rest in zip(layouts, weights, rest, strict=True):
        slots = layout.slots
        opened = 0
        for where, nbytes in ((of_weights, layout.flat.nbytes), (of_rest, layout.rest_bytes)):
            if where == "host":
                host += slots * nbytes
            else:
                ssd += slots * align_up(nbytes)
                opened += align_up(nbytes)
        staging.append(opened)
        window.append(align_up(layout.flat.nbytes) if of_weights == "ssd" else 0)
    for_window, for_staging = (sum(sorted(sizes, reverse=True)[:AHEAD]) for sizes in (window, staging))
    gradients = [align_up(layout.gradient_bytes) for layout in layouts]
    landing = sum(gradients)
    if shared and ssd:
        landing = min(landing, max(landing // LANDING_SHARE, sum(sorted(gradients, reverse=True)[:LANDING_FLATS])))
    return MemoryPlan(weights, rest, for_window, for_staging, landing, host + for_window + for_staging + landing, ssd)
