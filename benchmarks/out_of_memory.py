"""Records the error and the lines of docs/from-oom-to-training.md: its module, larger, on a GPU capped at 3 GiB.

    python -m benchmarks.out_of_memory > benchmarks/results/out_of_memory.txt

The module and its training are those of the page. 302M parameters need 4.5 GiB in fp32, so that plain Lightning ends in
`torch.OutOfMemoryError`; then the same module trains by one word. It takes seconds.
"""

import argparse
import gc
import logging
import re
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import cap_gpu_memory

PAGE = Path(__file__).parents[1] / "docs" / "from-oom-to-training.md"
WIDTH, LAYERS, GPU_GIB = 1024, 24, 3


def tutorial() -> dict[str, Any]:
    """Returns the names of the page's first block, whose module has the size of this benchmark."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    definitions, _, _ = blocks[0].rpartition("plain = fit()")
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(definitions, str(PAGE), "exec"), names)
    names["Classifier"].__init__.__defaults__ = (WIDTH, LAYERS)
    return names


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU, whose memory it caps")
    cap_gpu_memory(GPU_GIB)
    fit = tutorial()["fit"]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    machine = f"{torch.cuda.get_device_name()}, {GPU_GIB} GiB of it, torch {torch.__version__}"
    print(f"{machine}, {LAYERS} layers of width {WIDTH}\n\n>>> fit()", flush=True)
    try:
        fit(**quiet)
    except torch.OutOfMemoryError as error:
        print(f"torch.OutOfMemoryError: {error}\n", flush=True)
    else:
        raise SystemExit("plain Lightning had enough memory: nothing to record")
    gc.collect()  # the failed training is in reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    print('>>> fit("ssd_offload")', flush=True)
    lightning = logging.getLogger("lightning.pytorch")
    lightning.addHandler(logging.StreamHandler(sys.stdout))
    trainer = fit("ssd_offload", **quiet)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f">>> trainer.global_step, torch.cuda.max_memory_allocated() / 2**30\n({trainer.global_step}, {peak:.2f})")


if __name__ == "__main__":
    main()
