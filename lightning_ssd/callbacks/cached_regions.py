"""`CachedRegions`: the plan of a training with compiled code, as it is stored for later trainings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from lightning_ssd.callbacks.plan_cache import parse_number
from lightning_ssd.planning import StoragePlan, check_positive

__all__ = ["CachedRegions"]


@dataclass(frozen=True)
class CachedRegions:
    """The fastest rule of a training with compiled code.

    Attributes:
        plan: plan of saved storages; `None`: those without room are offloaded, evenly spread over the forward.
        memory_budget: `activation_memory_budget` of compiled code; 1: the user's.
        seconds: measured duration of a step.
        gpu_bytes: bytes of the device that the training might use.
        host_bytes: bytes of host memory that the training might use for activations.
        spare_bytes: bytes of memory that the plan has beside the room, as `MeasuredPeaks` has them.
    """

    plan: StoragePlan | None
    memory_budget: float
    seconds: float
    gpu_bytes: float
    host_bytes: float
    spare_bytes: float

    @classmethod
    def from_content(cls, content: Mapping[Any, Any]) -> Self:
        """Returns the entry of a file's content. Raises ValueError if it is not one."""
        names = ("memory_budget", "seconds", "gpu_bytes", "host_bytes", "spare_bytes")
        memory_budget, seconds, *memory = (parse_number(content, name) for name in names)
        check_positive("seconds", seconds)
        if not 0 < memory_budget <= 1:
            raise ValueError("`memory_budget` must be above 0, and at most 1")
        plan = content.get("plan")
        stored = None if plan is None else StoragePlan.from_content(plan)
        return cls(stored, memory_budget, seconds, *memory)

    def to_content(self) -> dict[str, Any]:
        """Returns the content of a file."""
        return asdict(self) | {"plan": None if self.plan is None else self.plan.to_content()}
