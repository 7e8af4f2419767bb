"""`Recompilation`: a training's code is compiled again, once, so that it saves less for backward and recomputes more.

Torch's partitioner decides which values compiled code saves. Its setting `activation_memory_budget` bounds their bytes:
1, the default, are those of the fastest code, and 0 those of checkpointing, which saves the inputs alone. Below 1 it
recomputes operators that it fuses into those of backward, which costs little. Only where that saves too little, it
chooses further operators, matrix products among them, by their FLOP and bytes. A Llama block, by budget:

| budget | 1 | 0.9 | 0.8, 0.7 | 0.6 | 0.5 | 0.3 | 0.1 | 0 |
|---|---|---|---|---|---|---|---|---|
| saved bytes | 1 | 0.55 | 0.49 | 0.42 | 0.36 | 0.20 | 0.06 | 0 |
| FLOP of backward | 1 | 1 | 1 | 1.05 | 1.09 | 1.22 | 1.33 | 1.37 |

So for the same bytes a budget recomputes less than checkpointing of some blocks does, down to `LEAST_BUDGET`.
"""

import math
import re

import torch

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import COMPILED_OPERATOR
from lightning_ssd.autoplan.plan_runner import PlanRunner
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.planning import ModelProfile, Plan, keep_all, simulate
from lightning_ssd.uncopied import Uncopied

DEFAULT_BUDGET = 1.0
"""Torch's default. Another value is the user's, and stays."""

TENTHS = 10
"""Budgets are tenths: the partitioner chooses among the ten or so large operators of a block, so that values between
seldom give other code, and Inductor's cache on disk has the code of a tenth for later runs."""

LEAST_BUDGET = 0.1
"""Below it, checkpointing of all units saves as few bytes, with the digits of the code that was compiled first."""

MARGIN = 1.1
"""Bytes to be saved less / bytes without room: values that a unit recomputes take memory in its backward."""

MIN_PLAN_LOSS = 0.02
"""Share of a step that the plan without a recompilation must cost for the last digits of results to be given up."""


class Recompilation(Uncopied):
    """Sets torch's `activation_memory_budget` for one training, once, and restores it.

    The setting is the process's, and is read when code is compiled. All methods are called on the training thread,
    between two steps, so that no compiled code runs. Graphs that are alive keep their code.

    Args:
        training: the training.

    Attributes:
        due: whether code is to be compiled again before the next step (`begin`).
    """

    def __init__(self, training: Training) -> None:
        self.due = False
        self._training = training
        self._budget = DEFAULT_BUDGET
        """The value that was chosen for this training; the default: there is none."""

    def choose(self, runner: PlanRunner, plan: Plan) -> bool:
        """Chooses a budget that frees the memory which a plan would free otherwise, if there is one.

        Not if the user has set the budget, or a stance (`torch.compiler.set_stance`); nor if digits have to repeat, as
        code that fuses operators otherwise may round otherwise: under deterministic algorithms, with `recover=True`,
        and with several processes, each of which would decide for itself.

        Args:
            runner: runner with the profiles of the training.
            plan: the plan for them, which is not in force yet.

        Returns:
            Whether code is to be compiled again, so that the profiles are those of code that will be gone.
        """
        if self._budget != DEFAULT_BUDGET or internals.partitioner.activation_memory_budget != DEFAULT_BUDGET:
            return False
        if torch.are_deterministic_algorithms_enabled() or self._training.repeats_digits or internals.has_stance():
            return False
        kept = simulate(runner.profile, runner.hardware, keep_all(plan))
        planned = simulate(runner.profile, runner.hardware, plan)
        fits = not planned.excess_bytes(runner.hardware)
        if fits and planned.step_seconds <= (1 + MIN_PLAN_LOSS) * kept.step_seconds:
            return False
        budget = sufficient_budget(runner.profile, kept.gpu_peak_bytes - runner.hardware.gpu_bytes)
        self._budget, self.due = budget or DEFAULT_BUDGET, budget is not None
        return self.due

    def begin(self) -> None:
        """Has code compiled when it is called next, with the budget that was chosen. All compiled code is discarded."""
        self.due = False
        self._training.inform(
            f"offload='auto': code is compiled again with activation_memory_budget={self._budget:g}, so that it saves "
            "less and recomputes: the last digits of results may change. Deterministic algorithms prevent it "
            "(`torch.use_deterministic_algorithms(True)`)."
        )
        internals.partitioner.activation_memory_budget = self._budget
        torch.compiler.reset()  # torch can't discard the code of single modules

    def close(self) -> None:
        """Restores the default, with which code is compiled anew; not a value that the user has set meanwhile.

        Under a stance, code that is compiled already is kept.
        """
        budget, self._budget = self._budget, DEFAULT_BUDGET
        if budget == DEFAULT_BUDGET or self.due:
            return
        if internals.partitioner.activation_memory_budget == budget:
            internals.partitioner.activation_memory_budget = DEFAULT_BUDGET
        if not internals.has_stance():
            torch.compiler.reset()


def sufficient_budget(profile: ModelProfile, missing_bytes: float) -> float | None:
    """Returns the largest budget with which compiled units save fewer bytes by those that have no room.

    Args:
        profile: profile of the training with the default budget.
        missing_bytes: predicted peak of GPU memory, if all saved tensors are kept, - the limit.

    Returns:
        The budget; `None`: all has room, or no budget suffices, or most saved bytes are not those of compiled units.
    """
    operators = [operator for unit in profile.units for operator in unit.operators]
    # Besides the units' inputs, which code saves with any budget.
    compiled = sum(one.saved_bytes for one in operators if COMPILED_OPERATOR in re.split("[:.]", one.name))
    if missing_bytes <= 0 or 2 * compiled <= sum(one.saved_bytes for one in operators):
        return None
    budget = math.floor(TENTHS * (1 - MARGIN * missing_bytes / compiled)) / TENTHS
    return budget if LEAST_BUDGET <= budget < DEFAULT_BUDGET else None
