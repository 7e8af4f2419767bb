"""Cost of checksums: a training step, and the I/O engine, with `checksum=True` and with `checksum=False`.

    python -m benchmarks.checksums --path /nvme --out checksums.json [--rounds 5] [--cases activations states io]

Cases:
  activations   half of the activations to SSD and back, model states on the GPU: GPT, bf16-true, no recomputation
  states        weights and optimizer states on SSD, gradient checkpointing: GPT, bf16-true
  io            the blob store alone: pieces of 16 MiB, written and read by its I/O threads

In each round both settings run, in turn, and in the other order in the next round; each has a process of its own. Step:
median of the steps after the warm-up. A row shows the median over the rounds of (seconds with / seconds without), and
the least and largest of them.
`--shape HIDDENxLAYERSxBATCH` changes the model (`128x2x2 --device cpu` tries the benchmark out).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = ("activations", "states", "io")
WARM_UP = 4
IO_BYTES = 4 * 2**30


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the median seconds of a training step, and the bytes that it moved to and from the SSDs."""
    import torch
    from torch.utils.data import DataLoader

    from benchmarks.step_times import StepTimes
    from lightning_ssd import SSDOffloadStrategy
    from lightning_ssd._lightning import pl
    from lightning_ssd.recipes.models.gpt import GPT

    hidden, layers, batch = map(int, case["shape"].split("x"))
    cuda = case["device"] == "cuda"

    activations: dict[str, Any] = {"states": "gpu", "offload": 0.5, "spill": "ssd_first", "min_bytes": 2**16}
    states: dict[str, Any] = {"states": "ssd", "offload": "none", "gpu_memory": "1GiB"}
    arguments = activations if case["name"] == "activations" else states
    strategy = SSDOffloadStrategy(case["path"], checksum=case["checksum"], backend="posix", **arguments)
    times = StepTimes(losses=False)
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-true" if cuda else "32-true",
        strategy=strategy,
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=case["path"],
    )
    model = GPT(50304, 1024, hidden, layers, max(1, hidden // 128), gradient_checkpointing=case["name"] == "states")
    ids = torch.randint(0, 50257, (batch * (WARM_UP + case["steps"]), case["tokens"]))
    trainer.fit(model, DataLoader(ids, batch_size=batch))
    steps = times.seconds(WARM_UP)
    machine = torch.cuda.get_device_name() if cuda else "CPU"
    return {"seconds": statistics.median(steps), "steps": steps, "machine": machine}


def move(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of writing and of reading all pieces of a blob."""
    import torch

    from lightning_ssd.storage import BlobStore, PinnedPool

    piece, buffers = 16 * 2**20, 8
    store = BlobStore(
        [case["path"]], device=torch.device("cpu"), backend="posix", checksum=case["checksum"], piece_bytes=piece
    )
    try:
        blob = store.allocate(case["io_bytes"])
        pool = PinnedPool(buffers * piece, pin=False)
        memory = pool.acquire(buffers * piece).tensor.view(buffers, piece)
        memory.random_(0, 256, generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {"write": [], "read": []}
        # Each buffer has the bytes of one piece only, so that each read returns the bytes that were written.
        groups = [blob.pieces[start : start + buffers] for start in range(0, len(blob.pieces), buffers)]
        for _ in range(4):
            for name, call in (("write", store.write), ("read", store.read)):
                begin = time.perf_counter()
                for group in groups:
                    for future in [call(part, memory[index]) for index, part in enumerate(group)]:
                        future.result()
                seconds[name].append(time.perf_counter() - begin)
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}
    finally:
        store.close()


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Measures a case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checksums", "--one", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def compare(case: dict[str, Any], rounds: int, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measures both settings in turn, and prints a row for each quantity."""
    pairs: list[dict[str, Any]] = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        results = {checksum: run(case | {"checksum": checksum}) for checksum in order}
        pairs.append({"with": results[True], "without": results[False]})
        save(pairs)
    for quantity in ("write", "read") if case["name"] == "io" else ("seconds",):
        ratios = sorted(pair["with"][quantity] / pair["without"][quantity] for pair in pairs)
        without = statistics.median(pair["without"][quantity] for pair in pairs)
        label = case["name"] if quantity == "seconds" else f"{case['name']}, {quantity}"
        spread = f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {rounds} rounds)"
        print(f"{label:14} {without:8.3f} s without   x {statistics.median(ratios):.3f} with {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--path", default=".", help="directory on the SSD")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="see above")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs of each case")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a training")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the model")
    parser.add_argument("--shape", default="4096x8x16", help="HIDDENxLAYERSxBATCH of the case `activations`")
    parser.add_argument("--states-shape", default="2048x12x16", help="the same of the case `states`")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--io-bytes", type=int, default=IO_BYTES, help="bytes of the case `io`")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        case = json.loads(arguments.one)
        print(json.dumps(move(case) if case["name"] == "io" else train(case)), flush=True)
        return
    everything: dict[str, Any] = {}
    for name in arguments.cases:
        case = {
            "name": name,
            "path": arguments.path,
            "device": arguments.device,
            "shape": arguments.states_shape if name == "states" else arguments.shape,
            "steps": arguments.steps,
            "tokens": arguments.tokens,
            "io_bytes": arguments.io_bytes,
        }

        def save(pairs: list[dict[str, Any]], name: str = name, case: dict[str, Any] = case) -> None:
            everything[name] = {"case": case, "rounds": pairs}
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(everything, indent=1))

        compare(case, arguments.rounds, save)


if __name__ == "__main__":
    main()
