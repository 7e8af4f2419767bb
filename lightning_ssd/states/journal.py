"""What a run that is killed leaves for the next one: which of its bytes count, and the little that is not on its SSDs.

Every flat is on SSDs in two slots. A step writes to those that don't count. When all of it is on the drives, a record
names the slots that count from now on and replaces the one before; until then no other step may begin to write. So
whenever the process is killed, the record that is there describes a whole step, of which every byte is there.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ssd.states.flat import Flat
from lightning_ssd.states.home import Home, Layout
from lightning_ssd.states.optimizers import Rule
from lightning_ssd.states.worker import Worker
from lightning_ssd.storage import BlobStore, Kept, PrivateDirectory, StorageError
from lightning_ssd.storage.errors import from_os_error

_FILE = "journal"


@dataclass(frozen=True)
class Record:
    """A step that was made.

    Attributes:
        identity: what the flats are: those of the next run must be the same.
        kept: what the next run's store takes over.
        slots: of each flat, which slot counts.
        rules: of each flat with a rule, what that keeps in memory.
        rest: what else the training was, with tensors on the CPU.
    """

    identity: object
    kept: Kept
    slots: Sequence[int]
    rules: Sequence[object]
    rest: Mapping[str, Any]


def read_record(directory: PrivateDirectory, layouts: Sequence[Layout]) -> Record | None:
    """Returns the last record of a run that was killed; None if there is none.

    Args:
        directory: the kept directory, locked.
        layouts: of this run's flats.

    Raises:
        StorageError: it is of another model, or can't be read; nothing is removed.
    """
    file = directory.path / _FILE
    give_up = f"remove {file.parent} and what it holds"
    try:
        content = io.BytesIO(directory.read_file(_FILE))
        record: Record = torch.load(content, map_location="cpu", weights_only=False)
    except FileNotFoundError:
        return None
    except Exception as error:
        raise StorageError(
            f"{file}, which a run that was killed left, can't be read: {error}. Run it with the "
            f"versions of then, or {give_up}."
        ) from error
    if record.identity != identity_of(layouts):
        raise StorageError(
            f"{file.parent} has the states of a run that was killed, of another model or with other settings "
            f"(`units`, `state_format`, `precision`, optimizers). Run it with those, or {give_up}."
        )
    return record


def identity_of(layouts: Sequence[Layout]) -> object:
    """Returns what flats must have in common to take the other's bytes over."""
    return [
        (
            layout.flat.name,
            str(layout.flat.dtype),
            layout.split,
            tuple(layout.state_names),
            layout.slots,
            [(item.name, item.start, tuple(item.parameter.shape)) for item in layout.flat.slices],
        )
        for layout in layouts
    ]


class Journal:
    """Writes records, on a thread of its own.

    Args:
        homes: all flats' homes, on SSDs.
        rules: of those that are stepped.
        store: where they are.
    """

    def __init__(self, homes: Mapping[Flat, Home], rules: Mapping[Flat, Rule], store: BlobStore) -> None:
        self._homes = homes
        self._rules = rules
        self._store = store
        self._worker = Worker("journal")

    def write(self, after: Sequence["Future[Any]"], rest: Callable[[], Mapping[str, Any]]) -> "Future[None]":
        """Has a record written.

        Args:
            after: the steps that it is to name, and their bytes. What it names does not change until it is written.
            rest: returns the record's `rest`; called on the journal's thread.

        Returns:
            A future that is done when the record has replaced the one before.
        """

        def run() -> None:
            self._store.sync()
            homes = list(self._homes.values())
            self._replace(
                Record(
                    identity_of([home.layout for home in homes]),
                    self._store.kept([blob for home in homes for blob in home.blobs()]),
                    [home.slot for home in homes],
                    [rule.kept() for rule in self._rules.values()],
                    rest(),
                )
            )

        return self._worker.submit(run, after)

    def forget(self) -> None:
        """Drops the record: what it names is about to change, or not wanted any more."""
        self._store.directory.remove_file(_FILE)

    @property
    def written(self) -> bool:
        """Whether there is a record for the next run."""
        return _FILE in self._store.directory.names()

    def close(self) -> None:
        """Ends the thread."""
        self._worker.close()

    def _replace(self, record: Record) -> None:
        directory = self._store.directory
        try:
            with directory.replacing_file(_FILE) as file:
                torch.save(record, file)
        except OSError as error:
            raise from_os_error(error, "write the journal of `recover=True`", directory.path / _FILE) from error
