"""Errors that name a private interface of torch that is missing. `tests/versions` looks up all of them."""

import pytest

from lightning_ssd import torch_internals


def test_a_missing_interface_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals._INTERFACES, "absent", ("torch._C._absent", "do something"))
    with pytest.raises(RuntimeError, match=r"has no `torch\._C\._absent`, which lightning_ssd needs to do something\."):
        getattr(torch_internals, "absent")  # noqa: B009  # as mypy knows no such name
