"""Recipes with `recover=True` that are killed, and run again: for tests/recipes/test_kills.py.

    python -m tests.support.killed_recipes PATH RECIPE...

Of each recipe, a run is killed amid one of its writes, twice, and run again until it ends, in new processes of one that
has imported everything. The weights must be those of a run that was not killed; the exit status says whether all were.
"""

import os
import sys
import traceback
from pathlib import Path

import lightning.pytorch  # noqa: F401
import torch

import lightning_ssd.callbacks
import lightning_ssd.recipes.data
import lightning_ssd.recipes.models  # noqa: F401
from tests.support.killed import DyingBackend
from tests.support.measurements import measure_few_bytes
from tests.support.recipes import read

OPTIONS = ["--trainer.accelerator=cpu", "--trainer.max_steps=6", "--trainer.limit_val_batches=1"]
OPTIONS += ["--trainer.val_check_interval=4", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
OPTIONS += ["--trainer.enable_model_summary=false", "--trainer.callbacks=[]", "--model.warmup_steps=2"]
OPTIONS += [f"--trainer.strategy.{option}" for option in ("states=ssd", "recover=true", "min_bytes=1", "offload=none")]
OPTIONS += ["--trainer.strategy.ssd_capacity=64MiB", "--trainer.strategy.host_memory=64MiB"]
TUNED = ["--data.max_samples=60", "--data.block_size=256", "--data.batch_size=2"]
TINY = {
    "bert": ["--model.num_hidden_layers=1", "--model.hidden_size=32", "--data.max_bytes=100000", "--model.dropout=0.1"],
    "t5": ["--model.d_model=32", "--model.d_ff=64", "--data.max_bytes=100000", "--model.dropout=0.1"],
    "dit": ["--model.num_layers=1", "--model.hidden_size=32", "--data.batch_size=16"],
    "finetune": TUNED,
    "lora": [*TUNED, "--model.adapter_dropout=0.1"],
}


class CountingBackend(DyingBackend):
    """Counts the writes of this process, and may kill it at one of them."""

    last: "CountingBackend"

    def __init__(self, dies_at: int = 0) -> None:
        super().__init__(dies_at, direct=False)
        CountingBackend.last = self

    @property
    def writes(self) -> int:
        """Number of writes, of a backend that kills nothing."""
        return -self._left


def run(recipe: str, path: Path, dies_at: int = 0) -> bool:
    """Trains a recipe in a new process, killed at a write if `dies_at` is not 0; returns whether it ended."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            os.chdir(path)
            Path("config.yaml").unlink(missing_ok=True)  # of the previous run
            backend = f"{{class_path: {CountingBackend.__module__}.CountingBackend, init_args: {{dies_at: {dies_at}}}}}"
            options = [
                *OPTIONS,
                *TINY[recipe],
                f"--trainer.strategy.path={path}",
                f"--trainer.strategy.backend={backend}",
            ]
            model = read(recipe, options=tuple(options), run=True).model
            torch.save((model.state_dict(), CountingBackend.last.writes), path / "outcome")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"{recipe}: a run failed")
    return os.WIFEXITED(status)


def main(root: Path, recipes: list[str]) -> None:
    """Compares killed runs with runs that were not."""
    for recipe in recipes:
        path = root / recipe
        path.mkdir()
        assert run(recipe, path)
        expected, writes = torch.load(path / "outcome")
        for dies_at in (writes // 2, writes // 4):  # the second one counts from where the first run was killed
            if run(recipe, path, dies_at):
                sys.exit(f"{recipe}: write {dies_at} of {writes} was never made")
        assert run(recipe, path)
        weights, _ = torch.load(path / "outcome")
        if expected.keys() != weights.keys() or not all(torch.equal(expected[name], weights[name]) for name in weights):
            sys.exit(f"{recipe}: the weights of a run that was killed are others")
        print(f"{recipe}: the same weights after 2 kills in {writes} writes", flush=True)


if __name__ == "__main__":
    measure_few_bytes()
    sys.argv, arguments = sys.argv[:1], sys.argv[1:]
    main(Path(arguments[0]), arguments[1:])
