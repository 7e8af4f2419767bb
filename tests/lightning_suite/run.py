"""Runs Lightning's own tests with our strategy in place of the default one, and compares with plain Lightning.

    python tests/lightning_suite/run.py CHECKOUT [--strategy ssd ...] [--only tests_pytorch/trainer ...] [--plain FILE]

See README.md beside this file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
STRATEGIES: dict[str, dict[str, Any]] = {
    "ssd_offload": {},
    "host": {"states": "host", "min_bytes": 1},
    "ssd": {"states": "ssd", "min_bytes": 1, "offload": 1.0},
}
"""Arguments of `SSDOffloadStrategy`, by the names that `--strategy` takes."""

DIRECTORIES = [
    f"tests_pytorch/{name}"
    for name in (
        "trainer", "loops", "callbacks", "checkpointing", "core", "models", "tuner", "utilities", "loggers",
        "profilers", "plugins", "strategies", "accelerators", "deprecated_api", "helpers", "test_cli.py",
    )
]  # fmt: skip
"""Tests of which some make Trainers of the default strategy."""

Results = Mapping[str, Mapping[str, Any]]
"""Of each test, by its name, what the plugin wrote."""


@dataclass(frozen=True)
class ExpectedFailure:
    """A test that cannot pass with an offloading strategy, and why.

    Attributes:
        test: the test's path in `tests_pytorch` and its name; without parameters it stands for all of them.
        strategies: names from `STRATEGIES`.
        reason: one sentence.
    """

    test: str
    strategies: Sequence[str]
    reason: str

    def covers(self, test: str, strategy: str) -> bool:
        """Returns whether the failure of `test`, a full name, is expected with `strategy`."""
        name = test.split("tests_pytorch/", 1)[-1]
        return strategy in self.strategies and self.test in (name, name.split("[")[0])


def run_suite(
    checkout: Path, arguments: dict[str, Any] | None, tests: Sequence[str] | None, only: Sequence[str]
) -> Results:
    """Runs the suite in a process and a copy of its own, and returns the results.

    Args:
        checkout: of Lightning's repository.
        arguments: of `SSDOffloadStrategy`; None: nothing is redirected.
        tests: names of the tests to run; None: all.
        only: directories or files, relative to the checkout's `tests`.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-suite-") as root:
        copy, results = Path(root) / "copy", Path(root) / "results"
        # Some tests read all files in their directory, and two runs at once would read each other's.
        shutil.copytree(checkout / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(checkout / "pyproject.toml", copy)
        (Path(root) / "scratch").mkdir()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(checkout / "src"), str(copy / "tests"), str(HERE), str(HERE.parent.parent)]
                + [path for path in [os.environ.get("PYTHONPATH")] if path]
            ),
            "LIGHTNING_SUITE_RESULTS": str(results),
            "OMP_NUM_THREADS": "1",
        }
        if arguments is not None:
            # A scratch directory of its own, as for a user whose `default_root_dir` is remote.
            arguments = {"path": str(Path(root) / "scratch")} | arguments
            environment["LIGHTNING_SUITE_ARGUMENTS"] = json.dumps(arguments)
        if tests is not None:
            (Path(root) / "tests").write_text("\n".join(tests))
            environment["LIGHTNING_SUITE_TESTS"] = str(Path(root) / "tests")
        command = [
            sys.executable,
            "-m",
            "pytest",
            *only,
            "-p",
            "redirect",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
        ]
        command += ["-o", "addopts=", "--strict-markers", "--continue-on-collection-errors", "--timeout=120"]
        subprocess.run(command, cwd=copy / "tests", env=environment)
        if not results.exists():
            raise RuntimeError("the suite ran no test: see pytest's output above")
        return read_results(results)


def read_results(path: Path) -> Results:
    """Returns what the plugin has written to a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["test"]: row for row in rows}


def compare(name: str, plain: Results, found: Results, expected: Sequence[ExpectedFailure]) -> bool:
    """Prints how the tests that pass in `plain` end in `found`, and returns whether all failures are expected."""
    failed = [test for test in plain if found.get(test, {}).get("outcome") != "passed"]
    unlisted = [test for test in failed if not any(entry.covers(test, name) for entry in expected)]
    print(f"{name:12} {len(plain) - len(failed):5} of {len(plain)} pass, {len(failed) - len(unlisted)} fail as listed")
    for test in unlisted:
        result = found.get(test, {})
        lines = [line[1:].strip() for line in result.get("error", "").splitlines() if line.startswith("E ")]
        print(f"    {test}: {result.get('outcome', 'not run')}: {' '.join(lines[:2])[:200]}")
    for entry in expected:
        covered = [test for test in plain if entry.covers(test, name)]
        if covered and not set(covered) & set(failed):
            print(f"    {entry.test} passes, and is listed as a failure")
    return not unlisted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="Lightning's repository")
    parser.add_argument("--strategy", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--only", nargs="+", default=DIRECTORIES, help="directories or files below `tests`")
    parser.add_argument("--plain", type=Path, help="keeps the results without redirection, to be used again")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    if options.plain is not None and options.plain.exists():
        without = read_results(options.plain)
    else:
        without = run_suite(checkout, None, None, options.only)
        if options.plain is not None:
            options.plain.write_text("".join(json.dumps(result) + "\n" for result in without.values()))
    plain = {
        test: result for test, result in without.items() if result["default_strategy"] and result["outcome"] == "passed"
    }
    listed = yaml.safe_load((HERE / "exceptions.yaml").read_text()) or []
    expected = [ExpectedFailure(**entry) for entry in listed]
    if not plain:
        print("no test takes the default strategy and passes without redirection")
        return 0
    found = {name: run_suite(checkout, STRATEGIES[name], list(plain), options.only) for name in options.strategy}
    return 0 if all([compare(name, plain, results, expected) for name, results in found.items()]) else 1


if __name__ == "__main__":
    sys.exit(main())
