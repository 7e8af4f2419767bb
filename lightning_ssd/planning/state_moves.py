"""Which plan with other tiers of model states is worth a move of these, in trainings and dry runs."""

from math import inf

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.simulator import Prediction

MIN_MOVE_GAIN = 0.02
"""Share of a step that another placement of model states must save to be worth a move. With 10 %, states of GPT-2 XL
stayed in host memory in 20 GiB (H200), for 0.690 s a step in place of 0.492 s on another host: if the CPU is measured
while other programs are idle, a move seems to save less than it does later."""

MIN_LEAVE_GAIN = 0.3
"""The same if all states are on the GPU now. It is larger, because times of states in host memory are predicted from a
profile without any: a step predicted at 0.158 s took 0.222 s (BERT with 0.94B parameters, H100), and staying was
predicted at 0.171 s. A BERT-large that checkpoints its layers itself should not leave 20 GiB for a step predicted at
0.226 s, in place of one at 0.302 s, of which 0.09 s are those of `remap_seconds`. Steps of offloaded states count as
longer besides (`OFFLOADED_COST`)."""


def most_seconds_elsewhere(hardware: HardwareProfile, present: Prediction, *, resident: bool) -> float:
    """Returns the most `Prediction.cost_seconds` that another placement of model states may have to be worth a move.

    Args:
        hardware: the machine.
        present: prediction for the plan with the present placement; if it does not fit, any duration is worth a move.
        resident: whether all states are on the GPU now.
    """
    if present.excess_bytes(hardware):
        return inf
    return (1 - (MIN_LEAVE_GAIN if resident else MIN_MOVE_GAIN)) * present.cost_seconds


def is_better_elsewhere(
    hardware: HardwareProfile, present: Prediction, elsewhere: Prediction, *, resident: bool
) -> bool:
    """Returns whether a plan with another placement of model states is worth a move.

    It has to fit. If all states are on the GPU, where no plan fits, it has to exceed the limits by fewer bytes: the
    memory of states is freed.

    Args:
        hardware, present, resident: as in `most_seconds_elsewhere`.
        elsewhere: prediction for the plan.
    """
    if excess := elsewhere.excess_bytes(hardware):
        return resident and excess < present.excess_bytes(hardware)
    return elsewhere.cost_seconds <= most_seconds_elsewhere(hardware, present, resident=resident)
