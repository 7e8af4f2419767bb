"""`PlannedExcess`: a placement by a plan of saved storages, in the order of saving."""

from collections.abc import Sequence

from lightning_ssd.activations.placement import OffloadExcess
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.planning import StoragePlan
from lightning_ssd.types import OffloadTierName


class PlannedExcess(OffloadExcess):
    """Follows a `StoragePlan`, whose storages are recognized by their order and bytes, within the limit of memory.

    A storage that the plan keeps is offloaded if the device has no room for it. From the first storage that differs
    from the plan on, the rest of a micro-batch is treated as by `OffloadExcess`.

    Args:
        tiers: the tiers, in the order in which they are filled.
        limit: bytes that may be kept on the device.
        plan: choices for the storages.
        reserved_bytes: bytes of the limit that the plan's window needs, besides the window of the limit.
    """

    def __init__(
        self, tiers: Sequence[OffloadTierName], limit: ResidentLimit, plan: StoragePlan, reserved_bytes: int
    ) -> None:
        super().__init__(tiers, limit)
        # The offloader asks for no tiers of storages that backward needs first.
        self._planned = [
            (nbytes, choice, index in plan.movable)
            for index, (nbytes, choice) in enumerate(zip(plan.sizes, plan.choices, strict=True))
            if index not in plan.early
        ]
        self._reserved_bytes = reserved_bytes
        self._position = 0
        self._follows = True
        """Whether the micro-batch has saved the storages of the plan so far."""

    def begin(self, expected_bytes: int) -> None:
        super().begin(expected_bytes)
        self._position, self._follows = 0, True
        self.limit.reserve(self._reserved_bytes)

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        position, self._position = self._position, self._position + 1
        self._follows &= position < len(self._planned) and self._planned[position][0] == nbytes
        if not self._follows or not self.limit.known:
            return super().tiers_for(nbytes)
        _, choice, movable = self._planned[position]
        if choice == "keep":  # the limit is for storages besides those that can't be offloaded
            return () if not movable or self.limit.keep(nbytes) else self._tiers
        return (choice, *(tier for tier in self._tiers if tier != choice))
