"""`PlannedExcess`: a placement by a plan of saved storages, in the order of saving."""

from collections.abc import Sequence

from lightning_ssd.activations.placement import OffloadExcess
from lightning_ssd.planning import StoragePlan
from lightning_ssd.types import InputChoice, OffloadTierName


class PlannedExcess(OffloadExcess):
    """Follows a `StoragePlan`, whose storages are recognized by their order and bytes, within the limit of memory.

    A storage that the plan keeps is offloaded if the device has no room for it. From the first storage on that is
    larger than the plan's, the rest of a micro-batch is treated as by `OffloadExcess`, as are micro-batches without a
    plan.
    """

    _planned: Sequence[tuple[int, InputChoice, bool]] = ()
    """Bytes, choice, and whether it can be offloaded, of each storage that the placement is asked for."""
    _position = 0
    _saved_at: Sequence[float] = ()
    """Seconds from the begin of the forward until each storage is saved, in the order of saving; empty: unknown."""

    def begin(self, expected_bytes: int) -> None:
        super().begin(expected_bytes)
        self._planned, self._position, self._saved_at = (), 0, ()

    def follow(self, plan: StoragePlan | None, saved_at: Sequence[float] = ()) -> None:
        """Has the present micro-batch, which has begun and saved nothing yet, follow a plan.

        Args:
            plan: choices for the storages; `None`: storages without room are offloaded.
            saved_at: recorded seconds from the begin of the forward until each storage is saved.
        """
        self._saved_at = saved_at
        # The offloader asks for no tiers of storages that backward needs first.
        self._planned = (
            []
            if plan is None
            else [
                (nbytes, choice, index in plan.movable)
                for index, (nbytes, choice) in enumerate(zip(plan.sizes, plan.choices, strict=True))
                if index not in plan.early
            ]
        )

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        position, self._position = self._position, self._position + 1
        if position >= len(self._planned) or nbytes > self._planned[position][0]:
            self._planned = ()
        if not self._planned or not self.limit.known:
            return super().tiers_for(nbytes)
        _, choice, movable = self._planned[position]
        if choice == "keep":  # the limit is for storages besides those that can't be offloaded
            return () if not movable or self.limit.keep(nbytes) else self._tiers
        return (choice, *(tier for tier in self._tiers if tier != choice))

    def elapsed(self, num_saved: int) -> float | None:
        # Also for other storages than the plan's: the times of one micro-batch have one unit.
        return self._saved_at[min(max(num_saved, 1), len(self._saved_at)) - 1] if self._saved_at else None
