"""The user's arguments for activation offload: their checks, and the activation offloader made from them."""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch

from lightning_ssd.activations.direct import DirectTier
from lightning_ssd.activations.host import HostTier
from lightning_ssd.activations.offloader import ActivationOffloader
from lightning_ssd.activations.placement import FixedAmount, KeepAll, OffloadExcess, PlacementPolicy, SSDTrainAuto
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.activations.tier import OffloadTier
from lightning_ssd.device import CopyEngine, allocator_memory, available_memory, make_clock, make_copy_engine
from lightning_ssd.planning import TierSpeed
from lightning_ssd.sizes import (
    LEAST_BUDGET,
    SizeArgument,
    absolute_path,
    check_choice,
    check_flag,
    format_bytes,
    parse_bytes,
    parse_path,
    show_argument,
)
from lightning_ssd.storage import Backend, BlobStore, PinnedPool, Slab, striped_free_bytes
from lightning_ssd.types import BACKENDS, BackendName, OffloadTierName

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadConfig:
    """Arguments of activation offload. `SSDOffloadStrategy` documents the fields.

    `path` is made absolute, since offloaders are also made amid training, when user code may have changed the working
    directory.

    Raises:
        ValueError: a field is out of range; the message names the field and its legal values.
        TypeError: a field has a wrong type.
    """

    path: str | Path | Sequence[str | Path] | None = None
    tier: Literal["ssd", "host"] = "ssd"
    offload: float | int | str = "auto"
    host_memory: int | str = "auto"
    ssd_capacity: int | str | None = None
    spill: Literal["host_first", "ssd_first"] = "host_first"
    min_bytes: int | str = 2**20
    staging_memory: int | str = "1GiB"
    backend: BackendName | Backend = "auto"
    checksum: bool = True

    def __post_init__(self) -> None:
        check_paths(self.path)
        if isinstance(self.path, str | os.PathLike):
            object.__setattr__(self, "path", absolute_path(self.path))
        elif self.path is not None:
            object.__setattr__(self, "path", tuple(map(absolute_path, self.path)))
        check_choice("tier", self.tier, ("ssd", "host"))
        OFFLOAD.parse(self.offload)
        HOST_MEMORY.parse(self.host_memory)
        if self.ssd_capacity is not None:
            SSD_CAPACITY.parse(self.ssd_capacity)
        check_choice("spill", self.spill, ("host_first", "ssd_first"))
        MIN_BYTES.parse(self.min_bytes)
        staging = STAGING_MEMORY.parse(self.staging_memory)
        if isinstance(staging, int) and staging < _PIECE_BYTES:
            raise ValueError(
                f"`staging_memory={self.staging_memory!r}` is too small: it must hold at least one piece of "
                f"{format_bytes(_PIECE_BYTES)}. Give bytes such as '1GiB'."
            )
        if not isinstance(self.backend, Backend):
            check_choice("backend", self.backend, BACKENDS)
        check_flag("checksum", self.checksum)

    def amount(self) -> float | int | Literal["auto", "ssdtrain", "none"]:
        """Returns `offload` as a share of the bytes (`float`), bytes per micro-batch (`int`), or one of the words."""
        amount = OFFLOAD.parse(self.offload)
        if isinstance(amount, str):
            return cast(Literal["auto", "ssdtrain", "none"], amount)
        return amount

    def resolve(self, default_path: str | Path, processes: int = 1) -> "OffloadConfig":
        """Returns a copy with byte counts in place of percentages of the memory and disk space that are free now.

        Args:
            default_path: directory for scratch files if the user has named none.
            processes: processes of this training on this machine, which share the free memory and disk space.
        """
        memory = available_memory() // processes
        host = _bytes_of(HOST_MEMORY, self.host_memory, memory)
        staging = _bytes_of(STAGING_MEMORY, self.staging_memory, memory)
        capacity = self.ssd_capacity
        if capacity is not None and isinstance(SSD_CAPACITY.parse(capacity), float):
            free = striped_free_bytes(self.paths(default_path))
            capacity = _bytes_of(SSD_CAPACITY, capacity, free // processes)
        return replace(self, host_memory=host, staging_memory=staging, ssd_capacity=capacity)

    def staging_bytes(self) -> int:
        """Returns the bytes of memory that stages activations from and to SSDs; `resolve` has made the budgets.

        It is a part of `host_memory`, if that is given: at most an eighth of it. A smaller budget than two of the
        smallest tiers has no room for it, so that no activations are offloaded to SSDs.
        """
        if self.tier == "host" or self.amount() == "none":
            return 0
        staging = parse_bytes(self.staging_memory, "staging_memory")
        if self.host_memory == "auto" or not (budget := parse_bytes(self.host_memory, "host_memory")):
            return staging
        return 0 if budget < 2 * SMALLEST_TIER else min(staging, max(_PIECE_BYTES, budget // 8))

    def without(self, host_bytes: int, ssd_bytes: int) -> "OffloadConfig":
        """Returns a copy with the budgets of each tier, when other code uses a part of them; `resolve` made them.

        `host_memory` is that of the host tier alone, without `staging_memory`. A tier that would be too small is left
        out; without tiers, no activations are offloaded.

        Raises:
            ValueError: there is room for no tier, and `offload` says how much is to be offloaded.
        """
        config = self
        if config.host_memory != "auto" and (budget := parse_bytes(config.host_memory, "host_memory")):
            staging = self.staging_bytes()
            left = max(0, budget - staging - host_bytes)
            if host_bytes and left < SMALLEST_TIER:
                left = 0
            if staging:
                config = replace(config, host_memory=left, staging_memory=staging)
            else:
                config = replace(config, host_memory=left, tier="host", ssd_capacity=None)
        if config.ssd_capacity is not None and ssd_bytes:
            left = parse_bytes(config.ssd_capacity, "ssd_capacity") - ssd_bytes
            if left < SMALLEST_TIER:
                config = replace(config, tier="host", ssd_capacity=None)
            else:
                config = replace(config, ssd_capacity=left)
        if config.tier == "host" and config.host_memory == 0:
            if (amount := self.amount()) and not isinstance(amount, str):
                budget = parse_bytes(self.host_memory, "host_memory")
                raise ValueError(
                    f"`offload={self.offload!r}` finds no memory for activations: of `host_memory`, which is "
                    f"{format_bytes(budget)}, model states take {format_bytes(host_bytes)}, and a tier needs "
                    f"{format_bytes(SMALLEST_TIER)}. Give more, or set `offload='none'`."
                )
            config = replace(config, offload="none")
        return config

    def paths(self, default: str | Path) -> list[Path]:
        """Returns the directories of the scratch files. If the user has named none, `default` is made and returned.

        Raises:
            ValueError: `default` is needed, and is not a local directory.
        """
        if self.path is None:
            if "://" in str(default):
                raise ValueError(
                    f"`default_root_dir={str(default)!r}` is not local: name a directory for scratch files with `path`."
                )
            Path(default).mkdir(parents=True, exist_ok=True)
            return [Path(default)]
        paths = [self.path] if isinstance(self.path, str | os.PathLike) else self.path
        return [Path(path) for path in paths]


def make_offloader(
    config: OffloadConfig, device: torch.device, *, default_path: str | Path, rank: int = 0, processes: int = 1
) -> ActivationOffloader:
    """Makes the activation offloader of a configuration. On an error, tiers that were made are closed.

    Args:
        default_path: directory for scratch files if the user has named none.
        rank: global rank of this process.
        processes: processes of this training on this machine, which share its memory.

    Raises:
        ValueError: an argument is not valid for this device.
        StorageError: the scratch space can't be allocated.
    """
    config = config.resolve(default_path, processes)
    names = _tier_names(config, device)
    if config.host_memory == "auto" and "host" in names:
        budget = available_memory() // (2 * processes)
        config = replace(config, host_memory=budget)
        if budget < SMALLEST_TIER and config.tier == "ssd":
            log.warning("no memory is left for a host tier: activations are offloaded to the SSD tier only")
            names.remove("host")
    copies = make_copy_engine(device)
    tiers: dict[OffloadTierName, OffloadTier] = {}
    speeds: dict[OffloadTierName, TierSpeed] = {}
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
            "activations may be offloaded to the %s tier: %s/s out, %s/s in, %s",
            name,
            format_bytes(speed.write),
            format_bytes(speed.read),
            tiers[name].describe(),
        )
    return ActivationOffloader(
        copies,
        tiers,
        OffloadPolicy(_make_placement(amount, speeds, device)),
        min_bytes=parse_bytes(config.min_bytes, "min_bytes"),
    )


def _make_placement(
    amount: float | int | Literal["auto", "ssdtrain", "none"],
    speeds: dict[OffloadTierName, TierSpeed],
    device: torch.device,
) -> PlacementPolicy:
    if amount == "none" or not speeds:
        return KeepAll()
    if amount == "auto":
        return make_auto_placement(tuple(speeds), device)
    if amount == "ssdtrain":
        memory = allocator_memory(device)
        return SSDTrainAuto(speeds, None if memory is None else ResidentLimit(memory))
    assert not isinstance(amount, str)
    return FixedAmount(amount, tuple(speeds))


def make_auto_placement(tiers: Sequence[OffloadTierName], device: torch.device) -> PlacementPolicy:
    """Returns the placement of the first steps under `offload="auto"`, whose limit of memory is not known yet."""
    memory = allocator_memory(device)
    return OffloadExcess(tiers, ResidentLimit(memory)) if memory is not None and tiers else KeepAll()


def _tier_names(config: OffloadConfig, device: torch.device) -> list[OffloadTierName]:
    if config.tier == "host":
        return ["host"]
    # On a CPU device, activations are in host memory already.
    if config.host_memory == "auto":
        host = device.type != "cpu"
    else:
        host = parse_bytes(config.host_memory, "host_memory") > 0
    order: list[OffloadTierName] = ["host", "ssd"] if config.spill == "host_first" else ["ssd", "host"]
    return [name for name in order if host or name == "ssd"]


def _make_host_tier(config: OffloadConfig, copies: CopyEngine) -> tuple[HostTier, TierSpeed]:
    budget = parse_bytes(config.host_memory, "host_memory")
    if budget < SMALLEST_TIER:
        raise ValueError(
            f"`host_memory` of {format_bytes(budget)} is too small for a host tier: give it at least "
            f"{format_bytes(SMALLEST_TIER)}, or 0 (with `tier='ssd'`) for none."
        )
    slab = max(SMALLEST_TIER, min(budget // 16, _LARGEST_SLAB))
    write, read = _copy_speed(copies)
    pool = PinnedPool(budget, pin=copies.device.type == "cuda", slab_bytes=slab, name="host_memory")
    return HostTier(pool, copies), TierSpeed(write, read, budget)


def _make_ssd_tier(
    config: OffloadConfig, copies: CopyEngine, default_path: str | Path, rank: int
) -> tuple[OffloadTier, TierSpeed]:
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
        # Allocated as needed: a plan may leave the SSDs unused.
        staging = PinnedPool(
            parse_bytes(config.staging_memory, "staging_memory"),
            pin=copies.device.type == "cuda",
            slab_bytes=_STAGING_SLAB,
            name="staging_memory",
        )
    except BaseException:
        store.close()
        raise
    return SSDTier(store, staging, copies), speed


def _copy_speed(copies: CopyEngine) -> tuple[float, float]:
    """Returns the bandwidths of d2h and h2d copies in bytes/s, each the best of three copies of one buffer."""
    data = copies.empty(_MEASURED_BYTES)
    # Not of the tier's memory: a training that offloads no activations would have it for its first steps.
    with contextlib.closing(Slab(_MEASURED_BYTES, pin=copies.device.type == "cuda")) as memory:
        clock = make_clock(copies.device)
        seconds = []
        for copy, src, dst in ((copies.d2h, data, memory.tensor), (copies.h2d, memory.tensor, data)):
            best = float("inf")
            for _ in range(3):
                start = clock.now()
                copies.wait(copy(src, dst, copies.mark()))
                end = clock.now()
                copies.drain()
                best = min(best, clock.elapsed(start, end) or best)
            seconds.append(best)
    return _MEASURED_BYTES / seconds[0], _MEASURED_BYTES / seconds[1]


_PIECE_BYTES = 16 * 2**20
"""Bytes of an I/O request: enough for a drive's full bandwidth, and few enough to stage several."""

SMALLEST_TIER = 32 * 2**20
"""Least bytes of a tier."""

_MEASURED_BYTES = SMALLEST_TIER
"""Bytes of the copies that measure the bandwidth of the host tier."""

_LARGEST_SLAB = 2**30
"""Most bytes by which the host tier grows: a sixteenth of its budget."""

_STAGING_SLAB = 2**28
"""Bytes by which staging memory grows."""

OFFLOAD = SizeArgument(
    "offload", ("auto", "ssdtrain", "none"), share_of="the bytes of a micro-batch", fractions=True, least=LEAST_BUDGET
)
HOST_MEMORY = SizeArgument("host_memory", ("auto",), share_of="the free host memory", least=LEAST_BUDGET)
SSD_CAPACITY = SizeArgument("ssd_capacity", share_of="the free space of `path`", least=LEAST_BUDGET)
STAGING_MEMORY = SizeArgument("staging_memory", share_of="the free host memory", least=LEAST_BUDGET)
MIN_BYTES = SizeArgument("min_bytes")


def _bytes_of(argument: SizeArgument, value: int | str, free: int) -> int | str:
    """Returns `value`, or the bytes that it stands for if it is a percentage of `free`."""
    share = argument.parse(value)
    if not isinstance(share, float):
        return value
    nbytes = int(share * free)
    if share and nbytes < LEAST_BUDGET:
        raise ValueError(
            f"`{argument.name}={value!r}` of {format_bytes(free)} is {format_bytes(nbytes)}, which is too little. Free "
            "some, or give bytes such as '8GiB'."
        )
    return nbytes


def check_paths(path: object) -> None:
    """Raises a TypeError or ValueError that names `path`, unless it is None, a local path, or a list of local paths."""
    legal = "Give a directory such as '/nvme0', or a list of several."
    paths = [path] if isinstance(path, str | os.PathLike) else path
    if paths is None:
        return
    if not isinstance(paths, Sequence) or isinstance(paths, bytes | bytearray):
        raise TypeError(f"{show_argument('path', path)} is no directory. {legal}")
    if not paths:
        raise ValueError(f"{show_argument('path', path)} names no directory. {legal} Or leave it out.")
    if len({os.path.realpath(parse_path("path", one, "/nvme0")) for one in paths}) < len(paths):
        raise ValueError(
            f"{show_argument('path', path)} names one directory twice: data are striped over directories of several "
            f"drives. {legal}"
        )
