"""The lines at the start of a training that name offloaded tensors and their tiers."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ssd import ActivationOffload, SSDOffloadStrategy, SwapPlanner
from tests.support.trainings import MIN_BYTES, SmallModel, Watch, batches, make_trainer, nothing_left, offloading

__all__ = ["nothing_left"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO and re.match("ssd_offload:|ActivationOffload:", record.getMessage()):
            text = record.getMessage()
            assert all(len(line) <= 80 or "/" in line for line in text.split("\n")), text
            self.lines.append(re.sub("\n[^ ]+:   ", " ", text))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Collects the package's lines in the logger whose messages Lightning shows."""
    logger, handler = logging.getLogger("lightning.pytorch"), _Lines()
    assert logger.isEnabledFor(logging.INFO)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


WIDE = 512
MEGABYTES = f"{3 * (WIDE * WIDE + WIDE) * 4 / 2**20:.2f} MiB"
TWICE = f"{2 * 3 * (WIDE * WIDE + WIDE) * 4 / 2**20:.2f} MiB"


class WideModel(SmallModel):
    """Its parameters are aligned as they are, so that bytes are exact."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.net:
            if isinstance(module, torch.nn.Linear):
                module.__init__(WIDE, WIDE)  # type: ignore[misc]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch.repeat(1, WIDE // batch.shape[1]))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch).pow(2).mean()


@pytest.mark.parametrize(
    ("arguments", "precision", "said"),
    [
        ({}, "32-true", "weights: on the CPU, whose memory is the host's"),
        ({"states": "gpu"}, "32-true", r"weights: on the CPU \(`states='gpu'`\)"),
        (
            {"gpu_memory": "1GiB"},
            "32-true",
            r"weights: on the CPU: model states need 13.5\d MiB of 1.00 GiB",
        ),
        (
            {"states": "host"},
            "32-true",
            rf"weights: {MEGABYTES} in host memory\n.*states: {TWICE} in host memory; exp_avg, exp_avg_sq in fp32\n"
            r"(?s:.*)totals: host memory 12.0\d MiB, [\d.]+ [MG]iB of the process beside it$",
        ),
        (
            {"states": "ssd", "checksum": False, "ssd_capacity": "64MiB"},
            "32-true",
            rf"weights: {MEGABYTES} on SSD\n.*optimizer states: {TWICE} on SSD; (?s:.*), SSD 9.0\d MiB\n"
            r".*limits: at most [\d.e+]+ TB a day to ",
        ),
        (
            {"states": "host"},
            "bf16-true",
            r"weights: 1.50 MiB in host memory\n.*optimizer states: 9.02 MiB in host memory, with master weights; ",
        ),
        (
            {"states": "host", "min_bytes": "16KiB"},
            "32-true",
            r"weights: 3.00 MiB in host memory, 6.00 KiB on the CPU\n.*; those of weights on the CPU there",
        ),
        (
            {"states": "host", "min_bytes": "1GiB"},
            "32-true",
            "weights: on the CPU, because no parameter of `min_bytes` or more",
        ),
    ],
)
def test_model_states(tmp_path: Path, lines: list[str], arguments: dict[str, Any], precision: Any, said: str) -> None:
    arguments = {"offload": "none"} | arguments
    trainer = make_trainer(tmp_path, offloading(**arguments), precision=precision)
    trainer.fit(WideModel(), batches(1))
    (line,) = lines
    assert re.search(said, line), line
    assert ("TB a day" in line) == (arguments.get("states") == "ssd")


@pytest.mark.parametrize(("clip", "words"), [("auto", ", 21.0\\d MiB while few steps are clipped,"), ("deferred", ",")])
def test_memory_of_second_versions(tmp_path: Path, lines: list[str], clip: Any, words: str) -> None:
    strategy = offloading(offload="none", states="host", clip=clip)
    make_trainer(tmp_path, strategy, gradient_clip_val=1.0).fit(WideModel(), batches(1))
    (line,) = lines
    assert re.search(rf"totals: host memory 12.0\d MiB{words} [\d.]+ [MG]iB of the process beside it", line), line


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "Coupled"])
def test_states_that_their_optimizer_keeps(tmp_path: Path, lines: list[str], kind: str) -> None:
    class Matrices(WideModel):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
            return (Coupled if kind == "Coupled" else getattr(torch.optim, kind))(matrices, lr=1e-3)

    make_trainer(tmp_path, offloading(states="host", offload="none")).fit(Matrices(), batches(1))
    (line,) = lines
    assert f"those of {kind} in host memory" in line


class Coupled(torch.optim.Adagrad):
    """Not registered, because it overrides `step`."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("arguments", "said", "moves"),
    [
        ({}, r"activations: those of 2.00 KiB or more to SSD \(up to 2\d\d.* KiB\), `offload=1.0`", {"ssd"}),
        ({"offload": "ssdtrain"}, "or more to SSD .*, as many as the bandwidth allows", {"ssd"}),
        ({"offload": "auto"}, "activations: on the CPU, whose memory is the host's", {"ssd"}),
        ({"offload": "none"}, r"activations: on the CPU \(`offload='none'`\)\n", set()),
        ({"tier": "host", "host_memory": "64MiB"}, r"or more to host memory \(up to 64.00 MiB\), ", {"host"}),
        ({"host_memory": "64MiB"}, r"to host memory \(up to 48.00 MiB\), then to SSD \(up to ", {"host", "ssd"}),
        (
            {"tier": "host", "states": "host", "host_memory": "1MiB", "offload": "auto"},
            "activations: on the CPU, because model states leave less than 32.00 MiB of `host_memory`",
            set(),
        ),
    ],
)
def test_activations(tmp_path: Path, lines: list[str], arguments: dict[str, Any], said: str, moves: set[str]) -> None:
    watch = Watch()
    make_trainer(tmp_path, offloading(**arguments), callbacks=[watch]).fit(SmallModel(), batches(2))
    (line,) = lines
    assert re.search(said, line), line
    assert set(watch.bytes_out) == moves
    assert any(watch.bytes_out.values()) == (bool(moves) and arguments.get("offload") != "auto")
    assert (f" TB a day to {tmp_path} (posix)" in line) == ("ssd" in moves and arguments.get("offload") != "auto")


