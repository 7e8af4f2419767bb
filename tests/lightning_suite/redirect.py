"""A pytest plugin that replaces the default strategy of the Trainers in Lightning's suite by ours.

`LIGHTNING_SUITE_RESULTS` names the file that the plugin writes: a line of JSON for each test, with its outcome and
whether it used the default strategy. `LIGHTNING_SUITE_ARGUMENTS` holds the arguments of `SSDOffloadStrategy` as JSON;
without it nothing is redirected. `LIGHTNING_SUITE_TESTS` names a file with the tests to run, one a line; without it all
run.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

_result: dict[str, Any] = {}
_arguments = os.environ.get("LIGHTNING_SUITE_ARGUMENTS")
_choose_strategy = _AcceleratorConnector._choose_strategy
_default_used = False


def _choose_ours(connector: _AcceleratorConnector) -> Strategy | str:
    global _default_used
    chosen = _choose_strategy(connector)
    if type(chosen) is not SingleDeviceStrategy or chosen.root_device.type != "cpu":
        return chosen
    _default_used = True
    if _arguments is None:
        return chosen
    from lightning_ssd import SSDOffloadStrategy

    return SSDOffloadStrategy(**json.loads(_arguments))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: rerun by pytest-rerunfailures, where that is installed")
    _AcceleratorConnector._choose_strategy = _choose_ours
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores the signal, and tests of signals expect the default


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if (chosen := os.environ.get("LIGHTNING_SUITE_TESTS")) is not None:
        wanted = set(Path(chosen).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _default_used
    _default_used = False
    _result.clear()
    _result.update(test=item.nodeid, outcome="passed", seconds=0.0)
    finished = yield
    _result["default_strategy"] = _default_used
    with open(os.environ["LIGHTNING_SUITE_RESULTS"], "a") as file:
        file.write(json.dumps(_result) + "\n")
    return finished


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _result["seconds"] += report.duration
    if report.outcome == "failed":
        _result["outcome"] = "failed"
        _result.setdefault("error", str(report.longrepr))
    elif report.outcome == "skipped":
        _result["outcome"] = "xfailed" if hasattr(report, "wasxfail") else "skipped"
