"""The log line at the start of a training: offloaded tensors, their tiers, and the reasons why others are kept."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from lightning_ssd.activations import ActivationOffloader, OffloadConfig, SSDTierBase
from lightning_ssd.model_states import ModelStates, TensorLocation
from lightning_ssd.sizes import format_bytes

_TIERS = {"host": "host memory", "ssd": "SSD"}
_IN = {"host": "in host memory", "ssd": "on SSD"}


def describe_activations(
    offloader: ActivationOffloader, config: OffloadConfig, *, decided_by: str | None = None
) -> str:
    """Returns a clause that names the offloaded activations and their tiers.

    Args:
        offloader: activation offloader of the training.
        config: the user's arguments.
        decided_by: name of the callback that chooses the offloaded activations, in place of `offload`.
    """
    device = _name(offloader.device)
    if not offloader.tiers:
        if config.amount() == "none":
            return f"activations are kept on the {device} (`offload='none'`)"
        return f"activations are kept on the {device}, because model states use all of `host_memory`"
    if decided_by is None and config.amount() == "auto" and offloader.device.type == "cpu":
        return f"activations are kept on the {device}, whose memory is the host's (`offload='auto'`)"
    tiers = [f"{_TIERS[name]} (up to {format_bytes(tier.capacity)})" for name, tier in offloader.tiers.items()]
    words = {"auto": "as the memory of the first steps requires", "ssdtrain": "as many as the bandwidth allows"}
    amount = words.get(str(config.amount()), f"`offload={config.offload!r}`")
    return (
        f"activations of {format_bytes(offloader.min_bytes)} or more are offloaded to {', then to '.join(tiers)}: "
        + (amount if decided_by is None else f"{decided_by} decides how many")
    )


def describe_states(states: ModelStates, locations: Sequence[TensorLocation], device: torch.device) -> str:
    """Returns the bytes of weights and optimizer states in each tier."""
    weights: Counter[str] = Counter()
    opt_states: Counter[str] = Counter()
    for row in locations:
        if row.kind != "gradient":
            (weights if row.kind == "weight" else opt_states)[row.tier] += row.nbytes
    masters = any(row.kind == "master weight" and row.tier != "gpu" for row in locations)
    kept, _ = weights.pop("gpu", 0), opt_states.pop("gpu", 0)
    name = _name(device)
    if not weights:
        return f"model states are kept on the {name}: no parameter of `min_bytes` or more can be offloaded"
    parts = [f"weights are {_places(weights)}"]
    if opt_states.total():
        rounded = {store.layout.moments for store in states.stores.values() if store.layout.moments != "fp32"}
        parts.append(
            f"{'master weights and ' if masters else ''}optimizer states {_places(opt_states)}"
            + (f", rounded to {', '.join(sorted(rounded))}" if rounded else "")
        )
    used = [f"{format_bytes(states.nbytes.host)} of host memory with gradients and staging"]
    used += [f"{format_bytes(states.nbytes.ssd)} on SSD"] if states.nbytes.ssd else []
    return f"{', '.join(parts)} ({', '.join(used)})" + (
        f"; weights of {format_bytes(kept)} and their states are kept on the {name}" if kept else ""
    )


def describe_resident(need: int, room: float | None, chosen: str | None, device: torch.device) -> str:
    """Returns a clause that gives the reason why all model states are kept on the device.

    Args:
        need: estimated bytes of the model states.
        room: bytes that model states may use on the device; None: there is no limit.
        chosen: the user's argument that determines it, if there is one.
        device: device of the model's computation.
    """
    name = _name(device)
    if chosen is not None:
        return f"model states are kept on the {name} ({chosen})"
    if room is None:
        return f"model states are kept on the {name}, whose memory is the host's"
    return f"model states are kept on the {name}: they need {format_bytes(need)}, and {format_bytes(room)} are allowed"


def describe_drives(
    offloader: ActivationOffloader, states: ModelStates | None, config: OffloadConfig, default: str
) -> str | None:
    """Returns a clause that names the directories of the scratch files and the backend, or None without files."""
    store = None if states is None or states.staging is None else states.staging.store
    if isinstance(tier := offloader.tiers.get("ssd"), SSDTierBase):
        store = tier.blobs
    if store is None:
        return None
    paths = ", ".join(str(path) for path in config.paths(default))
    return f"SSD is {paths} (backend {store.backend_name})"


def _places(tiers: Mapping[str, int]) -> str:
    return " and ".join(f"{_IN[tier]} ({format_bytes(nbytes)})" for tier, nbytes in sorted(tiers.items()) if nbytes)


def _name(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else device.type.upper()
