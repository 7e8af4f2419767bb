"""Recipes: `files` finds their YAML files, `recipe` reads them, `refusals` words their errors; `models` and `data` have
their classes, each entered by its own `__init__`.

`models` needs the extra `recipes`. This `__init__` imports neither of them, so that commands start quickly.
"""

from lightning_ssd.recipes.files import copy_recipe, did_you_mean, machine_file, recipes
from lightning_ssd.recipes.recipe import (
    check_recipe,
    read_recipe,
    scratch_path,
    strategy_argument,
)
from lightning_ssd.recipes.refusals import describe_os_error, refused_input
