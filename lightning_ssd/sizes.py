"""Byte counts, times and other arguments as people write and read them."""

import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real
from pathlib import Path
from typing import NoReturn

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}{end}": 1000**power for power, prefix in enumerate("kmgt", start=1) for end in ("", "b")}
_UNITS |= {f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("i", "ib")}

LEAST_BUDGET = 10**6
"""Bytes of the smallest budget that needs no unit: a smaller number is probably a forgotten unit."""

GPU_USABLE = 0.92
"""Share of a process's GPU memory that budgets may use. The rest is for fragments and allocations of libraries."""

_LONGEST = 200
"""Characters of a refused value that its message shows."""


def check_least(argument: str, value: float | None, least: float) -> None:
    """Checks the lower bound of a number, unless it is None.

    Raises:
        ValueError: `value` is less than `least`, or NaN; the message names `argument`.
    """
    if value is not None and not value >= least:
        raise ValueError(f"{argument}={value} is out of range: set it to {least} or more")


def check_probability(argument: str, value: float) -> None:
    """Checks the probability of a dropout, which must be below 1.

    Raises:
        ValueError: `value` is not from 0 to below 1; the message names `argument`.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{argument}={value} is not a probability below 1: set it to 0 or more, and below 1")


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raises a ValueError that names the argument, unless `value` is one of `choices`."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{show_argument(argument, value)} must be one of {', '.join(map(repr, choices))}.")


def check_flag(argument: str, value: object) -> None:
    """Raises a TypeError that names the argument, unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{show_argument(argument, value)} is neither True nor False.")


def check_count(argument: str, value: object, least: int) -> None:
    """Raises a TypeError or ValueError that names the argument, unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{show_argument(argument, value)} is no whole number. Give {least} or more.")
    if int(value) < least:
        raise ValueError(f"{show_argument(argument, value)} must be at least {least}.")


def parse_path(argument: str, value: object, example: str) -> Path:
    """Returns a local path as `absolute_path` does.

    Raises:
        TypeError: `value` is neither a string nor a path.
        ValueError: it is empty, not local, or no path. Either message names the argument and an example.
    """
    shown, legal = show_argument(argument, value), f"Give a path such as {example!r}."
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise TypeError(f"{shown} is no path. {legal}")
    if not text.strip() or "\0" in text:
        raise ValueError(f"{shown} is no path. {legal}")
    if "://" in text:
        raise ValueError(f"{shown} is not local. {legal}")
    if text.startswith("~") and os.path.expanduser(text) == text:
        raise ValueError(f"{shown} begins with the name of no user. {legal}")
    return absolute_path(text)


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path that stays the same when the working directory changes; a leading `~` is the user's home."""
    return Path(path).expanduser().absolute()


