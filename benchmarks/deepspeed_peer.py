"""One training of a model by DeepSpeed, as the peer that `full_finetune` runs beside ours: prints one line of JSON.

Needs `deepspeed` (0.19.8 was used), nvcc and ninja, which it compiles its ops with; for NVMe also libaio. ZeRO-3 with
parameters and optimizer in RAM, or on NVMe without pipelining (with it, version 0.19.8 fails an assertion).
"""

import argparse
import json
import os
import shutil
import statistics
import time
from typing import Any

import deepspeed
import torch

from benchmarks.finetuned_models import MODELS, make_model, random_batch
from benchmarks.processes import cap_gpu_memory


def configuration(
    mode: str, batch: int, largest: int, path: str, clip: float, precision: str = "bf16", buffers: int = 16
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration.

    Args:
        mode: `"cpu"` or `"nvme"`.
        batch: Samples of a micro-batch.
        largest: Elements of the largest parameter.
        path: Directory on the SSD.
        clip: Largest norm of the gradients; 0: any.
        precision: `"bf16"`: bf16 weights, fp32 master weights and states. `"32"`: all in fp32.
        buffers: Buffers of the largest parameter in RAM, for parameters on NVMe.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 2e8,
        "stage3_prefetch_bucket_size": 1e8,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 5e8,
        "stage3_max_reuse_distance": 5e8,
        "sub_group_size": int(1e8),
    }
    if mode == "nvme":
        nvme = {"device": "nvme", "nvme_path": path, "pin_memory": True}
        zero["offload_param"] = nvme | {"buffer_count": buffers, "buffer_size": int(1.05 * largest), "max_in_cpu": 0}
        zero["offload_optimizer"] = nvme | {"buffer_count": 5}
    else:
        zero["offload_param"] = zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "aio": {"block_size": 8 * 2**20, "queue_depth": 32, "intra_op_parallelism": 8, "single_submit": False,
                "overlap_events": True},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mode", choices=["cpu", "nvme"], default="cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--gpu-gib", type=float, default=24)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--path", default="deepspeed_nvme")
    parser.add_argument("--precision", choices=["bf16", "32"], default="bf16")
    parser.add_argument("--buffers", type=int, default=16, help="raise it if DeepSpeed says 'Not enough buffers'")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations on the GPU")
    a = parser.parse_args()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    deepspeed.init_distributed("nccl")
    cap_gpu_memory(a.gpu_gib)
    if a.mode == "nvme":
        os.makedirs(a.path, exist_ok=True)
    with torch.device("meta"):
        shapes = make_model(a.model, a.hidden, a.layers).parameters()
    largest = max(parameter.numel() for parameter in shapes)
    config = configuration(a.mode, a.batch, largest, a.path, a.clip, a.precision, a.buffers)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model(a.model, a.hidden, a.layers)
    if not a.no_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    batch = {name: values.cuda() for name, values in random_batch(a.model, a.batch).items()}
    steps: list[float] = []
    losses: list[float] = []
    for _ in range(a.warm_up + a.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
        losses.append(loss.item())
        if measured := steps[a.warm_up :]:  # after each step, as a limit of time may end the process
            result = {"step": statistics.median(measured), "steps": measured, "losses": losses,
                      "gpu_peak": torch.cuda.max_memory_allocated()}  # fmt: skip
            print(json.dumps(result), flush=True)
    shutil.rmtree(a.path, ignore_errors=True)
    os._exit(0)  # its aio threads sometimes hang at exit


if __name__ == "__main__":
    main()
