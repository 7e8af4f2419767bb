"""`PlanCache`: plans and measurements of earlier trainings, as files in the user's cache directory."""

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from lightning_ssd.callbacks.plan_key import is_like, recorded_forward
from lightning_ssd.planning import (
    MOST_BYTES,
    HardwareProfile,
    ModelProfile,
    Plan,
    as_mapping,
    check_not_negative,
    parse_json,
)
from lightning_ssd.storage import NotPrivateError, PrivateDirectory

__all__ = ["CacheEntry", "CachedPlan", "PlanCache", "parse_number", "warn_unused"]

log = logging.getLogger(__name__)

FORMAT = 6
"""Version of the files' content."""

MOST_FILES = 64
"""Number of plans that are stored, the ones that were written last."""

SWITCH = "LIGHTNING_SSD_PLAN_CACHE"
"""Environment variable: with the value 0, no plans are stored, and none are used."""


class CacheEntry(Protocol):
    """A plan with the measurements that a later training needs to use it."""

    @classmethod
    def from_content(cls, content: Mapping[Any, Any]) -> Self:
        """Returns the entry of a file's content. Raises ValueError if it is not one."""

    def to_content(self) -> dict[str, Any]:
        """Returns the content of a file: lists, dicts, strings and finite numbers."""


EntryT = TypeVar("EntryT", bound=CacheEntry)


@dataclass(frozen=True)
class CachedPlan:
    """A plan and the measurements that it was made from.

    Attributes:
        plan: the plan.
        profile: the model as measured, corrected by steps under plans.
        hardware: the machine, corrected in the same way, with the limits of the training that has stored it.
        machine: the machine as measured when that training began.
        fragment_reserve: share of the GPU limit that plans reserve for fragments.
        confirmed: whether the corrected profiles favor another plan, whose steps were measured to be slower.
        allocated_bytes: `Profiler.allocated_bytes` of the training that the profile is of.
    """

    plan: Plan
    profile: ModelProfile
    hardware: HardwareProfile
    machine: HardwareProfile
    fragment_reserve: float
    confirmed: bool
    allocated_bytes: int

    @classmethod
    def from_content(cls, content: Mapping[Any, Any]) -> Self:
        """Returns the entry of a file's content. Raises ValueError if it is not one."""
        reserve = parse_number(content, "fragment_reserve")
        if not isinstance(content.get("confirmed"), bool):
            raise ValueError("`confirmed` must be true or false")
        return cls(
            Plan.from_content(content.get("plan")),
            ModelProfile.from_content(content.get("profile"), "its profile"),
            _hardware(content.get("hardware")),
            _hardware(content.get("machine")),
            reserve,
            content["confirmed"],
            int(parse_number(content, "allocated_bytes")),
        )

    def to_content(self) -> dict[str, Any]:
        """Returns the content of a file."""
        content = {"plan": self.plan.to_content()}
        content |= {name: asdict(getattr(self, name)) for name in ("profile", "hardware", "machine")}
        return content | {name: getattr(self, name) for name in ("fragment_reserve", "confirmed", "allocated_bytes")}

    def obstacle(self, recorded: ModelProfile, machine: HardwareProfile) -> str | None:
        """Returns why the plan is not one for a training with its key; `None`: it is.

        Args:
            recorded: profile of the recorded forward.
            machine: the machine as measured.
        """
        try:
            self.plan.check(recorded)
        except ValueError as error:
            return str(error)
        if recorded_forward(self.profile) != recorded_forward(recorded):
            return "it was made for another forward"
        if not is_like(self.machine, machine):
            return "the machine was measured more than twice as fast, or half as fast, then"
        return None

    def measured(self, recorded: ModelProfile) -> ModelProfile:
        """Returns the measured profile for a training with the same forward, whose profile is `recorded`."""
        return replace(
            self.profile,
            samples=recorded.samples,
            tokens=recorded.tokens,
            param_budget_bytes=recorded.param_budget_bytes,
        )


class PlanCache:
    """Files of plans in `$XDG_CACHE_HOME/lightning_ssd/plans`, or in `~/.cache`, which only the user can write.

    A directory that can't be used is no error: nothing is found, and nothing is stored. The same holds if the user has
    set the environment variable LIGHTNING_SSD_PLAN_CACHE to 0. Each training has an object of its own, whose methods
    are called on the training thread.
    """

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        """Keys of earlier calls of `load_once`."""

    def load_once(self, key: str, kind: type[EntryT]) -> EntryT | None:
        """Returns the result of `load`; `None` from the second call for a key on, which a training makes to plan again.

        Args:
            key: as in `load`.
            kind: as in `load`.
        """
        if key in self._loaded:
            return None
        self._loaded.add(key)
        return self.load(key, kind)

    def load(self, key: str, kind: type[EntryT]) -> EntryT | None:
        """Returns the plan that was stored under `key`; `None`: there is none, or its file is not valid.

        Args:
            key: the key of the training.
            kind: class of the entry.
        """
        if _is_off():
            return None
        path = None
        try:
            path = plans_directory() / _name(key)
            with PrivateDirectory.open(path.parent) as directory:
                return kind.from_content(_parse(_read(directory, path.name), key))
        except FileNotFoundError:
            return None
        except (ValueError, NotPrivateError) as error:
            warn_unused(f"{path}: {error}")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            log.debug("no plan was read from the cache: %s", error)
        return None

    def save(self, key: str, entry: CacheEntry) -> None:
        """Stores a plan under `key`, in place of an earlier one, and removes the oldest files."""
        if _is_off():
            return
        text = json.dumps({"format": FORMAT, "key": key} | entry.to_content())
        try:
            path = plans_directory()
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with PrivateDirectory.open(path) as directory:
                # One writer at a time; another process's plan is stored next time. Closing the directory unlocks it.
                fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with directory.replacing_file(_name(key)) as file:
                    file.write(text.encode())
                _remove_oldest(directory)
        except (OSError, RuntimeError) as error:
            log.debug("the plan was not stored in the cache: %s", error)


def parse_number(content: Mapping[Any, Any], name: str) -> float:
    """Returns the number `name` of a file's content. Raises ValueError if it is not a number, or below 0."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` must be a number")
    check_not_negative(name, value)
    return value


def warn_unused(reason: str) -> None:
    """Logs that a plan of the cache is not used."""
    log.warning("the plan in the cache is not used, and the training is planned anew: %s", reason)


def plans_directory() -> Path:
    """Returns the directory of the plans. A relative `XDG_CACHE_HOME` is ignored, as its specification demands."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "lightning_ssd" / "plans"


def _is_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def _name(key: str) -> str:
    return f"{key}.json"


def _read(directory: PrivateDirectory, name: str) -> str:
    with os.fdopen(directory.open_file(name, os.O_RDONLY), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content.decode()


def _parse(text: str, key: str) -> Mapping[Any, Any]:
    """Returns the content of a file. Raises ValueError if it is not one for `key`."""
    content = as_mapping(parse_json(text, "it"), "it")
    if content.get("format") != FORMAT or content.get("key") != key:
        raise ValueError("it is of another version or training")
    return content


def _hardware(content: object) -> HardwareProfile:
    return HardwareProfile.from_content(content, "its hardware profile")


def _remove_oldest(directory: PrivateDirectory) -> None:
    def written(name: str) -> float:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_mtime

    for name in sorted(directory.names(), key=written)[:-MOST_FILES]:
        directory.remove_file(name)
