"""Overridden methods of Lightning's classes are marked, so that a type checker notices when one is renamed."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_ssd

PACKAGE = Path(lightning_ssd.__file__).parent


def functions(value: Any) -> list[Any]:
    """Returns the functions of a method or property."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if function is not None]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    return [value] if inspect.isfunction(value) else []


def test_overridden_methods_are_marked() -> None:
    checked = 0
    for file in PACKAGE.rglob("*.py"):
        module = import_module(".".join(("lightning_ssd", *file.relative_to(PACKAGE).with_suffix("").parts)))
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            bases = [one for one in cls.__mro__[1:] if one.__module__.startswith(("lightning.", "pytorch_lightning."))]
            for name, value in vars(cls).items():
                if not name.startswith("__") and any(name in vars(base) for base in bases):
                    for function in functions(value):
                        assert getattr(function, "__override__", False), f"{cls.__name__}.{name}"
                        checked += 1
    assert checked > 50
