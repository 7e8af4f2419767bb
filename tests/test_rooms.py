"""Folders of the package import in one direction only."""

import ast
from pathlib import Path

import lightning_ssd

PACKAGE = Path(lightning_ssd.__file__).parent

LEAVES = {"types", "sizes", "spans"}
"""Modules that import nothing of the package."""

ROOMS = dict.fromkeys(LEAVES, set[str]()) | {
    "planning": LEAVES,
    "storage": LEAVES,
    "device": LEAVES,
    "activations": LEAVES | {"planning", "storage", "device"},
    "states": LEAVES | {"storage", "device", "activations"},
    "profiling": LEAVES | {"planning", "storage", "device", "activations", "states"},
}
"""Of each folder or module below strategy, callbacks and commands: what it may import."""


def imported(file: Path) -> set[str]:
    """Returns the folders and modules of the package that `file` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= (
                {node.module} if node.module != "lightning_ssd" else {f"lightning_ssd.{a.name}" for a in node.names}
            )
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("lightning_ssd.")}


def test_folders_import_those_below_them_only() -> None:
    seen: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ROOMS:
            seen.add(room)
            assert imported(file) <= ROOMS[room] | {room}, f"{file} imports {imported(file) - ROOMS[room]}"
    assert seen == set(ROOMS)
