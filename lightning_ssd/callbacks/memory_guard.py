"""`MemoryGuard`: finds micro-batches that may need more device memory than measured ones."""

from lightning_ssd.activations import ResidentLimit
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches

__all__ = ["MemoryGuard"]


class MemoryGuard:
    """Compares each micro-batch with those of known memory: by batch and trained parameters.

    Args:
        limit: limit of kept tensors, whose `begin` is called before that of the guard.
    """

    def __init__(self, limit: ResidentLimit) -> None:
        self.limit = limit
        self.fits = False
        """Whether all saved tensors of the present micro-batch may be kept, even without hooks."""
        self.short = False
        """Whether the device is known to lack room for saved tensors of the present micro-batch."""
        self._discards_batches = False
        """Whether earlier batches are discarded after the present micro-batch."""
        self._seen = SeenBatches()
        """Batches of measured micro-batches."""
        self._trained: tuple[bool, ...] | None = None
        """Whether each parameter required gradients in these micro-batches."""

    def restart(self) -> None:
        """Forgets all micro-batches; see `ResidentLimit.restart`."""
        self.limit.restart()
        self._seen = SeenBatches()

    def begin(self, shape: BatchShape | None, trained: tuple[bool, ...]) -> None:
        """Begins a micro-batch. If its batch is not within an earlier one and may not fit, it is measured.

        Args:
            shape: shape of the batch; `None`: unknown, so that hooks are needed in each of these micro-batches.
            trained: whether each parameter requires gradients.
        """
        limit = self.limit
        thawed = trained != self._trained
        if thawed:
            self._seen, self._trained = SeenBatches(), trained
        known = self._seen.covers(shape)
        if limit.known and not known:
            ratio = shape.nbytes / self._seen.nbytes if shape is not None and self._seen.nbytes else 1.0
            # Another shape of no more bytes may need more memory, too: that of attention depends on the length.
            if thawed or (shape is not None and not limit.fits_grown(ratio)):
                limit.measure()
        # The upper bound was for all earlier batches. A measured peak is for this batch, and smaller ones.
        self._discards_batches = limit.measuring and not limit.measured
        self.short = limit.known and not limit.fits
        self.fits = known and limit.fits

    def end(self, shape: BatchShape | None) -> None:
        """Ends the micro-batch."""
        if self._discards_batches:
            self._seen, self._discards_batches = SeenBatches(), False
        if shape is not None:
            self._seen.add(shape)
