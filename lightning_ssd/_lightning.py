"""The Lightning that this process uses: `pl` and `fabric`.

Lightning is published twice, as `lightning.pytorch` and as `pytorch_lightning`, with separate class trees:
a Trainer of one refuses the strategies and callbacks of the other. This is the one place that decides which
tree the package's own classes derive from: that of the Trainer that asked for a strategy by name, else the
one that is imported, else `lightning.pytorch`. All other modules import `pl` and `fabric` from here.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lightning_ssd import _autoload

if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.pytorch as pl
elif _autoload.asking == "pytorch_lightning" or (
    "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
):
    pl, fabric = import_module("pytorch_lightning"), import_module("lightning_fabric")
else:
    pl, fabric = import_module("lightning.pytorch"), import_module("lightning.fabric")

__all__ = ["fabric", "pl", "require"]


def require(tree: str) -> None:
    """Checks that the package's classes derive from `tree`.

    Raises:
        RuntimeError: If they derive from the other tree, whose classes the Trainer would refuse.
    """
    if pl.__name__ != tree:
        raise RuntimeError(
            f"A `{tree}` Trainer asked for a lightning_ssd strategy, but in this process lightning_ssd is"
            f" bound to `{pl.__name__}`, and a Trainer accepts strategies of its own package only. Import"
            f" Trainer, LightningModule and callbacks from `{pl.__name__}`; or import `{tree}`, and not"
            f" `{pl.__name__}`, before lightning_ssd is used."
        )
