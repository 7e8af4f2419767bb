"""adam.cu, compiled for the CPU: the arithmetic is that of adam.c, bit for bit."""

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.model_states.optimizers import adam_cuda
from lightning_ssd.model_states.optimizers.adam import any_kernel, make_calls
from lightning_ssd.model_states.optimizers.adam_cuda import FUNCTIONS, MOMENTS, gives_bits_of
from lightning_ssd.model_states.optimizers.rounding import step_keys

SHIMS = """
#include <math.h>
#include <string.h>
#define __device__
#define __global__
#define __forceinline__ inline
static struct { unsigned x; } gridDim = {1}, blockDim = {1}, blockIdx = {0}, threadIdx = {0};
static inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
"""


class OnCPU:
    """The functions of adam.cu, with one thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def step(self, name: str, spans: Any, arrays: Any, settings: Any, moments: str) -> None:
        function = getattr(self._library, f"{name}_moments_{moments}")
        for start, numel, first, random_key in spans:
            keys = map(ctypes.c_uint32, step_keys(random_key, settings.step))
            addresses = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
            function(ctypes.c_int64(start), ctypes.c_int64(numel), ctypes.c_uint32(first), *keys, *addresses, settings)


def test_the_kernels_of_the_gpu_round_as_those_of_the_cpu(tmp_path: Path) -> None:
    compiler, cpu = shutil.which("g++"), any_kernel()
    if compiler is None or cpu is None:
        pytest.skip("there is no C++ compiler")
    source, library = tmp_path / "adam.cpp", tmp_path / "adam.so"
    source.write_text(SHIMS + adam_cuda.SOURCE.read_text())
    subprocess.run(
        [compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    kernel: Any = OnCPU(ctypes.CDLL(str(library)))
    for kind in product(FUNCTIONS, MOMENTS):
        assert gives_bits_of(kernel, cpu, *kind, torch.device("cpu")), kind


def test_other_roundings_are_found() -> None:
    if (cpu := any_kernel()) is None:
        pytest.skip("there is no C compiler")

    class Other:
        def step(self, name: str, spans: Any, arrays: Any, settings: Any, moments: Any) -> None:
            settings.lerp *= 1.0001
            make_calls([cpu.call(name, cpu.items(spans), (*arrays[:4], *arrays), settings, moments=moments)])

    kernel: Any = Other()
    kinds = product(FUNCTIONS, MOMENTS)
    assert not any(gives_bits_of(kernel, cpu, *kind, torch.device("cpu")) for kind in kinds)
