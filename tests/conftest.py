"""Tests marked `gpu` are skipped without a CUDA device, and the machine is measured on few bytes.

Of a test marked `quick_cases(count)`, all cases but the first ones are `thorough`. Of the thorough cases of a test,
`-m thorough` runs a few that are drawn at random, or as many as the mark `drawn(count)` says. The same ones are drawn
in each run, and others by `--hypothesis-profile=random`.
"""

import gc
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator

# Idle threads must not spin, because several tests may share the cores. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of `pytest -n 2` are as many as the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

# Without it cuBLAS may split sums differently in each call, and the last bits differ. CUDA reads it at its start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


from lightning_ssd.model_states.optimizers.adam_c import adam_library  # noqa: E402
from tests.support.measurements import measure_few_bytes  # noqa: E402
from tests.support.steps import worker  # noqa: E402, F401

# Examples have no deadline: hypothesis measures them, and the data that it draws, in wall time, which other processes
# lengthen. They are the same in each run, so that a test that fails after a change fails because of it;
# `pytest --hypothesis-profile=random` draws others.
settings.register_profile("lightning_ssd", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("lightning_ssd")


DRAWN_CASES = 2
"""Cases of a test that `-m thorough` draws, unless its mark says another number."""


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Full garbage collections, which trainings make, do not examine the objects that are older than a module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def compiled_optimizer() -> None:
    """The CPU optimizer is compiled before a test, not on a thread that its first strategy would begin: some tests
    count threads, or have calls of the system fail."""
    adam_library()


@pytest.fixture(autouse=True)
def quick_measurements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the machine on few bytes, unless bandwidth is tested: the measurement would take longer than most
    trainings."""
    if "storage" not in request.path.parts and "gpu" not in request.path.parts:
        measure_few_bytes(monkeypatch.setattr)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_configure() -> None:
    if settings.get_current_profile_name() != "random":
        # Hypothesis draws constants of imported files, too, so that examples would depend on the tests that ran before.
        providers.is_local_module_file = lambda path: False


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts: Counter[str] = Counter()
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        mark = item.get_closest_marker("quick_cases")
        if mark is not None and item.get_closest_marker("thorough") is None:
            counts[name] += 1
            if counts[name] > mark.args[0]:
                item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("thorough") is not None:
            cases[name].append(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.option.markexpr == "thorough":
        left_out = {item for name, of_test in cases.items() for item in _left_out(name, of_test)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _left_out(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the thorough cases of a test that are not drawn. All processes of a run draw the same ones."""
    mark = cases[0].get_closest_marker("drawn")
    others = settings.get_current_profile_name() == "random"
    seed = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(random.random())) if others else ""
    count = DRAWN_CASES if mark is None else mark.args[0]
    return random.Random(name + seed).sample(cases, max(0, len(cases) - count))
