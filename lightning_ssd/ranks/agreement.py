"""Whether all ranks train the same model with the same optimizers and settings."""

import json
from collections.abc import Sequence
from itertools import zip_longest

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
    content = ranks.messages.broadcast(json.dumps(items).encode())
    if ranks.values is not None:
        content = ranks.values.exchange(content)[0]
    lines = [[": ".join(item) for item in of_rank] for of_rank in (json.loads(content), items)]
    pairs = zip_longest(*lines, fillvalue="nothing more")
    difference = next((f"{first!r} on rank 0, {own!r}" for first, own in pairs if first != own), "")
    for rank, text in enumerate(ranks.exchange(difference[:10_000].encode())):
        if text:
            raise RankError(
                f"rank 0 and rank {rank} train differently: {text.decode(errors='replace')} on rank {rank}. Build the "
                "same model, optimizers and Trainer on all ranks."
            )
