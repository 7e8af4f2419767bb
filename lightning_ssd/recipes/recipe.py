"""Reads a recipe, a YAML file with the keys of LightningCLI's `fit`, with overrides from a command line.

Torch and Lightning are imported inside the functions that need them, so that `lightning-ssd --help` is quick.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from typing_extensions import override

from lightning_ssd._autoload import STRATEGIES
from lightning_ssd.recipes.files import DEFAULTS, config_file, did_you_mean, recipe_file
from lightning_ssd.recipes.refusals import describe_parser_error
from lightning_ssd.sizes import check_least


def check_recipe(recipe: str, overrides: Sequence[str]) -> None:
    """Checks that a recipe exists, and that it and the files of `-c` options are YAML mappings.

    Raises:
        ValueError: there is no recipe, or a file is no YAML mapping. The message names the file; the error of the
            recipe's parser would not.
        OSError: a file could not be read.
    """
    import yaml

    path = recipe_file(recipe)
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    options.add_argument("-c", "--config", action="append", default=[])
    try:
        known, _ = options.parse_known_args(overrides)
    except argparse.ArgumentError:  # the recipe's parser reports it
        known = argparse.Namespace(config=[])
    for file in (str(path), *map(config_file, known.config)):
        if not Path(file).is_file():  # the recipe's parser reports it
            continue
        try:
            content = yaml.safe_load(Path(file).read_bytes())
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{file} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{file} has no keys of a recipe, such as `model:` and `trainer:`.")


def read_recipe(recipe: str, overrides: Sequence[str], *, run: bool) -> Any:
    """Returns the recipe, merged with `defaults.yaml` beside it, as LightningCLI parses it for `fit`.

    Args:
        recipe: path of the YAML file, or the name of a recipe of the package.
        overrides: options for keys of the recipe, such as `--trainer.max_steps=10`, and further files (`-c`), by path
            or name.
        run: whether the model of the recipe is also built and trained, before this function returns.

    Raises:
        ValueError: there is no such recipe, its parser refuses it, or a value is out of range that Lightning and torch
            would accept, or refuse only in the first step.
    """
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

    # LightningCLI knows a class by its short name only if the class is imported.
    import lightning_ssd.callbacks
    import lightning_ssd.strategy  # noqa: F401
    from lightning_ssd.recipes.terminal import describe_files, with_terminal_lines

    class RecipeCLI(LightningCLI):
        """LightningCLI with `fit` alone: building the parsers of the other subcommands takes seconds."""

        @staticmethod
        @override
        def subcommands() -> dict[str, set[str]]:
            return {"fit": LightningCLI.subcommands()["fit"]}

        @override
        def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
            # The base class warns when `sys.argv` is not empty. `sys.argv` must not be changed: Lightning's launcher
            # starts the other ranks with it.
            self._parser("fit").prog = "lightning-ssd run RECIPE"  # for its help: there is no command `fit`
            try:
                self.config = parser.parse_args(args)  # type: ignore[arg-type]  # always a list here
            except argparse.ArgumentError as error:
                keys = (option.lstrip("-") for option in self._parser("fit")._option_string_actions)
                sentence = describe_parser_error(str(error), keys)
                if not Path(defaults).is_file():
                    sentence += (
                        f" There is no {defaults}: a copy of one of the package's recipes needs a copy of "
                        f"recipes/{DEFAULTS} beside it, as `lightning-ssd init` makes."
                    )
                raise ValueError(sentence) from error
            _check_settings(self.config["fit"])

        @override
        def instantiate_classes(self) -> None:
            if run:
                super().instantiate_classes()

        @override
        def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
            config["callbacks"] = config["callbacks"] or []
            return super()._instantiate_trainer(with_terminal_lines(config), callbacks)

        def after_fit(self) -> None:
            lines = describe_files(self.trainer, recipe)  # on all devices: the folder of logs is broadcast
            if self.trainer.is_global_zero:
                print("\n".join(lines))

        @override
        def _run_subcommand(self, subcommand: str) -> None:
            if run:
                super()._run_subcommand(subcommand)

    path = recipe_file(recipe)
    defaults = str(path.absolute().with_name(DEFAULTS))
    cli = RecipeCLI(
        args=["fit", *_with_class_path(["--config", str(path), *overrides], _strategy_in(defaults))],
        parser_kwargs={
            "exit_on_error": False,
            "fit": {"default_config_files": [defaults], "exit_on_error": False},
        },
        seed_everything_default=0,
        # Without a logger the log directory is the working directory, which may have the last run's file.
        save_config_kwargs={"overwrite": True},
    )
    return cli.config["fit"]


def strategy_argument(config: Any, name: str) -> Any:
    """Returns an argument of a recipe's strategy, or None if it is not given."""
    strategy = config["trainer"]["strategy"]
    if isinstance(strategy, str):
        return STRATEGIES[strategy][1].get(name) if strategy in STRATEGIES else None
    return (strategy.get("init_args") or {}).get(name)


