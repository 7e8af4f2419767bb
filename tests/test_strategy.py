"""The strategy under Lightning's Trainer: all ways to run it, and the state after each."""

import socket
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_ssd import (
    ActivationOffload,
    MicroBatchSwitch,
    OffloadMonitor,
    PrefetchScheduler,
    SSDOffloadStrategy,
)
from tests.support.compare import assert_same
from tests.support.trainings import (  # noqa: F401
    MIN_BYTES,
    WIDTH,
    SmallModel,
    Watch,
    batches,
    make_trainer,
    nothing_left,
    offloading,
    package_threads,
    quiet,
    run_script,
    scratch_directories,
    small_arguments,
    small_model,
)

OURS = (MicroBatchSwitch, PrefetchScheduler, OffloadMonitor)


def _train(root: Path, strategy: Any, *callbacks: pl.Callback, loader: Any = None, **arguments: Any) -> Any:
    """Trains a fresh model, and returns it."""
    model = arguments.pop("model", None) or small_model()
    val = batches(2) if "val_check_interval" in arguments or "num_sanity_val_steps" in arguments else None
    make_trainer(root, strategy, callbacks=list(callbacks), **arguments).fit(model, loader or batches(), val)
    return model


def _assert_parity(root: Path, **arguments: Any) -> None:
    """Asserts that a training is the same with and without offload, and that bytes were offloaded."""
    watch = Watch()
    plain = _train(root, "auto", **arguments)
    assert_same(plain, _train(root, offloading(), watch, **arguments))
    assert watch.moved > 0


class TestChoosingIt:
    @pytest.mark.parametrize(("name", "tier"), [("ssd_offload", "ssd"), ("cpu_offload", "host")])
    def test_a_registered_name_trains_as_plain_lightning_does(self, tmp_path: Path, name: str, tier: str) -> None:
        trainer = make_trainer(tmp_path, name)
        assert isinstance(trainer.strategy, SSDOffloadStrategy)
        assert trainer.strategy.config.tier == tier
        model = small_model()
        trainer.fit(model, batches(2))
        assert_same(_train(tmp_path, "auto", loader=batches(2)), model)

    @pytest.mark.parametrize("tier", ["ssd", "host"])
    def test_an_instance_trains_as_plain_lightning_does(self, tmp_path: Path, tier: str) -> None:
        watch = Watch()
        offloaded = _train(tmp_path, offloading(tier=tier), watch, max_epochs=2)
        assert_same(_train(tmp_path, "auto", max_epochs=2), offloaded)
        assert set(watch.bytes_out) == {tier}
        assert watch.moved > 0

    def test_it_trains_with_callbacks_loggers_and_checkpoints_on_as_by_default(self, tmp_path: Path) -> None:
        model = small_model()
        pl.Trainer(
            strategy=offloading(),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            default_root_dir=tmp_path,
            logger=CSVLogger(tmp_path),
        ).fit(model, batches(), batches(1))
        assert_same(_train(tmp_path, "auto"), model)
        assert len(list(tmp_path.rglob("*.ckpt"))) == 1

    def test_scratch_files_lie_in_a_default_root_dir_that_does_not_exist_yet(self, tmp_path: Path) -> None:
        seen: list[str] = []

        class Look(pl.Callback):
            def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                seen.extend(scratch_directories(tmp_path / "new" / "root"))

        _train(tmp_path / "new" / "root", offloading(), Look())
        assert len(seen) == 1

    def test_a_remote_default_root_dir_is_refused_with_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        trainer = make_trainer(tmp_path, offloading(), default_root_dir="memory://runs")
        with pytest.raises(ValueError, match="default_root_dir.*`path`"):
            trainer.fit(small_model(), batches())
        assert list(tmp_path.iterdir()) == []

    def test_a_remote_default_root_dir_suffices_where_nothing_goes_to_ssds(self, tmp_path: Path) -> None:
        strategy = SSDOffloadStrategy(tier="host", min_bytes=1, states="host", offload=1.0)
        trainer = make_trainer(tmp_path, strategy, default_root_dir="memory://runs")
        trainer.fit(small_model(), batches())
        assert trainer.global_step


