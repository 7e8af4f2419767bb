"""Records the timeline of training steps by torch's profiler, which records all threads and the GPU.

The timeline has only the events that are work of a resource: a few megabytes for a step instead of hundreds.
"""

import json
import math
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_ssd import torch_internals as internals
from lightning_ssd.spans import COPY_IN, COPY_OUT, OPTIMIZER, SSD_READ, SSD_WRITE, WAIT, name_and_bytes, span
from lightning_ssd.timeline.timeline import COLORS, PHASE_COLORS, Span, Timeline, clip, without

HOST = "host"
"""Label of waiting on a GPU whose next kernel the host has not launched yet, while its threads run."""
LAUNCHED = "launched"
"""Label of waiting on a GPU whose next kernel is launched and has not begun, although no copy has ended meanwhile."""
UNKNOWN = "no kernel runs"
"""Label of waiting on a GPU without a known cause."""

_MARK = "lightning_ssd mark "
_ROW_OF = {SSD_READ: "SSD read", SSD_WRITE: "SSD write", COPY_IN: "copy in", COPY_OUT: "copy out"}


class TimelineProfile:
    """Records a timeline from `start` to `stop`, both on the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.get_native_id()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, experimental_config=internals.profiling_all_threads()
        )
        self._marker: torch.Tensor | None = None
        """Written by a kernel at each mark of a GPU. Nothing reads it, so that streams may write it in any order."""

    def start(self) -> None:
        """Begins to record. A GPU is synchronized first, so that no work before the first mark is in the timeline."""
        self._profiler.start()
        if self._device.type == "cuda":
            with internals.without_dispatch():
                self._marker = torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
        self.mark("start")

    def mark(self, name: str) -> None:
        """Marks the present end of the compute stream, on a CPU the present time.

        The mark of a GPU is a kernel, because the profiler has kernels and no CUDA events. The time of an event has no
        zero that the host knows: a GPU that other processes share executes the first event milliseconds after its
        record.
        """
        with span(f"{_MARK}{name}"), internals.without_dispatch():
            if self._marker is not None:
                self._marker.zero_()

    def stop(self) -> None:
        """Ends the recording. A GPU is synchronized first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()

    def timeline(self, directory: Path) -> Timeline:
        """Returns the recorded timeline, after `stop`. The profiler writes its own trace to a temporary file in
        `directory`.

        Raises:
            OSError: the temporary file can't be written.
            ValueError: the profiler has recorded no kernel of a mark.
        """
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            trace = Path(scratch) / "trace.json"
            self._profiler.export_chrome_trace(str(trace))
            events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
        on_gpu = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
        return read_timeline(events, self._thread, name, on_gpu=on_gpu)


def read_timeline(events: Sequence[dict[str, Any]], thread: int, device: str, *, on_gpu: bool) -> Timeline:
    """Returns the timeline of a trace of torch's profiler, from the first mark in it to the last.

    Args:
        events: complete events of the trace.
        thread: identifier of the training thread in the trace.

    Raises:
        ValueError: the trace of a GPU has no kernel of a mark.
    """
    calls = sorted((event for event in events if _is_mark(event)), key=lambda call: float(call["ts"]))
    works = _kernels_of_marks(events, calls, thread) if on_gpu else calls
    marking = {id(work) for work in works}
    begin = works[0]["ts"] / 1e6
    marks = [
        (work["ts"] / 1e6 - begin, call["name"].removeprefix(_MARK)) for work, call in zip(works, calls, strict=True)
    ]
    seconds = marks[-1][0]
    steps = [(int(name.removeprefix("step ")), at) for at, name in marks if name.startswith("step ")]
    phases = [
        Span(at, until, name)
        for (at, name), (until, _) in zip(marks, [*marks[1:], marks[-1]], strict=True)
        if name in PHASE_COLORS and until > at
    ]
    rows: dict[str, list[Span]] = {row: [] for row in COLORS}
    # For a CPU, operators of the training thread, and its spans of other rows, which may be inside an operator.
    operators: list[Span] = []
    apart: list[Span] = []
    launches = _Launches(thread)
    for event in events:
        start, long = event["ts"] / 1e6 - begin, event["dur"] / 1e6
        name, nbytes = name_and_bytes(event["name"])
        nbytes = event.get("args", {}).get("bytes", nbytes) if event.get("cat") == "gpu_memcpy" else nbytes
        work = Span(max(0.0, start), min(seconds, start + long), name)
        if work.end <= work.start or id(event) in marking:
            continue
        work = work._replace(nbytes=round(nbytes * (work.end - work.start) / long))  # the part in the timeline
        on_training_thread = event.get("tid") == thread
        row = _row_of(event.get("cat"), name, on_gpu=on_gpu, on_training_thread=on_training_thread)
        launches.add(event, work, row)
        if row is not None:
            rows[row].append(work)
            if on_training_thread:
                apart.append(work)
        elif not on_gpu and on_training_thread and event.get("cat") == "cpu_op":
            operators.append(work)
    if on_gpu:
        gaps = without([(0.0, seconds)], rows["compute"])
        rows["waiting"] = launches.causes(gaps, rows["copy in"], rows["copy out"])
    else:
        outermost = _outermost(operators)
        rows["compute"] = clip(outermost, [phase for phase in phases if phase.label in ("forward", "backward")], apart)
        rows["CPU optimizer"] += clip(outermost, [phase for phase in phases if phase.label == "optimizer"], apart)
    for spans in rows.values():
        spans.sort()
    return Timeline(rows, phases, steps, seconds, device, on_gpu)


