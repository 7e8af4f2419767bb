"""Arguments of the strategy, the callbacks and `register_optimizer`: each value has its meaning, or is refused."""

import inspect
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some

import lightning_ssd
from lightning_ssd import ActivationOffload, SSDOffloadStrategy
from lightning_ssd.activations.config import OffloadConfig
from lightning_ssd.model_states import StatesConfig
from lightning_ssd.storage import Backend
from tests.support.faults import FaultyBackend

LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
"""Arguments of every strategy, which Lightning checks."""

WORDS = {
    "tier": ("ssd", "host"),
    "spill": ("host_first", "ssd_first"),
    "backend": ("auto", "posix", "kvikio"),
    "states": ("auto", "gpu", "host", "ssd"),
    "overlap": ("optimized", "naive", "none"),
    "state_format": ("fp32", "split", "bf16", "8bit"),
    "clip": ("auto", "deferred", "speculative"),
    "checkpoints": ("file", "sharded"),
}
SIZES = {
    "offload": ("auto", "none"),
    "host_memory": ("auto",),
    "gpu_memory": ("auto",),
    "ssd_capacity": (None,),
    "min_bytes": (),
    "staging_memory": (),
}
FLAGS = ("checksum", "compile", "recover")
ARGUMENTS = sorted(set(inspect.signature(SSDOffloadStrategy).parameters) - LIGHTNINGS)

TEXTS = ["", " ", "50%", "150%", "-5%", "all", "10G", "10GB", "10GiB", "24", "0.5", "1.5", "8 GiB", "s3://a"]
NUMBERS = [True, False, 0, 1, 2, 50, 2**20, 2**40, 2**70, -1, 10**5000]
OTHERS = [None, b"x", 1j, object(), torch.tensor(1), {"find_unused": True}, {"find_unused_parameters": True}]
PATHS = [Path("/nvme0"), Path(""), ["/nvme0", "/nvme1"], [], [""], [5], ["a", None], ("Block",)]
VALUES = some.one_of(
    some.sampled_from(sorted({word for words in WORDS.values() for word in words})),
    *(some.sampled_from(values) for values in (TEXTS, NUMBERS, OTHERS, PATHS)),
    some.integers(),
    some.floats(),
    some.text(max_size=8),
    some.builds("{}{}".format, some.integers(0, 10**6) | some.floats(0, 1e6), some.text(max_size=3)),
)


def test_the_tables_name_every_argument() -> None:
    assert {*ARGUMENTS} == {*WORDS, *SIZES, *FLAGS, "ddp", "path", "units"}
    assert {*inspect.signature(ActivationOffload).parameters} < {*ARGUMENTS}


@settings(max_examples=30, deadline=None)
@given(VALUES)
@example("~no-user")
@example({"find_unused": True})
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_value_has_a_meaning_or_is_refused(argument: str, value: Any) -> None:
    for owner in (SSDOffloadStrategy, ActivationOffload):
        if argument in inspect.signature(owner).parameters:
            try:
                made = owner(**{argument: value})
            except (TypeError, ValueError) as error:
                assert f"`{argument}=" in str(error)
                assert _shows_a_legal_value(owner, argument, str(error))
            else:
                assert _has_a_meaning(made, argument, value)


def _shows_a_legal_value(owner: Any, argument: str, message: str) -> bool:
    legal = {
        **{name: repr(words[0]) for name, words in WORDS.items()},
        **dict.fromkeys(SIZES, "'8GiB'"),
        **dict.fromkeys(FLAGS, "True"),
        "ddp": "{'find_unused_parameters': True}",
        "path": "'/nvme0'",
        "units": "['GPT2Block']",
        "staging_memory": "GiB'",
    }[argument]
    return legal in message


def _has_a_meaning(made: Any, argument: str, value: Any) -> bool:
    if argument in WORDS:
        return value in WORDS[argument] or isinstance(value, Backend)
    if argument in FLAGS:
        return isinstance(value, bool)
    if argument == "ddp":
        return value is None or dict(value).keys() <= {"find_unused_parameters"}
    if argument == "units":
        return value is None or (not isinstance(value, str) and all(isinstance(name, str) and name for name in value))
    if argument == "path":
        paths = made.config.paths(".")
        return bool(paths) and all(isinstance(path, Path) and "://" not in str(path) for path in paths)
    if any(value is word or value == word for word in SIZES[argument]):
        return True
    if argument == "min_bytes" or _has_unit(value):
        return True  # tests/test_sizes.py tests the meaning of each string
    return argument == "offload" and float(value) <= 1


CALLBACKS = ("ModelProfiler", "OffloadMonitor", "PrefetchScheduler", "SaveFolder", "SwapPlanner", "TimelineRecorder")
GIVEN: dict[str, Any] = {"ModelProfiler": {"path": "profile.json"}}
"""Arguments that a callback must be given."""
KINDS: dict[str, tuple[str, ...]] = {
    "count": ("warm_up", "steps", "step", "depth", "every_n_steps"),
    "flag": ("progress_bar", "loggers"),
    "path": ("plan", "machine", "save", "path", "lifetimes", "folder"),
    "size": ("gpu_memory", "ssd_bytes_per_day", "window_bytes", "max_window_bytes", "endurance"),
    "word": ("planner",),
}
BUDGETS = ("gpu_memory", "ssd_bytes_per_day", "endurance")
"""Sizes of which a small number is probably a forgotten unit."""
LEGAL = {
    "count": "",
    "flag": "True",
    "path": "Give a path such as '",
    "size": "GiB'",
    "word": "'lohan'",
}
"""Text of a legal value, which the message shows."""


