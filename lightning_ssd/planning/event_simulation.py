"""A discrete-event simulation of tasks on the resources of a machine."""

from heapq import heappop, heappush

from lightning_ssd.planning.hardware import HardwareProfile

COMPUTE, COPY_IN, COPY_OUT, SSD, CPU = range(5)
RESOURCES = ("compute", "copy_in", "copy_out", "ssd", "cpu")

URGENT, NORMAL = 0, 1
"""Priorities of tasks: URGENT for tasks that the GPU will wait for, NORMAL for all others."""


class Task:
    """Work for one resource, which begins after all tasks that it waits for have ended.

    Attributes:
        resource: COMPUTE, COPY_IN, COPY_OUT, SSD or CPU. Each resource runs one task at a time: the ready task of the
            highest priority, and among equals the one made first.
        amount: seconds for COMPUTE and CPU, bytes for the others.
        step: index of the training step.
        write: True if an SSD task writes.
        priority: URGENT or NORMAL.
        gpu: bytes of GPU memory allocated when the task begins (for COPY_IN: when it is ready), and freed when it ends.
        host: bytes of host memory allocated when the task begins, and freed when it ends.
        ssd: change of the bytes stored on SSDs when the task ends.
        waiting: number of tasks that have to end before this one begins.
        followers: tasks that wait for this one.
        number: number of the task in the order of creation.
        begin: begin of the task, seconds.
        end: end of the task, seconds.
    """

    __slots__ = (
        "amount", "begin", "end", "followers", "gpu", "host", "number", "priority", "resource", "ssd", "step",
        "waiting", "write",
    )  # fmt: skip
    begin: float
    end: float
    number: int

    def __init__(
        self,
        resource: int,
        amount: float,
        step: int,
        *after: "Task | None",
        write: bool = False,
        priority: int = NORMAL,
    ) -> None:
        self.resource = resource
        self.amount = amount
        self.step = step
        self.write = write
        self.priority = priority
        self.gpu = self.host = (0, 0)
        self.ssd = self.waiting = 0
        self.followers: list[Task] = []
        for task in after:
            if task is not None:
                task.followers.append(self)
                self.waiting += 1


class MemoryLog:
    """Bytes in use over time, as (seconds, GPU bytes, host bytes, SSD bytes) after each change."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]
        self._gpu = self._host = self._ssd = 0

    def add(self, now: float, gpu: int, host: int, ssd: int) -> None:
        """Records the change of the bytes in each tier at the time `now` (seconds)."""
        self._gpu += gpu
        self._host += host
        self._ssd += ssd
        self.samples.append((now, self._gpu, self._host, self._ssd))

    def peaks(self) -> tuple[int, int, int]:
        """Returns the most bytes that were in use: GPU, host and SSD bytes."""
        _, gpu, host, ssd = zip(*self.samples, strict=True)
        return max(gpu), max(host), max(ssd)


def run(tasks: list[Task], hardware: HardwareProfile) -> MemoryLog:
    """Runs all tasks, sets their `begin` and `end`, and returns the memory in use over time.

    The two copy directions share the link: the bandwidth of a copy changes whenever a copy in the other direction
    begins or ends. The path to the SSDs is half-duplex: one request runs at a time, at the bandwidth of mixed requests
    while a request of the other kind waits.
    """
    ready: list[list[tuple[int, int, Task]]] = [[] for _ in RESOURCES]
    running: list[Task | None] = [None] * len(RESOURCES)
    waiting_requests = [0, 0]  # SSD reads and writes that are ready
    alone, both = (0.0, hardware.copy_in, hardware.copy_out), (0.0, hardware.copy_in_both, hardware.copy_out_both)
    # For each copy direction: remaining bytes at the time `since`, bandwidth, and the version of its valid event.
    left, since, speed, version = [0.0] * 3, [0.0] * 3, [1.0] * 3, [0] * 3
    events: list[tuple[float, int, int, int]] = []  # seconds, order, resource, version
    order = 0
    memory = MemoryLog()
    now = 0.0

    def make_ready(task: Task) -> None:
        heappush(ready[task.resource], (task.priority, task.number, task))
        if task.resource == COPY_IN and task.gpu[0]:  # the host runs ahead and issues all copies that have room
            memory.add(now, task.gpu[0], 0, 0)
        if task.resource == SSD:
            waiting_requests[task.write] += 1

    def share_link() -> None:
        nonlocal order
        busy = running[COPY_IN] is not None and running[COPY_OUT] is not None
        for direction in (COPY_IN, COPY_OUT):
            if running[direction] is not None:
                left[direction] = max(0.0, left[direction] - speed[direction] * (now - since[direction]))
                since[direction] = now
                speed[direction] = both[direction] if busy else alone[direction]
                version[direction] += 1
                order += 1
                heappush(events, (now + left[direction] / speed[direction], order, direction, version[direction]))

    def begin_next(resource: int) -> None:
        nonlocal order
        task = heappop(ready[resource])[2]
        running[resource] = task
        task.begin = now
        gpu = 0 if resource == COPY_IN else task.gpu[0]
        if gpu or task.host[0]:
            memory.add(now, gpu, task.host[0], 0)
        if resource in (COPY_IN, COPY_OUT):
            left[resource], since[resource], speed[resource] = task.amount, now, alone[resource]
            share_link()
            return
        seconds = task.amount
        if resource == SSD:
            waiting_requests[task.write] -= 1
            rate = hardware.ssd_write if task.write else hardware.ssd_read
            seconds /= min(rate, hardware.ssd_mixed) if waiting_requests[not task.write] else rate
        order += 1
        heappush(events, (now + seconds, order, resource, 0))

    for number, task in enumerate(tasks):
        task.number = number
    for task in tasks:
        if not task.waiting:
            make_ready(task)
    for resource, tasks_of_resource in enumerate(ready):
        if tasks_of_resource:
            begin_next(resource)
    ended = 0
    while events:
        now, _, resource, number = heappop(events)
        if number and number != version[resource]:
            continue  # outdated: the copy's bandwidth has changed
        task = running[resource]  # type: ignore[assignment]
        running[resource] = None
        task.end = now
        ended += 1
        if task.gpu[1] or task.host[1] or task.ssd:
            memory.add(now, -task.gpu[1], -task.host[1], task.ssd)
        if number:
            share_link()
        for follower in task.followers:
            follower.waiting -= 1
            if not follower.waiting:
                make_ready(follower)
        for other, tasks_of_resource in enumerate(ready):
            if tasks_of_resource and running[other] is None:
                begin_next(other)
    assert ended == len(tasks), "tasks wait for each other in a circle"
    return memory