class _Launches:
    """The launches of kernels by the host, which say why the GPU computes nothing before a kernel begins."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._launched: dict[int, tuple[float, int]] = {}
        """By correlation, the end of a call that launches work, and the thread of the call."""
        self._kernels: dict[float, int] = {}
        """By the begin of a kernel, its correlation."""
        self._blocked: dict[int, list[Span]] = {}
        """By thread, spans in which it waits, or calls a function of CUDA that may block."""

    def add(self, event: dict[str, Any], span: Span, row: str | None) -> None:
        """Notes an event of the trace, with its span and row in the timeline."""
        category, thread = event.get("cat"), event.get("tid", -1)
        correlation = event.get("args", {}).get("correlation")
        if category in ("cuda_runtime", "cuda_driver"):
            if _may_block(span.label):
                self._blocked.setdefault(thread, []).append(span)
            elif correlation is not None:
                self._launched[correlation] = span.end, thread
        elif row == "compute" and correlation is not None:
            self._kernels[span.start] = correlation
        elif category in ("cpu_op", "user_annotation") and span.label.startswith(WAIT):
            self._blocked.setdefault(thread, []).append(span)

    def causes(
        self, gaps: Iterable[tuple[float, float]], copies_in: Sequence[Span], copies_out: Sequence[Span]
    ) -> list[Span]:
        """Returns the parts of the gaps between kernels, each labeled with what the kernel after it has waited for.

        Until the kernel's launch, that is the host: the wait or the blocking call of the launching thread or of the
        training thread, or else `HOST`. After the launch, it is the copy that ended last before the kernel began, or
        else `LAUNCHED`.
        """
        found: list[Span] = []
        on_host: dict[int, list[Span]] = {}
        copies = sorted([(copy.end, "copy in") for copy in copies_in] + [(copy.end, "copy out") for copy in copies_out])
        for start, end in gaps:
            at, thread = self._launched.get(self._kernels.get(end, -1), (None, -1))
            if at is None:
                found.append(Span(start, end, UNKNOWN))
                continue
            at = min(max(at, start), end)
            if at > start:
                on_host.setdefault(thread, []).append(Span(start, at, HOST))
            if end > at:
                last = bisect_right(copies, (end, "d")) - 1  # sorts after the names of copies
                ended, direction = copies[last] if last >= 0 else (-math.inf, "")
                found.append(Span(at, end, direction if ended > at else LAUNCHED))
        for thread, parts in on_host.items():
            blocked = _outermost(wait for of in {thread, self._thread} for wait in self._blocked.get(of, ()))
            found += clip(blocked, parts, ())
            found += [Span(*gap, HOST) for gap in without([(part.start, part.end) for part in parts], blocked)]
        return found


def _may_block(call: str) -> bool:
    """Returns whether a function of CUDA may block its thread until the device has reached a point, or for long."""
    return call.endswith("Synchronize") or call.startswith(("cudaMalloc", "cudaFree", "cudaHost"))


def _is_mark(event: dict[str, Any]) -> bool:
    """Returns whether an event is a mark on the host: the profiler also has the mark's name for its kernel."""
    return str(event["name"]).startswith(_MARK) and event.get("cat") != "gpu_user_annotation"


def _kernels_of_marks(
    events: Iterable[dict[str, Any]], calls: Sequence[dict[str, Any]], thread: int
) -> list[dict[str, Any]]:
    """Returns the kernel that each mark has launched: the kernel has the id of an operator within the mark."""
    kernels = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") in ("kernel", "gpu_memset") and "External id" in event.get("args", {})
    }
    starts = [call["ts"] for call in calls]
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") != "cpu_op" or event["tid"] != thread:
            continue
        kernel = kernels.get(event.get("args", {}).get("External id"))
        number = bisect_right(starts, event["ts"]) - 1
        if kernel is not None and number >= 0 and event["ts"] <= starts[number] + calls[number]["dur"]:
            found[number] = kernel
    for number, call in enumerate(calls):
        if number not in found:
            raise ValueError(f"the profiler has recorded no kernel of {call['name']!r}")
    return [found[number] for number in range(len(calls))]


def _row_of(category: str | None, name: str, *, on_gpu: bool, on_training_thread: bool) -> str | None:
    """Returns the row of an event of a trace, or None if it has none or is an operator of the CPU."""
    if category in ("kernel", "gpu_memset"):
        return "compute"
    if category == "gpu_memcpy":
        return {"HtoD": "copy in", "DtoH": "copy out"}.get(name.split()[1], "compute")
    if category not in ("cpu_op", "user_annotation"):
        return None
    if name in _ROW_OF:
        return _ROW_OF[name]
    if name.startswith(OPTIMIZER):
        return "CPU optimizer"
    return "waiting" if name.startswith(WAIT) and on_training_thread and not on_gpu else None


def _outermost(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans of one thread that are not inside another span."""
    found: list[Span] = []
    for item in sorted(spans, key=lambda span: (span.start, -span.end)):
        if not found or item.start >= found[-1].end:
            found.append(item)
    return found
