"""`recover=True` with several paths: a record is found, or the error names its run's paths, for any given paths."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.model_states.journal.journal import Journal
from lightning_ssd.model_states.journal.plain_data import encode
from lightning_ssd.model_states.journal.run_fingerprint import RunFingerprint
from lightning_ssd.model_states.placement.state_storage import KilledRun
from lightning_ssd.storage import BlobStore, StorageError
from tests.support import forks
from tests.support.killed import KEPT, FailAt, Failure, fit, outcome, recovering, same
from tests.support.states import assert_nothing_is_left
from tests.support.trainings import script_environment

REFUSED = "refused"
RECORDED = "ab"


def selections(names: str) -> list[str]:
    """Returns each selection of the names in each order, such as "ca" of "abc"."""
    return ["".join(chosen) for size in range(1, len(names) + 1) for chosen in permutations(names, size)]


def paths_of(root: Path, names: str) -> list[Path]:
    paths = [root / name for name in names]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return paths


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def assert_refused(error: BaseException, root: Path, recorded: str, given: str) -> None:
    """Asserts that the message has the run's paths, and the directories to remove."""
    paths = [str(root / name) for name in recorded]
    remove = ", ".join(str(root / name / KEPT) for name in given if name in recorded)
    assert f"is of a run that was killed and had path={paths}" in str(error)
    assert f"Give the same paths in the same order, with their drives mounted; or remove {remove}" in str(error)


def train(paths: Sequence[Path], **arguments: Any) -> Any:
    options = dict(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0, val_check_interval=None)
    return fit(recovering(paths), **(options | arguments))  # type: ignore[arg-type]


def test_trainings_with_every_choice_of_paths(tmp_path: Path) -> None:
    """With fewer, more or other paths, in any order, all that have files of the run are refused by name."""
    recorded, names = "ab", "abc"
    expected = outcome(train(paths_of(tmp_path / "plain", recorded)))
    with pytest.raises(Failure):
        train(paths_of(tmp_path, recorded), callbacks=[FailAt(6)])
    paths_of(tmp_path, names)
    before = snapshot(tmp_path)
    for given in selections(names):
        if given != recorded and set(given) & set(recorded):
            with pytest.raises(StorageError) as error:
                train(paths_of(tmp_path, given))
            assert_refused(error.value, tmp_path, recorded, "".join(name for name in given))
            assert snapshot(tmp_path) == before, given
    assert min(train(paths_of(tmp_path, "c")).losses) == 0  # an independent run
    found = train(paths_of(tmp_path, recorded))
    assert min(found.losses) >= 4 and same(outcome(found), expected)
    for path in paths_of(tmp_path, names):
        assert_nothing_is_left(path)


# ---- the same without a training: a run is a store and its journal ----


@contextmanager
def opened(
    paths: Sequence[Path], *, start_over: bool = False, remove: bool = False
) -> Iterator[tuple[BlobStore, bool]]:
    """A run's store, and whether it resumes from a record."""
    taken = KilledRun([], RunFingerprint.none(), start_over=start_over, size=1)
    store = BlobStore(paths, device=torch.device("cpu"), capacity=2**16 * len(paths), keep=True, find_manifest=taken)
    try:
        yield store, taken.record is not None
    finally:
        store.close(remove=remove)


def record(store: BlobStore) -> None:
    journal = Journal({}, {}, store, RunFingerprint.none())
    journal.write([], lambda: encode({}, "training")).result(timeout=60)
    journal.close()


def begin(paths: Sequence[Path]) -> str:
    """Begins a run without effect, and returns "goes on", "anew", or "refused"."""
    try:
        with opened(paths, remove=True) as (_, goes_on):
            return "goes on" if goes_on else "anew"
    except StorageError:
        return REFUSED


def outcomes(root: Path, recorded: str, prepare: Callable[[], object]) -> dict[str, str]:
    """Returns the outcomes of runs by their paths; each run finds the files that `prepare` makes."""
    found = {}
    for given in selections(recorded + "x"):
        shutil.rmtree(root, ignore_errors=True)
        paths_of(root, recorded + "x")
        prepare()
        before = snapshot(root)
        found[given] = begin(paths_of(root, given))
        if found[given] == REFUSED:
            assert snapshot(root) == before, given
        else:  # files that it does not use are kept
            assert all(file in before for file in snapshot(root))
    return found


def test_every_choice_of_paths_after_a_record(tmp_path: Path) -> None:
    def prepare() -> None:
        with opened(paths_of(tmp_path, RECORDED)) as (store, _):
            record(store)

    for given, found in outcomes(tmp_path, RECORDED, prepare).items():
        foreign = not set(given) & set(RECORDED)
        assert found == ("goes on" if given == RECORDED else "anew" if foreign else REFUSED), given


