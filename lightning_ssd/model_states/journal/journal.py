"""The journal of `recover=True`: the record of the last committed step, from which a run resumes after a kill.

Every flat parameter is on SSDs in two versions. A step writes the uncommitted ones. When all bytes of a step are
durable, a record that names the newly committed versions replaces the record before; until then no other step may begin
to write. So whenever the process is killed, there is a record of a whole step, and all of its bytes.

Several ranks share the files, and rank 0 writes the record for all of them, in two phases: when it has the training
state of each other rank, and messages that all steps of their flat parameters are stored, it writes the record. No rank
begins its next step before the message that the record is written.

A record is plain data with a checksum (`plain_data`): it contains no code, and a changed bit is detected.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ssd.device import Worker
from lightning_ssd.futures import Future, all_of, finished
from lightning_ssd.model_states.journal.plain_data import DamagedError, PlainData, decode, encode, from_bytes, to_bytes
from lightning_ssd.model_states.journal.run_fingerprint import RunFingerprint, describe, differences
from lightning_ssd.model_states.optimizers import FlatOptimizer
from lightning_ssd.model_states.stores import Layout, StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import RankMessages, Topic
from lightning_ssd.storage import (
    Blob,
    BlobStore,
    Calibration,
    Piece,
    PrivateDirectory,
    StorageError,
    StoreManifest,
    from_os_error,
    read_manifest,
)

_FILE = "journal"


@dataclass(frozen=True)
class CommitRecord:
    """The record of one step.

    Attributes:
        identity: description of the flat parameters, which the next run must share.
        kept: files and blobs that the next run's scratch space adopts.
        versions: number of the committed version of each flat parameter.
        flat_optimizers: for each flat parameter that is stepped, the state that its optimizer has in memory.
        settings: settings of the training, which the next run must share.
        training_state: all other state of the training, with tensors on the CPU.
        file: path of the record's file, for messages.
    """

    identity: object
    kept: StoreManifest
    versions: Sequence[int]
    flat_optimizers: Sequence[object]
    settings: RunFingerprint
    training_state: Mapping[str, Any]
    file: str

    @property
    def remedy(self) -> str:
        """Remedy if the record is not to be resumed from."""
        return f"remove {self.file.removesuffix(f'/{_FILE}')} and what it holds, to begin anew"


def read_commit_record(
    directory: PrivateDirectory, layouts: Sequence[Layout], settings: RunFingerprint, rank: int, size: int
) -> CommitRecord | None:
    """Returns the last record of a killed run, or None if there is none.

    Args:
        directory: the kept directory of the first path, which this rank or rank 0 has locked.
        settings: settings of this run. A record of the same flat parameters is returned even if its settings differ.

    Raises:
        StorageError: the record has other flat parameters, or can't be read. Nothing is removed.
    """
    file = directory.path / _FILE
    give_up = f"remove {file.parent} and what it holds, to begin anew"
    try:
        content = directory.read_file(_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "read the journal of `recover=True`", file) from error
    try:
        parts = from_bytes(content)
        if size != len(parts) - 1:
            raise StorageError(
                f"{file} is of a run that was killed and had `devices={len(parts) - 1}`; this one has {size}. Give the "
                f"same number, or {give_up}."
            )
        own = decode(parts["journal"])
        record = CommitRecord(
            own["identity"],
            _kept_from(own["kept"]),
            own["slots"],
            own["rules"],
            RunFingerprint(**own["settings"]),
            decode(parts[_training_of(rank)]),
            str(file),
        )
    except DamagedError as error:
        raise StorageError(
            f"{file}, which a run that was killed left, can't be read: {error}. Its states can't be told from others: "
            f"start from a checkpoint with another `path`, or {give_up}."
        ) from error
    if record.identity != identity_of(layouts):
        found = describe(differences(record.settings.fixed, settings.fixed)) or "the parameters are grouped otherwise"
        raise StorageError(
            f"{file.parent} has the states of a run that was killed, of another model or with other settings: {found}. "
            f"Put them back, or {give_up}."
        )
    return record


def _training_of(rank: int) -> str:
    """Returns the name of a rank's training state in a record."""
    return f"training of rank {rank}" if rank else "training"


def has_commit_record(directory: PrivateDirectory) -> bool:
    """Returns whether a kept directory has the record of a killed run, readable or not."""
    return _FILE in directory.names()


def remove_record(directory: PrivateDirectory) -> None:
    """Removes the record in a kept directory, if there is one, durably.

    Raises:
        StorageError: the record may still exist.
    """
    try:
        directory.remove_file(_FILE)
        directory.sync()
    except OSError as error:
        raise from_os_error(error, "remove the journal of `recover=True`", directory.path / _FILE) from error


def check_paths(directories: Sequence[PrivateDirectory]) -> None:
    """Checks that no record is overlooked, because it is on a path that is not given, or not given first.

    Args:
        directories: locked kept directories of all paths; the record is in the first one.

    A run writes its manifests before its first record, that of its first path before the others. When it ends, it
    removes the record first, and the manifest of the first path last. So if a directory has a manifest, and the first
    path of that run is not given or has no manifest of it, the run may have a record on a path that is not accessible.

    Raises:
        StorageError: a directory belongs to a run with other paths, which may have a record.
    """
    given = [str(directory.path.parent) for directory in directories]
    manifests = [read_manifest(directory) for directory in directories]
    for directory, manifest in zip(directories, manifests, strict=True):
        if manifest is None:
            if has_commit_record(directory):
                raise StorageError(
                    f"{directory.path} has a record of a run that was killed, and not its manifest: it can't be used. "
                    f"Remove {directory.path} and what it holds, and start from a checkpoint or anew."
                )
            continue
        own = {path: one for path, one, other in zip(given, directories, manifests, strict=True) if other == manifest}
        first = own.get(manifest.paths[0])
        if first is not None and not has_commit_record(first):
            continue  # killed before its first record, or after its end
        if list(own) == given == list(manifest.paths):
            continue
        empty = [path for path in manifest.paths if path in given and path not in own]
        raise StorageError(
            f"{directory.path} is of a run that was killed and had path={list(manifest.paths)}, and this one has "
            f"path={given}{f', with nothing of that run in {empty}' if empty else ''}. Give the same paths in the same "
            f"order, with their drives mounted; or remove {', '.join(str(one.path) for one in own.values())} and what "
            "is there, to begin anew."
        )


