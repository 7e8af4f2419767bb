"""Recipes: `recipe` reads their YAML files, `models` and `data` have their classes, each entered by its own `__init__`.

`models` needs the extra `recipes`. This `__init__` imports neither of them, so that commands start quickly.
"""

from lightning_ssd.recipes.recipe import (
    check_recipe,
    describe_os_error,
    read_recipe,
    refused_input,
    scratch_path,
    strategy_argument,
)

__all__ = ["check_recipe", "describe_os_error", "read_recipe", "refused_input", "scratch_path", "strategy_argument"]
