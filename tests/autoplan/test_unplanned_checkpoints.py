"""While there is no plan, units whose saved tensors have no room are checkpointed, and a later plan is the same."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import plan_mode
from lightning_ssd.autoplan import auto_plan, unplanned_checkpoints
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.find import find_offloader
from tests.support.compare import assert_same
from tests.support.limited_memory import LimitedMemory
from tests.support.meter import Meter, use
from tests.support.parity import TinyGPT, train
from tests.support.plans import BOTH, quiet_trainer

pytestmark = pytest.mark.timeout(120)

SHORT = {"32-true": Meter(1e6, 700_000, 600_000), "bf16-mixed": Meter(1e6, 800_000, 700_000)}
"""Devices on which the 450 or 330 kB that a `TinyGPT` saves have no room, by precision."""


SHORTER = Meter(1e6, 780_000, 760_000)
"""A device on which the 290 kB of a smaller batch have no room."""


class See(pl.Callback):
    """Records each micro-batch without a plan.

    Attributes:
        stored: bytes that each micro-batch has offloaded.
        reruns: forwards of blocks that ran again in each backward.
        profile: profile of the training, without seconds.
    """

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.reruns: list[int] = []
        self.profile: Any = None
        self.running = 0
        self._before = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        stored = offloader.stats().stored
        if auto.planner is None or auto.planner.measuring:
            self.stored.append(stored - self._before)
            self.reruns.append(self.running)
        self._before, self.running = stored, 0
        if auto.planner is not None and auto.planner.runner is not None:
            self.profile = without_seconds(auto.planner.runner.profile)


def without_seconds(value: Any) -> Any:
    """Returns a profile without the times that were measured; whether tensors can be recomputed remains."""
    if isinstance(value, tuple):
        return tuple(map(without_seconds, value))
    if not is_dataclass(value):
        return value
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    known = {name: without_seconds(one) for name, one in found.items() if not name.endswith("_seconds")}
    return known | {"recomputable": found.get("recompute_seconds") is not None}


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    see = See()
    forward = GPT2MLP.forward

    def counted(self: Any, *args: Any) -> Tensor:
        see.running += torch._C._current_graph_task_id() != -1
        return forward(self, *args)

    monkeypatch.setattr(GPT2MLP, "forward", counted)
    return see


@pytest.mark.parametrize(
    ("precision", "accumulate", "states"), [("32-true", 1, "gpu"), ("bf16-mixed", 3, "gpu"), ("bf16-mixed", 1, "host")]
)
def test_units_are_checkpointed_in_place_of_offloaded(
    precision: str, accumulate: int, states: str, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first micro-batch offloads the embeddings' tensors and the first block's, and no other offloads any.

    In the micro-batch in which recomputed tensors are compared, the first block is not checkpointed.
    """
    how: dict[str, Any] = {"precision": precision, "accumulate": accumulate, "steps": 9}
    plain = train("auto", **how)
    use(SHORT[precision], monkeypatch)
    see.running = 0
    assert_same(plain, train(SSDOffloadStrategy(**BOTH | {"states": states}), callbacks=[see], **how))
    assert see.stored[0] and not any(see.stored[1:])
    checked = accumulate + 1
    assert see.reruns == [2, *[3] * (checked - 1), 2, *[3] * (len(see.reruns) - checked - 1)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_profile_is_that_of_a_training_that_offloads(
    precision: str, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the plan is the same, too: operators, saved tensors, which of them may be recomputed, and transient memory."""
    use(SHORT[precision], monkeypatch)
    how: dict[str, Any] = {"precision": precision, "accumulate": 1, "steps": 9}
    train(SSDOffloadStrategy(**BOTH), callbacks=[see], **how)
    profile, recorded = see.profile, 1
    assert see.reruns[recorded] == 3
    monkeypatch.setattr(unplanned_checkpoints, "allows_checkpointing", lambda _: False)
    see.reruns.clear()
    train(SSDOffloadStrategy(**BOTH), callbacks=[see], **how)
    assert see.reruns[recorded] == 0
    assert profile == see.profile and profile["units"]


@pytest.mark.parametrize(("most", "reruns"), [(1e9, [0, 0, 0]), (4e5, [2, 3, 2])])
def test_nothing_is_offloaded_where_checkpointing_makes_room_or_all_have_room(
    most: float, reruns: list[int], see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block's tensors are kept, too, if less than half of the memory is allocated."""
    how: dict[str, Any] = {"steps": 3}
    plain = train("auto", **how)
    use(Meter(most, 300_000), monkeypatch)
    see.running = 0
    assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[see], **how))
    assert see.stored == [0, 0, 0] and see.reruns == reruns


