"""Activation offload on a CUDA device: the same numbers at any timing, and less memory."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import OffloadConfig, config, make_offloader
from lightning_ssd.device import make_clock, make_copy_engine
from tests.support.compare import assert_same
from tests.support.delays import DELAYS, SlowBackend, SlowCopies
from tests.support.garbage import collect
from tests.support.offloader import change_policy
from tests.support.parity import SharedStorages, TinyGPT, train
from tests.support.trainings import make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

EVERYTHING: dict[str, Any] = {"offload": 1.0, "min_bytes": 1, "host_memory": 0, "staging_memory": "16MiB"}
HOST: dict[str, Any] = {"offload": 1.0, "min_bytes": 1, "tier": "host", "host_memory": "1GiB"}
SPILL: dict[str, Any] = {"offload": 1.0, "min_bytes": 1, "host_memory": "64MiB"}


class Moved(pl.Callback):
    """Counts offloaded bytes."""

    def __init__(self) -> None:
        self.stored = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.stored = trainer.strategy.offloader.stats().stored


@pytest.mark.parametrize("model", [TinyGPT, SharedStorages])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(("accumulate", "checkpointing"), [(1, "none"), (3, "non_reentrant"), (1, "reentrant")])
def test_numbers_are_those_of_plain_lightning(model: Any, precision: str, accumulate: int, checkpointing: Any) -> None:
    how: dict[str, Any] = {
        "device": "cuda",
        "precision": precision,
        "accumulate": accumulate,
        "checkpointing": checkpointing,
        "model": model,
    }
    plain = train("auto", **how)
    for arguments in (EVERYTHING, HOST, SPILL, {"min_bytes": 1}):
        moved = Moved()
        assert_same(plain, train(SSDOffloadStrategy(**arguments), callbacks=[moved], **how))
        # The default keeps tensors of transformers' layers that surely fit, which it can't tell of checkpointed ones.
        keeps = arguments == {"min_bytes": 1} and model is TinyGPT and checkpointing == "none"
        assert (moved.stored == 0) is keeps


def test_work_ahead_of_the_device_does_not_block_the_host() -> None:
    """The work is marks of the compute stream, points in time, and copies, some of which a thread waits for."""
    copies, clock = make_copy_engine(torch.device("cuda")), make_clock(torch.device("cuda"))
    source = torch.ones(2**22, dtype=torch.uint8, device="cuda")
    target = torch.zeros(2**22, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    ran: list[int] = []
    torch.cuda._sleep(2_000_000_000)  # a second
    for _ in range(300):
        mark = copies.d2h(source, target, copies.mark())
        now = clock.now()
    for index in range(30):
        done = copies.on_d2h(copies.d2h(source, target, mark, awaited=True))
        done.add_done_callback(lambda _, index=index: ran.append(index))
    assert mark is not None and not mark.reached() and not ran
    assert clock.elapsed(now, now) is None
    copies.drain()
    assert ran == list(range(30)) and target.min() == 1
    copies.close()


def test_copies_without_a_mark_follow_the_compute_stream() -> None:
    """Each copy follows the compute stream's earlier work on the same bytes, however late that is."""
    copies = make_copy_engine(torch.device("cuda"))
    source = torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    targets = [torch.zeros(2**20, dtype=torch.uint8, pin_memory=True) for _ in range(20)]
    restored = [torch.empty(2**20, dtype=torch.uint8, device="cuda") for _ in targets]
    for value, target in enumerate(targets, start=1):
        torch.cuda._sleep(1_000_000)
        source.fill_(value)
        copies.wait(copies.d2h(source, target, None))
    for target, back in zip(targets, restored, strict=True):
        torch.cuda._sleep(1_000_000)
        back.fill_(255)
        copies.wait(copies.h2d(target, back, None))
    copies.drain()
    for value, (target, back) in enumerate(zip(targets, restored, strict=True), start=1):
        assert target.min() == target.max() == value
        assert back.min() == back.max() == value
    copies.close()


def test_tensors_that_are_copied_at_once_have_one_mark() -> None:
    """The copies follow the compute stream's earlier work, and its later work follows them: 8 MiB, and a matrix."""
    copies = make_copy_engine(torch.device("cuda"))
    expected = [torch.full((2**21,), 3.0), torch.arange(2048.0)]
    sources = [torch.zeros(2**21, device="cuda"), torch.zeros(64, 32, device="cuda").t()]
    values = expected[1].view(64, 32).cuda()
    target = torch.zeros(2**24, dtype=torch.uint8, pin_memory=True)
    torch.cuda._sleep(10_000_000)
    sources[0].fill_(3.0)
    sources[1].t().copy_(values)
    copies.wait(copies.d2h_each(sources, target, [64, 2**23 + 64]))
    for source in sources:
        source.zero_()
    copies.drain()
    found = target.view(torch.float32)[16:].split([2**21, 2048, 2**21 - 2048 - 16])
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and not found[2].any()
    assert copies.busy()[0].amount == 2**23 + 2**13
    copies.close()


