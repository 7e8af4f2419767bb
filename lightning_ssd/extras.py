"""Imports of packages that an extra of this package installs."""

from importlib import import_module
from typing import Any


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Returns a module of a package that not every installation has.

    Args:
        module: qualified name of the module.
        extra: extra of lightning_ssd that installs the package.
        purpose: feature that needs the package, as the subject of the error's sentence.

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: pip install 'lightning-ssd[{extra}]'", name=package
        ) from error
