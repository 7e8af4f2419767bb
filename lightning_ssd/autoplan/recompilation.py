"""`Recompilation`: a training's code is compiled again, once, so that it saves less for backward and recomputes more.

Torch's partitioner decides which values compiled code saves. Its setting `activation_memory_budget` bounds their bytes:
1, the default, are those of the fastest code, and 0 those of checkpointing, which saves the inputs alone. Below 1 it
recomputes operators that it fuses into those of backward, which costs little and frees more than the setting asks for.
Only where that saves too little, it chooses further operators, matrix products among them, by their FLOP and bytes: a
Llama block's backward has the same FLOP down to 0.7, 1.05 times as many at 0.6, and 1.37 times at 0.

So for the same bytes a budget recomputes less than checkpointing of some blocks does, down to the least one of
`SAVED_SHARES`. If the second code saves more than predicted, the plan that follows checkpoints some of its blocks.
"""

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

SAVED_SHARES = {0.9: 0.63, 0.6: 0.52, 0.5: 0.47, 0.4: 0.38, 0.3: 0.28, 0.2: 0.19, 0.1: 0.10}
"""Bytes that a compiled block saves besides its inputs, by budget / those with the default: the largest shares of
Llama, Qwen, Gemma, GPT-2, BERT and ViT in bf16 (`python -m benchmarks.saved_shares`, torch 2.13). 0.8 and 0.7 save as
much as 0.9 in most of them. Blocks of T5 and of Whisper's decoder save more: 0.87 with 0.9, 0.55 with 0.6, 0.20 with
0.1. A training of them may need the plan that follows.

Budgets are tenths: values between seldom give other code, and Inductor's cache on disk has the code of a tenth for
later runs. Below the least one, checkpointing of all units saves as few bytes, with the digits of the code that was
compiled first."""

MIN_PLAN_LOSS = 0.02
"""Share of a step that the plan without a recompilation must cost for the last digits of results to be given up."""


class Recompilation(Uncopied):
    """Sets torch's `activation_memory_budget` for one training, once, and restores it.

    The setting is the process's, and is read when code is compiled. All methods are called on the training thread,
    between two steps, so that no compiled code runs. Graphs that are alive keep their code.

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
    # Besides the units' inputs, which code saves with any budget.
    compiled = [sum(one.saved_bytes for one in unit.operators if _is_compiled(one.name)) for unit in profile.units]
    saved_bytes = sum(operator.saved_bytes for unit in profile.units for operator in unit.operators)
    if missing_bytes <= 0 or 2 * sum(compiled) <= saved_bytes:
        return None
    # Backward recomputes the values of one unit at a time, which have their memory then.
    reducible = sum(compiled) - max(compiled)
    enough = [budget for budget, share in SAVED_SHARES.items() if (1 - share) * reducible >= missing_bytes]
    return max(enough, default=None)


def _is_compiled(name: str) -> bool:
    return COMPILED_OPERATOR in re.split("[:.]", name)
