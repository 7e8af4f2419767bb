"""The names that `lightning_ssd` itself has."""

import importlib

import pytest

import lightning_ssd


def test_an_error_of_the_package_is_shown_as_the_cause_of_a_failed_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AttributeError("'builtin_function_or_method' object has no attribute '__code__'")

    monkeypatch.setattr(lightning_ssd, "import_module", fail)
    with pytest.raises(ImportError, match="SSDOffloadStrategy: 'builtin_function_or_method' object") as caught:
        from lightning_ssd import SSDOffloadStrategy  # noqa: F401
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("name", lightning_ssd.__all__)
def test_public_names_are_found(name: str) -> None:
    assert getattr(importlib.import_module("lightning_ssd"), name).__name__ == name


def test_other_names_are_attribute_errors() -> None:
    assert not hasattr(lightning_ssd, "Strategy")
