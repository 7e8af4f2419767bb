"""Folders of the cgroups that limit this process, under which the kernel shows their limits as files."""

from pathlib import Path

PROC = Path("/proc")
"""The kernel's files about processes and memory."""

CGROUPS = Path("/sys/fs/cgroup")
"""Folder where cgroups are mounted."""

VERSION_2 = ""
"""In place of a controller's name: the kernel names none for the one hierarchy of version 2."""


def cgroup_folders(controller: str, proc: Path, cgroups: Path) -> list[Path]:
    """Returns the folders of this process's cgroup and of all its ancestors, each of which may have a limit.

    A container may show only its own part of the hierarchy, so that some folders need not exist.

    Args:
        controller: controller of version 1, such as "memory", or `VERSION_2`.
        proc: `PROC`, or a folder with the same files.
        cgroups: `CGROUPS`, or a folder with the same files.
    """
    mount = cgroups / controller
    for line in read_text(proc / "self" / "cgroup").splitlines():  # such as "4:cpu,cpuacct:/job" or "0::/job"
        _, controllers, path = line.split(":", 2)
        own = mount / path.lstrip("/")
        if controller in controllers.split(",") and ".." not in own.parts:  # ".." leads out of a container
            return [own, *(folder for folder in own.parents if folder.is_relative_to(mount))]
    return [mount]


def read_text(file: Path) -> str:
    """Returns the text of a file; empty: it does not exist, or must not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
