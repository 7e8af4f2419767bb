"""The commands `lightning-ssd run | init | plan | profile | export | doctor` and `lightning run`.

Torch and Lightning are imported inside the functions that need them, so that `--help` is quick. The file has the
arguments, checks and printed text of each command, and no other work; the folder `recipes` reads recipes.
"""

import argparse
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from math import inf, nan
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

import lightning_ssd
from lightning_ssd.garbage import without_collections
from lightning_ssd.recipes import (
    check_recipe,
    copy_recipe,
    describe_os_error,
    did_you_mean,
    machine_file,
    read_recipe,
    recipes,
    refused_input,
    scratch_path,
    strategy_argument,
)
from lightning_ssd.sizes import LEAST_BUDGET, format_bytes, format_count, parse_bytes

_SDK_NEEDED = """\
This `lightning` command comes from lightning_ssd and has one subcommand:

    lightning run RECIPE [--trainer.max_steps 100 ...]

`{command}` is for Lightning AI's cloud command line, which is not installed here:

    pip install lightning-sdk
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without its usage."""

    @override
    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `lightning-ssd` command.

    Args:
        argv: The arguments after the command's name; those of this process if not given.

    Returns:
        The exit code.
    """
    parser = _Parser("lightning-ssd", description="Trains models larger than GPU memory.")
    parser.add_argument("--version", action="version", version=lightning_ssd.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_init(commands)
    _add_plan(commands)
    _add_profile(commands)
    _add_export(commands)
    _add_doctor(commands)
    with _until_reader_ends():
        args = parser.parse_args(argv)
        args.command(args)
    return 0


@contextmanager
def _until_reader_ends() -> Iterator[None]:
    """Ends the command without a message if the reader of its output, such as `head`, has closed the pipe."""
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        if not _reader_has_ended():
            raise
        sys.exit(128 + signal.SIGPIPE)
    finally:
        if _reader_has_ended():
            # Python would fail to write the rest of its buffer at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _reader_has_ended() -> bool:
    """Returns whether standard output is a pipe whose reading end is closed."""
    poll = select.poll()
    poll.register(1, 0)
    return (1, select.POLLERR) in poll.poll(0)


def lightning_main() -> int:
    """Runs the `lightning` command: `run` with a recipe here, other subcommands by lightning-sdk's command."""
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
    return args[0].endswith((".yaml", ".yml")) or args[0] in recipes() or Path(args[0]).is_file()


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "run",
        help="train the model of a recipe",
        description="Trains the model of a recipe, a YAML file with the keys of LightningCLI's `fit`. A file "
        f"`defaults.yaml` in the recipe's folder is read first. Recipes of the package: {', '.join(recipes())}.",
        usage="%(prog)s [-h] RECIPE [-c MORE.yaml ...] [--KEY VALUE ...]",
        epilog="`RECIPE --help` lists all keys, `RECIPE --print_config` their values.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a recipe of the package by name")
    _add_overrides(parser, "values for keys of the recipe, such as --trainer.max_steps 10 or --trainer.strategy auto")
    parser.set_defaults(command=lambda args: _run(parser, args.recipe, args.overrides))


def _add_init(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "init",
        help="copy a recipe to edit",
        description="Copies a recipe of the package to a folder, and `defaults.yaml` with the keys of all recipes.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write, which is created")
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        default="gpt",
        choices=recipes(),
        help="%(choices)s (default: %(default)s)",
    )
    parser.set_defaults(command=lambda args: _init(parser, args.recipe, args.folder))


def _init(parser: argparse.ArgumentParser, recipe: str, folder: Path) -> None:
    with _reporting(parser):
        files = copy_recipe(recipe, folder)
    print("\n".join(map(str, files)))
    print(f"Edit them, and train: lightning-ssd run {files[0]}")


def _add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    overrides = parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--KEY VALUE", help=text)
    overrides.required = False  # argparse would name it beside a missing RECIPE


def _run(parser: argparse.ArgumentParser, recipe: str, overrides: Sequence[str]) -> None:
    with _reporting(parser):
        check_recipe(recipe, overrides)
    try:
        read_recipe(recipe, overrides, run=True)
    except Exception as error:
        message = None if isinstance(error, BrokenPipeError) else refused_input(error)
        if message is None:
            raise
        parser.error(message)


