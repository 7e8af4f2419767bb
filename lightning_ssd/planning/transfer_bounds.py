"""`TransferBounds`: lower bounds of a step's seconds, from the bytes that are transferred between any two operators.

The search for a plan makes and simulates no plan whose bound shows that it can't be the best one.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.planning.io_timeline import Floats
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import ByteChanges, Bytes, Direction, GPUStep, MigrationMachine, MigrationPlan

PARTS = 96
"""Parts of a step. Intervals, in which transfers are summed, begin and end with parts."""

ANY, IN_HOST, ON_SSD, NOWHERE = range(4)
"""Tiers in which a tensor may be in a period: host memory or drives; host memory; drives; only GPU memory."""

Integers = NDArray[np.int64]


class TransferBounds:
    """Bounds for one profile and machine.

    An interval lasts from the begin of an operator to the begin of another one, and no shorter than its transfers. The
    bound of a step is the largest sum of such bounds over all divisions of the step into intervals.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine) -> None:
        self._machine = machine
        self._profile = profile
        count = len(profile.operators)
        self._seconds = profile.operator_seconds
        # The optimizer needs the most bytes per second, with many operators: parts have equal numbers of operators.
        phases = [one.phase for one in profile.operators]
        begins = [index for index in range(1, count) if phases[index] != phases[index - 1]]
        self._bounds = np.array(sorted({part * count // PARTS for part in range(PARTS)}.union(begins, (0, count))))
        """Operators with which intervals begin and end."""
        tensors = profile.tensors
        counts = np.array([len(one.uses) for one in tensors], np.int64)
        tensor = np.repeat(np.arange(len(tensors)), counts)
        use = np.array([use for one in tensors for use in one.uses], np.int64)
        self._tensors = tensor
        """The tensor of each use."""
        self._nbytes = np.array([one.nbytes for one in tensors], np.float64)[tensor]
        """Bytes of the tensor of each use."""
        self._by_optimizer = np.array([phase == "optimizer" for phase in phases], bool)[use]
        """Whether an operator of the optimizer makes each use."""
        is_first = np.concatenate([[True], tensor[1:] != tensor[:-1]])[: len(use)]
        is_last = np.concatenate([tensor[1:] != tensor[:-1], [True]])[: len(use)]
        allocated = np.array([-1 if one.allocated is None else one.allocated for one in tensors], np.int64)[tensor]
        # The last use of a tensor that is freed then has itself as the next one.
        after = np.where([one.freed is None for one in tensors], count, -1)[tensor]
        before = np.where(is_first, allocated, np.roll(use, 1))
        after = np.where(is_last, np.where(after < 0, use, after), np.roll(use, -1))
        self._earlier, self._begin, end = (np.searchsorted(self._bounds, one, "right") for one in (before, use, after))
        # Offloads at the end of a step may take time of the next one: intervals until the end have no bound by them.
        self._end = np.minimum(end, len(self._bounds) - 1)
        self._period_tensors = np.array([one.tensor for one in profile.periods], np.int64)
        numbers = {(one.tensor, one.after): number for number, one in enumerate(profile.periods)}
        none = len(numbers)
        following = np.array([numbers.get(one, none) for one in zip(tensor.tolist(), use.tolist(), strict=True)], int)
        self._following: Integers = following
        """The inactive period after each use; the number of periods: there is none."""
        starts = np.cumsum(counts) - counts
        is_global = np.array([one.is_global for one in tensors], bool)[tensor]
        previous = np.where(is_first, np.where(is_global, following[(starts + counts - 1)[tensor]], none), 0)
        self._previous: Integers = np.where(is_first, previous, np.roll(following, 1))
        """The inactive period before each use."""
        self.periods = numbers
        """Number of the period of a tensor after an operator, by (tensor, `after`)."""

    def least_score(self, step: GPUStep, recomputed: Sequence[tuple[int, int]] = ()) -> tuple[int, float]:
        """Returns the least `MigrationPrediction.score`: bytes that do not fit, and the seconds of a step.

        Args:
            step: the step without the units that the CPU steps.
            recomputed: (tensor, `after`) of the periods after which tensors may be recomputed, as in `Migration`.
        """
        if not self._machine.drives and (excess := self.excess(step, recomputed)):
            return excess, sum(step.seconds)
        tiers = np.full(len(self.periods) + 1, ANY)
        tiers[:-1][self._among(step.absent)[self._period_tensors]] = NOWHERE
        tiers[[self.periods[one] for one in recomputed]] = NOWHERE
        # Staged states may be in host memory for as short a time as their transfers take.
        staged = ByteChanges(len(step.seconds))
        for job in step.jobs:
            staged.add(job.staged_from, job.until + 1, job.staged)
        host: Bytes = np.minimum(step.host_bytes - staged.sums(), self._machine.host_bytes)
        return 0, self.least_seconds(tiers, host, step)

    def _among(self, tensors: Collection[int]) -> NDArray[np.bool_]:
        """Returns whether each tensor of the profile is one of `tensors`."""
        found = np.zeros(len(self._profile.tensors), bool)
        found[[*tensors]] = True
        return found

    def excess(self, step: GPUStep, recomputed: Sequence[tuple[int, int]] = ()) -> int:
        """Returns the bytes that have room neither on the GPU nor in host memory, whatever is offloaded.

        Args:
            step: as in `least_score`.
            recomputed: as in `least_score`.
        """
        machine, profile, count = self._machine, self._profile, len(step.seconds)
        numbers = [self.periods[one] for one in recomputed]
        numbers += np.flatnonzero(self._among(step.with_masters)[self._period_tensors]).tolist()
        absent = [(one.tensor, one.after, one.before) for one in (profile.periods[number] for number in numbers)]
        absent = [one for one in absent if one[:2] not in step.kept]
        absent += [(one.tensor, one.after, one.before) for one in step.renewed]
        changes = ByteChanges(count)
        changes.add(
            [after + 1 for _, after, _ in absent],
            [before if before > after else before + count for _, after, before in absent],
            [profile.tensors[tensor].nbytes for tensor, _, _ in absent],
        )
        room = machine.gpu_bytes + np.maximum(0, machine.host_bytes - step.host_bytes)
        return max(0, int((step.nbytes - changes.sums() - room).max()))

    def least_seconds(
        self,
        tiers: Integers | None = None,
        host: Bytes | None = None,
        step: GPUStep | None = None,
    ) -> float:
        """Returns the seconds that a step takes at least if memory fits, and inf if it can't.

        Operators of an interval use tensors that exist at its begin. Those beyond the GPU's capacity are prefetched in
        the interval, and those beyond the capacities of GPU and host memory are read from drives. The same holds for
        offloads of tensors that exist at its end.

        Args:
            tiers: tier of the tensor in each period of the profile, and, as the last one, `ANY`; None: `ANY` in all.
            host: bytes that host memory, or GPU memory instead, has for other periods than those of `ANY` while each
                operator runs; None: none.
            step: the step without the units that the CPU steps; None: it steps none.
        """
        machine, bounds = self._machine, self._bounds
        size = len(bounds)
        times = np.concatenate([[0.0], np.cumsum(self._seconds if step is None else step.seconds)])[bounds]
        least = times - times[:, None]
        if not len(self._nbytes):
            return _longest(least).item(0)
        # Host memory is used from the end of an operator on: the one before the bound, or the one after it.
        held = np.zeros(size) if host is None else np.minimum(host[bounds - 1], host[bounds % len(host)])
        ways: tuple[tuple[Direction, float, Integers, Floats], ...] = (
            ("in", machine.link_in, self._previous, held[:, None]),
            ("out", machine.link_out, self._following, held),
        )
        jobs = [] if step is None else [job for job in step.jobs if job.staged]
        columns = [(job.staged_from, job.ready + 1, job.until, job.staged) for job in jobs]
        begins, ready, ends, nbytes = np.array(columns, np.int64).reshape(-1, 4).T
        staged = {"in": _within(bounds, begins, ready, nbytes), "out": _within(bounds, ready, ends, nbytes)}
        from_masters, from_drives = (
            self._among(tensors)[self._tensors]
            for tensors in (((), ()) if step is None else (step.with_masters, step.staged))
        )
        for direction, link, periods, other in ways:
            of_use = np.full(len(periods), ANY) if tiers is None else tiers[periods]
            # Weights with masters are copied from there, and the optimizer on the GPU uses none.
            of_use = np.where(from_masters, NOWHERE if direction == "out" else IN_HOST, of_use)
            of_use[from_drives] = NOWHERE if direction == "out" else ANY
            of_use[from_masters & self._by_optimizer] = NOWHERE
            free, in_host, on_ssd = (
                self._transferred(np.where(of_use == tier, self._nbytes, 0.0), is_read=direction == "in")
                if tier == ANY or (of_use == tier).any()
                else np.zeros((size, size))
                for tier in (ANY, IN_HOST, ON_SSD)
            )
            beyond = np.maximum(0.0, free + in_host + on_ssd - machine.gpu_bytes)
            # Host memory has no tensors that migrate to drives, and each tensor in host memory leaves less room.
            room = machine.gpu_bytes + np.minimum(np.minimum(free, machine.host_bytes), machine.host_bytes - other)
            on_drives = np.maximum(0.0, free + on_ssd - room)
            least = np.maximum(least, beyond / link)
            # Between drives and host memory, the link carries nothing.
            for nbytes, rate in (
                (on_drives, machine.rate("ssd", direction)),
                (on_drives + staged[direction], machine.ssd[direction == "out"]),
            ):
                least = np.maximum(least, nbytes / rate if rate else np.where(nbytes > 0, np.inf, 0.0))
        return _longest(least).item(0)

    def _transferred(self, nbytes: Floats, *, is_read: bool) -> Floats:
        """Returns the bytes used between the bounds of a row and a column, of tensors that exist at the row's bound.

        Args:
            nbytes: bytes of the tensor of each use.
            is_read: whether they are read; else they are written, and exist at the column's bound.
        """
        size = len(self._bounds)
        used = np.zeros((size + 1) ** 2)

        def add(rows: Integers, columns: Integers, sign: int) -> None:
            used[:] += sign * np.bincount(rows * (size + 1) + columns, nbytes, len(used))

        if is_read:
            add(self._earlier, self._begin, 1)
            add(self._begin, self._begin, -1)
        else:
            add(self._begin - 1, self._begin, 1)
            add(self._begin - 1, self._end, -1)
        found = used.reshape(size + 1, size + 1)
        found = found.cumsum(0) if is_read else found[::-1].cumsum(0)[::-1]
        return found.cumsum(1)[:size, :size]


def least_stall_seconds(
    machine: MigrationMachine, seconds: list[float], plan: MigrationPlan, sizes: Bytes, is_offloaded: NDArray[np.bool_]
) -> Floats:
    """Returns the seconds that a planned step waits at least after the begin of each operator.

    The transfers that begin and are due in an interval run within it.

    Args:
        machine: the machine.
        seconds: GPU seconds of each operator, with recomputation.
        plan: the plan.
        sizes: bytes of the tensor of each migration.
        is_offloaded: whether each migration has an offload.
    """
    count = len(seconds)
    bounds = np.unique(np.arange(PARTS + 1) * count // PARTS)
    times = np.concatenate([[0.0], np.cumsum(seconds)])[bounds]
    least = times - times[:, None]
    columns = np.array([one[1:5] for one in plan.migrations], np.int64).reshape(-1, 4).T
    after, absent_from, absent_until, before = columns
    tiers = [one.tier for one in plan.migrations]
    migrated = np.array([tier is not None for tier in tiers], bool)
    on_ssd = np.array([tier == "ssd" for tier in tiers], bool)
    for begins, ends, moved, link, ssd in (
        (after + 1, absent_from, migrated & is_offloaded, machine.link_out, machine.ssd[1]),
        (absent_until, before, migrated, machine.link_in, machine.ssd[0]),
    ):
        for carried, rate in ((moved, link), (moved & on_ssd, ssd)):
            if carried.any():
                nbytes = _within(bounds, begins[carried], ends[carried], sizes[carried])
                least = np.maximum(least, nbytes / rate)
    # Operators wait at least as long as after the next bound.
    stalls = _longest(least) - (times[-1] - times)
    return np.asarray(stalls[np.searchsorted(bounds, np.arange(count))])


def _within(bounds: Integers, begins: Integers, ends: Integers, nbytes: Integers) -> Floats:
    """Returns the bytes of the transfers that run between the bounds of a row and a column.

    Args:
        bounds: operators with which intervals begin and end; the last one is the number of operators.
        begins: operator with which each transfer begins, as in `Migration`.
        ends: operator that waits for it.
        nbytes: its bytes.
    """
    size, count = len(bounds), bounds[-1]
    # A transfer that begins with the operator of a bound may run while that operator still waits for another one.
    first = np.searchsorted(bounds, begins % count, "left") - 1
    due = ends - begins + begins % count
    last = np.searchsorted(bounds, due, "left")
    within = (first >= 0) & (due < count)  # the first operator of the next step waits in that step
    cells = first[within] * size + last[within]
    found = np.bincount(cells, nbytes[within], size * size).reshape(size, size)
    return np.asarray(found[::-1].cumsum(0)[::-1].cumsum(1))


def _longest(seconds: Floats) -> Floats:
    """Returns the largest sum of the seconds of successive intervals from each bound until the last one.

    Args:
        seconds: seconds of the interval from the bound of the row to that of the column.
    """
    longest = np.zeros(len(seconds))
    for index in range(len(longest) - 2, -1, -1):
        longest[index] = (seconds[index, index + 1 :] + longest[index + 1 :]).max()
    return longest
