"""What a user may say about activation offload, checked, and made into a tensor cache."""

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from lightning_ssd.activations.cache import TensorCache
from lightning_ssd.activations.clock import make_clock
from lightning_ssd.activations.copies import Copies, make_copies
from lightning_ssd.activations.direct import DirectTier
from lightning_ssd.activations.host import HostTier
from lightning_ssd.activations.placement import Auto, FixedAmount, KeepAll, Placement
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.activations.tier import Tier, TierName
from lightning_ssd.planning import TierSpeed
from lightning_ssd.sizes import format_bytes, parse_bytes
from lightning_ssd.storage import Backend, BlobStore, PinnedPool
from lightning_ssd.storage.memory import available_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadConfig:
    """Where activations may go, and how many of them. `SSDOffloadStrategy` documents the fields.

    Raises:
        ValueError: a field is out of range; the message names it and says what it may be.
    """

    path: str | Path | Sequence[str | Path] | None = None
    tier: Literal["ssd", "host"] = "ssd"
    offload: float | int | str = "auto"
    host_memory: int | str = "auto"
    ssd_capacity: int | str | None = None
    spill: Literal["host_first", "ssd_first"] = "host_first"
    min_bytes: int | str = 2**20
    staging_memory: int | str = "1GiB"
    backend: Literal["auto", "posix", "kvikio"] | Backend = "auto"
    checksum: bool = False

    def __post_init__(self) -> None:
        check_choice("tier", self.tier, ("ssd", "host"))
        check_choice("spill", self.spill, ("host_first", "ssd_first"))
        if not isinstance(self.backend, Backend):
            check_choice("backend", self.backend, ("auto", "posix", "kvikio"))
        self.amount()
        parse_bytes(self.min_bytes, "min_bytes")
        if self.host_memory != "auto":
            parse_bytes(self.host_memory, "host_memory")
        if self.ssd_capacity is not None:
            parse_bytes(self.ssd_capacity, "ssd_capacity")
        if parse_bytes(self.staging_memory, "staging_memory") < _PIECE_BYTES:
            raise ValueError(
                f"`staging_memory={self.staging_memory!r}` is too small: it must hold at least one piece of "
                f"{format_bytes(_PIECE_BYTES)}."
            )

    def amount(self) -> float | int | Literal["auto", "none"]:
        """Returns `offload` as a share of the bytes (`float`), bytes a micro-batch (`int`), or one of the words."""
        value = self.offload
        if value == "auto":
            return "auto"
        if value == "none":
            return "none"
        if isinstance(value, str):
            if not re.fullmatch(r"\d+\.\d*|\.\d+", value):
                value = parse_bytes(value, "offload")
            else:
                value = float(value)
        if isinstance(value, bool) or not value >= 0 or (isinstance(value, float) and value > 1):
            raise ValueError(
                f"`offload={self.offload!r}` is neither 'auto', 'none', a share from 0.0 to 1.0, nor a number of bytes "
                "a micro-batch (an int, or a string like '8GiB')."
            )
        return float(value) if value in (0, 1) else value

    def paths(self, default: str | Path) -> list[Path]:
        """Returns the directories of the scratch files. `default` is made if it is missing, as nobody named it."""
        if self.path is None:
            if "://" in str(default):
                raise ValueError(
                    f"`default_root_dir={str(default)!r}` is not local: name a directory for scratch files with `path`."
                )
            Path(default).mkdir(parents=True, exist_ok=True)
            return [Path(default)]
        paths = [self.path] if isinstance(self.path, str | Path) else list(self.path)
        if not paths:
            raise ValueError("`path=[]` names no directory. Give one or more, or leave it out.")
        return [Path(path).expanduser() for path in paths]


def make_tensor_cache(
    config: OffloadConfig, device: torch.device, *, default_path: str | Path, rank: int = 0, processes: int = 1
) -> TensorCache:
    """Makes the tensor cache that `config` asks for; nothing is left behind when it can't.

    Args:
        config: what the user wants.
        device: the training device.
        default_path: directory for scratch files where the user named none.
        rank: global rank of this process.
        processes: processes of this training on this machine, which share its memory.

    Raises:
        ValueError: an argument does not fit this device.
        StorageError: the scratch space can't be had.
    """
    names = _tier_names(config, device)
    if config.host_memory == "auto" and "host" in names:
        budget = available_memory() // (2 * processes)
        config = replace(config, host_memory=budget)
        if budget < SMALLEST_TIER and config.tier == "ssd":
            log.warning("no memory is left for a host tier: activations go to the SSD tier alone")
            names.remove("host")
    copies = make_copies(device)
    tiers: dict[TierName, Tier] = {}
    speeds: dict[TierName, TierSpeed] = {}
    amount = config.amount()
    with contextlib.ExitStack() as undo:
        undo.callback(copies.close)
        for name in names if amount != "none" else ():
            if name == "host":
                tiers[name], speeds[name] = _make_host_tier(config, copies)
            else:
                tiers[name], speeds[name] = _make_ssd_tier(config, copies, default_path, rank)
            undo.callback(tiers[name].close)
        undo.pop_all()
    for name, speed in speeds.items():
        log.info(
            "activations may go to the %s tier: %s/s out, %s/s in, %s",
            name,
            format_bytes(speed.write),
            format_bytes(speed.read),
            tiers[name].describe(),
        )
    return TensorCache(
        copies,
        tiers,
        _make_placement(amount, speeds),
        min_bytes=parse_bytes(config.min_bytes, "min_bytes"),
    )