def scratch_path(config: Any) -> Path:
    """Returns the directory of a recipe's scratch files: the first one of `path`, or `default_root_dir`.

    Raises:
        ValueError: the directory does not exist.
    """
    paths = strategy_argument(config, "path") or config["trainer"]["default_root_dir"] or "."
    path = Path(paths if isinstance(paths, str | Path) else paths[0]).expanduser()
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is not a directory: create it, or name another with --measure DIR.")
    return path


def _check_settings(config: Any) -> None:
    """Checks values that Lightning and torch accept, or refuse only in the first step.

    Raises:
        ValueError: A value is out of range, there is no such strategy, or `ckpt_path` is no checkpoint.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    trainer, checkpoint = config["trainer"], config["ckpt_path"]
    check_least("trainer.accumulate_grad_batches", trainer["accumulate_grad_batches"], 1)
    check_least("trainer.gradient_clip_val", trainer["gradient_clip_val"], 0)  # a negative norm would reverse gradients
    strategy, known = trainer["strategy"], ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy.lower() not in known:
        near = did_you_mean(strategy, [*known, "lightning_ssd.SSDOffloadStrategy"])
        raise ValueError(f"trainer.strategy={strategy}: there is no strategy of that name.{near}")
    interval = trainer["val_check_interval"]
    if isinstance(interval, int | float) and not interval > 0:
        raise ValueError(f"trainer.val_check_interval={interval} is out of range: set it to 1 or more batches")
    if checkpoint is not None and Path(checkpoint).is_file() and not is_zipfile(checkpoint):
        raise ValueError(f"ckpt_path={checkpoint} is no whole checkpoint: name a file that the Trainer has saved")


def _with_class_path(args: Sequence[str], name: object) -> list[str]:
    """Returns `args` with names replaced that LightningCLI does not accept.

    Names of configurations of the package are replaced by their files, and the name of our strategy, which `args` may
    change, by the class path if arguments of the class follow: LightningCLI accepts these only beside a class path.
    """
    key, rest, result = "--trainer.strategy", list(args), list[str]()
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        given = [option + equals + value]
        if not equals and rest and option in (key, "--config", "-c"):
            value = rest.pop(0)
            given.append(value)
        if option in ("--config", "-c"):
            value = config_file(value)
            given = [option, value] if value else given
            strategy = _strategy_in(value)
        elif option == key:
            strategy = value
        else:
            strategy = {} if option.startswith(f"{key}.") else None
        if isinstance(name, str) and name in STRATEGIES and isinstance(strategy, dict):
            if "class_path" not in strategy:
                named = {"class_path": "lightning_ssd.SSDOffloadStrategy", "init_args": STRATEGIES[name][1]}
                result += ["--config", json.dumps({"trainer": {"strategy": named}})]
        name = name if strategy is None else strategy
        result += given
    return result


def _strategy_in(config: str) -> object:
    """Returns `trainer.strategy` of a YAML file, or None if it has none or can't be read (the parser reports that)."""
    import yaml

    try:
        content = yaml.safe_load(Path(config).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    trainer = content.get("trainer") if isinstance(content, dict) else None
    return trainer.get("strategy") if isinstance(trainer, dict) else None
