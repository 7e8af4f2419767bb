"""Our kernel against torch's, bit for bit; and the formats that it reads and writes."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.device.c_library import compile_library
from lightning_ssd.model_states.optimizers import adam, adam_c
from lightning_ssd.model_states.optimizers.optimizers import AdamOptimizer, StepInput, make_flat_optimizer
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.stores.split import join, split
from lightning_ssd.model_states.units.flat import FlatParameter
from tests.support.trainings import package_threads

CPU = torch.device("cpu")
NAMES = ("exp_avg", "exp_avg_sq")

# Every sign and exponent, and the ends and the middle of the bits above and below the cut.
BITS = [
    sign << 31 | exponent << 23 | upper << 16 | lower
    for sign in (0, 1)
    for exponent in range(256)
    for upper in (0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F)
    for lower in (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)
]


def as_floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_round_trip(master: Tensor) -> None:
    weights, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master, weights, low)
    joined = join(weights, low)
    number = ~master.isnan()
    assert torch.equal(joined.view(torch.int32)[number], master.view(torch.int32)[number])
    assert joined[~number].isnan().all() and weights[~number].isnan().all()
    compared = number & ((master.view(torch.int32) & 0xFFFF) != 0x8000)  # ties are rounded differently
    assert torch.equal(weights[compared], master.bfloat16()[compared])


def test_split_is_exact_for_every_class_of_bits() -> None:
    assert_round_trip(as_floats(BITS))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_split_is_exact(bits: list[int]) -> None:
    assert_round_trip(as_floats(bits))


def make(parts: list[int], dtype: torch.dtype, halves: bool, slots: int) -> tuple[FlatParameter, StagedState]:
    """Returns a flat parameter of these sizes, and values for it, with one version or two."""
    generator = torch.Generator().manual_seed(0)
    parameters = [(str(index), nn.Parameter(torch.empty(size))) for index, size in enumerate(parts)]
    flat = FlatParameter("flat", parameters, dtype, torch.device("cpu"))
    layout = Layout(flat, halves, NAMES, steps=True, versions=slots)

    def values() -> StagedState:
        sizes = (flat.nbytes, max(layout.opt_state_bytes, 1))
        return layout.views(*(torch.zeros(size, dtype=torch.uint8) for size in sizes))

    staged = values()
    staged.set_masters(torch.randn(flat.numel, generator=generator))
    if slots == 2:
        staged.uncommitted = values()
    return flat, staged


def options(**changed: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **changed)
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


# Lengths below, at and above the widths of vectors, and one that torch's kernels divide among threads.
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([1000, 4099, 40_001]))
FLAGS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}]


@st.composite
def adams(draw: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    arguments = draw(
        st.fixed_dictionaries(
            {
                "lr": st.sampled_from([1e-3, 0.1, 7e-5]),
                "betas": st.tuples(st.sampled_from([0.9, 0.95, 0.5, 0.3, 0.0]), st.sampled_from([0.999, 0.95, 0.5])),
                "eps": st.sampled_from([1e-8, 1e-5, 0.0]),
                "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
                "amsgrad": st.booleans(),
                "maximize": st.booleans(),
            }
        )
    )
    return draw(st.sampled_from([torch.optim.Adam, torch.optim.AdamW])), arguments | draw(st.sampled_from(FLAGS))


@st.composite
def sgds(draw: Any, always: bool = False) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    arguments = draw(
        st.fixed_dictionaries(
            {
                "lr": st.sampled_from([1e-3, 0.1]),
                "momentum": st.sampled_from([0.9, 0.37] if always else [0.0, 0.9, 0.37]),
                "weight_decay": st.sampled_from([0.0, 0.01]),
                "maximize": st.booleans(),
            }
        )
    )
    if arguments["momentum"]:
        arguments |= draw(st.sampled_from([{"nesterov": True}, {"dampening": 0.1}, {}]))
    return torch.optim.SGD, arguments | draw(st.sampled_from(FLAGS))


def follow_torch(
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    parts: list[int],
    dtype: torch.dtype,
    halves: bool,
    fp32_gradient: bool,
    slots: int,
    scale: float,
    all_has: list[list[bool]],
    momenta: list[float] | None = None,
) -> None:
    """Steps a flat parameter, and fp32 parameters with torch's own class, and compares master weights and states."""
    flat = FlatParameter(
        "flat", [(str(i), nn.Parameter(torch.empty(size))) for i, size in enumerate(parts)], dtype, CPU
    )
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in parts]
    # A group each: torch's fused SGD fails where one parameter of a group has a buffer and another has none.
    optimizer = cls([{"params": [parameter]} for parameter in parameters], **arguments)
    how = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    flat_optimizer = make_flat_optimizer(optimizer, flat)
    layout = Layout(
        flat, halves and dtype == torch.bfloat16, flat_optimizer.state_names(how), steps=True, versions=slots
    )
    sizes = (flat.nbytes, max(layout.opt_state_bytes, 1))
    staged, other = (layout.views(*(torch.zeros(size, dtype=torch.uint8) for size in sizes)) for _ in range(2))
    if slots == 2:
        staged.uncommitted = other
    masters = torch.zeros(flat.numel)
    for item, parameter in zip(flat.param_views, parameters, strict=True):
        item.of(masters).copy_(parameter.data)
    staged.set_masters(masters)
    for number, has in enumerate(all_has):
        if momenta is not None:
            how = {**how, "momentum": momenta[number % len(momenta)]}
            for group in optimizer.param_groups:
                group["momentum"] = how["momentum"]
        gradient = torch.zeros(flat.numel, dtype=torch.float32 if fp32_gradient else dtype)
        for item, parameter, given_one in zip(flat.param_views, parameters, has, strict=True):
            item.of(gradient).copy_(torch.randn(item.numel, generator=generator))
            part = item.of(gradient).float() * scale
            parameter.grad = part if given_one else None
        before = [tensor.clone() for tensor in (staged.masters(), *staged.states.values())]
        optimizer.step()
        flat_optimizer.step(StepInput(how, gradient, has, scale), staged)
        flat_optimizer.commit(has, how)
        out = staged.out
        if out is not staged:  # the old values exist until the commit
            after = (staged.masters(), *staged.states.values())
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            staged, out.other = out, staged
        for index, (item, parameter) in enumerate(zip(flat.param_views, parameters, strict=True)):
            assert torch.equal(item.of(staged.masters()), parameter.data)
            state, expected = flat_optimizer.state_of(index, staged), optimizer.state[parameter]
            assert {name for name, value in expected.items() if value is not None} == set(state)
            assert all(torch.equal(value, expected[name]) for name, value in state.items())