class OtherCluster(LightningEnvironment):
    """A user's cluster environment, as for MPI, in which this process is the second of two."""

    def world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return 1

    def local_rank(self) -> int:
        return 1

    def node_rank(self) -> int:
        return 1


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "12345",
}  # fmt: skip
CLUSTERS: dict[str, tuple[dict[str, str], Any]] = {
    "none": ({}, None),
    "lightning": ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1"}, None),
    "torchrun": (TORCHRUN, None),
    "torchrun without ranks": ({"TORCHELASTIC_RUN_ID": "1"}, None),
    "slurm": (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
         "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NODELIST": "node[1-2]",
         "SRUN_DEBUG": "3"},
        None,
    ),
    "slurm without ranks": ({"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, None),
    "lsf": (
        {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "ranks", "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_SIZE": "2",
         "JSM_NAMESPACE_RANK": "1"},
        None,
    ),
    "kubeflow": (TORCHRUN, KubeflowEnvironment),
    "kubeflow without ranks": ({}, KubeflowEnvironment),
    "mpi": ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "1"}, OtherCluster),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cluster", list(CLUSTERS))
def test_one_device_is_a_world_of_one_whatever_a_cluster_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    """Ranks, collectives, logged metrics, the written checkpoints and the best one."""
    variables, environment = CLUSTERS[cluster]
    (tmp_path / "ranks").write_text(f"launcher\n{socket.gethostname()}\n")
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def outcome(strategy: Any, root: Path) -> Any:
        seen: list[Any] = []

        class Look(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                seen.append((trainer.global_rank, pl_module.global_rank, pl_module.local_rank, trainer.is_global_zero))
                seen.append(pl_module.all_gather(torch.ones(2)).shape)
                seen.append([trainer.strategy.reduce_boolean_decision(True, all=all_) for all_ in (True, False)])

        best = ModelCheckpoint(root, "{epoch}-{loss:.4f}", monitor="loss", save_top_k=2)
        trainer = make_trainer(
            root,
            strategy,
            callbacks=[Look(), best],
            plugins=None if environment is None else [environment()],
            enable_checkpointing=True,
            max_epochs=4,
        )
        strategy = trainer.strategy
        seen.append((trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.num_nodes))
        seen.append((trainer.num_devices, trainer.device_ids, trainer.distributed_sampler_kwargs))
        seen.append((strategy.broadcast("x"), strategy.reduce(torch.ones(2)).tolist(), strategy.barrier()))
        model = small_model()
        trainer.fit(model, batches())
        assert not torch.distributed.is_initialized()
        files = sorted(path.name for path in root.glob("*.ckpt"))
        assert len(files) == 2
        return seen, files, Path(best.best_model_path).name, best.best_model_score, model.losses

    assert outcome(offloading(), tmp_path / "ours") == outcome("auto", tmp_path / "plain")


class TestRunning:
    def test_evaluation_without_a_fit_gives_the_same_results(self, tmp_path: Path) -> None:
        results = []
        for strategy in ("auto", offloading()):
            model, trainer = small_model(), make_trainer(tmp_path, strategy)
            results.append(
                (
                    trainer.validate(model, batches(2), verbose=False),
                    trainer.test(model, batches(2), verbose=False),
                    torch.cat(trainer.predict(model, batches(2))).tolist(),
                )
            )
        assert results[0] == results[1]

    def test_data_loader_workers(self, tmp_path: Path) -> None:
        rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(rows, batch_size=16, num_workers=2, persistent_workers=True)
        _assert_parity(tmp_path, loader=loader, max_epochs=2)

    def test_a_graph_that_outlives_the_training_says_why_it_cannot_run(self, tmp_path: Path) -> None:
        kept: list[Tensor] = []

        class Keeping(SmallModel):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                kept.append(self.loss(batch))
                return loss

        _train(tmp_path, offloading(), model=small_model(kind=Keeping))
        with pytest.raises(RuntimeError, match="training has ended"):
            kept[0].backward()


PLACEMENTS = pytest.mark.parametrize(
    "arguments",
    [{}, {"states": "host"}, pytest.param({"states": "ssd"}, marks=pytest.mark.thorough)],
    ids=["gpu", "host", "ssd"],
)


class TestAsWithLightningsOwnStrategies:
    @pytest.mark.parametrize("states", ["gpu", "host", "ssd"])
    def test_a_clock_that_a_test_has_replaced_is_not_read(
        self, tmp_path: Path, states: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tests of Lightning's monitors replace it and count the readings; a thread that reads it could fail."""

        def refuse() -> float:
            raise StopIteration

        plain, offloaded = small_model(), small_model()
        make_trainer(tmp_path).fit(plain, batches())
        monkeypatch.setattr(time, "perf_counter", refuse)
        make_trainer(tmp_path, offloading(states=states)).fit(offloaded, batches())
        assert_same(plain, offloaded)

    """Uses of a strategy that Lightning's own single-device one has, too."""

    def test_a_model_without_a_trainer_is_connected(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, offloading())
        model = small_model()
        trainer.strategy.connect(model)
        assert trainer.lightning_module is model and trainer.model is model
        trainer.strategy.setup_environment()
        trainer.save_checkpoint(tmp_path / "untrained.ckpt")
        assert torch.load(tmp_path / "untrained.ckpt")["optimizer_states"] == []

    def test_the_world_size_can_be_assigned(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, offloading())
        trainer.strategy.world_size = 2
        assert trainer.world_size == 2 and SSDOffloadStrategy().world_size == 1

    @PLACEMENTS
    def test_a_strategy_is_used_for_several_trainers(self, tmp_path: Path, arguments: Any) -> None:
        def trained(strategy: Any) -> Any:
            model = FusedModel()
            for epochs in (1, 1):
                pl.Trainer(strategy=strategy, **(quiet(tmp_path) | {"accelerator": "auto", "max_epochs": epochs})).fit(
                    model, batches(3)
                )
            return model

        assert_same(trained(offloading(**arguments)), trained(pl.strategies.SingleDeviceStrategy()))

    @PLACEMENTS
    def test_a_checkpoint_with_other_objects_is_loaded_if_the_user_says_so(
        self, tmp_path: Path, arguments: Any
    ) -> None:
        class WithObject(FusedModel):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["other"] = Path("anything")

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                self.other = checkpoint["other"]

        def resumed(strategy: Any, root: Path) -> Any:
            trainer = make_trainer(root, strategy())
            trainer.fit(WithObject(), batches(3))
            trainer.save_checkpoint(root / "saved.ckpt")
            model = WithObject()
            again = make_trainer(root, strategy(), max_epochs=2)
            with pytest.raises(UnpicklingError, match="weights_only"):
                again.fit(model, batches(3), ckpt_path=root / "saved.ckpt")
            again.fit(model, batches(3), ckpt_path=root / "saved.ckpt", weights_only=False)
            again.validate(model, batches(1), ckpt_path=root / "saved.ckpt", weights_only=False, verbose=False)
            assert model.other == Path("anything")
            return model

        ours = resumed(lambda: offloading(**arguments), tmp_path / "ours")
        assert_same(ours, resumed(lambda: "auto", tmp_path / "plain"))

    def test_a_sharded_checkpoint_is_no_file_to_load_a_module_from(self, tmp_path: Path) -> None:
        """A Trainer loads it, as with FSDP, and `lightning-ssd export` makes a folder of weights from it."""
        trainer = make_trainer(tmp_path, offloading(states="host", checkpoints="sharded"))
        model = FusedModel()
        trainer.fit(model, batches(3))
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        with pytest.raises(IsADirectoryError):
            FusedModel.load_from_checkpoint(tmp_path / "saved.ckpt")
        for strategy in (offloading(), offloading(states="gpu"), offloading(states="ssd")):
            other = FusedModel()
            make_trainer(tmp_path, strategy).validate(
                other, batches(1), ckpt_path=tmp_path / "saved.ckpt", verbose=False
            )
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class FusedModel(SmallModel):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)


class _Boom(Exception):
    pass


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise _Boom


class _InTrainingStep(SmallModel):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise _Boom
        return loss


class _InBackward(SmallModel):
    def loss(self, batch: Tensor) -> Tensor:
        # In the middle, backward has used some saved tensors, and others are being prefetched.
        hidden = self.net[:3](batch)
        if len(self.losses) == 2:
            hidden = _RaisingBackward.apply(hidden)
        return self.net[3:](hidden).pow(2).mean()


class _InValidation(SmallModel):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        raise _Boom


class _InFitStart(SmallModel):
    def on_fit_start(self) -> None:
        raise _Boom


class _InConfigureOptimizers(SmallModel):
    def configure_optimizers(self) -> Any:
        raise _Boom


_RAISING = [
    _InTrainingStep,
    _InBackward,
    _InValidation,
    _InFitStart,
    _InConfigureOptimizers,
]


@pytest.mark.parametrize("kind", _RAISING)
def test_after_an_exception_nothing_is_left_and_the_module_trains_again(tmp_path: Path, kind: type[SmallModel]) -> None:
    model = small_model(kind=kind)
    trainer = make_trainer(tmp_path, offloading(), num_sanity_val_steps=0)
    with pytest.raises(_Boom):
        trainer.fit(model, batches(), batches(1))
    assert scratch_directories(tmp_path) == []
    assert package_threads() == []

    model.__class__ = SmallModel  # the same module, without its fault
    model.load_state_dict(small_model().state_dict())
    model.zero_grad()
    model.losses.clear()
    assert_same(_train(tmp_path, "auto"), _train(tmp_path, offloading(), model=model))


class _Callbacks(pl.Callback):
    """Keeps the Trainer's callbacks of each run, and fails at a hook if one is named."""

    def __init__(self, fail_at: str = "") -> None:
        self.runs: list[list[pl.Callback]] = []
        if fail_at:
            setattr(self, fail_at, self.fail)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.runs.append(list(trainer.callbacks))

    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("failed here")

    def ours(self) -> list[list[int]]:
        return [[sum(type(callback) is kind for callback in run) for kind in OURS] for run in self.runs]


class TestCallbacksItAdds:
    def test_those_that_the_user_did_not_give(self, tmp_path: Path) -> None:
        mine, callbacks = PrefetchScheduler(window_bytes=MIN_BYTES), _Callbacks()
        trainer = make_trainer(tmp_path, offloading(), callbacks=[mine, callbacks])
        trainer.fit(small_model(), batches())
        assert callbacks.ours() == [[1, 1, 1]]
        assert mine in callbacks.runs[0]

    def test_each_run_adds_default_callbacks_once_and_keeps_the_user_s(self, tmp_path: Path) -> None:
        class Configured(SmallModel):
            def configure_callbacks(self) -> list[pl.Callback]:
                return [added]

        callbacks, added = _Callbacks(), pl.Callback()
        trainer = make_trainer(tmp_path, offloading(), callbacks=[callbacks])
        given = [*trainer.callbacks, added]
        trainer.fit(small_model(kind=Configured), batches())
        assert trainer.callbacks == given
        trainer.fit_loop.max_epochs = 2
        trainer.fit(small_model(), batches())
        trainer.validate(small_model(), batches(1), verbose=False)
        assert callbacks.ours() == [[1, 1, 1]] * 3
        assert trainer.callbacks == given

    @pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end", "teardown"])
    def test_no_default_callback_is_left_when_a_hook_fails(self, tmp_path: Path, hook: str) -> None:
        trainer = make_trainer(tmp_path, offloading(), callbacks=[_Callbacks(hook)], enable_progress_bar=True)
        given, bar = list(trainer.callbacks), trainer.progress_bar_callback
        with pytest.raises(RuntimeError, match="failed here"):
            trainer.fit(small_model(), batches())
        assert trainer.callbacks == given
        assert "get_metrics" not in vars(bar)

    def test_checkpoint_callbacks_stay_last_and_others_keep_their_order(self, tmp_path: Path) -> None:
        checkpoints = [ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=epochs) for epochs in (1, 2)]
        watches = [_Callbacks(), Watch()]
        trainer = make_trainer(
            tmp_path,
            offloading(),
            enable_checkpointing=True,
            callbacks=[watches[0], *checkpoints, watches[1]],
        )
        trainer.fit(small_model(), batches())
        (callbacks,) = watches[0].runs
        assert callbacks[-2:] == checkpoints
        assert [callback for callback in callbacks if callback in watches] == watches

    def test_those_of_the_module_replace_them(self, tmp_path: Path) -> None:
        """`configure_callbacks` counts as given by the user."""
        mine = OffloadMonitor(progress_bar=False)

        class Configured(SmallModel):
            def configure_callbacks(self) -> list[pl.Callback]:
                return [mine]

        trainer = make_trainer(tmp_path, offloading())
        trainer.fit(small_model(kind=Configured), batches())
        assert [callback for callback in trainer.callbacks if isinstance(callback, OffloadMonitor)] == [mine]

    def test_activation_offload_beside_it_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, offloading(), callbacks=[ActivationOffload()])
        with pytest.raises(ValueError, match="SSDOffloadStrategy.*Drop the ActivationOffload callback"):
            trainer.fit(small_model(), batches())


