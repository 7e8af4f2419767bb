"""Trainings that clip, accumulate, average and save, in every placement of the states, ended by a fault anywhere."""

import dataclasses
import errno
import itertools
import random
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.model_states.gradients.grad_scale import GradScaleDecision
from lightning_ssd.storage import StorageError
from tests.support import forks
from tests.support.endings import Keep, equal, weights
from tests.support.faults import FailingAtBackend
from tests.support.faulty_trainings import WIDTH, Arm, CallCounter, Case, Net, run
from tests.support.trainings import nothing_left, package_threads, scratch_directories, script_environment  # noqa: F401

Weights = dict[str, Tensor]

CASES = [
    Case(*values)
    for values in itertools.product(
        ("host", "both", "ssd"),
        ("deferred", "speculative", "auto"),
        (1, 2),
        (1, 2),
        (False, True),
        (False, True),
        (False, True),
        ("optimized", "naive", "none"),
    )
]
CASES = [case for case in CASES if not case.recover or (case.place == "ssd" and not case.averages)]
"""All trainings. A run is recorded on SSDs only, and not with averages."""


@pytest.fixture(autouse=True)
def speculation_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `clip="auto"`, steps are deferred and speculated, and second versions made and dropped."""
    monkeypatch.setattr(GradScaleDecision, "EMA_WEIGHT", 0.6)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A training under plain Lightning: its weights after each batch and at the end, losses, and checkpoint."""

    kept: list[Weights]
    losses: list[float]
    saved: Weights | None


def plain(root: Path, case: Case) -> Plain:
    return _plain(root, dataclasses.replace(case, place="ssd", clip="auto", recover=False, overlap="optimized"))


@cache
def _plain(root: Path, case: Case) -> Plain:
    keep = Keep()
    module = run(root, case, "auto", keep)
    return Plain([*keep.kept, weights(module)], module.losses, take_checkpoint(root))


def take_checkpoint(root: Path) -> Weights | None:
    """Returns the weights of the saved checkpoint and removes it; None if there is none."""
    file = root / "saved.ckpt"
    if not file.exists():
        return None
    state: Weights = torch.load(file)["state_dict"]
    file.unlink()
    return state


def check_end(root: Path, case: Case, error: BaseException | None, module: Net, what: object) -> None:
    """Asserts what holds after every fault: whole weights, nothing left, and with `recover` the same end."""
    expected = plain(root, case)
    assert package_threads() == [], what
    if error is None:
        assert equal(weights(module), expected.kept[-1]) and module.losses == expected.losses, what
    elif not getattr(error, "__notes__", None):
        groups = [list(weights(module))]
        if case.optimizers == 2:  # the one may have stepped, and the other not
            first = [name for name in groups[0] if name.startswith("blocks.0")]
            groups = [first, [name for name in groups[0] if name not in first]]
        if case.averages:  # Lightning's callback copies the averages to one parameter after the other
            groups = [[name] for name in weights(module)]
        found = weights(module)
        assert all(any(equal(found, step, group) for step in expected.kept) for group in groups), what
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}, what
    module.loss(torch.ones(2, WIDTH)).backward()  # the weights are whole, and nothing is fetched
    if (saved := take_checkpoint(root)) is not None:
        assert expected.saved is not None and equal(saved, expected.saved), what
    if case.recover and error is not None:
        again = run(root, case, case.strategy(root))
        assert equal(weights(again), expected.kept[-1]), what
        take_checkpoint(root)
    assert scratch_directories(root) == [], what


COUNTS: dict[tuple[Case, str], int] = {}
"""Positions of faults in a training that none ends, by the kind of positions."""


def check_transfer(root: Path, chance: random.Random, cases: Sequence[Case]) -> bool:
    """Trains with one fault of a drive; returns whether it was reached."""
    case = chance.choice(cases)
    operation = chance.choice(["read", "write"])
    if (case, operation) not in COUNTS:
        counting = FailingAtBackend(10**9, operation, armed=False)  # type: ignore[arg-type]
        counting.device_buffers = case.place == "direct"
        run(root, case, case.strategy(root, counting), Arm(counting))
        COUNTS[case, operation] = counting.counted
    number, dead = chance.choice([errno.EIO, errno.ENOSPC, None]), chance.random() < 0.4
    at = chance.randrange(COUNTS[case, operation] + 1)
    backend = FailingAtBackend(at, operation, dead=dead, armed=False, number=number)  # type: ignore[arg-type]
    backend.device_buffers = case.place == "direct"
    what = f"{case}, {operation} {at}, error {number}, {'dead' if dead else 'once'}"
    take_checkpoint(root)
    try:
        module, error = run(root, case, case.strategy(root, backend), Arm(backend)), None
    except StorageError as raised:
        module, error = raised.module, raised  # type: ignore[attr-defined]
        assert backend.failed, what
        assert error.__context__ in (None, error.__cause__) or error.__suppress_context__, what
    check_end(root, case, error, module, what)
    return backend.failed > 0


