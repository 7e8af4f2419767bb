"""`PrefetchScheduler` sets how many bytes of saved tensors are prefetched ahead of their use."""

import weakref
from dataclasses import replace
from typing import Any, Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.callbacks.find import find_offloader, trainer_callbacks
from lightning_ssd.sizes import SizeArgument, check_count, parse_bytes


class PrefetchScheduler(pl.Callback):
    """Sets the bytes in flight between the device and the tiers (the window), and adapts them to measured stalls.

    Saved tensors are prefetched in the order in which the last similar micro-batch unpacked them, up to the window's
    bytes ahead of their use. The window also limits the bytes that are being offloaded at a time, and the bytes that
    are kept on the device because backward needs them first. A larger window hides more latency, and needs as much
    more device memory.

    Args:
        window_bytes: the window in bytes (or `"512MiB"`). `"auto"` begins with 1.5 times the largest saved tensor, or
            1/16 of a micro-batch's saved bytes if that is more. It doubles as long as backward waits for loads and a
            larger window shortens the waits.
        max_window_bytes: upper limit of `"auto"`.
        depth: saved tensors of any size that may be prefetched at once; `None`: no such limit.

    Raises:
        ValueError: an argument is out of range.
    """

    #: Share of the time that the compute stream may wait for loads before the window grows.
    TOLERATED_STALL = 0.005
    #: Micro-batches between two changes of the window, until measurements reflect the first one.
    PATIENCE = 8

    def __init__(
        self,
        window_bytes: int | str | Literal["auto"] = "auto",
        max_window_bytes: int | str = "8GiB",
        depth: int | None = None,
    ) -> None:
        window = SizeArgument("window_bytes", ("auto",)).parse(window_bytes)
        self._fixed = window if isinstance(window, int) else None
        self._max = parse_bytes(max_window_bytes, "max_window_bytes")
        if depth is not None:
            check_count("depth", depth, 1)
        self._depth = depth
        self._window: int | None = self._fixed
        self._override: int | None = None
        self._offloader: weakref.ref[ActivationOffloader] | None = None
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_offloader": None}  # a pickled Trainer does not continue its training

    def override_window(self, window_bytes: int | None) -> None:
        """Overrides the window for the rest of the training, unless the user fixed it; None: adapts it again."""
        self._override = window_bytes

    @property
    def is_fixed(self) -> bool:
        """Whether the user fixed the window, so that `override_window` has no effect."""
        return self._fixed is not None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._override = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        offloader = find_offloader(trainer)
        if offloader is None:
            return
        if self._offloader is None or self._offloader() is not offloader:  # its statistics begin at 0
            self._begin()
            self._offloader = weakref.ref(offloader)
        override = None if self._fixed is not None else self._override
        if override is None and self._fixed is None:
            self._adapt(offloader)
        window = self._window if override is None else override
        policy = offloader.policy
        if window is None:
            window = policy.window_bytes
        if (policy.window_bytes, policy.window_depth) != (window, self._depth):
            offloader.run(replace(policy, window_bytes=window, window_depth=self._depth))

    def _begin(self) -> None:
        """Resets all measurements."""
        self._patience = self.PATIENCE
        self._last_stall = self._last_seconds = 0.0
        self._last_share: float | None = None
        self._measured = False
        self._converged = False

    def _adapt(self, offloader: ActivationOffloader) -> None:
        pattern = offloader.last_pattern
        if pattern is None or not pattern.sizes:
            return
        smallest = min(self._max, max(3 * pattern.largest // 2, sum(pattern.sizes) // (16 * pattern.parts)))
        self._window = max(self._window or 0, smallest)
        self._patience -= 1
        if self._patience > 0 or self._converged:
            return
        self._patience = self.PATIENCE
        stats = offloader.stats()
        stall, seconds = stats.load_stall - self._last_stall, stats.seconds - self._last_seconds
        self._last_stall, self._last_seconds = stats.load_stall, stats.seconds
        first, self._measured = not self._measured, True
        # The first micro-batches wait for allocations and for a plan.
        if not first and stall > self.TOLERATED_STALL * seconds:
            self._grow(smallest, stall / seconds)

    def _grow(self, smallest: int, share: float) -> None:
        assert self._window is not None
        if self._window >= self._max:
            self._converged = True
        elif self._last_share is not None and share > 0.8 * self._last_share:
            # The last doubling did not help: the bandwidth is the limit.
            self._window = max(smallest, self._window // 2)
            self._converged = True
        else:
            self._last_share = share
            self._window = min(self._max, 2 * self._window)


def find_schedulers(trainer: pl.Trainer) -> list[PrefetchScheduler]:
    """Returns the Trainer's callbacks that set the window."""
    return [one for one in trainer_callbacks(trainer) if isinstance(one, PrefetchScheduler)]
