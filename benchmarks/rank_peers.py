"""One training of GPT on several GPUs by a peer, or rates of the machine: prints one line of JSON on rank 0.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.rank_peers --mode fsdp --shape 3072x34

Modes:
  fsdp       FSDP2 with `CPUOffloadPolicy`: fp32 parameters, bf16 computation, torch's fused AdamW on the CPU
  deepspeed  DeepSpeed's ZeRO-3 with parameters and optimizer in RAM; what it needs: `benchmarks.deepspeed_peer`
  machine    rates of all processes at once, and the forward and backward of the model on each GPU alone

Both peers with gradient checkpointing. Each process is bound to its share of the cores, as by DeepSpeed's
`--bind_cores_to_rank`. Without GPUs all of it runs on the CPU, to be tried out.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.finetuned_models import TOKENS, make_model, random_batch
from benchmarks.processes import cap_gpu_memory
from lightning_ssd.device import available_cores, share_cores
from lightning_ssd.profiling import adam_step
from lightning_ssd.ranks import Ranks
from lightning_ssd.storage import commit, page_lock

CUDA = torch.cuda.is_available()


def wait_for_device() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(run: Callable[[], object]) -> float:
    """Returns the seconds of a call that all ranks begin together."""
    wait_for_device()
    dist.barrier()
    begun = time.perf_counter()
    run()
    wait_for_device()
    return time.perf_counter() - begun


def bind_cores() -> None:
    """Binds this process to its share of the cores, and gives torch as many threads."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, min(len(cores), available_cores()) // size)
    os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share] or cores)
    torch.set_num_threads(share)


def time_steps(step: Callable[[], Tensor], warm_up: int, number: int) -> None:
    """Times steps, and prints the result after each, as a limit of time may end the processes."""
    steps: list[float] = []
    for index in range(warm_up + number):
        if CUDA and index == warm_up:
            torch.cuda.reset_peak_memory_stats()
        steps.append(timed(step))
        if (measured := steps[warm_up:]) and dist.get_rank() == 0:
            result = {"step": statistics.median(measured), "steps": measured}
            result |= {"gpu_peak": torch.cuda.max_memory_allocated() if CUDA else 0}
            result |= {"partial": True} if len(measured) < number else {}
            print(json.dumps(result), flush=True)


def train_fsdp(hidden: int, layers: int, batch: dict[str, Tensor], clip: float) -> Callable[[], Tensor]:
    """Returns a step of FSDP2."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = make_model("gpt", hidden, layers)
    model.gradient_checkpointing_enable()
    mesh = dist.init_device_mesh("cuda" if CUDA else "cpu", (dist.get_world_size(),))
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=CUDA),
    }
    for block in model.transformer.h:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight  # `to_empty` makes two of them
    assert not list(model.buffers()), "buffers are not initialized"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


def train_deepspeed(hidden: int, layers: int, batch: dict[str, Tensor], clip: float) -> Callable[[], Tensor]:
    """Returns a step of DeepSpeed."""
    import deepspeed

    from benchmarks.deepspeed_peer import configuration

    deepspeed.init_distributed("nccl" if CUDA else "gloo")
    with torch.device("meta"):
        largest = max(parameter.numel() for parameter in make_model("gpt", hidden, layers).parameters())
    config = configuration("cpu", batch["input_ids"].size(0), largest, "", clip)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model("gpt", hidden, layers)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step() -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def measure_machine(hidden: int, layers: int, batch: dict[str, Tensor], millions: int) -> dict[str, float]:
    """Returns rates of a process while all run at once: bytes and parameters a second, and seconds of the model."""
    size, numel = dist.get_world_size(), millions * 10**6 // 64 * 64
    restore = share_cores([os.sched_getaffinity(0)] * size)
    ranks = Ranks.connect(0)
    shared = ranks.memory[0].allocate(2 * numel)
    if dist.get_rank() == 0:
        commit([shared], pin=False)
    ranks.exchange("committed")
    if CUDA:
        page_lock([shared])
    one, other = torch.zeros(numel), torch.ones(numel)
    found = {"dram": 8 * numel / best(partial(one.copy_, other))}
    del one, other
    found["adam"] = numel / best(adam_step(numel, ranks=size))
    if CUDA:
        on_device = torch.empty(2 * numel, dtype=torch.uint8, device="cuda")
        found["h2d"] = 2 * numel / best(lambda: on_device.copy_(shared.tensor, non_blocking=True))
        own = torch.empty(2 * numel, dtype=torch.uint8, pin_memory=True)
        found["d2h"] = 2 * numel / best(lambda: own.copy_(on_device, non_blocking=True))
        del on_device
    with torch.device("cuda" if CUDA else "cpu"):
        model = make_model("gpt", hidden, layers).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    forward, whole = [], []
    for _ in range(4):
        losses: list[Tensor] = []
        forward.append(timed(lambda: losses.append(model(**batch).loss)))  # noqa: B023
        whole.append(forward[-1] + timed(lambda: losses[0].backward()))  # noqa: B023
        model.zero_grad()
    found |= {"forward": statistics.median(forward[1:]), "compute": statistics.median(whole[1:])}
    shared.close()
    ranks.messages.exchange("measured")
    ranks.messages.close()
    restore()
    return found | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def best(run: Callable[[], object]) -> float:
    """Returns the median seconds of five calls after the first."""
    return statistics.median([timed(run) for _ in range(6)][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["fsdp", "deepspeed", "machine"], required=True)
    parser.add_argument("--shape", required=True, help="HIDDENxLAYERS")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--gpu-gib", type=float, default=0.0, help="memory of each GPU; 0: all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--millions", type=int, default=200, help="millions of parameters of a process in `machine`")
    given = parser.parse_args()
    hidden, layers = map(int, given.shape.split("x"))
    local = int(os.environ["LOCAL_RANK"])
    if CUDA:
        torch.cuda.set_device(local)
        if given.gpu_gib:
            cap_gpu_memory(given.gpu_gib, local)
    if given.mode != "machine":  # ours is not bound
        bind_cores()
    if given.mode != "deepspeed":
        dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    device = "cuda" if CUDA else "cpu"
    batch = {name: ids[:, : given.tokens].to(device) for name, ids in random_batch("gpt", given.batch).items()}
    if given.mode == "machine":
        found = measure_machine(hidden, layers, batch, given.millions)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    else:
        made = (train_fsdp if given.mode == "fsdp" else train_deepspeed)(hidden, layers, batch, given.clip)
        time_steps(made, given.warm_up, given.steps)
    dist.barrier()
    os._exit(0)  # threads of DeepSpeed's and of NCCL sometimes hang at exit


if __name__ == "__main__":
    main()