def _parameters(callback: str) -> list[str]:
    return list(inspect.signature(getattr(lightning_ssd, callback)).parameters)


def test_the_table_names_every_argument_of_callbacks() -> None:
    others = {"ActivationOffload", "MicroBatchSwitch", "SSDOffloadStrategy", "follow_stages", "register_optimizer"}
    others |= {"tensor_locations"}
    assert {*CALLBACKS} | others == {*lightning_ssd.__all__}
    named = {name for callback in CALLBACKS for name in _parameters(callback)}
    assert named == {name for names in KINDS.values() for name in names}


@settings(max_examples=30, deadline=None)
@given(VALUES)
@example(3)
@example(10**400)
@example(10**5000)  # of more digits than `str` shows
@example(torch.tensor([1, 2]))
@example("s3://bucket/file")
@pytest.mark.parametrize(("callback", "argument"), [(one, name) for one in CALLBACKS for name in _parameters(one)])
def test_a_value_of_a_callback_has_a_meaning_or_is_refused(callback: str, argument: str, value: Any) -> None:
    kind = next(kind for kind, names in KINDS.items() if argument in names)
    try:
        getattr(lightning_ssd, callback)(**{**GIVEN.get(callback, {}), argument: value})
    except (TypeError, ValueError) as error:
        assert f"`{argument}=" in str(error) or (argument in ("plan", "machine") and _is_path(value))
        assert LEGAL[kind] in str(error) or _is_path(value)
    except OSError:
        assert argument in ("plan", "machine") and _is_path(value)
    else:
        optional = inspect.signature(getattr(lightning_ssd, callback)).parameters[argument].default is None
        assert (value is None and optional) or _is_legal(kind, argument, value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value).strip()) and "://" not in str(value)


def _has_unit(value: Any) -> bool:
    """Also if it needs none."""
    bare = not isinstance(value, str) or value.strip().replace(".", "").isdigit()
    return not bare or float(value) == 0 or float(value) >= 10**6


def _is_legal(kind: str, argument: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "count":
        return number and value >= 0 and isinstance(value, int)
    if kind == "size":
        return (number or isinstance(value, str)) and (argument not in BUDGETS or _has_unit(value))
    legal = {"flag": isinstance(value, bool), "path": _is_path(value), "word": isinstance(value, str)}
    return legal[kind]


@pytest.mark.parametrize("cls", [None, 3, "AdamW", torch.nn.Linear, torch.optim.SGD([torch.ones(1)])])
def test_a_registered_optimizer_is_a_class_of_optimizers(cls: Any) -> None:
    with pytest.raises(TypeError, match="(?s)`cls=.*` is no subclass of torch.optim.Optimizer"):
        lightning_ssd.register_optimizer(cls)


def test_a_backend_may_be_an_object() -> None:
    assert isinstance(ActivationOffload(backend=FaultyBackend()).config.backend, FaultyBackend)


@pytest.mark.parametrize(("recover", "states"), [(True, "gpu"), (True, "host")])
def test_arguments_that_contradict_each_other(recover: bool, states: Any) -> None:
    with pytest.raises(ValueError, match="`recover=True`.*Set `states='ssd'`, or `recover=False`"):
        SSDOffloadStrategy(recover=recover, states=states)


def test_percentages_are_shares_of_the_free_memory(tmp_path: Path) -> None:
    config = OffloadConfig(tmp_path, host_memory="10%", ssd_capacity="1%", staging_memory="1GiB")
    one, two = config.resolve(tmp_path), config.resolve(tmp_path, processes=2)
    assert isinstance(one.host_memory, int) and isinstance(one.ssd_capacity, int) and one.staging_memory == "1GiB"
    assert isinstance(two.host_memory, int) and 0 < two.host_memory < 0.7 * one.host_memory
    assert one.resolve(tmp_path) == one


def test_directories_of_one_drive_share_its_free_space(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config = OffloadConfig([tmp_path, tmp_path / "other"], ssd_capacity="50%")
    capacity = config.resolve(tmp_path).ssd_capacity
    assert isinstance(capacity, int) and capacity < 0.7 * shutil.disk_usage(tmp_path).free


def test_a_percentage_of_the_device() -> None:
    config = SSDOffloadStrategy(gpu_memory="10%").states_config
    room = config.resident_budget(torch.device("cpu"))
    assert room is not None and 2**20 < room < 2**45


def test_configs_have_the_strategys_defaults() -> None:
    made = SSDOffloadStrategy()
    for config in (made.config, made.states_config):
        assert isinstance(config, OffloadConfig | StatesConfig)
        for field in fields(config):
            assert getattr(config, field.name) == inspect.signature(SSDOffloadStrategy).parameters[field.name].default
