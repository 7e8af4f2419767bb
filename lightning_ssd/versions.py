"""The versions with which the package was tested."""

import platform

import torch

from lightning_ssd._lightning import pl

TESTED = {"Python": ("3.11", "3.13"), "torch": ("2.8", "2.14"), "Lightning": ("2.6", "2.6")}
"""The oldest and the newest version, without bug-fix releases; `.ci/versions` tests both."""


def installed_versions() -> dict[str, str]:
    """Returns the installed versions, by the names of `TESTED`."""
    return {"Python": platform.python_version(), "torch": str(torch.__version__), "Lightning": str(pl.__version__)}


def is_tested(name: str, version: str) -> bool:
    """Returns whether a version is between the oldest and the newest tested one."""
    oldest, newest = TESTED[name]
    return _release(oldest) <= _release(version) <= _release(newest)


def warn_of_untested() -> None:
    """Warns of installed versions that are newer than the tested ones."""
    newer = [
        f"{name} {version} (tested: {' to '.join(dict.fromkeys(TESTED[name]))})"
        for name, version in installed_versions().items()
        if _release(version) > _release(TESTED[name][1])
    ]
    if newer:
        pl.utilities.rank_zero_warn(
            f"lightning_ssd was not tested with {', '.join(newer)}. Compare the first losses with plain Lightning's, "
            "or install a tested version."
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))
