"""The kernels in adam.cu, which give the bits of adam.c on a GPU; compiled at first use by NVRTC, a part of torch."""

import ctypes
import functools
import logging
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.optimizers.adam import (
    CHECKED_OPTIONS,
    AdamKernel,
    ElementSpan,
    make_calls,
    settings_of,
)
from lightning_ssd.model_states.optimizers.adam_c import KernelSettings
from lightning_ssd.model_states.optimizers.rounding import step_keys
from lightning_ssd.model_states.stores import MOMENT_DTYPES, MomentFormat

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("adam.cu")
THREADS = 256
"""Threads of a block."""
ITEMS = 4
"""Elements that a thread steps."""
MOMENTS: Sequence[MomentFormat] = ("fp32", "bf16")
"""Formats of moments that the GPU steps."""
FUNCTIONS = ("adam_fp32", "adam_whole_bf16", "adam_whole_fp32", "adam_split_bf16", "adam_split_fp32")


class CUDAAdamKernel:
    """The functions of adam.cu on one device.

    Threads: any, whose current device it is. Launches go to the thread's current stream.

    Args:
        device: the device, which is the thread's current one.

    Raises:
        RuntimeError: they can't be compiled or loaded.
        OSError: there is no NVRTC.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.current_stream().query()  # makes the device's context current on this thread
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        _check(self._driver.cuModuleLoadData(ctypes.byref(module), _compile(device)), "cuModuleLoadData")
        self._functions = {kind: ctypes.c_void_p() for kind in product(FUNCTIONS, MOMENTS)}
        for (name, moments), function in self._functions.items():
            symbol = f"{name}_moments_{moments}"
            result = self._driver.cuModuleGetFunction(ctypes.byref(function), module, symbol.encode())
            _check(result, "cuModuleGetFunction")

    def step(
        self,
        name: str,
        spans: Iterable[ElementSpan],
        arrays: Sequence[Tensor],
        settings: KernelSettings,
        moments: MomentFormat = "fp32",
    ) -> None:
        """Launches a step in place.

        Args:
            name: name of the function.
            spans: elements to step.
            arrays: weights, master weights or low halves, two moments, gradient: contiguous.
            settings: as `settings_of` returns them.
            moments: format of the moments.
        """
        stream = ctypes.c_void_p(internals.raw_stream(arrays[0].device.index))
        addresses = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
        for start, numel, first, random_key in spans:
            random = [ctypes.c_uint32(word & 0xFFFFFFFF) for word in (first, *step_keys(random_key, settings.step))]
            arguments = (ctypes.c_int64(start), ctypes.c_int64(numel), *random, *addresses, settings)
            parameters = (ctypes.c_void_p * len(arguments))(
                *(ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments)
            )
            blocks = -(-numel // (THREADS * ITEMS))
            launch: Any = self._driver.cuLaunchKernel
            shape = [ctypes.c_uint(size) for size in (blocks, 1, 1, THREADS, 1, 1, 0)]
            _check(launch(self._functions[name, moments], *shape, stream, parameters, None), "cuLaunchKernel")


@functools.cache
def cuda_kernel(device: torch.device, cpu: AdamKernel) -> CUDAAdamKernel | None:
    """Returns the kernel for a device if it gives the bits of the CPU's, or None; the log gives the reason."""
    with torch.cuda.device(device):
        try:
            kernel = CUDAAdamKernel(device)
            exact = all(gives_bits_of(kernel, cpu, *kind, device) for kind in product(FUNCTIONS, MOMENTS))
        except (OSError, RuntimeError, AttributeError) as error:
            log.info("the CPU makes all steps of offloaded values: the GPU's kernel can't be used. %s", error)
            return None
    if exact:
        return kernel
    log.warning("adam.cu does not give the bits of adam.c on this machine: the CPU makes all steps of offloaded values")
    return None


def gives_bits_of(
    kernel: CUDAAdamKernel, cpu: AdamKernel, name: str, moments: MomentFormat, device: torch.device
) -> bool:
    """Steps random values with function `name` of both, and returns whether all bits are the same."""
    numel, weights, (_, form, of_gradient) = 5000, torch.bfloat16, (*name.split("_"), "fp32")[:3]
    kept = {"whole": torch.float32, "split": torch.int16}.get(form)
    if kept is None:
        weights = torch.float32
    generator = torch.Generator().manual_seed(0)
    for decoupled in (True, False):
        options = CHECKED_OPTIONS | {"decoupled_weight_decay": decoupled}
        ours = [torch.randn(numel, generator=generator, dtype=torch.float32).to(weights)]
        ours.append(ours[0] if kept is None else (1000 * torch.randn(numel, generator=generator)).to(kept))
        ours += [torch.zeros(numel, dtype=MOMENT_DTYPES[moments]) for _ in range(2)]
        theirs = [values.to(device, copy=True) for values in ours]
        if kept is None:
            theirs[1] = theirs[0]
        for step in (1, 2, 3):
            gradient = torch.randn(numel, generator=generator, dtype=torch.float32)
            gradient = gradient.to(torch.bfloat16) if of_gradient == "bf16" else gradient
            settings = settings_of(options, "fused", step, 0.7)
            assert settings is not None
            whole, *parts = (ElementSpan(low, high - low, low, 1) for low, high in ((0, numel), (0, 7), (7, numel)))
            make_calls([cpu.call(name, cpu.items([whole]), (*ours, *ours, gradient), settings, moments=moments)])
            kernel.step(name, parts, (*theirs, gradient.to(device)), settings, moments)
        if not all(torch.equal(one, other.cpu()) for one, other in zip(ours, theirs, strict=True)):
            return False
    return True


def _compile(device: torch.device) -> bytes:
    """Returns the binary of adam.cu for the device's architecture."""
    nvrtc = _nvrtc()
    major, minor = torch.cuda.get_device_capability(device)
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"adam.cu", 0, None, None), "nvrtcCreateProgram")
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false")
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    if result:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise RuntimeError(text.value.decode())
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    binary = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, binary), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _nvrtc() -> ctypes.CDLL:
    """Returns NVRTC of torch's version of CUDA: as the loader finds it, or from the packages beside torch.

    Raises:
        OSError: there is none.
    """
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    beside = sorted(Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}"))
    for path in (name, *map(str, beside)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(f"{name} was not found")


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call} failed with error {result}")