HOW = dict(
    kind=st.one_of(adams(), sgds()),
    parts=st.lists(LENGTHS, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    halves=st.booleans(),
    fp32_gradient=st.booleans(),
    slots=st.sampled_from([1, 2]),
    scale=st.sampled_from([1.0, 0.3, 2.0**-16]),
    data=st.data(),
)


def draw_and_follow(kind: Any, parts: list[int], data: Any, **how: Any) -> None:
    has = st.lists(st.booleans(), min_size=len(parts), max_size=len(parts))
    follow_torch(*kind, parts=parts, all_has=data.draw(st.lists(has, min_size=1, max_size=6)), **how)


@given(**HOW)
@settings(max_examples=60, deadline=None)
def test_steps_have_torchs_bits(**how: Any) -> None:
    """Every implementation of torch, over several steps, with parameters without a gradient, in every format."""
    draw_and_follow(**how)


@pytest.mark.thorough
@given(**HOW)
@settings(max_examples=200, deadline=None)
def test_steps_have_torchs_bits_thoroughly(**how: Any) -> None:
    draw_and_follow(**how)


@given(momenta=st.lists(st.sampled_from([0.0, 0.9]), min_size=1, max_size=5), **HOW | {"kind": sgds(always=True)})
@settings(max_examples=40, deadline=None)
def test_momentum_that_changes_has_torchs_bits(momenta: list[float], **how: Any) -> None:
    draw_and_follow(momenta=momenta, **how)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_torchs_bits_with_several_threads(cls: Any, flags: dict[str, Any]) -> None:
    """Torch divides a parameter among threads, and the last elements of each part may fill no vector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        arguments = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        follow_torch(cls, arguments | flags, [100_003, 17], torch.float32, False, True, 1, 1.0, [[True, True]] * 3)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("flags", [{}, {"fused": True}])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_torchs_bits_with_a_tensor_as_learning_rate(cls: Any, flags: dict[str, Any]) -> None:
    """The for-loop computes in the tensor's dtype."""
    for lr in (torch.tensor(3e-3), torch.tensor([3e-3]), torch.tensor(3e-3, dtype=torch.float64)):
        follow_torch(
            cls, {"lr": lr, "weight_decay": 0.1} | flags, [67], torch.float32, False, True, 1, 1.0, [[True]] * 3
        )


def test_adam_takes_one_pass() -> None:
    """It does with a compiler, and with a torch that is built with MKL, as in the wheels for x86."""
    if adam_c.adam_library() is None or not torch.backends.mkl.is_available():
        pytest.skip("no C compiler, or another build of torch")
    assert all(adam.exact_kernel(implementation) for implementation in ("for-loop", "foreach", "fused"))


def test_a_kernel_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then torch's own function makes the step, with the same numbers."""
    monkeypatch.setattr(adam, "settings_of", _off_by_a_bit(adam.settings_of))
    adam.exact_kernel.cache_clear()
    try:
        with caplog.at_level("WARNING", "lightning_ssd"):
            follow_torch(torch.optim.AdamW, {}, [67], torch.float32, False, True, 1, 1.0, [[True]] * 3)
        assert adam_c.adam_library() is None or "does not give the bits" in caplog.text
    finally:
        adam.exact_kernel.cache_clear()


def _off_by_a_bit(settings_of: Any) -> Any:
    def wrong(*arguments: Any) -> Any:
        numbers = settings_of(*arguments)
        numbers.beta2 *= 1 + 2.0**-23
        return numbers

    return wrong


def test_momentum_that_begins_later_is_refused() -> None:
    flat = FlatParameter("flat", [("weight", nn.Parameter(torch.empty(64)))], torch.float32, CPU)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(64))], lr=0.1)
    flat_optimizer = make_flat_optimizer(optimizer, flat)
    how = dict(optimizer.param_groups[0])
    layout = Layout(flat, False, flat_optimizer.state_names(how), steps=True, versions=1)
    staged = layout.views(torch.zeros(flat.nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="needs momentum_buffer now.*from the start"):
        flat_optimizer.step(StepInput({**how, "momentum": 0.9}, torch.ones(64), [True], 1.0), staged)


def test_parameters_without_gradient_are_not_changed(tmp_path: Any) -> None:
    flat, staged = make([64, 128], torch.bfloat16, False, 2)
    before = staged.masters().clone()
    AdamOptimizer(flat).step(StepInput(options(), torch.ones(flat.numel), [False, True], 1.0), staged)
    assert torch.equal(staged.out.masters()[:64], before[:64])
    assert not torch.equal(staged.out.masters()[64:], before[64:])
    assert torch.equal(staged.out.weights, staged.out.masters().bfloat16())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    adam_c.load_library.cache_clear()
    with caplog.at_level("INFO", "lightning_ssd"):
        assert adam_c.adam_library() is None
    assert "no C compiler" in caplog.text
    adam_c.load_library.cache_clear()


def test_a_compiler_that_fails(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adam_c.load_library.cache_clear()
    assert adam_c.adam_library() is None
    assert "could not compile adam.c" in caplog.text and "broken" in caplog.text
    assert list((tmp_path / "cache" / "lightning_ssd").iterdir()) == []
    adam_c.load_library.cache_clear()


def test_a_strategy_begins_to_compile_and_steps_wait_for_that(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs once, from when the first strategy was made, and a step meanwhile gets its library."""
    if (real := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    made = compile_library(adam_c.SOURCE, real)
    begun, may_end, compiler = tmp_path / "begun", tmp_path / "may-end", tmp_path / "cc"
    os.mkfifo(begun)
    os.mkfifo(may_end)
    compiler.write_text(
        f"#!/bin/sh\necho one >> {tmp_path}/runs\necho > {begun}\nread line < {may_end}\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {made} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adam_c.load_library.cache_clear()
    SSDOffloadStrategy(states="host")
    begun.read_text()
    SSDOffloadStrategy(states="host")
    assert package_threads() == ["lightning_ssd-compiler"]
    with ThreadPoolExecutor() as threads:
        steps = [threads.submit(adam_c.adam_library) for _ in range(2)]
        may_end.write_text("\n")
        one, other = [step.result() for step in steps]
    assert one is other is not None
    assert (tmp_path / "runs").read_text() == "one\n"
    adam_c.load_library.cache_clear()
