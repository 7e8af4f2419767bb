"""CPU time that the activation offloader adds to each saved tensor (pack and unpack together).

    python -m benchmarks.hook_overhead [--device cuda]

A small GPT is run forward and backward with and without the offloader, and the difference of times is divided by the
number of saved tensors, including weights and small ones. The GPU and the link have so little work that the host's time
is the step's.

The next lines have the host's time of a forward under plans that keep all saved tensors of all blocks: the dispatch
mode intercepts the operators of all blocks, or of none. The last ones have the time of a forward and backward that
checkpoints no block, or all of them: by torch's checkpointing, which transformers' models have, or by a plan.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2LMHeadModel

from lightning_ssd.activations import OffloadConfig, PlanMode, make_offloader, make_schedule, mark_weights
from lightning_ssd.profiling import TraceMode
from lightning_ssd.recipes.models.gpt import GPT

LARGE = 2**16
CASES: dict[str, dict[str, Any]] = {
    "kept: smaller than min_bytes": {"tier": "host", "offload": 1.0, "min_bytes": "1GiB"},
    "a quarter of the bytes to host memory": {"tier": "host", "offload": 0.25, "min_bytes": LARGE},
    "half of the bytes to host memory": {"tier": "host", "offload": 0.5, "min_bytes": LARGE},
    "everything to host memory": {"tier": "host", "offload": 1.0, "min_bytes": LARGE},
}


def small_gpt(device: torch.device) -> GPT2LMHeadModel:
    """Returns a GPT of 12 layers whose blocks save tensors of 128 to 512 KiB."""
    module = GPT(vocab_size=512, n_positions=256, n_embd=128, n_layer=12, n_head=4)
    with device:
        module.configure_model()
    assert module.model is not None
    return module.model


def main() -> None:
    """Prints a table: microseconds per saved tensor, by the treatment of the large ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device of the model")
    parser.add_argument("--rounds", type=int, default=30, help="measured passes of each case")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model: Any = small_gpt(device)
    mark_weights(model)
    ids = torch.randint(0, 512, (1, 256), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    def seconds(run: Callable[[], None]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    counted: list[int] = []
    with saved_tensors_hooks(lambda tensor: counted.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        step()
    print(
        f"{len(counted)} saved tensors a pass, {sum(size >= LARGE for size in counted)} of 64 KiB or more, on {device}"
    )
    print("| treatment | stored a pass | us a saved tensor (quartiles) |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, config in CASES.items():
            offloader = make_offloader(OffloadConfig(**config), device, default_path=Path(directory))
            offloader.run(replace(offloader.policy, window_bytes=2**22))

            def offloaded(offloader: Any = offloader) -> None:
                offloader.begin_micro_batch()
                with offloader.hooks():
                    step()
                offloader.end_backward()

            for _ in range(6):
                seconds(offloaded)
            before = offloader.stats()
            added = sorted(seconds(offloaded) - seconds(step) for _ in range(arguments.rounds))
            stored = (offloader.stats().stored - before.stored) / arguments.rounds
            offloader.close()
            low, middle, high = (value * 1e6 for value in statistics.quantiles(added, n=4))
            print(
                f"| {name} | {stored / 2**20:.1f} MiB | {middle / len(counted):.1f} ({low / len(counted):.1f} to "
                f"{high / len(counted):.1f}) |"
            )
    print_modes(model, ids, step, arguments.rounds)


def print_modes(model: Any, ids: Tensor, plain: Callable[[], None], rounds: int) -> None:
    """Prints the CPU time of the training thread in a forward whose blocks are intercepted by a mode, or are not."""
    units = [[block] for block in model.transformer.h]
    with tempfile.TemporaryDirectory() as directory:
        offloader = make_offloader(OffloadConfig(min_bytes=LARGE), ids.device, default_path=Path(directory))

        def step() -> float:
            """Returns the CPU seconds of the forward."""
            offloader.begin_micro_batch()
            begin = time.thread_time()
            with offloader.hooks():
                loss = model(input_ids=ids, labels=ids).loss
            seconds = time.thread_time() - begin
            loss.backward()
            offloader.end_backward()
            return seconds

        recorder = TraceMode(units, ids.device)
        offloader.run(replace(offloader.policy, mode=recorder, on_saved=recorder.on_saved))
        step()
        recorder.finish()
        recorder.close()
        saved = recorder.graph.saved(LARGE)
        kept = {item.buffer: "keep" for item in saved}
        checkpointed = dict.fromkeys(recorder.graph.checkpoint_bytes(), "keep")

        def apply(**options: Any) -> PlanMode:
            """Applies a plan that keeps all saved tensors, and returns its mode."""
            mode = PlanMode(units, offloader)
            mode.schedule = make_schedule(recorder.graph, saved, kept, save_weights=True, **options)
            offloader.run(replace(offloader.policy, mode=mode, on_saved=None))
            return mode

        for plain_calls in (False, True):
            mode = apply(plain_calls=plain_calls)
            low, middle, high = (1e3 * value for value in statistics.quantiles([step() for _ in range(rounds)], n=4))
            intercepted = len(units) - len(mode.schedule.plain_calls)
            print(f"{intercepted} blocks in a mode: {middle:.2f} ms ({low:.2f} to {high:.2f}) a forward")
            mode.close()
        mode = apply(plain_calls=True, checkpointed=checkpointed)
        print_checkpointing(model, plain, step, rounds)
        mode.close()
        offloader.close()


def print_checkpointing(model: Any, plain: Callable[[], None], planned: Callable[[], object], rounds: int) -> None:
    """Prints the time of a forward and backward without checkpointing, with torch's, and with that of a plan."""
    times: dict[str, list[float]] = {"no block": [], "all blocks, by torch": [], "all blocks, by a plan": []}
    for _ in range(rounds):  # in turn, as processors change their speed
        for name, seconds in times.items():
            if name.endswith("torch"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            begin = time.perf_counter()
            planned() if name.endswith("plan") else plain()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            model.gradient_checkpointing_disable()
    for name, seconds in times.items():
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        print(f"{name} checkpointed: {middle:.2f} ms ({low:.2f} to {high:.2f}) a forward and backward")


if __name__ == "__main__":
    main()
