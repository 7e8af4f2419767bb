"""Final validation losses with exact optimizer states, and with those of `state_format` that take fewer bytes.

    python -m benchmarks.state_formats --out state_formats.json [--size medium] [--steps 1000] [--seeds 3] [--jobs 9]
    python -m benchmarks.state_formats --out state_formats.json --draw state_formats.png

Three trainings, each from the same weights and with the same batches in every format, for several seeds:

    gpt         GPT-2 on the sources of Python's standard library, byte by byte
    finetune    the exact GPT of seed 0, trained further on the texts of Python's help, at a third of the learning rate
    vit         ViT, which classifies drawings of eight shapes of random place, size and colour on noise

AdamW, clipping 1.0, all states in host memory. The table has the mean over seeds, its spread (the standard deviation of
the seeds' losses), and the mean difference from exact states of the same seed with its standard error. `--draw` trains
nothing and draws the losses of a file. No data is downloaded. `small` is for a CPU of two cores, `compact` for one GPU,
`medium` for several.

`--jobs` trainings run at the same time, each in a process of its own with its share of the cores, and on one of
`--devices` GPUs. Small models leave most of a GPU idle, so that 9 trainings of `compact` share one. Each training is
written when it ends; a later run with the same `--out`, size and steps makes those that the file lacks. The weights
with which fine-tuning begins are beside it (`.pt`).
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import pydoc_data.topics
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl

SIZES: dict[str, dict[str, Any]] = {
    "small": {"width": 96, "layers": 2, "heads": 4, "context": 64, "batch": 16, "image": 16, "precision": "32-true"},
    "compact": {"width": 512, "layers": 8, "heads": 8, "context": 256, "batch": 32, "image": 48,
                "precision": "bf16-mixed"},
    "medium": {"width": 768, "layers": 12, "heads": 12, "context": 512, "batch": 32, "image": 64,
               "precision": "bf16-mixed"},
}  # fmt: skip
RECIPES = ("gpt", "finetune", "vit")
FORMATS = ("fp32", "bf16", "8bit")
VALIDATED = 64
"""Batches of validation."""
WINDOW = 25
"""Steps whose mean training loss is a point of the picture."""
PATCH = 4
SHAPES = 8


class Bytes(Dataset[Tensor]):
    """Pieces of a text.

    Args:
        text: bytes.
        length: bytes of a piece.
    """

    def __init__(self, text: bytes, length: int) -> None:
        count = len(text) // length
        self._rows = torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8).view(count, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index].long()


class Drawings(Dataset[tuple[Tensor, int]]):
    """Pictures of eight shapes, each made from its number.

    Args:
        count: number of pictures.
        size: pixels of a side.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        shape = index % SHAPES
        place, radius, angle = torch.rand(2, generator=generator), torch.rand(1, generator=generator), 0.3
        axis = torch.linspace(-1, 1, self._size)
        y, x = axis[:, None] - 0.6 * (place[0] - 0.5), axis[None] - 0.6 * (place[1] - 0.5)
        x, y = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        size, distance, ring = 0.35 + 0.3 * radius, (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
        inside = (
            distance < size,
            ring < size,
            x.abs() + y.abs() < size,
            (distance < size) & (distance > size / 2),
            (ring < size) & (ring > size / 2),
            (torch.minimum(x.abs(), y.abs()) < size / 4) & (ring < size),
            (y > -size) & (y < size - 2 * x.abs()),
            (x.abs() < size) & (y.abs() < size / 3),
        )[shape]
        colour = 0.3 + 0.7 * torch.rand(3, 1, 1, generator=generator)
        return colour * inside + 0.5 * torch.randn(3, self._size, self._size, generator=generator), shape


class Transformer(pl.LightningModule):
    """GPT-2 or ViT of the given size, which is stepped by AdamW with a warm-up and a cosine.

    Args:
        kind: "gpt" or "vit".
        size: an entry of `SIZES`.
        steps: steps of the training.
        rate: largest learning rate.
    """

    def __init__(self, kind: str, size: dict[str, Any], steps: int, rate: float) -> None:
        super().__init__()
        self._steps = steps
        self._rate = rate
        self.trained: list[Tensor] = []
        self.validated: list[float] = []
        self.model = nn.ModuleDict({"gpt": _gpt, "vit": _vit}[kind](size))
        self._kind = kind

    def _loss(self, batch: Any) -> Tensor:
        if self._kind == "gpt":
            ids = batch
            x = self.model["tokens"](ids[:, :-1]) + self.model["places"].weight[: ids.shape[1] - 1]
            labels = ids[:, 1:].flatten()
        else:
            pictures, labels = batch
            patches = nn.functional.unfold(pictures, PATCH, stride=PATCH).transpose(1, 2)
            x = self.model["tokens"](patches) + self.model["places"].weight
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device) if self._kind == "gpt" else None
        for block in self.model["blocks"]:  # type: ignore[union-attr]
            x = block(x, src_mask=mask, is_causal=mask is not None)
        x = self.model["norm"](x)
        x = x.flatten(0, 1) if self._kind == "gpt" else x.mean(1)
        return nn.functional.cross_entropy(self.model["head"](x).float(), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.trained.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self._loss(batch).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._rate, weight_decay=0.1)
        warm_up = max(1, self._steps // 20)

        def factor(step: int) -> float:
            return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self._steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _blocks(size: dict[str, Any]) -> nn.ModuleList:
    width, heads = size["width"], size["heads"]
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in range(size["layers"])
    )


