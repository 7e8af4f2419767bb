"""`MemoryGuard`: finds micro-batches that may need more device memory than measured ones."""

from dataclasses import dataclass, field

from lightning_ssd.activations import MeasuredPeaks, ResidentLimit
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches

__all__ = ["MemoryGuard"]

MAX_KINDS = 64
"""Most sets of trained parameters with a memory of their own. The least recently used one is forgotten."""


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
        self._kinds: list[_Kind] = []
        """Known micro-batches by their trained parameters, the last used ones at the end."""

    def restart(self) -> None:
        """Forgets all micro-batches; see `ResidentLimit.restart`."""
        self.limit.restart()
        self._kinds.clear()

    def begin(self, shape: BatchShape | None, trained: tuple[bool, ...]) -> None:
        """Begins a micro-batch. If its batch is not within an earlier one and may not fit, it is measured.

        So is the first micro-batch that trains a parameter which no other one has trained, as its memory is not known.

        Args:
            shape: shape of the batch; `None`: unknown, so that hooks are needed in each of these micro-batches.
            trained: whether each parameter requires gradients.
        """
        limit = self.limit
        kind = next((kind for kind in self._kinds if kind.trained == trained), None)
        is_new = kind is None
        if kind is None:
            kind = self._make_kind(shape, trained)
        limit.select(kind.peaks)
        known = kind.seen.covers(shape)
        if is_new:
            unsafe = not limit.fits and any(one.peaks.others for one in self._kinds)
        else:
            self._kinds.remove(kind)
            ratio = shape.nbytes / kind.seen.nbytes if shape is not None and kind.seen.nbytes else 1.0
            # Another shape of no more bytes may need more memory, too: that of attention depends on the length.
            grown = limit.known and not known and shape is not None and not limit.fits_grown(ratio)
            unsafe = limit.measuring or grown
        self._kinds = [*self._kinds[1 - MAX_KINDS :], kind]
        if unsafe:
            limit.measure()
        # The upper bound was for all earlier batches. A measured peak is for this batch, and smaller ones.
        self._discards_batches = limit.measuring and not limit.measured
        self.short = limit.known and not limit.fits
        self.fits = known and limit.fits

    def _make_kind(self, shape: BatchShape | None, trained: tuple[bool, ...]) -> "_Kind":
        """Returns the micro-batches that train other parameters than known ones, with a bound of their memory.

        Autograd saves no more tensors than for known micro-batches together that train all of these parameters.
        """
        kind, parts = _Kind(trained), list[MeasuredPeaks]()
        missing = kind.indices
        known = [one for one in self._kinds if one.peaks.others and one.seen.covers(shape)]
        while missing and known:
            largest = max(known, key=lambda one: len(missing & one.indices))
            known.remove(largest)
            parts.append(largest.peaks)
            missing -= largest.indices
        if parts and not missing and shape is not None:
            kind.peaks = MeasuredPeaks.bound(parts)
            kind.seen.add(shape)
        return kind

    def end(self, shape: BatchShape | None) -> None:
        """Ends the micro-batch."""
        kind = self._kinds[-1]
        if self._discards_batches:
            kind.seen, self._discards_batches = SeenBatches(), False
        if shape is not None:
            kind.seen.add(shape)


@dataclass(eq=False)
class _Kind:
    """Known micro-batches that train the same parameters.

    Attributes:
        trained: whether each parameter requires gradients.
        peaks: memory of these micro-batches, with which alone they are compared.
        seen: their batches, as far as their memory is known.
        indices: indices of the parameters that require gradients.
    """

    trained: tuple[bool, ...]
    peaks: MeasuredPeaks = field(default_factory=MeasuredPeaks)
    seen: SeenBatches = field(default_factory=SeenBatches)
    indices: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.indices = frozenset(index for index, trains in enumerate(self.trained) if trains)
