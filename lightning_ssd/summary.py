"""The log lines at the start of a training: tiers of model states and activations, their bytes, and the reasons."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from lightning_ssd.activations import SMALLEST_TIER, ActivationOffloader, OffloadConfig, SSDTierBase
from lightning_ssd.device import process_ram
from lightning_ssd.host_memory import host_memory_of
from lightning_ssd.model_states import ModelStates, TensorLocation
from lightning_ssd.planning import DAY
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import BlobStore

CUDA_LIBRARIES = 3 * 2**28
"""Bytes of RAM of cuBLAS, cuDNN and kernels, which CUDA loads at their first use: 0.7 GiB in models of text,
and 0.9 GiB in those with convolutions (CUDA 13, H200)."""

_TIERS = {"host": "host memory", "ssd": "SSD"}
_IN = {"host": "in host memory", "ssd": "on SSD"}
_COLUMNS = 80  # of a terminal
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b)")  # a number and its unit are in one line


def join_lines(name: str, lines: Iterable[str]) -> str:
    """Returns the text of a log record: `lines`, each after `name`, in lines that a terminal does not break."""
    prefix = f"{name}: "
    wrapper = textwrap.TextWrapper(
        _COLUMNS - len(prefix), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    parts = (wrapper.wrap(_BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", line)) for line in lines)
    return "\n".join(prefix + part.replace("\N{NO-BREAK SPACE}", " ") for wrapped in parts for part in wrapped)


def describe_activations(
    offloader: ActivationOffloader, config: OffloadConfig, *, decided_by: str | None = None
) -> str:
    """Returns the line that names the offloaded activations and their tiers.

    Args:
        decided_by: name of the callback that chooses the offloaded activations, in place of `offload`.
    """
    device = _name(offloader.device)
    if not offloader.tiers:
        if config.amount() == "none":
            return f"activations: on the {device} (`offload='none'`)"
        least = format_bytes(SMALLEST_TIER)
        return f"activations: on the {device}, because model states leave less than {least} of `host_memory`"
    if not _offloads(offloader, config, decided_by):
        return f"activations: on the {device}, whose memory is the host's (`offload='auto'`)"
    tiers = [f"{_TIERS[name]} (up to {format_bytes(tier.capacity)})" for name, tier in offloader.tiers.items()]
    words = {"auto": "as the memory of the first steps requires", "ssdtrain": "as many as the bandwidth allows"}
    amount = words.get(str(config.amount()), f"`offload={config.offload!r}`")
    return f"activations: those of {format_bytes(offloader.min_bytes)} or more to {', then to '.join(tiers)}, " + (
        amount if decided_by is None else f"{decided_by} decides how many"
    )


def describe_states(states: ModelStates, locations: Sequence[TensorLocation], device: torch.device) -> list[str]:
    """Returns the lines with the bytes of weights and of optimizer states in each tier."""
    weights: Counter[str] = Counter()
    opt_states: Counter[str] = Counter()
    for row in locations:
        if row.kind != "gradient":
            (weights if row.kind == "weight" else opt_states)[row.tier] += row.nbytes
    masters = any(row.kind == "master weight" and row.tier != "gpu" for row in locations)
    kept, _ = weights.pop("gpu", 0), opt_states.pop("gpu", 0)
    name = _name(device)
    if not weights:
        return [
            f"weights: on the {name}, because no parameter of `min_bytes` or more can be offloaded",
            f"optimizer states: on the {name}",
        ]
    parts = [_places(opt_states) + (", with master weights" if masters else "")] if opt_states.total() else []
    parts += _moments(states)
    if in_host := sorted(_classes_in_host(states)):
        parts.append(f"those of {', '.join(in_host)} in host memory")
    if kept:
        parts.append(f"those of weights on the {name} there")
    return [
        f"weights: {_places(weights)}" + (f", {format_bytes(kept)} on the {name}" if kept else ""),
        f"optimizer states: {'; '.join(parts) or 'none'}",
    ]


def describe_resident(need: int, room: float | None, chosen: str | None, device: torch.device) -> list[str]:
    """Returns the lines with the reason why all model states are kept on the device.

    Args:
        need: estimated bytes of the model states.
        room: bytes that model states may use on the device; None: there is no limit.
        chosen: the user's argument that determines it, if there is one.
    """
    name = _name(device)
    reason = f" ({chosen})"
    if chosen is None and room is None:
        reason = ", whose memory is the host's"
    elif chosen is None and room is not None:
        reason = f": model states need {format_bytes(need)} of {format_bytes(room)}"
    return [f"weights: on the {name}{reason}", f"optimizer states: on the {name}"]


def describe_totals(
    offloader: ActivationOffloader,
    states: ModelStates | None,
    config: OffloadConfig,
    default: str,
    *,
    resident: int = 0,
    decided_by: str | None = None,
) -> list[str]:
    """Returns the lines with the bytes of a run in each memory, and with the most that it may use.

    Host memory has gradients and staging, too; steps that are made before their norm is known add a second version of
    their values. There is no line of totals without model states and SSDs, since the line of activations has the bytes
    of host memory then, and no line of limits if there is none beside the totals. Directories and backend of the SSDs
    are named if data may be written there. The time of a step is not known yet: the bytes of a day are those of drives
    that are always busy, and `OffloadMonitor` logs the measured number.

    Args:
        default: directory of scratch files if the user has named none.
        resident: estimated bytes of model states that are on the device.
        decided_by: see `describe_activations`.
    """
    name, totals, limits = _name(offloader.device), [], []
    if states is not None and offloader.device.type == "cuda":
        totals.append(f"{name} {format_bytes(states.nbytes.device)} for weights")
    if states is not None and states.gradient_bytes:
        totals.append(f"{name} {format_bytes(states.gradient_bytes)} for gradients")
    if resident:
        totals.append(f"{name} about {format_bytes(resident)} for model states")
    if states is not None:
        memory = host_memory_of(states, offloader)
        totals.append(f"host memory {format_bytes(memory.total)}")
        if second_bytes := states.nbytes.host_limit - states.nbytes.host:
            totals.append(f"{format_bytes(memory.total + second_bytes)} while few steps are clipped")
        if memory.limit > memory.total:
            limits.append(f"host memory {format_bytes(memory.limit)}")
        others = max(0, process_ram() - memory.total)
        if offloader.device.type == "cuda":
            others += CUDA_LIBRARIES
        totals.append(f"{format_bytes(others)} of the process beside it")
        if states.nbytes.ssd:
            totals.append(f"SSD {format_bytes(states.nbytes.ssd)}")
    store = _store(offloader, states, config, decided_by)
    if store is not None:
        paths = ", ".join(str(path) for path in config.paths(default))
        # Written bytes are read once, so that a busy drive writes for a part of the time.
        rate = 1 / (1 / store.write_bandwidth + 1 / store.read_bandwidth)
        limits.append(f"at most {rate * DAY / 1e12:.3g} TB a day to {paths} ({store.backend_name})")
    lines = {"totals": totals, "limits": limits}
    return [f"{title}: {', '.join(parts)}" for title, parts in lines.items() if parts]


def _store(
    offloader: ActivationOffloader, states: ModelStates | None, config: OffloadConfig, decided_by: str | None
) -> BlobStore | None:
    """Returns the store to which data may be written, or None."""
    if isinstance(tier := offloader.tiers.get("ssd"), SSDTierBase) and _offloads(offloader, config, decided_by):
        return tier.blobs
    return None if states is None or states.staging is None else states.staging.store


def _offloads(offloader: ActivationOffloader, config: OffloadConfig, decided_by: str | None) -> bool:
    """Returns whether activations may be offloaded: under "auto", those on a CPU are not, unless a planner decides."""
    return decided_by is not None or config.amount() != "auto" or offloader.device.type != "cpu"


def _moments(states: ModelStates) -> Iterator[str]:
    """Yields the names of the optimizer states that have an element for each weight, by their format."""
    formats: dict[str, dict[str, None]] = {}
    for store in states.stores.values():
        formats.setdefault(store.layout.moments, {}).update(dict.fromkeys(store.layout.state_names))
    for moments, names in formats.items():
        if names:
            yield f"{', '.join(names)} " + ("in fp32" if moments == "fp32" else f"rounded to {moments}")


def _classes_in_host(states: ModelStates) -> set[str]:
    """Returns the names of the optimizer classes that keep states of offloaded weights in host memory themselves."""
    offloaded = states.offloaded
    flats = (flat for flat, optimizer in offloaded.flat_optimizers.items() if optimizer.keeps_states)
    return {type(offloaded.groups[flat][0]).__name__ for flat in flats}


def _places(tiers: Mapping[str, int]) -> str:
    return " and ".join(f"{format_bytes(nbytes)} {_IN[tier]}" for tier, nbytes in sorted(tiers.items()) if nbytes)


def _name(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else device.type.upper()