def _tracing_options() -> _Parser:
    """Returns the options of commands that trace a recipe. They may stand before or after it, among the overrides."""
    options = _Parser(add_help=False, allow_abbrev=False)
    options.add_argument(
        "--machine",
        type=_machine_file,
        metavar="NAME",
        help="a machine of the package, such as rtx-4090, or a measured one, FILE.json (default: measure this one)",
    )
    options.add_argument(
        "--batch",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="shape of a tensor of a batch, if the data can't be read, such as input_ids=8x1024:int64; repeatable",
    )
    return options


def _parse_options(
    parser: argparse.ArgumentParser, options: argparse.ArgumentParser, args: argparse.Namespace
) -> list[str]:
    """Parses the options of a command that stand behind its recipe to `args`. Returns the overrides."""
    options.prog = parser.prog  # for its errors
    return options.parse_known_args(args.overrides, namespace=args)[1]


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    from lightning_ssd.planning import PLANNERS

    options = _tracing_options()
    options.add_argument(
        "--measure",
        type=_directory,
        metavar="DIR",
        help="measure this machine with the drive of DIR (default: the drive of the strategy's `path`)",
    )
    options.add_argument(
        "--save-machine", type=_new_file, metavar="FILE.json", help="file to write the measured profile to"
    )
    options.add_argument(
        "--profile",
        type=_file,
        metavar="FILE.json",
        help="profile of the model that the callback ModelProfiler has measured, instead of a trace",
    )
    options.add_argument(
        "--planner",
        choices=list(PLANNERS),
        metavar="PLANNER",
        help=f"predict the plan of SwapPlanner: {', '.join(PLANNERS)} (default: the training without a SwapPlanner)",
    )
    options.add_argument("--save", type=_new_file, metavar="PLAN.yaml", help="file to write the plan of SwapPlanner to")
    options.add_argument(
        "--verbose", action="store_true", help="also print the machine, the plan of SwapPlanner, and its bytes by tier"
    )
    options.add_argument("--tbw", type=_positive, metavar="TB", help="rated endurance of all drives together, TB")
    options.add_argument(
        "--ssd-per-day",
        type=_size("--ssd-per-day", least=0),
        metavar="BYTES",
        help="most bytes that may be written to SSDs in a day, such as 1TB",
    )
    options.add_argument(
        "--gpu-memory",
        type=_size("--gpu-memory"),
        metavar="BYTES",
        help="GPU memory that the training may use in all, such as 22GiB (default: that of the machine)",
    )
    options.add_argument(
        "--replay",
        action="store_true",
        help="also print throughput by transfer bandwidth, host memory and number of drives (Teraio, figures 3 and 9)",
    )
    options.add_argument(
        "--lifetimes",
        type=_file,
        metavar="FILE.json",
        help="lifetimes that the callback ModelProfiler(..., lifetimes=FILE) has measured, or `profile --out` has "
        "traced, for --replay",
    )
    parser = commands.add_parser(
        "plan",
        parents=[options],
        help="predict memory and step time of a recipe on a machine, without training",
        description="Predicts whether a recipe fits a machine, the tiers of its bytes, the step time and the resource "
        "that bounds it, and the life of the SSDs. `plan show PLAN.yaml` shows a saved plan.",
        usage="%(prog)s [-h] RECIPE [OPTIONS] [-c MORE.yaml ...] [--KEY VALUE ...] | show PLAN.yaml",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="as for `run`; or `show`, to show a plan")
    _add_overrides(parser, "as for `run`")
    parser.set_defaults(command=lambda args: _plan(parser, options, args))