class _CLIModel(SmallModel):
    def train_dataloader(self) -> Any:
        return batches(2)


def _cli(root: Path, *args: str, run: bool = False) -> LightningCLI:
    trainer = quiet(root)
    return LightningCLI(
        _CLIModel, args=[*args], run=run, trainer_defaults=trainer, save_config_callback=None, seed_everything_default=0
    )


@pytest.fixture
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train"])  # otherwise LightningCLI warns about pytest's arguments


@pytest.mark.usefixtures("_no_arguments")
class TestCommandLine:
    @pytest.mark.parametrize(
        ("text", "amount"),
        [("auto", "auto"), ("none", "none"), ("1", 1.0), ("0.25", 0.25), ("1000000", 1000000), ("8GiB", 8 * 2**30)],
    )
    def test_offload_means_the_same_as_in_python(self, tmp_path: Path, text: str, amount: float | int | str) -> None:
        strategy = _cli(
            tmp_path, "--trainer.strategy=lightning_ssd.SSDOffloadStrategy", f"--trainer.strategy.offload={text}"
        ).trainer.strategy
        assert strategy.config.amount() == amount
        assert type(strategy.config.amount()) is type(amount)

    def test_a_config_file_trains(self, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        config = tmp_path / "config.yaml"
        config.write_text(
            f"""
trainer:
  strategy:
    class_path: lightning_ssd.SSDOffloadStrategy
    init_args:
      path: [{tmp_path}, {other}]
      offload: 1.0
      min_bytes: {MIN_BYTES}
      ssd_capacity: 1MiB
      staging_memory: 16MiB
  callbacks:
    - class_path: lightning_ssd.PrefetchScheduler
      init_args:
        window_bytes: 8KiB
        depth: 2
    - class_path: lightning_ssd.OffloadMonitor
      init_args:
        progress_bar: false
    - class_path: lightning_ssd.MicroBatchSwitch
    - class_path: tests.support.trainings.Watch
"""
        )
        cli = _cli(tmp_path, "fit", f"--config={config}", run=True)
        assert len(cli.model.losses) == 2
        watch = next(callback for callback in cli.trainer.callbacks if hasattr(callback, "moved"))
        assert watch.moved > 0
        assert [sum(type(callback) is kind for callback in cli.trainer.callbacks) for kind in OURS] == [1, 1, 1]

    def test_help_lists_every_argument_with_its_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exited:
            _cli(tmp_path, "--trainer.strategy.help", "lightning_ssd.SSDOffloadStrategy")
        assert exited.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for name, phrase in {
            "path": "directory for scratch files",
            "tier": "host memory only",
            "offload": "activations of each micro-batch to offload",
            "host_memory": "bytes of pinned memory",
            "ssd_capacity": "bytes of scratch space",
            "spill": "tier that is filled first",
            "min_bytes": "kept on the device",
            "staging_memory": "transferred to and from",
            "backend": "GPUDirect Storage",
            "checksum": "hash written bytes",
        }.items():
            assert f".{name} " in text, name
            assert phrase in text, name

    def test_a_wrong_value_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises((SystemExit, ValueError)) as refused:
            _cli(tmp_path, "--trainer.strategy=lightning_ssd.SSDOffloadStrategy", "--trainer.strategy.offload=1.5")
        assert "offload" in capsys.readouterr().err + str(refused.value)


@pytest.mark.thorough
def test_the_pytorch_lightning_tree_trains(tmp_path: Path) -> None:
    """The same holds under `pytorch_lightning`, which has its own classes: by name, instance and callback."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
import torch
import pytorch_lightning as pl
from lightning_ssd import ActivationOffload, SSDOffloadStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        self.losses = []
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

def train(strategy, *callbacks):
    torch.manual_seed(0)
    model = Model()
    loader = torch.utils.data.DataLoader(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), 16)
    trainer = pl.Trainer(
        strategy=strategy, callbacks=list(callbacks), accelerator="cpu", devices=1, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir={str(tmp_path)!r},
    )
    trainer.fit(model, loader)
    return model.losses

small = {small_arguments()!r}
plain = train("auto")
assert train("ssd_offload") == plain
assert train(SSDOffloadStrategy(**small)) == plain
assert train("auto", ActivationOffload(**small)) == plain
assert "lightning.pytorch" not in sys.modules
print("trained")
"""
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "trained"


def test_nothing_of_a_checkpoint_that_is_loaded_amid_a_run_is_held(tmp_path: Path) -> None:
    """LearningRateFinder restores its checkpoint, whose file it has removed, after the states are set up."""
    held: list[tuple[int, bool]] = []

    class Held(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            hooks = sum(len(module._load_state_dict_pre_hooks) for module in pl_module.modules())
            held.append((hooks, ".lr_find" in Path("/proc/self/maps").read_text()))

    def train(*callbacks: pl.Callback) -> None:
        strategy = SSDOffloadStrategy(tmp_path, states="gpu", offload=1.0, min_bytes=1, ssd_capacity="1MiB")
        model = small_model()
        model.learning_rate = 1e-2
        make_trainer(tmp_path, strategy, callbacks=[*callbacks, Held()]).fit(model, batches(8))

    train()
    train(pl.callbacks.LearningRateFinder(num_training_steps=3))
    assert held[0] == held[1] and not held[1][1]