def identity_of(layouts: Sequence[Layout]) -> object:
    """Returns a description of flat parameters. Flat parameters of equal descriptions can adopt each other's bytes."""
    return [
        [
            layout.flat.name,
            str(layout.flat.dtype),
            layout.split,
            list(layout.state_names),
            layout.moments,
            layout.versions,
            [array.start for array in layout.arrays],
            [[item.name, item.start, list(item.parameter.shape)] for item in layout.flat.param_views],
        ]
        for layout in layouts
    ]


class Journal:
    """Writes records.

    Threads: `write` and `forget` are called on the training thread; records are written on the thread `journal`, which
    waits for the training states of other ranks.

    Ownership: the versions that a record names must not be overwritten before the next record is written; the step
    scheduler sees to that.

    Args:
        stores: stores of all flat parameters, on SSDs; not owned.
        blob_store: scratch space of the stores.
        messages: messages of this rank; None: there is one rank.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        flat_optimizers: Mapping[FlatParameter, FlatOptimizer],
        blob_store: BlobStore,
        settings: RunFingerprint,
        messages: RankMessages | None = None,
    ) -> None:
        self._stores = stores
        self._flat_optimizers = flat_optimizers
        self._blob_store = blob_store
        self._settings = settings
        self._messages = messages
        self._records = 0
        """Submitted records."""
        self._worker = Worker("journal")

    def write(self, after: Sequence["Future[Any]"], training_state: Callable[[], PlainData]) -> "Future[None]":
        """Submits a record.

        Args:
            after: futures of the recorded steps and of their writes.
            training_state: returns the record's `training_state`; called on the journal's thread.

        Returns:
            A future that is done when the record has replaced the one before. Its error is a StorageError, or a
            RankError.
        """
        messages = self._messages
        self._records += 1
        turn = self._records
        if messages is not None and messages.rank > 0:
            sent = self._worker.submit(lambda: messages.post(Topic.TRAINING, 0, turn, training_state(), [0]), after)
            return all_of([sent, messages.collect(Topic.RECORDED, 0, turn, [0])])
        states: Future[dict[int, PlainData]] = finished({})
        if messages is not None:
            states = messages.collect(Topic.TRAINING, 0, turn, messages.others)

        def run() -> None:
            self._blob_store.sync()  # what other ranks have written, too
            stores = list(self._stores.values())
            own = {
                "identity": identity_of([store.layout for store in stores]),
                "kept": _kept_as_data(
                    self._blob_store.manifest([blob for store in stores for blob in store.buffers.blobs()])
                ),
                "slots": [store.buffers.version for store in stores],
                "rules": [flat_optimizer.get_extra_state() for flat_optimizer in self._flat_optimizers.values()],
                "settings": {"fixed": dict(self._settings.fixed), "noted": dict(self._settings.noted)},
            }
            parts = {"journal": encode(own, "the journal"), _training_of(0): training_state()}
            parts |= {_training_of(rank): state for rank, state in states.result().items()}
            self._replace(to_bytes(parts))
            if messages is not None:
                messages.post(Topic.RECORDED, 0, turn, None, messages.others)

        return self._worker.submit(run, [*after, states])

    def forget(self) -> None:
        """Removes the record, because recorded values are about to change, or training has ended, on all ranks.

        Raises:
            StorageError: the record may still exist.
            RankError: another rank has failed; the record exists, unless it did so within this method.
        """
        if self._messages is not None:
            self._messages.exchange("about to forget")
        if self._messages is None or self._messages.rank == 0:
            remove_record(self._blob_store.directory)
        if self._messages is not None:
            self._messages.exchange("forgotten")

    @property
    def written(self) -> bool:
        """True if there is a record for the next run."""
        return _FILE in self._blob_store.directory.names()

    def close(self) -> None:
        """Ends the thread."""
        self._worker.close()

    def _replace(self, content: bytes) -> None:
        directory = self._blob_store.directory
        try:
            with directory.replacing_file(_FILE) as file:
                file.write(content)
        except OSError as error:
            action = f"write {len(content)} bytes of the journal of `recover=True`"
            raise from_os_error(error, action, directory.path / _FILE) from error


def _kept_as_data(kept: StoreManifest) -> dict[str, object]:
    blobs = [
        [blob.nbytes, [[piece.volume, piece.offset, piece.start, piece.nbytes] for piece in blob.pieces]]
        for blob in kept.blobs
    ]
    measured = kept.calibration
    return {
        "blobs": blobs,
        "hashes": dict(kept.hashes),
        "calibration": [list(measured.weights), measured.write_bandwidth, measured.read_bandwidth],
        "run": kept.run,
    }


def _kept_from(data: dict[str, Any]) -> StoreManifest:
    blobs = [Blob(nbytes, tuple(Piece(*piece) for piece in pieces)) for nbytes, pieces in data["blobs"]]
    weights, write, read = data["calibration"]
    return StoreManifest(blobs, data["hashes"], Calibration(tuple(weights), write, read), data["run"])
