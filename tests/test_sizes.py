"""Numbers in readable form."""

import numpy as np
import pytest

from lightning_ssd.sizes import SizeArgument, format_count, format_seconds


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


SHARE = SizeArgument("memory", ("auto",), share_of="the memory", least=2**20)
AMOUNT = SizeArgument("offload", ("auto", "none"), share_of="the bytes", fractions=True, least=2**20)
COUNT = SizeArgument("count")


@pytest.mark.parametrize(
    ("argument", "value", "meaning"),
    [
        *((COUNT, text, 10 * 1000**3) for text in ("10G", "10GB", "10 gb", " 10.0GB ", 10**10, 1e10, "10000000000")),
        *((COUNT, text, 10 * 1024**3) for text in ("10Gi", "10GiB", "10gib")),
        *((COUNT, value, value) for value in (0, 1, 24, 2**62)),
        (COUNT, np.int64(7), 7),
        (COUNT, ".5k", 500),
        (COUNT, "9007199254740993B", 2**53 + 1),
        (SHARE, "auto", "auto"),
        (SHARE, "50%", 0.5),
        (SHARE, "12.5 %", 0.125),
        (SHARE, "24B", 24),
        (SHARE, 0, 0),
        (SHARE, 2**20, 2**20),
        *((AMOUNT, value, 0.5) for value in (0.5, "0.5", "50%", ".5", np.float32(0.5))),
        *((AMOUNT, value, 1.0) for value in (1, 1.0, "1", "100%")),
        (AMOUNT, "8GiB", 8 * 2**30),
    ],
)
def test_sizes(argument: SizeArgument, value: object, meaning: object) -> None:
    parsed = argument.parse(value)
    assert parsed == meaning and type(parsed) is type(meaning)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (COUNT, "50%", r"`count='50%'` is a percentage\. Give bytes such as 8589934592 or '8GiB'\."),
        (COUNT, "much", "is not a number of bytes"),
        (COUNT, True, "is not a number of bytes"),
        (COUNT, "1e9", "is not a number of bytes"),
        (COUNT, -1, "is not a number of bytes"),
        (COUNT, 0.5, "is not a number of bytes"),
        (COUNT, "0.4B", "is not a number of bytes"),
        (COUNT, float("nan"), "is not a number of bytes"),
        (COUNT, float("inf"), "is not a number of bytes"),
        (COUNT, "9" * 20, "is more bytes than any machine has"),
        pytest.param(COUNT, 10**5000, "`count=<int>` is more bytes than any machine has", id="digits"),
        (COUNT, "9" * 5000, "is not a number of bytes"),
        (SHARE, 0.5, r"is not a number of bytes\. Give 'auto', a share of the memory such as '50%', or bytes such as"),
        (SHARE, "24", "`memory='24'` would be 24 bytes; write '24B' if they are meant"),
        (SHARE, 24, "would be 24 bytes"),
        (SHARE, "101%", "is more than all"),
        (
            AMOUNT,
            50,
            r"would be 50 bytes.*Give 'auto', 'none', a share from 0.0 to 1.0 such as 0.5 or '50%', or bytes such as",
        ),
        (AMOUNT, 1.5, "is not a number of bytes"),
        (AMOUNT, "all", "is not a number of bytes"),
    ],
)
def test_refused_sizes(argument: SizeArgument, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argument.parse(value)


@pytest.mark.parametrize("value", [None, b"8GiB", [8], object(), 1j])
def test_sizes_of_another_type(value: object) -> None:
    with pytest.raises(TypeError, match=r"`memory=.*is not a number of bytes\. Give 'auto', a share"):
        SHARE.parse(value)
