"""`PartitionerBudget`: the share of activations that compiled code saves for backward instead of recomputing them."""

import torch

from lightning_ssd import torch_internals as internals

__all__ = ["PartitionerBudget"]


class PartitionerBudget:
    """Sets `torch._functorch.config.activation_memory_budget` for the micro-batches of one training.

    The setting is read when code is compiled. So `change` discards all compiled code of the process, which is compiled
    again when it is called next: that costs as many seconds as the first time, or fewer if Inductor's caches on disk
    have the result, and dynamic shapes are learned again. The setting is in force between `enter` and `exit` only, so
    that code which is compiled outside of micro-batches is not affected. Graphs that are alive keep their code.

    Recomputed values are those of the same operators, but a backend that fuses them otherwise, as Inductor does, may
    give other last digits.

    Attributes:
        value: the share, 0 to 1, of the bytes that fully optimized code would save; 1: the default, nothing is set.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._entered = False

    @property
    def may_change(self) -> bool:
        """Whether the setting may be changed.

        It may not if the user has set it, or has asked for deterministic algorithms: the user then expects the same
        digits from the same program, and when the setting changes depends on measured times. Nor may it under a stance
        (`torch.compiler.set_stance`), which may refuse to compile code, or run it uncompiled, once it is discarded.
        """
        return (self._entered or internals.memory_budget() == 1.0) and not (
            torch.are_deterministic_algorithms_enabled() or internals.has_stance()
        )

    def change(self, value: float) -> None:
        """Makes torch compile code with another value from now on. Called between two steps."""
        self.value = value
        torch.compiler.reset()

    def enter(self) -> None:
        """Sets the value, unless the user has set one. Called at the begin of a micro-batch."""
        if self.value != 1.0 and not self._entered and internals.memory_budget() == 1.0:
            self._entered = True
            internals.set_memory_budget(self.value)

    def exit(self) -> None:
        """Restores the user's value. Called at the end of a micro-batch."""
        if self._entered:
            self._entered = False
            internals.set_memory_budget(1.0)

    def close(self) -> None:
        """Restores the user's value, with which code is compiled from now on. Called at the end of a training.

        Under a stance, code that is compiled already is kept.
        """
        self.exit()
        if self.value != 1.0:
            if internals.has_stance():
                self.value = 1.0
            else:
                self.change(1.0)
