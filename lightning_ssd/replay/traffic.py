"""Bandwidth over time: the transfers of a planned step, from a simulation, and of a recorded one (Teraio, figure 8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ssd.planning import (
    COPY_IN,
    COPY_OUT,
    SSD,
    HardwareProfile,
    ModelProfile,
    Plan,
    as_mapping,
    load_json,
    simulate_tasks,
)
from lightning_ssd.sizes import format_bytes

DIRECTIONS = ("copy out", "SSD write", "copy in", "SSD read")
"""Directions of transfers: the first two are from the GPU, the others to it. The names are those of a timeline."""


class Transfer(NamedTuple):
    """Bytes that are transferred from `start` to `end`, seconds from the begin."""

    start: float
    end: float
    nbytes: float


@dataclass(frozen=True)
class Traffic:
    """The transfers of one or more steps.

    Attributes:
        seconds: duration of the steps.
        transfers: transfers of each direction in `DIRECTIONS`.
        steps: begins of the steps, seconds.
    """

    seconds: float
    transfers: Mapping[str, Sequence[Transfer]]
    steps: tuple[float, ...] = (0.0,)

    def mean(self, direction: str) -> float:
        """Returns the mean bytes/s of a direction."""
        return sum(one.nbytes for one in self.transfers[direction]) / self.seconds

    def bandwidth(self, direction: str, count: int) -> list[float]:
        """Returns the bytes/s of a direction in each of `count` equal intervals."""
        width = self.seconds / count
        nbytes = [0.0] * count
        for start, end, size in self.transfers[direction]:
            first, last = (min(count - 1, max(0, int(one / width))) for one in (start, end))
            for index in range(first, last + 1):
                inside = min(end, (index + 1) * width) - max(start, index * width)
                nbytes[index] += size * (inside / (end - start) if last > first else 1.0)
        return [max(0.0, one) / width for one in nbytes]

    def describe(self) -> str:
        """Returns a line: bytes of each direction in a step, and their mean bandwidth."""
        return ", ".join(
            f"{direction} {format_bytes(round(self.mean(direction) * self.seconds / len(self.steps)))} "
            f"({self.mean(direction) / 1e9:.2f} GB/s)"
            for direction in DIRECTIONS
        )


def planned_traffic(model: ModelProfile, hardware: HardwareProfile, plan: Plan) -> Traffic:
    """Returns the transfers of a simulated step in the steady state, arguments as in `simulate`."""
    tasks, begin, end = simulate_tasks(model, hardware, plan)
    found: dict[str, list[Transfer]] = {direction: [] for direction in DIRECTIONS}
    copies = {COPY_IN: "copy in", COPY_OUT: "copy out"}
    for task in tasks:
        first, last = max(begin, task.begin), min(end, task.end)
        if last <= first or task.resource not in (COPY_IN, COPY_OUT, SSD):
            continue
        name = copies.get(task.resource, "SSD write" if task.write else "SSD read")
        part = (last - first) / (task.end - task.begin)  # transfers of the step before may end in this one
        found[name].append(Transfer(first - begin, last - begin, part * task.amount))
    return Traffic(end - begin, found)


def recorded_traffic(path: str | Path) -> Traffic:
    """Returns the transfers of the steps that `TimelineRecorder` has recorded in the Chrome trace `path`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no trace of `TimelineRecorder`, or one of an earlier version, without bytes.
    """
    where = f"the timeline {path}"
    content = as_mapping(load_json(path, where), where)
    remedy = "Record it again with TimelineRecorder of this version."
    try:
        seconds = float(content["otherData"]["seconds"])
        events: list[dict[str, Any]] = content["traceEvents"]
        rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        steps = tuple(event["ts"] / 1e6 for event in events if event["ph"] == "i")
        found: dict[str, list[Transfer]] = {direction: [] for direction in DIRECTIONS}
        for event in events:
            if event["ph"] == "X" and rows[event["tid"]] in found and "args" in event:
                start = event["ts"] / 1e6
                end = start + event["dur"] / 1e6
                found[rows[event["tid"]]].append(Transfer(start, end, event["args"]["bytes"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where} has no transfers with their bytes. {remedy}") from error
    if not seconds > 0 or not steps:
        raise ValueError(f"{where} has no step. {remedy}")
    return Traffic(seconds, found, steps)