def test_every_choice_of_paths_after_a_kill_before_the_first_record(tmp_path: Path) -> None:
    """A run knows whether there is a record if the first path is given."""

    def prepare() -> None:
        with opened(paths_of(tmp_path, RECORDED)):
            pass

    for given, found in outcomes(tmp_path, RECORDED, prepare).items():
        unknown = RECORDED[0] not in given and bool(set(given) & set(RECORDED))
        assert found == (REFUSED if unknown else "anew"), given


def test_every_choice_of_paths_after_a_good_end(tmp_path: Path) -> None:
    def prepare() -> None:
        with opened(paths_of(tmp_path, RECORDED), remove=True) as (store, _):
            record(store)

    assert set(outcomes(tmp_path, RECORDED, prepare).values()) == {"anew"}


def test_paths_whose_drives_are_not_mounted(tmp_path: Path) -> None:
    """Some paths are empty directories, or those of another run."""
    for missing in ("a", "b", "c", "ab", "bc", "abc"):
        for another in (False, True):
            shutil.rmtree(tmp_path)
            with opened(paths_of(tmp_path, "abc")) as (store, _):
                record(store)
            for name in missing:
                shutil.rmtree(tmp_path / name / KEPT)
                if another:
                    with opened(paths_of(tmp_path, name)) as (store, _):
                        record(store)
            before = snapshot(tmp_path)
            expected = "anew" if set(missing) == set("abc") and not another else REFUSED
            assert begin(paths_of(tmp_path, "abc")) == expected
            assert expected != REFUSED or snapshot(tmp_path) == before


def test_a_manifest_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    """Any byte of any manifest."""
    paths = paths_of(tmp_path, "ab")
    with opened(paths) as (store, _):
        record(store)
    for path in paths:
        file = path / KEPT / "run"
        content = file.read_bytes()
        for index in range(len(content)):
            file.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            with pytest.raises(StorageError, match=f"{file}, which .* is damaged.* Remove {file.parent} and"):
                opened(paths).__enter__()
        for length in range(0, len(content), 16):
            file.write_bytes(content[:length])
            with pytest.raises(StorageError, match=f"{file}, which .* is damaged.* Remove {file.parent} and"):
                opened(paths).__enter__()
        file.unlink()
        assert begin(paths) == REFUSED
        file.write_bytes(content)
        file.chmod(0o600)
    assert begin(paths) == "goes on"


CALLS = ("mkdir", "unlink", "rmdir", "rename", "fsync")


def killed_before_call(number: int, run: Callable[[], object]) -> bool:
    """Runs `run` in a forked process, which is killed at its nth call that changes a directory; returns whether."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            calls = count()
            for name in CALLS:
                call = getattr(os, name)

                def counted(*args: Any, call: Any = call, **kwargs: Any) -> Any:
                    if next(calls) == number:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                setattr(os, name, counted)
            run()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def whole_run(paths: Sequence[Path], *, start_over: bool) -> None:
    with opened(paths, start_over=start_over, remove=True) as (store, _):
        record(store)
        record(store)
        store.directory.remove_file("journal")


def check_kills(root: Path, before: str, start_over: bool, every: int) -> None:
    """Kills runs at every `every`-th call. This process has one thread, so that no lock is held in forked ones."""
    found = set()
    for number in count(0, every):
        shutil.rmtree(root, ignore_errors=True)
        paths = paths_of(root, "ab")
        if before != "nothing":
            with opened(paths) as (store, _):
                if before == "record":
                    record(store)
        killed = killed_before_call(number, partial(whole_run, paths, start_over=start_over))
        has_commit_record = (paths[0] / KEPT / "journal").exists()
        outcome = begin(paths)
        assert outcome == ("goes on" if has_commit_record else "anew"), number
        found.add(outcome)
        if not killed:
            break
    assert found == {"goes on", "anew"} and number > 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "start_over", "every"), [("record", True, 7), ("nothing", False, 3), ("killed before a record", True, 5)]
)
def test_a_kill_at_any_moment_asks_for_no_other_paths(
    tmp_path: Path, before: str, start_over: bool, every: int
) -> None:
    """While a run begins, records, or ends: with the same paths the next one resumes or begins anew."""
    call = f"check_kills(Path({str(tmp_path / 'kept')!r}), {before!r}, {start_over}, {every})"
    quick = "from tests.support.measurements import measure_few_bytes\nmeasure_few_bytes()"
    script = f"from pathlib import Path\nfrom {__name__} import check_kills\n{quick}\n{call}\nprint('whole')\n"
    done = forks.run(["-c", script], env=script_environment(), timeout=250)
    assert done.stdout.splitlines()[-1:] == ["whole"], done.stderr