FEW_OR_MANY = pytest.mark.parametrize("seed, number", [(0, 4), pytest.param(1, 16, marks=pytest.mark.thorough)])


@FEW_OR_MANY
def test_transfers_that_fail(tmp_path: Path, seed: int, number: int) -> None:
    chance, cases = random.Random(seed), [case for case in CASES if case.place != "host"]
    assert any([check_transfer(tmp_path, chance, cases) for _ in range(number)])


@FEW_OR_MANY
def test_transfers_that_fail_where_weights_are_read_to_device_memory(tmp_path: Path, seed: int, number: int) -> None:
    """A killed run resumes through host memory."""
    chance, cases = (
        random.Random(seed),
        [dataclasses.replace(case, place="direct", overlap="optimized") for case in CASES if case.place == "ssd"],
    )
    assert any([check_transfer(tmp_path, chance, cases) for _ in range(number)])


def check_interrupt(root: Path, chance: random.Random, cases: Sequence[Case], of: str | None = None) -> bool:
    """Sends SIGINT to a training as it calls a function of the package; returns whether that ended it.

    Args:
        root: the Trainer's directory.
        chance: chooses training and call.
        cases: the trainings.
        of: name of the function; None: any.
    """
    case, kind = chance.choice(cases), f"calls of {of}"
    if (case, kind) not in COUNTS:
        with CallCounter(10**9, lambda: None, of) as counter:
            run(root, case, case.strategy(root))
        COUNTS[case, kind] = counter.counted
    at = chance.randrange(COUNTS[case, kind])
    take_checkpoint(root)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has this process ignore it after the first
    error: BaseException | None = None
    try:
        with CallCounter(at, lambda: signal.raise_signal(signal.SIGINT), of):
            module = run(root, case, case.strategy(root))
    except (SystemExit, KeyboardInterrupt) as raised:
        module, error = raised.module, raised  # type: ignore[union-attr]
    check_end(root, case, error, module, f"{case}, call {at} of {of}")
    return error is not None


@pytest.fixture
def handler_of_interrupts() -> Iterator[None]:
    """The handler of SIGINT is the same after a test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@FEW_OR_MANY
@pytest.mark.usefixtures("handler_of_interrupts")
def test_interrupts_at_any_call(tmp_path: Path, seed: int, number: int) -> None:
    """Also within the end of training, and in callbacks of futures that jobs wait for."""
    chance = random.Random(seed)
    assert any([check_interrupt(tmp_path, chance, CASES) for _ in range(number)])


@FEW_OR_MANY
@pytest.mark.usefixtures("handler_of_interrupts")
def test_interrupts_as_transfers_are_submitted(tmp_path: Path, seed: int, number: int) -> None:
    """Weights that a callback has changed are written by the training thread."""
    chance, cases = random.Random(seed), [case for case in CASES if case.place == "ssd" and case.averages]
    assert any([check_interrupt(tmp_path, chance, cases, "submit") for _ in range(number)])


class Failure(Exception):
    pass


class FailIn(pl.Callback):
    """Raises in a hook that is called the nth time."""


HOOKS = [name for name in vars(pl.Callback) if name.startswith(("on_train", "on_fit", "on_before", "on_after"))]


def check_user(root: Path, chance: random.Random) -> bool:
    """Raises an error in a hook of user code; returns whether the hook was called so often."""
    case, hook, left = chance.choice(CASES), chance.choice(HOOKS), chance.randrange(4)

    def fail(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise Failure

    callback = type("Fails", (FailIn,), {hook: fail})()
    error: BaseException | None = None
    take_checkpoint(root)
    try:
        module = run(root, case, case.strategy(root), callback)
    except Failure as raised:
        module, error = raised.module, raised  # type: ignore[attr-defined]
    check_end(root, case, error, module, f"{case}, {hook}, {left}")
    return error is not None


@FEW_OR_MANY
def test_errors_of_user_code(tmp_path: Path, seed: int, number: int) -> None:
    chance = random.Random(seed)
    assert any([check_user(tmp_path, chance) for _ in range(number)])


@pytest.mark.thorough
@pytest.mark.parametrize("seed, kills", [(0, 2), pytest.param(1, 12, marks=pytest.mark.thorough)])
def test_kills_at_any_call(tmp_path: Path, seed: int, kills: int) -> None:
    """By SIGKILL, of runs that are recorded; the process that forks them has no other threads."""
    module, call = "tests.support.faulty_trainings", f"kill(Path({str(tmp_path)!r}), {seed}, {kills})"
    quick = "from tests.support.measurements import measure_few_bytes\nmeasure_few_bytes()"
    script = f"from pathlib import Path\nfrom {module} import kill\n{quick}\n{call}\n"
    done = forks.run(["-c", script], env=script_environment(), timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "killed" in done.stdout.split()
