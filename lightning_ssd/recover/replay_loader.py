"""Dataloaders of a training with `recover=True`, whose position in the data is restored after a kill."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_ssd._lightning import fabric
from lightning_ssd.model_states import show
from lightning_ssd.retry import random_states, set_random_states

_GENERATORS = "lightning_ssd.generators"

_PREFETCHED = 1
"""Batches that Lightning prefetches from loaders without a length."""


@dataclass(frozen=True)
class DataPosition:
    """Position of a loader in its data.

    Attributes:
        made: states of random number generators when its iterator was made.
        begun: states of random number generators before the first batch; None: no batch was fetched.
        batches: number of fetched batches.
        ahead: states of random number generators before each batch that was prefetched after these.
    """

    made: dict[str, Any]
    begun: dict[str, Any] | None
    batches: int
    ahead: list[dict[str, Any]]
    settings: dict[str, str]


class ResumedRun(Protocol):
    """The part of `Recovery` that loaders use; see there."""

    random: dict[str, Any] | None

    def before_batch(self) -> None: ...


class ReplayLoader:
    """A dataloader whose position is restored after a kill by reading it again up to this position.

    Args:
        resume: position to restore; None: begin anew.
    """

    def __init__(self, dataloader: Any, resume: DataPosition | None, recovery: ResumedRun) -> None:
        self._dataloader = dataloader
        self._resume = resume
        self._recovery = recovery
        self._iterator: Iterator[Any] | None = None
        self._made: dict[str, Any] = {}
        self._begun: dict[str, Any] | None = None
        self._batches = 0
        self._calls = 0
        """Calls for the next batch, also those after the last batch."""
        self._recent: deque[dict[str, Any]] = deque(maxlen=_PREFETCHED)
        """States of random number generators before the last calls."""
        self._ahead: deque[dict[str, Any]] = deque()
        """Such states of the killed run, before batches that it had prefetched."""

    def __getattr__(self, name: str) -> Any:
        # Without these two methods, Lightning does not restore the loader, which is restored here instead.
        if name.startswith("__") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __reduce__(self) -> Any:
        return _same, (self._dataloader,)  # a copied Trainer does not continue the training

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> "ReplayLoader":
        self._iterator = None
        if self._resume is None:
            self._made, self._begun, self._batches, self._calls = self._random(), None, 0, 0
            self._iterator = iter(self._dataloader)
        return self

    def __next__(self) -> Any:
        self.fast_forward()
        self._recovery.before_batch()
        if self._ahead:
            self._set_random(self._ahead.popleft())
        before = self._random()
        self._recent.append(before)
        self._calls += 1
        if self._begun is None:
            self._begun = before
        assert self._iterator is not None
        batch = next(self._iterator)
        self._batches += 1
        return batch

    def position(self, ahead: int) -> DataPosition:
        """Returns the training's position in the data, without the last `ahead` batches, which were prefetched."""
        batches = min(self._batches, max(0, self._calls - ahead))
        before = list(self._recent)[-ahead:] if 0 < ahead <= self._calls else []
        return DataPosition(self._made, self._begun, batches, before, loader_settings(self._dataloader))

    def fast_forward(self) -> None:
        """Reads and drops the batches that the killed run has fetched. Samplers have their epoch set by now."""
        if self._resume is None:
            return
        position, self._resume = self._resume, None
        self._made, self._begun = position.made, position.begun
        self._batches = self._calls = position.batches
        self._ahead.extend(position.ahead)
        self._set_random(position.made)
        self._iterator = iter(self._dataloader)
        if position.begun is not None:
            self._set_random(position.begun)
            for _ in range(position.batches):
                next(self._iterator)

    def _random(self) -> dict[str, Any]:
        return random_states() | {_GENERATORS: [generator.get_state() for generator in _generators(self._dataloader)]}

    def _set_random(self, states: dict[str, Any]) -> None:
        set_random_states(states)
        for generator, state in zip(_generators(self._dataloader), states[_GENERATORS], strict=True):
            generator.set_state(state)


class StatefulReplayLoader(ReplayLoader):
    """A dataloader with a `state_dict`, whose position the Trainer restores.

    The dataloader restores its position when the first batch is fetched, and may draw random numbers for that. So the
    training's random number generators are restored afterwards.
    """

    def __iter__(self) -> "StatefulReplayLoader":
        resume, self._resume = self._resume, None
        super().__iter__()
        self._resume = resume
        return self

    def __next__(self) -> Any:
        random: dict[str, Any] | None = None
        if self._resume is not None and self._resume.begun is not None:
            # The first of several loaders has the training's generators restored, for all of them.
            random = random_states() if self._recovery.random is None else self._recovery.random
        batch = super().__next__()
        if random is not None:
            set_random_states(random)
        return batch

    def fast_forward(self) -> None:
        if self._resume is not None:
            self._begun, self._resume = self._resume.begun, None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dataloader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataloader.load_state_dict(state)


def _generators(dataloader: Any) -> list[torch.Generator]:
    """Returns the `torch.Generator` objects of a dataloader and of its samplers."""
    sampler, batches = getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)
    owners = (dataloader, sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _same(dataloader: Any) -> Any:
    return dataloader


def loader_settings(dataloader: Any) -> dict[str, str]:
    """Returns settings that identify a training dataloader, by name."""
    batches = getattr(dataloader, "batch_sampler", None)
    size = getattr(dataloader, "batch_size", None) or getattr(batches, "batch_size", None)
    sized_len = fabric.utilities.data.sized_len
    found = {
        "class": type(dataloader),
        "batch_size": size,
        "drop_last": getattr(dataloader, "drop_last", None),
        "num_workers": getattr(dataloader, "num_workers", None),
        "class of the sampler": type(getattr(dataloader, "sampler", None)),
        "class of the dataset": type(getattr(dataloader, "dataset", None)),
        "length of the dataset": sized_len(getattr(dataloader, "dataset", None)),
        "number of batches": sized_len(dataloader),
    }
    return {f"`{name}` of the training dataloader": show(value) for name, value in found.items()}
