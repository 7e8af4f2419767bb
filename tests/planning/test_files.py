"""Damaged and invented files of plans, machines and models: a loaded file is valid, or one error names the file."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import HardwareProfile, ModelProfile, Plan, UnitPlan, validation
from lightning_ssd.replay import LifetimeProfile, OperatorSpan, TensorLifetime
from tests.support.profiles import H100, make_model

MODEL = make_model(1)
PLAN = Plan({unit.name: UnitPlan("ssd", "ssd", "keep", {"work": "recompute"}) for unit in MODEL.units}, 100, 200)


class Kind:
    """One kind of file: its text, its loader, and how its content is written."""

    def __init__(self, text: str, load: Callable[[Path], Any], save: Callable[[Any, Path], object], dump: Any) -> None:
        self.text, self.load, self.save, self.dump = text, load, save, dump
        self.content = yaml.safe_load(text) if dump is yaml.safe_dump else json.loads(text)


LIFETIMES = LifetimeProfile(
    "model",
    (OperatorSpan("work", "forward", 0.0, 1.0), OperatorSpan("work", "backward", 1.0, 3.0)),
    (TensorLifetime(1, "unit", "weight", 8, (0, 1), unit="unit"),
     TensorLifetime(2, "work", "saved tensor", 8, (0, 1), 0, 1)),
)  # fmt: skip
KINDS = {
    "machine": Kind(json.dumps(asdict(H100)), HardwareProfile.from_json, HardwareProfile.to_json, json.dumps),
    "model": Kind(json.dumps(asdict(MODEL)), ModelProfile.from_json, ModelProfile.to_json, json.dumps),
    "lifetimes": Kind(
        json.dumps({"version": 2, **asdict(LIFETIMES)}), LifetimeProfile.from_json, LifetimeProfile.to_json, json.dumps
    ),
    "plan": Kind(PLAN.to_yaml(), Plan.load, Plan.save, yaml.safe_dump),
}
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def check(kind: Kind, content: str | bytes, path: Path) -> str | None:
    """Returns the error's message; None: the file loads as an object that can be saved and loaded again."""
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    try:
        loaded = kind.load(path)
    except ValueError as error:
        assert str(path) in str(error)
        assert len(str(error)) < 3000
        return str(error)
    loaded.describe()
    kind.save(loaded, path)
    assert kind.load(path) == loaded
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("files")


@KIND
def test_a_valid_file_loads(kind: Kind, tmp_path: Path) -> None:
    assert check(kind, kind.text, tmp_path / "file") is None


