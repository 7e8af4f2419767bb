"""The timeline of training steps: the activity of every resource, as a Chrome trace and as a picture."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COLORS = {
    "compute": "#2a7f3f",
    "copy in": "#1f77b4",
    "copy out": "#17a2b8",
    "SSD read": "#8c6d1f",
    "SSD write": "#e6861a",
    "CPU optimizer": "#c0392b",
    "waiting": "#8a8a8a",
}
"""Rows of a timeline, from the top."""

PHASE_COLORS = {"forward": "#cfe8cf", "backward": "#cfdcf0", "optimizer": "#f3d3cf", "validation": "#eeeeee"}

BETWEEN = "between"
"""The phase between two batches: data, logging, checkpoints."""


class Span(NamedTuple):
    """Work of one resource. Seconds count from the begin of the timeline.

    Attributes:
        label: name of the work.
        nbytes: bytes of a copy, or of a read or write of an SSD; 0 for other work.
    """

    start: float
    end: float
    label: str
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """The activity of every resource in some training steps.

    Attributes:
        rows: spans of work for each name in `COLORS`, in the order of their begin. They may overlap.
        phases: phases of the training thread (on a GPU: of the compute stream), named as in `PHASE_COLORS`.
        steps: number and begin (seconds) of every step.
        on_gpu: whether the steps were computed on a GPU.
    """

    rows: dict[str, list[Span]]
    phases: list[Span]
    steps: list[tuple[int, float]]
    seconds: float
    device: str
    on_gpu: bool

    def busy_share(self, row: str) -> float:
        """Returns the share of the time in which there was work in a row."""
        return sum(end - start for start, end in union(self.rows[row])) / self.seconds if self.seconds else 0.0

    def save_trace(self, path: Path) -> None:
        """Writes a Chrome trace (JSON), for chrome://tracing and ui.perfetto.dev. Transfers have their bytes."""
        names = ["phases", *self.rows]
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
            for number, name in enumerate(names)
        ]
        for number, spans in enumerate([self.phases, *self.rows.values()]):
            for start, end, label, nbytes in spans:
                event = {"name": label, "ph": "X", "pid": 0, "tid": number, "ts": 1e6 * start}
                event |= {"dur": 1e6 * (end - start)} | ({"args": {"bytes": nbytes}} if nbytes else {})
                events.append(event)
        events += [
            {"name": f"step {step}", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": 1e6 * start}
            for step, start in self.steps
        ]
        whole = {"seconds": self.seconds, "device": self.device}
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": whole}))

    def save_picture(self, path: Path) -> None:
        """Writes a picture (PNG).

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(12, 4))  # without pyplot, which would change the user's backend and figures
        axes = figure.subplots()
        # Spans that are closer than half a pixel are drawn as one.
        near = self.seconds / 2400
        for start, end, phase, _ in self.phases:
            axes.broken_barh([(start, end - start)], (-1.4, 0.8), color=PHASE_COLORS[phase], linewidth=0)
            if end - start > self.seconds / 14:
                axes.text((start + end) / 2, -1, phase, ha="center", va="center", fontsize=8)
        for y, (row, spans) in enumerate(self.rows.items()):
            bars = [(start, max(end - start, near / 2)) for start, end in union(spans, near)]
            axes.broken_barh(bars, (y - 0.4, 0.8), color=COLORS[row], linewidth=0)
        for step, start in self.steps:
            axes.axvline(start, color="black", linewidth=0.8, linestyle="--")
            axes.text(start, -1.55, f" step {step}", ha="left", va="bottom", fontsize=8)
        axes.set_yticks([-1, *range(len(self.rows))], ["phase", *(self._tick(row) for row in self.rows)])
        axes.set_ylim(len(self.rows) - 0.4, -2.1)
        axes.set_xlim(0, self.seconds)
        axes.set_xlabel("seconds")
        axes.set_title(f"{self.device}; share of the time that each resource is busy", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        found = {phase.label for phase in self.phases}
        patches = [Patch(color=PHASE_COLORS[phase], label=phase) for phase in PHASE_COLORS if phase in found]
        patches += [Patch(color=COLORS[row], label=text) for row, text in self._legend().items()]
        figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.15, 1, 1))
        figure.savefig(path, dpi=110, format="png")

    def _tick(self, row: str) -> str:
        share = self.busy_share(row)
        return f"{row}  {share:4.0%}" if self.rows[row] else f"{row}    -"

    def _legend(self) -> dict[str, str]:
        """Returns a description of each row."""
        return {
            "compute": "compute: GPU kernels" if self.on_gpu else "compute: operators of forward and backward",
            "copy in": "copy in: host memory to device",
            "copy out": "copy out: device to host memory",
            "SSD read": "SSD read",
            "SSD write": "SSD write",
            "CPU optimizer": "CPU optimizer: steps on the CPU",
            "waiting": "waiting: no kernel runs" if self.on_gpu else "waiting: the training thread is blocked",
        }


def clip(spans: Iterable[Span], to: Iterable[Span], apart: Iterable[Span]) -> list[Span]:
    """Returns the parts of `spans` that are within `to` and outside of `apart`."""
    outside = without([(item.start, item.end) for item in to], apart)
    result: list[Span] = []
    first = 0
    for item in sorted(spans):
        while first < len(outside) and outside[first][1] <= item.start:
            first += 1
        index = first
        while index < len(outside) and outside[index][0] < item.end:
            start, end = outside[index]
            result.append(Span(max(start, item.start), min(end, item.end), item.label))
            index += 1
    return result


def without(whole: Iterable[tuple[float, float]], spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns the parts of the non-overlapping intervals `whole` that are outside of all spans."""
    busy = union(spans)
    parts: list[tuple[float, float]] = []
    first = 0
    for start, end in sorted(whole):
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        index = first
        while index < len(busy) and busy[index][0] < end:
            if busy[index][0] > start:
                parts.append((start, busy[index][0]))
            start = busy[index][1]
            index += 1
        if start < end:
            parts.append((start, end))
    return parts


def union(spans: Iterable[Span], near: float = 0.0) -> list[tuple[float, float]]:
    """Returns the intervals that spans cover, in order. Intervals at most `near` seconds apart are merged."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((item.start, item.end) for item in spans):
        if found and start <= found[-1][1] + near:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
