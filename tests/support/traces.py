"""Reads traces that `TimelineRecorder` wrote."""

import json
from pathlib import Path
from typing import Any


def spans(trace: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the spans of each row of a written trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] > 0
            found[names[event["tid"]]].append(event)
    return found


def labels(rows: dict[str, list[dict[str, Any]]], row: str) -> list[str]:
    return [event["name"] for event in sorted(rows[row], key=lambda event: event["ts"])]
