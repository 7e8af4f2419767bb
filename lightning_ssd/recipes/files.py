"""The recipes and configurations that come with the package, found by name.

In a wheel they are data of the package, in its folder `files`. In a clone they are in the folders at its root.
"""

import re
import shutil
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

DEFAULTS = "defaults.yaml"
"""Name of the optional file beside a recipe with default values of the recipe's keys."""

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = (".yaml", ".yml", ".json")


def recipe_file(recipe: str) -> Path:
    """Returns the file of a recipe, which is given by its path, or by name (`gpt`) if the package has it.

    Raises:
        ValueError: there is no such recipe.
    """
    return _file(recipe, recipes(), "recipe", f"there is no recipe file {recipe!r} (looked in {Path.cwd()})")


def config_file(config: str) -> str:
    """Returns the file of an option `-c`: a path as it is given, or the path of the package's file of a name.

    Text that is neither is returned as it is: the recipe's parser accepts keys in YAML, too.

    Raises:
        ValueError: there is no file of a name.
    """
    if not re.fullmatch(r"[\w.-]+", config):
        return config
    return str(_file(config, _files("configs/*", ".yaml"), "configuration", f"there is no file {config!r}"))


def machine_file(machine: str) -> Path:
    """Returns the file of a machine's profile, which is given by its path, or by name if the package has it.

    Raises:
        ValueError: there is no such file, or it is not JSON by its name.
    """
    path = _file(machine, _files("configs/machines", ".json"), "machine", f"there is no file {machine!r}")
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(
            f"{machine} is YAML, and a machine file is JSON: the rates and memory of a machine, as `lightning-ssd plan "
            "--save-machine FILE.json` measures and writes them. Settings of a Trainer are given by `-c`."
        )
    return path


def recipes() -> dict[str, Path]:
    """Returns the files of the package's recipes by name."""
    files = _files("recipes", ".yaml")
    files.pop(Path(DEFAULTS).stem, None)
    return files


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copies a recipe of the package, and the defaults that it needs, to a folder, which is created.

    Returns:
        The written files, the recipe first.

    Raises:
        ValueError: there is no such recipe, or the folder has a file of that name.
        OSError: a file could not be written.
    """
    source = recipe_file(name)
    sources = [source, source.with_name(DEFAULTS)]
    copies = [folder / file.name for file in sources]
    for copy in copies:
        if copy.exists():
            raise ValueError(f"{copy} exists: name another folder, or remove the file.")
    folder.mkdir(parents=True, exist_ok=True)
    for file, copy in zip(sources, copies, strict=True):
        shutil.copyfile(file, copy)
    return copies


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns a sentence that names the nearest of `words`, to append to an error, or an empty text if none is near."""
    nearest = get_close_matches(word, list(words), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _file(given: str, named: dict[str, Path], kind: str, missing: str) -> Path:
    """Returns `given` if it is a file, or the file of that name. `missing` is the error where it is a path."""
    if Path(given).is_file():
        return Path(given)
    if given in named:
        return named[given]
    if given.endswith(_SUFFIXES) or Path(given).name != given:
        raise ValueError(missing)
    names = ", ".join(sorted(named))
    raise ValueError(f"{missing}, and no {kind} of the package has that name: {names}.{did_you_mean(given, named)}")


def _files(folders: str, suffix: str) -> dict[str, Path]:
    """Returns the package's files with a suffix in its folders of a glob pattern, by name without the suffix."""
    packaged = _PACKAGE / "files"
    root = packaged if packaged.is_dir() else _PACKAGE.parent
    return {file.stem: file for file in sorted(root.glob(f"{folders}/*{suffix}"))}
