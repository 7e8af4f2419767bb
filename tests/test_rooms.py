"""Folders of the package import in one direction only, and test modules import no other test module."""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

import lightning_ssd

PACKAGE = Path(lightning_ssd.__file__).parent
ROOT = Path(__file__).parents[1]

LEAVES = {
    "types", "sizes", "spans", "futures", "shared_gradients", "storage_tags",
    "uncopied", "interrupts", "garbage", "forks", "extras", "shutdown",
    "torch_internals", "remedies",
}  # fmt: skip
"""Modules that import nothing of the package but torch's private interfaces."""

ROOMS: dict[str, set[str]] = dict.fromkeys(LEAVES, {"torch_internals"}) | {
    "_autoload": {"_lightning", "strategy"},  # in the function that Lightning calls for a strategy's name
    "_lightning": {"_autoload"},
    "planning": LEAVES,
    "waits": {"spans", "futures"},
    "storage": LEAVES | {"waits"},
    "device": LEAVES | {"waits", "storage"},  # the staged transfer reads into storage's memory
    "timeline": LEAVES,
    "ranks": LEAVES | {"waits", "storage", "device"},
}
ROOMS["activations"] = LEAVES | {"waits", "planning", "storage", "device"}
ROOMS["model_states"] = LEAVES | {"waits", "storage", "device", "ranks", "activations"}
_STATES = ROOMS["model_states"] | {"model_states", "_lightning"}
ROOMS["retry"] = _STATES
ROOMS["recover"] = _STATES | {"retry"}
ROOMS["replay"] = LEAVES | {"planning", "timeline"}
ROOMS["profiling"] = ROOMS["model_states"] | {"planning", "replay", "model_states"}
ROOMS["autoplan"] = ROOMS["profiling"] | {"profiling"}
# Beside the strategy.
ROOMS |= dict.fromkeys(("host_memory", "locations"), _STATES)
ROOMS["summary"] = _STATES | {"host_memory", "planning"}
ROOMS["versions"] = {"_lightning"}
ROOMS["callbacks"] = _STATES | {"planning", "profiling", "autoplan", "timeline", "summary", "versions"}
ROOMS["run"] = _STATES | {"planning", "autoplan", "callbacks", "retry", "recover"}
ROOMS["run"] |= {"host_memory", "locations", "ranks", "summary"}
ROOMS["strategy"] = _STATES | {"autoplan", "callbacks", "retry", "run", "locations", "versions"}
# Commands, and what only they and users' own programs import.
ROOMS["export"] = _STATES
ROOMS["recipes"] = _STATES | {"_autoload", "callbacks", "strategy"}
ROOMS["dry_run"] = _STATES | {"planning", "profiling", "replay", "recipes", "strategy"}
ROOMS["doctor"] = _STATES | {"profiling", "versions"}
ROOMS["cli"] = set(ROOMS)
ROOMS["__main__"] = {"cli"}
ROOMS["__init__"] = {"_autoload", "callbacks", "locations", "model_states", "strategy"}
"""Of each folder, and each module beside them: what it may import."""

SUBJECTS = [
    "units", "stores", "optimizers", "weights", "gradients", "access", "forwards", "journal", "checkpoints",
    "placement", "steps",
]  # fmt: skip
"""The folders of `model_states`, each of which may import those before it."""


def modules_imported(file: Path) -> set[str]:
    """Returns the dotted names that `file` imports, inside functions too; of `from a import b`, `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_folders_import_those_below_them_only() -> None:
    folders = {path.stem for path in PACKAGE.iterdir()}
    seen: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        seen.add(room)
        names = modules_imported(file)
        imported = {name.split(".")[1] for name in names if name.startswith("lightning_ssd.")} & folders
        assert imported <= ROOMS[room] | {room}, f"{file} imports {imported - ROOMS[room]}"
    assert seen == set(ROOMS)


def test_folders_are_entered_by_their_init() -> None:
    """A name that another folder uses is in the `__all__` of its own, so that all others may change freely."""
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    entered_apart = {"recipes.models", "recipes.data"}  # their imports need an extra
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.count(".") > 1:
                package, folder, inside = node.module.split(".", 2)
                own = file.relative_to(PACKAGE).parts[0]
                assert (
                    package != PACKAGE.name
                    or folder == own
                    or folder not in folders
                    or f"{folder}.{inside}" in entered_apart
                ), f"{file}:{node.lineno} imports {node.module}, not the folder {folder}"


def test_folders_of_model_states_import_those_before_them_only() -> None:
    states = PACKAGE / "model_states"
    assert {path.parent.name for path in states.glob("*/__init__.py")} == set(SUBJECTS)
    for file in states.rglob("*.py"):
        own = file.relative_to(states).parts[0]  # its folder, or the module beside the folders
        below = SUBJECTS[: SUBJECTS.index(own)] if own in SUBJECTS else SUBJECTS
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("lightning_ssd.model_states."):
                folder, *inside = (node.module or "").split(".")[2:] or [""]
                allowed = inside if folder == own else not inside and (folder in below or own not in SUBJECTS)
                assert allowed, f"{file}:{node.lineno} imports {node.module}"


def test_no_modules_import_each_other() -> None:
    """Imports in functions are deferred, and are not counted; those for types only are."""
    modules = {_module_name(file): file for file in PACKAGE.rglob("*.py")}
    del modules[PACKAGE.name]  # names for users, which it imports when they are first used
    imports = {name: _imported_at_once(file, modules) for name, file in modules.items()}
    reached = {name: _reached(imports, name) for name in modules}
    circles = {name: [other for other in reached[name] if name in reached[other]] for name in modules}
    new = {name: circle for name, circle in circles.items() if circle}
    assert not new


def _module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_at_once(file: Path, modules: Collection[str]) -> set[str]:
    """Returns those of `modules` that `file` imports when it is imported, for types only too."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in inside}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return names & set(modules)