def _gpt(size: dict[str, Any]) -> dict[str, nn.Module]:
    width = size["width"]
    ends = {"norm": nn.LayerNorm(width), "head": nn.Linear(width, 256)}
    return {"tokens": nn.Embedding(256, width), "places": nn.Embedding(size["context"], width),
            "blocks": _blocks(size), **ends}  # fmt: skip


def _vit(size: dict[str, Any]) -> dict[str, nn.Module]:
    width, patches = size["width"], (size["image"] // PATCH) ** 2
    ends = {"norm": nn.LayerNorm(width), "head": nn.Linear(width, SHAPES)}
    return {"tokens": nn.Linear(3 * PATCH**2, width), "places": nn.Embedding(patches, width),
            "blocks": _blocks(size), **ends}  # fmt: skip


def data_of(recipe: str, size: dict[str, Any], steps: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns the samples of training and those of validation."""
    validated = VALIDATED * size["batch"]
    every: Dataset[Any]
    if recipe == "vit":
        count = steps * size["batch"] + validated
        every = Drawings(count, size["image"])
    else:
        if recipe == "gpt":
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            text = b"\0".join(file.read_bytes() for file in files)
        else:
            text = "\0".join(pydoc_data.topics.topics.values()).encode()
        every = Bytes(text, size["context"] + 1)
        count = len(every)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(every, order[validated:]), Subset(every, order[:validated])


def train(
    recipe: str, state_format: Any, seed: int, steps: int, size: dict[str, Any], start: dict[str, Tensor] | None
) -> tuple[float, list[float], dict[str, Tensor]]:
    """Returns the final validation loss, the training losses of windows of steps, and the weights."""
    pl.seed_everything(seed, verbose=False)
    module = Transformer("vit" if recipe == "vit" else "gpt", size, steps, 1e-3 / (3 if start else 1))
    if start is not None:
        module.load_state_dict(start)
    samples, held_out = data_of(recipe, size, steps)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as path:
        trainer = pl.Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=1,
            precision=size["precision"],
            strategy=SSDOffloadStrategy(path, states="host", min_bytes=1, offload="none", state_format=state_format),
            max_steps=steps,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=path,
        )
        shuffled = DataLoader(samples, size["batch"], shuffle=True, drop_last=True, generator=_generator(seed))
        trainer.fit(module, shuffled)
        evaluated = pl.Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=1,
            precision=size["precision"],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=path,
        )
        with contextlib.redirect_stdout(None):
            evaluated.validate(module, DataLoader(held_out, size["batch"]), verbose=False)
    windows = torch.stack(module.trained).split(WINDOW)
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    return statistics.fmean(module.validated), [window.mean().item() for window in windows], weights


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Run(NamedTuple):
    """A training.

    Attributes:
        recipe: name of the training.
        state_format: value of the argument.
        seed: seed of the weights and of the order of samples.
    """

    recipe: str
    state_format: str
    seed: int


Results = dict[Run, tuple[float, list[float]]]
"""Final validation loss and training losses of each training that has ended."""

FIRST = Run("gpt", "fp32", 0)
"""The training that makes the weights with which fine-tuning begins."""


def run(made: Run, steps: int, size: dict[str, Any], weights: Path) -> tuple[float, list[float]]:
    """Makes a training in a process of its own; the first one writes its weights."""
    start = torch.load(weights) if made.recipe == "finetune" else None
    loss, curve, trained = train(made.recipe, made.state_format, made.seed, steps, size, start)
    if made == FIRST:
        torch.save(trained, weights)
    return loss, curve


def begin_process(places: Any, threads: int) -> None:
    """Gives a process of trainings its GPU, before CUDA is used, and its share of the cores."""
    os.environ["CUDA_VISIBLE_DEVICES"] = places.get()
    torch.set_num_threads(threads)


def run_all(
    runs: list[Run], results: Results, steps: int, size: dict[str, Any], weights: Path, jobs: int, devices: list[str]
) -> Iterator[Run]:
    """Makes trainings and adds their results. Yields each one that has ended."""
    context = multiprocessing.get_context("spawn")
    places = context.Queue()
    for job in range(jobs):
        places.put(devices[job % len(devices)])
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ProcessPoolExecutor(jobs, context, begin_process, (places, threads)) as pool:
        running: dict[Future[tuple[float, list[float]]], Run] = {}
        while runs or running:
            ready = [made for made in runs if made.recipe != "finetune" or FIRST in results]
            for made in ready:
                running[pool.submit(run, made, steps, size, weights)] = made
            runs = [made for made in runs if made not in ready]
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                made = running.pop(future)
                results[made] = future.result()
                yield made


def table_of(results: Results) -> str:
    """Returns a table in Markdown."""
    rows = ["| training | states | loss, mean | spread of seeds | difference from exact |", "|---|---|---|---|---|"]
    for recipe, name in product(RECIPES, FORMATS):
        losses = {made.seed: loss for made, (loss, _) in results.items() if made[:2] == (recipe, name)}
        if not losses:
            continue
        spread = _deviation(list(losses.values()))
        exact = {seed: results[Run(recipe, "fp32", seed)][0] for seed in losses if Run(recipe, "fp32", seed) in results}
        differences = [losses[seed] - loss for seed, loss in exact.items()]
        difference = ""
        if differences and name != "fp32":
            error = _deviation(differences) / math.sqrt(len(differences))
            difference = f"{statistics.fmean(differences):+.5f} ± {error:.5f}"
        rows.append(f"| {recipe} | {name} | {statistics.fmean(losses.values()):.4f} | {spread:.4f} | {difference} |")
    return "\n".join(rows)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(how: dict[str, Any], results: Results, picture: Path) -> None:
    """Draws training losses, a line for each seed and format, and the final validation losses."""
    from matplotlib.figure import Figure

    recipes = [recipe for recipe in RECIPES if any(made.recipe == recipe for made in results)]
    figure = Figure(figsize=(4.2 * len(recipes), 3.2))
    styles = dict(zip(FORMATS, (("black", "-"), ("tab:blue", "--"), ("tab:orange", ":")), strict=True))
    for axes, recipe in zip(figure.subplots(1, len(recipes), squeeze=False)[0], recipes, strict=True):
        drawn: set[str] = set()
        for made, (validated, losses) in sorted(results.items()):
            if made.recipe != recipe:
                continue
            name, (colour, style) = made.state_format, styles[made.state_format]
            steps = [(window + 0.5) * WINDOW for window in range(len(losses))]
            label = None if name in drawn else name
            axes.plot(steps, losses, color=colour, linestyle=style, linewidth=1, label=label)
            axes.scatter([how["steps"] * 1.03], [validated], s=12, color=colour)
            drawn.add(name)
        axes.set_title(recipe)
        axes.set_xlabel("step (points: final validation loss)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def read(path: Path) -> tuple[dict[str, Any], Results]:
    """Returns how the trainings of a file were made, and their results."""
    text = json.loads(path.read_text())
    rows = text["runs"]
    return text["how"], {
        Run(row["recipe"], row["state_format"], row["seed"]): (row["loss"], row["training"]) for row in rows
    }


def write(path: Path, how: dict[str, Any], results: Results) -> None:
    """Writes a file of results, whole at any moment, and the table beside it."""
    rows = [made._asdict() | {"loss": loss, "training": curve} for made, (loss, curve) in sorted(results.items())]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"how": how, "runs": rows}) + "\n")
    new.replace(path)
    command = f"python -m benchmarks.state_formats --size {how['size']} --steps {how['steps']}"
    path.with_suffix(".md").write_text(
        f"`{command}` on a {how['machine']}, torch {how['torch']}:\n\n{table_of(results)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results, with a table beside it")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, help="see above")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS, help="values of `state_format`")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share the trainings")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the results of `--out` (matplotlib)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if arguments.draw:
        draw(*read(out), arguments.draw)
        return
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    how = {"machine": machine, "torch": torch.__version__, "size": arguments.size, "steps": arguments.steps}
    results: Results = {}
    if out.exists():
        earlier, results = read(out)
        if changed := [name for name in ("size", "steps") if earlier[name] != how[name]]:
            parser.error(f"{out} has trainings of other {', '.join(changed)}: {earlier}. Name another file")
    chosen = product(range(arguments.seeds), arguments.recipes, arguments.formats)
    runs = [made for seed, recipe, name in chosen if (made := Run(recipe, name, seed)) not in results]
    weights = out.with_suffix(".pt")
    if any(made.recipe == "finetune" for made in runs) and not (FIRST in results and weights.exists()):
        results.pop(FIRST, None)
        runs = [FIRST, *(made for made in runs if made != FIRST)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(arguments.devices))))
    devices = visible.split(",")[: arguments.devices]
    for made in run_all(runs, results, arguments.steps, SIZES[arguments.size], weights, arguments.jobs, devices):
        print(f"{made.recipe:9} seed {made.seed}  {made.state_format:5} {results[made][0]:.4f}", flush=True)
        write(out, how, results)
    print(table_of(results))


if __name__ == "__main__":
    main()
