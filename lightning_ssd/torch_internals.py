"""All uses of torch's private interfaces, each looked up when it is used."""

import torch


def has_global_module_hooks() -> bool:
    """Returns whether hooks run around the forward or backward of every module; True where torch can't tell."""
    has_any = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return has_any is None or bool(has_any())
