"""The kernel in adam.c with the roundings of torch's implementations of Adam and AdamW on a CPU.

torch has three implementations: a for-loop over parameters, foreach, and a fused kernel. On a CPU the first two call
the same operators. The roundings of an operator depend on the build of torch and on the processor (vector width, fused
multiply-add, MKL's square root). So a kernel is used only if it reproduces the bits of torch's own function on this
machine; else torch's function is called.

Moments that are stored in bf16 or 8 bits (`state_format`) have no bits of torch's to reproduce: any kernel steps them,
with the roundings of torch's fused kernel, and without a compiler `rounded_step` has the same bits.
"""

import ctypes
import functools
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from lightning_ssd.device import available_cores, kernel_threads
from lightning_ssd.model_states.optimizers.adam_c import KernelArguments, KernelSettings, KernelSource, adam_library
from lightning_ssd.model_states.optimizers.rank_mean import RankMean
from lightning_ssd.model_states.stores import MomentFormat, code_table

log = logging.getLogger(__name__)

Implementation = Literal["for-loop", "foreach", "fused"]

ITEM = 2**15
"""Elements that a thread steps at a time, as in adam.c; a multiple of every vector width."""

_FORMATS: Sequence[MomentFormat] = ("fp32", "bf16", "8bit")
"""Formats of moments in the order of their numbers in adam.c."""


class ElementSpan(NamedTuple):
    """Neighbouring elements of one parameter.

    Attributes:
        start: number of the first one in the flat parameter.
        numel: number of elements.
        first: number of the first one in the parameter.
        random_key: key of the random numbers by which states of the parameter are rounded.
    """

    start: int
    numel: int
    first: int = 0
    random_key: int = 0


def implementation_of(options: Mapping[str, Any], device: torch.device) -> Implementation:
    """Returns torch's implementation for a parameter group.

    Args:
        options: the settings of the group, with `fused` and `foreach` as in `torch.optim.Adam` and `SGD`.
        device: device of the parameters in the user's optimizer. A CPU reproduces the last digits of no GPU
            implementation, so that "fused", the fastest one, is returned for a GPU.
    """
    if device.type != "cpu" or options["fused"]:
        return "fused"
    return "foreach" if options["foreach"] else "for-loop"  # torch's default on a CPU


class KernelOutputs(IntFlag):
    """Arrays that a step stores: the flags of `parts` in adam.c."""

    WEIGHTS = 1
    MASTERS = 2
    MOMENTS = 4
    ALL = 7


class StoreTrial:
    """Chooses the store instructions of steps that write to a second version: ordinary, or past the caches.

    The faster kind depends on the processor and on the number of threads. So early steps alternate between both kinds,
    under the memory traffic of the training, and later ones use the faster kind. The bits are the same. The first step
    that stores to an array is not counted, as it may wait until the system has mapped the array's memory.

    Threads: any, without a lock: a race makes a step slower at most.
    """

    LEAST = 2**20
    """Least number of elements of a step that is too large for the caches."""
    TRIALS = 8
    """Steps that try each kind."""

    def __init__(self) -> None:
        self._rates: dict[bool, list[float]] = {False: [], True: []}
        self._stored: set[int] = set()
        """Addresses of arrays that steps have stored to, until the trial is complete."""

    def choose(self) -> bool:
        """Returns whether the next step stores past the caches."""
        ordinary, past = self._rates[False], self._rates[True]
        if len(ordinary) < self.TRIALS or len(past) < self.TRIALS:
            return len(past) < len(ordinary)
        return statistics.median(past) > statistics.median(ordinary)

    def note(self, past_caches: bool, rate: float, arrays: Sequence[int]) -> None:
        """Records the rate of a step, elements per second, until the trial is complete.

        `arrays` are the addresses to which the step has stored.
        """
        if len(self._rates[past_caches]) >= self.TRIALS:
            return
        if not self._stored.issuperset(arrays):
            self._stored.update(arrays)
            return
        self._rates[past_caches].append(rate)
        if len(self._rates[past_caches]) == self.TRIALS == len(self._rates[not past_caches]):
            self._stored.clear()
            medians = {name: statistics.median(self._rates[past]) / 1e9 for name, past in _NAMES.items()}
            log.info("steps to a second version, 1e9 parameters/s: %s", medians)


_NAMES = {"ordinary stores": False, "stores past the caches": True}

STORE_TRIAL = StoreTrial()
"""The trial that all steps of this process share."""


