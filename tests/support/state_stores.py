"""A flat parameter with its store in host memory or on an SSD, outside of any training."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_ssd.device import CPUCopyEngine
from lightning_ssd.model_states.placement.state_storage import make_store
from lightning_ssd.model_states.stores.buffers import StateStaging
from lightning_ssd.model_states.stores.layout import Layout, StagedState
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.units.flat import FlatParameter
from lightning_ssd.storage import Backend, BlobStore, PosixBackend
from lightning_ssd.types import OffloadTierName

CPU = torch.device("cpu")
STATES = ("exp_avg", "exp_avg_sq")
Tiers = tuple[OffloadTierName, OffloadTierName]


def make_layout(versions: int, dtype: torch.dtype = torch.float32, *, split: bool = False) -> Layout:
    """Returns the layout of two small parameters that Adam steps."""
    parameters = [("first", nn.Parameter(torch.zeros(5, 3))), ("second", nn.Parameter(torch.zeros(70)))]
    return Layout(FlatParameter("flat", parameters, dtype, CPU), split, STATES, steps=True, versions=versions)


@contextlib.contextmanager
def scratch_space(path: Path, backend: Backend | None = None, staging: int = 8192) -> Iterator[StateStaging]:
    """Yields scratch space in `path` that stages one flat parameter of `make_layout` at a time, in `staging` bytes."""
    store = BlobStore([path], device=CPU, backend=backend or PosixBackend())
    scratch = StateStaging.make(store, staging // 2, staging, pin=False)
    try:
        yield scratch
    finally:
        scratch.close()


@contextlib.contextmanager
def open_store(
    path: Path, tiers: Tiers, layout: Layout, backend: Backend | None = None, staging: int = 8192
) -> Iterator[tuple[StateStore, StateStaging]]:
    """Yields a store with random weights, and its scratch space."""
    with scratch_space(path, backend, staging) as scratch, contextlib.ExitStack() as undo:
        store = make_store(layout, tiers, scratch, CPUCopyEngine(CPU), undo)
        undo.pop_all()
        undo.callback(store.buffers.free)
        store.assign(weights_of(layout))
        yield store, scratch


def weights_of(layout: Layout, seed: int = 0) -> list[Tensor]:
    """Returns random fp32 weights of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(item.shape, generator=generator) for item in layout.flat.param_views]


def arrays_of(staged: StagedState) -> list[Tensor]:
    """Returns all staged values."""
    arrays = (staged.weights, staged.master, staged.low, *staged.states.values(), *staged.scales.values())
    return [values for values in arrays if values is not None]


def masters_of(store: StateStore) -> list[Tensor]:
    """Returns the stored master weights of all parameters."""
    staged = store.stage().result(timeout=60)
    whole = staged.masters()
    found = [item.of(whole).clone() for item in store.flat.param_views]
    store.unstage(staged, changed=False)
    return found
