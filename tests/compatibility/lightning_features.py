"""Features of Lightning: Trainer arguments, callbacks, hooks, manual optimization, and user code in them."""

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.compatibility.case import EQUAL, Case, Expectation, Fit, Refused, fit, indices
from tests.compatibility.families import WIDTH, Trained, mlp, rows


class Plain(Trained):
    """Two small blocks and AdamW, which the cases change."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(mlp(), mlp()), rows)


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.change_gradients()
        optimizer.step()
        return loss.detach()

    def change_gradients(self) -> None:
        return None


class ManualAccumulation(Manual):
    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class ClippedByTorch(Manual):
    def change_gradients(self) -> None:
        self.seen = [nn.utils.clip_grad_norm_(self.parameters(), 0.05)]


class ClippedByLightning(Manual):
    def change_gradients(self) -> None:
        self.clip_gradients(self.optimizers(), 0.05, "norm")  # type: ignore[arg-type]


class Adversaries(Plain):
    """A GAN: two optimizers by hand, toggled."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model[0].parameters(), 1e-2), torch.optim.SGD(self.model[1].parameters(), 1e-2)

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        loss = torch.zeros(())
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch) * (1.0 if index else -0.1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss.detach()


class Truncated(Manual):
    """Backpropagation through time, truncated: several backwards and steps in one training step."""

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        state = self.inputs(torch.Generator().manual_seed(int(batch)))["input"]
        loss = torch.zeros(())
        for _ in range(3):
            state = self.model(state.detach())
            loss = state.pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()


class Sharpness(Manual):
    """SAM: a step up the gradient, a second backward there, and a step from the original weights."""

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        ups = []
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
            for parameter in self.parameters():
                up = 0.05 * parameter.grad / norm  # type: ignore[operator]
                parameter.add_(up)
                ups.append(up)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, up in zip(self.parameters(), ups, strict=True):
                parameter.sub_(up)
        optimizer.step()
        return loss.detach()


class Clamped(Plain):
    """WGAN's clamp of the weights after a step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


class Teacher(Plain):
    """A target network that follows the trained one (BYOL, mean teacher, DQN)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, index: int) -> Tensor:
        inputs = self.inputs(torch.Generator().manual_seed(int(index)))["input"]
        with torch.no_grad():
            target = self.teacher(inputs)
        return (self.model(inputs) - target).pow(2).mean() + self.model(inputs).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, followed in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                self.follow(mine, followed)

    def follow(self, mine: Tensor, followed: Tensor) -> None:
        mine.lerp_(followed, 0.1)


class TeacherByProducts(Teacher):
    def follow(self, mine: Tensor, followed: Tensor) -> None:
        mine.mul_(0.9).add_(followed, alpha=0.1)


class TeacherByData(Teacher):
    def follow(self, mine: Tensor, followed: Tensor) -> None:
        mine.data = 0.9 * mine.data + 0.1 * followed.data


class TeacherByCopy(Teacher):
    def follow(self, mine: Tensor, followed: Tensor) -> None:
        mine.copy_(followed)


class Averaged(Plain):
    """torch's AveragedModel follows the trained one, and is validated with."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), 1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.model)


class Grown(Plain):
    """A parameter group is added during the training."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model[0].parameters(), 1e-2)

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().optimizer.add_param_group({"params": list(self.model[1].parameters())})  # type: ignore[union-attr]


class Lazy(Plain):
    """A layer whose shape the first forward finds."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.LazyLinear(WIDTH), mlp())


class InitializedLate(Plain):
    """Weights are initialized in `on_fit_start`."""

    def on_fit_start(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.1)
                module.bias.data.zero_()


class ResetAmid(Plain):
    """A layer is reset during the training."""

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model[1][0].reset_parameters()


class Reads(Plain):
    """Weights are read after each step: two units by one operator, whole weights, and copies that are kept."""

    def on_train_batch_end(self, *_: Any) -> None:
        first, second = self.model[0][0].weight, self.model[1][0].weight
        self.kept = [*getattr(self, "kept", []), first.detach().clone()]
        self.seen = [
            (first - second).abs().sum().detach(),
            torch.cat([first.flatten(), second.flatten()]).norm().detach(),
            torch.stack(torch._foreach_norm([first, second])).detach(),
            torch.tensor(first.detach().cpu().numpy().sum()),
            first.detach().norm(),
            torch.stack([value.sum() for value in self.kept]),
        ]


class StateDicts(Plain):
    """`state_dict` is taken after every step, and loaded back before the next."""

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        if batch_idx == 2:
            self.load_state_dict(self.kept)

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        state = self.state_dict()
        self.seen = [torch.stack([value.sum() for value in state.values()]).detach()]
        if batch_idx == 0:
            self.kept = {name: value.detach().clone() for name, value in state.items()}


class CopyEngine(Plain):
    """The module is copied and saved amid the training."""

    def on_train_batch_end(self, *_: Any) -> None:
        buffer = io.BytesIO()
        torch.save(self.model, buffer)
        buffer.seek(0)
        for copied in (copy.deepcopy(self.model), torch.load(buffer, weights_only=False)):
            self.seen = [*getattr(self, "seen", []), torch.stack([p.detach().sum() for p in copied.parameters()])]


class Looks(Plain):
    """Hooks read and change gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen = [torch.stack([gradient.norm() for gradient in gradients])]
        for gradient in gradients:
            gradient.mul_(0.5)


