"""The commands `lightning-ssd run | bench | export` and `lightning run`.

Torch and Lightning are imported inside the functions that need them, so that `--help` is quick.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import lightning_ssd
from lightning_ssd.sizes import parse_bytes

__all__ = ["lightning_main", "main"]

_SDK_NEEDED = """\
This `lightning` command comes from lightning_ssd and knows one thing:

    lightning run RECIPE.yaml [--trainer.max_steps 100 ...]

`{command}` is for Lightning AI's cloud command line, which is not installed here:

    pip install lightning-sdk
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `lightning-ssd` command.

    Args:
        argv: The arguments after the command's name; those of this process if not given.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser("lightning-ssd", description="Trains models larger than GPU memory.")
    parser.add_argument("--version", action="version", version=lightning_ssd.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_bench(commands)
    _add_export(commands)
    args = parser.parse_args(argv)
    args.command(args)
    return 0


def lightning_main() -> int:
    """Runs the `lightning` command: recipes here, everything else in lightning-sdk's command of that name."""
    argv = sys.argv[1:]
    if argv[:1] == ["run"] and _looks_like_recipe(argv[1:]):
        return main(argv)
    try:
        sdk = metadata.distribution("lightning-sdk")
    except metadata.PackageNotFoundError:
        sys.stderr.write(_SDK_NEEDED.format(command=" ".join(["lightning", *argv])))
        return 2
    (script,) = sdk.entry_points.select(group="console_scripts", name="lightning")
    return int(script.load()() or 0)


def _looks_like_recipe(args: Sequence[str]) -> bool:
    if not args or args[0].startswith("-"):
        return True
    return args[0].endswith((".yaml", ".yml")) or Path(args[0]).is_file()


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "run",
        help="train what a recipe describes",
        description="Trains what a recipe describes. Its keys are those of LightningCLI's `fit`.",
        usage="%(prog)s [-h] RECIPE [-c MORE.yaml ...] [--KEY VALUE ...]",
        epilog="`RECIPE --help` lists all keys, `RECIPE --print_config` the values that they have.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    parser.add_argument(
        "overrides",
        nargs=argparse.REMAINDER,
        metavar="--KEY VALUE",
        help="overrides of the recipe's keys, such as --trainer.max_steps 10 or --trainer.strategy auto",
    )
    parser.set_defaults(command=lambda args: _run(parser, args.recipe, args.overrides))


def _run(parser: argparse.ArgumentParser, recipe: str, overrides: Sequence[str]) -> None:
    if not Path(recipe).is_file():
        parser.error(f"there is no recipe file {recipe!r} (looked in {Path.cwd()})")

    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

    # LightningCLI knows a class by its short name only if the class is imported.
    import lightning_ssd.callbacks
    import lightning_ssd.strategy  # noqa: F401

    class RecipeCLI(LightningCLI):
        """LightningCLI with `fit` alone: building the parsers of the other subcommands takes seconds."""

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": LightningCLI.subcommands()["fit"]}

        def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
            # The base class warns when `sys.argv` is not empty. It must stay as it is: Lightning's launcher
            # starts the other ranks with it.
            self.config = parser.parse_args(args)  # type: ignore[arg-type]  # always a list here

    RecipeCLI(
        args=["fit", "--config", recipe, *overrides],
        seed_everything_default=0,
        # Without a logger the log directory is the working directory, where the last run's file may be.
        save_config_kwargs={"overwrite": True},
    )


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    subjects = commands.add_parser("bench", help="measure this machine").add_subparsers(
        metavar="SUBJECT", required=True
    )
    parser = subjects.add_parser(
        "io",
        help="read and write bandwidth of directories on SSD",
        description="Measures the read and write bandwidth of directories on SSD.",
    )
    parser.add_argument(
        "--path",
        dest="paths",
        metavar="DIR",
        type=_directory,
        action="append",
        required=True,
        help="a directory on the SSD to measure; may be given several times",
    )
    parser.add_argument(
        "--size",
        type=_size,
        default="4GiB",
        help="bytes to write and read, such as 512MiB (default: %(default)s)",
    )
    parser.set_defaults(command=lambda args: _bench_io(args.paths, args.size))


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as a folder of safetensors",
        description="Writes a checkpoint's weights as a folder of safetensors, which transformers loads.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=_checkpoint, help="a .ckpt file, or a sharded one")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a folder to make")
    parser.add_argument(
        "--prefix", default="", help="weights whose names begin so, without it: `model.` for `self.model` of a module"
    )
    parser.add_argument("--shard", type=_size, default="4GiB", help="bytes of a file (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast the weights to")
    parser.add_argument("--like", type=_directory, help="a folder whose configuration and tokenizer to copy")
    parser.add_argument("--trust", action="store_true", help="load what is not tensors, too, as pickles run code")
    parser.set_defaults(command=lambda args: _export(parser, args))


def _export(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    import torch

    from lightning_ssd.export import export

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    how = {"prefix": args.prefix, "shard_bytes": args.shard, "dtype": dtype, "like": args.like, "trust": args.trust}
    try:
        files = export(args.checkpoint, args.folder, **how)
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(files)} file{'s' if len(files) > 1 else ''} in {args.folder}")


def _bench_io(paths: Sequence[Path], size: int) -> None:
    import torch

    from lightning_ssd.storage.bench import bench_io, format_table

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(format_table(bench_io(paths, size, device)))


def _checkpoint(text: str) -> Path:
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def _directory(text: str) -> Path:
    if not (path := Path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path


def _size(text: str) -> int:
    try:
        return parse_bytes(text, "--size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
