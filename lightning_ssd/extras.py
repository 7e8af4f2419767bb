"""Imports of packages that an extra of this package installs."""

from importlib import import_module
from typing import Any


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Returns a module of a package that not every installation has.

    Args:
        module: Qualified name of the module.
        extra: The extra of lightning_ssd that installs it.
        purpose: Subject of the error: the feature that needs it.

    Raises:
        ModuleNotFoundError: If its package is not installed; names the extra.
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