def _make_placement(amount: float | int | Literal["auto", "none"], speeds: dict[TierName, TierSpeed]) -> Placement:
    if amount == "none" or not speeds:
        return KeepAll()
    if amount == "auto":
        return Auto(speeds)
    assert not isinstance(amount, str)
    return FixedAmount(amount, tuple(speeds))


def _tier_names(config: OffloadConfig, device: torch.device) -> list[TierName]:
    if config.tier == "host":
        return ["host"]
    # On a CPU "device" the host tier is the memory that the activations are in already.
    if config.host_memory == "auto":
        host = device.type != "cpu"
    else:
        host = parse_bytes(config.host_memory, "host_memory") > 0
    order: list[TierName] = ["host", "ssd"] if config.spill == "host_first" else ["ssd", "host"]
    return [name for name in order if host or name == "ssd"]


def _make_host_tier(config: OffloadConfig, copies: Copies) -> tuple[HostTier, TierSpeed]:
    budget = parse_bytes(config.host_memory, "host_memory")
    slab = min(budget, 2**30)
    if slab < SMALLEST_TIER:
        raise ValueError(
            f"`host_memory={config.host_memory!r}` is too small for a host tier: give it at least "
            f"{format_bytes(SMALLEST_TIER)}, or 0 (with `tier='ssd'`) for none."
        )
    pool = PinnedPool(budget, pin=copies.device.type == "cuda", slab_bytes=slab, name="host_memory")
    try:
        write, read = _copy_speed(copies, pool)
    except BaseException:
        pool.close()
        raise
    return HostTier(pool, copies), TierSpeed(write, read, budget)


def _make_ssd_tier(
    config: OffloadConfig, copies: Copies, default_path: str | Path, rank: int
) -> tuple[Tier, TierSpeed]:
    capacity = None if config.ssd_capacity is None else parse_bytes(config.ssd_capacity, "ssd_capacity")
    store = BlobStore(
        config.paths(default_path),
        device=copies.device,
        backend=config.backend,
        capacity=capacity,
        checksum=config.checksum,
        piece_bytes=_PIECE_BYTES,
        rank=rank,
    )
    speed = TierSpeed(store.write_bandwidth, store.read_bandwidth, float("inf") if capacity is None else capacity)
    try:
        if capacity is not None:
            store.reserve(capacity // 4096 * 4096)  # whole pages
        if store.device_buffers:
            return DirectTier(store, copies), speed
        staging = PinnedPool(
            parse_bytes(config.staging_memory, "staging_memory"),
            pin=copies.device.type == "cuda",
            name="staging_memory",
        )
    except BaseException:
        store.close()
        raise
    return SSDTier(store, staging, copies), speed


def _copy_speed(copies: Copies, pool: PinnedPool) -> tuple[float, float]:
    """Measures copies out and in, in bytes/s: the best of three of one buffer."""
    data = copies.empty(SMALLEST_TIER)
    buffer = pool.acquire(SMALLEST_TIER)
    clock = make_clock(copies.device)
    seconds = []
    for copy, src, dst in ((copies.out, data, buffer.tensor), (copies.into, buffer.tensor, data)):
        best = float("inf")
        for _ in range(3):
            start = clock.now()
            copies.wait(copy(src, dst, copies.mark()))
            end = clock.now()
            copies.drain()
            best = min(best, clock.elapsed(start, end) or best)
        seconds.append(best)
    buffer.release()
    return SMALLEST_TIER / seconds[0], SMALLEST_TIER / seconds[1]


_PIECE_BYTES = 16 * 2**20  # one I/O: long enough for a drive's full speed, short enough to stage
SMALLEST_TIER = 64 * 2**20
"""Bytes: copies of so many show the bandwidth."""


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises a ValueError that names the argument, unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{argument}={value!r}` is not one of {', '.join(map(repr, choices))}.")