@pytest.mark.parametrize("model", [TinyGPT, SharedStorages])
@pytest.mark.parametrize("arguments", [EVERYTHING, HOST, SPILL, {"min_bytes": 1, "offload": 0.5, "host_memory": 0}])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_do_not_move_with_the_timing(
    model: Any, arguments: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train("auto", device="cuda", model=model)
    DELAYS.seed(seed)
    monkeypatch.setattr(config, "make_copy_engine", SlowCopies)
    slow = arguments if arguments.get("tier") == "host" else arguments | {"backend": SlowBackend(), "checksum": True}
    assert_same(plain, train(SSDOffloadStrategy(**slow), device="cuda", model=model))


def _chain(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))).cuda()


@pytest.mark.parametrize("arguments", [{"tier": "host"}, {"host_memory": 0}])
def test_memory_is_that_of_the_window(arguments: dict[str, Any], tmp_path: Path) -> None:
    """If everything is offloaded, the peak depends on the window, not on the activations."""
    model, rows, width, depth = _chain(1024, 24), 16384, 1024, 24
    offloader = make_offloader(OffloadConfig(offload=1.0, **arguments), torch.device("cuda"), default_path=tmp_path)
    one = rows * width * 4
    change_policy(offloader, window_bytes=2 * one)
    x = torch.randn(rows, width, device="cuda")

    def peak(offloaded: bool) -> int:
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if offloaded:
            offloader.begin_micro_batch()
            with offloader.hooks():
                loss = model(x).square().mean()
            loss.backward()
            offloader.end_backward()
        else:
            model(x).square().mean().backward()
        return torch.cuda.max_memory_allocated() - before

    kept = peak(offloaded=False)
    peak(offloaded=True)
    offloaded = peak(offloaded=True)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    offloader.close()
    assert kept > 2 * depth * one
    # The peak has the present operation's tensors, bytes that are being offloaded, and prefetched bytes.
    assert offloaded - gradients < 10 * one, (kept / one, offloaded / one)


def test_memory_of_a_freed_graph_is_freed(tmp_path: Path) -> None:
    """Graphs that never run backward, and prefetched tensors that are not used, free their memory."""
    model = _chain(512, 8)
    offloader = make_offloader(
        OffloadConfig(offload=1.0, min_bytes=1, tier="host"), torch.device("cuda"), default_path=tmp_path
    )
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    torch.autograd.grad(model(x).square().mean(), list(model.parameters()))  # which allocates workspaces permanently
    collect()  # objects of other tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        offloader.begin_micro_batch()
        with offloader.hooks():
            loss = model(x).square().mean()
        # Only the upper half runs: bytes that were prefetched for the lower half are freed unused.
        torch.autograd.grad(loss, list(model[8].parameters()))
        del loss
        offloader.end_backward()
    offloader.begin_micro_batch()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before  # less if threads of other tests free memory
    assert offloader.tiers["host"].pool.used_bytes == 0  # type: ignore[attr-defined]
    offloader.close()


def test_compiled_blocks_give_the_same_numbers() -> None:
    """A submodule compiled by inductor saves its tensors through the same hooks."""

    class Compiled(SharedStorages):
        def __init__(self, checkpointing: Any) -> None:
            super().__init__(checkpointing)
            self.extra = torch.compile(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            extra = self.extra(batch[..., None].expand(-1, -1, 32))
            return super().training_step(batch, batch_idx) + extra.square().mean()

    plain = train("auto", device="cuda", model=Compiled)
    assert_same(plain, train(SSDOffloadStrategy(**HOST), device="cuda", model=Compiled))


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("model", [TinyGPT, SharedStorages])
def test_kvikio_gives_the_same_numbers(model: Any, checksum: bool) -> None:
    """kvikio transfers device memory to the scratch file and back (in compat mode without GPUDirect Storage), or, with
    checksums, host memory.
    """
    pytest.importorskip("kvikio")
    plain = train("auto", device="cuda", model=model)
    moved = Moved()
    strategy = SSDOffloadStrategy(offload=1.0, min_bytes=1, host_memory=0, backend="kvikio", checksum=checksum)
    assert_same(plain, train(strategy, device="cuda", model=model, callbacks=[moved]))
    assert moved.stored > 0


class Deep(pl.LightningModule):
    """24 layers that save 128 MiB each of a batch of 16,384 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = _chain(1024, 24)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_runs_out_of_memory_fits_by_default(accumulate: int, tmp_path: Path) -> None:
    """The process may use 2 GiB. Plain Lightning needs 3.7 GiB, and everything but activations 0.9 GiB."""

    def fit(strategy: Any) -> dict[str, Tensor]:
        rows = torch.randn(2**14, 1024, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(rows.expand(12, -1, -1).reshape(-1, 1024))
        trainer = make_trainer(tmp_path, strategy, accelerator="gpu", accumulate_grad_batches=accumulate)
        module = Deep()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2**14))
        return {name: value.detach().cpu() for name, value in module.state_dict().items()}

    plain = fit("auto")
    collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fit("auto")
        collect()
        torch.cuda.empty_cache()
        ours = fit("ssd_offload")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(value, ours[name]) for name, value in plain.items())
