"""Plans with a given swap coefficient, the sweep of figure 9 of LoHan and of Fuyou."""

from lightning_ssd.planning import FixedPlacement, HardwareProfile, ModelProfile, Plan, default_plan
from lightning_ssd.planning.resident import resident_by_kind
from lightning_ssd.planning.saved_groups import INPUT, build_plan, host_then_ssd, saved_groups


def plan_with_coefficient(
    model: ModelProfile, hardware: HardwareProfile, coefficient: float, fixed: FixedPlacement
) -> Plan:
    """Returns the plan with a given swap coefficient (Fuyou 5.6): activations that are not swapped are recomputed.

    Groups with the most recomputation seconds per byte are swapped first, to host memory as long as they fit.

    Args:
        model: the profile.
        hardware: the machine, whose host memory limits the bytes that are swapped to it.
        coefficient: least share of the intra-block activation bytes that is swapped, from 0 to 1.
        fixed: tiers of model states.
    """
    tensors = saved_groups(model)
    not_recomputable = [tensor for tensor in tensors if tensor.seconds is None]
    choices = [tensor for tensor in tensors if tensor.seconds is not None]
    choices.sort(key=lambda tensor: -(tensor.seconds or 0.0) / tensor.nbytes)
    inner = sum(tensor.nbytes for tensor in tensors if tensor.operator != INPUT)
    left = coefficient * inner - sum(tensor.nbytes for tensor in not_recomputable if tensor.operator != INPUT)
    swapped = not_recomputable
    for tensor in choices:
        if left > 0:
            swapped.append(tensor)
            left -= tensor.nbytes
    resident = resident_by_kind(model, default_plan(model, fixed, {}, 0))
    host = hardware.host_bytes - sum(nbytes["host"] for nbytes in resident.values())
    if fixed.host_limit is not None:
        host = min(host, fixed.host_limit)
    saved, _ = host_then_ssd(sorted(swapped, key=lambda tensor: tensor.key), host)
    weights, states = list(fixed.weights), list(fixed.states)
    return fixed.apply(model, build_plan(model, weights=weights, states=states, saved=saved))
