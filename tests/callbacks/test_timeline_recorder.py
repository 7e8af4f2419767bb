"""`TimelineRecorder`: shows the work of every resource in the recorded steps, and changes no training."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig

from benchmarks.bounds import busy_seconds_in, seconds_by_label
from lightning_ssd import ActivationOffload, SSDOffloadStrategy, TimelineRecorder
from lightning_ssd.callbacks import timeline_recorder
from lightning_ssd.timeline import COLORS, Timeline
from lightning_ssd.timeline.timeline_profile import read_timeline
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.states import train
from tests.support.traces import labels, spans

PNG = b"\x89PNG\r\n\x1a\n"
COPIED = {"CPU optimizer", "copy in", "copy out"}


@pytest.fixture(autouse=True)
def nothing_records_afterwards() -> Iterator[None]:
    yield
    assert not torch.autograd.profiler._is_profiler_enabled


class Recorded(pl.Callback):
    """The steps in which torch's profiler recorded, as seen in `training_step` and `on_train_batch_end`."""

    def __init__(self) -> None:
        self.steps: set[int] = set()

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            self.steps.add(trainer.fit_loop.epoch_loop._batches_that_stepped)


def steps_of(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "i"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("arguments", "busy"),
    [
        (None, {"CPU optimizer"}),
        ({"states": "gpu", "offload": "none"}, {"CPU optimizer"}),
        ({"states": "gpu", "offload": 1.0}, COPIED | {"SSD read", "SSD write"}),
        ({"states": "gpu", "offload": 1.0, "tier": "host", "host_memory": "64MiB"}, COPIED),
        ({"states": "host", "offload": "none"}, COPIED),
        ({"states": "ssd", "offload": 1.0}, COPIED | {"SSD read", "SSD write"}),
    ],
)
def test_records_every_resource_and_does_not_change_results(
    tmp_path: Path, arguments: dict[str, Any] | None, busy: set[str]
) -> None:
    def strategy() -> Any:
        return "auto" if arguments is None else SSDOffloadStrategy(min_bytes=1, gpu_memory="1B", **arguments)

    recorded = Recorded()
    callbacks = [TimelineRecorder(step=5, steps=2, path=tmp_path / "new" / "timeline"), recorded]
    actual = train(tmp_path, strategy(), Model(), callbacks=callbacks, max_epochs=1, batches=12)
    assert_same(actual, train(tmp_path, "auto", Model(), max_epochs=1, batches=12))
    assert recorded.steps == {5, 6}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["timeline.json", "timeline.png"]
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(PNG)
    rows = spans(tmp_path / "new" / "timeline.json")
    assert list(rows) == ["phases", *COLORS]
    assert labels(rows, "phases") == ["forward", "backward", "optimizer"] * 2
    assert steps_of(tmp_path / "new" / "timeline.json") == ["step 5", "step 6"]
    assert {row for row in rows if rows[row]} - {"phases", "waiting"} == busy | {"compute"}
    assert any("addmm" in name or "linear" in name for name in labels(rows, "compute"))
    transfers = ("copy in", "copy out", "SSD read", "SSD write")
    assert all(one["args"]["bytes"] > 0 for row in transfers for one in rows[row])
    if arguments and "offload" in arguments:
        # Each saved byte is copied out; backward takes bytes that are being offloaded from memory.
        nbytes = {row: sum(one["args"]["bytes"] for one in rows[row]) for row in transfers}
        assert nbytes["copy out"] >= nbytes["SSD write"] >= nbytes["SSD read"] or arguments["states"] == "ssd"


def test_an_activation_offload_callback_is_shown(tmp_path: Path) -> None:
    callbacks = [ActivationOffload(path=tmp_path, offload=1.0, min_bytes=1), TimelineRecorder(2, tmp_path / "t")]
    actual = train(tmp_path, "auto", Model(), callbacks=callbacks, max_steps=4)
    assert_same(actual, train(tmp_path, "auto", Model(), max_steps=4))
    assert spans(tmp_path / "t.json")["copy out"]  # backward may take the bytes before they are written