def _reached(imports: Mapping[str, set[str]], start: str) -> set[str]:
    """Returns the modules that `start` imports, directly or by others."""
    reached: set[str] = set()
    nodes = [start]
    while nodes:
        for name in imports.get(nodes.pop(), set()) - reached:
            reached.add(name)
            nodes.append(name)
    return reached


def test_test_modules_import_no_test_module() -> None:
    """Shared helpers are in `tests/support`, so that a test module can be changed without breaking another."""
    for file in (ROOT / "tests").rglob("*.py"):
        wrong = {
            name
            for name in modules_imported(file)
            if name.startswith("tests.") and any(part.startswith(("test_", "conftest")) for part in name.split("."))
        }
        assert not wrong, f"{file} imports {wrong}"


def test_package_and_benchmarks_import_no_tests() -> None:
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        wrong = {name for name in modules_imported(file) if name.split(".")[0] == "tests"}
        assert not wrong, f"{file} imports {wrong}"


def test_large_folders_list_their_modules() -> None:
    """Each by its name in the docstring of the folder, beside the others of its subject."""
    listed = []
    for init in PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        if "The modules, " in docstring:
            listed.append(init.parent.name)
            inside = {*init.parent.glob("*.py"), *(folder.parent for folder in init.parent.glob("*/__init__.py"))}
            modules = {file.stem for file in inside} - {"__init__"}
            missing = {name for name in modules if f"`{name}`" not in docstring}
            assert not missing, f"{init} does not list {missing}"
    assert {"activations", "autoplan", "callbacks", "model_states", "planning", "run", *SUBJECTS} <= set(listed)


def test_classes_have_at_most_35_methods() -> None:
    """Properties, their setters and dunder methods are counted."""
    large = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
                large |= {node.name} if len(methods) > 35 else set()
    assert not large


def test_the_strategy_delegates() -> None:
    """It says Lightning's contract and the arguments, which have a third of its lines."""
    assert len((PACKAGE / "strategy.py").read_text().splitlines()) <= 600


PRIVATE_ATTRIBUTES = {
    "_backward_cls", "_base", "_cdata", "_fix_weakref", "_indices", "_is_view", "_is_zerotensor", "_overloadpacket",
    "_register_state_dict_hook", "_schema", "_sequence_nr", "_set_sequence_nr", "_use_count", "_values", "_version",
}  # fmt: skip
"""Private attributes of tensors, storages, nodes and operators. Those of `self` are the package's own."""


def private_uses(code: str) -> Iterator[str]:
    """Yields the private interfaces of torch that `code` imports or reads, without operators (`torch.ops`)."""
    names = {"torch": "torch"}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= full
            yield from filter(is_private, (node.module, *full.values()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute):
                path, owner = [owner.attr, *path], owner.value
            first = owner.id if isinstance(owner, ast.Name) else ""
            full_name = ".".join([names.get(first, first), *path])
            if is_private(full_name):
                yield full_name
            elif node.attr in PRIVATE_ATTRIBUTES and full_name != f"self.{node.attr}":
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            if is_private(node.value.removesuffix(".")) and node.value != "torch._":
                yield node.value


def is_private(name: str) -> bool:
    """Returns whether a dotted name is a private one of torch."""
    first, *others = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in others)
    return first == "torch" and private and not name.startswith("torch.ops.")


def test_private_interfaces_of_torch_are_used_in_their_room_only() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.name != "torch_internals.py":
            uses = set(private_uses(file.read_text()))
            assert not uses, f"{file} uses {uses}, which belong in torch_internals.py"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "import torch._functorch.config as config",
        "from torch._C import DispatchKey",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils.checkpoint import _checkpoint_without_reentrant_generator",
        "import torch\nwith torch._C._DisableTorchDispatch():\n    pass",
        "import torch\nnorms = torch._foreach_norm([])",
        "from torch.autograd import profiler\nprofiler._is_profiler_enabled",
        "import sys\nsys.modules.get('torch._dynamo.utils')",
        "version = tensors[0]._version",
        "self.tensor._is_view()",
    ],
)
def test_private_uses_are_found(code: str) -> None:
    assert list(private_uses(code))
