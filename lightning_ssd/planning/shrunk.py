"""`shrink_plan`: the plan for smaller micro-batches than those for which a plan was made.

Ragged batches have many sizes, and a search takes as long as several steps. So the plan of a smaller size has the tiers
and steps of the first plan, and differs in one number: how many units free memory.
"""

from dataclasses import replace

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.simulator import simulate
from lightning_ssd.planning.whole_units import keep_most


def shrink_plan(model: ModelProfile, hardware: HardwareProfile, plan: Plan, size: float) -> Plan:
    """Returns the plan with the fewest units that free memory, as they do in `plan`, that fits; else all of them do.

    The window shrinks with the micro-batch, so that as many tensors as before are in transfer at a time.

    Args:
        model: profile of the micro-batches for which `plan` was made.
        hardware: profile of the machine.
        plan: their plan.
        size: saved bytes of the smaller micro-batches / those of the profile.
    """
    smaller = model.with_size(size)
    plan = replace(plan, window_bytes=int(size * plan.window_bytes))
    return keep_most(plan, lambda one: not simulate(smaller, hardware, one).excess_bytes(hardware))
