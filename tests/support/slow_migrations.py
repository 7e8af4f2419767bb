"""A slow and simple simulation of migrations, which follows each tensor: its results have to be the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.planning import Migration, MigrationMachine
from lightning_ssd.replay import LifetimeProfile

Direction = Literal["out", "in"]


def slow_bytes(changes: Sequence[tuple[int, int, int]], count: int) -> list[int]:
    """Adds (start, stop, bytes) operator by operator; operators as in `Migration`."""
    nbytes = [0] * count
    for start, stop, change in changes:
        for operator in range(start, stop):
            nbytes[operator % count] += change
    return nbytes


@dataclass
class _Transfer:
    """A transfer that the operator `due` waits for, and bytes left for the link and for drives."""

    due: int
    left: dict[str, float]

    @property
    def has_ended(self) -> bool:
        return not any(self.left.values())


class _Transfers:
    """Unfinished transfers of one direction, on the link and on drives, and the bytes that both have carried."""

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self.rates = {"link": machine.link_out if direction == "out" else machine.link_in}
        self.rates["ssd"] = machine.ssd[direction == "out"]
        self.queue: list[_Transfer] = []
        self.carried = dict.fromkeys(self.rates, 0.0)

    def add(self, tier: str, due: int, nbytes: int) -> _Transfer:
        found = _Transfer(due, dict.fromkeys(("link", "ssd") if tier == "ssd" else ("link",), float(nbytes)))
        self.queue.append(found)
        self.queue.sort(key=lambda one: one.due)
        return found

    def ends(self) -> list[float]:
        """Returns the seconds until each transfer has ended on each carrier."""
        return [
            sum(one.left.get(carrier, 0.0) for one in self.queue[: number + 1]) / rate
            for carrier, rate in self.rates.items()
            for number, last in enumerate(self.queue)
            if last.left.get(carrier)
        ]

    def seconds_until(self, due: int) -> float:
        return max(
            sum(one.left.get(carrier, 0.0) / rate for one in self.queue if one.due <= due) if rate else 0.0
            for carrier, rate in self.rates.items()
        )

    def advance(self, seconds: float) -> None:
        for carrier, rate in self.rates.items():
            room = rate * seconds
            for one in self.queue:
                carried = min(one.left.get(carrier, 0.0), room)
                if carried:
                    one.left[carrier] -= carried
                    self.carried[carrier] += carried
                    room -= carried
        self.queue = [one for one in self.queue if not one.has_ended]

    def finish(self, due: int) -> None:
        """Ends transfers: rounding may have left a part of a byte."""
        for one in self.queue:
            if one.due <= due:
                for carrier, left in one.left.items():
                    assert left <= 1e-4
                    self.carried[carrier] += left
                    one.left[carrier] = 0.0
        self.queue = [one for one in self.queue if one.due > due]


@dataclass
class SlowStep:
    """The steady state of migrations, in which each tensor is followed.

    Attributes:
        seconds: seconds of a step.
        carried: bytes by direction and carrier ("link", "ssd").
        gpu_peak: most bytes on the GPU at any time.
        host_peak: most bytes in host memory at any time.
    """

    seconds: float
    carried: dict[tuple[Direction, str], float]
    gpu_peak: int
    host_peak: int


class _SlowSimulation:
    """Follows where each tensor is: on the GPU until its offload has ended, in host memory until it has returned."""

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, migrations: Sequence[Migration]) -> None:
        self.profile, self.migrations = profile, migrations
        self.count = len(profile.operators)
        self.ways: dict[Direction, _Transfers] = {"out": _Transfers(machine, "out"), "in": _Transfers(machine, "in")}
        self.now, self.gpu_peak, self.host_peak = 0.0, 0, 0
        self.offloading: dict[int, _Transfer] = {}
        """Offloads of tensors that are on the GPU until these have ended, by tensor."""
        self.away: set[int] = set()
        self.prefetching: dict[int, _Transfer] = {}
        self.in_host: dict[int, int] = {}
        """Bytes of each tensor in host memory."""
        for one in migrations:
            if one.before >= self.count > one.after:
                self.begin_before(one)

    def begin_before(self, one: Migration) -> None:
        """The step before has offloaded the tensor, or an operator of the first step waits for that."""
        nbytes = self.profile.tensors[one.tensor].nbytes
        if one.absent_from > self.count:
            self.offloading[one.tensor] = self.ways["out"].add(one.tier, one.absent_from - self.count, nbytes)
        else:
            self.away.add(one.tensor)
        if one.tier == "host":
            self.in_host[one.tensor] = nbytes
        if one.absent_until < self.count:
            self.away.discard(one.tensor)
            self.prefetching[one.tensor] = self.ways["in"].add(one.tier, one.before - self.count, nbytes)

    def sample(self, index: int, *, runs: bool) -> None:
        """Adds up the bytes of both memories, while operator `index` waits or runs."""
        operator = index % self.count
        for tensor in [tensor for tensor, transfer in self.offloading.items() if transfer.has_ended]:
            del self.offloading[tensor]
            self.away.add(tensor)
        for tensor in [tensor for tensor, transfer in self.prefetching.items() if transfer.has_ended]:
            del self.prefetching[tensor]
            self.in_host.pop(tensor, None)
        gpu = 0
        for number, one in enumerate(self.profile.tensors):
            begin = -1 if one.allocated is None else one.allocated
            end = self.count if one.freed is None else one.freed
            if begin <= (operator if runs else operator - 1) and operator <= end and number not in self.away:
                gpu += one.nbytes
        if index >= self.count:
            self.gpu_peak, self.host_peak = max(self.gpu_peak, gpu), max(self.host_peak, sum(self.in_host.values()))

    def advance(self, index: int, seconds: float, *, runs: bool = False) -> None:
        """Passes time in pieces, at whose ends transfers end."""
        while seconds > 0:
            ends = [end for way in self.ways.values() for end in way.ends() if end > 1e-12]
            piece = min([seconds, *ends])
            self.sample(index, runs=runs)
            for way in self.ways.values():
                way.advance(piece)
            self.now += piece
            seconds -= piece
            self.sample(index, runs=runs)

    def run(self) -> SlowStep:
        """Simulates two steps, and returns the second one."""
        count, begin = self.count, 0.0
        out, into = self.ways["out"], self.ways["in"]
        before: dict[tuple[Direction, str], float] = {}
        for index in range(2 * count):
            if index == count:
                begin, before = self.now, self.carried()
            self.begin_offloads(index)
            self.sample(index, runs=False)
            self.advance(index, out.seconds_until(index))
            out.finish(index)
            self.sample(index, runs=False)
            self.begin_prefetches(index)
            self.advance(index, into.seconds_until(index))
            into.finish(index)
            self.sample(index, runs=False)
            self.use(index)
            self.sample(index, runs=True)
            self.advance(index, self.profile.operator_seconds[index % count], runs=True)
        carried = {key: nbytes - before[key] for key, nbytes in self.carried().items()}
        return SlowStep(self.now - begin, carried, self.gpu_peak, self.host_peak)

    def carried(self) -> dict[tuple[Direction, str], float]:
        return {(name, carrier): way.carried[carrier] for name, way in self.ways.items() for carrier in way.rates}

    def begin_offloads(self, index: int) -> None:
        """The operator before `index` has ended. The first step has only offloads that it has begun itself."""
        for one in self.migrations:
            if (one.after + 1) % self.count == index % self.count and index:
                due, nbytes = index + one.absent_from - one.after - 1, self.profile.tensors[one.tensor].nbytes
                assert one.tensor not in self.prefetching and one.tensor not in self.away
                self.offloading[one.tensor] = self.ways["out"].add(one.tier, due, nbytes)
                if one.tier == "host":
                    self.in_host[one.tensor] = nbytes

    def begin_prefetches(self, index: int) -> None:
        for one in self.migrations:
            if one.absent_until % self.count == index % self.count:
                due, nbytes = index + one.before - one.absent_until, self.profile.tensors[one.tensor].nbytes
                if index >= self.count:
                    assert one.tensor in self.away
                self.away.discard(one.tensor)
                self.prefetching[one.tensor] = self.ways["in"].add(one.tier, due, nbytes)

    def use(self, index: int) -> None:
        """Operator `index` begins: the tensors that it uses are on the GPU."""
        operator = index % self.count
        for number, one in enumerate(self.profile.tensors):
            if one.allocated == operator:
                self.away.discard(number)
                self.offloading.pop(number, None)
            if operator in one.uses and index >= self.count:
                assert number not in self.away and number not in self.prefetching and number not in self.offloading


def slow_step(profile: LifetimeProfile, machine: MigrationMachine, migrations: Sequence[Migration]) -> SlowStep:
    """Returns the step of `simulate_migrations`, with each operator as an event, and each tensor followed."""
    return _SlowSimulation(profile, machine, migrations).run()