def _plan(parser: argparse.ArgumentParser, options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    overrides = _parse_options(parser, options, args)
    if args.recipe == "show":
        _show_plan(parser, overrides)
        return
    from lightning_ssd.dry_run import (
        chosen_states,
        fixed_states,
        parse_batch,
        plan_as_configured,
        profile_recipe,
        with_twice_the_host,
        within_budgets,
    )
    from lightning_ssd.planning import (
        ModelProfile,
        make_plan,
        make_report,
        render_answer,
        render_report,
    )
    from lightning_ssd.planning import large_write_endurance as large_writes
    from lightning_ssd.replay import LifetimeProfile

    with _reporting(parser), without_collections():
        check_recipe(args.recipe, overrides)
        if args.lifetimes is not None and not args.replay:
            parser.error("--lifetimes is for --replay: give both, or leave it out")
        lifetimes = None if args.lifetimes is None else LifetimeProfile.from_json(args.lifetimes)
        measured = None if args.profile is None else ModelProfile.from_json(args.profile)
        parse_batch(args.batch)
        if args.machine is not None and args.measure is not None:
            parser.error("--machine and --measure DIR exclude each other: give one, or none for this machine")
        needs_config = args.profile is None or (args.machine is None and args.measure is None)
        needs_config |= args.replay and args.lifetimes is None
        config = read_recipe(args.recipe, overrides, run=False) if needs_config else None
        hardware = _machine(args.machine, args.measure, config)
        if args.save_machine is not None:
            hardware.to_json(args.save_machine)
        if args.ssd_per_day is not None:
            hardware = replace(hardware, ssd_bytes_per_day=args.ssd_per_day)
        if args.gpu_memory is not None:
            hardware = replace(hardware, gpu_bytes=min(hardware.gpu_bytes, args.gpu_memory))
        if config is not None:
            hardware = within_budgets(config, hardware)
        model = profile_recipe(config, hardware, args.batch) if measured is None else measured
        if lifetimes is not None:
            lifetimes.check(model)
        fixed = fixed_states(config, model, hardware) if measured is None else None
        endurance = None if args.tbw is None else large_writes(args.tbw * 1e12)
        by_planner = config is None or args.planner is not None or args.save is not None

        if by_planner:
            plan = make_plan(model, hardware, args.planner or "holistic", fixed)
        else:
            plan = plan_as_configured(config, model, hardware)
        on_ssd_by_choice = not by_planner and chosen_states(config) == "ssd"  # with any host memory
        more_host = plan if on_ssd_by_choice else with_twice_the_host(model, hardware, plan)
        answer = render_answer(model, hardware, plan, more_host=more_host, endurance=endurance)
        if args.save is not None:
            plan.save(args.save)
    how = "by a plan of SwapPlanner" if by_planner else "as configured, without SwapPlanner"
    _print(f"{answer}\n\n{model.name}, {format_count(model.parameters)} parameters, {how}, on {hardware.name}.")
    if fixed is not None:
        _print(
            "\nModel states stay on the GPU. bf16 weights there have no master weights, as in plain Lightning: with "
            "`--trainer.strategy.states=host` they are offloaded, and have them. fp16 and fp64 weights are never "
            "offloaded."
        )
    if config is not None and not by_planner and strategy_argument(config, "gpu_memory") not in (None, "auto"):
        _print(
            "\n`gpu_memory` bounds model states alone, here as in a training: activations have the rest of the GPU. "
            "`--gpu-memory` here, and `SwapPlanner(gpu_memory=...)` in a training, bound both."
        )
    if args.verbose or args.replay:
        plan = plan if by_planner else make_plan(model, hardware, "holistic", fixed)
    if args.verbose:
        report = make_report(model, hardware, plan, fixed=fixed, endurance=endurance)
        print(f"\n{hardware.describe()}\n\nThe plan of SwapPlanner:\n{plan.describe()}\n\n{render_report(report)}")
        if config is not None:
            _print_application(config, model, hardware, measured=args.profile is not None)
    if args.replay:
        if lifetimes is None:
            from lightning_ssd.dry_run import profile_lifetimes

            with _reporting(parser):
                lifetimes = profile_lifetimes(config, hardware, args.batch)
        _print_replay(lifetimes, model, hardware, plan)


def _print(text: str) -> None:
    """Prints paragraphs in 80 columns, with paths and arguments whole. Words after the title of a line are aligned."""
    for line in text.split("\n"):
        title = re.match(r"[\w ]+?  +", line)
        indent = " " * len(title[0]) if title else ""
        print(textwrap.fill(line, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _show_plan(parser: argparse.ArgumentParser, paths: Sequence[str]) -> None:
    """Prints the plan of a file: the command `plan show`."""
    from lightning_ssd.planning import Plan

    with _reporting(parser):
        if len(paths) != 1:
            parser.error("`plan show` takes one file, a plan that was saved")
        if not Path(paths[0]).is_file():
            parser.error(f"`plan show` takes one file, a plan that was saved: there is no file {paths[0]!r}")
        print(Plan.load(paths[0]).describe())


def _print_application(config: Any, model: Any, hardware: Any, *, measured: bool) -> None:
    """Prints how a training applies a plan, and the step time without it."""
    from lightning_ssd.dry_run import plan_as_configured
    from lightning_ssd.planning import simulate

    seconds = simulate(model, hardware, plan_as_configured(config, model, hardware)).step_seconds
    applied = (
        "`callbacks=[SwapPlanner(plan=...)]` applies this plan."
        if measured
        else "Operators of a trace may have other names than those of a training: to apply a plan by "
        "`callbacks=[SwapPlanner(plan=...)]`, measure the training by `ModelProfiler(FILE)`, and plan with "
        "--profile FILE."
    )
    print(
        f"\n{applied} Without SwapPlanner, the strategy's arguments choose the tiers of states, and a step takes "
        f"{seconds:.2f} s."
    )


def _print_replay(lifetimes: Any, model: Any, hardware: Any, plan: Any) -> None:
    """Prints throughputs, 1 where the GPU never waits."""
    from lightning_ssd.planning import MigrationMachine
    from lightning_ssd.replay import by_hardware, plan_roofline, roofline

    ours = plan_roofline(model, hardware, plan)
    machine = MigrationMachine.of(hardware)
    print("\nthroughput by bandwidth of migration, 1 where the GPU never waits and recomputes nothing")
    print(f"{'':>12} {'Teraio':>10} {'this plan':>10}")
    for (bandwidth, one), (_, other) in zip(roofline(lifetimes, replace(machine, host_bytes=0)), ours, strict=True):
        print(f"{bandwidth / 1e9:>7.0f} GB/s {_share(one):>10} {_share(other):>10}")
    hosts, drives = [0, machine.host_bytes], [1, 4]
    print("\nTeraio's throughput by host memory and number of this machine's drives")
    print(f"{'':>12} " + " ".join(f"{count:>8}" for count in drives))
    for host, row in zip(hosts, by_hardware(lifetimes, machine, hosts, drives), strict=True):
        print(f"{format_bytes(host):>12} " + " ".join(f"{_share(one):>8}" for one in row))


def _share(throughput: float) -> str:
    """Returns a throughput as text; it is 0 if the step does not fit."""
    return f"{throughput:.3f}" if throughput else "no room"


def _add_profile(commands: "argparse._SubParsersAction[_Parser]") -> None:
    options = _tracing_options()
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for lifetimes.json and three pictures (matplotlib)"
    )
    options.add_argument(
        "--profile",
        type=_file,
        metavar="FILE.json",
        help="lifetimes that the callback ModelProfiler(..., lifetimes=FILE) has measured, instead of a RECIPE",
    )
    parser = commands.add_parser(
        "profile",
        parents=[options],
        help="show when each tensor of a training step is used, without training",
        description="Traces a recipe's training step without memory, operator by operator, or reads a measured one, "
        "and shows how long its tensors are active and inactive on a GPU that has room for all of them. `--out` saves "
        "the lifetimes, and draws active bytes, inactive periods and memory by class.",
        usage="%(prog)s [-h] (RECIPE | --profile FILE) [OPTIONS] [-c MORE.yaml ...] [--KEY VALUE ...]",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="as for `run`")
    _add_overrides(parser, "as for `run`")
    parser.set_defaults(command=lambda args: _profile(parser, options, args))


def _profile(parser: argparse.ArgumentParser, options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from lightning_ssd.dry_run import parse_batch, profile_lifetimes
    from lightning_ssd.replay import LifetimeProfile, describe_lifetimes, save_lifetimes

    overrides = _parse_options(parser, options, args)
    if (args.recipe is None) == (args.profile is None):
        parser.error("give a RECIPE, or measured lifetimes by --profile FILE")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: {str(args.out)!r} is a file: name a directory")
    with _reporting(parser):
        config = None
        if args.recipe is not None:
            check_recipe(args.recipe, overrides)
            config = read_recipe(args.recipe, overrides, run=False)
        measured = None if args.profile is None else LifetimeProfile.from_json(args.profile)
        parse_batch(args.batch)
        hardware = _machine(args.machine, None, config)
        lifetimes = profile_lifetimes(config, hardware, args.batch) if measured is None else measured
        print(describe_lifetimes(lifetimes, hardware))
        if args.out is not None:
            files = save_lifetimes(lifetimes, hardware, args.out)
            print("\n".join(map(str, files)))
            if len(files) == 1:
                print("Pictures were not drawn, because matplotlib is not installed: `pip install matplotlib`.")


def _machine(profile: str | Path | None, drive: Path | None, config: Any) -> Any:
    """Returns a machine's profile: that of a file, or one measured with the drive of a directory or recipe, if any."""
    from lightning_ssd.planning import HardwareProfile

    if profile is not None:
        return HardwareProfile.from_json(profile)
    from lightning_ssd.profiling import measure_machine

    state_format = None if config is None else strategy_argument(config, "state_format")
    path = drive or (None if config is None else scratch_path(config))
    return measure_machine(path, attention=True, state_format=state_format or "fp32")


def _add_export(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights as a folder of safetensors",
        description="Writes a checkpoint's weights as a folder of safetensors, which transformers loads.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=_checkpoint, help="a .ckpt file, or the directory of a sharded one"
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to write")
    parser.add_argument(
        "--prefix",
        help="prefix of the names of weights to write, which is removed: `model.` for `self.model` of a module "
        "(default: that of a recipe's model, none for other checkpoints)",
    )
    parser.add_argument(
        "--shard", type=_size("--shard"), default="4GiB", help="most bytes of a file (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype to cast the weights to")
    parser.add_argument(
        "--like",
        type=_directory,
        help="folder from which to copy configuration and tokenizer (default: the one that the model was loaded from, "
        "if the checkpoint names it)",
    )
    parser.add_argument(
        "--trust", action="store_true", help="also load objects that are not tensors, which may run code of the file"
    )
    parser.set_defaults(command=lambda args: _export(parser, args))


def _export(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    import torch

    from lightning_ssd.export import export

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    how = {"prefix": args.prefix, "shard_bytes": args.shard, "dtype": dtype, "like": args.like, "trust": args.trust}
    with _reporting(parser):
        files = export(args.checkpoint, args.folder, **how)
    print(f"{len(files)} file{'s' if len(files) > 1 else ''} in {args.folder}")
    if not (args.folder / "config.json").is_file():
        print(
            f"transformers can't load {args.folder} yet: it needs a config.json, and a tokenizer for texts. Copy them "
            "there, or export with --like FOLDER, where the model was loaded from. Names of weights must be the "
            "model's: --prefix model. removes the `model.` of a module's `self.model`."
        )


def _add_doctor(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine this machine: GPU, memory, drives, versions",
        description="Says of each part of this machine that trainings use whether it is good, slow or wrong, with the "
        "remedy. The exit code is 1 if one is wrong.",
    )
    parser.add_argument(
        "paths",
        metavar="DIR",
        nargs="*",
        type=_directory,
        default=[Path()],
        help="directories for scratch files, one for each drive to examine (default: the working directory)",
    )
    parser.set_defaults(command=lambda args: _doctor(args.paths))


def _doctor(paths: Sequence[Path]) -> None:
    from lightning_ssd.doctor import examine

    verdicts = set()
    for finding in examine(paths):
        print(finding, flush=True)
        verdicts.add(finding.verdict)
    if "wrong" in verdicts:
        sys.exit(1)


@contextmanager
def _reporting(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the command with a one-line message if an argument is wrong, or a file or drive can't be used."""
    try:
        yield
    except BrokenPipeError:
        raise  # of the printed text: see `_until_reader_ends`
    except OSError as error:
        parser.error(describe_os_error(error))
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    except Exception as error:
        from lightning_ssd.storage import StorageError  # imports torch, which commands without it need not

        if not isinstance(error, StorageError):
            raise
        parser.error(str(error))


def _existing(exists: Callable[[Path], bool], problem: str) -> Callable[[str], Path]:
    """Returns the parser of a path that exists; `problem` is the message for other paths."""

    def parse(text: str) -> Path:
        if not exists(path := Path(text)):
            raise argparse.ArgumentTypeError(problem.format(text))
        return path

    return parse


_checkpoint = _existing(Path.exists, "there is no file {!r}")
_file = _existing(Path.is_file, "there is no file {!r}")
_directory = _existing(Path.is_dir, "{!r} is not a directory")


def _machine_file(text: str) -> Path:
    try:
        return machine_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _new_file(text: str) -> Path:
    """Returns the path of a file that a command writes, whose folder exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r} for the file {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory: name a file")
    return path


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number greater than 0")
    return number


def _size(option: str, *, least: int = 1) -> Callable[[str], int]:
    """Returns the parser of the values of `option`, sizes of at least `least` bytes."""

    def parse(text: str) -> int:
        try:
            size = parse_bytes(text, option, least=LEAST_BUDGET)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if size < least:
            raise argparse.ArgumentTypeError(f"{text!r} is less than {least} byte{'s' if least > 1 else ''}")
        return size

    return parse


if __name__ == "__main__":
    sys.exit(main())