@pytest.mark.parametrize("offload", [1.0, "1MiB"])
def test_offload_without_memory_for_a_tier_is_refused(tmp_path: Path, offload: Any) -> None:
    strategy = offloading(states="host", host_memory="1MiB", offload=offload)
    with pytest.raises(
        ValueError, match=r"`offload=.*` finds no memory .* which is 1.00 MiB, model states take .* KiB"
    ):
        make_trainer(tmp_path, strategy).fit(SmallModel(), batches(2))


def test_nothing_is_offloaded_without_memory_for_a_tier_if_that_was_asked_for(tmp_path: Path) -> None:
    strategy = offloading(states="host", host_memory="1MiB", offload=0)
    make_trainer(tmp_path, strategy).fit(SmallModel(), batches(2))


def test_a_budget_of_more_host_memory_than_is_free_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"`host_memory='900TiB'` is more than the .* that are free .* Give less"):
        make_trainer(tmp_path, offloading(states="host", host_memory="900TiB")).fit(SmallModel(), batches(1))


def test_the_summary_is_logged_once_a_fit(tmp_path: Path, lines: list[str]) -> None:
    trainer = make_trainer(tmp_path, offloading(), max_epochs=1, limit_val_batches=1)
    trainer.fit(model := SmallModel(), batches(1), batches(1))
    assert len(lines) == 1
    trainer.test(model, batches(1))
    trainer.predict(model, batches(1))
    assert len(lines) == 1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(1))
    assert len(lines) == 2


def test_under_another_strategy(tmp_path: Path, lines: list[str]) -> None:
    offload = ActivationOffload(offload=1.0, min_bytes=MIN_BYTES, ssd_capacity="256KiB", staging_memory="16MiB")
    make_trainer(tmp_path, callbacks=[offload]).fit(SmallModel(), batches(1))
    (line,) = lines
    assert re.match("ActivationOffload: activations: those of 2.00 KiB or more to SSD .*\n.*limits: .* TB a day", line)


def test_the_summary_names_the_planner_that_decides(tmp_path: Path, lines: list[str]) -> None:
    make_trainer(tmp_path, SSDOffloadStrategy(), callbacks=[SwapPlanner(), _Stop()]).fit(SmallModel(), batches(1))
    assert "SwapPlanner decides how many" in lines[0]


class _Stop(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> int:
        return -1
