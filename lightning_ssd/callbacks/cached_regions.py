"""`CachedRegions`: the plan of a training with compiled code, as it is stored for later trainings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from lightning_ssd.callbacks.plan_key import MEMORY_TOLERANCE
from lightning_ssd.planning import StoragePlan, check_not_negative, check_positive

__all__ = ["CachedRegions"]

_NUMBERS = ("memory_budget", "seconds", "gpu_bytes", "host_bytes")


@dataclass(frozen=True)
class CachedRegions:
    """The fastest rule of a training with compiled code.

    Attributes:
        plan: plan of saved storages; `None`: those without room are offloaded, evenly spread over the forward.
        memory_budget: `activation_memory_budget` of compiled code; 1: the user's.
        seconds: measured duration of a step.
        gpu_bytes: bytes of the device that the training might use.
        host_bytes: bytes of host memory that the training might use for activations.
    """

    plan: StoragePlan | None
    memory_budget: float
    seconds: float
    gpu_bytes: float
    host_bytes: int

    def has_less_memory(self, gpu_bytes: float, host_bytes: int) -> bool:
        """Returns whether the training had so much less memory than there is now that another rule may be faster."""
        return gpu_bytes > MEMORY_TOLERANCE * self.gpu_bytes or host_bytes > MEMORY_TOLERANCE * self.host_bytes

    @classmethod
    def from_content(cls, content: Mapping[Any, Any]) -> Self:
        """Returns the entry of a file's content. Raises ValueError if it is not one."""
        for name in _NUMBERS:
            if isinstance(content.get(name), bool) or not isinstance(content.get(name), int | float):
                raise ValueError(f"`{name}` must be a number")
            check_not_negative(name, content[name])
        check_positive("seconds", content["seconds"])
        if not 0 < content["memory_budget"] <= 1:
            raise ValueError("`memory_budget` must be above 0, and at most 1")
        plan = content.get("plan")
        return cls(None if plan is None else StoragePlan.from_content(plan), *(content[name] for name in _NUMBERS))

    def to_content(self) -> dict[str, Any]:
        """Returns the content of a file."""
        return asdict(self) | {"plan": None if self.plan is None else self.plan.to_content()}
