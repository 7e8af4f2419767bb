"""Numbers as people read them."""

import pytest

from lightning_ssd.sizes import format_count, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.000 s"), (12.3456, "12.346 s"), (0.1, "0.100 s"), (0.0461, "46.10 ms")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (859_000, "859K"),
        (1.314e9, "1.31B"),
        (6.65e9, "6.65B"),
        (999_700_000, "1B"),
        (999_999, "1M"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text