@KIND
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "mapping|not JSON"),
        (b"null", "must be a mapping"),
        (b"[]", "must be a mapping"),
        (b"3", "must be a mapping"),
        (b"{", "is not (JSON|YAML)"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"[" * 20_000, "nested too deeply"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b"9" * 5_000, "is not (JSON|YAML)|must be a mapping"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_contents_that_are_none(kind: Kind, content: bytes, message: str, tmp_path: Path) -> None:
    found = check(kind, content, tmp_path / "file")
    assert found is not None
    pytest.raises(ValueError, kind.load, tmp_path / "file").match(message)


@KIND
def test_paths_that_are_no_files(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory, a pipe without a writer, a file that is too large, and a missing file."""
    os.mkfifo(tmp_path / "fifo")
    for name in (".", "fifo"):
        with pytest.raises(ValueError, match=rf"{tmp_path / name} is not a file"):
            kind.load(tmp_path / name)
    (tmp_path / "file").write_text(kind.text)
    monkeypatch.setattr(validation, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=rf"{tmp_path}/file has \d+ bytes, and at most 100 are read"):
        kind.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        kind.load(tmp_path / "absent")


@KIND
def test_files_are_saved_in_folders_that_do_not_exist(kind: Kind, tmp_path: Path) -> None:
    """A training writes a plan or profile after it has measured its steps, and must not fail then."""
    (tmp_path / "file").write_text(kind.text)
    loaded, saved = kind.load(tmp_path / "file"), tmp_path / "new" / "folder" / "file"
    kind.save(loaded, saved)
    assert kind.load(saved) == loaded


def paths(content: Any) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in nested mappings and lists."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield (key,)
        for rest in paths(value):
            yield (key, *rest)


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 1.5, -0.0, 10**400, -(10**400), 2**63, 10**31, 1e300),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "9" * 400, "1e999", "12 parsecs", "keep", "gpu", "ssd", "nan", "\u0000", "\U0001f4be", "-1GiB"),
    *([], {}, [1], ["x"], {"x": 1}, deep(50)),
]


@pytest.mark.quick_cases(1)
@KIND
def test_every_value_of_every_kind(kind: Kind, tmp_path: Path) -> None:
    """Each value of a valid file is replaced: the file loads, or one error names the file and the key."""
    for path in paths(kind.content):
        for junk in JUNK:
            content = copy.deepcopy(kind.content)
            owner = content
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = junk
            message = check(kind, kind.dump(content), tmp_path / "file")
            names = [str(key) for key in path if isinstance(key, str)]
            assert message is None or names[-1] in message or "work" in message or "unit" in message, (path, junk)


@KIND
def test_keys_that_are_missing_unknown_or_twice(kind: Kind, tmp_path: Path) -> None:
    for path in [(), *paths(kind.content)]:
        content = copy.deepcopy(kind.content)
        owner = content
        for key in path:
            owner = owner[key]
        if isinstance(owner, dict):
            owner["cheese"] = 3
            message = check(kind, kind.dump(content), tmp_path / "file")
            assert message is not None and "cheese" in message, path
            for key in [key for key in owner if key != "cheese"]:
                value = owner.pop(key)
                del owner["cheese"]
                message = check(kind, kind.dump(content), tmp_path / "file")
                assert message is None or key in message or str(path[-1:] and path[-1]) in message, (path, key)
                owner[key] = value
                owner["cheese"] = 3
    for name in ("ssd_read", "flops", "clip"):
        text = kind.text.replace(f'"{name}":', f'"{name}": 5, "{name}":', 1) if kind.dump is json.dumps else (
            kind.text.replace(f"{name}:", f"{name}: off\n{name}:", 1)
        )  # fmt: skip
        if text != kind.text:
            message = check(kind, text, tmp_path / "file")
            assert message is not None and f"'{name}' occurs twice" in message


TOKENS = [
    *(b"&a ", b"*a", b"!!int ", b"!!float ''", b"!!bool x", b"!!timestamp x", b"!!python/object:os.system ", b"<<: "),
    *(b"? ", b"- ", b"0x", b"1_0", b"1:20", b"2001-99-99", b"~", b"NaN", b"1e999", b'"', b"{", b"\n"),
]


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """Returns `text` with a few bytes changed, removed, doubled or inserted."""
    content = bytearray(text.encode())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        end = start + draw(st.sampled_from([1, 1, 2, 10, 200]))
        what = draw(st.sampled_from(["flip", "remove", "double", "insert", "cut", "token"]))
        if what == "flip" and content:
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif what == "remove":
            del content[start:end]
        elif what == "double":
            content[start:start] = content[start:end]
        elif what == "insert":
            content[start:start] = draw(st.binary(max_size=8))
        elif what == "token":
            content[start:start] = draw(st.sampled_from(TOKENS))
        else:
            del content[start:]
    return bytes(content)


@KIND
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files(kind: Kind, folder: Path, data: st.DataObject) -> None:
    check(kind, data.draw(damaged(kind.text)), folder / "file")


@pytest.mark.thorough
@KIND
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_damaged_files_thoroughly(kind: Kind, folder: Path, data: st.DataObject) -> None:
    check(kind, data.draw(damaged(kind.text)), folder / "file")


def test_aliases_that_would_fill_the_memory(tmp_path: Path) -> None:
    """A message shows the beginning of a value."""
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40))
    text = PLAN.to_yaml().replace("clip: 'off'", "clip: *a39") + "\n"
    message = check(KINDS["plan"], bomb + text, tmp_path / "file")
    assert message is not None and "`a0`" in message or "clip" in str(message)
    nested = text.replace("clip: *a39", "clip: " + "[" * 30 + "&b [x]" + "]" * 30)
    assert "`clip=" in str(check(KINDS["plan"], nested, tmp_path / "file"))


def test_the_machine_files_of_configs_load() -> None:
    machines = list((Path(__file__).parents[2] / "configs" / "machines").glob("*.json"))
    assert machines
    for path in machines:
        HardwareProfile.from_json(path).describe()
