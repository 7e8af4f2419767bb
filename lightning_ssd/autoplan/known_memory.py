"""`KnownMemory`: the rule for a micro-batch that may need more device memory than measured ones."""

from lightning_ssd.activations import ResidentLimit
from lightning_ssd.autoplan.batches import BatchShape, SeenBatches

MAX_KINDS = 64
"""Most sets of trained parameters whose batches are known. The first one is forgotten."""


class KnownMemory:
    """Compares each micro-batch with earlier ones, whose memory is known: by its batch and its trained parameters.

    A micro-batch that may need more memory is measured: it checkpoints units, or offloads all saved tensors, one at a
    time.

    Args:
        limit: limit of kept tensors, whose `begin` is called before.
    """

    def __init__(self, limit: ResidentLimit) -> None:
        self.limit = limit
        self.fits = False
        """Whether all saved tensors of the present micro-batch may be kept, even without hooks."""
        self.short = False
        """Whether the device is known to lack room for saved tensors of the present micro-batch."""
        self._kinds: dict[frozenset[int], SeenBatches] = {}
        """Known batches, by the trained parameters of their micro-batches."""

    def begin(self, shape: BatchShape | None, trained: frozenset[int]) -> None:
        """Begins a micro-batch, and has it measured if it may need more memory than known ones.

        Args:
            shape: shape of the batch; `None`: unknown, so that hooks are needed in each of these micro-batches.
            trained: indices of the parameters that require gradients.
        """
        limit = self.limit
        comparable = [seen for of, seen in self._kinds.items() if trained <= of]
        known = any(seen.covers(shape) for seen in comparable)
        grown = False
        if shape is not None and comparable and limit.known and not known:
            # Another shape of no more bytes may need more memory, too: that of attention depends on the length.
            most = max(seen.nbytes for seen in comparable)
            grown = not limit.fits_grown(shape.nbytes / most if most else 1.0)
        self.short = limit.known and not limit.fits  # and so it is for a larger batch, whatever its measurement shows
        if grown or limit.measuring or (self._kinds and not comparable):
            limit.measure()
        self.fits = known and limit.fits

    def lacks(self, saved_bytes: int) -> bool:
        """Returns whether the saved storages do not fit beside the memory that stays allocated between steps.

        A forward begins with that memory, and needs more for its transient tensors.

        Args:
            saved_bytes: bytes of the storages that a micro-batch saves.
        """
        meter = self.limit.meter
        return meter.allocated() + saved_bytes > meter.limit()

    def end(self, shape: BatchShape | None, trained: frozenset[int]) -> None:
        """Ends the micro-batch; arguments as those of `begin`."""
        if not (self.limit.known or self.limit.measured):  # the limit has forgotten earlier micro-batches
            self._kinds.clear()
        seen = self._kinds.setdefault(trained, SeenBatches())
        if shape is not None:
            seen.add(shape)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