@dataclass(frozen=True)
class SizeArgument:
    """An argument that is a number of bytes: its legal forms and their parser.

    Legal are an integer, and a number with a unit: `"10GB"` or `"10G"` (powers of 1000), `"10GiB"` or `"10Gi"` (powers
    of 1024), in any case.

    Attributes:
        name: the argument's name, for messages.
        words: words that are legal, too, such as `"auto"`.
        share_of: the quantity that a percentage (`"50%"`) is a share of; `None`: percentages are refused.
        fractions: a number from 0 to 1 without a unit is a share, too.
        least: smallest positive number that needs no unit. A budget of `24` bytes is probably a forgotten unit or
            percent sign; 24 bytes are written `"24B"`.
    """

    name: str
    words: tuple[str, ...] = ()
    share_of: str | None = None
    fractions: bool = False
    least: int = 0

    def parse(self, value: object) -> int | float | str:
        """Returns bytes as `int`, a share from 0 to 1 as `float`, or one of the words.

        Raises:
            TypeError: `value` is neither a number nor a string.
            ValueError: `value` has no legal form, or is out of range. Either message names the argument and its legal
                forms.
        """
        if isinstance(value, str):
            if value in self.words:
                return value
            # The number of digits is limited: no machine has more bytes.
            match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*(%|[a-z]*)\s*", value.lower(), re.ASCII)
            if match is None or match[2] not in {*_UNITS, "%"}:
                self._refuse(value, "is not a number of bytes")
            number, unit = Fraction(match[1]), match[2]
        elif isinstance(value, Real):
            if isinstance(value, bool) or not (isinstance(value, Rational) or math.isfinite(value)):
                self._refuse(value, "is not a number of bytes")
            number, unit = Fraction(value if isinstance(value, Rational) else float(value)), ""
        else:
            raise TypeError(f"{self._shown(value)} is not a number of bytes. {self._legal}")
        if unit == "%":
            if self.share_of is None:
                self._refuse(value, "is a percentage")
            if number > 100:
                self._refuse(value, "is more than all")
            return float(number / 100)
        if not unit and self.fractions and 0 <= number <= 1:
            return float(number)
        nbytes = int(number * _UNITS[unit])
        if number < 0 or (number and not nbytes) or (not unit and nbytes != number):
            self._refuse(value, "is not a number of bytes")
        if not unit and 0 < nbytes < self.least:
            self._refuse(value, f"would be {nbytes} bytes; write '{nbytes}B' if they are meant")
        if nbytes >= 2**63:
            self._refuse(value, "is more bytes than any machine has")
        return nbytes

    def _refuse(self, value: object, problem: str) -> NoReturn:
        raise ValueError(f"{self._shown(value)} {problem}. {self._legal}")

    def _shown(self, value: object) -> str:
        return show_argument(self.name, value)

    @property
    def _legal(self) -> str:
        forms = [repr(word) for word in self.words]
        if self.fractions:
            forms.append("a share from 0.0 to 1.0 such as 0.5 or '50%'")
        elif self.share_of is not None:
            forms.append(f"a share of {self.share_of} such as '50%'")
        forms.append("bytes such as 8589934592 or '8GiB'")
        return f"Give {', '.join(forms[:-1])}, or {forms[-1]}." if len(forms) > 1 else f"Give {forms[0]}."


def parse_bytes(value: int | str, argument: str, least: int = 0) -> int:
    """Returns the bytes that `value` stands for: `8589934592`, `"8GiB"`, `"8.5 GB"`.

    Args:
        least: as in `SizeArgument`.

    Raises:
        TypeError: `value` is neither a number nor a string.
        ValueError: `value` is not a byte count.
    """
    nbytes = SizeArgument(argument, least=least).parse(value)
    assert isinstance(nbytes, int)
    return nbytes


def show_argument(name: str, value: object) -> str:
    """Returns `` `name=value` `` for a message, whatever the value is, at a bounded length."""
    return f"`{name}={show_value(value)}`"


def show_value(value: object) -> str:
    """Returns a value for a message, whatever it is, at a bounded length."""
    try:
        # YAML's aliases can make containers whose complete text would fill the memory.
        text = reprlib.repr(value) if isinstance(value, (Mapping, list, tuple, set)) else repr(value)
    except Exception:  # raised by user classes, and by integers with thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def format_bytes(nbytes: float) -> str:
    """Returns `nbytes` as text in binary units: `"1.50 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def format_bytes_exactly(nbytes: int) -> str:
    """Returns `nbytes` as text in binary units and in bytes: `"1.50 GiB (1610612736 bytes)"`."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def format_seconds(seconds: float) -> str:
    """Returns a time in seconds or milliseconds, such as `0.577 s` or `3.20 ms`."""
    return f"{seconds:.3f} s" if seconds >= 0.1 or not seconds else f"{1e3 * seconds:.2f} ms"


def format_count(count: float) -> str:
    """Returns a count with a decimal suffix, such as `1.31B` or `859K`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:  # numbers that would be rounded to 1000 of a unit are 1 of the next
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
