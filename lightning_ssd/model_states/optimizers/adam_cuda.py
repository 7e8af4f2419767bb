"""The step of adam.c on a CUDA device, with the same bits: for optimizer states that are there for a while."""

import functools
import logging

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.optimizers.adam import CHECKED_OPTIONS, ElementSpan, any_kernel, make_calls, settings_of
from lightning_ssd.model_states.optimizers.adam_c import KernelSettings

log = logging.getLogger(__name__)

AdamValues = tuple[Tensor, Tensor, Tensor]
"""Master weights and both moments, fp32."""

_NUMBERS = ("scale", "decay", "lerp", "beta2", "one_minus_beta2", "correction", "eps", "step_size", "decoupled")
"""The fields of `KernelSettings` that a step needs, in the order of the kernel's parameters."""

# The functions that end with `_rn` round to nearest, and are never fused with others.
_STEP = """
template <typename T>
void adam(T g, T p, T m, T v, T scale, T decay, T lerp, T beta2, T one_minus_beta2, T correction, T eps, T step_size,
          T decoupled, T& new_p, T& new_m, T& new_v) {
    g = __fmul_rn(g, scale);
    if (decoupled != T(0))
        p = __fmul_rn(p, decay);
    else
        g = __fmaf_rn(p, decay, g);
    new_m = __fmaf_rn(lerp, __fsub_rn(g, m), m);
    new_v = __fmaf_rn(__fmul_rn(one_minus_beta2, g), g, __fmul_rn(v, beta2));
    T root = __fadd_rn(__fdiv_rn(__fsqrt_rn(new_v), correction), eps);
    new_p = __fadd_rn(p, __fdiv_rn(__fmul_rn(step_size, new_m), root));
}
"""


def cuda_step(gradient: Tensor, values: AdamValues, settings: KernelSettings) -> AdamValues:
    """Returns the values after a step, with the bits of adam.c.

    Args:
        gradient: fp32, on a CUDA device.
        values: those before the step, on the same device.
        settings: as `settings_of` returns them for torch's fused implementation.
    """
    numbers = {name: float(getattr(settings, name)) for name in _NUMBERS}
    masters, first, second = _kernel()(gradient, *values, **numbers)
    return masters, first, second


@functools.cache
def _kernel() -> internals.JitKernel:
    return internals.jit_kernel(_STEP, 3, _NUMBERS)


@functools.cache
def has_cuda_step(device: torch.device) -> bool:
    """Returns whether `cuda_step` gives the bits of adam.c on this machine."""
    kernel = any_kernel()
    if kernel is None:  # steps on the CPU call torch's functions
        return False
    generator = torch.Generator().manual_seed(0)
    numel = 2**16
    items = kernel.items([ElementSpan(0, numel)])
    for decoupled in (True, False):
        options = CHECKED_OPTIONS | {"fused": True, "foreach": False, "decoupled_weight_decay": decoupled}
        # Dtypes are explicit, because the training thread may have changed the default.
        host = torch.zeros(3, numel, dtype=torch.float32)
        masters, first, second = host.unbind()
        masters.normal_(generator=generator)
        ours: AdamValues = masters.to(device), first.to(device), second.to(device)
        for step in (1, 2, 3):
            gradient = torch.randn(numel, generator=generator, dtype=torch.float32)
            gradient[::7] *= 1e-30  # whose squares are no normal numbers
            settings = settings_of(options, "fused", step, 0.37)
            assert settings is not None
            try:
                ours = cuda_step(gradient.to(device), ours, settings)
            except RuntimeError as error:  # of the compiler
                log.info("optimizer states stay in host memory: torch compiles no kernel for them: %s", error)
                return False
            version = masters, masters, first, second  # whose compute weights are the master weights
            make_calls([kernel.call("adam_fp32", items, (*version, *version, gradient), settings)])
        if not torch.equal(torch.stack(ours).cpu(), host):
            log.info("optimizer states stay in host memory: the device steps them with other roundings than the CPU")
            return False
    return True
