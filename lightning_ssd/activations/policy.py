"""`OffloadPolicy`: the rules that an `ActivationOffloader` follows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_ssd.activations.placement import PlacementPolicy
from lightning_ssd.activations.record import SavedStorage
from lightning_ssd.activations.unit_dispatch_mode import UnitDispatchMode


@dataclass(frozen=True)
class OffloadPolicy:
    """The treatment of saved tensors by an `ActivationOffloader`, applied by `ActivationOffloader.run`.

    To change some of the rules, run a copy of the policy in force:
    `offloader.run(dataclasses.replace(offloader.policy, window_bytes=2**28))`.

    Attributes:
        placement: chooses the tier of each saved storage: all (`OffloadAll`), none (`KeepAll`), a share or number of
            bytes (`FixedAmount`), by bandwidth (`SSDTrainAuto`), or those that have no room (`OffloadExcess`).
        mode: dispatch mode that wraps each forward: a `PlanMode`, whose choices override those of `placement`, or a
            `TraceMode`; `None`: forwards run without one.
        window_bytes: bytes that may be in flight to the tiers at once, and bytes that may be prefetched ahead of use.
        window_depth: saved storages that may be prefetched ahead of use; `None`: `window_bytes` is the only limit.
        hooks_enabled: whether saved-tensor hooks are active in forwards. Without them all saved tensors are kept.
        on_saved: called with the storage of each saved tensor that may be offloaded, on the thread of `pack`.
        on_unpacked: called with each storage before backward unpacks a tensor of it, once the compute stream is ordered
            after its load, on the thread of `unpack`.
    """

    placement: PlacementPolicy
    mode: UnitDispatchMode | None = None
    window_bytes: int = 2**28
    window_depth: int | None = None
    hooks_enabled: bool = True
    on_saved: Callable[[torch.UntypedStorage, SavedStorage], None] | None = None
    on_unpacked: Callable[[SavedStorage], None] | None = None
