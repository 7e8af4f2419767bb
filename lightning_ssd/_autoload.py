"""Registers the package's strategies with Lightning, with no import in user code.

torch calls `register` at the end of `import torch`, through the entry point group `torch.backends` and the module
`lightning_ssd_autoload` beside the package. Lightning is imported later, so `register` installs an import hook that
adds the strategies' names once there is a `StrategyRegistry`.

Only the standard library may be imported here, and nothing may raise: it would break `import torch` itself.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The two class trees that Lightning is published as, by the module that holds the tree's `StrategyRegistry`.
_TREES = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ssd_offload": ("Offloads to SSD, with host memory as the tier before it", {}),
    "cpu_offload": ("Offloads to host memory only", {"tier": "host"}),
}
"""Name, description, and arguments of `SSDOffloadStrategy`, of each registered strategy."""

# The tree of the Trainer that last asked for a strategy by name.
asking: str | None = None


def register() -> None:
    """Adds the strategies to every `StrategyRegistry`, whether it is imported already or later."""
    with suppress(Exception):
        if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
        for name in _TREES:
            if name in sys.modules:
                _add_strategies(sys.modules[name])


class _RegistryFinder(MetaPathFinder):
    """Finds Lightning's strategies modules as the other finders do, and adds our strategies once they ran."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TREES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                with suppress(Exception):
                    _add_strategies_after_exec(spec.loader)
                return spec
        return None


def _add_strategies_after_exec(loader: Any) -> None:
    exec_module = loader.exec_module

    def exec_and_add(module: ModuleType) -> None:
        del loader.exec_module  # restores the class's method: a loader may load several modules
        exec_module(module)
        _add_strategies(module)

    loader.exec_module = exec_and_add


def _add_strategies(module: ModuleType) -> None:
    with suppress(Exception):
        registry, create = module.StrategyRegistry, partial(_create, _TREES[module.__name__])
        for name, (description, arguments) in STRATEGIES.items():
            if name not in registry:
                registry.register(name, create, description=description, **arguments)


def _create(tree: str, **init_params: Any) -> object:
    """Returns the strategy for a Trainer of `tree`. Its module is imported only now, when a Trainer needs it."""
    global asking
    asking = tree
    from lightning_ssd import _lightning

    _lightning.require(tree)
    from lightning_ssd.strategy import SSDOffloadStrategy

    return SSDOffloadStrategy(**init_params)
