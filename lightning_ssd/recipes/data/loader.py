"""A DataLoader that a resumed run continues after the last batch that was read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler


class EpochSampler(DistributedSampler[tuple[int, int]]):
    """A `DistributedSampler` whose keys are `(epoch, index)`.

    A data set that makes a new sample of the same text in each epoch needs the epoch. As a part of the key, it reaches
    the processes that prepare batches, also those that were started in an earlier epoch.
    """

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields the keys of the current epoch."""
        epoch = self.epoch
        return ((epoch, index) for index in super().__iter__())  # type: ignore[misc]  # the base yields indices


class ResumableDataLoader(DataLoader[dict[str, Tensor]]):
    """A DataLoader over a `DistributedSampler`, whose position Lightning saves in checkpoints and restores.

    The order of an epoch depends on the sampler's seed and the epoch's number only. So a position in the data is two
    numbers, the epoch and its yielded batches, however far the workers have prefetched.
    """

    _batches = 0
    """Batches that were yielded in this epoch."""
    _resume_from: dict[str, Any] | None = None
    """State of a checkpoint, until the next epoch starts."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        """Yields the batches of an epoch, or the remaining ones of a resumed epoch.

        Raises:
            ValueError: If the checkpoint's batches are not those of this loader.
        """
        if self._resume_from is None:
            self._batches = 0
        return self._read()

    def _read(self) -> Iterator[dict[str, Tensor]]:
        # A generator, so that nothing is read before the first batch is asked for: Lightning makes the
        # iterator first and tells the sampler its epoch afterwards.
        state, self._resume_from = self._resume_from, None
        # A state that was saved at an epoch's end is resumed in the next one, which starts at its beginning.
        self._batches = state["batches"] if state and state["epoch"] == self._epoch() else 0
        if state and self._batches and state["order"] != self._order():
            raise ValueError(
                f"The checkpoint is amid an epoch of {state['order']}, and this run has {self._order()}:"
                f" resume with the same data, data.batch_size, data.seed and number of devices"
            )
        for batch in islice(super().__iter__(), self._batches, None):
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, and the settings that determine the order of batches."""
        return {"epoch": self._epoch(), "batches": self._batches, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, a result of `state_dict`, when the next epoch starts."""
        self._resume_from = state

    def _epoch(self) -> int:
        # Lightning's `overfit_batches` replaces the sampler by one without epoch and seed.
        return getattr(self.sampler, "epoch", 0)

    def _order(self) -> dict[str, int | None]:
        return {
            "blocks": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": self.batch_size,
            "seed": getattr(self.sampler, "seed", None),
            "devices": getattr(self.sampler, "num_replicas", 1),
        }
