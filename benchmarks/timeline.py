"""What every resource does in two steps: a Chrome trace, and a picture like figure 2 of the Fuyou paper."""

import json
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

ROWS = ("GPU", "copy in", "copy out", "SSD read", "SSD write", "CPU optimizer")


class Profile:
    """Records all threads and the GPU between `start` and `stop`."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self, name: str) -> None:
        """Writes `name`.json, for chrome://tracing, and `name`.png.

        The trace has only what the picture shows: a whole one of a step is hundreds of megabytes.
        """
        self._profiler.stop()
        trace = Path(f"{name}.json")
        self._profiler.export_chrome_trace(str(trace))
        rows = read(trace)
        events = [
            {"name": label, "ph": "X", "pid": 0, "tid": row, "ts": start, "dur": duration}
            for row, spans in rows.items()
            for start, duration, label in spans
        ]
        trace.write_text(json.dumps({"traceEvents": events}))
        draw(rows, Path(f"{name}.png"))


def read(trace: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Returns, of each row, the spans in a trace: begin and duration in microseconds, and what it was."""
    rows: dict[str, list[tuple[float, float, str]]] = {row: [] for row in ROWS}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and (row := _row(event)) is not None:
            rows[row].append((event["ts"], event["dur"], event["name"]))
    begin = min(start for spans in rows.values() for start, _, _ in spans)
    return {row: sorted((start - begin, dur, name) for start, dur, name in spans) for row, spans in rows.items()}


def _row(event: dict[str, Any]) -> str | None:
    category, name = event.get("cat"), event["name"]
    if category == "kernel":
        return "GPU"
    if category == "gpu_memcpy":
        return {"HtoD": "copy in", "DtoH": "copy out"}.get(name.split()[1])
    if category == "user_annotation":
        if name.startswith("step "):
            return "CPU optimizer"
        return {"ssd read": "SSD read", "ssd write": "SSD write"}.get(name)
    return None


def draw(rows: dict[str, list[tuple[float, float, str]]], picture: Path) -> None:
    """Draws the rows over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 3.2))
    colors = dict(zip(ROWS, ("tab:green", "tab:blue", "tab:cyan", "tab:olive", "tab:orange", "tab:red"), strict=True))
    for y, (row, spans) in enumerate(rows.items()):
        axes.broken_barh([(start / 1e6, duration / 1e6) for start, duration, _ in spans], (y - 0.4, 0.8),
                         color=colors[row], linewidth=0)  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (two steps)")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
