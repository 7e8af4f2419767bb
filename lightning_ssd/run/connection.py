"""`Connection`: Lightning's clipping, scaling and zeroing of gradients, passed to model states."""

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import ModelStates
from lightning_ssd.run.precision import offload_precision


class Connection:
    """Makes Lightning clip, scale and zero gradients through the model states of a training, until `end`.

    Args:
        strategy: Lightning's side of the strategy, with the precision plugin and the optimizers.

    Attributes:
        precision: the Trainer's own precision plugin, which is replaced by one for offloaded gradients.
    """

    def __init__(self, strategy: pl.strategies.Strategy) -> None:
        self.precision = strategy.precision_plugin
        self._strategy = strategy
        self._groups: list[list[list[int]]] = []
        """The optimizers' parameter groups that the model states were made for."""

    def connect(self, states: ModelStates) -> None:
        """Connects model states, which were just made for the present optimizers."""
        self._groups = _parameter_groups(self._strategy.optimizers)
        self._update_wrappers()
        self._strategy.precision_plugin = offload_precision(self.precision, states)

    def groups_changed(self) -> bool:
        """Returns whether user code has changed the optimizers' parameter groups since `connect`."""
        return self._groups != _parameter_groups(self._strategy.optimizers)

    def end(self) -> None:
        """Restores Lightning's own ways. Model states have restored the optimizers."""
        self._strategy.precision_plugin = self.precision
        self._update_wrappers()

    def _update_wrappers(self) -> None:
        """Copies to Lightning's wrappers the optimizer attributes that model states have replaced or restored."""
        for wrapper in self._strategy._lightning_optimizers:  # the wrappers copied the attributes when they were made
            own = vars(wrapper.optimizer)
            for name in ("zero_grad", "state"):  # `state` may be a property, such as that of an inner optimizer
                vars(wrapper).pop(name, None)
                vars(wrapper).update({name: own[name]} if name in own else {})


def _parameter_groups(optimizers: Sequence[Optimizer]) -> list[list[list[int]]]:
    """Returns the parameters of each optimizer's groups, by their identity."""
    return [
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
