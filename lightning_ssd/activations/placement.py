"""Placements: rules that choose the tier of each saved storage.

A placement spreads offloaded storages evenly over the forward, so that copies keep pace with compute and few bytes are
in flight. (Offloading everything at the begin of the forward would queue up copies that no compute hides.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from lightning_ssd.activations.micro_batch import MicroBatchProfile
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.planning import TierSpeed, offload_amounts
from lightning_ssd.types import OffloadTierName


class PlacementPolicy(ABC):
    """Chooses the tiers of saved storages. One object serves a whole training."""

    revision: int = 0
    """Number of changes of the rule so far. A profile names the revision that its micro-batch had."""

    expects_early: bool = False
    """Whether the expected bytes include storages that are kept because backward needs them within the window."""

    must_fit: bool = False
    """Whether a storage that no tier has room for is an error. Otherwise it is kept on the device."""

    @property
    def may_wait(self) -> bool:
        """Whether a store may block the training until staging memory is free."""
        return True

    @property
    def memory_is_scarce(self) -> bool:
        """Whether storages must be evicted as early as possible, even if that costs more time of the host."""
        return False

    def begin(self, expected_bytes: int) -> None:
        """Begins a micro-batch; the last one saved `expected_bytes` that could be offloaded (0: unknown)."""
        return None

    def use_window(self, window_bytes: int, early_bytes: Callable[[int], int]) -> int:
        """Returns the window of the present micro-batch, which has saved nothing yet.

        Args:
            window_bytes: the largest window.
            early_bytes: returns the bytes of storages that are kept because backward needs them within a window,
                besides the very first one.
        """
        return window_bytes

    def end(self) -> None:
        """Called when the backward of the micro-batch has ended."""
        return None

    @abstractmethod
    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        """Returns the tiers to try, in this order, for the next storage; none: it is kept on the device."""

    def observe(self, profile: MicroBatchProfile) -> None:
        """Receives the profile of a micro-batch, some micro-batches later."""
        return None


class KeepAll(PlacementPolicy):
    """Offloads nothing."""

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        return ()


class OffloadAll(PlacementPolicy):
    """Offloads everything for which the tiers have room, in the order in which they are filled."""

    def __init__(self, tiers: Sequence[OffloadTierName]) -> None:
        self._tiers = tiers

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        return self._tiers


class OffloadExcess(PlacementPolicy):
    """Keeps the storages for which the device has room, and offloads the others, evenly spread over the forward.

    Until a micro-batch has shown how many bytes fit (see `ResidentLimit`), it offloads all storages that can be
    offloaded without blocking the training, or, if `limit.keeps_unknown`, keeps them while there is memory.

    Args:
        tiers: the tiers, in the order in which they are filled.
        limit: bytes that may be kept on the device.
    """

    expects_early = True

    def __init__(self, tiers: Sequence[OffloadTierName], limit: ResidentLimit) -> None:
        self.limit = limit
        self._tiers = tiers
        self._excess = _Share(0.0)
        """Share of the storages for which the device has no room."""

    @property
    def may_wait(self) -> bool:
        return self.limit.known or self.limit.waits()

    @property
    def memory_is_scarce(self) -> bool:
        return self.limit.scarce

    def begin(self, expected_bytes: int) -> None:
        self.limit.begin(expected_bytes)
        self.spread()

    def spread(self) -> None:
        """Spreads the storages without room evenly over those for which the placement is asked."""
        self._excess = _Share(self.limit.excess(self.limit.placed_bytes))

    def use_window(self, window_bytes: int, early_bytes: Callable[[int], int]) -> int:
        window_bytes = self.limit.use_window(window_bytes, early_bytes)
        self.spread()
        return window_bytes

    def end(self) -> None:
        self.limit.end()

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        if not self.limit.known:
            return () if self.limit.keep_unknown(nbytes) else self._tiers
        return self._tiers if self._excess.pick(nbytes) or not self.limit.keep(nbytes) else ()


class FixedAmount(PlacementPolicy):
    """Offloads a given share, or number, of the bytes of each micro-batch.

    Args:
        amount: `float`: share of the bytes, 0 to 1. `int`: bytes per micro-batch.
        tiers: the tiers, in the order in which they are filled.
    """

    must_fit = True

    def __init__(self, amount: float | int, tiers: Sequence[OffloadTierName]) -> None:
        self._amount = amount
        self._tiers = tiers
        self._share = _Share(amount if isinstance(amount, float) else 1.0)
        self._left: float = float("inf")

    def begin(self, expected_bytes: int) -> None:
        if isinstance(self._amount, int):
            self._left = self._amount
            self._share = _Share(min(1.0, self._amount / expected_bytes) if expected_bytes else 1.0)
        else:
            self._share = _Share(self._amount)

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        if nbytes > self._left or not self._share.pick(nbytes):
            return ()
        self._left -= nbytes
        return self._tiers


class SSDTrainAuto(PlacementPolicy):
    """SSDTrain's rule: offloads as many bytes as the bandwidth carries while the forward computes (its figure 3).

    Until a micro-batch was measured, all storages are offloaded that can be offloaded without blocking the training.
    Then each tier has its share of the bytes. A share shrinks while the compute stream waits for its tier, and grows
    back slowly while it does not. Storages that do not fit on the device are offloaded beyond these shares, and these
    offloads may block the training.

    Args:
        speeds: bandwidth and capacity of each tier, in the order in which the tiers are filled.
        limit: bytes that may be kept on the device; None: unlimited.
    """

    #: Share of a micro-batch's time that stalls of a tier may take before its share shrinks.
    TOLERATED_STALL = 0.005
    #: Share of the bandwidth that is used: on a link that is always busy, uneven transfers stall the compute stream.
    MARGIN = 0.9
    #: Relative reduction of a tier's share / its share of stalled time: stalls end within a few micro-batches.
    SHRINK = 12.0
    #: Factor by which a share grows back after `_patience` micro-batches almost without stalls.
    GROW = 1.03
    #: Upper limit of `_patience`, which doubles whenever the share shrinks: a share that stalled is tried less often.
    PATIENCE = 64
    #: Micro-batches that are not measured: the time of the first one includes lazy initialization.
    WARM_UP = 1

    def __init__(self, speeds: Mapping[OffloadTierName, TierSpeed], limit: ResidentLimit | None = None) -> None:
        self._speeds = speeds
        self._limit = limit
        self._tiers = tuple(speeds)
        self._scale: dict[OffloadTierName, float] = dict.fromkeys(speeds, 1.0)
        self._amounts: dict[OffloadTierName, int] | None = None
        self._ratios: dict[OffloadTierName, float] | None = None
        self._shares: dict[OffloadTierName, _Share] = {}
        self._excess = _Share(0.0)
        """Share of the storages outside the tiers' shares for which the device has no room."""
        self._seen = 0
        self._seen_of_revision = 0
        self._patience = dict.fromkeys(speeds, 1)
        """Micro-batches almost without stalls before a tier's share grows."""
        self._quiet = dict.fromkeys(speeds, 0)
        """Micro-batches almost without stalls in a row, by tier."""

    @property
    def may_wait(self) -> bool:
        return self._amounts is not None or (self._limit is not None and self._limit.waits())

    @property
    def memory_is_scarce(self) -> bool:
        return self._limit is not None and self._limit.scarce

    def begin(self, expected_bytes: int) -> None:
        if self._limit is not None:
            was_measuring = self._limit.measuring
            self._limit.begin(expected_bytes)
            if self._limit.measuring != was_measuring:
                self._begin_revision()
        if self._amounts is None or not expected_bytes:
            return
        if self._ratios is None:
            # Ratios, because the forward time of a micro-batch grows with its bytes.
            self._ratios = {tier: amount / expected_bytes for tier, amount in self._amounts.items()}
        shares = {tier: min(1.0, self._scale[tier] * ratio) for tier, ratio in self._ratios.items()}
        self._shares = {tier: _Share(share) for tier, share in shares.items()}
        if self._limit is not None:
            kept = max(0.0, 1.0 - sum(shares.values())) * expected_bytes
            self._excess = _Share(self._limit.excess(kept))

    def end(self) -> None:
        if self._limit is not None:
            self._limit.end()

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        if self._amounts is None or (self._limit is not None and self._limit.measuring):
            return self._tiers
        # Each storage counts for all shares; the first share that is due offloads it.
        due: tuple[OffloadTierName, ...] = ()
        for tier, share in self._shares.items():
            if share.pick(nbytes, unless=bool(due)):
                due = (tier,)
        if not due and self._limit is not None and (self._excess.pick(nbytes) or not self._limit.keep(nbytes)):
            return self._tiers
        return due

    def observe(self, profile: MicroBatchProfile) -> None:
        self._seen += 1
        if self._seen <= self.WARM_UP or profile.revision != self.revision:
            return
        if self._amounts is None:
            stalls = list(profile.stall_seconds.values())
            self._amounts = offload_amounts(
                profile.saved_bytes,
                self.MARGIN * (profile.forward_seconds - sum(out for out, _ in stalls)),
                self.MARGIN * (profile.backward_seconds - sum(into for _, into in stalls)),
                self._speeds,
            )
            self._begin_revision()
            return
        self._seen_of_revision += 1
        if self._seen_of_revision == 1:
            return  # the allocator moves memory in the first micro-batch of a revision
        for tier in self._tiers:
            stalled = sum(profile.stall_seconds[tier]) / (profile.forward_seconds + profile.backward_seconds)
            self._quiet[tier] = self._quiet[tier] + 1 if stalled < self.TOLERATED_STALL / 5 else 0
            if stalled > self.TOLERATED_STALL:
                self._scale[tier] *= max(0.5, 1.0 - self.SHRINK * stalled)
                self._patience[tier] = min(self.PATIENCE, 2 * self._patience[tier])
                self._begin_revision()
            elif self._scale[tier] < 1.0 and self._quiet[tier] >= self._patience[tier]:
                self._scale[tier] = min(1.0, self.GROW * self._scale[tier])
                self._quiet[tier] = 0
                self._begin_revision()

    def _begin_revision(self) -> None:
        self.revision += 1
        self._seen_of_revision = 0


class _Share:
    """Picks storages so that the picked bytes are a fixed share of all bytes so far, give or take half a storage."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed = 0.0

    def pick(self, nbytes: int, *, unless: bool = False) -> bool:
        """Counts the next storage, and returns whether it is picked; with `unless` it is not, and a later one is."""
        self._owed += self._share * nbytes
        if unless or 2 * self._owed < nbytes:
            return False
        self._owed -= nbytes
        return True
