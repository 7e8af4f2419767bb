"""The entry point that torch calls at the end of `import torch`; `lightning_ssd/_autoload.py` does the work.

It is no part of the package: every install, also an editable one, copies it to `site-packages`. Torch raises an error
if an entry point is missing, and an editable install has no package when its clone is moved or deleted.
"""


def register() -> None:
    """Registers the strategies, or does nothing if the package is gone. `import lightning_ssd` then has the error."""
    try:
        from lightning_ssd._autoload import register as add_strategies
    except ModuleNotFoundError:
        return
    add_strategies()
