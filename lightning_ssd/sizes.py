"""Byte counts, times and other numbers as people write and read them."""

import re

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(value: int | str, argument: str) -> int:
    """Returns the bytes that `value` stands for: `8589934592`, `"8GiB"`, `"8.5 GB"`.

    Args:
        value: the count.
        argument: name of the argument that it was given for, for the message.

    Raises:
        ValueError: `value` is not a byte count.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"`{argument}={value!r}` is not a number of bytes. Write it like 8589934592 or '8GiB'.")
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(float(match[1]))


def format_bytes(nbytes: float) -> str:
    """Returns `nbytes` for a person to read, in binary units: `"1.50 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def format_bytes_exactly(nbytes: int) -> str:
    """Returns `nbytes` for a person to read, and to type: `"1.50 GiB (1610612736 bytes)"`."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def format_seconds(seconds: float) -> str:
    """Returns a time with a unit that suits it, such as `0.577 s` or `3.20 ms`."""
    return f"{seconds:.3f} s" if seconds >= 0.1 or not seconds else f"{1e3 * seconds:.2f} ms"


def format_count(count: float) -> str:
    """Returns a count with a unit that suits it, such as `1.31B` or `859K`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:  # what is rounded to 1000 of a unit is 1 of the next
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
