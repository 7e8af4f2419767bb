"""Imports of packages that an extra of this package installs."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def check_extra(package: str, extra: str, purpose: str) -> None:
    """Checks that a package is installed, without importing it.

    Args:
        extra: extra of lightning_ssd that installs the package.
        purpose: feature that needs the package, as the subject of the error's sentence.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        found = find_spec(package) is not None
    except ValueError:  # `sys.modules` has None for it
        found = False
    if not found:
        raise _not_installed(package, extra, purpose)


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Returns a module of a package that not every installation has, by its qualified name.

    Other arguments and errors are those of `check_extra`.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise _not_installed(package, extra, purpose) from error


def _not_installed(package: str, extra: str, purpose: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{purpose} needs {package}, which is not installed: pip install 'lightning-ssd[{extra}]'", name=package
    )
