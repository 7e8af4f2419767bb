"""Whether all ranks train the same model with the same optimizers and settings."""

import hashlib
from collections.abc import Sequence

from lightning_ssd.ranks.messages import RankError
from lightning_ssd.ranks.ranks import Ranks


def check_agreement(ranks: Ranks, items: Sequence[tuple[str, str]]) -> None:
    """Raises an error on all ranks if they differ in an item; called by all ranks.

    Args:
        ranks: messages of this rank.
        items: names and values, in the same order on all ranks.

    Raises:
        RankError: the first difference, by name, with two values and their ranks.
    """
    if _agree(ranks, items, len(items)):
        return
    # The first items that differ are between the most that are known to agree, and the fewest that are known not to.
    same, different = 0, min(int(length) for length in ranks.exchange(str(len(items)).encode())) + 1
    while different - same > 1:
        middle = (same + different) // 2
        if _agree(ranks, items, middle):
            same = middle
        else:
            different = middle
    own = ": ".join(items[same]) if same < len(items) else "nothing more"
    found = [text.decode() for text in ranks.exchange(own[:10_000].encode())]
    other = next(rank for rank, text in enumerate(found) if text != found[0])
    raise RankError(
        f"rank 0 and rank {other} train differently: {found[0]!r} on rank 0, {found[other]!r} on rank {other}. Build "
        "the same model, optimizers and Trainer on all ranks."
    )


def _agree(ranks: Ranks, items: Sequence[tuple[str, str]], number: int) -> bool:
    """Returns whether the first items are the same on all ranks."""
    return len(set(ranks.exchange(hashlib.sha256(repr(items[:number]).encode()).digest()))) == 1