def test_an_optimizer_that_steps_whole_is_shown(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        """An optimizer class whose parameters may depend on each other."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = Model(lambda parameters: Own(parameters, lr=0.1))
    strategy = SSDOffloadStrategy(states="host", min_bytes=1)
    train(tmp_path, strategy, model, callbacks=[TimelineRecorder(1, tmp_path / "timeline")], max_steps=3)
    assert "step Own" in labels(spans(tmp_path / "timeline.json"), "CPU optimizer")


class Annotated(pl.Callback):
    """The annotations of each thread in one step, as torch's profiler records them."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self.profiler.start()
        elif batch_idx == 5:
            self.threads = {str(thread.native_id): thread.name for thread in threading.enumerate()}
            self.profiler.stop()

            self.profiler.export_chrome_trace(str(Path(trainer.default_root_dir) / "trace.json"))

    def of(self, prefix: str, trace: Path) -> set[str]:
        """Returns the names of the threads with such annotations."""
        return {
            self.threads[str(event["tid"])].rstrip("0123456789.-")
            for event in json.loads(trace.read_text())["traceEvents"]
            if event["ph"] == "X" and event["name"].startswith(prefix)
        }


def test_annotations_are_on_the_threads_that_do_the_work(tmp_path: Path) -> None:
    annotated = Annotated()
    strategy = SSDOffloadStrategy(states="ssd", offload=1.0, min_bytes=1, gpu_memory="1B")
    train(tmp_path, strategy, Model(), callbacks=[annotated], max_steps=7)
    trace = tmp_path / "trace.json"
    main = threading.current_thread().name
    assert annotated.of("ssd read", trace) == annotated.of("ssd write", trace) == {"lightning_ssd-io"}
    assert annotated.of("step ", trace) == {"lightning_ssd-cpu-optimizer"}
    assert annotated.of("copy out", trace) == {main}
    assert annotated.of("wait for the weights", trace) == {main}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_has_all_its_micro_batches(tmp_path: Path, accumulate: int) -> None:
    callbacks = [TimelineRecorder(2, tmp_path / "timeline", steps=2)]
    train(tmp_path, "auto", Model(), callbacks=callbacks, accumulate_grad_batches=accumulate, max_epochs=1, batches=12)
    rows = spans(tmp_path / "timeline.json")
    assert labels(rows, "phases") == [*["forward", "backward"] * accumulate, "optimizer"] * 2
    assert steps_of(tmp_path / "timeline.json") == ["step 2", "step 3"]


def test_validation_is_a_phase(tmp_path: Path) -> None:
    callbacks = [TimelineRecorder(11, tmp_path / "timeline", steps=2)]
    train(tmp_path, "auto", Model(), callbacks=callbacks, batches=12)
    one = ["forward", "backward", "optimizer"]
    assert labels(spans(tmp_path / "timeline.json"), "phases") == [*one, "validation", *one]


class Manual(Model):
    """Steps twice in a `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch[0])
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_manual_optimization(tmp_path: Path) -> None:
    callbacks = [TimelineRecorder(2, tmp_path / "timeline")]
    actual = train(tmp_path, "auto", Manual(), callbacks=callbacks, max_epochs=1)
    assert_same(actual, train(tmp_path, "auto", Manual(), max_epochs=1))
    rows = spans(tmp_path / "timeline.json")
    assert labels(rows, "phases") == ["forward", "backward", "optimizer", "backward", "optimizer"]


def test_a_training_that_ends_within_the_steps_is_shown_that_far(tmp_path: Path) -> None:
    callbacks = [TimelineRecorder(2, tmp_path / "timeline", steps=10)]
    train(tmp_path, "auto", Model(), callbacks=callbacks, max_steps=4)
    assert steps_of(tmp_path / "timeline.json") == ["step 2", "step 3"]


class Failing(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2:
            raise InterruptedError


@pytest.mark.parametrize("states", [None, "ssd"])
def test_a_training_that_fails_within_the_steps_is_shown_that_far(tmp_path: Path, states: Any) -> None:
    strategy = "auto" if states is None else SSDOffloadStrategy(states=states, min_bytes=1, offload=1.0)
    recorder = TimelineRecorder(2, tmp_path / "timeline")
    with pytest.raises(InterruptedError):
        train(tmp_path, strategy, Failing(), callbacks=[recorder])
    assert "backward" in labels(spans(tmp_path / "timeline.json"), "phases")
    (tmp_path / "timeline.json").unlink()
    train(tmp_path, "auto", Model(), callbacks=[recorder], max_steps=4)  # the next fit is recorded anew
    assert steps_of(tmp_path / "timeline.json") == ["step 2"]


def test_a_warning_tells_that_training_ended_before_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()
    train(tmp_path, "auto", Model(), callbacks=[TimelineRecorder(step=1000), recorded], max_steps=3)
    assert "training ended before step 1000" in caplog.text
    assert not recorded.steps and not list(tmp_path.glob("timeline*"))


def test_writes_the_trace_alone_without_matplotlib(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_recorder, "find_spec", lambda name: None)
    train(tmp_path, "auto", Model(), callbacks=[TimelineRecorder(1)], max_steps=3)
    assert "the Chrome trace alone: `pip install matplotlib`" in caplog.text
    assert [path.name for path in tmp_path.glob("timeline*")] == ["timeline.json"]


def test_a_disk_that_is_full_by_then_fails_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Timeline, "save_trace", full)
    train(tmp_path, "auto", Model(), callbacks=[TimelineRecorder(1)], max_steps=3)
    assert "could not be written" in caplog.text and "No space left" in caplog.text


def test_a_profiler_that_records_already_has_priority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(tmp_path, "auto", Model(), callbacks=[TimelineRecorder(1)], max_steps=3)
    assert "another torch profiler records" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"step": -1}, "`step=-1` must be at least 0"), ({"steps": 0}, "`steps=0` must be at least 1")],
)
def test_refuses_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimelineRecorder(**arguments)


def test_refuses_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`path` of TimelineRecorder can't be .*can't be written"):
        train(tmp_path, "auto", Model(), callbacks=[TimelineRecorder(path=tmp_path / "file" / "timeline")])
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, profiler="pytorch")
    with pytest.raises(ValueError, match="both use torch's profiler"):
        TimelineRecorder().setup(trainer, Model(), "fit")


def event(name: str, start: float, end: float, category: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start), "cat": category, "tid": tid}


def marks(**times: float) -> list[dict[str, Any]]:
    return [
        event(f"lightning_ssd mark {name.replace('_', ' ')}", at, at + 1e-9, "user_annotation")
        for name, at in times.items()
    ]


def marks_of_gpu(**times: tuple[float, float]) -> list[dict[str, Any]]:
    """Marks whose kernels begin later than the host launches them. Times are those of the host and of the GPU."""
    found = marks(**{name: host for name, (host, _) in times.items()})
    for number, (name, (host, gpu)) in enumerate(times.items()):
        args = {"args": {"External id": 1000 + number, "correlation": 1000 + number}}
        found += [
            event("aten::fill_", host, host + 1e-9) | args,
            event("fill", gpu, gpu + 1e-9, "kernel", tid=7) | args,
            event(f"lightning_ssd mark {name}", gpu, gpu + 1e-9, "gpu_user_annotation", tid=7),
        ]
    return found


def spans_of(timeline: Timeline) -> dict[str, list[tuple[float, float, str]]]:
    return {
        row: [(round(start, 6), round(end, 6), label) for start, end, label, _ in spans]
        for row, spans in timeline.rows.items()
        if spans
    }


def test_an_operator_is_compute_but_for_copies_and_waits_within() -> None:
    events = [
        event("outer", 10, 15),
        event("inner", 11, 14),
        event("copy out", 12, 13),
        event("copy in", 10, 15, tid=2),  # on another thread, at the same time
        event("wait for weights", 17, 18),
        event("wait for weights", 10, 18, tid=2),
        event("step block", 9, 12, tid=3),  # began before
        event("aten::add_", 19, 20),
        event("aten::log", 20.5, 20.6),
    ]
    boundaries = marks(start=10, step_7=10, forward=10, backward=16, optimizer=19, between=20, end=21)
    timeline = read_timeline(events + boundaries, 1, "CPU", on_gpu=False)
    assert timeline.seconds == pytest.approx(11) and timeline.steps == [(7, 0)]
    assert [(phase.label, phase.start, phase.end) for phase in timeline.phases] == [
        ("forward", 0, pytest.approx(6)),
        ("backward", pytest.approx(6), pytest.approx(9)),
        ("optimizer", pytest.approx(9), pytest.approx(10)),
    ]
    assert spans_of(timeline) == {
        "compute": [(0, 2, "outer"), (3, 5, "outer")],
        "copy in": [(0, 5, "copy in")],
        "copy out": [(2, 3, "copy out")],
        "CPU optimizer": [(0, 2, "step block"), (9, 10, "aten::add_")],
        "waiting": [(7, 8, "wait for weights")],
    }


@pytest.mark.parametrize("on_gpu", [False, True])
def test_transfers_have_the_bytes_of_their_part_in_the_timeline(tmp_path: Path, on_gpu: bool) -> None:
    copies = [
        event("Memcpy HtoD (Pinned -> Device)", 10, 12, "gpu_memcpy") | {"args": {"bytes": 500}},
        event("Memcpy DtoH (Device -> Pinned)", 20, 24, "gpu_memcpy") | {"args": {"bytes": 400}},
    ]
    if not on_gpu:
        copies = [event("copy in, 500 bytes", 10, 12), event("copy out, 400 bytes", 20, 24, tid=2)]
    drives = [event("ssd write, 700 bytes", 8, 15, tid=3), event("ssd read, 9 bytes", 11, 12, tid=3)]
    boundaries = marks(start=10, step_7=10, forward=10, end=21)
    if on_gpu:
        boundaries = marks_of_gpu(start=(9, 10), step_7=(9.1, 10), forward=(9.2, 10), end=(9.3, 21))
    timeline = read_timeline(copies + drives + boundaries, 1, "device", on_gpu=on_gpu)
    timeline.save_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found["otherData"]["seconds"] == pytest.approx(11)
    events = found["traceEvents"]
    rows = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    transfers = {rows[one["tid"]]: one for one in events if one["ph"] == "X" and "bytes" in one.get("args", {})}
    assert {row: one["args"]["bytes"] for row, one in transfers.items()} == {
        "copy in": 500,
        "copy out": 100,  # a quarter ends in the timeline
        "SSD write": 500,
        "SSD read": 9,
    }
    read = transfers["SSD read"]
    assert (read["ts"] / 1e6, (read["ts"] + read["dur"]) / 1e6) == pytest.approx((1, 2))


def test_of_a_gpu_the_kernels_are_compute_and_phases_are_on_its_clock() -> None:
    events = [
        event("gemm", 10, 12, "kernel", tid=7),
        event("gemm", 11, 13, "kernel", tid=8),
        event("Memset (Device)", 13, 14, "gpu_memset", tid=7),
        event("Memcpy HtoD (Pinned -> Device)", 12, 14, "gpu_memcpy", tid=9),
        event("Memcpy DtoH (Device -> Pinned)", 13, 15, "gpu_memcpy", tid=10),
        event("Memcpy DtoD (Device -> Device)", 16, 17, "gpu_memcpy", tid=7),
        event("aten::addmm", 10, 18),
        event("wait for weights", 10, 18),
        event("step block", 15, 16, tid=3),
        event("ssd read", 15, 16, tid=4),
        event("ssd write", 16, 18, tid=4),
    ]
    # Another process has the GPU when the host begins, so that all marks are late.
    boundaries = marks_of_gpu(start=(6, 10), step_0=(6.1, 10), forward=(6.2, 10), backward=(6.3, 14), end=(6.4, 18))
    timeline = read_timeline(events + boundaries, 1, "H100", on_gpu=True)
    assert [(phase.label, phase.start, phase.end) for phase in timeline.phases] == [
        ("forward", 0, 4),
        ("backward", 4, 8),
    ]
    assert spans_of(timeline) == {
        "compute": [
            (0, 2, "gemm"),
            (1, 3, "gemm"),
            (3, 4, "Memset (Device)"),
            (6, 7, "Memcpy DtoD (Device -> Device)"),
        ],
        "copy in": [(2, 4, "Memcpy HtoD (Pinned -> Device)")],
        "copy out": [(3, 5, "Memcpy DtoH (Device -> Pinned)")],
        "SSD read": [(5, 6, "ssd read")],
        "SSD write": [(6, 8, "ssd write")],
        "CPU optimizer": [(5, 6, "step block")],
        "waiting": [(4, 6, "no kernel runs"), (7, 8, "no kernel runs")],
    }
    assert timeline.busy_share("compute") == 5 / 8


def launch(
    name: str, correlation: int, call: tuple[float, float], ran: tuple[float, float], tid: int = 1
) -> list[dict[str, Any]]:
    args = {"args": {"correlation": correlation}}
    return [event("cudaLaunchKernel", *call, "cuda_runtime", tid) | args, event(name, *ran, "kernel", 7) | args]


def test_a_wait_of_a_gpu_is_named_after_what_the_next_kernel_waits_for() -> None:
    events = [
        *launch("first", 1, (10, 10.5), (10.5, 11)),
        *launch("after a synchronization", 2, (14, 14.5), (15, 16)),
        event("cudaStreamSynchronize", 10.6, 13, "cuda_runtime"),
        event("Memcpy HtoD (Pinned -> Device)", 13, 14.8, "gpu_memcpy", tid=9),
        event("Memcpy DtoH (Device -> Pinned)", 12, 13, "gpu_memcpy", tid=10),
        *launch("in backward", 3, (17, 18), (18, 19), tid=2),
        event("wait for weights", 15.5, 17, tid=2),
        event("wait for weights", 10, 20, tid=3),  # on a thread that launches nothing
        event("cudaLaunchKernel", 19, 20, "cuda_runtime"),
        event("of a graph", 20, 21, "kernel", 7),
    ]
    boundaries = marks_of_gpu(start=(10, 10), step_0=(10.1, 10), forward=(10.2, 10), backward=(15, 16), end=(21, 22))
    timeline = read_timeline(events + boundaries, 1, "H100", on_gpu=True)
    assert spans_of(timeline)["waiting"] == [
        (0, 0.5, "host"),
        (1, 3, "cudaStreamSynchronize"),
        (3, 4.5, "host"),
        (4.5, 5, "copy in"),
        (6, 7, "wait for weights"),
        (7, 8, "host"),
        (9, 10, "no kernel runs"),
        (11, 12, "no kernel runs"),
    ]
    assert list(seconds_by_label(timeline, "waiting")) == [
        "host", "cudaStreamSynchronize", "no kernel runs", "wait for weights", "copy in"
    ]  # fmt: skip
    assert busy_seconds_in(timeline, "compute", "forward") == pytest.approx(1.5)
    assert busy_seconds_in(timeline, "compute", "backward") == pytest.approx(2)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 3)), max_size=12)


@given(SPANS, SPANS, SPANS, st.lists(st.integers(0, 12), min_size=12, max_size=12))
def test_waits_of_a_gpu_fill_the_time_without_kernels(
    kernels: list[tuple[int, int, int]],
    blocked: list[tuple[int, int, int]],
    copies: list[tuple[int, int, int]],
    ahead: list[int],
) -> None:
    events = []
    for number, ((start, long, thread), early) in enumerate(zip(kernels, ahead, strict=False)):
        begin = max(0, start - early)
        events += launch("kernel", number, (begin, begin + 0.5), (start, start + long), thread)
    events += [event("wait for weights", start, start + long, tid=thread) for start, long, thread in blocked]
    events += [event("Memcpy HtoD", start, start + long, "gpu_memcpy", 9) for start, long, _ in copies]
    boundaries = marks_of_gpu(start=(0, 0), step_0=(0.1, 0), forward=(0.2, 0), end=(50, 50))
    timeline = read_timeline(events + boundaries, 1, "H100", on_gpu=True)
    waiting = seconds_by_label(timeline, "waiting")
    assert sum(waiting.values()) == pytest.approx(50 * (1 - timeline.busy_share("compute")))
    assert timeline.busy_share("waiting") == pytest.approx(1 - timeline.busy_share("compute"))
