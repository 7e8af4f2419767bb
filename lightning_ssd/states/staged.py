"""Flats whose values are staged on the host for code outside of a forward: state dicts, and operators on weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ssd.states.flat import Flat
from lightning_ssd.states.home import Home, Opened


@dataclass
class StagedFlat:
    """The values of one flat on the host.

    Attributes:
        values: all of them.
        masters: fp32 master weights, `flat.numel` of them; what is written there counts if `changed`.
        changed: whether master weights or optimizer states were written.
    """

    values: Opened
    masters: Tensor
    changed: bool = False


class StagedFlats:
    """The flats that are staged at present: those of one access, and of the next one if it wants the same.

    Staging memory is held until `unstage`, which is therefore called before anything waits for a step, and before
    weights are fetched. The values are the caller's from `stage` until then.

    Threads: the training thread, and autograd's while the training thread waits in `backward`.

    Args:
        homes: where the flats live.
        drain: returns when the step of a flat that has begun is made; raises RuntimeError if it can't be waited for.
    """

    def __init__(self, homes: Mapping[Flat, Home], drain: Callable[[Flat], None]) -> None:
        self._homes = homes
        self._drain = drain
        self._staged: dict[Flat, StagedFlat] = {}

    def stage(self, flat: Flat, *, keep: Collection[Flat] = ()) -> StagedFlat:
        """Returns the values of `flat`; other flats are given back, but those in `keep`."""
        self.unstage(keep={flat, *keep})
        if flat not in self._staged:
            self._drain(flat)
            values = self._homes[flat].open().result()
            with torch.inference_mode(False):
                self._staged[flat] = StagedFlat(values, values.masters())
        return self._staged[flat]

    def unstage(self, *, keep: Collection[Flat] = ()) -> None:
        """Gives staged flats back; what was changed there counts."""
        for flat in [flat for flat in self._staged if flat not in keep]:
            staged = self._staged.pop(flat)
            if flat.summoned:  # a `load_state_dict` that failed
                flat.summoned = False
                flat.attach()
            if staged.changed:
                staged.values.take(staged.masters)
            self._homes[flat].close(staged.values, changed=staged.changed)
