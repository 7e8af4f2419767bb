"""The tables of `docs/compatibility.md`, and the page that shows them."""

from pathlib import Path

from tests.compatibility import families, lightning_features, optimizers, precisions, torch_features, user_programs
from tests.compatibility.case import PLACEMENTS, Case, outcome, run_plain

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

TABLES: dict[str, list[Case]] = {
    "Modules of torch": families.MODULES,
    "Model families of transformers": families.TRANSFORMERS,
    "Optimizers": optimizers.CASES,
    "Precisions": precisions.CASES,
    "Features of Lightning": lightning_features.CASES,
    "Features of torch": torch_features.CASES,
    "User programs": user_programs.CASES,
}

HEAD = """\
# Compatibility

Each row is a training of a few steps on a CPU, of a tiny model, by plain Lightning and by `SSDOffloadStrategy`.
**equal** means that the losses, and all parameters and buffers at the end, are the same bit for bit. The two columns
are the two things that can be offloaded:

- **activations**: `Trainer(strategy="ssd_offload")` with `offload=1.0`: every saved tensor of 64 bytes or more on SSD;
- **model states**: weights, gradients and optimizer states, too: `states="host"` and `states="ssd"`, each with
  `min_bytes=1` and `gpu_memory="1B"`, so that every parameter is offloaded and fetched anew for each use.

A row that says **refused** raises an error with that message before a wrong number is used, and one that says
**within** names the largest difference and its cause.

`python -m tests.compatibility.write` makes the page: it runs every case, and writes the page if each has the outcome
that its table expects. The default tests run a sample, and `pytest -m thorough tests/compatibility` some at random.
"""


def render() -> str:
    """Returns the page."""
    parts = [HEAD]
    for title, cases in TABLES.items():
        parts.append(f"\n## {title}\n\n| | activations | model states |\n|---|---|---|\n")
        parts += [f"| {case.name} | {case.activations} | {case.states} |\n" for case in cases]
    return "".join(parts)


def check(case: Case) -> None:
    """Runs `case` in every placement.

    Raises:
        AssertionError: an outcome is not the expected one; the message names the placement.
    """
    plain = run_plain(case)
    for placement in PLACEMENTS:
        expected = case.expected(placement)
        try:
            found = outcome(case, placement, plain)
        except Exception as error:
            raise AssertionError(f"{case.name}, {placement}: {error}") from error
        assert found == expected, f"{case.name}, {placement}: {found}, and the table says {expected}"