def fit(
    model: TinyGPT,
    rows: Sequence[int],
    path: Path,
    see: See | None,
    strategy: Any = None,
    *callbacks: pl.Callback,
    accumulate: int = 1,
) -> list[Tensor]:
    """Trains on batches of `rows` samples, and returns the weights."""
    torch.manual_seed(3)
    batches = [torch.randn(count, 16, generator=torch.Generator().manual_seed(7)) for count in rows]
    trainer = quiet_trainer(
        path,
        strategy=strategy or SSDOffloadStrategy(**BOTH),
        callbacks=[*callbacks, *([see] if see else [])],
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return [one.detach().clone() for one in model.parameters()]


def fit_in_share(
    share: float,
    make: Callable[[], TinyGPT],
    rows: Sequence[int],
    path: Path,
    see: See,
    monkeypatch: pytest.MonkeyPatch,
    *,
    accumulate: int = 1,
    fails_at: Sequence[tuple[int, int]] = (),
    callbacks: Sequence[pl.Callback] = (),
) -> LimitedMemory:
    """Trains in a share of the memory of plain training, whose numbers are the same. Returns the memory.

    `fails_at` are allocations that find no room in any case, as those of `LimitedMemory`.
    """
    with LimitedMemory() as memory:
        plain = fit(make(), rows, path, None, "auto", memory.counting, accumulate=accumulate)
    with LimitedMemory(share * memory.highest_ever, fails_at) as limited:
        use(limited, monkeypatch)
        see.running = 0
        trained = fit(make(), rows, path, see, None, limited.counting, *callbacks, accumulate=accumulate)
        assert_same(plain, trained)
    return limited


def model(kind: Callable[..., TinyGPT] = TinyGPT) -> TinyGPT:
    torch.manual_seed(1)
    return kind("none")


def running_out(kind: type[TinyGPT]) -> type[TinyGPT]:
    """Returns the class whose first forward runs out of memory at its end."""
    failures = iter([torch.OutOfMemoryError("test")])

    class RunsOut(kind):  # type: ignore[valid-type, misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            for error in failures:
                raise error
            return loss

    return RunsOut


class Levels(pl.Callback):
    """Bytes that were allocated before each micro-batch."""

    def __init__(self, memory: LimitedMemory) -> None:
        self._memory = memory
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(self._memory.level)


def test_first_steps_fit_in_limited_memory_and_keep_none_of_it(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a second attempt, in 70 % of the memory of plain training. The first step allocates optimizer states."""
    rows = [16] * 4
    with LimitedMemory() as memory:
        plain = fit(model(), rows, tmp_path, None, "auto", memory.counting)
    with LimitedMemory(0.7 * memory.highest_ever) as limited:
        use(limited, monkeypatch)
        see.running, levels = 0, Levels(limited)
        assert_same(plain, fit(model(), rows, tmp_path, see, None, limited.counting, levels))
    assert not limited.failures
    assert see.stored[0] == 0 and see.reruns[:3] == [2, 3, 2]
    assert len(set(levels.seen[1:])) == 1


class LargeVocabulary(TinyGPT):
    """Its logits need as much memory as its layers."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__(checkpointing)
        self.model.resize_token_embeddings(512)


def test_recomputed_tensors_are_compared_where_backward_has_its_memory_later(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is offloaded for the comparison of logits with recomputed ones, and they are proved."""
    monkeypatch.setattr(plan_mode, "COMPARED_BYTES", 2**10)
    limited = fit_in_share(0.9, partial(model, LargeVocabulary), [16] * 12, tmp_path, see, monkeypatch)
    assert not limited.failures and not any(see.stored)
    logits = max(see.profile["units"][-1]["operators"], key=lambda operator: operator["saved_bytes"])
    assert logits["recomputable"]


def test_units_are_checkpointed_from_a_larger_batch_on(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors may have no room, which its own memory shows. All of the first step's are kept."""
    plain = fit(model(), [1, 4, *[2] * 8], tmp_path, None, "auto")
    use(Meter(1e6, 700_000, 300_000), monkeypatch)
    see.running = 0
    assert_same(plain, fit(model(), [1, 4, *[2] * 8], tmp_path, see))
    assert see.reruns[:2] == [0, 2] and set(see.reruns[2:]) <= {2, 3}
    assert not any(see.stored[:2])


@pytest.mark.parametrize("rows", [range(2, 17), [16, 15, 14, 12, 16, 15]])
def test_batches_of_other_sizes_are_not_offloaded_before_there_is_a_plan(
    rows: Sequence[int], tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that grow are kept, then checkpointed, also after all tensors of the first steps have been kept."""
    limited = fit_in_share(0.8, model, rows, tmp_path, see, monkeypatch)
    assert not limited.failures and not any(see.stored)
    assert max(see.reruns) == 3 and (see.reruns[0] == 0) == (rows[0] == 2)


@pytest.mark.parametrize("rows", [range(2, 14), [8, 8, 8, 9, 9, 10, 10, 11, 11, 12]])
def test_the_second_attempt_of_a_profiled_micro_batch_checkpoints_no_unit_without_room(
    rows: Sequence[int], tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that runs again has all its saved tensors on the device, for which half of the memory has no room."""
    limited = fit_in_share(0.5, model, rows, tmp_path, see, monkeypatch, accumulate=3)
    assert limited.failures


@pytest.mark.parametrize("failing", [4, 5, 6, 10])
def test_units_are_checkpointed_in_the_second_attempt_of_any_micro_batch(
    failing: int, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the profiled steps, and one with a plan. The first unit shows its bytes, and is not checkpointed."""
    reruns = []

    class Reruns(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            reruns.append(see.running)

    make, fails_at = partial(model, LargeVocabulary), [(failing, 60)]
    limited = fit_in_share(0.75, make, [16] * 12, tmp_path, see, monkeypatch, fails_at=fails_at, callbacks=[Reruns()])
    assert limited.failures == 1
    assert reruns[failing - 1] == 2


def test_units_are_checkpointed_in_the_second_attempt_of_a_micro_batch(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fit(model(), [2] * 8, tmp_path, None, "auto")
    use(Meter(1e6, 700_000, 100_000), monkeypatch)
    see.running = 0
    assert_same(plain, fit(model(running_out(TinyGPT)), [2] * 8, tmp_path, see))
    assert see.reruns[0] == 3


class LongAfterShort(TinyGPT):
    """Calls its blocks with few tokens, and then with many."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[:1, :4], batch_idx) + super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("room", "reruns"), [(100_000, 0), (300_000, 2), (2_000_000, 6)])
def test_units_of_a_second_attempt_run_again_where_there_is_room_for_them_beside_gradients(
    room: int, reruns: int, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the 10 or 170 kB that a block saves for few or many tokens, beside 170 kB of gradients.

    Bytes for few tokens do not count for a call with many.
    """
    plain = fit(model(LongAfterShort), [4] * 3, tmp_path, None, "auto")
    use(Meter(100_000 + room, 700_000, 100_000), monkeypatch)
    see.running = 0
    assert_same(plain, fit(model(running_out(LongAfterShort)), [4] * 3, tmp_path, see))
    assert see.reruns[0] == reruns


class CallsBlocksLater(TinyGPT):
    """Its first steps have no attention and MLPs."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx > 3:
            return super().training_step(batch, batch_idx)
        tokens = (batch.abs() * 1000).long() % 97
        return self.model.lm_head(self.model.transformer.wte(tokens)).square().mean()


@pytest.mark.parametrize(("kind", "first"), [(TinyGPT, 2), (CallsBlocksLater, 0)])
def test_a_training_that_proves_not_plannable_offloads(
    kind: Callable[..., TinyGPT], first: int, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code that is no unit is found at the end of the first steps."""
    plain = fit(model(kind), [2] * 8, tmp_path, None, "auto")
    use(SHORTER if first else Meter(1e6, 999_500, 999_000), monkeypatch)
    monkeypatch.setattr(auto_plan.CompiledCode, "ran", property(lambda _: True))
    see.running = 0
    assert_same(plain, fit(model(kind), [2] * 8, tmp_path, see))
    assert see.reruns == [first, *[0] * 7] and all(see.stored[1:])


@pytest.mark.parametrize(
    ("share", "failing", "stored"), [(0.65, (2, 3, 4), [0]), (0.65, (4, 5, 6), [0]), (0.53, (4, 5, 6), range(1, 2**19))]
)
def test_saved_tensors_that_have_room_are_kept_after_profiles_that_ran_out_of_memory(
    share: float,
    failing: Sequence[int],
    stored: Sequence[int],
    tmp_path: Path,
    see: See,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Units are checkpointed, as before. The first profile fails in the recorded micro-batch, or in a timed one.

    The 512 KiB of the logits are kept also where other saved tensors have no room.
    """
    fails_at = [(number, 60) for number in failing]
    make = partial(model, LargeVocabulary)
    with caplog.at_level("INFO"):
        fit_in_share(share, make, [16] * 12, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert see.reruns[-4:] == [3] * 4 and len(see.reruns) == 12
    assert all(nbytes in stored for nbytes in see.stored[-4:])
    ends = [line for line in caplog.messages if "profiling needs more memory than there is" in line]
    assert [line.split()[1:3] for line in ends] == [["checkpoints", "units,"]]


@pytest.mark.parametrize("rows", [[8] * 14, [*[4] * 4, *[10] * 10]])
def test_units_that_have_no_room_to_run_again_are_not_checkpointed_after_profiles_that_ran_out_of_memory(
    rows: Sequence[int], tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch that runs out of memory offloads all in its second attempt, and after three of them, all do."""
    fails_at = [(number, 60) for number in (4, 5, 6)]
    limited = fit_in_share(0.44, model, rows, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert limited.failures <= 7 and see.reruns[-4:] == [0] * 4


@pytest.mark.parametrize("failing", [(1,), (4, 5, 6, 7)])
def test_no_hook_of_a_first_attempt_is_left(
    failing: Sequence[int], tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First calls of units are recorded in the first micro-batch, and in the one after the last profile."""
    fails_at = [*[(number, 60) for number in failing[:-1]], (failing[-1], 120)]
    made: list[TinyGPT] = []

    def make() -> TinyGPT:
        made.append(model(LargeVocabulary))
        return made[-1]

    limited = fit_in_share(0.65, make, [16] * 8, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert limited.failures == len(failing)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in made[1].modules())


def test_compiled_code_ends_checkpoints_after_profiles_that_ran_out_of_memory(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that is no unit, and runs under a mode that records first calls of units."""
    runs: list[bool] = []

    class Compiles(LargeVocabulary):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            runs.extend([True] if batch_idx == 8 else [])
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(auto_plan.CompiledCode, "ran_under_mode", property(lambda _: bool(runs)))
    fails_at = [(number, 60) for number in (2, 3, 4)]
    makes = iter([LargeVocabulary, Compiles])
    fit_in_share(0.65, lambda: model(next(makes)), [16] * 12, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert see.reruns[4:] == [*[3] * 5, *[0] * 3]


def test_units_are_checkpointed_in_a_larger_batch_alone_after_all_saved_tensors_were_kept(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory shows that all of its saved tensors have room, and it offloads none."""

    class Frozen(TinyGPT):
        def __init__(self, checkpointing: Any) -> None:
            super().__init__(checkpointing)
            self.model.transformer.h[0].requires_grad_(False)

    rows = [2, 6, 6, 2, 2, 8, 2, 2, 6, 2, 6, 12, 12, 2, 10, 2, 4, 6, 12, 4]
    limited = fit_in_share(0.7, partial(model, Frozen), rows, tmp_path, see, monkeypatch, accumulate=3)
    assert not limited.failures and not any(see.stored)


class BatchesWithoutTensors(LargeVocabulary):
    """Its first batches have none, which the step makes from lists."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch.tolist() if self.global_step < 3 else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.as_tensor(batch), batch_idx)


def test_units_are_checkpointed_once_batches_have_tensors(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so they are after profiles that ran out of memory."""
    fails_at = [(number, 60) for number in (6, 7, 8)]
    make = partial(model, BatchesWithoutTensors)
    fit_in_share(0.65, make, [16] * 14, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert see.reruns[:3] == [0] * 3 and see.reruns[-4:] == [3] * 4


class Noise(nn.Module):
    """Draws numbers of its own generator, which is not set back in backward, if it is `on`."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator) if self.on else x.tanh()


class Scale(nn.Module):
    """Reads a buffer and a tensor, both of which change after its forward, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.other = [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale.clone() * self.other[0].clone() * torch.tensor(0.5)


class Activations(TinyGPT):
    """Has an activation of its own in each block."""

    def __init__(self, activations: Sequence[nn.Module]) -> None:
        super().__init__("none")
        for block, activation in zip(self.model.transformer.h, activations, strict=True):
            block.mlp.act = activation


@pytest.mark.parametrize("flags", [(True, True, True), (False, False, True), (None, None, True)])
def test_units_that_draw_other_random_numbers_are_not_checkpointed(
    flags: Sequence[bool | None], tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of the same class are of other kinds if modules in them are, or have other flags."""

    def draws() -> TinyGPT:
        torch.manual_seed(1)
        return Activations([nn.Tanh() if flag is None else Noise(flag) for flag in flags])

    plain = fit(draws(), [2] * 8, tmp_path, None, "auto")
    use(SHORTER, monkeypatch)
    see.running = 0
    assert_same(plain, fit(draws(), [2] * 8, tmp_path, see))
    assert max(see.reruns) <= 3 - sum(map(bool, flags)) and any(see.stored)


@pytest.mark.parametrize("changed", ["scale", "other", None])
def test_units_that_read_tensors_that_may_change_before_backward_are_not_checkpointed(
    changed: str | None, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a plan shows that they do not change. Constants that a forward makes do not."""

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() * torch.tensor(0.5)

    class Changes(Activations):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            for block in self.model.transformer.h:
                if changed == "scale":
                    block.mlp.act.scale.add_(0.25)
                elif changed == "other":
                    block.mlp.act.other[0] = torch.ones(1) * (2 + batch_idx)
            return loss

    def changes() -> TinyGPT:
        torch.manual_seed(1)
        return Changes([Scale() if changed else Constant() for _ in range(3)])

    plain = fit(changes(), [2] * 8, tmp_path, None, "auto")
    use(SHORTER, monkeypatch)
    see.running = 0
    assert_same(plain, fit(changes(), [2] * 8, tmp_path, see))
    assert any(see.reruns[:3]) == (changed is None)


class Switched(Noise):
    """Draws these numbers only in a mode, or by a function."""

    def __init__(self) -> None:
        super().__init__(on=True)
        self.mode, self.function = 0, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.mode else self.function(x)


def change(model: TinyGPT, changed: str) -> None:
    """Has the blocks, which have a `Switched`, draw numbers of generators of their own from now on."""
    for block in model.model.transformer.h:
        noise = Noise(on=True)
        if changed == "module":
            block.mlp.act = noise
        elif changed == "mode":
            block.mlp.act.mode = 1
        else:
            block.mlp.act.function = noise.forward


def changing(changed: str, step: int) -> Callable[[], TinyGPT]:
    """Returns a function that makes a model whose blocks its own code changes in that step."""

    class Changes(Activations):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == step:
                change(self, changed)
            return super().training_step(batch, batch_idx)

    def make() -> TinyGPT:
        torch.manual_seed(1)
        return Changes([Switched() for _ in range(3)])

    return make


@pytest.mark.parametrize("changed", ["module", "mode", "function"])
def test_units_that_user_code_has_changed_are_not_checkpointed(
    changed: str, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that has shown that their forward may be run again was one of other code, also where all have room."""

    fit_in_share(1.3, changing(changed, 1), [2, 12] * 3, tmp_path, see, monkeypatch)
    assert not any(see.reruns)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("changed", ["module", "mode", "function"])
def test_units_that_user_code_has_changed_under_a_plan_are_not_checkpointed(
    changed: str, tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward that was recorded for the plan was one of other code, too. The first plan checkpoints all units."""

    make = changing(changed, 4)
    plain = fit(make(), [4] * 8, tmp_path, None, "auto")
    use(SHORTER, monkeypatch)
    see.running = 0
    assert_same(plain, fit(make(), [4] * 8, tmp_path, see))
    assert see.reruns[3:6] == [3, 0, 0]


def test_units_that_user_code_has_changed_are_not_checkpointed_after_profiles_that_ran_out_of_memory(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, units are checkpointed also in batches that are larger than all before."""
    rows, fails_at = [*[8] * 6, *[12] * 3, *[8] * 3], [(number, 60) for number in (2, 3, 4)]
    limited = fit_in_share(0.7, changing("mode", 9), rows, tmp_path, see, monkeypatch, fails_at=fails_at)
    assert limited.failures == 3 and see.reruns[4:] == [*[3] * 5, *[0] * 3]


def test_no_mode_and_hook_is_left_after_an_interrupt(tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stops(TinyGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            blocks = self.model.transformer.h

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            blocks[self.at].mlp.register_forward_pre_hook(interrupt)
            return super().training_step(batch, batch_idx)

    use(SHORTER, monkeypatch)
    for at in (0, 2):  # of the unit that is recorded, and of one that is checkpointed
        Stops.at = at
        with pytest.raises(SystemExit):
            fit(model(Stops), [2] * 2, tmp_path, see)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_replaced_tensors_are_freed_once_there_is_a_plan(
    tmp_path: Path, see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps have checkpointed the unit that has had the tensor, and the plan does not."""
    freed: list[bool] = []

    class Replaces(TinyGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            unit = self.model.transformer.h[1]
            if batch_idx == 6:
                self.replaced, unit.mask = weakref.ref(unit.mask), torch.ones(16)
            elif batch_idx == 8:
                freed.append(self.replaced() is None)
            return super().training_step(batch, batch_idx)

    use(SHORTER, monkeypatch)
    training = model(Replaces)
    training.model.transformer.h[1].mask = torch.ones(16)
    fit(training, [4] * 9, tmp_path, see)
    assert see.reruns[1] == 3 and freed == [True]
