"""`HostSums`: sums of gradients over hosts, of one flat parameter after the other, in the same order on all hosts."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import count

from lightning_ssd.device import Worker
from lightning_ssd.futures import Future, finished, pass_on
from lightning_ssd.model_states.gradients import Gradient
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import RankError, Ranks


class HostSums:
    """Sums means of hosts, of each flat parameter once in a turn: the last one of the model first, as in backward.

    Each step sums all flat parameters, also those without a gradient, so that the order is the same on all hosts
    whichever branches their forwards take. A sum waits for that before it, on a thread of its own: the thread of steps
    goes on, without which a host could wait for a step of its own for ever.

    Threads: `submit` is called on the training thread or autograd's, one at a time. Sums run on the thread `hosts`.

    Ownership: `Gradient.accum` belongs to the sum from the end of its dependencies until its future is done.

    Args:
        ranks: collectives with the other hosts.
        flat_params: flat parameters that this rank owns, in the order of the model.
    """

    def __init__(self, ranks: Ranks, flat_params: Sequence[FlatParameter]) -> None:
        self._ranks = ranks
        self._worker = Worker("hosts")
        self._places = {flat: count(first, len(flat_params)) for first, flat in enumerate(reversed(flat_params))}
        """Places of the next sums of each flat parameter in the order of all sums."""
        self._ends: defaultdict[int, Future[None]] = defaultdict(Future, {-1: finished(None)})
        """Ends of sums that a submitted sum waits for, or may have to, by place."""

    def submit(
        self,
        flat: FlatParameter,
        gradient: Gradient,
        alike: object,
        after: "Future[None]",
    ) -> "Future[None]":
        """Submits the sum of `Gradient.accum`, which becomes the mean of all hosts, and of `Gradient.has_accum`.

        `alike` must be equal on all hosts. `after` is done when this host's mean is in `Gradient.accum`. The result is
        done when the sum is, on the thread `hosts`.
        """
        place = next(self._places[flat])
        before, end = self._ends[place - 1], self._ends[place]

        def finish(future: "Future[None]") -> None:
            del self._ends[place - 1]  # both sums have been submitted
            pass_on(future, end)

        run = partial(self._sum, flat, gradient, alike)
        self._worker.submit(run, [after, before]).add_done_callback(finish)
        return end

    def close(self) -> None:
        """Ends the thread, after the sum that runs."""
        self._worker.close()

    def _sum(self, flat: FlatParameter, gradient: Gradient, alike: object) -> None:
        """Sums one flat parameter.

        Raises:
            RankError: another host trains differently, or a process of one has ended.
        """
        own, group = gradient.has_accum, self._ranks.hosts
        assert group is not None
        found = self._ranks.gather((alike, own), group)
        if any([of_host != alike for of_host, _ in found]):
            raise RankError(
                f"hosts step {flat.name} with different options of the optimizer, or user code reads its gradients or "
                "writes its weights on one of them only, or writes other values. Do the same on all."
            )
        gradient.has_accum = [any(flags) for flags in zip(*[flags for _, flags in found], strict=True)]
        if not any(gradient.has_accum):
            return
        total = gradient.accumulated()
        for item, has in zip(flat.param_views, own, strict=True):
            if not has:
                total[item.start : item.start + item.numel].zero_()
        self._ranks.sum(total, group)