@dataclass(frozen=True)
class AdamKernel:
    """The functions of adam.c with one kind of roundings.

    Attributes:
        root: address of the square-root function; None: roots are rounded to the nearest number.
        width: elements of a vector of torch's fused kernel; elements of a parameter that fill none are its tail.
    """

    library: ctypes.CDLL
    root: int | None
    width: int

    def items(self, spans: Iterable[ElementSpan]) -> Tensor:
        """Returns the work on elements of parameters: rows of the fields of `Item` in adam.c."""
        rows: list[tuple[int, ...]] = []
        for start, numel, first, random_key in spans:
            end = start + numel
            tail = end - numel % self.width
            for low in range(start, end, ITEM):
                high = min(low + ITEM, end)
                rows.append((low, min(tail, high), high, first + low - start, random_key))
        return torch.tensor(rows, dtype=torch.int64)

    def call(
        self,
        name: str,
        items: Tensor,
        arrays: Sequence[Tensor],
        settings: KernelSettings,
        parts: KernelOutputs = KernelOutputs.ALL,
        moments: MomentFormat = "fp32",
        scales: Sequence[Tensor] = (),
        mean: RankMean | None = None,
    ) -> "KernelCall":
        """Returns the call of a function of adam.c that makes a step.

        Args:
            items: as `items` returns them.
            arrays: array arguments of the function, in order; without the gradient, if that is `mean`.
            settings: as `settings_of` returns them.
            parts: arrays that the step stores.
            moments: format of the moments.
            scales: of moments in 8 bits, the scales of both, and of both in the version that the step stores.
            mean: the gradient, computed by the step, of a function whose gradient is in fp32.
        """
        settings.root = self.root
        settings.parts = parts
        settings.moments = _FORMATS.index(moments)
        if scales:
            first, second, new_first, new_second = (values.data_ptr() for values in scales)
            settings.scales_in[:], settings.scales[:] = (first, second), (new_first, new_second)
            settings.codes[:] = [code_table(signed=signed).data_ptr() for signed in (True, False)]
        table = None
        if mean is not None:
            assert name.endswith("fp32")
            table = mean.table()
            settings.sources, settings.num_sources, settings.share = ctypes.addressof(table), len(table), mean.share
        function = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        addresses = (ctypes.c_void_p * 9)(*[array.data_ptr() for array in arrays])
        arguments = KernelArguments(function, items.size(0), items.data_ptr(), addresses, settings)
        return KernelCall(self.library, arguments, (items, *arrays, *scales), (mean, table))


@dataclass(frozen=True)
class KernelCall:
    """A call of a function of adam.c that is to be made.

    Attributes:
        tensors: the work list and the arrays whose addresses are in `arguments`; this object keeps them alive.
        gradients: gradients of several ranks, and the table of their addresses, kept alive, too.
    """

    library: ctypes.CDLL
    arguments: KernelArguments
    tensors: tuple[Tensor, ...]
    gradients: tuple[RankMean | None, "ctypes.Array[KernelSource] | None"]

    @property
    def numel(self) -> int:
        """Elements of an array."""
        return self.tensors[1].numel()

    @property
    def target(self) -> int:
        """Address of the array to which new compute weights are stored."""
        return int(self.arguments.arrays[4])

    @property
    def may_pass_caches(self) -> bool:
        """Whether new values replace no old ones, and are too many for the caches."""
        return self.arguments.arrays[0] != self.target and self.numel >= STORE_TRIAL.LEAST


def make_calls(calls: Sequence[KernelCall]) -> None:
    """Makes calls one after the other, without waiting for Python's lock between them."""
    if not calls:
        return
    passing = [call for call in calls if call.may_pass_caches]
    past_caches = bool(passing) and STORE_TRIAL.choose()
    for call in passing:
        call.arguments.settings.past_caches = past_caches
    arguments = (KernelArguments * len(calls))(*[call.arguments for call in calls])
    begun = perf_counter()
    calls[0].library.adam_calls(ctypes.c_int64(len(calls)), arguments)
    if len(passing) == len(calls):
        rate = sum([call.numel for call in calls]) / (perf_counter() - begun)
        STORE_TRIAL.note(past_caches, rate, [call.target for call in calls])


def settings_of(
    options: Mapping[str, Any], implementation: Implementation, step: int, scale: float
) -> KernelSettings | None:
    """Returns the numbers of one step, each computed as torch computes it, or None for options adam.c does not know.

    Args:
        implementation: implementation of torch whose roundings are reproduced.
        step: steps of the parameters after this one.
    """
    (beta1, beta2), lr, decay = options["betas"], options["lr"], options["weight_decay"]
    if options["amsgrad"] or isinstance(beta1, Tensor) or isinstance(beta2, Tensor) or isinstance(decay, Tensor):
        return None
    if options["differentiable"] or options["capturable"]:
        return None
    if isinstance(lr, Tensor):  # the for-loop computes with the tensor
        lr = lr.item() if implementation == "fused" else lr.squeeze()
    correction = 1 - beta2**step
    root = math.sqrt(correction) if implementation == "fused" else correction**0.5
    return KernelSettings(
        scale=-scale if options["maximize"] else scale,
        decay=1 - lr * decay if options["decoupled_weight_decay"] or not decay else decay,
        lerp=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        correction=root,
        reciprocal=1 / root,
        eps=options["eps"],
        step_size=-(lr / (1 - beta1**step)),
        decoupled=options["decoupled_weight_decay"] or not decay,
        step=step,
        threads=kernel_threads(available_cores(), torch.get_num_threads()),
    )


