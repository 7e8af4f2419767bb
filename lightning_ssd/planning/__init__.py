"""Numbers in, plan out: pure Python, no torch."""

from lightning_ssd.planning.ssdtrain import TierSpeed, offload_amounts

__all__ = ["TierSpeed", "offload_amounts"]
