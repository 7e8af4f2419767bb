"""The planners of the papers SSDTrain, Fuyou and LoHan: their cost models, applied to the bytes of a profile."""

from lightning_ssd.planning import fuyou, lohan
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.phase import PhaseWork, iteration_seconds, step_phases
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.resident import JOBS_AHEAD, resident_by_kind
from lightning_ssd.planning.saved_groups import SavedGroup, build_plan, default_window, host_then_ssd, saved_groups
from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts
from lightning_ssd.types import InputChoice, Tier


def plan_ssdtrain(model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Returns SSDTrain's plan: model states on the GPU, and as many activations on SSDs as the bandwidth hides.

    The tensors that are saved first are offloaded, up to the hidden amount (III-A, figure 3), and the others kept.
    Nothing is recomputed.
    """
    speed = TierSpeed(
        write=min(hardware.copy_out, hardware.ssd_write),
        read=min(hardware.copy_in, hardware.ssd_read),
        capacity=hardware.ssd_bytes,
    )
    amount = offload_amounts(model.saved_bytes, model.forward_seconds, model.backward_seconds, {"ssd": speed})["ssd"]
    saved: dict[tuple[int, int], InputChoice] = {}
    for tensor in saved_groups(model):
        saved[tensor.key] = "ssd" if tensor.nbytes <= amount else "keep"
        amount -= min(amount, tensor.nbytes)
    resident: list[Tier] = ["gpu"] * len(model.parts)
    return build_plan(model, weights=resident, states=resident, saved=saved)


def plan_fuyou(model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Returns Fuyou's plan: model states and swapped activations on SSDs, other activations recomputed (4.5).

    Swapped activations are chosen by the swap benefit factor and two priority queues, from D_start, the inter-block
    inputs, up to D_max. The slack of equation 9 is computed with D_start swapped already, so D_max is added to D_start.
    """
    certain, choices = _split(model)
    start = sum(tensor.nbytes for tensor in certain)
    bandwidth = min(hardware.copy_in, hardware.copy_out, hardware.ssd_read, hardware.ssd_write)
    candidates = [fuyou.SwapCandidate(item.nbytes, item.flops, item.seconds or 0.0) for item in choices]

    def iteration(swapped: float, recompute: float) -> float:
        phases = _phases(model, hardware, swapped, swapped, recompute, cpu=model.parameters / hardware.cpu_step_rate)
        return iteration_seconds(hardware, *phases)

    _, backward = _phases(
        model, hardware, start, start, sum(item.seconds for item in candidates),
        cpu=model.parameters / hardware.cpu_step_rate,
    )  # fmt: skip
    largest = start + fuyou.largest_swap(hardware, backward)
    chosen = fuyou.choose_swaps(candidates, start, largest, bandwidth, iteration)
    swapped = certain + [choices[index] for index in chosen]
    return _swapping_plan(model, {tensor.key: "ssd" for tensor in swapped})


def plan_lohan(model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Returns LoHan's plan: model states on SSDs, swapped activations in host memory, then on SSDs (IV-D).

    Swapped activations are chosen by the offloading benefit and Algorithm 1.
    """
    certain, choices = _split(model)
    start = sum(tensor.nbytes for tensor in certain)
    host = free_host_bytes(model, hardware)
    layers = [lohan.Layer(item.flops, item.nbytes) for item in choices]
    flops = sum(layer.flops for layer in layers)
    # Operators differ in FLOP/s. As in the paper, each recomputation is assumed to take seconds in proportion to its
    # FLOP, so that all of them together take the sum of the measured seconds.
    seconds = sum(item.seconds or 0.0 for item in choices)

    def iteration(swapped: float, recomputed: float) -> float:
        recompute_seconds = seconds * recomputed / flops if flops else 0.0
        phases = _phases(model, hardware, swapped, lohan.bytes_to_ssd(swapped, host), recompute_seconds)
        return iteration_seconds(hardware, *phases)

    chosen = lohan.choose_swaps(layers, start, iteration)
    saved, _ = host_then_ssd(certain + [choices[index] for index in chosen], host)
    return _swapping_plan(model, saved)


def free_host_bytes(model: ModelProfile, hardware: HardwareProfile) -> int:
    """Returns the bytes of host memory available for activations when all states are on SSDs (MEM_avail)."""
    gradients = resident_by_kind(model, _swapping_plan(model, {}))["gradients"]["host"]
    jobs = sorted((part.state_bytes_read + part.weight_bytes for _, part in model.parts), reverse=True)[:JOBS_AHEAD]
    staging = 4 * default_window(model)  # two windows for prefetched reads, and two for delayed writes
    return max(0, hardware.host_bytes - gradients - sum(jobs) - staging)


def _split(model: ModelProfile) -> tuple[list[SavedGroup], list[SavedGroup]]:
    """Returns the groups that can't be recomputed, and the groups that can."""
    tensors = saved_groups(model)
    return [item for item in tensors if item.seconds is None], [item for item in tensors if item.seconds is not None]


def _phases(
    model: ModelProfile,
    hardware: HardwareProfile,
    swapped: float,
    to_ssd: float,
    recompute: float,
    cpu: float = 0.0,
) -> tuple[PhaseWork, PhaseWork]:
    """Returns forward and backward of a micro-batch with all states on SSDs, and its share of optimizer bytes."""
    share = 1 / model.micro_batches
    weights = sum(unit.weight_bytes for unit in model.units)
    return step_phases(
        forward=model.forward_seconds,
        backward=model.backward_seconds + recompute,
        cpu=share * cpu,
        weights=weights,
        gradients=sum(unit.gradient_bytes for unit in model.units),
        read=share * sum(unit.state_bytes_read for unit in model.units),
        written=share * (sum(unit.state_bytes_written for unit in model.units) + weights),
        swapped=swapped,
        swapped_to_ssd=to_ssd,
    )


def _swapping_plan(model: ModelProfile, saved: dict[tuple[int, int], InputChoice]) -> Plan:
    on_ssd: list[Tier] = ["ssd"] * len(model.parts)
    return build_plan(model, weights=on_ssd, states=on_ssd, saved=saved)