def torchs_step(
    options: Mapping[str, Any], weights: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int
) -> None:
    """Makes a step of one fp32 parameter, or of a part of it, with torch's own function, which changes weights and
    states in place. `step` counts the steps of the parameter after this one.
    """
    with torch.no_grad():
        adam(
            [weights],
            [gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if options["amsgrad"] else [],
            [torch.tensor(float(step - 1), dtype=torch.float32)],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            **{name: options[name] for name in _PASSED},
        )


def follows_torch(settings: KernelSettings) -> bool:
    """Returns whether adam.c computes the first moment as torch does, which uses another formula from 0.5 on."""
    return bool(settings.lerp < 0.5)


def rounded_step(
    weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], settings: KernelSettings
) -> tuple[Tensor, Tensor]:
    """Makes a step of fp32 weights in place, with the bits of adam.c without a square-root function and tails.

    Args:
        moments: both moments before the step, fp32.
        settings: as `settings_of` returns them.

    Returns:
        Both moments after the step, fp32.
    """
    m, v = moments
    gradient = gradient * settings.scale
    if not settings.decoupled:
        gradient = _fused(weights, settings.decay, gradient)
    first = _fused(gradient - m, settings.lerp, m)
    second = _fused(gradient * settings.one_minus_beta2, gradient, v * settings.beta2)
    if settings.decoupled:
        weights.mul_(settings.decay)
    root = second.double().sqrt().float()  # rounded to the nearest number, which torch's fp32 roots are not
    weights.add_(first * settings.step_size / _fused(root, settings.reciprocal, torch.full_like(root, settings.eps)))
    return first, second


def _fused(one: Tensor, other: Tensor | float, added: Tensor) -> Tensor:
    """Returns one * other + added of fp32 tensors, rounded once.

    The product is exact in fp64. The sum is rounded to odd there: to the neighbour whose last bit is 1, unless it is
    exact. So rounding that to fp32 gives the nearest number of the sum itself.
    """
    product, term = one.double() * other, added.double()
    total = product + term
    part = total - product
    error = (product - (total - part)) + (term - part)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return (bits + torch.where(inexact, away, 0)).view(torch.float64).float()


_PASSED = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "amsgrad", "lr",
           "weight_decay", "eps", "maximize")  # fmt: skip


@functools.cache
def exact_kernel(implementation: Implementation) -> AdamKernel | None:
    """Returns a kernel that gives the bits of torch's `implementation` on this machine, or None."""
    if (library := adam_library()) is None:
        return None
    if implementation == "fused":
        kernels = [AdamKernel(library, None, width) for width in (8, 16, 4, 1)]
    else:
        roots = dict.fromkeys((_mkl_root(), None))
        kernels = [AdamKernel(library, root, 1) for root in roots]
    for kernel in kernels:
        if _gives_torchs_bits(kernel, implementation):
            return kernel
    log.warning(
        "adam.c does not give the bits of torch's %s implementation on this processor: Adam and AdamW are stepped by "
        "torch's own function, which takes more passes",
        implementation,
    )
    return None


def any_kernel() -> AdamKernel | None:
    """Returns the fastest kernel, for steps whose last digits no CPU reproduces."""
    library = adam_library()
    return None if library is None else AdamKernel(library, None, 1)


def _mkl_root() -> int | None:
    """Returns the address of the square root that torch's `Tensor.sqrt` calls where it was built with MKL."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(path)).vmsSqrt, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


CHECKED_OPTIONS: dict[str, Any] = {
    "betas": (0.9, 0.999), "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    "capturable": False, "differentiable": False,
}  # fmt: skip
"""Options of the steps by which kernels are compared with torch's functions, and with each other."""


def _gives_torchs_bits(kernel: AdamKernel, implementation: Implementation) -> bool:
    """Steps parameters of many lengths with both, and compares all numbers."""
    lengths = [*range(1, 40), 100, 1023, 4099]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    numel = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    for decoupled in (True, False):
        kind = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
        options = CHECKED_OPTIONS | kind | {"decoupled_weight_decay": decoupled}
        # The dtype is explicit, because the training thread may have changed the default.
        weights = torch.randn(numel, generator=generator, dtype=torch.float32)
        ours = [weights, torch.zeros_like(weights), torch.zeros_like(weights)]
        torchs = [array.clone() for array in ours]
        for step in (1, 2, 3):
            gradient = torch.randn(numel, generator=generator, dtype=torch.float32)
            settings = settings_of(options, implementation, step, 1.0)
            assert settings is not None
            given = (ours[0], ours[0], *ours[1:])
            items = kernel.items(map(ElementSpan, starts, lengths))
            make_calls([kernel.call("adam_fp32", items, (*given, *given, gradient), settings)])
            for start, length in zip(starts, lengths, strict=True):
                weight, first, second = (array[start : start + length] for array in torchs)
                states = {"exp_avg": first, "exp_avg_sq": second}
                torchs_step(options, weight, gradient[start : start + length], states, step)
        if not all(torch.equal(one, other) for one, other in zip(ours, torchs, strict=True)):
            return False
    return True