class LooksAfterBackward(Plain):
    def on_after_backward(self) -> None:
        self.seen = [torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None])]


class ClipsItself(Plain):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.seen = [nn.utils.clip_grad_norm_(self.parameters(), 0.05)]


class Backward(Plain):
    """Overrides `backward`, and scales gradients there."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class OwnStep(Plain):
    """`optimizer_step` runs the closure, clips and steps, but leaves out the second step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        if batch_idx != 1:
            optimizer.step()


class Skipping(Plain):
    """`training_step` sometimes returns None."""

    def training_step(self, batch: int, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.loss(batch)


class Frozen(Plain):
    """A part is frozen throughout (as with LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


class Backbone(Plain):
    """`backbone` is frozen by BackboneFinetuning, and thaws."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.model[0], self.model[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


class Scheduled(Plain):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}


class Configured(Plain):
    """Layers are made in `configure_model`."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = mlp()

    def loss(self, index: int) -> Tensor:
        return self.late(self.model(**self.inputs(torch.Generator().manual_seed(int(index))))).pow(2).mean()


class Sized(pl.LightningModule):
    """Its loader has a batch size that BatchSizeFinder changes."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.batch_size, self.lr = nn.Sequential(mlp(), mlp()), 2, 1e-3

    def train_dataloader(self) -> Any:
        rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def own_loader(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    trainer.fit(module)


def with_validation(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    trainer.fit(module, indices(), indices(2))


def twice(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    fit(trainer, module)
    trainer.fit_loop.epoch_loop.max_steps *= 2
    trainer.fit_loop.max_epochs = None
    trainer.fit(module, indices())


def evaluated(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    trainer.fit(module, indices(), indices(2))
    trainer.validate(module, indices(2), verbose=False)


def resumed(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    fit(trainer, module)
    checkpoint = next(Path(trainer.default_root_dir).glob("saved/*.ckpt"))
    for parameter in module.parameters():
        parameter.data.zero_()
    trainer.fit_loop.epoch_loop.max_steps *= 2
    trainer.fit(module, indices(), ckpt_path=str(checkpoint), weights_only=False)


def saved_by_hand(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Saves after `fit`, and resumes from that file."""
    fit(trainer, module)
    path = Path(trainer.default_root_dir) / "by_hand.ckpt"
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps *= 2
    trainer.fit(module, indices(), ckpt_path=str(path), weights_only=False)


def compiled(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    trainer.fit(torch.compile(module, backend="aot_eager"), indices())  # type: ignore[arg-type]


def read_gradients() -> Any:
    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        module.seen = [torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])]

    return pl.callbacks.LambdaCallback(on_before_optimizer_step=look)


def pruning(**how: Any) -> pl.Callback:
    return pl.callbacks.ModelPruning("l1_unstructured", amount=0.25, **how)


class SavedInRoot(pl.callbacks.ModelCheckpoint):
    """Saves to `saved` in the Trainer's `default_root_dir`."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.dirpath = str(Path(trainer.default_root_dir) / "saved")


def case(
    name: str,
    module: Callable[[], pl.LightningModule] = Plain,
    states: Expectation = EQUAL,
    *,
    fit: Fit = fit,
    callbacks: Callable[[], list[pl.Callback]] = list,
    quick: bool = False,
    activations: Expectation = EQUAL,
    **arguments: Any,
) -> Case:
    def trainer() -> Mapping[str, Any]:
        return {**arguments, "callbacks": callbacks()}

    return Case(name, module, states, activations, trainer, fit, quick)


LRS = torch.optim.lr_scheduler
CALLBACKS = pl.callbacks

CASES = [
    case("`accumulate_grad_batches=2`", accumulate_grad_batches=2),
    case("`gradient_clip_val`, norm", gradient_clip_val=0.05, quick=True),
    case("`gradient_clip_val`, value", gradient_clip_val=1e-3, gradient_clip_algorithm="value", quick=True),
    case("`overfit_batches`", overfit_batches=2, quick=True),
    case("`limit_train_batches`, several epochs", limit_train_batches=1, max_epochs=3),
    case(
        "`limit_val_batches`, `val_check_interval`",
        fit=with_validation,
        limit_val_batches=1,
        val_check_interval=2,
        quick=True,
    ),
    case("Validation at the end of an epoch", fit=with_validation),
    case("`detect_anomaly=True`", detect_anomaly=True),
    case('`profiler="simple"`', profiler="simple"),
    case("`inference_mode=False`", fit=with_validation, inference_mode=False),
    case("`fit`, then `validate`", fit=evaluated),
    case("`fit` twice", fit=twice, quick=True),
    case(
        "Resume from ModelCheckpoint",
        fit=resumed,
        callbacks=lambda: [SavedInRoot()],
        enable_checkpointing=True,
        quick=True,
    ),
    case("Resume from `trainer.save_checkpoint()` after `fit`", fit=saved_by_hand),
    case("`fit(torch.compile(module))`", fit=compiled, quick=True),
    case(
        "EarlyStopping",
        fit=with_validation,
        val_check_interval=1,
        callbacks=lambda: [CALLBACKS.EarlyStopping("val_loss", patience=1)],
        quick=True,
    ),
    case(
        "StochasticWeightAveraging",
        limit_train_batches=1,
        max_epochs=3,
        callbacks=lambda: [CALLBACKS.StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    ),
    case("EMAWeightAveraging", callbacks=lambda: [CALLBACKS.EMAWeightAveraging(decay=0.5)]),
    case(
        "LearningRateFinder",
        Sized,
        fit=own_loader,
        callbacks=lambda: [CALLBACKS.LearningRateFinder(num_training_steps=6)],
        quick=True,
    ),
    case(
        "BatchSizeFinder",
        Sized,
        fit=own_loader,
        callbacks=lambda: [CALLBACKS.BatchSizeFinder(max_trials=2, steps_per_trial=1)],
        quick=True,
    ),
    case(
        "BackboneFinetuning",
        Backbone,
        limit_train_batches=1,
        max_epochs=3,
        callbacks=lambda: [CALLBACKS.BackboneFinetuning(1, verbose=False, backbone_initial_lr=1e-3)],
    ),
    case(
        "GradientAccumulationScheduler",
        limit_train_batches=2,
        max_epochs=2,
        callbacks=lambda: [CALLBACKS.GradientAccumulationScheduler({0: 1, 1: 2})],
    ),
    case(
        "ModelPruning",
        callbacks=lambda: [pruning(use_lottery_ticket_hypothesis=False)],
        limit_train_batches=1,
        max_epochs=3,
    ),
    case(
        "ModelPruning with lottery tickets",
        callbacks=lambda: [pruning()],
        limit_train_batches=1,
        max_epochs=3,
    ),
    case(
        "Timer, ModelSummary",
        enable_model_summary=True,
        callbacks=lambda: [CALLBACKS.Timer(), CALLBACKS.ModelSummary(2)],
    ),
    case("A LambdaCallback that reads `.grad`", callbacks=lambda: [read_gradients()], quick=True),
    case(
        "StepLR", lambda: Scheduled(lambda optimizer: {"scheduler": LRS.StepLR(optimizer, 1, 0.5), "interval": "step"})
    ),
    case(
        "OneCycleLR",
        lambda: Scheduled(lambda optimizer: {"scheduler": LRS.OneCycleLR(optimizer, 1e-2, 8), "interval": "step"}),
    ),
    case(
        "ReduceLROnPlateau",
        lambda: Scheduled(
            lambda optimizer: {"scheduler": LRS.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}
        ),
        fit=with_validation,
        limit_train_batches=1,
        max_epochs=3,
    ),
    case("Manual optimization", Manual),
    case("Manual optimization with accumulation", ManualAccumulation),
    case("Manual optimization, `nn.utils.clip_grad_norm_`", ClippedByTorch),
    case("Manual optimization, `self.clip_gradients`", ClippedByLightning),
    case("GAN: two optimizers by hand", Adversaries, quick=True),
    case("Truncated backpropagation through time", Truncated),
    case("SAM", Sharpness),
    case("WGAN: `clamp_` of weights after a step", Clamped),
    case("Target network, `lerp_`", Teacher),
    case("Target network, `mul_().add_()`", TeacherByProducts),
    case("Target network, `.data =`", TeacherByData),
    case("Target network, `copy_`", TeacherByCopy),
    case("`swa_utils.AveragedModel`", Averaged),
    case("`add_param_group` amid training", Grown),
    case("`nn.LazyLinear`", Lazy, states=Refused("has no shape yet: run one forward"), quick=True),
    case("`nn.init` and `.data` in `on_fit_start`", InitializedLate),
    case("`reset_parameters` amid training", ResetAmid),
    case("Weights read after steps", Reads),
    case("`state_dict` and `load_state_dict` amid training", StateDicts),
    case("`copy.deepcopy` and `torch.save` of a module amid training", CopyEngine),
    case("`on_before_optimizer_step` that changes gradients", Looks, quick=True),
    case("`on_after_backward` that reads gradients", LooksAfterBackward),
    case("`configure_gradient_clipping`, `nn.utils.clip_grad_norm_`", ClipsItself, quick=True),
    case("`backward` that changes gradients", Backward, quick=True),
    case("`optimizer_step` that runs the closure, clips and steps", OwnStep, quick=True),
    case("`training_step` that returns None", Skipping, quick=True),
    case("Frozen parameters", Frozen),
    case("`configure_model`", Configured),
]
